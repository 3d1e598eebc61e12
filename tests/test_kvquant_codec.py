"""KVQuant's codecs against the authors' released code (golden vectors) and the properties the paper implies."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax import layout
from kvqjax.codecs.base import bits_per_value
from kvqjax.codecs.nuq import Nuq, excess
from kvqjax.codecs.nuq_table import fixed_signposts, look_up, nearest

DATA = Path(__file__).parent / "data"
FULL = {"dtype": "float32", "outlier_dtype": "float32"}  # storage as wide as the released simulation's


def golden(name):
    with np.load(DATA / f"golden_kvquant_{name}.npz") as data:
        return dict(data)


def round_trip(spec, constants, x):
    codec = spec.build(x.shape[-1])
    tile = jax.jit(codec.encode)(constants, jnp.asarray(x))
    return tile, np.asarray(jax.jit(codec.decode)(constants, tile))


def mostly_close(ours, theirs, bound, share=0.999):
    """The golden tolerance: `share` of the entries within `bound`, the rest being ties between two signposts."""
    close = np.abs(ours - theirs) <= bound
    assert close.mean() >= share, np.abs(ours - theirs).max()


def synthetic(seed, tokens=64, width=256):
    """Signed data with a large channel, an offset channel, a large first token and spikes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, width)).astype(np.float32)
    x[:, 3] *= 20
    x[:, 7] += 15
    x[0] *= 30
    return np.where(rng.random(x.shape) < 0.001, 40 * x, x)


def offline(x, outliers=0.01):
    upper, lower = (np.quantile(x, q, axis=0).astype(np.float32) for q in (1 - outliers / 2, outliers / 2))
    table = np.asarray([-0.9, -0.55, -0.3, -0.1, 0.08, 0.3, 0.6, 0.95], np.float32)
    return {"upper": jnp.asarray(upper), "lower": jnp.asarray(lower), "signposts": jnp.asarray(table)}


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize("source", ["k", "v"])
def test_matches_the_released_quantiser(source, mode, bits):
    data = golden("runtime")
    x = data[f"{source}_x"]
    count = int(data[f"{source}_mask"].sum(1).max()) if mode == "sparse" else 0
    suffix = "_dense" if mode == "dense" else ""
    bounds = {name: jnp.asarray(data[f"k_{name}{suffix}"]) for name in ("upper", "lower")}
    for datatype in ("nuq", "int", "nf"):
        if f"{source}_{mode}_{datatype}{bits}" not in data:
            continue
        constants = {**bounds, "signposts": jnp.asarray(np.sort(data[f"{source}_{mode}_lut{bits}"]))}
        if source == "v":
            del constants["upper"], constants["lower"]
        spec = Nuq(bits=bits, per="channel" if source == "k" else "token", slots=count, datatype=datatype, **FULL)
        _, ours = round_trip(spec, constants, x)
        theirs = data[f"{source}_{mode}_{datatype}{bits}"]
        # The released nf path rounds its signposts to float16: up to 2.5e-4 of the scale, here at most max|x|.
        bound = 2e-6 * np.abs(x).max() + 1e-6 if datatype != "nf" else 5e-4 * np.abs(x).max()
        mostly_close(ours, theirs, bound)


