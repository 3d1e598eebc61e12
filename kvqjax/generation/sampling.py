"""Choosing the next token from logits: greedy, temperature, top-k, top-p, min-p and repetition penalty, all inside
jit."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_integer, typed
from kvqjax._errors import UserError

__all__ = ["RowSampling", "Sampling", "drawn_from", "make_sampling", "of_rows", "penalised", "sample", "split_key"]


class Sampling(struct.PyTreeNode):
    """Sampling parameters as data, so that changing one compiles nothing. `greedy` and `penalise` are static: they
    decide which computations exist at all."""

    temperature: Any  # float32 scalars, but for top_k: int32
    top_k: Any
    left_out: Any  # 1 - top_p: the share of probability that may be left out
    min_p: Any
    repetition_penalty: Any
    greedy: bool = struct.field(pytree_node=False)
    penalise: bool = struct.field(pytree_node=False)


class RowSampling(struct.PyTreeNode):
    """Sampling parameters of every row. All of them are data, so that rows of different requests share one program."""

    each: Sampling  # with arrays [B] in place of numbers, and the static fields of the most general draw
    greedy: Any  # Bool[B]: rows that take their most likely token


def of_rows(parameters: Sequence[Sampling]) -> RowSampling:
    """Put the parameters of several rows side by side, as arrays of the host."""
    general = [row.replace(greedy=False, penalise=True) for row in parameters]
    greedy = np.asarray([row.greedy for row in parameters])
    return RowSampling(jax.tree.map(lambda *numbers: np.stack(numbers), *general), greedy)


def split_key(key: Array) -> tuple[Array, Array]:
    """Split a key, or every row's own key [B], into a key for later tokens and a key for this token."""
    if not key.ndim:
        later, draw = jax.random.split(key)
        return later, draw
    pairs = jax.vmap(jax.random.split)(key)
    return pairs[:, 0], pairs[:, 1]


def make_sampling(
    *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0
) -> Sampling:
    """Check and pack the parameters.

    They apply one after the other, in the order of transformers: penalty, temperature, top-k, top-p, min-p.

    Args:
        temperature: 0 is greedy.
        top_k: 0 switches it off.
        top_p: 1 switches it off.
        min_p: 0 switches it off.
        repetition_penalty: 1 switches it off.

    Returns:
        The parameters.

    Raises:
        UserError: for a parameter that is out of its range.
    """
    numbers = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    for name, value in numbers.items():
        typed(name, value, float)
    check_integer("top_k", top_k, 0)
    bounds = {
        "temperature": (temperature, 0 <= temperature < math.inf, "0 or more, and finite"),
        "top_p": (top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        "min_p": (min_p, 0 <= min_p <= 1, "from 0 to 1"),
        "repetition_penalty": (repetition_penalty, 0 < repetition_penalty < math.inf, "above 0, and finite"),
    }
    for name, (value, fine, limits) in bounds.items():
        if not fine:
            raise UserError(f"{name}={value}; it must be {limits}", parameter=name)
    # Numbers too small for float32 become its least positive number: rounded to 0 they would divide by zero.
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    return Sampling(
        temperature=jnp.float32(min(max(temperature, least), most) if temperature else 1.0),
        top_k=jnp.int32(top_k),
        left_out=jnp.float32(1 - top_p),
        min_p=jnp.float32(min_p),
        repetition_penalty=jnp.float32(min(max(repetition_penalty, least), most)),
        greedy=temperature == 0,
        penalise=repetition_penalty != 1,
    )


def _kept(scores: Float[Array, "B V"], sampling: Sampling) -> Bool[Array, "B V"]:
    """Mark the tokens that top-k, top-p and min-p keep, applied one after the other. Each of them keeps the most likely
    tokens, so that one sort is enough.

    Of tokens with equal scores top-k keeps all. Top-p keeps as few tokens as it needs, and prefers higher ids among
    equal scores (logits in bfloat16 are often equal).

    Args:
        scores: at most 0, and 0 for the most likely token of each row.
        sampling: the parameters.

    Returns:
        The tokens that are kept. The most likely one always is.
    """
    vocab = scores.shape[-1]
    ids = jnp.broadcast_to(jnp.arange(vocab)[None], scores.shape)
    ascending, order = jax.lax.sort((scores, ids), num_keys=1)  # stable: of equal scores the higher id is last
    # top-k: the score of the k-th token from the end is the least that stays.
    limit = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab)
    kept = ascending >= jax.lax.dynamic_slice_in_dim(ascending, vocab - limit, 1, axis=-1)
    # top-p: the least likely tokens go, as long as their probabilities add up to at most 1 - top_p.
    mass = jnp.where(kept, jnp.exp(ascending), 0)
    unlikely = jnp.cumsum(mass, axis=-1) <= sampling.left_out * mass.sum(-1, keepdims=True)
    kept = kept & ~(unlikely & (sampling.left_out > 0))
    # min-p: relative to the most likely token, whose exponential is 1.
    kept = kept & (jnp.exp(ascending) >= sampling.min_p)
    # The least likely token that stays. The most likely one stays in any case.
    place = jnp.where(kept.any(-1, keepdims=True), jnp.argmax(kept, axis=-1, keepdims=True), vocab - 1)
    score, token = (jnp.take_along_axis(x, place, axis=-1) for x in (ascending, order))
    return (scores > score) | ((scores == score) & (ids >= token))


