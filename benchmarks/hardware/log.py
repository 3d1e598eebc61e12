"""The rows of a run: a JSON line when an item begins and one when it ends, so that one that ends
its process is known. No JAX here: the parent process reads them too."""

import gc
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# After these a process measures nothing.
STICKY = (
    "CUDA_ERROR",
    "ILLEGAL_ADDRESS",
    "LAUNCH_FAILED",
    "DEVICE_SIDE",
)
MOST_TRACEBACK = 20_000  # characters of a traceback that are kept


def read_rows(out: Path, commit: str) -> list[Row]:
    """Return the newest row of every item of this commit, in order."""
    path, last = out / "rows.jsonl", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # cut off
            continue
        if isinstance(row, dict) and row.get("commit") == commit:
            last[row["block"], row["item"]] = row
    return list(last.values())


def ceiling(out: Path, commit: str, item: str) -> float | None:
    """Return a figure that the block of ceilings measured; None without one."""
    rows = [row for row in read_rows(out, commit) if row["item"] == item and row["state"] == "done"]
    return rows[0]["median"] if rows else None


def read_rate(out: Path, commit: str) -> float:
    """Return the best bandwidth that was measured, GB/s; NaN where none was."""
    rates = [ceiling(out, commit, f"{what} GB/s") for what in ("read", "copy")]
    return max((rate for rate in rates if rate), default=math.nan)


class Log:
    """Rows of one block. What is done for this commit is not done again; what failed or ended its
    process is tried again by the next run, but not by this one."""

    def __init__(
        self, out: Path, block: str, commit: str, run: str, only: Sequence[str] = ()
    ) -> None:
        self.only = only  # parts of names: other items are left out
        self.out, self.block, self.path = out, block, out / "rows.jsonl"
        self.about = {"block": block, "commit": commit, "run": run}
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):  # cut off by a crash
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")
        rows = [row for row in read_rows(out, commit) if row["block"] == block]
        self.done = {row["item"] for row in rows if row["state"] == "done"}
        self.closed = self.done | {row["item"] for row in rows if row["run"] == run}
        for row in rows:
            if row["state"] == "begun" and row["run"] == run:
                self.write(
                    {"item": row["item"], "state": "crashed", "short": "its process ended with it"}
                )

    def write(self, row: Row) -> None:
        """Append a row."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.about | row) + "\n")

    def new(self, item: str) -> bool:
        """Say whether an item is still to be measured."""
        return item not in self.closed and (
            not self.only or any(part in item for part in self.only)
        )

    def item(self, name: str, measure: Callable[[], Row]) -> None:
        """Measure one item. What it raises becomes its row, and the traceback goes to
        errors.txt."""
        if not self.new(name):
            return
        begun = time.monotonic()
        self.write({"item": name, "state": "begun"})
        try:
            row = {"state": "done"} | measure()
        except Exception as error:  # a compiler, a driver or a full memory may raise anything
            row = self._failed(name, error)
        gc.collect()
        self.done |= {name} if row["state"] == "done" else set()
        self.write({"item": name} | row | {"seconds": round(time.monotonic() - begun, 2)})
        if any(word in row.get("error", "") for word in STICKY):
            raise SystemExit(3)

    def _failed(self, name: str, error: Exception) -> Row:
        with (self.out / "errors.txt").open("a", encoding="utf-8") as file:
            text = "".join(traceback.format_exception(error))[-MOST_TRACEBACK:]
            file.write(f"--- {self.block}: {name}\n{text}\n")
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        text = (
            f"{type(error).__name__}: " + " | ".join(dict.fromkeys((lines[0], *lines[-2:])))[:400]
        )
        traceback.clear_frames(error.__traceback__)  # they hold arrays
        return {"state": "failed", "error": text, "short": text[:70]}
