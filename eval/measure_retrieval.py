"""Retrieval through a compressed cache: pass keys, needles, variables and stored pairs of our own
text, answered greedily."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from kvqjax._arguments import MOST_SEED, check_counts, check_integer
from kvqjax._errors import UserError
from kvqjax.data.corpora import is_name, read
from kvqjax.data.documents import Data
from kvqjax.eval.stamp import bytes_of
from kvqjax.eval.synthetic import (
    Problem,
    Sentences,
    key_value_recall,
    multikey_prompt,
    needle_prompt,
    passkey_prompt,
    sentences_of,
    variable_tracking,
)
from kvqjax.generation.decoding import generate
from kvqjax.methods import MethodLike, parse
from kvqjax.model.loading import Model
from kvqjax.step.checks import check_model

TASKS = {
    "passkey": passkey_prompt,
    "kv": key_value_recall,
    "multikey": multikey_prompt,
    "variables": variable_tracking,
    "needle": needle_prompt,
}


Hay = Sentences | Data | str | os.PathLike


def _sentences(hay: Hay) -> Sentences:
    """Read the sentences of a text, a path or data."""
    if isinstance(hay, os.PathLike) or (isinstance(hay, str) and is_name(hay)):
        hay = read(hay)
    text = hay.text if isinstance(hay, Data) else hay
    if isinstance(text, str) and text.strip():
        return sentences_of(text)
    if isinstance(text, str) or not callable(text):
        raise UserError(
            f"hay is {type(hay).__name__} without text; wanted a text, a path, or data of kvqjax.data.read"
        )
    return text


def generator(task: str, hay: Hay | None) -> Callable[..., Problem]:
    """The task's generator, with `hay` for its sentences. Raises UserError for a task that is not
    known or has none."""
    if task not in TASKS:
        raise UserError(f"task={task!r}; known: {', '.join(TASKS)}")
    make: Callable[..., Problem] = TASKS[task]
    if hay is None:
        return make
    if "sentences" not in inspect.signature(make).parameters:
        raise UserError(f"task={task!r} has no sentences that a text could replace")
    return functools.partial(make, sentences=_sentences(hay))


def encoded_problem(model: Model, problem: Problem, task: str) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its answer. Raises UserError where a token would hold the end of
    one and the beginning of the other."""
    prompt, text = model.encode(problem.prompt), model.encode(problem.prompt + problem.answer)
    if text[: len(prompt)] != prompt:
        raise UserError(
            f"this tokenizer merges prompt and answer of the {task} task; use another task"
        )
    return prompt, text[len(prompt) :]


def problems(
    model: Model, task: str, length: int, samples: int, seed: int, hay: Hay | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of `samples` prompts of at most `length` tokens, answer included, and of their
    answers. Depths are spread evenly from the first place to the last."""
    make = generator(task, hay)
    if samples < 1 or length < 32:
        raise UserError(f"samples={samples} and length={length}; at least 1 and 32 are needed")
    rng = np.random.default_rng(seed)
    encode = model.encode
    prompts, answers = [], []
    for number in range(samples):
        depth = number / max(samples - 1, 1)
        problem = make(rng, length, lambda text: len(encode(text)), depth)
        prompt, answer = encoded_problem(model, problem, task)
        prompts.append(prompt)
        answers.append(answer)
    return prompts, answers


def retrieval(
    model: Model,
    method: MethodLike,
    *,
    task: str = "kv",
    length: int = 512,
    samples: int = 16,
    chunk: int | None = None,
    seed: int = 0,
    batch: int = 8,
    bins: int = 4,
    hay: Hay | None = None,
    kernels: str = "auto",
    progress=lambda fraction: None,
) -> dict[str, Any]:
    """The share of answers whose every token is right, by greedy decoding behind prompts that hide
    them.

    Args:
        model: the model, with the method's constants.
        method: the cache's.
        task: "kv" (stored pairs), "passkey", "multikey", "variables" or "needle".
        length: tokens of a prompt, answer included.
        samples: how many prompts; their depths are spread evenly from the first place to the last.
        chunk: None: the prompt attends exactly; N: it passes through the cache N tokens at a time.
        seed: of the prompts.
        batch: prompts at a time.
        bins: equal spans of depth.
        hay: the sentences between the needles, if not our own: a text, the path of a file or a
            folder, data of `kvqjax.data.read`, or a function (kvqjax/eval/synthetic.py).
        kernels: as in `init_cache`.
        progress: `progress(fraction)` is called as batches finish.

    Returns:
        A row of the report: `accuracy` over all samples, and `by_depth` in every span, the first
            place first.

    Raises:
        UserError: a task that does not exist, and prompts too short for it.
    """
    check_model(model)
    check_counts(length=length, samples=samples, chunk=chunk, batch=batch, bins=bins)
    check_integer("seed", seed, 0, MOST_SEED)
    method = parse(method)
    prompts, answers = problems(model, task, length, samples, seed, hay)
    capacity, right = length + 64, []
    for start in range(0, samples, batch):
        part = prompts[start : start + batch]
        goals = answers[start : start + batch]
        most = max(len(goal) for goal in goals)
        options = {"max_new_tokens": most, "capacity": capacity, "chunk": chunk, "kernels": kernels}
        outputs = generate(model, part, method, eos_ids=(), beyond_trained=True, **options).tokens
        right += [tokens[: len(goal)] == goal for tokens, goal in zip(outputs, goals, strict=True)]
        progress(min(1.0, (start + batch) / samples))
    return {
        "cache": str(method),
        "mode": "prefill-exact" if chunk is None else f"in-the-loop-chunk{chunk}",
        "task": task,
        "length": length,
        "samples": samples,
        **bytes_of(model, method, capacity),
        "accuracy": float(np.mean(right)),
        "by_depth": [float(np.mean(span)) for span in np.array_split(right, min(bins, samples))],
    }
