"""Predictions of tokens that pass through caches, and their scores against the exact cache: the
numbers behind every report.

`through` streams: a scoring function sees one chunk at a time. `replay` gives the logits of all
positions, for small
vocabularies: one compiled program per method serves perplexity, divergence, drift and recall alike,
and the exact pass is made once for all methods.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax._errors import UserError
from kvqjax.cache import Cache
from kvqjax.methods import Method
from kvqjax.model import decoder
from kvqjax.model.loading import Model
from kvqjax.step.forward import forward
from kvqjax.step.new_cache import init_cache

ROUNDING = 1e-7  # nats: an exact cache's KL divergence in float32 stays below
TAIL = 0.999  # of all tokens have at most the divergence that reports call `kld_p999`


class Scores(NamedTuple):
    """Figures of each prediction: negative log-likelihood (nats), KL(exact || cache) (nats),
    whether the target was put first, and whether the exact cache's first choice was put first."""

    nll: Float[Array, "B P"]
    kld: Float[Array, "B P"]
    right: Bool[Array, "B P"]
    agree: Bool[Array, "B P"]


def tail(klds: np.ndarray) -> float:
    """The divergence that 99.9 % of the predictions stay below."""
    return float(np.quantile(klds, TAIL))


def negative_log_likelihood(
    logits: Float[Array, "B P V"], targets: Int[Array, "B P"]
) -> Float[Array, "B P"]:
    """-log p(target) of each prediction, in nats."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def token_scores(
    logits: Float[Array, "B P V"], reference: Float[Array, "B P V"], targets: Int[Array, "B P"]
) -> Scores:
    """Scores of a cache's logits against the exact cache's."""
    log_p, log_r = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    best, first = (x.argmax(-1).astype(targets.dtype) for x in (logits, reference))
    kld = (jnp.exp(log_r) * (log_r - log_p)).sum(-1)
    return Scores(negative_log_likelihood(logits, targets), kld, best == targets, best == first)


@jax.jit
def score(
    logits: Float[Array, "B T V"], reference: Float[Array, "B T V"], tokens: Int[Array, "B T"]
) -> Scores:
    """Scores of the predictions of tokens 1 to T-1."""
    return token_scores(logits[:, :-1], reference[:, :-1], tokens[:, 1:])


def through(
    models: tuple[Model, ...],
    caches: tuple[Cache, ...],
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    chunk: int,
    score: Callable[..., Any],
    first: int = 0,
) -> Any:
    """Append the first `counts[b]` tokens of each row to every cache, `chunk` at a time, and score
    the predictions.

    `score(logits, targets, valid)` sees one chunk: a list of each model's logits [B,C,V], the
    tokens that follow [B,C], and which of these exist and are predicted at position `first` or
    later [B,C]. Its results come back stacked by chunk. Called inside jit."""
    rows, length = tokens.shape
    steps = -(-length // chunk)
    padding = steps * chunk - length

    def split(x):
        return jnp.moveaxis(x.reshape(rows, steps, chunk), 1, 0)

    inputs = split(jnp.pad(tokens, ((0, 0), (0, padding))))
    targets = split(jnp.pad(tokens[:, 1:], ((0, 0), (0, padding + 1))))

    def step(caches, piece):
        inputs, targets, start = piece
        new = jnp.clip(counts - start, 0, chunk)
        results = [
            forward(model, inputs, new, cache) for model, cache in zip(models, caches, strict=True)
        ]
        positions = start + jnp.arange(chunk)[None]
        valid = (positions < counts[:, None] - 1) & (positions >= first)
        return tuple(cache for _, cache in results), score(
            [logits for logits, _ in results], targets, valid
        )

    starts = jnp.arange(steps, dtype=jnp.int32) * chunk
    return jax.lax.scan(step, caches, (inputs, targets, starts))[1]


@functools.partial(jax.jit, static_argnames=("method", "chunk"))
def replay(
    model: Model, tokens: Int[Array, "B T"], method: Method, chunk: int
) -> Float[Array, "B T V"]:
    """Logits with every token passing through the cache, `chunk` at a time. Raises UserError unless
    `chunk` divides T."""
    rows, length = tokens.shape
    if length % chunk:
        raise UserError(f"chunk={chunk} does not divide {length} tokens")
    counts, cache = jnp.full((rows,), length, jnp.int32), init_cache(model, method, rows, length)
    logits = through(
        (model,), (cache,), tokens, counts, chunk, lambda outputs, targets, valid: outputs[0]
    )
    return jnp.moveaxis(logits, 0, 1).reshape(rows, length, -1)


@functools.partial(jax.jit, static_argnames="config")
def _plain(params, tokens, config):
    return decoder.logits(params, tokens, config)


def exact_logits(model: Model, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of a plain causal forward: what every cache is measured against."""
    return _plain(model.params, tokens, model.config)
