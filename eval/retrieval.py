"""Retrieval through a compressed cache: pass keys and stored pairs of our own text, answered greedily."""

from typing import Any

import numpy as np

from kvqjax.errors import UserError
from kvqjax.eval.synthetic import key_value_recall, passkey_prompt
from kvqjax.generate import generate
from kvqjax.methods import Method
from kvqjax.model import Model

__all__ = ["TASKS", "problems", "retrieval"]

TASKS = {"passkey": passkey_prompt, "kv": key_value_recall}


def problems(model: Model, task: str, length: int, samples: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of `samples` prompts of at most `length` tokens, answer included, and of their answers. Depths are
    spread evenly from the first place to the last."""
    if task not in TASKS:
        raise UserError(f"task={task!r}; known: {', '.join(TASKS)}")
    if samples < 1 or length < 32:
        raise UserError(f"samples={samples} and length={length}; at least 1 and 32 are needed")
    rng = np.random.default_rng(seed)
    encode = lambda text: model.tokenizer(text)["input_ids"]  # noqa: E731
    prompts, answers = [], []
    for number in range(samples):
        depth = number / max(samples - 1, 1)
        problem = TASKS[task](rng, length, lambda text: len(encode(text)), depth)
        prompt, whole = encode(problem.prompt), encode(problem.prompt + problem.answer)
        if whole[: len(prompt)] != prompt:
            raise UserError(f"this tokenizer merges prompt and answer of the {task} task; use another task")
        prompts.append(prompt)
        answers.append(whole[len(prompt) :])
    return prompts, answers


def retrieval(
    model: Model,
    method: Method,
    *,
    task: str = "kv",
    length: int = 512,
    samples: int = 16,
    chunk: int | None = None,
    seed: int = 0,
    batch: int = 8,
    progress=lambda done: None,
) -> dict[str, Any]:
    """One row: the share of answers whose every token is right. chunk=None: the prompt attends exactly; chunk=N: it
    passes through the cache N tokens at a time."""
    prompts, answers = problems(model, task, length, samples, seed)
    right = 0
    for start in range(0, samples, batch):
        part = prompts[start : start + batch]
        goals = answers[start : start + batch]
        most = max(len(goal) for goal in goals)
        made = generate(model, part, method, max_new_tokens=most, capacity=length + 64, chunk=chunk, eos_ids=()).tokens
        right += sum(tokens[: len(goal)] == goal for tokens, goal in zip(made, goals, strict=True))
        progress(min(1.0, (start + batch) / samples))
    return {
        "cache": str(method),
        "mode": "prefill-exact" if chunk is None else f"in-the-loop-chunk{chunk}",
        "task": task,
        "length": length,
        "samples": samples,
        "accuracy": right / samples,
    }
