"""Run tasks of lm-evaluation-harness through a compressed cache, in one process."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvqjax._errors import UserError
from kvqjax.eval.cache_lm import CacheLM

__all__ = ["CacheLM", "cut_warning", "read_metadata", "read_samples", "run_harness"]

EXAMPLE = '{"gsm8k": [0, 1, 2]}'


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
    return [row | {"cut": lm.cut_texts, "texts": lm.texts} for row in rows]


def read_metadata(texts: Iterable[str]) -> dict[str, Any]:
    """What tasks are told, from JSON objects and from "key=value", as lm-eval's own option takes them; a value is JSON
    where it can be read as such. Raises UserError."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if equals and key.strip().isidentifier():
            try:
                found[key.strip()] = json.loads(value)
            except ValueError:
                found[key.strip()] = value
            continue
        try:
            found |= json.loads(text)
        except (TypeError, ValueError) as error:
            raise UserError(f"metadata={text!r}: neither a JSON object nor key=value") from error
    return found


def read_samples(text: str | None) -> dict[str, list[int]] | None:
    """Which samples of which task, from the JSON that lm-eval's option of this name takes. Raises UserError."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"samples={text!r}: not JSON such as {EXAMPLE}; so many of every task are limit=N") from error
    if isinstance(found, int | float):
        raise UserError(f"samples={text}: wanted JSON such as {EXAMPLE}; so many of every task are limit={text}")
    fine = isinstance(found, dict) and all(
        isinstance(numbers, list) and numbers and all(type(n) is int and n >= 0 for n in numbers)
        for numbers in found.values()
    )
    if not fine:
        raise UserError(f"samples={text!r}: wanted JSON such as {EXAMPLE}")
    return found


def _check_limit(limit: int | float | None) -> int | float | None:
    """A number of samples of every task, or below 1 a share of them."""
    if limit is None or 0 < limit < 1:
        return limit
    if limit < 1 or limit != int(limit):
        raise UserError(f"limit={limit:g}; wanted a number of samples, or a share of them below 1")
    return int(limit)


def _manager(include: Path | None, metadata: dict[str, Any], samples: dict[str, list[int]] | None):
    """The harness's tasks. One whose data cannot be had, or that has fewer samples than asked for, is one line."""
    from lm_eval.tasks import TaskManager  # `cache_lm` has said in one line if it is missing

    class Manager(TaskManager):
        def load(self, task_list):
            try:
                loaded = super().load(task_list)
            # Tasks are programs and data of others: errors of the hub, of `datasets`, of packages that they need.
            except Exception as error:
                names = ", ".join(map(str, task_list))[:100]
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                hint = "download the data where there is a network, or name a task of your own with --include"
                raise UserError(f"the harness cannot load the data of {names}: {reason}; {hint}") from error
            for name, numbers in (samples or {}).items():
                task = loaded["tasks"].get(name)
                if task is None:
                    raise UserError(f"samples: {name!r} is none of the tasks {', '.join(loaded['tasks'])}")
                if max(numbers) >= (size := len(task.eval_docs)):
                    raise UserError(f"samples: {name} has {size} samples, numbered from 0; {max(numbers)} was wanted")
            return loaded

    return Manager(include_path=None if include is None else str(include), metadata=metadata)


def run_harness(
    lm: CacheLM,
    tasks: Sequence[str],
    *,
    shots: int | None = None,
    limit: int | float | None = None,
    samples: dict[str, list[int]] | None = None,
    seed: int = 0,
    include: Path | None = None,
    chat: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run tasks or groups of the harness, or of YAML files in `include`.

    Args:
        lm: the model and the cache.
        tasks: names of tasks or groups.
        shots: worked examples before each sample; None: the task's own number.
        limit: samples of every task, or below 1 a share of them; None: all.
        samples: which samples of which task, by number, instead of `limit`.
        seed: of everything that is drawn.
        include: a folder with YAML files of more tasks.
        chat: put prompts through the model's chat template.
        metadata: what tasks are told beside where the model's tokenizer is (RULER makes prompts of `max_seq_lengths`
            tokens).

    Returns:
        A row for each task or group, filter and metric. `cut` of a row is how many of the run's `texts` were too long.

    Raises:
        UserError: for tasks that are not known, or whose data cannot be had.
    """
    from lm_eval.evaluator import simple_evaluate

    if limit is not None and samples is not None:
        raise UserError("limit and samples exclude each other")
    limit = _check_limit(limit)
    manager = _manager(include, {"tokenizer": lm.model.folder, **(metadata or {})}, samples)
    known = manager.match_tasks(list(tasks))
    missing = [name for name in tasks if not manager.match_tasks([name])]
    if missing:
        raise UserError(f"the harness does not know the tasks {', '.join(missing)}")
    seeds = {f"{name}_random_seed": seed for name in ("numpy", "torch", "fewshot")} | {"random_seed": seed}
    options = {"num_fewshot": shots, "limit": limit, "samples": samples, "bootstrap_iters": 0}
    options |= {"apply_chat_template": chat, **seeds}
    return _rows(lm, simple_evaluate(model=lm, tasks=known, task_manager=manager, log_samples=False, **options))


def cut_warning(rows: Iterable[dict[str, Any]], length: int) -> str:
    """What a report says first where more than a tenth of a run's texts were cut, else ""."""
    cut, texts = max(((row["cut"], row["texts"]) for row in rows), key=lambda pair: pair[0] / max(pair[1], 1))
    if cut * 10 <= texts:
        return ""
    return f"{cut} of {texts} texts were longer than {length} tokens and were cut: these are not the tasks' own scores"
