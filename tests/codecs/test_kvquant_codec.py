"""KVQuant's codecs: the properties the paper implies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nuq import FULL, mostly_close, round_trip, slots_of

from kvqjax.codecs.nuq import Nuq
from kvqjax.codecs.nuq_outliers import _compared, _scattered, split_outliers
from kvqjax.codecs.nuq_table import look_up, nearest


def synthetic(seed, tokens=64, width=256):
    """Signed data with a large channel, an offset channel, a large first token and spikes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, width)).astype(np.float32)
    x[:, 3] *= 20
    x[:, 7] += 15
    x[0] *= 30
    return np.where(rng.random(x.shape) < 0.001, 40 * x, x)


def offline(x, outliers=0.01):
    upper, lower = (
        np.quantile(x, q, axis=0).astype(np.float32) for q in (1 - outliers / 2, outliers / 2)
    )
    table = np.asarray([-0.9, -0.55, -0.3, -0.1, 0.08, 0.3, 0.6, 0.95], np.float32)
    return {
        "upper": jnp.asarray(upper),
        "lower": jnp.asarray(lower),
        "signposts": jnp.asarray(table),
    }


@pytest.mark.parametrize("scales", ["bfloat16", "float32"])
def test_dense_error_is_half_a_gap_and_outliers_are_exact(scales):
    x = np.asarray(jnp.asarray(synthetic(0)).astype(jnp.bfloat16).astype(jnp.float32))
    constants = offline(x)
    table = np.asarray(constants["signposts"])
    reach = max(np.diff(table).max() / 2, 1 - table[-1], table[0] + 1)
    scale = np.asarray(constants["upper"] - constants["lower"]) / 2
    keys = Nuq(bits=3, per="channel", slots=254, dtype=scales)
    _, ours = round_trip(keys, constants, x)
    outside = (x > np.asarray(constants["upper"])) | (x < np.asarray(constants["lower"]))
    assert outside.any()
    np.testing.assert_array_equal(ours[outside], x[outside])
    assert (np.abs(ours - x) <= reach * scale + 1e-5 * np.abs(x).max()).all()
    values = Nuq(bits=3, per="token", slots=4, dtype=scales)
    tile, ours = round_trip(values, constants, x)
    scale, centre = (np.asarray(tile[name].astype(jnp.float32)).T for name in ("scale", "centre"))
    channels = slots_of(values, tile, x)[1].T
    np.testing.assert_array_equal(
        np.take_along_axis(ours, channels, 1), np.take_along_axis(x, channels, 1)
    )
    inside = np.ones(x.shape, bool)
    np.put_along_axis(inside, channels, False, 1)
    assert (
        np.abs((x - centre) / scale)[inside] <= 1 + 1e-6
    ).all()  # the stored range covers what is not an outlier
    assert (np.abs(ours - x) <= reach * scale + 1e-5 * np.abs(x).max()).all()


def test_values_follow_shifts_and_scalings_of_a_token():
    v = synthetic(1)
    constants = {"signposts": offline(v)["signposts"]}
    wide = Nuq(bits=3, per="token", slots=4, **FULL)
    tile, base = round_trip(wide, constants, v)
    moved, ours = round_trip(wide, constants, v * 8 + 5)
    np.testing.assert_array_equal(slots_of(wide, tile, v)[1], slots_of(wide, moved, v)[1])
    assert (
        np.asarray(tile["codes"]) == np.asarray(moved["codes"])
    ).mean() > 0.9999  # the addition rounds
    mostly_close(ours, base * 8 + 5, 1e-5 * np.abs(v).max(), 0.9995)
    stored, base = round_trip(Nuq(bits=3, per="token", slots=4), constants, v)
    moved, ours = round_trip(Nuq(bits=3, per="token", slots=4), constants, v * 8)
    # A power of two is exact in bfloat16 too.
    np.testing.assert_array_equal(stored["codes"], moved["codes"])
    np.testing.assert_array_equal(ours, base * 8)


def test_large_offsets_cost_range_and_no_bias():
    """Values at 200 +- 1: centre and scale in bfloat16 widen the range by at most half the centre's
    spacing (here 1)."""
    v = 200 + np.random.default_rng(2).uniform(-1, 1, (256, 256)).astype(np.float32)
    constants = {"signposts": jnp.linspace(-1.0, 1.0, 16, dtype=jnp.float32)}
    tile, ours = round_trip(Nuq(bits=4, per="token"), constants, v)
    scale = np.asarray(tile["scale"].astype(jnp.float32)).T
    assert (scale <= 1.5 * (1 + 2**-7)).all()
    assert (np.abs(ours - v) <= scale / 15 + 1e-4).all()
    # Six standard errors of 65536 entries with a step of at most 0.2: 0.0014.
    assert abs((ours - v).mean()) < 0.004


