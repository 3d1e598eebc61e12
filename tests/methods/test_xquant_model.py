"""XQuant and XQuant-CL inside a model: with the identity quantiser the cache changes nothing; with
a real one, each way of filling it stores the same words, and reading them gives bit for bit what
the encoder reckoned with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned

from kvqjax import Model, UserError, forward, init_cache, load, load_artifact, parse, prefill
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.calibrate.xquant import constants, prepared
from kvqjax.cli import main
from kvqjax.methods.roofline import bits_by_layer
from kvqjax.model import decoder, weight_trees
from kvqjax.model.config import ModelConfig, RopeConfig

ROPE = RopeConfig(
    kind="llama3", factor=4.0, original_max_position=64, low_freq_factor=1.0, high_freq_factor=4.0
)
MHA = ModelConfig(
    vocab_size=50,
    width=64,
    mlp_width=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    rope=ROPE,
)
GQA = dataclasses.replace(MHA, num_kv_heads=1)
MODELS = {
    "mha": MHA,
    "gqa": GQA,
    "qwen2": dataclasses.replace(GQA, qkv_bias=True, tied_embeddings=True),
    "qwen3": dataclasses.replace(GQA, qk_norm=True),
}
TOKENS = jax.random.randint(jax.random.key(7), (2, 144), 0, 50)
CAPACITY = 160


def make(config, method):
    """A random model whose biases and norm gains are not trivial, with the method's constants."""
    params = weight_trees.init_params(jax.random.key(1), config)
    for number, (name, a) in enumerate(sorted(params["layers"].items())):
        if name.endswith(("_bias", "_norm")):
            params["layers"][name] = a + 0.3 * jax.random.normal(jax.random.key(number), a.shape)
    own = jax.tree.map(jnp.asarray, constants(params, config, method))
    return Model(params, own, config=config)


def through_cache(model, method, chunk, tokens):
    """Logits [B,T,V] of `tokens` passed through the cache `chunk` at a time, and the cache after
    them."""
    cache = init_cache(model, method, tokens.shape[0], CAPACITY)
    step, parts = jax.jit(forward), []
    for first in range(0, tokens.shape[1], chunk):
        piece = tokens[:, first : first + chunk]
        out, cache = step(model, piece, jnp.full(tokens.shape[:1], piece.shape[1]), cache)
        parts.append(out)
    return jnp.concatenate(parts, 1), cache


SLOW = pytest.mark.slow
IDENTITY = [
    pytest.param(
        "mha",
        "xquant_cl:bits=16,high_bits=16,group=32,base=0,space=residual,window=32",
        marks=pytest.mark.nightly,
    ),
    ("qwen2", "xquant:bits=16,group=32,sinks=5"),
    ("qwen3", "xquant_cl:bits=16,high_bits=16,group=32,base=0,sinks=3"),
    pytest.param("mha", "xquant:bits=16,group=32", marks=SLOW),
    pytest.param(
        "mha", "xquant_cl:bits=16,high_bits=16,group=32,base=1,sinks=3,window=32", marks=SLOW
    ),
    pytest.param("gqa", "xquant:bits=16,group=32,protected=1,high_bits=16", marks=SLOW),
    pytest.param(
        "gqa",
        "xquant_cl:bits=16,high_bits=16,group=32,base=0,protected=0,space=residual",
        marks=SLOW,
    ),
    pytest.param("qwen2", "xquant_cl:bits=16,high_bits=16,group=32,base=1", marks=SLOW),
]


@pytest.mark.parametrize(("name", "spec"), thinned(IDENTITY, 2))
def test_identity_changes_nothing(name, spec):
    method = parse(spec)
    model = make(MODELS[name], method)
    wanted = decoder.logits(model.params, TOKENS, model.config)
    # Few enough for values to be summed first.
    got, cache = through_cache(model, method, 16, TOKENS)
    assert all(int(run.flushed[0].min()) >= 3 for run in cache.runs)
    assert float(jnp.abs(got - wanted).max()) < 1e-4 * float(jnp.abs(wanted).max())


