"""Attention in large tiles, as GPUs take it, against one segment at once: what is seen, where
scores lie, rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned

from kvqjax.ops.attention import segment_attention
from kvqjax.ops.large_tiles import tile_attention

ROWS, LENGTH, KEYS, TILE = 3, 8, 48, 16


def operands(dtype: str = "float32"):
    """Queries of four heads, keys and values of two."""
    each = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(each[0], (ROWS, LENGTH, 4, 32))
    k, v = (jax.random.normal(key, (ROWS, KEYS, 2, 32)) for key in each[1:])
    return tuple(x.astype(dtype) for x in (q, k, v))


def by_tiles(q, k, v, seen):
    def read(j, carry):
        def part(x):
            return jax.lax.dynamic_slice_in_dim(x, j * TILE, TILE, 1)

        mask = jnp.broadcast_to(part(seen)[:, None], (ROWS, LENGTH, TILE))
        return part(k), part(v), mask, carry + 1

    found, carry = tile_attention(q, 2, read, 0, KEYS // TILE, jnp.int32(0))
    assert carry == KEYS // TILE
    return found


def wanted(q, k, v, seen):
    return segment_attention(q, k, v, jnp.broadcast_to(seen[:, None], (ROWS, LENGTH, KEYS)))


@pytest.mark.parametrize("scale", thinned([1.0, 60.0, 1e-3], 3))
def test_equals_one_segment(scale):
    """Rows that see all, a part that ends within a tile, and nothing; scores up to 1700, where
    peaks are rounded."""
    q, k, v = operands()
    seen = jnp.arange(KEYS)[None] < jnp.asarray([KEYS, 21, 0])[:, None]
    found, plain = (attend(scale * q, k, v, seen) for attend in (by_tiles, wanted))
    np.testing.assert_allclose(found.out, plain.out, atol=1e-5)
    np.testing.assert_allclose(found.lse, plain.lse, rtol=1e-6, atol=1e-5)
    assert np.isneginf(found.lse[2]).all()


def test_scores_far_below_zero_and_far_apart():
    """A tile whose scores are all below exp's range counts as much as another; the last tile holds
    the peak."""
    q, k, v = operands()
    q, k = (
        jnp.abs(q),
        -jnp.abs(k) * jnp.repeat(jnp.asarray([360.0, 160.0, 120.0]), TILE)[None, :, None, None],
    )
    seen = jnp.ones((ROWS, KEYS), bool)
    found, plain = by_tiles(q, k, v, seen), wanted(q, k, v, seen)
    assert plain.lse.max() < -100
    # Of a score; both of a weight's come from one.
    rounding = 2.0**-23 * float(jnp.abs(plain.lse).max())
    np.testing.assert_allclose(found.out, plain.out, atol=2 * rounding * float(jnp.abs(v).max()))
    np.testing.assert_allclose(found.lse, plain.lse, rtol=1e-6)


def test_what_is_not_seen_may_be_anything():
    q, k, v = operands()
    seen = jnp.arange(KEYS)[None] < jnp.asarray([KEYS, 21, 5])[:, None]
    spoilt = [jnp.where(seen[:, :, None, None], x, bad) for x, bad in ((k, jnp.inf), (v, jnp.nan))]
    found, plain = by_tiles(q, *spoilt, seen), by_tiles(q, k, v, seen)
    np.testing.assert_array_equal(found.out, plain.out)
    np.testing.assert_array_equal(found.lse, plain.lse)


def test_bfloat16_rounds_the_weights_alone():
    """Every weight is off by at most 2^-8 of itself, in its sum as in the sum of values: so the
    mean of values is off by at most twice that of the largest value, and the sum's logarithm by
    once."""
    q, k, v = operands("bfloat16")
    seen = jnp.arange(KEYS)[None] < jnp.asarray([KEYS, 21, 1])[:, None]
    found = by_tiles(q, k, v, seen)
    scaled = q * jnp.asarray(32**-0.5, q.dtype)  # in the inputs' dtype, as everywhere
    precise = wanted(
        scaled.astype(jnp.float32) * 32**0.5, k.astype(jnp.float32), v.astype(jnp.float32), seen
    )
    bound, slack = 2.0**-8, 1e-5
    np.testing.assert_array_less(
        jnp.abs(found.out - precise.out), 2 * bound * float(jnp.abs(v).max()) + slack
    )
    np.testing.assert_array_less(jnp.abs(found.lse - precise.lse), bound + slack)
    assert float(jnp.abs(found.out - precise.out).max()) > slack  # it was not float32
