"""Tokens through caches, a chunk at a time, every prediction handed to a scoring function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvqjax.cache import Cache
from kvqjax.model.loading import Model
from kvqjax.step.forward import forward

__all__ = ["through"]


def through(
    models: tuple[Model, ...],
    caches: tuple[Cache, ...],
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    chunk: int,
    score: Callable[..., Any],
    first: int = 0,
) -> Any:
    """Append the first `counts[b]` tokens of each row to every cache, `chunk` at a time, and score the predictions.

    `score(logits, targets, valid)` sees one chunk: a list of each model's logits [B,C,V], the tokens that follow
    [B,C], and which of these exist and are predicted at position `first` or later [B,C]. Its results come back stacked
    by chunk. Called inside jit."""
    rows, length = tokens.shape
    steps = -(-length // chunk)
    padding = steps * chunk - length
    split = lambda x: jnp.moveaxis(x.reshape(rows, steps, chunk), 1, 0)  # noqa: E731
    inputs = split(jnp.pad(tokens, ((0, 0), (0, padding))))
    targets = split(jnp.pad(tokens[:, 1:], ((0, 0), (0, padding + 1))))

    def step(caches, piece):
        inputs, targets, start = piece
        here = jnp.clip(counts - start, 0, chunk)
        made = [forward(model, inputs, here, cache) for model, cache in zip(models, caches, strict=True)]
        at = start + jnp.arange(chunk)[None]
        valid = (at < counts[:, None] - 1) & (at >= first)
        return tuple(cache for _, cache in made), score([logits for logits, _ in made], targets, valid)

    starts = jnp.arange(steps, dtype=jnp.int32) * chunk
    return jax.lax.scan(step, caches, (inputs, targets, starts))[1]
