"""What one prediction is worth, with a cache and against the exact one: the numbers behind every report."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["ROUNDING", "Scores", "negative_log_likelihood", "token_scores"]

ROUNDING = 1e-7  # nats: an exact cache's KL divergence in float32 stays below


class Scores(NamedTuple):
    """Of each prediction: negative log-likelihood (nats), KL(exact || cache) (nats), whether the target, and whether
    the exact cache's first choice, was put first."""

    nll: Float[Array, "B P"]
    kld: Float[Array, "B P"]
    right: Bool[Array, "B P"]
    agree: Bool[Array, "B P"]


def negative_log_likelihood(logits: Float[Array, "B P V"], targets: Int[Array, "B P"]) -> Float[Array, "B P"]:
    """-log p(target) of each prediction, in nats."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def token_scores(logits: Float[Array, "B P V"], reference: Float[Array, "B P V"], targets: Int[Array, "B P"]) -> Scores:
    """Scores of a cache's logits against the exact cache's."""
    log_p, log_r = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    best, first = (x.argmax(-1).astype(targets.dtype) for x in (logits, reference))
    kld = (jnp.exp(log_r) * (log_r - log_p)).sum(-1)
    return Scores(negative_log_likelihood(logits, targets), kld, best == targets, best == first)
