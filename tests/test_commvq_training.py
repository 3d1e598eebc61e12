"""Training of CommVQ's value encoder: it learns, orders as the paper's Table 11, and resumes with the same bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.calibrate.commvq_values import (
    Activations,
    ValueSettings,
    channel_scale,
    constants,
    loss,
    output_energy,
    start,
    train,
)
from kvqjax.codecs import Uniform
from kvqjax.codecs.commvq_values import CommVQValues

WIDTH, LENGTH = 16, 32
QUICK = ValueSettings(steps=300, warmup=20)


def values(seed, count):
    """Values of few latent directions, one of them large, with an offset: what a learned code can exploit."""
    rng = np.random.default_rng(7)
    mix, offset = rng.normal(size=(4, WIDTH)), 2 * rng.normal(size=WIDTH)
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(count, LENGTH, 4)) @ mix + offset
    return jnp.asarray(v + 0.05 * rng.normal(size=v.shape), jnp.float32)


def layer(v):
    keys = jax.random.split(jax.random.key(5), 3)
    q = jax.random.normal(keys[0], (*v.shape[:2], 4, 8))
    k = jax.random.normal(keys[1], (*v.shape[:2], 2, 8))
    return Activations(v, q, k, jax.random.normal(keys[2], (32, 12)) / 6)


def trained(bits, settings):
    data, spec = layer(values(0, 32)), CommVQValues(bits=bits, dtype="float32")
    state = start(jax.random.key(0), channel_scale(data.v), spec, settings)
    state, losses = train(jax.random.key(1), state, data, settings, settings.steps)
    return spec.build(WIDTH), constants(state), losses


def error(codec, fixed, x):
    run = jax.jit(lambda x: codec.decode(fixed, codec.encode(fixed, x)))
    return float(jnp.mean((run(x) - x) ** 2))


def test_learned_codes_beat_asymmetric_quantisation_at_equal_bits():
    """Table 11 on unseen values: 2 bits below 1 bit, both below asymmetric quantisation at the same bits."""
    unseen = values(1, 8).reshape(-1, WIDTH)
    ours, theirs = {}, {}
    for bits in (1, 2):
        codec, fixed, losses = trained(bits, QUICK)
        assert losses[-20:, 0].mean() < 0.3 * losses[:20, 0].mean()
        ours[bits] = error(codec, fixed, unseen)
        uniform = Uniform(bits=bits, along="channels", group=WIDTH).build(WIDTH)
        theirs[bits] = error(uniform, {}, unseen)
    assert ours[2] < ours[1]
    assert ours[1] < theirs[1]
    assert ours[2] < theirs[2]


def test_a_resumed_training_ends_with_the_same_bytes():
    settings = ValueSettings(steps=20, warmup=5)
    data, spec = layer(values(0, 8)), CommVQValues(bits=1)
    state = start(jax.random.key(0), channel_scale(data.v), spec, settings)
    whole, _ = train(jax.random.key(1), state, data, settings, 20)
    half, _ = train(jax.random.key(1), state, data, settings, 10)
    saved = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), half)
    resumed, _ = train(jax.random.key(1), saved, data, settings, 10)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("attention", [0.0, 1.0])
def test_every_parameter_gets_a_gradient(attention):
    """The straight-through estimator reaches the encoder; the attention term can be left out."""
    data, spec = layer(values(0, 4)), CommVQValues(bits=1)
    state = start(jax.random.key(0), channel_scale(data.v), spec, QUICK)
    slope = jax.jit(jax.grad(loss, has_aux=True), static_argnums=5)
    gradients, plain = slope(state.params, state.scale, jax.random.key(2), data, output_energy(data), attention)
    assert plain > 0
    assert all(jnp.abs(g).max() > 0 for g in gradients.values())