def test_q_norm_reads_signposts_through_scale_and_offset():
    data = golden("runtime")
    constants = {name: jnp.asarray(data[f"k_{name}"]) for name in ("upper", "lower")}
    constants |= {"signposts": jnp.asarray(data["k_sparse_lut2"]), "norm": jnp.asarray([1.07, -0.013], jnp.float32)}
    spec = Nuq(bits=2, per="channel", slots=int(data["k_mask"].sum(1).max()), q_norm=True, **FULL)
    _, ours = round_trip(spec, constants, data["k_x"])
    mostly_close(ours, data["k_sparse_nuq2_qnorm"], 2e-6 * np.abs(data["k_x"]).max() + 1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_matches_the_released_layer_at_half_precision(bits):
    """The released layer keeps thresholds in float16 and halves their sum and difference there: so do the constants
    here."""
    data = golden("linear")
    y = data["y_fp16"].astype(np.float32)
    upper, lower = (data[name].astype(np.float16) for name in ("upper", "lower"))
    centre, scale = (((upper + sign * lower) / np.float16(2)).astype(np.float32) for sign in (1, -1))
    bounds = {"upper": jnp.asarray(centre + scale), "lower": jnp.asarray(centre - scale)}
    for source, per, extra in (("k", "channel", bounds), ("v", "token", {})):
        constants = {**extra, "signposts": jnp.asarray(np.sort(data[f"lut_{source}{bits}"]))}
        count = y.shape[1] - 2 if source == "k" else 2
        _, ours = round_trip(Nuq(bits=bits, per=per, slots=count, **FULL), constants, y)
        theirs = data[f"{source}_nuq{bits}"]
        ours = ours.astype(np.float16).astype(np.float32)
        mostly_close(ours, theirs.astype(np.float32), np.spacing(np.abs(theirs)).astype(np.float32), 0.995)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_normal_float_signposts(bits):
    np.testing.assert_allclose(fixed_signposts("nf", bits), golden("runtime")[f"nf{bits}"], atol=3e-7)


def test_key_outliers_are_those_beyond_the_thresholds():
    data = golden("outlier_edges")
    constants = {"upper": jnp.asarray(data["upper"]), "lower": jnp.asarray(data["lower"])}
    x, mask = data["x"], data["mask"]
    width = x.shape[1]
    spec = Nuq(bits=3, per="channel", slots=int(mask.sum(1).max()), datatype="int", **FULL)
    channels = np.asarray(round_trip(spec, constants, x)[0]["channels"])
    for row in range(len(x)):
        assert sorted(c for c in channels[:, row] if c < width) == list(np.flatnonzero(mask[row]))
    capped = Nuq(bits=3, per="channel", slots=42, datatype="int", **FULL)
    tile, ours = round_trip(capped, constants, x)
    # The released cap keeps 21 at each end; one cap on both ends together keeps the 42 farthest, so never less in
    # sum.
    scale = (data["upper"] - data["lower"]) / 2
    reach = np.abs((x - (data["upper"] + data["lower"]) / 2) / scale)
    for row, kept in enumerate(np.asarray(tile["channels"]).T):
        assert reach[row][kept].sum() >= reach[row][data["mask_capped"][row]].sum() * (1 - 1e-6)
        np.testing.assert_array_equal(ours[row][kept], x[row][kept])
    np.testing.assert_array_equal(excess(42, constants, jnp.asarray(x)), mask.sum(1) - 42)


def test_value_outliers_are_the_quantile_rules_but_for_ties():
    data = golden("outlier_edges")
    v = data["v"]
    spec = Nuq(bits=3, per="token", outliers=0.01, **FULL)
    constants = {"signposts": jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)}
    tile, ours = round_trip(spec, constants, v)
    for row in (0, 1, 3):
        assert sorted(np.asarray(tile["channels"])[:, row]) == list(np.flatnonzero(data["v_mask"][row]))
        mostly_close(ours[row], data["v_nuq3_uniform"][row], 2e-6 * np.abs(v).max() + 1e-6)
    np.testing.assert_array_equal(ours[2], v[2])  # constant: range 0, every entry its centre
    tied = v[4] == v[4].max()
    assert tied.sum() == 31
    np.testing.assert_allclose(ours[4][tied], v[4].max(), rtol=1e-6)  # ties beyond the slots lie on the end signpost


