"""Run tasks of lm-evaluation-harness through a compressed cache, in one process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvqjax._errors import UserError
from kvqjax.eval.cache_lm import CacheLM

__all__ = ["CacheLM", "run_harness"]


def _leaves(task: str, groups: dict[str, list[str]]) -> list[str]:
    """List the tasks that a group and its groups are made of; a task is its own."""
    below = groups.get(task)
    return [task] if below is None else [leaf for name in below for leaf in _leaves(name, groups)]


def _rows(lm: CacheLM, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Make a row of each task or group, filter and metric of the harness's report."""
    rows = []
    for task, scores in report["results"].items():
        leaves = _leaves(task, report["group_subtasks"])
        modes = dict.fromkeys(lm.mode(report["configs"][leaf]["output_type"]) for leaf in leaves)
        samples = sum(report["n-samples"][leaf]["effective"] for leaf in leaves)
        about = {"cache": str(lm.method), "mode": ", ".join(modes), "task": task}
        for name, value in scores.items():
            metric, _, kept = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                rows.append(about | {"metric": metric, "filter": kept, "samples": samples, "score": value})
    return [row | {"cut": lm.cut_texts} for row in rows]


def run_harness(
    lm: CacheLM,
    tasks: Sequence[str],
    *,
    shots: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    include: Path | None = None,
    chat: bool = False,
    metadata: str = "{}",
) -> list[dict[str, Any]]:
    """Run tasks or groups of the harness, or of YAML files in `include`: a row each with filter and metric. `cut` of a
    row is how many texts of the whole run were too long. metadata: JSON that is given to the tasks, beside where the
    model's tokenizer is (RULER makes prompts of `max_seq_lengths` tokens); chat: put prompts through the model's chat
    template."""
    from lm_eval.evaluator import simple_evaluate  # `cache_lm` has said in one line if it is missing
    from lm_eval.tasks import TaskManager

    try:
        given = {"tokenizer": lm.model.folder, **json.loads(metadata)}
    except (TypeError, json.JSONDecodeError) as error:
        raise UserError(f"metadata={metadata!r}: not a JSON object") from error
    manager = TaskManager(include_path=None if include is None else str(include), metadata=given)
    known = manager.match_tasks(list(tasks))
    missing = [name for name in tasks if not manager.match_tasks([name])]
    if missing:
        raise UserError(f"the harness does not know the tasks {', '.join(missing)}")
    seeds = {f"{name}_random_seed": seed for name in ("numpy", "torch", "fewshot")} | {"random_seed": seed}
    options = {"num_fewshot": shots, "limit": limit, "bootstrap_iters": 0, "apply_chat_template": chat, **seeds}
    return _rows(lm, simple_evaluate(model=lm, tasks=known, task_manager=manager, log_samples=False, **options))
