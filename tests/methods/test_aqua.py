"""AQUA-KV against the authors' released chain (golden vectors), and the properties that hold
without large models."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned

from kvqjax import aqua, parse
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.calibrate.aqua_fit import Recipe, cast, fit_layer
from kvqjax.codecs.higgs import Higgs, higgs_codec
from kvqjax.codecs.klt import Klt
from kvqjax.methods.papers.aqua import AquaLayer, encode_source, reconstruct
from kvqjax.methods.roofline import bits_by_layer, flops_per_token
from kvqjax.model.config import ModelConfig

HIGGS = Higgs(bits=2, dtype="float32")
ALONE = {"key_inputs": "none", "value_inputs": "none"}
F32 = jnp.float32


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "data" / "golden_aqua_chain.npz") as data:
        return dict(data)


@pytest.mark.parametrize("index", thinned([0, 1, 3], 3))
def test_codes_and_reconstructions_equal_the_released_chain(golden, index):
    """Teacher forced: stored predictors and stored reconstructions of the layer below."""
    below = max(index - 1, 0)
    carry = {name: jnp.asarray(golden[f"{name}r_n16"][below]) for name in ("k", "v")}
    layer = AquaLayer(key=HIGGS, value=HIGGS, **(ALONE if index == 0 else {}))
    codec = higgs_codec(HIGGS, 32, golden["grid256" if index == 0 else "grid16"])
    constants = {
        s: {
            "weight": jnp.asarray(golden[f"{s}_w"][below].T),
            "bias": jnp.asarray(golden[f"{s}_b"][below]),
        }
        for s in "kv"
    }
    keys = jnp.asarray(golden["kr_n16"][index])
    for source in ("k", "v"):
        exact = jnp.asarray(golden[source][index, 0])
        payload, recon = encode_source(layer, codec, source, constants, exact, carry, keys)
        wanted = golden[f"{source}_idx"][index].reshape(50, -1)
        assert (np.asarray(payload["codes"]) == wanted).mean() >= 0.999
        np.testing.assert_allclose(payload["scale"].T, golden[f"{source}_scales"][index], rtol=1e-3)
        bound = 1e-3 * np.abs(golden[f"{source}_scales"][index]).max()
        off = np.abs(np.asarray(recon) - golden[f"{source}r_n16"][index]).max(1) > bound
        assert off.mean() <= 0.02  # tokens with a flipped code


def test_free_running_calibration_reaches_the_released_errors(golden):
    """Own fits and own grids, layer by layer: the errors of every layer within 5 %."""
    order = golden["split"]  # the first six sequences train
    recipe = Recipe(held_out=0.25, centred=False)
    first = Higgs(bits=4, dtype="float32")
    below = {name: np.zeros((8, 50, 32), np.float32) for name in ("k", "v")}
    for index in range(4):
        layer = (
            AquaLayer(key=first, value=first, unit=50, **ALONE)
            if index == 0
            else AquaLayer(key=HIGGS, value=HIGGS, unit=50)
        )
        exact = {name: golden[name][index, order] for name in ("k", "v")}
        _, below, report = fit_layer(layer, exact, below, recipe, F32, exact)
        wanted = golden["err_n16"][index]
        for at, source in enumerate(("k", "v")):
            assert report[source]["reconstruction_mse"] == pytest.approx(wanted[4 + at], rel=0.05)
            if index:
                assert report[source]["relative_mse"] == pytest.approx(wanted[2 * at], rel=0.05)
                assert report[source]["held_out_mse"] == pytest.approx(wanted[2 * at + 1], rel=0.05)


def chain(seed, layers=3, sequences=4, tokens=256, width=64, noise=0.5, offset=0.0):
    """Keys that are linear in the layer below plus noise, values linear in keys and the values
    below plus noise."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    out = [{name: draw(sequences, tokens, width) + offset for name in ("k", "v")}]
    for _ in range(layers - 1):
        maps = [draw(width, width) / width**0.5 for _ in range(3)]
        k = out[-1]["k"] @ maps[0] + noise * draw(sequences, tokens, width)
        v = k @ maps[1] + out[-1]["v"] @ maps[2] + noise * draw(sequences, tokens, width)
        out.append({"k": k + offset, "v": v + offset})
    return out


