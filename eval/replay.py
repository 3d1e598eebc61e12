"""Whole sequences through a cache, token by token's scores back: one compiled program per method serves perplexity,
divergence, drift and recall alike, and the exact pass is made once for all methods.

For small vocabularies: logits of every position are held. `kvqjax.eval.measure_perplexity` streams them and takes
any model.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.eval.scores import Scores, token_scores
from kvqjax.eval.through import through
from kvqjax.methods import Method
from kvqjax.model import decoder
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import init_cache

__all__ = ["exact_logits", "replay", "score"]


@functools.partial(jax.jit, static_argnames=("method", "chunk"))
def replay(model: Model, tokens: Int[Array, "B T"], method: Method, chunk: int) -> Float[Array, "B T V"]:
    """Logits with every token passing through the cache, `chunk` at a time. Raises UserError unless `chunk` divides
    T."""
    rows, length = tokens.shape
    if length % chunk:
        raise UserError(f"chunk={chunk} does not divide {length} tokens")
    counts, cache = jnp.full((rows,), length, jnp.int32), init_cache(model, method, rows, length)
    logits = through((model,), (cache,), tokens, counts, chunk, lambda made, targets, valid: made[0])
    return jnp.moveaxis(logits, 0, 1).reshape(rows, length, -1)


@functools.partial(jax.jit, static_argnames="config")
def _plain(params, tokens, config):
    return decoder.logits(params, tokens, config)


def exact_logits(model: Model, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of a plain causal forward: what every cache is measured against."""
    return _plain(model.params, tokens, model.config)


@jax.jit
def score(logits: Float[Array, "B T V"], reference: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Scores:
    """Scores of the predictions of tokens 1 to T-1."""
    return token_scores(logits[:, :-1], reference[:, :-1], tokens[:, 1:])
