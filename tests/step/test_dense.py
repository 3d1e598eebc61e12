"""A layer's keys and values as plain arrays: attention over them in numpy is the attention of
`forward`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.model import decoder
from kvqjax.model.rope import rotate

ROWS, LENGTH, CAPACITY = 3, 80, 512
LENGTHS = (300, 170, 0)
step = jax.jit(kvq.forward)
project, finish = (jax.jit(f, static_argnums=3) for f in (decoder.project, decoder.finish))


def filled(model, method):
    """A cache of LENGTHS tokens: bodies, full windows, rings that have wrapped, evicted tokens, an
    empty row."""
    cache = kvq.init_cache(model, method, ROWS, CAPACITY)
    for seed, start in enumerate(range(0, max(LENGTHS), LENGTH)):
        counts = jnp.clip(jnp.asarray(LENGTHS) - start, 0, LENGTH)
        cache = step(model, tokens(ROWS, LENGTH, seed), counts, cache)[1]
    return cache


def numpy_attention(q, k, v, valid):
    """One query a row, float64: q [B, H, D], k and v [B, S, K, D], valid [B, S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[2], 2) for x in (k, v))
    scores = np.where(
        valid[:, None], np.einsum("bhd,bshd->bhs", q, k) * q.shape[-1] ** -0.5, -np.inf
    )
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhs,bshd->bhd", weights / weights.sum(-1, keepdims=True), v)


def decoded_by_numpy(model, cache, newest):
    """Logits of one new token a row, [B, V], by attention over `dense` and the token itself."""
    positions, config = cache.lengths[:, None], model.config
    h = decoder.embed(model.params, newest, config)
    for layer in range(config.num_layers):
        weights = decoder.layer(model.params, layer)
        made = project(weights, h, positions, config)
        k, v, valid = kvq.dense(cache, layer, model)
        assert not np.asarray(k)[~np.asarray(valid)].any()
        k = np.concatenate([k, rotate(made.k, positions, config)], 1)
        v, valid = (
            np.concatenate([v, made.v], 1),
            np.concatenate([valid, np.ones((ROWS, 1), bool)], 1),
        )
        out = numpy_attention(made.q[:, 0], k, v, valid)
        h = finish(weights, h, jnp.asarray(out, jnp.float32)[:, None], config)
    return decoder.unembed(model.params, h, config)[:, 0]


# Evicted tokens; keys that are kept rotated and without the model's bias, which reading adds.
OTHERS = {
    "streaming": ("kivi:bits=2,window=32,sinks=4,keep=streaming:64", {}),
    "biased-rotated": ("kivi:bits=2,window=32,rotate=signs,centre=auto", {"qkv_bias": True}),
}


def biased(model: kvq.Model) -> kvq.Model:
    """The model with key biases that matter, where it has any."""
    layers = model.params["layers"]
    if "k_bias" not in layers:
        return model
    offset = 3 * jax.random.normal(jax.random.key(5), layers["k_bias"].shape)
    return model.replace(params=model.params | {"layers": layers | {"k_bias": offset}})


@pytest.mark.parametrize(
    "name",
    with_nightly([*CASES, *OTHERS], ["kivi2"]),
)
def test_attention_over_dense_arrays_is_that_of_forward(name):
    if name in OTHERS:
        model, method = biased(tiny(**OTHERS[name][1])), kvq.parse(OTHERS[name][0])
    else:
        model, method = model_and_method(name)
    cache, text = filled(model, method), tokens(ROWS, LENGTH, 7)
    wanted = step(model, text, jnp.ones(ROWS, jnp.int32), cache)[0][:, 0]
    got = decoded_by_numpy(model, cache, text[:, :1])
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.nightly
def test_valid_marks_what_a_layer_still_sees():
    model, method = model_and_method("sliding-mixed")
    cache = filled(model, method)
    for layer, first in enumerate(((300 - 95, 170 - 95, 0), (0, 0, 0))):
        valid = np.asarray(kvq.dense(cache, layer)[2])
        for row, length in enumerate(LENGTHS):
            np.testing.assert_array_equal(np.flatnonzero(valid[row]), np.arange(first[row], length))


def test_a_cache_without_a_model():
    """Constants alone are enough where keys and values are stored; inside jit a layer may be
    traced."""
    model, method = model_and_method("kvquant")
    cache, fixed = filled(model, method), model.constants
    wanted = kvq.dense(cache, 1, model)
    traced = jax.jit(lambda layer: kvq.dense(cache, layer, constants=fixed))(1)
    for got in (kvq.dense(cache, 1, constants=fixed), traced):
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert [x.shape for x in wanted] == [(3, 512, 2, 16), (3, 512, 2, 16), (3, 512)]


def test_what_is_missing_is_named_in_one_line():
    model, method = model_and_method("xquant-cl")
    cache = kvq.init_cache(model, method, 1, 64)
    with pytest.raises(kvq.UserError, match="made with the model's weights; pass model="):
        kvq.dense(cache, 1, constants=model.constants)
    with pytest.raises(kvq.UserError, match="`layer` must be a plain number"):
        jax.jit(lambda layer: kvq.dense(cache, layer, model))(1)
    with pytest.raises(kvq.UserError, match="layer=2; it must be a whole number from 0 to 1"):
        kvq.dense(cache, 2, model)
    with pytest.raises(kvq.UserError, match="layer 0 needs the calibrated constant"):
        kvq.dense(kvq.init_cache(model, model_and_method("kvquant")[1], 1, 64), 0, tiny())
    dealt = kvq.shard(tiny(), "kivi:bits=2,window=32", seq=2)
    with pytest.raises(kvq.UserError, match="dealt over 2"):
        kvq.dense(kvq.init_cache(dealt, "kivi:bits=2,window=32", 1, 512), 0, dealt)