def run_chain(data, layer, recipe=None, costs=None):
    """Reports of the layers after the first, which is coded alone at 4 bits; and the last layer's
    constants."""
    first = AquaLayer(key=Higgs(bits=4), value=Higgs(bits=4), unit=layer.unit, **ALONE)
    below = {name: np.zeros_like(data[0][name]) for name in ("k", "v")}
    reports, constants = [], {}
    for index, exact in enumerate(data):
        clean = data[max(index - 1, 0)]
        own = first if index == 0 else layer
        constants, below, report = fit_layer(
            own, exact, below, recipe or Recipe(), F32, clean, costs=costs
        )
        reports.append(report)
    return reports[1:], constants, below


LAYER = AquaLayer(key=Higgs(bits=2), value=Higgs(bits=2))
KLT = aqua(bits=2, backbone="klt")


def test_total_error_is_the_product_of_predictor_and_quantiser_error():
    for report in run_chain(chain(0), LAYER)[0]:
        for source in ("k", "v"):
            total = report[source]["reconstruction_mse"]
            assert total == pytest.approx(report[source]["relative_mse"] * 0.1075, rel=0.05)


def test_ablations_rank_as_in_the_paper():
    """Table 1: both predictors < no value predictor < no key predictor < none, by the error of keys
    and values."""
    data, errors = chain(1), []
    for inputs in (("k", "kv"), ("k", "none"), ("none", "kv"), ("none", "none")):
        layer = dataclasses.replace(LAYER, key_inputs=inputs[0], value_inputs=inputs[1])
        reports = run_chain(data, layer)[0]
        errors.append(
            [
                sum(report[source]["reconstruction_mse"] for report in reports)
                for source in ("k", "v")
            ]
        )
    both, no_value, no_key, none = errors
    assert both[0] == pytest.approx(no_value[0])
    assert both[0] < no_key[0] == pytest.approx(none[0])
    assert both[1] < no_key[1] * 1.02 < no_value[1] == pytest.approx(none[1])


def test_fitting_on_reconstructions_beats_fitting_on_exact_inputs():
    data = chain(2, noise=0.1)
    errors = [
        sum(
            report[s]["reconstruction_mse"]
            for report in run_chain(data, LAYER, recipe)[0]
            for s in ("k", "v")
        )
        for recipe in (Recipe(), Recipe(clean=True))
    ]
    assert errors[0] < errors[1]


def test_offsets_after_the_first_layer_cost_nothing_when_moments_are_centred():
    def error(offset, recipe):
        data = chain(3, offset=offset)
        return ((run_chain(data, LAYER, recipe)[2]["k"] - data[-1]["k"]) ** 2).mean()

    plain, moved, released = (
        error(0.0, Recipe()),
        error(50.0, Recipe()),
        error(50.0, Recipe(centred=False)),
    )
    assert moved < 3 * plain  # coded alone it would be about 0.1 * 50^2
    assert released > 1.5 * moved  # the released rule's damping grows with the offset


@pytest.mark.parametrize("kind", thinned(["low_rank", "int4", "mlp"], 3))
def test_every_predictor_kind_explains_most_of_a_predictable_layer(kind):
    layer = dataclasses.replace(LAYER, predictor=kind, rank=48 if kind == "low_rank" else 0)
    recipe = Recipe(mlp_steps=300)
    linear = run_chain(chain(4, layers=2), LAYER)[0][0]
    report, constants, _ = run_chain(chain(4, layers=2), layer, recipe)
    assert {name: a.shape for name, a in constants["v"].items()} == layer.needs("v", 64)
    for source in ("k", "v"):
        assert linear[source]["relative_mse"] <= report[0][source]["relative_mse"] * 1.01
        assert report[0][source]["explained"] > 0.5