@pytest.mark.parametrize("width", [256, 1024, 4096, 8192])
def test_slots_are_the_released_counts(width):
    assert Nuq(bits=3, per="token", outliers=0.01).slot_count(width) == {256: 4, 1024: 12, 4096: 42, 8192: 82}[width]
    assert Nuq(bits=3, per="token").slot_count(width) == 0


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
    tile, ours = round_trip(Nuq(bits=3, per="token", slots=4, dtype=scales), constants, x)
    scale, centre = (np.asarray(tile[name].astype(jnp.float32)).T for name in ("scale", "centre"))
    channels = np.asarray(tile["channels"]).T.astype(int)
    np.testing.assert_array_equal(np.take_along_axis(ours, channels, 1), np.take_along_axis(x, channels, 1))
    inside = np.ones(x.shape, bool)
    np.put_along_axis(inside, channels, False, 1)
    assert (np.abs((x - centre) / scale)[inside] <= 1 + 1e-6).all()  # the stored range covers what is not an outlier
    assert (np.abs(ours - x) <= reach * scale + 1e-5 * np.abs(x).max()).all()


def test_values_follow_shifts_and_scalings_of_a_token():
    v = synthetic(1)
    constants = {"signposts": offline(v)["signposts"]}
    wide = Nuq(bits=3, per="token", slots=4, **FULL)
    tile, base = round_trip(wide, constants, v)
    moved, ours = round_trip(wide, constants, v * 8 + 5)
    np.testing.assert_array_equal(tile["channels"], moved["channels"])
    assert (np.asarray(tile["codes"]) == np.asarray(moved["codes"])).mean() > 0.9999  # the addition rounds
    mostly_close(ours, base * 8 + 5, 1e-5 * np.abs(v).max(), 0.9995)
    stored, base = round_trip(Nuq(bits=3, per="token", slots=4), constants, v)
    moved, ours = round_trip(Nuq(bits=3, per="token", slots=4), constants, v * 8)
    np.testing.assert_array_equal(stored["codes"], moved["codes"])  # a power of two is exact in bfloat16 too
    np.testing.assert_array_equal(ours, base * 8)


def test_large_offsets_cost_range_and_no_bias():
    """Values at 200 +- 1: centre and scale in bfloat16 widen the range by at most half the centre's spacing (here
    1)."""
    v = 200 + np.random.default_rng(2).uniform(-1, 1, (256, 256)).astype(np.float32)
    constants = {"signposts": jnp.linspace(-1.0, 1.0, 16, dtype=jnp.float32)}
    tile, ours = round_trip(Nuq(bits=4, per="token"), constants, v)
    scale = np.asarray(tile["scale"].astype(jnp.float32)).T
    assert (scale <= 1.5 * (1 + 2**-7)).all()
    assert (np.abs(ours - v) <= scale / 15 + 1e-4).all()
    assert abs((ours - v).mean()) < 0.004  # six standard errors of 65536 entries with a step of at most 0.2: 0.0014


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
        channels = np.asarray(permuted["channels"]).astype(int)
        back = np.where(channels < x.shape[1], order[np.minimum(channels, x.shape[1] - 1)], x.shape[1])
        np.testing.assert_array_equal(np.sort(back, 0), np.sort(tile["channels"], 0))


def test_token_statistics_span_all_heads():
    """One loud head of four sets the range of the whole token: GQA statistics are per token, not per head."""
    v = synthetic(5, width=256)
    loud = v.copy()
    loud[:, 192:] *= 100
    constants = {"signposts": offline(v)["signposts"]}
    quiet_error, loud_error = (
        np.abs(round_trip(Nuq(bits=3, per="token"), constants, x)[1] - x)[1:, 16:192].mean() for x in (v, loud)
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


@pytest.mark.parametrize("width", [4096, 8192, 1024])
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.005, 0.01])
def test_bits_follow_the_papers_formula(width, fraction):
    """b + (32/W)/2 + 32*o averaged over keys and values; outliers rounded up to whole slots at each end."""
    for bits in (2, 3, 4):
        specs = [Nuq(bits=bits, per=per, outliers=fraction) for per in ("channel", "token")]
        ours = sum(bits_per_value(spec.build(width)) for spec in specs) / 2
        formula = bits + 16 / width + 32 * fraction
        assert formula <= ours + 1e-12
        assert ours <= formula + 32 * 2 / width
        assert ours == pytest.approx(bits + 16 / width + 32 * specs[0].slot_count(width) / width)