LOSSY = [
    ("gqa", "xquant:bits=2,group=32,outliers=1"),
    pytest.param(
        "gqa", "xquant_cl:bits=2,group=32,base=0,protected=1,sinks=2", marks=pytest.mark.nightly
    ),
    pytest.param("mha", "xquant:bits=3,group=32", marks=SLOW),
    pytest.param(
        "mha", "xquant_cl:bits=2,group=32,base=1,protected=2,axis=channel,accumulator=4", marks=SLOW
    ),
    pytest.param("gqa", "xquant_cl:bits=2,group=32,base=1,sinks=2", marks=SLOW),
    pytest.param("gqa", "xquant_cl:bits=2,group=32,base=0,protected=0,space=residual", marks=SLOW),
]


def words(cache):
    return [np.asarray(leaf) for run in cache.runs for leaf in jax.tree.leaves(run.body)]


@pytest.mark.parametrize(("name", "spec"), LOSSY)
def test_prefill_and_one_chunk_store_the_same_words(name, spec):
    """Both attend exactly within the prompt. Matmuls of other shapes round differently, so a value
    at a tie may get the neighbouring code; everything else is equal up to float32 rounding, and
    reading the same words gives the same."""
    method = parse(spec)
    model = make(MODELS[name], method)
    tokens, counts = TOKENS[:, :140], jnp.array([140, 99])
    step = jax.jit(forward, static_argnames="last")
    logits, whole = jax.jit(prefill)(model, tokens, counts, init_cache(model, method, 2, CAPACITY))
    got, chunk = step(model, tokens, counts, init_cache(model, method, 2, CAPACITY), last=True)
    np.testing.assert_allclose(logits, got, atol=1e-4)
    for a, b in zip(words(whole), words(chunk), strict=True):
        assert (a == b).mean() > 0.99
    pairs = zip(chunk.runs, whole.runs, strict=True)
    chunk = chunk.replace(runs=tuple(run.replace(body=other.body) for run, other in pairs))
    more, wanted = (
        step(model, tokens, jnp.ones_like(counts), cache, last=True)[0] for cache in (chunk, whole)
    )
    np.testing.assert_allclose(more, wanted, atol=2e-5)


@pytest.mark.parametrize("name", ["mha", "gqa"])
def test_reading_rebuilds_the_encoders_accumulator_bit_for_bit(name):
    """Tiles of 32 tokens encoded one by one, all layers; then decoded two rows of 64 at a time, as
    attention reads."""
    method = parse("xquant_cl:bits=2,group=32,base=0,protected=1")
    model = make(MODELS[name], method)
    base, delta = (run.wiring for run in runs_of(init_cache(model, method, 1, CAPACITY).layout))
    # One difference is enough: whatever accumulator encoder and decoder share below, they share
    # above.
    wirings, fixed = (base, delta), ({}, jax.tree.map(lambda a: a[0], model.constants[1]))
    x = (
        jax.random.normal(jax.random.key(3), (2, 4, 32, 64))
        * jnp.array([1.0, 2.0]).reshape(2, 1, 1, 1)
        + 3.0
    )

    def encode(tile):
        carry, out = {"x": jnp.zeros((32, 64))}, []
        for wiring, own, rows in zip(wirings, fixed, tile, strict=True):
            payload, recon, carry = wiring.maps.encode(own, {"x": rows}, carry)
            out.append((payload["x"], recon["x"], carry["x"]))
        return out

    def decode(payloads):
        carry, out = {"x": jnp.zeros((2, 64, 64))}, []
        for wiring, own, payload in zip(wirings, fixed, payloads, strict=True):
            recon, carry = wiring.maps.decode(own, {"x": payload}, carry)
            out.append((recon["x"], carry["x"]))
        return out

    def as_rows(field, a):
        """[tiles, ...] as stored for two rows: tokens are the second-last axis of codes, the last
        one of scales."""
        pairs = a.reshape(2, 2, *a.shape[1:])
        return jnp.concatenate([pairs[:, 0], pairs[:, 1]], 1 if field == "codes" else 2)

    encoded = jax.jit(lambda tiles: jax.lax.map(encode, tiles))(x.swapaxes(0, 1))
    payloads = [
        {field: as_rows(field, a) for field, a in payload.items()} for payload, _, _ in encoded
    ]
    for (_, recon, carry), (got, got_carry) in zip(encoded, jax.jit(decode)(payloads), strict=True):
        np.testing.assert_array_equal(recon.reshape(2, 64, 64), got)
        np.testing.assert_array_equal(carry.reshape(2, 64, 64), got_carry)


