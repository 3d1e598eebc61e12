"""Caches of models whose scores, norms and layers are not Llama's: Gemma 2 and 3, gpt-oss, Llama 4.

Their logits equal transformers' (test_parity.py). Here the decoder without a cache is the reference
for every path that attends through one, and attention in numpy over what a cache holds for every
method.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method, with_constants, with_nightly
from checkpoints import random_params
from families import EXPERTS, FAMILIES, FAR
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax import UserError, calibrate, shard
from kvqjax.calibrate import activations, layerwise, rotation
from kvqjax.model import decoder
from kvqjax.model.config import RopeConfig
from kvqjax.model.rope import positions_of_layer, rotate

LENGTH, CAPACITY = 160, 256
COUNTS = (160, 77)
BOUND = 2e-4

# Their layers feed each other, so that all must see the same tokens.
SAME_WINDOWS = (
    "aqua",
    "aqua-klt",
    "xquant-cl",
)

forward, prefill = jax.jit(kvq.forward), jax.jit(kvq.prefill)
plain_logits = jax.jit(decoder.logits, static_argnums=2)


def drawn(model: kvq.Model) -> kvq.Model:
    """The model with every weight random: norms, biases and sinks too."""
    params = random_params(model.config)
    layers = jax.tree.map(
        lambda x: x * (x.shape[-2] ** -0.5 if x.ndim > 2 else 0.5), params["layers"]
    )
    layers = {name: x * 3 if name == "score_sinks" else x for name, x in layers.items()}
    return model.replace(params=params | {"layers": layers, "norm": 0.5 * params["norm"]})


@functools.cache
def family_model(family: str, **changes) -> kvq.Model:
    return drawn(tiny(**FAMILIES[family] | changes))


@functools.cache
def plain(family: str):
    model = family_model(family)
    return np.asarray(plain_logits(model.params, tokens(2, LENGTH), model.config))


@pytest.mark.parametrize("family", with_nightly(FAMILIES, ["llama4"]))
@pytest.mark.parametrize("size", [64, pytest.param(LENGTH, marks=pytest.mark.nightly)])
def test_exact_cache_in_chunks_and_one_by_one(size, family):
    """Rows of different lengths: a prompt at once or in chunks, the last tokens by themselves."""
    model, text, wanted = family_model(family), tokens(2, LENGTH), plain(family)
    cache = kvq.init_cache(model, kvq.exact(sinks=3), 2, CAPACITY)
    for start in range(0, LENGTH, size):
        counts = jnp.clip(jnp.asarray(COUNTS) - 3 - start, 0, size)
        part = jnp.pad(text, ((0, 0), (0, size)))[:, start : start + size]
        logits, cache = forward(model, part, counts, cache)
        logits = np.asarray(logits)
        for row, count in enumerate(counts.tolist()):
            np.testing.assert_allclose(
                logits[row, :count], wanted[row, start : start + count], atol=BOUND
            )
    for back in (3, 2, 1):
        place = jnp.asarray(COUNTS) - back
        logits, cache = forward(
            model, jnp.take_along_axis(text, place[:, None], 1), jnp.ones(2, jnp.int32), cache
        )
        np.testing.assert_allclose(logits[:, 0], wanted[np.arange(2), place], atol=BOUND)


@pytest.mark.parametrize("family", with_nightly(FAMILIES, ["gemma2"]))
def test_exact_prefill(family):
    model, wanted = family_model(family), plain(family)
    last, _ = prefill(
        model,
        tokens(2, LENGTH),
        jnp.asarray(COUNTS),
        kvq.init_cache(model, kvq.exact(), 2, CAPACITY),
    )
    np.testing.assert_allclose(last, wanted[np.arange(2), np.asarray(COUNTS) - 1], atol=BOUND)


# What must change the logits when it is taken from a model: proof that the tests above can see it.
NEUTRAL = {
    "gemma2": {
        "softcap": None,
        "logit_softcap": None,
        "scale": None,
        "embedding_scale": 1.0,
        "activation": "silu",
    },
    "gemma3": {"rope": FAR, "norm_offset": 0.0, "sliding_window": None},
    "llama4": {"chunked": False, "qk_norm": False, "query_growth": 0.0, "rope": RopeConfig()},
    "gpt-oss": {"rope": RopeConfig(), "experts": dataclasses.replace(EXPERTS, swiglu_limit=None)},
}


@pytest.mark.parametrize(
    ("family", "field"),
    with_nightly(
        ((name, field) for name, fields in NEUTRAL.items() for field in fields),
        [("gemma2", "softcap"), ("gemma3", "rope"), ("llama4", "chunked"), ("gpt-oss", "experts")],
    ),
)
def test_every_field_changes_what_is_computed(family, field):
    model = family_model(family)
    config = dataclasses.replace(model.config, **{field: NEUTRAL[family][field]})
    changed = np.asarray(plain_logits(model.params, tokens(2, 128), config))[:, -8:]
    assert np.abs(changed - plain(family)[:, 120:128]).max() > 100 * BOUND


@pytest.mark.parametrize(
    "name", ["o_bias", "score_sinks", "router_bias", "experts_up_bias", "experts_down_bias"]
)
def test_every_weight_of_gpt_oss_counts(name):
    model, layers = family_model("gpt-oss"), family_model("gpt-oss").params["layers"]
    # A sink of 0 is a logit like any other; -inf is none.
    none = jax.tree.map(
        lambda x: jnp.full_like(x, -jnp.inf if name == "score_sinks" else 0), layers[name]
    )
    params = model.params | {"layers": layers | {name: none}}
    changed = np.asarray(plain_logits(params, tokens(2, LENGTH), model.config))
    assert np.abs(changed - plain("gpt-oss")).max() > 100 * BOUND


def oracle(config, q, k, v, valid, sinks) -> np.ndarray:
    """Attention of one query a row in float64: q [B, H, D] times the scale, k and v [B, S, K, D],
    valid [B, S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("bhd,bshd->bhs", q, k) * q.shape[-1] ** -0.5
    if config.softcap:
        scores = config.softcap * np.tanh(scores / config.softcap)
    scores = np.where(valid[:, None], scores, -np.inf)
    logits = (
        np.full((1, q.shape[1], 1), -np.inf)
        if sinks is None
        else np.asarray(sinks, np.float64)[None, :, None]
    )
    peak = np.maximum(scores.max(-1, keepdims=True), logits)
    weights = np.exp(scores - peak)
    return np.einsum(
        "bhs,bshd->bhd", weights / (weights.sum(-1, keepdims=True) + np.exp(logits - peak)), v
    )


project, finish = (
    jax.jit(function, static_argnums=places)
    for function, places in ((decoder.project, (3, 4)), (decoder.finish, 3))
)


def next_logits(model, cache, newest):
    """Logits of one new token a row by `oracle` over what the cache holds and the token itself."""
    positions, config = cache.lengths[:, None], model.config
    h = decoder.embed(model.params, newest, config)
    for layer in range(config.num_layers):
        weights, turns = (
            decoder.layer(model.params, layer),
            positions_of_layer(positions, config, layer),
        )
        made = project(weights, h, positions, config, layer)
        k, v, valid = kvq.dense(cache, layer, model)
        k = np.concatenate([k, rotate(made.k, turns, config)], 1)
        v, valid = (
            np.concatenate([v, made.v], 1),
            np.concatenate([valid, np.ones((len(newest), 1), bool)], 1),
        )
        out = oracle(config, made.q[:, 0], k, v, valid, weights.get("score_sinks"))
        h = finish(weights, h, jnp.asarray(out, jnp.float32)[:, None], config)
    return decoder.unembed(model.params, h, config)[:, 0]


OTHERS = {"streaming": "kivi:bits=2,window=32,sinks=4,keep=streaming:64"}
PAIRS = with_nightly(
    itertools.product([*CASES, *OTHERS], FAMILIES),
    [("kivi2", "gemma3")],
)


def case(name: str, family: str) -> tuple[kvq.Model, kvq.Method]:
    if name in OTHERS:
        # No window: with one, a layer's body is a ring. Chunks need one.
        model = family_model(family, sliding_window=None, chunked=False)
        return model, kvq.parse(OTHERS[name])
    changes = {
        field: value for field, value in FAMILIES[family].items() if field not in CASES[name][1]
    }
    if name in SAME_WINDOWS:
        changes["sliding_window"] = None
    model, method = model_and_method(name, **changes)
    return with_constants(drawn(model), method), method


@pytest.mark.parametrize(("name", "family"), PAIRS)
def test_every_method_attends_as_its_dense_arrays_say(name, family):
    """Prompts in chunks, then a step of one token: sinks, windows, bodies, rings that have
    wrapped."""
    model, method = case(name, family)
    cache = kvq.init_cache(model, method, 2, CAPACITY)
    for seed, counts in enumerate(((80, 80), (80, 0), (64, 30))):
        cache = forward(model, tokens(2, 80, seed), jnp.asarray(counts), cache)[1]
    newest = tokens(2, 80, 7)
    wanted = next_logits(model, cache, newest[:, :1])
    got = forward(model, newest, jnp.ones(2, jnp.int32), cache)[0][:, 0]
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, atol=3e-5 * np.abs(wanted).max())
    one = forward(model, newest[:, :1], jnp.ones(2, jnp.int32), cache)[0][:, 0]
    np.testing.assert_allclose(one, wanted, atol=3e-5 * np.abs(wanted).max())


