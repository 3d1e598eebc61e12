"""KVQuant through the cache: sinks, streaming, RoPE at absolute positions, against attention
written out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax import Model, UserError, forward, init_cache, kvquant, parse, prefill
from kvqjax.cache import runs_of
from kvqjax.model import decoder, weight_trees
from kvqjax.model.config import ModelConfig, RopeConfig
from kvqjax.model.rope import rotate
from kvqjax.ops.attention import segment_attention

ROPE = RopeConfig(
    kind="llama3", factor=4.0, original_max_position=32, low_freq_factor=1.0, high_freq_factor=4.0
)
CONFIG = ModelConfig(
    vocab_size=32,
    width=32,
    mlp_width=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qkv_bias=True,
    rope=ROPE,
)
# Below a plane of 32 tokens, whose own path tests/cache/test_cache_words.py covers.
SINKS, LENGTH = (
    2,
    24,
)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, LENGTH + 1))
METHOD = kvquant(bits=3, outliers=0.1, sinks=SINKS)
LATE = kvquant(bits=3, outliers=0.1, sinks=SINKS, buffer=32)


@functools.cache
def calibrated():
    """Random weights with large biases, and thresholds around the keys' biases that leave some keys
    outside."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: weight_trees.init_params(jax.random.key(0), CONFIG))
    params = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape) * a.shape[-2:][0] ** -0.5, a.dtype), shapes
    )
    width, points = CONFIG.kv_width, np.sort(rng.uniform(-1, 1, (2, 1, 8)))
    biases = {name: 2 * rng.normal(size=(1, width)) for name in ("k_bias", "v_bias")}
    upper, lower = (biases["k_bias"] + side * rng.uniform(0.4, 1.5, (1, width)) for side in (1, -1))
    keys, values = (
        {"upper": upper, "lower": lower, "signposts": points[0]},
        {"signposts": points[1]},
    )
    constants = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), ({"k": keys, "v": values},))
    layers = params["layers"] | {name: jnp.asarray(a, jnp.float32) for name, a in biases.items()}
    return Model({**params, "layers": layers}, constants, config=CONFIG)


@functools.cache
def streamed():
    """The prompt token by token, and the logits of every step."""
    model = calibrated()
    cache = init_cache(model, METHOD, 2, 64)
    step = jax.jit(functools.partial(forward, last=True))
    rows = jnp.ones(2, jnp.int32)
    logits = []
    for column in TOKENS.T:
        out, cache = step(model, jnp.asarray(column)[:, None], rows, cache)
        logits.append(out)
    return jnp.stack(logits, 1), cache