def test_permuted_channels_permute_outlier_channels_only():
    x = synthetic(3)
    order = np.random.default_rng(4).permutation(x.shape[1])
    constants = offline(x)
    moved = constants | {name: constants[name][order] for name in ("upper", "lower")}
    for per, first, second in (("channel", constants, moved), ("token", constants, constants)):
        spec = Nuq(bits=3, per=per, slots=12)
        tile, base = round_trip(spec, first, x)
        permuted, ours = round_trip(spec, second, x[:, order])
        np.testing.assert_array_equal(np.asarray(tile["codes"])[:, order], permuted["codes"])
        np.testing.assert_array_equal(base[:, order], ours)
        channels = slots_of(spec, permuted, x)[1]
        back = np.where(
            channels < x.shape[1], order[np.minimum(channels, x.shape[1] - 1)], x.shape[1]
        )
        np.testing.assert_array_equal(np.sort(back, 0), np.sort(slots_of(spec, tile, x)[1], 0))


def test_token_statistics_span_all_heads():
    """One loud head of four sets the range of the whole token: GQA statistics are per token, not
    per head."""
    v = synthetic(5, width=256)
    loud = v.copy()
    loud[:, 192:] *= 100
    constants = {"signposts": offline(v)["signposts"]}
    quiet_error, loud_error = (
        np.abs(round_trip(Nuq(bits=3, per="token"), constants, x)[1] - x)[1:, 16:192].mean()
        for x in (v, loud)
    )
    assert loud_error > 3 * quiet_error


@pytest.mark.parametrize("per", ["channel", "token"])
def test_streaming_equals_the_block(per):
    x = synthetic(6, tokens=12)
    constants = offline(x)
    codec = Nuq(bits=3, per=per, slots=4).build(x.shape[1])
    encode = jax.jit(codec.encode)
    block = encode(constants, jnp.asarray(x))
    steps = [encode(constants, jnp.asarray(x[i : i + 1])) for i in range(len(x))]
    for name, field in codec.fields.items():
        joined = jnp.concatenate([s[name] for s in steps], axis=0 if field.kind == "codes" else 1)
        np.testing.assert_array_equal(joined, block[name])


def test_baselines_share_the_outlier_path():
    x = synthetic(7)
    constants = offline(x)
    for per in ("channel", "token"):
        tiles = [
            round_trip(Nuq(bits=3, per=per, slots=4, datatype=d), constants, x)[0]
            for d in ("nuq", "nf", "int")
        ]
        for tile in tiles[1:]:
            np.testing.assert_array_equal(tile["outliers"], tiles[0]["outliers"])


def test_nearest_gives_a_middle_to_the_lower_signpost():
    table = jnp.asarray([-1.0, 0.0, 0.5, 1.0], jnp.float32)
    u = jnp.asarray([-9.0, -0.5, -0.499, 0.25, 0.251, 0.75, 9.0, jnp.inf], jnp.float32)
    codes = nearest(u, table)
    np.testing.assert_array_equal(codes, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(look_up(codes, table), table[codes])


def test_degenerate_tokens_and_channels_stay_finite_and_alone():
    x = synthetic(8)
    x[:, 5] = 2.5  # a constant channel has range 0
    constants = offline(x)
    bad = x.copy()
    bad[3] = 0.0
    bad[4, 9] = np.inf
    for per in ("channel", "token"):
        spec = Nuq(bits=3, per=per, slots=4)
        good, ours = (round_trip(spec, constants, a)[1] for a in (x, bad))
        assert np.isfinite(np.delete(ours, 4, axis=0)).all()
        np.testing.assert_array_equal(np.delete(good, [3, 4], 0), np.delete(ours, [3, 4], 0))
        assert np.isinf(ours[4, 9])
        assert np.isfinite(np.delete(ours[4], 9)).all()
    assert (
        round_trip(Nuq(bits=3, per="token"), constants, np.zeros((2, 64), np.float32))[1] == 0
    ).all()
    np.testing.assert_array_equal(
        round_trip(Nuq(bits=3, per="channel"), constants, x)[1][:, 5], 2.5
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"bits": 5}, "bits"),
        ({"per": "head"}, "per"),
        ({"datatype": "fp"}, "datatype"),
        ({"outliers": 3.0}, "outliers"),
        ({"slots": 3}, "slots"),
    ],
)
def test_bad_options_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        Nuq(**({"bits": 3, "per": "token"} | options))
    with pytest.raises(ValueError, match="width"):
        Nuq(bits=3, per="token", slots=32).build(32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_outliers_are_set_alike_on_every_chip(dtype):
    """By selects (GPUs) and one by one; some slots of keys are unused."""
    x, spec = (
        synthetic(5),
        Nuq(bits=2, per="channel", outliers=0.02, datatype="nf", outlier_dtype=dtype),
    )
    tile = spec.build(256).encode(offline(x, 0.01), jnp.asarray(x))
    parts = split_outliers(tile["outliers"], spec.slot_count(256), dtype)
    assert (parts[1] == 256).any()
    assert (parts[1] < 256).any()
    dense = jnp.asarray(x) + 1
    found = jax.jit(_compared)(dense, *parts)
    np.testing.assert_array_equal(found, jax.jit(_scattered)(dense, *parts))
    assert (found != dense).any()