def pair_bits(width, bits, fraction=0.0):
    specs = [Nuq(bits=bits, per=per, outliers=fraction) for per in ("channel", "token")]
    return sum(bits_per_value(spec.build(width)) for spec in specs) / 2


def gibibytes(layers, width, tokens, bits):
    """The paper's memory tables: keys and values of one sequence."""
    return 2 * layers * width * tokens * bits / 8 / 2**30


def test_the_papers_memory_tables():
    """Table 7 (fp16; LLaMA-7B, 13B and 65B) and Table 8 (LLaMA-7B)."""
    lengths = (2**17, 2**20, 10**7)
    for layers, width, row in (
        (32, 4096, (64, 512, 4883)),
        (40, 5120, (100, 800, 7629)),
        (80, 8192, (320, 2560, 24414)),
    ):
        assert tuple(round(gibibytes(layers, width, n, 16)) for n in lengths) == row
    for bits, row in ((4, (16.0, 128.1, 1221.9)), (3, (12.0, 96.1, 916.7)), (2, (8.0, 64.1, 611.5))):
        assert tuple(round(gibibytes(32, 4096, n, pair_bits(4096, bits)), 1) for n in lengths) == row
    for bits, row in ((4, (17.3, 138.4, 1319.6)), (3, (13.3, 106.4, 1014.4)), (2, (9.3, 74.4, 709.2))):
        nominal = pair_bits(4096, bits) + 32 * 0.01
        assert tuple(round(gibibytes(32, 4096, n, nominal), 1) for n in lengths) == row
        # What is stored: 42 whole slots per token where the paper counts 40.96.
        assert pair_bits(4096, bits, 0.01) == pytest.approx(nominal + 32 * 1.04 / 4096)


def test_the_papers_bit_ranges():
    """Table 17: dense, 0.1 %, 0.5 % and 1 % at widths 8192 to 1024; its sparse rows count 16 bits of pointer."""
    for bits in (2, 3, 4):
        assert [round(pair_bits(width, bits), 2) for width in (8192, 1024)] == [bits, bits + 0.02]
        for fraction, low, high in ((0.001, 0.04, 0.06), (0.005, 0.16, 0.19), (0.01, 0.32, 0.35)):
            counted = [pair_bits(width, bits) + 32 * fraction + 16 / width for width in (8192, 1024)]
            assert [round(c, 2) for c in counted] == [round(bits + low, 2), round(bits + high, 2)]


def test_three_bits_are_packed_without_waste():
    """Value 5 = 0b101 everywhere: the two-bit plane set holds 01 in every place, the one-bit set 1."""
    field = Nuq(bits=3, per="token").build(32).fields["codes"]
    stored = layout.allocate(field, (1, 1), 1024)
    assert sum(words.size * 32 for words in stored) == 3 * 1024 * 32
    codes, row = jnp.full((32, 32), 5, jnp.uint32), jnp.int32(0)
    stored = jax.lax.fori_loop(0, 32, lambda i, s: layout.write(field, s, (row, row), 32 * i, codes), stored)
    assert (stored[0] == jnp.uint32(0x55555555)).all()
    assert (stored[1] == jnp.uint32(0xFFFFFFFF)).all()


def test_baselines_share_the_outlier_path():
    x = synthetic(7)
    constants = offline(x)
    for per in ("channel", "token"):
        tiles = [round_trip(Nuq(bits=3, per=per, slots=4, datatype=d), constants, x)[0] for d in ("nuq", "nf", "int")]
        for tile in tiles[1:]:
            for name in ("outliers", "channels"):
                np.testing.assert_array_equal(tile[name], tiles[0][name])


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
    assert (round_trip(Nuq(bits=3, per="token"), constants, np.zeros((2, 64), np.float32))[1] == 0).all()
    np.testing.assert_array_equal(round_trip(Nuq(bits=3, per="channel"), constants, x)[1][:, 5], 2.5)


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
