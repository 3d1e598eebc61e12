"""The page of a run and its short table, from the rows that were written. No JAX here."""

from pathlib import Path
from typing import Any

from benchmarks.hardware.log import read_rows
from benchmarks.tables import table

MOST = 11_000  # characters of the short table
WIDTH = 130  # characters of its lines
HIDDEN = ("block", "commit", "run", "short", "error")


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")


def _table(rows: list[dict]) -> str:
    names = [n for n in dict.fromkeys(name for row in rows for name in row) if n not in HIDDEN]
    return table(names, [[_cell(row.get(name, "")) for name in names] for row in rows])


def write_page(out: Path, commit: str) -> None:
    """Write page.md: a table for every block, then what went wrong."""
    rows, parts = (
        read_rows(out, commit),
        [f"# Measured by `python -m benchmarks.hardware` at {commit}"],
    )
    for block in dict.fromkeys(row["block"] for row in rows):
        parts += [f"## {block}", _table([row for row in rows if row["block"] == block])]
    wrong = [row for row in rows if row["state"] != "done"]
    parts += ["## Not measured, or wrong"] + [
        f"- {r['block']}: {r['item']}: {r['state']}: {_cell(r.get('error', r.get('short', '')))}"
        for r in wrong
    ]
    (out / "page.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def short_table(out: Path, commit: str) -> str:
    """Return a line for every row, no longer together than a terminal's last output."""
    lines = []
    for row in read_rows(out, commit):
        state = "" if row["state"] == "done" else f"{row['state'].upper()}: "
        lines.append(
            f"{row['block'][:12]:12} {row['item'][:38]:38} {state}{row.get('short', '')}"[:WIDTH]
        )
    text = "\n".join(lines)
    return text if len(text) <= MOST else text[:MOST] + "\n... (page.md has all)"
