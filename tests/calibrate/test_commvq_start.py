"""CommVQ's value encoder begins as a transform coder: what its codes cost before any training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, with_nightly

from kvqjax import UserError
from kvqjax.calibrate.commvq_values import ValueSettings, constants, start
from kvqjax.codecs.commvq_values import CommVQValues

WIDTH = 64
SETTINGS = ValueSettings(steps=1, warmup=0)


def error(spec, learnt, unseen):
    """Mean squared error on unseen values over their mean square."""
    fixed = constants(start(jax.random.key(0), learnt, spec, SETTINGS))
    codec = spec.build(learnt.shape[-1])
    decoded = codec.decode(fixed, codec.encode(fixed, unseen))
    assert jnp.isfinite(decoded).all()
    return float(jnp.mean((decoded - unseen) ** 2) / jnp.maximum(jnp.mean(unseen**2), 1e-30))


def normal(seed, count, scale=1.0, offset=0.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(scale * rng.normal(size=(count, WIDTH)) + offset, jnp.float32)


def at_full_length(lost):
    """The squared error of directions that lose a share of their energy and are read as long as
    they were."""
    return 2 - 2 * np.sqrt(1 - lost)


@pytest.mark.parametrize("bits", with_nightly([1, 2, 4], [2]))
def test_of_independent_components_each_choice_is_a_quantiser_of_four_cells(bits):
    """Four equal cells of a normal variable lose 0.1188 of its variance, seven 0.0468. At 1 bit 31
    of 64 components have four cells, at 2 bits 63 have, at 4 bits seven (and one of these four).
    LayerNorm hides one component."""
    got = error(CommVQValues(bits=bits, dtype="float32"), normal(0, 4096), normal(1, 512))
    lost = {1: 31 * 0.1188 + 33, 2: 63 * 0.1188 + 1, 4: 63 * 0.0468 + 1}[bits] / WIDTH
    assert got == pytest.approx(at_full_length(lost), rel=0.06)


def test_large_components_get_the_choices_and_the_mean_costs_none():
    """A sixteenth of the components has nearly all of the variance: 1 bit a channel is 8 choices
    for each of these."""
    scale = np.where(np.arange(WIDTH) < 4, 10.0, 0.1)
    turn = np.linalg.qr(np.random.default_rng(5).normal(size=(WIDTH, WIDTH)))[0]
    learnt, unseen = (normal(seed, 4096, scale) @ turn for seed in (0, 1))
    spec = CommVQValues(bits=1, dtype="float32")
    centred = error(spec, learnt, unseen)
    assert centred < 0.02
    # LayerNorm takes off what is alike in all channels: this is not.
    mean = 3.0 * jnp.asarray([[1.0, -1.0] * (WIDTH // 2)])
    assert error(spec, learnt + mean, unseen + mean) < centred


@pytest.mark.parametrize("hidden", thinned([1, 7, 128], 3))
def test_few_hidden_units_take_fewer_components(hidden):
    """With 2 c hidden units, c of the 64 components are coded, by all choices, and the rest is
    lost."""
    got = error(
        CommVQValues(bits=2, hidden=hidden, dtype="float32"), normal(0, 4096), normal(1, 512)
    )
    kept = {1: 0.0, 7: 3.0, 128: 63 * (1 - 0.1188)}[hidden] / WIDTH
    assert got == pytest.approx(at_full_length(1 - kept), rel=0.1)


def test_values_without_any_spread_are_coded():
    for values in (jnp.zeros((64, WIDTH)), jnp.ones((64, WIDTH)), normal(0, 1)):
        assert error(CommVQValues(bits=1, dtype="float32"), values, values) < 1e-3


def test_values_that_are_not_finite_are_one_line():
    with pytest.raises(UserError, match="NaN or infinite"):
        start(
            jax.random.key(0), normal(0, 64).at[3, 2].set(jnp.nan), CommVQValues(bits=1), SETTINGS
        )
