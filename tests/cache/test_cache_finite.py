"""A row's output depends on its own live tokens alone: whatever stands in dead slots, in padding
and in other rows, and what is not finite is seen (docs/design.md, idea 13)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import BAD, all_finite, check_row, empty, extend, fresh
from cases import CASES, CORE, FEW, GENERAL, model_and_method, with_nightly
from tiny import spoiling, tiny

import kvqjax as kvq
from kvqjax.cache import body_tokens, runs_of
from kvqjax.cache.state import ring_tokens

attend = jax.jit(kvq.attend, static_argnames=("within", "last"))
forward, prefill = jax.jit(kvq.forward), jax.jit(kvq.prefill)
crop, evict, gather = jax.jit(kvq.crop), jax.jit(kvq.evict), jax.jit(kvq.gather)

ROWS = [list(range(170)), list(range(100, 231)), list(range(40, 57))]
COUNTS = jnp.asarray([5, 1, 3], jnp.int32)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 49, (3, 5)), jnp.int32)
WRONG = 49  # the token whose embedding is not finite, in `infected`


def valid(logits):
    """Logits of valid tokens, one array per row."""
    return [np.asarray(row[:count]) for row, count in zip(logits, COUNTS, strict=True)]


def same(got, want) -> None:
    """Rows are computed by themselves: equal bit for bit, and finite."""
    for ours, theirs in zip(valid(got), valid(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()


def infected(name: str):
    """The model with one token whose embedding has a NaN; its padding tokens too are that one."""
    model, method = model_and_method(name) if name in CASES else (tiny(), kvq.parse(name))
    embed = model.params["embed"].at[WRONG, 3].set(jnp.nan)
    return model.replace(params=model.params | {"embed": embed}), method


def bad_like(x, dtype: str):
    """NaN, inf and -inf in the shape of stored numbers; 16-bit floats are stored as their bits."""
    bad = jnp.resize(jnp.asarray(BAD, dtype), x.shape)
    return jax.lax.bitcast_convert_type(bad, jnp.uint16) if x.dtype == jnp.uint16 else bad


@jax.jit
def with_bad_dead_slots(cache):
    """The cache with numbers that are not finite in every slot that holds no token of its row."""
    layout, sinks = cache.layout, cache.layout.method.sinks
    held = (cache.lengths - sinks)[:, None]
    states = []
    for run, state in zip(runs_of(layout), cache.runs, strict=True):
        end = body_tokens(run, state)[:, None]
        ring = ring_tokens(run.ring, end[:, 0])
        free = jnp.arange(sinks)[None] >= cache.lengths[:, None]
        marks = {
            "window": (ring < end) | (ring >= held),
            "sinks": jnp.broadcast_to(free, (cache.batch, sinks)),
        }
        exact = {
            part: {
                s: jnp.where(dead[None, :, :, None], bad_like(x, str(x.dtype)), x)
                for s, x in getattr(state, part).items()
            }
            for part, dead in marks.items()
        }
        body = {
            s: {
                n: with_bad_field(run.wiring.storage.codecs[s].fields[n], x, end, run.slots)
                for n, x in fields.items()
            }
            for s, fields in state.body.items()
        }
        states.append(state.replace(body=body, **exact))
    return cache.replace(runs=tuple(states))


def with_bad_field(field, stored, end, slots: int):
    """Numbers of tokens from `end` on are not finite; codes stay, for any code is a number."""
    if field.packed or field.role == "outliers":
        return stored
    (x,) = stored
    axis = 3 if field.kind == "token" else 2
    first = jnp.arange(x.shape[axis]) * (slots // x.shape[axis])
    dead = (first[None] >= end).reshape(1, len(end), *((1, -1) if axis == 3 else (-1, 1)))
    return (jnp.where(dead, bad_like(x, field.dtype), x),)


@pytest.mark.parametrize("name", with_nightly(GENERAL, ["kvquant"]))
def test_dead_slots_may_hold_anything(name):
    """Whatever is put into the arrays themselves: a row that is long, one that was cropped, and one
    that is new."""
    cache = crop(fresh(name, ROWS), jnp.asarray([170, 60, 17], jnp.int32))
    cache = evict(cache, jnp.asarray([False, False, True]))
    model = model_and_method(name)[0]
    for within in ("chunk", "step") if name in FEW else ("chunk",):
        want = attend(model, TOKENS, COUNTS, cache, within=within)[0]
        same(attend(model, TOKENS, COUNTS, with_bad_dead_slots(cache), within=within)[0], want)


@pytest.mark.parametrize("name", with_nightly(GENERAL, ["kivi2"]))
def test_what_is_not_finite_is_seen_and_does_not_outlive_its_request(name):
    """Appended: the row is flagged, its logits are NaN, nothing of it is stored; others are as they
    would be alone. Cropped or evicted: an ordinary row."""
    model, cache = model_and_method(name)[0], fresh(name, ROWS)
    want = attend(model, TOKENS, COUNTS, cache)[0]
    more = extend(name, cache, [list(range(200, 300)), [], list(range(60, 70))], broken={0: 50})
    assert more.nonfinite.tolist() == [True, False, False]
    assert int(more.finite[0]) == 220
    assert all_finite(more)
    got = attend(model, TOKENS, COUNTS, more)[0]
    assert np.isnan(valid(got)[0]).all()
    assert np.isfinite(valid(got)[2]).all()
    np.testing.assert_array_equal(valid(got)[1], valid(want)[1])
    assert gather(more, jnp.asarray([1, 0, 0])).nonfinite.tolist() == [False, True, True]
    assert kvq.insert(cache, 2, more, 0).nonfinite.tolist() == [False, False, True]
    later = extend(name, more, [list(range(40)), [], []])
    assert int(later.finite[0]) == 220

    cut = crop(more, jnp.asarray([219, 131, 27], jnp.int32))
    assert not cut.nonfinite.any()
    check_row(name, cut, 0, (ROWS[0] + list(range(200, 300)))[: int(cut.lengths[0])])
    gone = evict(more, jnp.asarray([True, False, True]))
    assert not gone.nonfinite.any()
    again = extend(name, gone, [ROWS[0], [], ROWS[2]])
    check_row(name, again, 0, ROWS[0])
    same(attend(model, TOKENS, COUNTS, again)[0], want)


THROUGH = ("kivi3-sinks", "kivi-published", "aqua", "xquant-cl", "exact:keep=streaming:32")


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(THROUGH, ["kivi3-sinks"]))
def test_a_token_without_a_finite_embedding(name):
    """Through `forward` and through `prefill`: logits are NaN from that token on, and in later
    calls; the padding, which is such tokens too, and the other rows do no harm."""
    model, method = infected(name)
    text = (
        jnp.full((3, 48), WRONG)
        .at[:, :40]
        .set(jnp.asarray(np.random.default_rng(1).integers(0, 49, (3, 40))))
    )
    counts, spoilt = jnp.asarray([40, 33, 40]), text.at[0, 25].set(WRONG)
    start = kvq.init_cache(model, method, 3, 256)
    want, clean = forward(model, text, counts, start)
    got, cache = forward(model, spoilt, counts, start)
    np.testing.assert_array_equal(got[1, :33], want[1, :33])
    np.testing.assert_array_equal(got[0, :25], want[0, :25])
    assert np.isnan(got[0, 25:40]).all()
    assert np.isfinite(want[1, :33]).all()
    last, filled = prefill(model, text, counts, start)
    poor, holed = prefill(model, spoilt, counts, start)
    np.testing.assert_array_equal(poor[1:], last[1:])
    assert np.isnan(poor[0]).all()
    for broken, whole in ((cache, clean), (holed, filled)):
        assert broken.nonfinite.tolist() == [True, False, False]
        assert int(broken.finite[0]) == 25
        assert all_finite(broken)
        after = forward(model, TOKENS, COUNTS, broken)[0]
        assert np.isnan(valid(after)[0]).all()
        np.testing.assert_array_equal(
            valid(after)[1], valid(forward(model, TOKENS, COUNTS, whole)[0])[1]
        )
        again = evict(broken, jnp.asarray([True, False, False]))
        again = forward(model, text, jnp.asarray([40, 0, 0]), again)[1]
        alone, others = (forward(model, TOKENS, COUNTS, c)[0] for c in (clean, whole))
        same(forward(model, TOKENS, COUNTS, again)[0], jnp.concatenate([alone[:1], others[1:]]))


def test_a_key_that_overflows_to_minus_infinity_is_seen():
    """Its weight is 0, so the output alone would not show it. Channel 31 of the input is the third
    token's alone; RoPE turns that token's key, two equal channels of 3e38, so that one of them
    overflows."""
    model, pair = tiny(num_layers=1), np.asarray([0, 8])
    layers, own = model.params["layers"], 1 / np.sqrt(32)  # its input after the norm is sqrt(32)
    embed = model.params["embed"].at[:, 31].set(0).at[WRONG].set(jnp.zeros(32).at[31].set(1.0))
    k = layers["k"].at[..., pair].set(0).at[0, 31, pair].set(3e38 * own)
    both = np.concatenate([pair, pair + 16])  # the two query heads of that KV head
    q = layers["q"].at[..., both].set(0).at[0, 31, both].set(-own)
    model = model.replace(
        params=model.params | {"embed": embed, "layers": layers | {"k": k, "q": q}}
    )
    text, cache = jnp.asarray([[1, 2, WRONG]]), kvq.init_cache(model, kvq.exact(), 1, 64)
    logits, pending = attend(model, text, jnp.full(1, 3), cache)
    keys = np.asarray(pending[0]["k"])[0, 0]
    assert np.isfinite(keys[:2]).all()
    assert np.flatnonzero(~np.isfinite(keys[2])).tolist() == [0]
    assert keys[2, 0] == -np.inf
    assert np.isfinite(logits[0, :2]).all()
    assert np.isnan(logits[0, 2]).all()


HUGE = 6e4


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("kivi-published", marks=pytest.mark.nightly),
        pytest.param("kivi-pre", marks=pytest.mark.nightly),
        pytest.param("kvquant", marks=pytest.mark.nightly),
        "commvq",
        pytest.param("aqua", marks=pytest.mark.nightly),
        pytest.param("xquant-latents", marks=pytest.mark.nightly),
        pytest.param("xquant-cl", marks=pytest.mark.nightly),
    ],
)
def test_reconstructions_saturate_in_float16(name):
    """Sources near the largest number of float16: what is stored, decoded and attended to stays
    finite."""
    model, method = model_and_method(name)
    params = jax.tree.map(lambda x: x.astype(jnp.float16), model.params)
    # Sums of huge outputs are not what is tested.
    params["layers"]["o"] = params["layers"]["o"] * jnp.float16(1e-6)
    model = model.replace(params=params)
    cache = kvq.init_cache(model, method, 3, 512)
    random, sources = np.random.default_rng(0), []
    for run in runs_of(cache.layout):
        shapes = {
            name: (run.count, 3, 200, width) for name, width in run.wiring.storage.sources.items()
        }
        made = {
            name: random.choice([-1, 1], shape) * random.uniform(0.9, 1.09, shape)
            for name, shape in shapes.items()
        }
        sources.append({name: jnp.asarray(HUGE * x, jnp.float16) for name, x in made.items()})
    cache = jax.jit(kvq.commit)(model, cache, tuple(sources), jnp.asarray([200, 170, 3]))
    assert not cache.nonfinite.any()
    assert all_finite(cache)
    logits = attend(model, TOKENS, COUNTS, cache)[0]
    assert all(np.isfinite(row).all() for row in valid(logits))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *with_nightly(((name, "float32") for name in CASES), [(name, "float32") for name in CORE]),
        *with_nightly(
            ((name, "bfloat16") for name in (*FEW, "kvquant", "commvq")),
            [("kivi2", "bfloat16"), ("kvquant", "bfloat16")],
        ),
    ],
)
def test_codecs_of_huge_numbers_stay_finite(name, dtype):
    """Up to the largest number of the type: ranges and sums of squares would overflow."""
    model, _ = model_and_method(name)
    for run, constants in zip(runs_of(empty(name, 1).layout), model.constants, strict=True):
        for source, codec in run.wiring.storage.codecs.items():
            own = jax.tree.map(lambda x: x[0], constants.get(source, {}))
            signs = np.random.default_rng(0).choice(
                [-1, 1], (run.wiring.storage.clocks[0].unit, codec.width)
            )
            decoded = jax.jit(lambda own, x, codec=codec: codec.decode(own, codec.encode(own, x)))
            back = decoded(own, jnp.asarray(signs, dtype) * jnp.finfo(dtype).max)
            assert np.isfinite(np.asarray(back, np.float32)).all()


@pytest.mark.parametrize(
    "call",
    with_nightly([kvq.generate, kvq.speculate, kvq.beam_search], [kvq.generate]),
    ids=lambda call: call.__name__,
)
def test_generation_says_so(call):
    """The model draws a token that has no finite embedding: not a word of what follows is given
    out."""
    message = "row 0: a key or value of token 2 is NaN or infinite; check the model's weights, or try dtype='f32'"
    with pytest.raises(kvq.UserError, match=f"^{message}$"):
        call(spoiling(), [[1, 2]], kvq.exact(), max_new_tokens=4)


@pytest.mark.nightly
def test_calibration_sees_it_too():
    """AQUA-KV fits what an exact prefill gives the cache, where 0 stands for what is not finite."""
    model = kvq.load("recall")
    broken = model.replace(
        params=model.params | {"embed": model.params["embed"].at[:, 0].set(jnp.nan)}
    )
    with pytest.raises(kvq.UserError, match="came out NaN or infinite"):
        kvq.calibrate.run(broken, kvq.parse("aqua"), "ab12" * 99, count=1, length=132)
