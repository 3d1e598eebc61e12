"""JAX's splash attention for prompts and chunks, in the interpreter, against the plain path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.attention import segment_attention
from kvqjax.pallas_kernels.splash import Blocks, block_sizes, fits, seen_blocks, splash_attention


def random(*shape: int, seed: int = 0):
    return jax.random.normal(jax.random.key(seed), shape)


# queries, keys, first query's position, sliding window, head_dim, rows
@pytest.mark.parametrize(
    ("length", "keys", "start", "sliding", "dim", "batch"),
    [
        (128, 384, 0, None, 128, 2),
        (256, 512, 256, None, 64, 1),
        (128, 512, 300, 100, 96, 2),
        (128, 256, 100, 130, 256, 1),
        (128, 256, -40, None, 128, 1),  # the first 40 queries see nothing
        (128, 256, -40, 20, 64, 2),
        (128, 256, -500, None, 64, 1),  # none does
        (128, 128, 4000, None, 64, 1),  # every query sees every key
    ],
)
def test_equals_the_plain_path(length, keys, start, sliding, dim, batch):
    q, k, v = random(batch, length, 4, dim), random(batch, keys, 2, dim, seed=1), random(batch, keys, 2, dim, seed=2)
    newest = jnp.maximum(start + jnp.arange(length), -1)
    key = jnp.arange(keys)[None]
    mask = key <= newest[:, None]
    mask = mask if sliding is None else mask & (key > newest[:, None] - sliding)
    wanted = segment_attention(q, k, v, jnp.broadcast_to(mask[None], (batch, length, keys)))
    by_head = (x.swapaxes(1, 2).reshape(-1, keys, dim) for x in (k, v))
    found = jax.jit(splash_attention, static_argnums=(4, 5))(q, *by_head, newest, sliding, True)
    np.testing.assert_allclose(found.out, wanted.out, atol=1e-5)
    np.testing.assert_allclose(found.lse, wanted.lse, atol=1e-5)


def test_one_program_for_every_offset():
    traced = []

    @jax.jit
    def attend(q, k, v, newest):
        traced.append(None)
        return splash_attention(q, k, v, newest, interpret=True)

    q, k = random(1, 128, 2, 64), random(1, 256, 64)
    for start in (0, 77, 128):
        attend(q, k, k, start + jnp.arange(128))
    assert len(traced) == 1


def test_blocks_that_no_query_sees_are_left_out():
    blocks = Blocks(128, 256, 128)
    newest = jnp.concatenate([jnp.arange(600, 728), jnp.full(128, -1)])
    first, last = seen_blocks(newest, 2048, blocks, None)
    np.testing.assert_array_equal(first, [0, 0])
    np.testing.assert_array_equal(last, [3, 0])
    first, last = seen_blocks(newest, 2048, blocks, 64)
    np.testing.assert_array_equal(first, [2, 0])
    np.testing.assert_array_equal(last, [3, 0])


def test_what_has_no_blocks_of_whole_lanes_has_no_kernel():
    assert block_sizes(2048, 32768) == Blocks(1024, 2048, 1024)
    assert fits(512, 640, 64)
    assert not fits(500, 640, 64)
    assert not fits(512, 100, 64)
    assert not fits(512, 640, 80)
