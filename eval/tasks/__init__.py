"""Benchmarks through a cache that lm-evaluation-harness has not, or cuts elsewhere: LongBench, InfiniteBench, RULER."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvqjax._errors import UserError
from kvqjax.eval.tasks import infinitebench, longbench, ruler
from kvqjax.eval.tasks.base import Options, Sample, Task, fingerprint, run_task

__all__ = ["FAMILIES", "Options", "Sample", "Task", "averages", "chosen", "fingerprint", "load_task", "run_task"]

FAMILIES = {"longbench": longbench, "infinitebench": infinitebench, "ruler": ruler}


def chosen(names: Sequence[str]) -> list[str]:
    """Tasks "family/task", each once. "family" stands for all of it, "family/8" for the tasks of that average."""
    found: dict[str, None] = {}
    for text in names:
        family, _, name = text.partition("/")
        if family not in FAMILIES:
            raise UserError(f"task={text!r}; known: {', '.join(FAMILIES)}, and their tasks as family/task")
        module = FAMILIES[family]
        members = module.NAMES if not name else module.AVERAGES.get(name, (name,))
        unknown = [member for member in members if member not in module.NAMES]
        if unknown:
            raise UserError(f"task={text!r}; {family} has {', '.join((*module.NAMES, *module.AVERAGES))}")
        found |= dict.fromkeys(f"{family}/{member}" for member in members)
    return list(found)


def load_task(name: str, options: Options) -> Task:
    """The samples of "family/task"; at least one."""
    family, _, member = name.partition("/")
    task = FAMILIES[family].load(member, options)
    if not task.samples:
        raise UserError(f"{name}: no samples in its file")
    return task


def averages(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for every average of a family whose tasks all are among one cache's `rows`."""
    done = {row["task"]: row for row in rows}
    out = []
    for family, module in FAMILIES.items():
        for label, members in module.AVERAGES.items():
            names = [f"{family}/{member}" for member in members]
            if all(name in done for name in names):
                part = [done[name] for name in names]
                sums = {key: sum(row[key] for row in part) for key in ("samples", "cut")}
                about = {"task": f"{family}/average of {label}", "metric": "mean", "chat": any(r["chat"] for r in part)}
                out.append(part[0] | about | sums | {"score": float(np.mean([row["score"] for row in part]))})
    return out