def _correlated_chain(width=64) -> list[dict[str, np.ndarray]]:
    """As `chain`, with noise whose deviations fall from 4 to 1/16 in a basis of its own."""
    rng = np.random.default_rng(6)
    basis = (
        np.linalg.qr(rng.normal(size=(width, width)))[0] * np.geomspace(4, 1 / 16, width)[:, None]
    )
    data = chain(6, layers=2, noise=0.0)

    def noise():
        return (rng.normal(size=data[1]["k"].shape) @ basis).astype(np.float32)

    return [data[0], {name: x + noise() for name, x in data[1].items()}]


def test_transforms_are_of_what_predictors_miss():
    """2 bits by transform coding, 2 by HIGGS: where what is missed has deviations of 6 octaves,
    transforms err less than half as much (measured: 0.35 of it)."""
    data, costs = _correlated_chain(), dict.fromkeys(("k", "v"), np.eye(64))
    transformed = AquaLayer(key=Klt(bits=2.0), value=Klt(bits=2.0, slope=0.5))
    found, constants, _ = run_chain(data, transformed, costs=costs)
    wanted = run_chain(data, LAYER)[0]
    assert {name: a.shape for name, a in constants["v"].items()} == transformed.needs("v", 64)
    for source in ("k", "v"):
        assert found[0][source]["relative_mse"] == pytest.approx(
            wanted[0][source]["relative_mse"], rel=0.1
        )
        assert found[0][source]["reconstruction_mse"] < wanted[0][source]["reconstruction_mse"] / 2


def test_errors_that_cost_more_are_smaller():
    """Transforms are made in the metric of the costs: channels whose errors cost 100 times as much
    err less."""
    data, heavy = _correlated_chain(), np.arange(64) < 16
    layer, errors = AquaLayer(key=Klt(bits=2.0), value=Klt(bits=2.0)), []
    for costs in (np.eye(64), np.diag(np.where(heavy, 100.0, 1.0))):
        below = run_chain(data, layer, costs=dict.fromkeys(("k", "v"), costs))[2]
        errors.append(np.square(below["k"] - data[1]["k"])[..., heavy].mean())
    assert errors[1] < errors[0] / 2


def test_one_function_reconstructs_for_encoder_and_decoder():
    rng = np.random.default_rng(5)
    data = chain(5, layers=2)
    constants = {source: cast(c, F32) for source, c in run_chain(data, LAYER)[1].items()}
    carry = {name: jnp.asarray(rng.normal(size=(128, 64)), F32) for name in ("k", "v")}
    codec = LAYER.key.build(64)
    x = jnp.asarray(data[1]["k"][0, :128])
    payload, recon = jax.jit(lambda x: encode_source(LAYER, codec, "k", constants, x, carry, None))(
        x
    )
    again = jax.jit(lambda p: reconstruct(LAYER, codec, "k", constants, p, carry, None))(payload)
    np.testing.assert_array_equal(recon, again)


def llama(layers, width):
    heads = width // 128
    return ModelConfig(
        vocab_size=8,
        width=3 * width,
        mlp_width=8,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
    )


def proper_bits(method, config):
    return np.mean(bits_by_layer(method, config))


def bits_of_table_1(method, config):
    """As the paper's Tables 1 and 5 count: the later layers' bits everywhere, and the first
    layer's, over L, on top."""
    bits = bits_by_layer(method, config)
    return bits[-1] + bits[0] / len(bits)


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [(28, (2.087, 3.051, 4.016)), (32, (2.078, 3.047, 4.016)), (80, (2.041, 3.028, 4.016))],
)
def test_proper_bits_of_the_papers_models(layers, wanted):
    found = [proper_bits(aqua(bits=bits), llama(layers, 1024)) for bits in (2, 3, 4)]
    assert found == pytest.approx(wanted, abs=6e-4)


