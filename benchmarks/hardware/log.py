"""What was measured so far, a JSON line each, so that a run can be stopped, killed and continued.

A line is written before an item begins and one when it ends. An item that began and never ended took its process with
it: it is not tried again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Log"]

Row = dict[str, Any]


class Log:
    """The file `path`; `about` names the machine and versions: what was measured on others is not taken for this."""

    def __init__(self, path: Path, about: Row) -> None:
        self.path, self.about, text = path, about, _read(path)
        if text and not text.endswith("\n"):  # cut off: what follows must not be taken for its end
            path.write_text(text + "\n", encoding="utf-8")
        self.lines = [line for line in map(_parsed, text.splitlines()) if line.get("about") == about]

    def state(self, item: str) -> str:
        """ "new", "done", "failed", or "crashed" for what began and never ended."""
        states = [line["state"] for line in self.lines if line["item"] == item]
        return {"begun": "crashed"}.get(states[-1], states[-1]) if states else "new"

    def rows(self, stage: str) -> list[Row]:
        """The figures of a stage's items that are done."""
        done = [line for line in self.lines if line["stage"] == stage and line["state"] == "done"]
        return [row for line in done for row in line["rows"]]

    def problems(self) -> list[tuple[str, str]]:
        """(item, one line) of all that failed or crashed."""
        last = {line["item"]: line for line in self.lines}
        texts = {"failed": lambda line: line["problem"], "begun": lambda line: "the process ended with it"}
        return [(item, texts[line["state"]](line)) for item, line in last.items() if line["state"] in texts]

    def run(self, stage: str, item: str, measure: Callable[[], list[Row]]) -> None:
        """Measure one item; what it raises is written down instead of figures."""
        self._write({"stage": stage, "item": item, "state": "begun"})
        try:
            end: Row = {"state": "done", "rows": measure()}
        except Exception as error:  # a compiler, or a memory that is too small, may raise anything
            end = {
                "state": "failed",
                "problem": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300],
            }
        self._write({"stage": stage, "item": item} | end)

    def _write(self, line: Row) -> None:
        line = line | {"about": self.about}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _parsed(line: str) -> Row:
    """A line's content; nothing for one that was cut off."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and {"stage", "item", "state"} <= found.keys() else {}
