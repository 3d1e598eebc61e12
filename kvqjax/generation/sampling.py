"""Choosing the next token from logits, inside jit: bias and penalties, then greedy, or temperature,
top-k, top-p and min-p."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvqjax.generation.options import GenerateOptions
from kvqjax.model.loading import Model


class Sampling(struct.PyTreeNode):
    """Sampling parameters as data, so that changing one compiles nothing. `greedy` and `penalise`
    are static: they decide which computations exist at all."""

    temperature: Any  # float32 scalars, but for top_k: int32
    top_k: Any
    left_out: Any  # 1 - top_p: the share of probability that may be left out
    min_p: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    bias: Any  # float32 [V]; None: no logit has one
    greedy: bool = struct.field(pytree_node=False)
    penalise: bool = struct.field(pytree_node=False)


class RowSampling(struct.PyTreeNode):
    """Sampling parameters of every row. All of them are data, so that rows of different requests
    share one program."""

    # With arrays [B] in place of numbers, and the static fields of the most general draw
    each: Sampling
    greedy: Any  # Bool[B]: rows that take their most likely token


class History(struct.PyTreeNode):
    """The tokens that rows have already, for penalties."""

    prompt: Any  # Bool[B, V]: which tokens are in the prompt
    counts: Any  # Int[B, V]: how often each token was made


def history_of(prompts: Sequence[Sequence[int]], vocab_size: int) -> History:
    """Note the tokens of prompts, as arrays of the host. Nothing was made yet."""
    marks = np.zeros((len(prompts), vocab_size), bool)
    for row, prompt in zip(marks, prompts, strict=True):
        row[list(prompt)] = True
    return History(marks, np.zeros(marks.shape, np.int32))


def of_rows(options: Sequence[GenerateOptions], model: Model) -> RowSampling:
    """Put the parameters of several rows side by side, as arrays of the host."""
    no_bias = np.zeros((model.config.vocab_size,), np.float32)
    general = []
    for row in options:
        bias = row.bias(model)
        sampling = make_sampling(row, no_bias if bias is None else bias)
        general.append(sampling.replace(greedy=False, penalise=True))
    greedy = np.asarray([row.temperature == 0 for row in options])
    return RowSampling(jax.tree.map(lambda *numbers: np.stack(numbers), *general), greedy)


def split_key(key: Array) -> tuple[Array, Array]:
    """Split a key, or every row's own key [B], into a key for later tokens and a key for this
    token."""
    if not key.ndim:
        later, draw = jax.random.split(key)
        return later, draw
    pairs = jax.vmap(jax.random.split)(key)
    return pairs[:, 0], pairs[:, 1]


def make_sampling(
    options: GenerateOptions = GenerateOptions(), bias: Float[np.ndarray, " V"] | None = None
) -> Sampling:
    """Pack the parameters. `bias` is that of the options, laid out over the vocabulary."""
    # Numbers too small for float32 become its least positive number: rounded to 0 they would divide
    # by zero.
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    temperature = options.temperature or 1.0
    return Sampling(
        temperature=jnp.float32(min(max(temperature, least), most)),
        top_k=jnp.int32(options.top_k),
        left_out=jnp.float32(1 - options.top_p),
        min_p=jnp.float32(options.min_p),
        repetition_penalty=jnp.float32(min(max(options.repetition_penalty, least), most)),
        presence_penalty=jnp.float32(options.presence_penalty),
        frequency_penalty=jnp.float32(options.frequency_penalty),
        bias=bias,
        greedy=options.temperature == 0,
        penalise=options.penalises,
    )


def _kept(scores: Float[Array, "B V"], sampling: Sampling) -> Bool[Array, "B V"]:
    """Mark the tokens that top-k, top-p and min-p keep. `scores` are at most 0, and 0 for the most
    likely token of each row. min-p alone needs no sort, which takes as long as a small model's
    step."""
    ranked = (sampling.top_k > 0) | (sampling.left_out > 0)
    return jax.lax.cond(
        ranked,
        lambda: _kept_of_sorted(scores, sampling),
        lambda: jnp.exp(scores) >= sampling.min_p,
    )


def _kept_of_sorted(scores: Float[Array, "B V"], sampling: Sampling) -> Bool[Array, "B V"]:
    """Mark the tokens that top-k, top-p and min-p keep, applied one after the other. Each of them
    keeps the most likely tokens, so that one sort is enough.

    Of tokens with equal scores top-k keeps all. Top-p keeps as few tokens as it needs, and prefers
    higher ids among equal scores (logits in bfloat16 are often equal).

    Args:
        scores: at most 0, and 0 for the most likely token of each row.

    Returns:
        The tokens that are kept. The most likely one always is.
    """
    vocab = scores.shape[-1]
    ids = jnp.broadcast_to(jnp.arange(vocab)[None], scores.shape)
    # Stable: of equal scores the higher id is last.
    ascending, order = jax.lax.sort((scores, ids), num_keys=1)
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
    place = jnp.where(
        kept.any(-1, keepdims=True), jnp.argmax(kept, axis=-1, keepdims=True), vocab - 1
    )
    score, token = (jnp.take_along_axis(x, place, axis=-1) for x in (ascending, order))
    return (scores > score) | ((scores == score) & (ids >= token))


def adjusted(
    logits: Float[Array, "B V"], history: History | None, sampling: Sampling
) -> Float[Array, "B V"]:
    """Add the bias, then apply the penalties: the order of vLLM and transformers.

    The repetition penalty is for tokens of the prompt and of the answer: positive logits are
    divided by it, negative ones are multiplied (CTRL, arXiv 1909.05858, section 4.1). The penalties
    of presence and frequency are for tokens of the answer: they are subtracted, the latter once for
    each time that the token was made (OpenAI's formula)."""
    if sampling.bias is not None:
        logits = logits + sampling.bias[None]
    if not sampling.penalise or history is None:
        return logits
    appears = history.counts > 0
    penalty = sampling.repetition_penalty
    lowered = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(history.prompt | appears, lowered, logits)
    logits = logits - sampling.frequency_penalty * history.counts.astype(jnp.float32)
    return logits - sampling.presence_penalty * appears.astype(jnp.float32)


def drawn_from(
    logits: Float[Array, "B V"], history: History | None, sampling: Sampling
) -> Float[Array, "B V"]:
    """Log weights of the tokens that may come next, with -inf for those that may not."""
    logits = adjusted(logits, history, sampling)
    # Less the greatest before the division: a tiny temperature would make infinities of several.
    scores = (logits - logits.max(-1, keepdims=True)) / sampling.temperature
    return jnp.where(_kept(scores, sampling), scores, -jnp.inf)


def sample(
    key: Array,
    logits: Float[Array, "B V"],
    history: History | None,
    sampling: Sampling | RowSampling,
) -> Int[Array, " B"]:
    """Choose one token of every row.

    Args:
        key: one key, or one of every row [B] beside parameters of rows. What a row of its own key
            draws does not depend on the other rows, and is what a batch of that row alone would
            draw.
        logits: of the next token.
        history: the tokens already in a row; needed where there is a penalty.

    Returns:
        Token ids, int32 [B].
    """
    if isinstance(sampling, RowSampling):
        return _sample_rows(key, logits, history, sampling)
    if sampling.greedy:
        return adjusted(logits, history, sampling).argmax(-1).astype(jnp.int32)
    return jax.random.categorical(key, drawn_from(logits, history, sampling)).astype(jnp.int32)


def _sample_rows(
    keys: Array, logits, history: History | None, sampling: RowSampling
) -> Int[Array, " B"]:
    """Do `sample` with parameters and a key for every row. The draw sorts the vocabulary, so that
    it is left out where all rows are greedy."""
    assert history is not None  # every row may have a penalty

    def batch_of_one(row_tree):
        return jax.tree.map(lambda x: x[None], row_tree)

    def adjusted_row(row, row_history, parameters):
        return adjusted(row[None], batch_of_one(row_history), parameters)[0]

    likeliest = jax.vmap(adjusted_row)(logits, history, sampling.each).argmax(-1).astype(jnp.int32)

    def drawn():
        def draw(key, row, row_history, parameters):
            weights = drawn_from(row[None], batch_of_one(row_history), parameters)
            return jax.random.categorical(key, weights[0])

        tokens = jax.vmap(draw)(keys, logits, history, sampling.each).astype(jnp.int32)
        return jnp.where(sampling.greedy, likeliest, tokens)

    return jax.lax.cond(sampling.greedy.all(), lambda: likeliest, drawn)
