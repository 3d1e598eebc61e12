"""`python -m benchmarks.hardware`: dry runs with tiny sizes, and what becomes of blocks and items
that fail."""

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


def rows_of(out: Path) -> dict:
    """The newest row of every item, by block and item."""
    lines = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return {(row["block"], row["item"]): row for row in lines}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "blocks",
    [
        "environment,ceilings",
        pytest.param("kernels,prompts", marks=pytest.mark.nightly),
        pytest.param("correctness,words,text", marks=pytest.mark.nightly),
        pytest.param("attention,torch,steps,kernel-steps,million", marks=pytest.mark.nightly),
    ],
    ids=["quick", "kernels", "right", "speed"],
)
def test_a_dry_run_measures_every_block(hardware, tmp_path, monkeypatch, capsys, blocks):
    monkeypatch.chdir(tmp_path)
    main = hardware("__main__").main
    main(["--minutes", "15", "--out", str(tmp_path / "out"), "--tiny", "--blocks", blocks])
    rows = rows_of(tmp_path / "out")
    assert {row["state"] for row in rows.values()} <= {"done", "skipped"}, (
        tmp_path / "out" / "log.txt"
    ).read_text()
    assert {block for block, _ in rows} == set(blocks.split(","))
    printed, page = capsys.readouterr().out, (tmp_path / "out" / "page.md").read_text()
    for block, item in rows:
        assert f"## {block}" in page
        assert item[:38] in printed
    size = (tmp_path / "out" / "rows.jsonl").stat().st_size
    done = [key for key, row in rows.items() if row["state"] == "done"]
    main(
        [
            "--minutes",
            "15",
            "--out",
            str(tmp_path / "out"),
            "--tiny",
            "--blocks",
            blocks.split(",")[0],
        ]
    )
    again = (tmp_path / "out" / "rows.jsonl").read_text()[size:].splitlines()
    # Nothing twice.
    assert not [row for row in map(json.loads, again) if (row["block"], row["item"]) in done]


def test_blocks_of_the_plan_are_those_that_a_child_knows(hardware):
    assert [block.name for block in hardware("__main__").PLAN] == list(hardware("child").BLOCKS)


def log_at(hardware, out, commit="a", run="1"):
    return hardware("log").Log(out, "steps", commit, run)


def test_a_failed_item_is_tried_by_the_next_run_and_a_done_one_is_not(hardware, tmp_path):
    def small():
        raise MemoryError("RESOURCE_EXHAUSTED\nmore")

    log = log_at(hardware, tmp_path)
    log.item("large", small)
    log.item("fine", lambda: {"ms": 1.0})
    assert "MemoryError: RESOURCE_EXHAUSTED | more" in rows_of(tmp_path)["steps", "large"]["error"]
    assert "Traceback" in (tmp_path / "errors.txt").read_text()
    # A block that is begun again goes on behind it.
    assert not log_at(hardware, tmp_path).new("large")
    assert log_at(hardware, tmp_path, run="2").new("large")
    assert not log_at(hardware, tmp_path, run="2").new("fine")
    assert log_at(hardware, tmp_path, commit="b").new("fine")  # another tree's figures are its own


def test_an_item_that_ends_its_process_is_known_and_written_down(hardware, tmp_path):
    log_at(hardware, tmp_path).write({"item": "deadly", "state": "begun"})
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"block": "ste')  # cut off by the crash
    log = log_at(hardware, tmp_path)
    assert not log.new("deadly")
    assert log.new("next")
    hardware("page").write_page(tmp_path, "a")
    assert (
        "- steps: deadly: crashed: its process ended with it" in (tmp_path / "page.md").read_text()
    )


def test_errors_after_which_a_device_is_lost_end_the_process(hardware, tmp_path):
    def lost():
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access")

    with pytest.raises(SystemExit):
        log_at(hardware, tmp_path).item("deadly", lost)
    assert rows_of(tmp_path)["steps", "deadly"]["state"] == "failed"


@pytest.mark.parametrize(
    ("code", "state", "times"),
    [
        ("import time; time.sleep(60)", "late", 1),
        ("import os; os._exit(9)", "died (9)", 3),
        ("pass", "done", 1),
    ],
    ids=["hangs", "dies", "ends"],
)
def test_a_block_that_hangs_is_killed_and_one_that_dies_is_begun_again(
    hardware, tmp_path, monkeypatch, code, state, times
):
    parent, begun = hardware("__main__"), []
    run_child = parent.run_child

    def run(command, seconds, *rest):
        begun.append(seconds)
        return run_child([sys.executable, "-c", code], min(seconds, 4.0), *rest)

    monkeypatch.setattr(parent, "run_child", run)
    options = type(
        "Options", (), {"out": tmp_path, "commit": "a", "run": "1", "only": [], "tiny": True}
    )
    block = parent.Block("steps", 30, 5)
    assert parent.run_block(block, float("inf"), options, False) == state
    assert len(begun) == times
    parent.close(block, options, state)
    assert rows_of(tmp_path)["steps", "(block)"]["state"] == (
        "empty" if state == "done" else "failed"
    )


@pytest.mark.nightly
def test_items_may_be_chosen_by_a_part_of_their_names(hardware, tmp_path):
    log = hardware("log").Log(tmp_path, "steps", "a", "1", ["exact", "8 rows"])
    for name in ("exact 1 row", "kivi 8 rows", "kivi 1 row"):
        log.item(name, dict)
    assert [item for _, item in rows_of(tmp_path)] == ["exact 1 row", "kivi 8 rows"]


def test_a_block_without_time_is_dropped(hardware, tmp_path, capsys):
    hardware("__main__").main(
        ["--minutes", "0", "--out", str(tmp_path), "--tiny", "--blocks", "steps"]
    )
    assert rows_of(tmp_path)["steps", "(block)"]["state"] == "dropped"
    assert "steps: dropped" in capsys.readouterr().out
