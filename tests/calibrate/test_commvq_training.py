"""Training of CommVQ's value encoder: it learns, orders as the paper's Table 11, and resumes with
the same bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.calibrate.commvq_values import (
    Activations,
    ValueSettings,
    constants,
    loss,
    output_energy,
    start,
    train,
)
from kvqjax.codecs import Uniform
from kvqjax.codecs.commvq_values import CommVQValues

WIDTH, LENGTH = 16, 32
QUICK = ValueSettings(steps=300, warmup=20, attention=0.0)  # the paper's objective


def values(seed, count):
    """Values of few latent directions, one of them large, with an offset: what a learned code can
    exploit."""
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


DATA = layer(values(0, 32))


def ready(bits):
    spec = CommVQValues(bits=bits, dtype="float32")
    return spec.build(WIDTH), start(jax.random.key(0), DATA.v, spec, QUICK)


def steps(state, count):
    """`count` more steps of the one training all tests share."""
    return train(jax.random.key(1), state, DATA, QUICK, jnp.int32(count))


@functools.cache
def errors(bits):
    """Mean squared errors on unseen values: of a trained codec, of one before training, and of
    asymmetric quantisation."""
    codec, begun = ready(bits)
    state, first = steps(begun, 20)
    state, _ = steps(state, QUICK.steps - 40)
    state, last = steps(state, 20)
    assert last[0] < first[0]
    uniform = Uniform(bits=bits, along="channels", group=WIDTH).build(WIDTH)

    @jax.jit
    def all_of(x):
        pairs = (codec, constants(state)), (codec, constants(begun)), (uniform, {})
        return [jnp.mean((c.decode(fixed, c.encode(fixed, x)) - x) ** 2) for c, fixed in pairs]

    return all_of(values(1, 8).reshape(-1, WIDTH))


@pytest.mark.parametrize("bits", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_learned_codes_beat_asymmetric_quantisation_at_equal_bits(bits):
    """Table 11 on unseen values; and 2 bits below 1 bit."""
    ours, begun, theirs = errors(bits)
    assert ours < begun < theirs
    if bits == 2:
        assert ours < errors(1)[0]


def test_a_resumed_training_ends_with_the_same_bytes():
    _, state = ready(1)
    whole, _ = steps(state, 20)
    half, _ = steps(state, 10)
    saved = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), half)
    resumed, _ = steps(saved, 10)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_parameter_gets_a_gradient_from_both_terms():
    """The straight-through estimator reaches the encoder by the values' error and by the attention
    outputs' alone."""
    _, state = ready(1)

    @jax.jit
    def slopes(params):
        plain, both = (
            jax.grad(
                lambda p, w=weight: loss(
                    p, state.scale, jax.random.key(2), DATA, output_energy(DATA), w
                )[0]
            )
            for weight in (0.0, 1.0)
        )
        return plain(params), jax.tree.map(jnp.subtract, both(params), plain(params))

    for gradients in slopes(state.params):
        assert all(jnp.abs(g).max() > 1e-6 for g in gradients.values())
