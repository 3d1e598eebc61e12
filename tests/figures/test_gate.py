"""The gate on perplexity through a cache: rows of the record that `python -m benchmarks.gate`
writes are measured again here, and the bounds are judged with them.

Bounds stand in benchmarks/gate_bounds.py as they were asked for before any run, each miss with its
reason, strictly: the day it is met, that file must change.
"""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KIVI, HIGGS = "kivi:bits=3,group=128,window=0", "higgs:bits=3,centre=mean"
LIVE = (  # shape, cache, stress, mode
    ("qwen2", "xquant:bits=6", "keys x8", "copy"),
    ("qwen2", KIVI, "keys x8", "copy"),
    ("qwen2", HIGGS, "none", "copy"),
    ("mistral", "higgs:bits=3", "none", "copy"),
    ("recall", KIVI, "none", "long decode"),
)


@pytest.fixture
def gate(monkeypatch):
    """benchmarks.gate, found after everything installed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return importlib.import_module("benchmarks.gate")


@pytest.fixture
def record(gate):
    return json.loads(gate.RECORD.read_text(encoding="utf-8"))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*keys have a bias")
@pytest.mark.parametrize("wanted", LIVE, ids=lambda row: " ".join(row[:3]))
def test_recorded_rows_are_measured_again(gate, record, wanted):
    """Nothing differs, and by the record every bound is held or missed for the reason that is
    written down."""
    (row,) = (row for row in record if gate.key_of(row) == wanted)
    assert gate.check(record, [row]) == []


def test_defaults_stand_a_key_bias(gate, record):
    verdicts = sys.modules["benchmarks.gate_bounds"].defaults(record)
    assert len(verdicts) >= 6
    assert [verdict for verdict in verdicts if not verdict.held] == []


def test_defaults_of_every_method_were_measured(record):
    """Those of 2 and 4 bits too, and each with the mean taken off where a method can."""
    own = {
        r["cache"]
        for r in record
        if (r["shape"], r["stress"], r["mode"]) == ("qwen2", "none", "copy")
    }
    assert {"commvq:bits=1,window=0", "commvq:bits=2,window=0"} <= own
    for bits in (2, 3, 4):
        for name in ("uniform", "kivi", "kivi_star", "kvquant", "higgs", "aqua", "xquant"):
            assert any(
                cache.startswith(f"{name}:bits={bits}") and ",centre=" not in cache for cache in own
            )
        for name in ("uniform", "higgs", "aqua"):
            assert any(
                cache.startswith(f"{name}:bits={bits}") and cache.endswith(",centre=mean")
                for cache in own
            )


def test_a_default_that_fails_is_seen(gate):
    bounds = sys.modules["benchmarks.gate_bounds"]
    row = {
        "shape": "qwen2",
        "stress": "none",
        "mode": "copy",
        "cache": "higgs:bits=3",
        "ratio": 1.06,
    }
    assert [v.held for v in bounds.defaults([row, row | {"ratio": 1.04}])] == [False, True]
    left_out = (
        {"cache": bounds.NAIVE},
        {"cache": "higgs:bits=3,centre=none"},
        {"shape": "mha"},
        {"stress": "keys x8"},
    )
    assert bounds.defaults([row | other for other in left_out]) == []


def test_a_changed_figure_is_noticed(gate, record, monkeypatch):
    (row,) = (row for row in record if gate.key_of(row) == LIVE[1])
    better = {"ratio": row["ratio"] * 0.9, "kld": row["kld"] / 2, "bits": row["bits"] + 0.01}
    monkeypatch.setattr(gate, "measure", lambda wanted, windows: row | wanted | better)
    assert [text.split(": ")[1] for text in gate.check(record, [row])] == ["bits", "kld", "ratio"]


def test_a_changed_verdict_is_noticed(gate, record, monkeypatch):
    (row,) = (row for row in record if gate.key_of(row) == LIVE[1])
    (text,) = gate.check([*(other for other in record if other != row), row | {"ratio": 1.03}], [])
    assert text.endswith("missed, unexplained")
    monkeypatch.setitem(
        sys.modules["benchmarks.gate_bounds"].MISSED,
        ("qwen2, stress keys x8: ratio", KIVI),
        "no longer",
    )
    (text,) = gate.check(record, [])
    assert text.endswith("held, but its miss is explained")


def test_a_figure_beside_its_bound_may_fall_on_either_side(gate, record, monkeypatch):
    """A recorded growth just over its bound, explained, and a live one just under it, as rounding
    on another processor may give: no problem."""
    key = ("qwen3", KIVI, "none", "long decode")
    bound = 1.25 * max(
        r["growth"] for r in record if r["shape"] == "qwen3" and r["cache"] in gate.NOISES
    )
    old = next(r for r in record if gate.key_of(r) == key)
    row, live = (
        old | {"growth": part * bound, "last": part * bound * old["first"]} for part in (1.01, 0.99)
    )
    beside = [row if r is old else r for r in record]
    monkeypatch.setattr(gate, "measure", lambda wanted, windows: live)
    (text,) = gate.check(beside, [row])
    assert text.endswith("missed, unexplained")
    monkeypatch.setitem(
        sys.modules["benchmarks.gate_bounds"].MISSED, ("qwen3: growth", KIVI), "drifts"
    )
    assert gate.check(beside, [row]) == []


def test_check_fails_where_the_record_is_another(gate, record, monkeypatch, tmp_path):
    """The command's exit status: nothing for the record as it is, what differs for one that nothing
    gave."""
    known = {gate.key_of(row): row for row in record}
    path = tmp_path / "gate.json"
    monkeypatch.setattr(gate, "measure", lambda wanted, windows: known[gate.key_of(wanted)])
    monkeypatch.setattr(sys, "argv", ["gate", "--check", "4", "--out", str(path)])
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit) as stop:
        gate.main()
    assert stop.value.code is None
    path.write_text(json.dumps([known[LIVE[1]] | {"ratio": 2.0}]))
    with pytest.raises(SystemExit, match="ratio: recorded 2, now 1"):
        gate.main()


def test_noise_is_recorded_for_every_shape(gate, record):
    """Drift can be judged wherever a long decode was measured."""
    long = [row for row in record if row["mode"] == "long decode"]
    for shape in gate.SHAPES:
        names = {row["cache"] for row in long if row["shape"] == shape}
        assert len(names & set(gate.NOISES)) >= 2, shape
        assert names - set(gate.NOISES), shape
    judged = sum("constant noise" in verdict.name for verdict in gate.verdicts(record))
    assert judged == sum(row["cache"] not in gate.NOISES for row in long)


def test_verdicts_can_fall_either_way(gate):
    verdicts = gate.verdicts
    rows = [
        {
            "shape": "qwen2",
            "stress": "none",
            "mode": "copy",
            "bits": 2.1,
            "cache": "a",
            "ratio": 1.02,
        }
    ]
    assert [v.held for v in verdicts(rows)] == [False, False, False]
    rows += [
        rows[0] | {"cache": "b", "bits": 2.4, "ratio": 1.001},
        rows[0] | {"cache": "kivi:bits=3,x", "ratio": 1.03},
    ]
    assert [v.held for v in verdicts(rows)] == [False, True, False, False]
    naive = rows[0] | {"cache": "uniform:bits=3,centre=none", "bits": 9}
    assert [verdicts([naive | {"ratio": ratio}])[0].held for ratio in (4.9, 5.0)] == [False, True]


def test_drift_is_measured_against_noise_on_the_same_rows(gate):
    base = {"shape": "qwen2", "stress": "none", "mode": "long decode"}
    cache = base | {"cache": "a", "growth": 6.0}
    noises = [
        base | {"cache": f"noise of {n}", "growth": growth} for n, growth in ((1, 2.0), (2, 4.7))
    ]
    other = base | {"shape": "recall", "cache": "noise of 3", "growth": 9.0}
    (verdict,) = gate.verdicts([cache, *noises, other])
    assert (verdict.held, verdict.measured) == (False, "1.277 (6 / 4.7)")
    assert gate.verdicts([cache | {"growth": 5.8}, *noises, other])[0].held
    assert gate.verdicts([cache, other]) == []  # nothing to compare with


def test_noise_has_one_size_wherever_a_token_stands(gate):
    """Error over the token's size, first and last token of a row, equal tokens too."""
    import jax.numpy as jnp
    import numpy as np

    x = np.random.default_rng(0).normal(size=(256, 64)) * np.linspace(1, 9, 256)[:, None]
    codec = gate.NOISES["noise of 0.1"].layer.value.build(64)
    x = jnp.asarray(x, jnp.float32)
    error = np.asarray(codec.decode({}, codec.encode({}, x)) - x)
    sizes = np.sqrt((error**2).mean(1) / np.asarray(x**2).mean(1))
    assert sizes[:128].mean() == pytest.approx(0.1, rel=0.05)
    assert sizes[128:].mean() == pytest.approx(0.1, rel=0.05)