def penalised(logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, sampling: Sampling) -> Float[Array, "B V"]:
    """Apply the repetition penalty to the logits of tokens that are already in the row, which `seen` marks. Positive
    logits are divided by it, negative ones are multiplied (CTRL, arXiv 1909.05858, section 4.1)."""
    if not sampling.penalise or seen is None:
        return logits
    penalty = sampling.repetition_penalty
    lowered = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, lowered, logits)


def drawn_from(logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, sampling: Sampling) -> Float[Array, "B V"]:
    """Log weights of the tokens that may come next, with -inf for those that may not."""
    logits = penalised(logits, seen, sampling)
    # Less the greatest before the division: a tiny temperature would make infinities of several.
    scores = (logits - logits.max(-1, keepdims=True)) / sampling.temperature
    return jnp.where(_kept(scores, sampling), scores, -jnp.inf)


def sample(
    key: Array, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, sampling: Sampling | RowSampling
) -> Int[Array, " B"]:
    """Choose one token of every row.

    Args:
        key: one key, or one of every row [B] beside parameters of rows. What a row of its own key draws does not depend
            on the other rows, and is what a batch of that row alone would draw.
        logits: of the next token.
        seen: marks the tokens already in a row; needed where a repetition penalty is.
        sampling: the parameters.

    Returns:
        Token ids, int32 [B].
    """
    if isinstance(sampling, RowSampling):
        return _sample_rows(key, logits, seen, sampling)
    if sampling.greedy:
        return penalised(logits, seen, sampling).argmax(-1).astype(jnp.int32)
    return jax.random.categorical(key, drawn_from(logits, seen, sampling)).astype(jnp.int32)


def _sample_rows(keys: Array, logits, seen: Bool[Array, "B V"] | None, sampling: RowSampling) -> Int[Array, " B"]:
    """Do `sample` with parameters and a key for every row. The draw sorts the vocabulary, so that it is left out where
    all rows are greedy."""
    assert seen is not None  # every row may have a penalty

    def penalised_row(row, marks, parameters):
        return penalised(row[None], marks[None], parameters)[0]

    likeliest = jax.vmap(penalised_row)(logits, seen, sampling.each).argmax(-1).astype(jnp.int32)

    def drawn():
        def draw(key, row, marks, parameters):
            return jax.random.categorical(key, drawn_from(row[None], marks[None], parameters)[0])

        tokens = jax.vmap(draw)(keys, logits, seen, sampling.each).astype(jnp.int32)
        return jnp.where(sampling.greedy, likeliest, tokens)

    return jax.lax.cond(sampling.greedy.all(), lambda: likeliest, drawn)
