"""KVQuant's codecs against the authors' released code (golden vectors)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from nuq import FULL, mostly_close, round_trip, slots_of

from kvqjax.codecs.nuq import Nuq
from kvqjax.codecs.nuq_range import excess
from kvqjax.codecs.nuq_table import fixed_signposts

DATA = Path(__file__).parents[1] / "data"


def golden(name):
    with np.load(DATA / f"golden_kvquant_{name}.npz") as data:
        return dict(data)


@pytest.mark.parametrize("bits", thinned([2, 3, 4], 3))
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
        constants = {
            **bounds,
            "signposts": jnp.asarray(np.sort(data[f"{source}_{mode}_lut{bits}"])),
        }
        if source == "v":
            del constants["upper"], constants["lower"]
        spec = Nuq(
            bits=bits,
            per="channel" if source == "k" else "token",
            slots=count,
            datatype=datatype,
            **FULL,
        )
        _, ours = round_trip(spec, constants, x)
        theirs = data[f"{source}_{mode}_{datatype}{bits}"]
        # The released nf path rounds its signposts to float16: up to 2.5e-4 of the scale, here at
        # most max|x|.
        bound = 2e-6 * np.abs(x).max() + 1e-6 if datatype != "nf" else 5e-4 * np.abs(x).max()
        mostly_close(ours, theirs, bound)


def test_q_norm_reads_signposts_through_scale_and_offset():
    data = golden("runtime")
    constants = {name: jnp.asarray(data[f"k_{name}"]) for name in ("upper", "lower")}
    constants |= {
        "signposts": jnp.asarray(data["k_sparse_lut2"]),
        "norm": jnp.asarray([1.07, -0.013], jnp.float32),
    }
    spec = Nuq(bits=2, per="channel", slots=int(data["k_mask"].sum(1).max()), q_norm=True, **FULL)
    _, ours = round_trip(spec, constants, data["k_x"])
    mostly_close(ours, data["k_sparse_nuq2_qnorm"], 2e-6 * np.abs(data["k_x"]).max() + 1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_matches_the_released_layer_at_half_precision(bits):
    """The released layer keeps thresholds in float16 and halves their sum and difference there: so
    do the constants here."""
    data = golden("linear")
    y = data["y_fp16"].astype(np.float32)
    upper, lower = (data[name].astype(np.float16) for name in ("upper", "lower"))
    centre, scale = (
        ((upper + sign * lower) / np.float16(2)).astype(np.float32) for sign in (1, -1)
    )
    bounds = {"upper": jnp.asarray(centre + scale), "lower": jnp.asarray(centre - scale)}
    for source, per, extra in (("k", "channel", bounds), ("v", "token", {})):
        constants = {**extra, "signposts": jnp.asarray(np.sort(data[f"lut_{source}{bits}"]))}
        count = y.shape[1] - 2 if source == "k" else 2
        _, ours = round_trip(Nuq(bits=bits, per=per, slots=count, **FULL), constants, y)
        theirs = data[f"{source}_nuq{bits}"]
        ours = ours.astype(np.float16).astype(np.float32)
        mostly_close(
            ours, theirs.astype(np.float32), np.spacing(np.abs(theirs)).astype(np.float32), 0.995
        )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_normal_float_signposts(bits):
    np.testing.assert_allclose(
        fixed_signposts("nf", bits), golden("runtime")[f"nf{bits}"], atol=3e-7
    )


def test_key_outliers_are_those_beyond_the_thresholds():
    data = golden("outlier_edges")
    constants = {"upper": jnp.asarray(data["upper"]), "lower": jnp.asarray(data["lower"])}
    x, mask = data["x"], data["mask"]
    width = x.shape[1]
    spec = Nuq(bits=3, per="channel", slots=int(mask.sum(1).max()), datatype="int", **FULL)
    channels = slots_of(spec, round_trip(spec, constants, x)[0], x)[1]
    for row in range(len(x)):
        assert sorted(c for c in channels[:, row] if c < width) == list(np.flatnonzero(mask[row]))
    capped = Nuq(bits=3, per="channel", slots=42, datatype="int", **FULL)
    tile, ours = round_trip(capped, constants, x)
    # The released cap keeps 21 at each end; one cap on both ends together keeps the 42 farthest, so
    # never less in sum.
    scale = (data["upper"] - data["lower"]) / 2
    reach = np.abs((x - (data["upper"] + data["lower"]) / 2) / scale)
    for row, kept in enumerate(slots_of(capped, tile, x)[1].T):
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
        assert sorted(slots_of(spec, tile, v)[1][:, row]) == list(
            np.flatnonzero(data["v_mask"][row])
        )
        mostly_close(ours[row], data["v_nuq3_uniform"][row], 2e-6 * np.abs(v).max() + 1e-6)
    np.testing.assert_array_equal(ours[2], v[2])  # constant: range 0, every entry its centre
    tied = v[4] == v[4].max()
    assert tied.sum() == 31
    # Ties beyond the slots lie on the end signpost.
    np.testing.assert_allclose(ours[4][tied], v[4].max(), rtol=1e-6)
