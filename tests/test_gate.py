"""The gate's bounds on perplexity through a cache: a few caches live on the Qwen2 shape with outlier channels, all of
them in the record that `python -m benchmarks.gate` writes.

Bounds stand in benchmarks/gate_bounds.py as they were asked for before any run. A missed one is named below with the
reason, strictly: the day it is met, this file must change.
"""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("gate_bounds", ROOT / "benchmarks" / "gate_bounds.py")
BOUNDS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(BOUNDS)
RECORD = json.loads((ROOT / "benchmarks" / "records" / "gate.json").read_text(encoding="utf-8"))
VERDICTS = BOUNDS.verdicts(RECORD)

# (start of the bound's name, cache or "") -> why it is missed
PER_TOKEN = "one scale for all channels of a token: those 8 times as large take the others' codes"
GROWS = "constant noise grows as much on recall (benchmarks/drift.py): the model tells apart more, more finely"
NEAREST = "X at 4 bits comes nearest of all methods"
MISSED = {
    ("qwen2: KLD of the last 1000", ""): GROWS,
    ("recall: KLD of the last 1000", ""): GROWS,
    ("mistral, stress keys x8: best ratio at <= 2.3", ""): NEAREST,
    ("mistral, stress none: best ratio at <= 2.3", ""): NEAREST,
    ("qwen3, stress keys x8: best ratio at <= 2.3", ""): NEAREST,
    ("qwen3, stress none: best ratio at <= 2.3", ""): NEAREST,
    ("qwen2, stress keys x8: ratio at 3 bits", "aqua:bits=3,first_bits=3"): PER_TOKEN,
    ("qwen2, stress keys x8: ratio at 3 bits", "higgs:bits=3,centre=mean"): PER_TOKEN,
    ("qwen2, stress keys x8: ratio at 3 bits", "uniform:bits=3,centre=mean"): PER_TOKEN,
}


def case(verdict):
    reasons = [why for (name, cache), why in MISSED.items() if verdict.name.startswith(name) and cache in verdict.by]
    marks = [pytest.mark.xfail(strict=True, reason=f"{reasons[0]}: {verdict.measured}")] if reasons else []
    return pytest.param(verdict, id=f"{verdict.name} {verdict.by}", marks=marks)


@pytest.mark.parametrize("verdict", [case(v) for v in VERDICTS])
def test_recorded_bounds_hold(verdict):
    assert verdict.held, f"{verdict.name}: bound {verdict.bound}, measured {verdict.measured} by {verdict.by}"


@pytest.fixture
def gate(monkeypatch):
    """benchmarks.gate, found after everything installed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return importlib.import_module("benchmarks.gate")


AT_3 = BOUNDS.QWEN_AT_3
LIVE = {  # (cache, stress) -> bound on the ratio
    ("xquant:bits=4", "keys x8"): BOUNDS.BEST[0][1],
    ("xquant:bits=6", "keys x8"): BOUNDS.BEST[1][1],
    ("xquant:bits=8", "keys x8"): BOUNDS.BEST[2][1],
    ("kivi:bits=3,group=128,window=0", "keys x8"): AT_3,
    ("higgs:bits=3,centre=mean", "none"): AT_3,
    ("higgs:bits=3", "none"): AT_3,
}


@pytest.mark.parametrize(("cache", "stress"), LIVE)
def test_bounds_hold_live(gate, cache, stress):
    row = gate.measure({"shape": "qwen2", "cache": cache, "stress": stress, "mode": "copy"}, windows=4)
    assert row["ratio"] <= LIVE[cache, stress], row


@pytest.mark.parametrize("verdict", BOUNDS.defaults(RECORD), ids=lambda v: v.by)
def test_defaults_stand_a_key_bias(verdict):
    assert verdict.held, f"{verdict.name}: bound {verdict.bound}, measured {verdict.measured}"


def test_defaults_of_every_method_were_measured():
    """Those of 2 and 4 bits too, and each with the mean taken off where a method can."""
    own = {r["cache"] for r in RECORD if (r["shape"], r["stress"], r["mode"]) == ("qwen2", "none", "copy")}
    assert {"commvq:bits=1,window=0", "commvq:bits=2,window=0"} <= own
    for bits in (2, 3, 4):
        for name in ("uniform", "kivi", "kivi_star", "kvquant", "higgs", "aqua", "xquant"):
            assert any(cache.startswith(f"{name}:bits={bits}") and ",centre=" not in cache for cache in own)
        for name in ("uniform", "higgs", "aqua"):
            assert any(cache.startswith(f"{name}:bits={bits}") and cache.endswith(",centre=mean") for cache in own)


def test_a_default_that_fails_is_seen():
    row = {"shape": "qwen2", "stress": "none", "mode": "copy", "cache": "higgs:bits=3", "ratio": 1.06}
    assert [v.held for v in BOUNDS.defaults([row, row | {"ratio": 1.04}])] == [False, True]
    left_out = ({"cache": BOUNDS.NAIVE}, {"cache": "higgs:bits=3,centre=none"}, {"shape": "mha"}, {"stress": "keys x8"})
    assert BOUNDS.defaults([row | other for other in left_out]) == []


@pytest.mark.filterwarnings("ignore:.*keys have a bias")
def test_the_naive_baseline_fails_live(gate):
    row = gate.measure({"shape": "qwen2", "cache": BOUNDS.NAIVE, "stress": "none", "mode": "copy"}, windows=4)
    assert row["ratio"] >= BOUNDS.NAIVE_FACTOR, row


def test_verdicts_can_fall_either_way():
    rows = [{"shape": "qwen2", "stress": "none", "mode": "copy", "bits": 2.1, "cache": "a", "ratio": 1.02}]
    assert [v.held for v in BOUNDS.verdicts(rows)] == [False, False, False]
    rows += [rows[0] | {"cache": "b", "bits": 2.4, "ratio": 1.001}, rows[0] | {"cache": "kivi:bits=3,x", "ratio": 1.03}]
    assert [v.held for v in BOUNDS.verdicts(rows)] == [False, True, False, False]
    drift = {"shape": "qwen2", "stress": "none", "mode": "long decode", "cache": "a", "growth": 1.3}
    assert [v.held for v in BOUNDS.verdicts([drift, drift | {"growth": 1.2}])] == [False, True]