@jax.jit
def sources(model, tokens):
    """Layer 0's queries (rotated), keys before RoPE and values of a prompt."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    weights = decoder.layer(model.params, 0)
    return (
        weights,
        positions,
        decoder.project(weights, decoder.embed(model.params, tokens), positions, CONFIG),
    )


@jax.jit
def by_hand(model, tokens):
    """Logits of the last token: sinks and itself exact, every other key and value through its
    codec, keys then rotated. And how far off the nearest decoded token is, of keys and of
    values."""
    weights, positions, projected = sources(model, tokens)
    codecs = runs_of(init_cache(model, METHOD, 1, 64).layout)[0].wiring.storage.codecs
    through, off = {}, []
    for name, x in (("k", projected.k), ("v", projected.v)):
        fixed = {key: a[0] for key, a in model.constants[0][name].items()}
        flat = x.reshape(*x.shape[:2], -1)
        body = flat[:, SINKS:LENGTH].reshape(-1, CONFIG.kv_width)
        coded = codecs[name].decode(fixed, codecs[name].encode(fixed, body))
        off.append(jnp.abs(coded - body).max(-1).min())
        through[name] = (
            flat.at[:, SINKS:LENGTH].set(coded.reshape(2, -1, CONFIG.kv_width)).reshape(x.shape)
        )
    keys = rotate(through["k"], positions, CONFIG)
    seen = jnp.ones((2, 1, LENGTH + 1), bool)
    attended = segment_attention(projected.q[:, -1:], keys, through["v"], seen).out
    h = decoder.finish(weights, decoder.embed(model.params, tokens[:, -1:]), attended, CONFIG)
    return decoder.unembed(model.params, h, CONFIG)[:, 0], jnp.stack(off)


def test_decoding_equals_attention_by_hand():
    """Bias, GQA, scaled RoPE at absolute positions (the first encoded key stands at position 2),
    exact sinks."""
    model = calibrated()
    logits, _ = streamed()
    wanted, off = by_hand(model, jnp.asarray(TOKENS))
    exact = jax.jit(decoder.logits, static_argnums=2)(model.params, jnp.asarray(TOKENS), CONFIG)[
        :, -1
    ]
    assert off.min() > 1e-3  # no token is stored exactly
    np.testing.assert_allclose(logits[:, -1], wanted, atol=2e-4)
    # The cache is lossy, so equality above is not the exact model's.
    assert np.abs(exact - wanted).max() > 0.02


@jax.jit
def body(cache):
    """What layer 0 stores of the tokens after the sinks, unpacked."""
    run, count = runs_of(cache.layout)[0], LENGTH + 1 - SINKS

    def stored(source, name, field):
        x = field.packing.read(
            cache.runs[0].body[source][name], jnp.int32(0), jnp.int32(0), run.block
        )
        return x[:, :count] if field.kind == "codes" else x[..., :count]

    codecs = run.wiring.storage.codecs.items()
    return {s: {n: stored(s, n, field) for n, field in codec.fields.items()} for s, codec in codecs}


@pytest.mark.nightly
def test_every_prefix_streams_to_the_same_words():
    """Token by token, as one chunk and by exact prefill: one layer's sources are equal, so its
    packed words are."""
    model = calibrated()
    _, cache = streamed()
    counts = jnp.full(2, LENGTH + 1)
    empty = init_cache(model, METHOD, 2, 64)
    chunk = jax.jit(forward)(model, jnp.asarray(TOKENS), counts, empty)[1]
    whole = jax.jit(prefill)(model, jnp.asarray(TOKENS), counts, empty)[1]
    fields = [
        (s, n)
        for s, codec in runs_of(cache.layout)[0].wiring.storage.codecs.items()
        for n in codec.fields
    ]
    wanted = body(cache)
    for other in (chunk, whole):
        np.testing.assert_array_equal(other.lengths, cache.lengths)
        np.testing.assert_allclose(other.runs[0].sinks["k"], cache.runs[0].sinks["k"], atol=1e-5)
        found = body(other)
        for source, name in fields:
            # The projections are matmuls of other shapes: a code may differ where it lies on a
            # border.
            assert (found[source][name] != wanted[source][name]).mean() < 0.01, (source, name)


@pytest.mark.nightly
def test_a_buffer_encodes_to_the_same_words():
    """With `buffer=32` nothing is encoded before 32 tokens are due; then they are stored as they
    are one by one."""
    model, length = calibrated(), 32 + SINKS
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, length)))

    def filled(method, count):
        empty = init_cache(model, method, 2, 64)
        return jax.jit(prefill)(model, tokens[:, :count], jnp.full(2, count), empty)[1]

    late, wanted = filled(LATE, length - 1), body(filled(METHOD, length))
    assert late.runs[0].flushed[0].tolist() == [0, 0]
    assert not any(leaf.any() for leaf in jax.tree.leaves(late.runs[0].body))
    step = jax.jit(functools.partial(forward, last=True))(
        model, tokens[:, -1:], jnp.ones(2, jnp.int32), late
    )[1]
    for source, fields in body(step).items():
        for name, found in fields.items():
            # The projections are matmuls of other shapes: a code may differ where it lies on a
            # border.
            assert (found != wanted[source][name]).mean() < 0.01, (source, name)


def test_sinks_are_exact_and_not_in_the_body():
    model = calibrated()
    _, cache = streamed()
    projected = sources(model, jnp.asarray(TOKENS))[2]
    for name, x in (("k", projected.k), ("v", projected.v)):
        np.testing.assert_allclose(
            cache.runs[0].sinks[name][0], x[:, :SINKS].reshape(2, SINKS, -1), atol=1e-5
        )
    assert [int(f) for f in cache.runs[0].flushed[0]] == [LENGTH + 1 - SINKS] * 2


def test_constants_are_asked_for():
    model = calibrated().replace(constants=None)
    with pytest.raises(UserError, match="calibrated"):
        forward(
            model,
            jnp.asarray(TOKENS[:, :1]),
            jnp.ones(2, jnp.int32),
            init_cache(model, METHOD, 2, 64),
        )


def test_spec_strings_name_the_method():
    method = kvquant(bits=2, key_bits=4, outliers=0.005, datatype="nf", rope="post")
    assert parse(str(method)) == method
    assert str(kvquant(bits=3)) == "kvquant:bits=3"
    assert method.layer.key.bits == 4
    assert method.layer.value.bits == 2
