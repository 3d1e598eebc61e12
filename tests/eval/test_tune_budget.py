"""Budgets, costs and the line between single methods."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import kvqjax as kvq
from kvqjax.eval.tune import Settings, needed_windows
from kvqjax.eval.tune.candidates import fast_enough
from kvqjax.eval.tune.report import line_at
from kvqjax.eval.tune.run import estimated
from kvqjax.eval.tune.search import Budget, read_budget
from kvqjax.model.loading import config_of

ROOT = Path(__file__).parents[2]


def test_slow_methods_are_left_out():
    config = config_of("llama-3.1-8b")
    given = [kvq.kivi(bits=2), kvq.xquant(bits=4)]
    kept, ratios = fast_enough(given, config, 131072, "v5e", 1.0)
    assert kept == given[:1]
    assert ratios["kivi:bits=2"] < 1 < ratios["xquant:bits=4"]
    assert fast_enough(given, config, 131072, "v5e", 100.0)[0] == given


def test_the_cost_of_a_large_model_on_one_chip_and_on_eight():
    config = config_of("llama-3.1-8b")
    one, eight = (
        estimated(config, "kivi,higgs", d, m, Settings())
        for d, m in (("h100", ""), ("v5e", "model=8"))
    )
    assert one["parts_alone"] == 2 * 32 * (one["candidates"] - 1)
    assert one["forward_passes"] == eight["forward_passes"]
    assert one["bytes"] > 16e9 > eight["bytes"]
    more = estimated(config, "kivi,higgs", "h100", "", dataclasses.replace(Settings(), window=1024))
    assert more["hours"] > 1.9 * one["hours"]
    few, chain = (
        estimated(config, f"kivi:bits=2,higgs:bits=2{x}", "h100", "", Settings())
        for x in ("", ",aqua:bits=2")
    )
    # The exact cache, KIVI and HIGGS in each layer.
    assert (few["exceptions"], chain["exceptions"]) == (
        0,
        1 + 32 * 3,
    )
    assert chain["forward_passes"] > few["forward_passes"]
    rows = estimated(config, "kivi,higgs", "v5e", "data=8", Settings(batch=3))
    # A row for every device.
    assert rows["tokens"] == rows["forward_passes"] * 8 * Settings().window


def test_the_line_between_single_methods():
    rows = [
        {"kind": "single", "bits_stored": b, "kld": k}
        for b, k in ((2.0, 1.0), (2.2, 3.0), (3.0, 0.1), (4.0, 0.09))
    ]
    assert line_at(rows, 2.5) == pytest.approx(0.1**0.5)
    assert line_at(rows, 1.5) is None
    assert line_at(rows, 5.0) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2.5", Budget("bits", 2.5)),
        ("3 bits", Budget("bits", 3.0)),
        ("8GiB", Budget("bytes", 2**33)),
        ("1.5 MB", Budget("bytes", 1.5e6)),
        ("kld=0.01", Budget("kld", 0.01)),
        ("kld<=1e-3", Budget("kld", 1e-3)),
    ],
)
def test_budgets(text, found):
    assert read_budget(text) == found


@pytest.mark.parametrize("text", ["", "-1", "0", "2.5 apples", "kld=2GiB", "1.2.3", "nan", "inf"])
def test_budgets_that_are_none(text):
    with pytest.raises(kvq.UserError, match="wanted bits"):
        read_budget(text)


@pytest.mark.parametrize("text", ["1e9", "33 bits", "1e300"])
def test_bits_that_no_number_has_are_refused(text):
    with pytest.raises(kvq.UserError, match=f"budget '{text}'; wanted at most 32 bits"):
        read_budget(text)
    assert read_budget("32") == Budget("bits", 32.0)
    assert read_budget("1e9 b") == Budget("bytes", 1e9)


def test_what_cannot_be_searched_is_refused_before_anything_is_calibrated(tmp_path):
    model, text = kvq.load("recall"), np.arange(4000) % 48
    settings = Settings(window=64, context=1024)
    for budget, message in (
        ("0.2", "is below what any of these methods reaches"),
        ("1GiB", "is not below the exact"),
        ("8", "windows of 64 tokens end before klt:bits=2.0 reads what it has encoded; wanted 192"),
    ):
        with pytest.raises(kvq.UserError, match=message):
            kvq.tune(
                model, text, budget=budget, methods="klt:bits=2", out=tmp_path, settings=settings
            )
    assert not list(tmp_path.rglob("calibrated"))


def test_more_choices_want_more_text():
    assert needed_windows(2) == 4 < needed_windows(100) < needed_windows(1000) < 20


@pytest.mark.parametrize(
    "field", [{"batch": 0}, {"chunk": 0}, {"window": 2.5}, {"scored_from": 511}, {"seed": -1}]
)
def test_settings_that_cannot_be(field, unchecked):
    with pytest.raises(kvq.UserError, match="=".join(map(str, *field.items()))):
        Settings(**field)
