"""Timing and what says where it was done; the attention benchmark at a size for a CPU."""

import importlib.util
import json
import sys
from pathlib import Path

from kvqjax import _timing as timing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "decode_attention.py"


def test_the_median_leaves_the_first_call_out(monkeypatch):
    clock = iter([0.0, 100.0, 200.0, 201.0, 300.0, 305.0, 400.0, 402.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    assert timing.median_seconds(lambda: calls.append(1), 3) == 2.0
    assert len(calls) == 4


def test_calls_take_turns():
    order = []
    spent = timing.alternating_seconds([lambda: order.append("a"), lambda: order.append("b")], 2)
    assert "".join(order) == "ababab"
    assert [len(times) for times in spent] == [2, 2]


def test_copies_are_counted_both_ways(monkeypatch):
    monkeypatch.setattr(timing, "median_seconds", lambda call, repeats: call().nbytes and 2.0)
    assert timing.copy_rate(4096, inner=3) == 2 * 4096 * 3 / 2.0


def test_attention_benchmark_checks_what_it_times(monkeypatch, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("decode_attention", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "deep" / "record.json"
    words = "--contexts 1024 --batches 1 --groups 2 --forms kivi --bits 2 --kv-heads 1 --repeats 1 --inner 1"
    words += " --copy-mib 1 --out"
    monkeypatch.setattr(sys, "argv", ["decode_attention", *words.split(), str(out)])
    script.main()
    report = json.loads(out.read_text())
    exact, packed = report["rows"]
    assert (exact["way"], packed["way"]) == ("bfloat16, xla", "kivi 2 bits, reference")
    assert exact["speed_against_bfloat16"] == 1
    assert 0 < exact["error"] < script.WRONG
    assert packed["copy"] > 0
    assert report["machine"]["platform"] == "cpu"
    assert len(capsys.readouterr().out.splitlines()) == 3