# Splitting the heads, and more devices than KV heads; both with rows and tokens dealt out.
MESHES = [{"data": 2, "model": 2}, pytest.param({"seq": 2, "model": 4}, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "family",
    [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma3", "llama4")), "gpt-oss"],
)
def test_a_mesh_computes_the_same(family, mesh):
    """Sinks, norms behind sums over devices, output biases and whole experts on some devices
    each."""
    model, text, counts, wanted = (
        family_model(family),
        tokens(2, LENGTH),
        jnp.asarray(COUNTS),
        plain(family),
    )
    split = shard(model, "exact", **mesh)
    last, cache = prefill(
        split,
        text[:, :77],
        jnp.minimum(counts, 77) - 1,
        kvq.init_cache(split, "exact", 2, CAPACITY),
    )
    np.testing.assert_allclose(last, wanted[:, 75], atol=BOUND)
    logits, _ = forward(split, text[:, 76:77], jnp.ones(2, jnp.int32), cache)
    np.testing.assert_allclose(logits[:, 0], wanted[:, 76], atol=BOUND)


@pytest.mark.parametrize("family", with_nightly(FAMILIES, ["gpt-oss"]))
def test_calibrations_read_what_a_cache_is_given(family):
    """A calibration attends by itself, so it must know the windows, caps, sinks and ropes of every
    layer."""
    model, text = family_model(family, sliding_window=(40, None)), tokens(1, 90)
    cache = forward(model, text, jnp.asarray([90]), kvq.init_cache(model, "exact", 1, 96))[1]
    found = [kvq.dense(cache, layer) for layer in range(2)]
    k, v, seen = (np.stack([np.asarray(x[part])[0, :90] for x in found]) for part in range(3))
    k, v = (x.reshape(2, 90, -1) * seen[..., None] for x in (k, v))

    def same(got, wanted):
        np.testing.assert_allclose(np.asarray(got) * seen[..., None], wanted, atol=BOUND)

    read = activations.activations(model.params, text, model.config, rope="post", gradients=False)
    same(read.k[:, 0], k)
    same(read.v[:, 0], v)
    moments = rotation._moments(
        model.params, text, config=model.config, values="outputs", sinks=0, unbiased=False
    )
    np.testing.assert_allclose(moments[-1][1], k[1].sum(0), atol=90 * BOUND)
    layers = layerwise.of_model(model, kvq.parse("commvq:bits=1"), np.asarray(text))
    h, values, rotated = layers.h, [], []
    for layer in range(2):
        _, data, h = layers.read(layer, h)
        values.append(data.v[0])
        rotated.append(data.k[0].reshape(90, -1))
    same(np.stack(values), v)
    same(np.stack(rotated), k)
    assert (data.sinks is not None) == model.config.score_sinks


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("aqua:bits=2,group=32,buffer=32", "must see the same tokens; sliding windows differ"),
        (
            "xquant_cl:bits=3,group=32,base=0,protected=1",
            "needs full attention in every layer; its window is 96",
        ),
    ],
)
def test_what_feeds_layers_by_layers_wants_windows_alike(spec, message):
    model = family_model("gemma2")
    with pytest.raises(UserError, match=message):
        kvq.init_cache(model, spec, 1, CAPACITY)


