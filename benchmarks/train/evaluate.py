"""Figures for the model cards, all with the library's own forward and the exact cache's
arithmetic."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from benchmarks.train.data import Corpus
from kvqjax.eval.synthetic import Problem, key_value_recall, passkey_prompt, repeated_spans
from kvqjax.model.config import ModelConfig
from kvqjax.model.decoder import logits

SEED = 2024  # far from the training's (seed, step) streams


@functools.partial(jax.jit, static_argnames="config")
def _scores(params: dict, tokens: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Greedy next token and log-probability of the true one, each [B, T-1]."""
    table = jax.nn.log_softmax(logits(params, tokens[:, :-1], config))
    return table.argmax(-1), jax.numpy.take_along_axis(table, tokens[:, 1:, None], 2)[..., 0]


def recall_accuracy(
    params: dict, config: ModelConfig, corpus: Corpus, problems: list[Problem], length: int
) -> float:
    """Share of problems whose whole answer is the greedy continuation of the prompt, rows padded to
    `length` tokens."""
    right = []
    for problem in problems:
        prompt, answer = [corpus.bos, *corpus.encode(problem.prompt)], corpus.encode(problem.answer)
        row = np.zeros((1, length + 1), np.int32)
        row[0, : len(prompt) + len(answer)] = prompt + answer
        place = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        greedy, _ = _scores(params, row, config)
        right.append(np.array_equal(np.asarray(greedy)[0, place], answer))
    return float(np.mean(right))


def _span_accuracy(
    params: dict, config: ModelConfig, corpus: Corpus, length: int, number: int
) -> float:
    """Share of the symbols of a second copy that are predicted from the first one."""
    rng, right = np.random.default_rng((SEED, length)), []
    for _ in range(number):
        span = corpus.encode(
            repeated_spans(rng, length - 1, lambda text: len(corpus.encode(text))).prompt
        )
        greedy, _ = _scores(params, np.asarray([[corpus.bos, *span, *span]]), config)
        right.append(np.mean(np.asarray(greedy)[0, len(span) + 1 :] == span[1:]))
    return float(np.mean(right))


def _text_losses(params: dict, config: ModelConfig, corpus: Corpus, length: int, rows: int) -> dict:
    """Nats per piece on `rows` held-out windows, beside those of the training text's piece
    frequencies alone."""
    starts = np.linspace(0, len(corpus.valid) - length, rows).astype(int)
    tokens = np.stack(
        [[corpus.bos, *corpus.valid[start : start + length]] for start in starts]
    ).astype(np.int32)
    losses = [-np.asarray(_scores(params, row[None], config)[1]).mean() for row in tokens]
    counts = np.bincount(corpus.text, minlength=config.vocab_size) + 1.0
    unigram = -np.log(counts / counts.sum())[tokens[:, 1:]].mean()
    return {"validation_loss": float(np.mean(losses)), "unigram_loss": float(unigram)}


def figures(
    params: dict, config: ModelConfig, corpus: Corpus, lengths: tuple[int, ...], number: int
) -> dict:
    """Recall accuracy by kind and length (`number` problems each), and losses where there is
    text."""
    result: dict = {} if corpus.valid is None else _text_losses(params, config, corpus, 512, number)

    def count(text: str) -> int:
        return len(corpus.encode(text))

    kinds: dict[str, Callable] = {"key-value recall": key_value_recall}
    if corpus.text is not None:
        kinds["pass key"] = passkey_prompt
    for kind, make in kinds.items():
        for length in lengths:
            rng = np.random.default_rng((SEED, length))
            problems = [make(rng, length - 1, count) for _ in range(number)]
            result[f"{kind}, {length} tokens"] = recall_accuracy(
                params, config, corpus, problems, length
            )
    for length in lengths:
        result[f"repeated span, {length} tokens"] = _span_accuracy(
            params, config, corpus, length, number // 4
        )
    return result
