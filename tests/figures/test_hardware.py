"""`python -m benchmarks.hardware`: a dry run with tiny sizes, and that a stopped or killed run goes on."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hardware(monkeypatch):
    """Import a module of benchmarks.hardware, found after everything installed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return lambda name: importlib.import_module(f"benchmarks.hardware.{name}")


ABOUT = {"device": "chip", "jax": "0"}


def test_a_dry_run_measures_every_stage(hardware, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    main, stages = hardware("__main__").main, hardware("stages").STAGES
    main(["--minutes", "10", "--out", str(tmp_path / "out"), "--tiny"])
    assert "0 items left" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["state"] == "failed"] == []
    assert {line["stage"] for line in lines if line["state"] == "done"} == set(stages)
    page = (tmp_path / "out" / "page.md").read_text()
    assert page.count("## ") == len(stages)
    assert "kivi:bits=2" in page
    size = (tmp_path / "out" / "log.jsonl").stat().st_size
    main(["--minutes", "10", "--out", str(tmp_path / "out"), "--tiny"])
    assert (tmp_path / "out" / "log.jsonl").stat().st_size == size  # nothing is measured twice


def test_a_run_stops_with_its_time_and_goes_on(hardware, tmp_path):
    run, log_of = hardware("__main__").run, hardware("log").Log
    measured, now = [], [0.0]

    def item(name):
        def measure():
            measured.append(name)
            now[0] += 10
            return [{"name": name}]

        return "steps", name, measure

    work = [item(name) for name in "abc"]
    log = log_of(tmp_path / "log.jsonl", ABOUT)
    assert run(work, log, 15, lambda: now[0]) == 1
    assert run(work, log_of(tmp_path / "log.jsonl", ABOUT), 15, lambda: now[0]) == 0
    assert measured == ["a", "b", "c"]
    assert [row["name"] for row in log_of(tmp_path / "log.jsonl", ABOUT).rows("steps")] == ["a", "b", "c"]
    other = log_of(tmp_path / "log.jsonl", ABOUT | {"device": "another"})
    assert run(work, other, 15, lambda: now[0]) == 1  # its figures are its own


def test_failures_and_crashes_are_written_down_and_not_repeated(hardware, tmp_path):
    run, log_of = hardware("__main__").run, hardware("log").Log
    path = tmp_path / "log.jsonl"

    def never():
        raise AssertionError

    def small():
        raise MemoryError("RESOURCE_EXHAUSTED\nmore")

    log = log_of(path, ABOUT)
    log.run("steps", "large", small)
    log._write({"stage": "steps", "item": "deadly", "state": "begun"})
    with path.open("a") as file:
        file.write('{"stage": "ste')  # cut off by the crash
    log_of(path, ABOUT).run("steps", "fine", list)
    again = log_of(path, ABOUT)
    assert again.state("fine") == "done"
    assert run([("steps", "large", never), ("steps", "deadly", never)], again, 100) == 0
    problems = dict(again.problems())
    assert "RESOURCE_EXHAUSTED" in problems["large"]
    assert problems["deadly"] == "the process ended with it"
    page = hardware("page").write_page(tmp_path, again, 0).read_text()
    assert "- deadly: the process ended with it" in page