def test_constants_from_the_weights_are_those_of_the_artifact(tmp_path, monkeypatch, capsys):
    """`kvqjax calibrate --cache xquant...` needs no data; small models have the same computed where
    they are loaded."""
    spec, folder = "xquant:bits=2,latent=true,outliers=1", tmp_path / "artifact"
    monkeypatch.setattr(
        "sys.argv", ["kvqjax", "calibrate", "-m", "recall", "--cache", spec, "--out", str(folder)]
    )
    with pytest.raises(SystemExit, match="0"):
        main()
    assert str(folder) in capsys.readouterr().out
    model, artifact = load("recall"), load_artifact(folder)
    wanted = prepared(model, parse(spec)).constants
    assert wanted[0]["k"]["down"].shape == (2, 128, 128)
    jax.tree.map(np.testing.assert_array_equal, model.with_artifact(artifact).constants, wanted)


def test_maps_are_held_as_the_model_holds_its_weights():
    """Float32 ones would take twice the bytes, and XLA would round them all ahead of a decode
    loop."""
    method, layers = parse("xquant:bits=2,group=32"), GQA.num_layers
    params = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16), weight_trees.init_params(jax.random.key(0), GQA)
    )
    (found,) = constants(params, GQA, method)
    for name in ("k", "v"):
        assert found[name]["down"].shape[0] == layers
        assert {x.dtype for x in found[name].values()} == {jnp.dtype("bfloat16")}
        exact = np.asarray(params["layers"][name], np.float64)
        product = found[name]["down"].astype(np.float64) @ found[name]["up"].astype(np.float64)
        np.testing.assert_allclose(
            product, exact, atol=2**-7 * np.linalg.norm(exact, axis=(1, 2)).max()
        )


def test_missing_constants_and_sliding_windows_are_refused():
    method = parse("xquant:bits=2,group=32")
    model = make(GQA, method).replace(constants=None)
    with pytest.raises(UserError, match=r"needs the calibrated constant k\.down"):
        through_cache(model, method, 8, TOKENS[:, :8])
    for window, reason in ((8, "full attention"), ((None, 8, None), "sliding windows differ")):
        sliding = dataclasses.replace(MHA, sliding_window=window)
        with pytest.raises(ValueError, match=reason):
            init_cache(model.replace(config=sliding), parse("xquant_cl:group=32"), 1, 64)
    with pytest.raises(ValueError, match="outliers=1"):
        init_cache(model.replace(config=MHA), parse("xquant:outliers=1"), 1, 64)
    with pytest.raises(ValueError, match="known: norm, residual"):
        parse("xquant_cl:space=input")


@pytest.mark.parametrize(
    "spec",
    [
        "xquant",
        "xquant:latent=true",
        "xquant_cl:base=0",
        "xquant_cl:base=0,bits=16,high_bits=16,accumulator=4",
    ],
)
def test_a_width_that_the_group_does_not_divide_names_one_that_does(spec):
    """192 channels, and 192 of keys."""
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 48}
    config = ModelConfig(vocab_size=8, width=192, mlp_width=8, num_layers=3, **heads)
    layout = CacheLayout(shape=config.kv_shape, method=parse(spec), capacity=256, dtype="float32")
    separator = "," if ":" in spec else ":"
    with pytest.raises(UserError, match="group=128 does not divide the width 192; group=64 does"):
        runs_of(dataclasses.replace(layout, method=parse(f"{spec}{separator}group=128")))
    runs_of(dataclasses.replace(layout, method=parse(f"{spec}{separator}group=64")))
    runs_of(layout)  # the largest that fits


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("kivi:bits=4,group=128", 4.375),
        ("kivi_star:protected=0", 2.375),
        ("uniform", 4.5),
        ("xquant:latent=true", 4.375),
    ],
)
def test_a_group_that_is_not_given_fits_the_model(spec, bits):
    """192 channels of 3 heads: 64 channels share a scale and a minimum where 128 would not fit, and
    128 tokens do."""
    heads = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    config = ModelConfig(vocab_size=8, width=576, mlp_width=8, num_layers=2, **heads)
    assert bits_by_layer(parse(spec), config.kv_shape) == (bits, bits)