def test_bits_as_table_1_counts_them():
    config = llama(28, 1024)
    found = [bits_of_table_1(aqua(first_bits=bits), config) for bits in (4, 16, 3, 2)]
    assert found == pytest.approx([2.159, 2.587, 2.123, 2.088], abs=6e-4)
    qwen = [proper_bits(aqua(bits=bits, first_bits=16), llama(36, 256)) for bits in (2, 3, 4)]
    assert qwen == pytest.approx([2.450, 3.422, 4.394], abs=6e-4)


@pytest.mark.parametrize(
    ("options", "layers", "mebibytes"),
    [
        ({}, 28, 162),
        ({}, 32, 186),
        ({}, 80, 474),
        ({"predictor": "low_rank", "rank": 256}, 28, 67.6),
        ({"predictor": "mlp"}, 28, 540),
        ({"predictor": "int4"}, 28, 40.5 + 2.6),  # the paper leaves scales out
    ],
)
def test_predictor_sizes(options, layers, mebibytes):
    config = llama(layers, 1024)
    layout = CacheLayout(
        shape=config.kv_shape, method=aqua(**options), capacity=1, dtype="bfloat16"
    )
    held = jax.tree.leaves([run.wiring.constants(run.count, "bfloat16") for run in runs_of(layout)])
    # Biases as 16-bit numbers, too.
    size = sum(x.size * (4 if x.dtype == jnp.uint32 else 2) for x in held)
    assert size / 2**20 == pytest.approx(mebibytes, rel=3e-3)


def test_operations_per_cached_token():
    config = llama(28, 1024)
    assert flops_per_token(aqua(), config) == 27 * 2 * 3 * 1024**2
    assert flops_per_token(aqua(predictor="int4"), config) == flops_per_token(aqua(), config)


def test_operations_of_transforms_count():
    """Two multiplications by [R, W] more for each layer, R coefficients of keys and of values that
    have bits."""
    config = llama(28, 1024)
    layout = CacheLayout(shape=config.kv_shape, method=KLT, capacity=1, dtype="float32")
    sizes = [run.wiring.wanted() for run in runs_of(layout)]
    kept = sum(sizes[-1][source]["back"][1] for source in ("k", "v"))
    first = sum(sizes[0][source]["back"][1] for source in ("k", "v"))
    assert flops_per_token(KLT, config) == flops_per_token(aqua(), config) + 2 * 1024 * (
        27 * kept + first
    )


def test_bits_of_transforms_are_any_number():
    assert parse("aqua:bits=2.25,backbone=klt") == aqua(bits=2.25, backbone="klt")
    assert (str(parse("aqua:bits=2.25,backbone=klt")), str(parse("aqua:bits=2"))) == (
        "aqua:bits=2.25,backbone=klt",
        "aqua:bits=2",
    )
    assert proper_bits(
        aqua(bits=2.25, backbone="klt", first_bits=2.25), llama(32, 1024)
    ) == pytest.approx(2.25 + 8 / 1024, abs=0.001)
    for text, said in (
        ("aqua:bits=2.25", "bits=2.25; wanted a whole number"),
        ("aqua:bits=7,backbone=klt", "bits=7.0; wanted 0.125 to 6"),
        ("aqua:bits=two", "'two' is not of type int or float"),
        ("aqua:backbone=klt,centre=median", "centre='median'"),
    ):
        with pytest.raises(ValueError, match=said):
            parse(text)


def test_options_are_checked_and_survive_their_text():
    assert parse("aqua:bits=3,exact=1+-1") == aqua(bits=3, exact="1+-1")
    for option, message in (
        ({"exact": "1;2"}, "exact='1;2'"),
        ({"backbone": "foo"}, "backbone='foo'"),
        ({"key_inputs": "q"}, "key_inputs='q'"),
        ({"predictor": "forest"}, "predictor='forest'"),
    ):
        with pytest.raises(ValueError, match=message):
            aqua(**option).layers(llama(2, 128))[1].build(llama(2, 128))
