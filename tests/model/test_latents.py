"""Caches of latents (Mistral 4's attention): what is stored, and what attention reads of it.

Logits of the decoder equal transformers' (test_parity.py). Here attention in numpy is the reference
of every cache. It makes keys and values of every head of the latents that the cache holds, which
the library never does.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import save_params
from recurrent import drawn
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax import KVShape, calibrate, load, shard
from kvqjax.cache import Cache
from kvqjax.hardware.planner import plan_memory
from kvqjax.model import decoder
from kvqjax.model.config import LatentHeads, RopeConfig
from kvqjax.model.rope import inverse_frequencies
from kvqjax.model.weight_trees import FORMS

HEADS, LATENT, TURNED, KEY, VALUE = 4, 32, 8, 10, 12
LENGTH, CAPACITY, COUNTS = 160, 256, (160, 77)
BOUND = 2e-4
PARTS = {
    "num_kv_heads": 1,
    "head_dim": LATENT + TURNED,
    "latent": LATENT,
    "latent_heads": LatentHeads(query_rank=20, key_dim=KEY, value_dim=VALUE),
    "rope": RopeConfig(
        theta=500.0, kind="yarn", factor=4.0, original_max_position=32, fraction=TURNED / 40
    ),
    "scale": (KEY + TURNED) ** -0.5
    * (0.1 * 2 * math.log(4.0) + 1) ** 2,  # as mscale_all_dim = 2 gives it
    "query_growth": 0.3,
}
METHODS = {
    "exact": "exact:sinks=3",
    "kivi": "kivi:bits=4,window=32,sinks=2",
    "kivi-8-and-2": "kivi:key_bits=8,value_bits=2,window=32",
    "kivi-pre": "kivi:bits=3,window=32,rope=pre",
    "kivi-published": "kivi:bits=4,window=64,rule=published",
    "kivi-rotated": "kivi:bits=2,window=32,rotate=hadamard,value_rotate=signs:3",
    "kivi-exact-keys": "kivi:bits=4,window=32;k=exact:window=32",
    "kivi-streaming": "kivi:bits=4,window=32,keep=streaming:64",
    "uniform": "uniform:bits=4,group=8",
    "higgs": "higgs:bits=4,buffer=32",
    "turboquant": "turboquant:bits=4",
    "turboquant-vllm": "turboquant:bits=4,form=vllm,boundary=0",
    "kivi-star": "kivi_star:bits=4,protected=1",
    "kvarn": "kvarn:bits=4,group=32,sinks=2",
    "omniscale": "omniscale:bits=4,window=32",
    "oscar": "oscar:bits=4,window=32,sinks=0,rotate=hadamard",
    "mixed": "higgs:bits=3,buffer=32;0=kivi:bits=4,window=0",
}

forward = jax.jit(kvq.forward)
plain_logits = jax.jit(decoder.logits, static_argnums=2)


@functools.cache
def latent_model(**changes) -> kvq.Model:
    return drawn(tiny(**PARTS | changes))


@functools.cache
def plain() -> np.ndarray:
    model = latent_model()
    return np.asarray(plain_logits(model.params, tokens(2, LENGTH), model.config))


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turn(x, angles):
    """Turn channels [.., 8] whose pairs are (i, i + 4)."""
    first, second = np.split(x, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def next_logits(model: kvq.Model, cache: Cache, newest) -> np.ndarray:
    """Logits of one new token a row, by attention of heads in float64 over the latents that the
    cache holds."""
    config, params = model.config, jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    sizes, rope, eps = config.latent_heads, config.rope, config.norm_eps
    place = np.asarray(cache.lengths)
    angles = place[:, None] * inverse_frequencies(config).astype(np.float64)[None, : TURNED // 2]
    h = params["embed"][np.asarray(newest)]
    for layer in range(config.num_layers):
        w = {name: x[layer] for name, x in params["layers"].items()}
        x = rms(h, w["attn_norm"], eps)
        q = (rms(x @ w["q_latent"], w["q_latent_norm"], sizes.norm_eps) @ w["q"]).reshape(
            -1, HEADS, KEY + TURNED
        )
        q = np.concatenate([q[..., :KEY], turn(q[..., KEY:], angles[:, None])], -1)
        q *= (1 + config.query_growth * np.log1p(place // rope.original_max_position))[
            :, None, None
        ]
        stored, _, valid = (np.asarray(x) for x in kvq.dense(cache, layer, model))
        stored = stored[:, :, 0].astype(np.float64)
        turned = np.concatenate([stored[..., :4], stored[..., 20:24]], -1)
        latent = np.concatenate([stored[..., 4:20], stored[..., 24:]], -1)
        turned = np.concatenate([turned, turn(x @ w["k"], angles)[:, None]], 1)
        latent = np.concatenate(
            [latent, rms(x @ w["v"], w["latent_norm"], sizes.norm_eps)[:, None]], 1
        )
        valid = np.concatenate([valid, np.ones((len(h), 1), bool)], 1)
        k = (latent @ w["k_up"]).reshape(*latent.shape[:2], HEADS, KEY)
        v = (latent @ w["v_up"]).reshape(*latent.shape[:2], HEADS, VALUE)
        k = np.concatenate([k, np.broadcast_to(turned[:, :, None], (*k.shape[:3], TURNED))], -1)
        scores = np.where(valid[:, None], np.einsum("bhd,bshd->bhs", q, k) * config.scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        h = h + np.einsum("bhs,bshv->bhv", weights, v).reshape(len(h), -1) @ w["o"]
        x = rms(h, w["mlp_norm"], eps)
        gate = x @ w["gate"]
        h = h + (gate / (1 + np.exp(-gate)) * (x @ w["up"])) @ w["down"]
    return rms(h, params["norm"], eps) @ params["head"]


def filled(model: kvq.Model, method: str, **options) -> Cache:
    """A cache of two rows of different lengths: prompts in chunks, and one that adds to a single
    row."""
    cache = kvq.init_cache(model, method, 2, CAPACITY, **options)
    for seed, counts in enumerate(((80, 80), (80, 0), (64, 30))):
        cache = forward(model, tokens(2, 80, seed), jnp.asarray(counts), cache)[1]
    return cache


def test_exact_cache_equals_the_decoder_without_one():
    """Rows of different lengths: a prompt in chunks, the last token by itself."""
    model, text, wanted = latent_model(), tokens(2, LENGTH), plain()
    cache = kvq.init_cache(model, "exact", 2, CAPACITY)
    for start in (0, 80):
        counts = jnp.clip(jnp.asarray(COUNTS) - 1 - start, 0, 80)
        logits, cache = forward(model, text[:, start : start + 80], counts, cache)
        logits = np.asarray(logits)
        for row, count in enumerate(counts.tolist()):
            np.testing.assert_allclose(
                logits[row, :count], wanted[row, start : start + count], atol=BOUND
            )
    newest = jnp.take_along_axis(text, jnp.asarray(COUNTS)[:, None] - 1, 1)
    logits, _ = forward(model, newest, jnp.ones(2, jnp.int32), cache)
    np.testing.assert_allclose(
        logits[:, 0], wanted[np.arange(2), np.asarray(COUNTS) - 1], atol=BOUND
    )
    last, _ = kvq.prefill(
        model, text, jnp.asarray(COUNTS), kvq.init_cache(model, "exact", 2, CAPACITY)
    )
    np.testing.assert_allclose(last, wanted[np.arange(2), np.asarray(COUNTS) - 1], atol=BOUND)


# Every method in the form of CPUs, and of GPUs (by head); few of these pairs with every change.
OFTEN = (("kivi-8-and-2", None),)
PAIRS = [
    pytest.param(name, form, marks=() if (name, form) in OFTEN else pytest.mark.nightly)
    for name in METHODS
    for form in (None, "heads")
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_every_method_attends_to_what_it_stores(name, form):
    model = latent_model()
    cache, newest = (
        filled(model, METHODS[name], **({} if form is None else {"form": form})),
        tokens(2, 1, 7),
    )
    wanted = next_logits(model, cache, newest[:, 0])
    got, after = forward(model, newest, jnp.ones(2, jnp.int32), cache)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got[:, 0], wanted, atol=3e-5 * np.abs(wanted).max())
    assert after.lengths.tolist() == [225, 111]


@pytest.mark.parametrize("field", ["rope", "scale", "query_growth"])
def test_every_field_changes_what_is_computed(field):
    model = latent_model()
    neutral = {
        "rope": dataclasses.replace(PARTS["rope"], kind="none"),
        "scale": None,
        "query_growth": 0.0,
    }
    config = dataclasses.replace(model.config, **{field: neutral[field]})
    changed = np.asarray(plain_logits(model.params, tokens(2, LENGTH), config))
    assert np.abs(changed - plain())[:, -8:].max() > 100 * BOUND


def test_a_token_is_counted_as_its_latent_and_its_turned_key():
    model = latent_model()
    cache = kvq.init_cache(model, "kivi:key_bits=8,value_bits=4,window=0", 2, 1024)
    book = kvq.ledger(cache)
    assert book.values == 2 * (LATENT + TURNED)
    # Of 32 tokens a channel, and of 32 channels a token, a scale and a minimum of 16 bits.
    assert book.bits_method == pytest.approx(
        (TURNED * (8 + 1) + LATENT * (4 + 1)) / (LATENT + TURNED)
    )
    assert book.bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    exact = kvq.ledger(kvq.init_cache(model, "exact", 2, 1024))
    assert exact.bits_method == exact.bits_exact
    assert exact.exact_bytes == 2 * 1024 * 2 * (LATENT + TURNED) * 4
    assert book.bits_exact == 32
    assert "latents of 32 + 8" in repr(model)


def test_a_plan_from_the_config_alone():
    model = latent_model()
    planned = plan_memory(model.config, "kivi:bits=4", 1024, 2, dtype="float32")
    assert planned.cache == kvq.ledger(kvq.init_cache(model, "kivi:bits=4", 2, 1024)).bytes
    assert planned.weights == sum(x.nbytes for x in jax.tree.leaves(model.params))
    matrices = ("q_latent", "q", "k", "v", "k_up", "v_up", "o")
    assert model.config.attention_numbers == sum(
        model.params["layers"][name][0].size for name in matrices
    )


@pytest.mark.nightly
def test_rows_come_and_go_and_caches_are_saved(tmp_path):
    model, method = latent_model(), "kivi:bits=4,window=32"
    cache, newest = filled(model, method), tokens(2, 1, 7)
    wanted = forward(model, newest, jnp.ones(2, jnp.int32), cache)[0]
    kvq.save_cache(tmp_path / "cache", cache, model)
    back = kvq.load_cache(tmp_path / "cache", model)
    jax.tree.map(np.testing.assert_array_equal, back, cache)
    other = kvq.init_cache(model, method, 2, CAPACITY)
    other = forward(model, tokens(2, 80, 5), jnp.asarray([50, 8]), other)[1]
    changed = kvq.insert(kvq.evict(back, jnp.asarray([True, False])), 0, other, 0)
    got = forward(model, newest, jnp.ones(2, jnp.int32), changed)[0]
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-5)
    alone = forward(model, newest, jnp.ones(2, jnp.int32), other)[0]
    np.testing.assert_allclose(got[0], alone[0], atol=1e-5)
    assert changed.lengths.tolist() == [50, 110]


@pytest.mark.nightly
def test_pages_give_what_rows_of_their_own_give():
    model, text, counts = latent_model(), tokens(2, 81), jnp.asarray([80, 41])
    plain, paged = (
        kvq.init_cache(model, "kivi:bits=4,window=0", 2, CAPACITY, pages=pages)
        for pages in (None, 4)
    )
    table = np.full(paged.pages.shape, -1, np.int32)
    table[:, 0] = 3, 1
    logits = []
    for cache in (plain, kvq.with_pages(paged, table)):
        cache = forward(model, text[:, :80], counts, cache)[1]
        logits.append(forward(model, text[:, 80:], jnp.ones(2, jnp.int32), cache)[0])
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)


@pytest.mark.nightly
def test_weights_come_as_stacks_as_a_list_and_as_codes(tmp_path):
    model, text = latent_model(architecture="Mistral4ForCausalLM"), tokens(2, 40)
    save_params(tmp_path / "model", model.params, model.config)
    wanted = np.asarray(plain_logits(model.params, text, model.config))
    for form in FORMS:
        read = load(tmp_path / "model", dtype="f32", layers=form)
        assert read.config == model.config
        np.testing.assert_allclose(plain_logits(read.params, text, read.config), wanted, atol=1e-5)
    coded = load(tmp_path / "model", dtype="f32", weights="int8")
    error = np.abs(plain_logits(coded.params, text, coded.config) - wanted).mean()
    assert 0 < error < 0.1 * np.std(wanted)


MESHES = [pytest.param({"data": 2, "model": 2}, marks=pytest.mark.nightly), {"seq": 2, "model": 4}]


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_mesh_computes_the_same(mesh):
    """Devices share out the query heads and their up-projections; all of a model axis shares the
    one key's tokens."""
    model, text = latent_model(), tokens(2, 80)
    split = shard(model, "kivi:bits=4,window=0", **mesh)
    wanted, got = (
        forward(x, text[:, :1], jnp.ones(2, jnp.int32), filled(x, "kivi:bits=4,window=0"))[0]
        for x in (model, split)
    )
    np.testing.assert_allclose(got, wanted, atol=BOUND)


