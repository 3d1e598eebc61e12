"""Choosing the next token from logits: greedy, temperature, top-k, top-p, min-p and repetition penalty, all inside
jit."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_integer, typed
from kvqjax._errors import UserError

__all__ = ["Sampling", "make_sampling", "sample"]


class Sampling(struct.PyTreeNode):
    """Sampling parameters as data, so that changing one compiles nothing. `greedy` and `penalise` are static: they
    decide which computations exist at all."""

    temperature: Any  # float32 scalars, but for top_k: int32
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    greedy: bool = struct.field(pytree_node=False)
    penalise: bool = struct.field(pytree_node=False)


def make_sampling(
    *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0
) -> Sampling:
    """Check and pack the parameters. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalty 1 switch each
    off."""
    given = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    for name, value in given.items():
        typed(name, value, float)
    check_integer("top_k", top_k, 0)
    bounds = {
        "temperature": (temperature, temperature >= 0, "0 or more"),
        "top_k": (top_k, top_k >= 0, "0 or more"),
        "top_p": (top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        "min_p": (min_p, 0 <= min_p < 1, "from 0 to below 1"),
        "repetition_penalty": (repetition_penalty, repetition_penalty > 0, "above 0"),
    }
    for name, (value, fine, wanted) in bounds.items():
        if not fine:
            raise UserError(f"{name}={value}; it must be {wanted}")
    return Sampling(
        temperature=jnp.float32(temperature or 1.0),
        top_k=jnp.int32(top_k),
        top_p=jnp.float32(top_p),
        min_p=jnp.float32(min_p),
        repetition_penalty=jnp.float32(repetition_penalty),
        greedy=temperature == 0,
        penalise=repetition_penalty != 1,
    )


def _keep(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Mask what top-k, top-p and min-p exclude, from one sort. The most likely token always stays."""
    vocab = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    probs = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # probability of everything more likely
    rank = jnp.arange(vocab)[None]
    limit = jnp.where(sampling.top_k > 0, sampling.top_k, vocab)
    kept = (rank < limit) & (before < sampling.top_p) & (probs >= sampling.min_p * probs[:, :1])
    threshold = jnp.where(kept, ordered, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def sample(
    key: Array, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, sampling: Sampling
) -> Int[Array, " B"]:
    """One token per row. `seen` marks tokens already in the row; the penalty divides their positive logits and
    multiplies their negative ones (CTRL, arXiv 1909.05858, section 4.1)."""
    if sampling.penalise and seen is not None:
        penalty = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.greedy:
        return logits.argmax(-1).astype(jnp.int32)
    return jax.random.categorical(key, _keep(logits / sampling.temperature, sampling)).astype(jnp.int32)
