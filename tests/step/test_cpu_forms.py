"""CPUs compute some operations in another way than other chips, with equal results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

from kvqjax.codecs.nuq_table import look_up
from kvqjax.model.rope import Waves, following, rotate
from kvqjax.ops.xla_workarounds import exp_in_loops, scores_of, times_matrix


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("inputs", [64, 63])
@pytest.mark.parametrize("turned", [False, True])
def test_a_row_times_a_matrix(inputs, turned):
    x, w = normal(0, 1, 1, inputs), normal(1, inputs, 24)
    out = times_matrix(x, w.T if turned else w, turned=turned)
    assert out.shape == (1, 1, 24)
    np.testing.assert_allclose(
        out[0], np.asarray(x[0], np.float64) @ np.asarray(w, np.float64), atol=1e-5
    )


@pytest.mark.parametrize("rows", [3, 70])
def test_scores_of_few_and_of_many_rows(rows):
    q, k = normal(2, 2, 3, rows, 1, 16), normal(3, 2, 40, 3, 16)
    np.testing.assert_allclose(scores_of(q, k), np.einsum("bkgtd,bskd->bkgts", q, k), atol=1e-5)


def test_exponentials():
    """The series is off by 1e-8; its last sum, the product and the argument's rest each round by
    2**-24 of about 1."""
    x = jnp.concatenate(
        [-jnp.geomspace(1e-6, 86.9, 4000), -jnp.linspace(0, 86.5, 251), jnp.zeros(1)]
    )
    np.testing.assert_allclose(exp_in_loops(x), np.exp(np.asarray(x, np.float64)), rtol=2e-7)
    far = exp_in_loops(jnp.asarray([-87.5, -1e30, -jnp.inf, jnp.nan]))
    np.testing.assert_array_equal(far, np.asarray([0, 0, 0, np.nan], np.float32))


@pytest.mark.parametrize("count", [4, 8, 16, 5])
def test_look_up_is_a_gather(count):
    codes, signposts = jnp.arange(300, dtype=jnp.uint32) * 7 % count, normal(4, count)
    np.testing.assert_array_equal(
        look_up(codes.reshape(3, 100), signposts), signposts[codes].reshape(3, 100)
    )


def test_consecutive_positions_turn_keys_as_any_others():
    """Angles are float32: at position 5000 of the fastest pair one is known to 3e-4."""
    shape, x = tiny().config.kv_shape, normal(5, 2, 64, 2, tiny().config.head_dim)
    positions = jnp.asarray([0, 5000])[:, None] + jnp.arange(64)[None]
    waves = following(64, shape)(positions)
    assert isinstance(waves, Waves)
    np.testing.assert_allclose(rotate(x, waves, shape), rotate(x, positions, shape), atol=4e-3)
    np.testing.assert_allclose(
        rotate(x, waves, shape)[0], rotate(x, positions, shape)[0], atol=2e-5
    )