CALIBRATED = (
    "commvq:bits=1,rounds=2,levels=8,hidden=16,window=32,unit=32",
    "kvquant:bits=3,sinks=2",
    "aqua:bits=2,first_bits=16,backbone=token,group=32,buffer=32,sinks=3",
    "oscar:bits=2,window=32,sinks=4",
    "xquant:bits=4,group=32,latent=true",
)


@pytest.mark.parametrize(
    ("spec", "family"),
    [
        pytest.param(spec, family, marks=pytest.mark.nightly)
        for spec in CALIBRATED
        for family in FAMILIES
    ],
)
def test_calibrated_methods(spec, family):
    windows = {"sliding_window": None} if spec.startswith("aqua") else {}
    model = family_model(family, **windows)
    artifact = calibrate.run(model, spec, np.asarray(tokens(8, 96)), count=8, length=96)
    ready, text = model.with_artifact(artifact), tokens(2, LENGTH)
    cache = kvq.init_cache(ready, spec, 2, CAPACITY)
    logits, _ = forward(ready, text, jnp.asarray(COUNTS), cache)
    # A chunk's own tokens attend to each other exactly, whatever is stored.
    np.testing.assert_allclose(
        logits[0], np.asarray(plain_logits(ready.params, text, ready.config))[0], atol=0.05
    )