REFUSED = [
    *("kvquant:bits=3", "klt:bits=2", "oscar:bits=2", "kivi:bits=2,centre=mean", "commvq:bits=1"),
    *(
        "aqua:bits=2",
        "xquant:bits=4",
        "xquant:bits=4,latent=false",
        "xquant_cl:bits=3,base=0,protected=1",
    ),
    "exact;1=commvq:bits=1",
]


@pytest.mark.parametrize("method", REFUSED)
def test_what_reads_heads_is_refused_at_the_door(method):
    with pytest.raises(
        kvq.UserError,
        match=r"(?:reads|on) keys and values by head.* a latent that all heads share$",
    ):
        kvq.init_cache(latent_model(), method, 1, CAPACITY)


def test_a_calibration_of_what_needs_none_says_that_there_is_none():
    with pytest.raises(
        kvq.UserError, match="kivi:bits=4 needs no calibration; nothing is calibrated on this model"
    ):
        calibrate.run(latent_model(), "kivi:bits=4", tokens(2, 96))


def test_shapes_that_no_latent_has_are_refused():
    good = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 1, "head_dim": 40, "latent": 32}
    with pytest.raises(kvq.UserError, match="latents are cached for kvqjax models"):
        kvq.init_cache(KVShape(**good), "exact", 1, CAPACITY)
    for wrong, message in (
        ({"latent": 40}, "latent=40; wanted an even part of one KV head of 40 channels"),
        ({"latent": 31}, "latent=31; wanted an even part"),
        ({"num_kv_heads": 2}, "wanted an even part of one KV head"),
        ({"rope": RopeConfig()}, "the rope turns other channels than the 8 beside it"),
    ):
        with pytest.raises(kvq.UserError, match=message):
            KVShape(**good | wrong)
    with pytest.raises(
        kvq.UserError, match="latent=32 and latent_heads=None; wanted both or neither"
    ):
        dataclasses.replace(latent_model().config, latent_heads=None)
