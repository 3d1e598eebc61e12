"""What a benchmark is made of, and one run of it through a cache: greedy, long prompts cut in the middle."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax.eval.stamp import bytes_of, digest
from kvqjax.generation.decoding import generate
from kvqjax.generation.prompt_ids import bucket, encode_prompts
from kvqjax.methods import MethodLike, parse
from kvqjax.model.loading import Model

__all__ = ["Options", "Sample", "Task", "best", "every", "fingerprint", "prepare", "run_task"]


class Sample(NamedTuple):
    """A prompt, the answers that count, and the classes to choose from, if any."""

    prompt: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()


class Task(NamedTuple):
    """One task. score(prediction, sample): 0 to 1; new: most tokens of an answer; chat: whether the benchmark puts the
    prompt through a chat template; prompts: whose wording it is ("official" or "own")."""

    name: str
    metric: str
    score: Callable[[str, Sample], float]
    new: int
    samples: Sequence[Sample]
    chat: bool = False
    stop: tuple[str, ...] = ()
    prompts: str = "own"


class Options(NamedTuple):
    """What loading a task may need. folder: local data, None for the hub; limit: most prompt tokens; samples: how many,
    0 for all; count: text -> tokens."""

    folder: Path | None
    limit: int
    samples: int
    seed: int
    count: Callable[[str], int]


def best(score: Callable[[str, str], float]) -> Callable[[str, Sample], float]:
    """The best score over all answers."""
    return lambda prediction, sample: max(score(prediction, answer) for answer in sample.answers)


def every(score: Callable[[str, str], float]) -> Callable[[str, Sample], float]:
    """The mean score over all answers: each of them is asked for."""
    return lambda prediction, sample: float(np.mean([score(prediction, answer) for answer in sample.answers]))


def fingerprint(task: Task) -> dict[str, Any]:
    """A task's entry in the report's stamp."""
    text = "\x1e".join("\x1f".join((sample.prompt, *sample.answers)) for sample in task.samples)
    return {"sha256": digest(text), "samples": len(task.samples), "prompts": task.prompts}


def prepare(model: Model, task: Task, limit: int) -> tuple[list[list[int]], int, bool]:
    """Token ids of every prompt, how many were cut, and whether a chat template was used. A prompt of more than `limit`
    tokens keeps its first and last halves of that, as text, before the template is put around it."""
    tokenizer, texts, cut = model.tokenizer, [], 0
    for sample in task.samples:
        ids, text = tokenizer(sample.prompt)["input_ids"], sample.prompt
        if len(ids) > limit:
            head, tail = ids[: limit // 2], ids[len(ids) - limit // 2 :]
            text = "".join(tokenizer.decode(half, skip_special_tokens=True) for half in (head, tail))
            cut += 1
        texts.append(text)
    chat = task.chat and getattr(tokenizer, "chat_template", None) is not None
    return encode_prompts(model, texts, chat), cut, chat


def run_task(
    model: Model,
    method: MethodLike,
    task: Task,
    *,
    limit: int,
    chunk: int | None = None,
    batch: int = 4,
    kernels: str = "auto",
    progress=lambda done: None,
) -> dict[str, Any]:
    """One row; `score` is the mean over samples, 0 to 100. chunk as in kvqjax.eval.measure_retrieval."""
    method = parse(method)
    if limit < 2:
        raise UserError(f"limit={limit}; a prompt needs at least 2 tokens")
    prompts, cut, chat = prepare(model, task, limit)
    capacity = bucket(max(len(prompt) for prompt in prompts)) + task.new
    options: dict[str, Any] = {"max_new_tokens": task.new, "capacity": capacity, "chunk": chunk}
    options |= {"stop": task.stop, "kernels": kernels}
    scores: list[float] = []
    for start in range(0, len(prompts), batch):
        texts = generate(model, prompts[start : start + batch], method, **options).text
        part = task.samples[start : start + batch]
        scores += [task.score(text, sample) for text, sample in zip(texts, part, strict=True)]
        progress(len(scores) / len(prompts))
    return {
        "cache": str(method),
        "mode": "prefill-exact" if chunk is None else f"in-the-loop-chunk{chunk}",
        "task": task.name,
        "metric": task.metric,
        "samples": len(scores),
        "cut": cut,
        "chat": chat,
        **bytes_of(model, method, capacity),
        "score": 100 * float(np.mean(scores)),
    }
