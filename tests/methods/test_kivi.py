"""KIVI end to end: the published window rule and decode outputs, packed storage, spec strings."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly

from kvqjax import METHODS, exact, kivi, parse, policy
from kvqjax.cache import CacheLayout, allocate_cache, at_layer, commit, runs_of
from kvqjax.cache.attention import attend_body, attend_exact
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.model.config import ModelConfig
from kvqjax.ops.attention import merge

GOLDEN = Path(__file__).parents[1] / "data"


def one_layer(heads, kv_heads, head_dim):
    return ModelConfig(
        vocab_size=8,
        width=8,
        mlp_width=8,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def empty(config, method, capacity, batch=1):
    return allocate_cache(
        CacheLayout(shape=config.kv_shape, method=method, capacity=capacity, dtype="float32"), batch
    )


append = jax.jit(lambda cache, k, v, counts: commit(cache, ({"k": k[None], "v": v[None]},), counts))


@pytest.mark.parametrize(
    ("window", "group"), with_nightly([(32, 32), (128, 32), (128, 128)], [(32, 32), (128, 128)])
)
def test_window_follows_the_published_trace(window, group):
    """Ten prompts are ten rows of one ragged batch; lengths of packed and exact keys and values
    after every step."""
    golden = np.load(GOLDEN / "golden_kivi_window.npz")
    prompts, lens = golden[f"prompt_R{window}_g{group}"], golden[f"lens_R{window}_g{group}"]
    method = kivi(group=group, window=window, rule="published")
    longest = int(prompts.max())
    cache = empty(one_layer(1, 1, group), method, longest + 201, len(prompts))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(len(prompts), longest, group)), jnp.float32)
    cache = append(cache, x, x, jnp.asarray(prompts, jnp.int32))
    for step in range(201):
        if step:
            cache = append(cache, x[:, :1], x[:, :1], jnp.ones(len(prompts), jnp.int32))
        keys, values = (np.asarray(f) for f in cache.runs[0].flushed)
        total = np.asarray(cache.lengths)
        got = np.stack([keys * window, total - keys * window, values, total - values], 1)
        np.testing.assert_array_equal(got, lens[:, step], err_msg=f"step {step}")


def attend_once(cache, q, k, v):
    """Attention of one new token as `forward` computes it, with queries and keys given."""
    (run,), (state,) = runs_of(cache.layout), cache.runs
    new = {"k": k.reshape(1, 1, -1), "v": v.reshape(1, 1, -1)}
    view = LayerView(run, state, jnp.int32(0), {}, {}, new, 0)
    tokens = NewTokens(cache.lengths[:, None], jnp.ones(1, jnp.int32), cache.lengths)
    parts, _ = attend_exact(q, view, tokens, False, {})
    body, _ = attend_body(q, view, tokens, {})
    return merge(*parts, body)


@pytest.mark.smoke
def test_decode_outputs_equal_the_published_ones():
    golden = np.load(GOLDEN / "golden_kivi_decode.npz")
    prompt, steps, window, group, key_bits, value_bits = (int(x) for x in golden["settings"])
    # [1, T, heads, D]
    q, k, v = (jnp.asarray(golden[name].transpose(0, 2, 1, 3)) for name in "qkv")
    options = {"key_bits": key_bits, "value_bits": value_bits, "group": group, "window": window}
    method = kivi(rule="published", scales="float32", **options)
    cache = empty(one_layer(q.shape[2], k.shape[2], 64), method, prompt + steps)

    def flat(x):
        return x.reshape(1, x.shape[1], -1)

    cache = append(cache, flat(k[:, :prompt]), flat(v[:, :prompt]), jnp.asarray([prompt]))
    once = jax.jit(attend_once)
    worst, peak = 0.0, float(np.abs(golden["decode_out"]).max())
    for step in range(steps):
        at = slice(prompt + step, prompt + step + 1)
        out = once(cache, q[:, step + 1 : step + 2], k[:, at], v[:, at])
        worst = max(
            worst, float(np.abs(np.asarray(out[0, 0]) - golden["decode_out"][0, step]).max())
        )
        cache = append(cache, flat(k[:, at]), flat(v[:, at]), jnp.ones(1, jnp.int32))
    assert worst <= 2e-5 * peak


@pytest.mark.parametrize(
    ("spec", "bits"), [("kivi:bits=2", 2), ("kivi:bits=3,rope=pre", 3), ("kivi:bits=8", 8)]
)
def test_the_body_holds_packed_words_only(spec, bits):
    """No float array outside sinks and window has a token axis finer than its group."""
    config = one_layer(2, 2, 32)
    cache = empty(config, parse(spec), 1024)
    body = cache.runs[0].body
    slots = runs_of(cache.layout)[0].slots
    for source in "kv":
        words = body[source]["codes"]
        assert all(a.dtype == jnp.uint32 for a in words)
        assert sum(a.nbytes for a in words) * 8 == slots * config.kv_width * bits
        for name in ("scale", "low"):
            (array,) = body[source][name]
            assert array.dtype == jnp.uint16, "the bits of bfloat16"
            assert array.size * 32 == slots * config.kv_width, "one number for 32 values"


def test_spec_strings_round_trip_and_name_the_nearest():
    for text in (
        "exact",
        "kivi:bits=2,window=64,sinks=4",
        "kivi:bits=2,key_bits=4,rope=pre;0-1=exact;-1=kivi:bits=8",
    ):
        assert str(parse(text)) == text
        assert parse(str(parse(text))) == parse(text)
    assert kivi(bits=2) == parse("kivi:bits=2")
    with pytest.raises(ValueError, match="did you mean 'kivi'"):
        parse("kivy")
    with pytest.raises(ValueError, match="did you mean 'window'"):
        parse("kivi:windo=3")
    with pytest.raises(ValueError, match="'two' is not of type int"):
        parse("kivi:bits=two")


def test_policies_give_layers_their_own_method():
    config = ModelConfig(
        vocab_size=8, width=8, mlp_width=8, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=32
    )
    mixed = policy(kivi(bits=2), {"0-1": exact(), "-1": kivi(bits=4)})
    runs = runs_of(CacheLayout(shape=config.kv_shape, method=mixed, capacity=512, dtype="float32"))
    assert [(run.first, run.count) for run in runs] == [(0, 2), (2, 1), (3, 1)]
    with pytest.raises(ValueError, match="layer 9 does not exist"):
        policy(kivi(), {"9": exact()}).layers(config)


def test_every_method_has_a_spec_string():
    for name, factory in METHODS.items():
        assert str(factory()).partition(":")[0] == name
        assert parse(str(factory())) == parse(name) == factory()


def test_pick_takes_one_layer():
    np.testing.assert_array_equal(
        at_layer({"a": jnp.arange(6).reshape(2, 3)}, jnp.int32(1))["a"], [3, 4, 5]
    )
