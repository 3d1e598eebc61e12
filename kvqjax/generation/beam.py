"""Beam search on `gather`: a row of the cache per beam, re-ordered at every step."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from kvqjax._arguments import check_counts, typed
from kvqjax._errors import UserError
from kvqjax._options import named_options
from kvqjax.cache import Cache, Leaf
from kvqjax.cache.surgery import gather
from kvqjax.generation.loop import require_finite
from kvqjax.generation.options import GENERATE
from kvqjax.generation.prompt_ids import (
    Prompts,
    bucket,
    capacity_for,
    encode_prompts,
    end_ids,
    padded,
    require_trained,
    room_of,
)
from kvqjax.methods import MethodLike
from kvqjax.model.loading import Model
from kvqjax.step.forward import forward
from kvqjax.step.new_cache import init_cache
from kvqjax.step.prompt import prefill_donated

# Score of a hypothesis that does not exist; finite, so that `jax_debug_infs` finds nothing in what
# a program returns.
_NONE = float(np.finfo(np.float32).min)


class Beams(NamedTuple):
    """For every prompt its hypotheses, best first: `tokens[b][i]` (without the end token) and
    `scores[b][i]`."""

    tokens: list[list[list[int]]]
    scores: list[list[float]]


class _State(struct.PyTreeNode):
    """N beams per prompt still growing, and the N best finished hypotheses with their final scores
    (_NONE: none yet). The last token of each growing beam is not in the cache yet."""

    cache: Leaf  # Cache of B * N rows, or None where only the rest is carried
    tokens: Leaf  # Int[B, N, M], M the bucket of how many are wanted
    total: Leaf  # Float[B, N], sums of log probabilities
    ended: Leaf  # Int[B, N, M]
    ended_length: Leaf  # Int[B, N]
    ended_score: Leaf  # Float[B, N]
    length: Leaf  # Int, tokens of every growing beam


def _rank(score: Float[Array, "B C"], count: int, *arrays):
    """The `count` best candidates of every prompt: (scores, then each array's entries in the same
    order)."""
    score, index = jax.lax.top_k(score, count)
    picked = [
        jnp.take_along_axis(a, index.reshape(*index.shape, *(1,) * (a.ndim - 2)), axis=1)
        for a in arrays
    ]
    return score, *picked


def _score(total, length, penalty):
    """Sums of log probabilities by the length rule; what does not exist stays so."""
    return jnp.where(total > _NONE / 2, total / length**penalty, _NONE)


def _extend(
    state: _State,
    log_probs: Float[Array, "B N V"],
    eos: Int[Array, " K"],
    penalty: Float[Array, ""],
):
    """One token onto every beam: (the state without a re-ordered cache, parent of each beam [B,
    N])."""
    batch, beams, vocab = log_probs.shape
    total = (state.total[:, :, None] + log_probs).reshape(batch, -1)
    # With 2N candidates at most N end: N are left to go on. More than one end token needs as many
    # more.
    total, index = jax.lax.top_k(total, min(beams * (1 + eos.shape[0]), beams * vocab))
    parent, token = index // vocab, (index % vocab).astype(jnp.int32)
    history = jnp.take_along_axis(state.tokens, parent[:, :, None], axis=1)
    stops = (token[:, :, None] == eos[None, None]).any(-1)
    final = _score(total, (state.length + 1).astype(jnp.float32), penalty)
    lengths = jnp.broadcast_to(state.length, stops.shape)
    ended_score, ended, ended_length = _rank(
        jnp.concatenate([state.ended_score, jnp.where(stops, final, _NONE)], 1),
        beams,
        jnp.concatenate([state.ended, history], 1),
        jnp.concatenate([state.ended_length, lengths], 1),
    )
    grown = jax.lax.dynamic_update_slice_in_dim(history, token[:, :, None], state.length, 2)
    total, tokens, parent = _rank(jnp.where(stops, _NONE, total), beams, grown, parent)
    state = state.replace(tokens=tokens, total=total, length=state.length + 1)
    return state.replace(ended=ended, ended_length=ended_length, ended_score=ended_score), parent


@functools.partial(jax.jit, donate_argnames="state")
@jax.enable_x64(False)
def _search(
    model: Model,
    state: _State,
    eos: Int[Array, " K"],
    penalty: Float[Array, ""],
    most: Int[Array, ""],
) -> _State:
    """Grow all beams to `most` tokens, or until no growing beam can still beat the finished
    ones."""
    batch, beams, _ = state.tokens.shape

    def promising(state):
        # Log probabilities only fall, so a beam's best final score is today's sum at the kindest
        # length.
        length = jnp.where(penalty > 0, most.astype(jnp.float32), state.length.astype(jnp.float32))
        return (_score(state.total.max(1), length, penalty) > state.ended_score.min(1)).any()

    def step(state):
        newest = jax.lax.dynamic_index_in_dim(
            state.tokens, state.length - 1, 2, keepdims=False
        ).reshape(-1, 1)
        logits, cache = forward(
            model, newest, jnp.ones((batch * beams,), jnp.int32), state.cache, last=True
        )
        log_probs = jax.nn.log_softmax(logits, axis=-1).reshape(batch, beams, -1)
        state, parent = _extend(state, log_probs, eos, penalty)
        rows = parent + jnp.arange(batch)[:, None] * beams
        return state.replace(cache=gather(cache, rows.reshape(-1)))

    return jax.lax.while_loop(lambda state: (state.length < most) & promising(state), step, state)


@functools.partial(jax.jit, static_argnames=("beams", "new"))
@jax.enable_x64(False)
def _begin(cache: Cache, logits, eos, penalty, *, beams: int, new: int) -> _State:
    """Each prompt's row repeated, and its `beams` best first tokens. One beam is real before them,
    so no two are equal."""
    batch = logits.shape[0]
    empty = jnp.zeros((batch, beams, new), jnp.int32)
    worst = jnp.full((batch, beams), _NONE, jnp.float32)
    counts = jnp.zeros((batch, beams), jnp.int32)
    rows = jnp.repeat(jnp.arange(batch), beams)
    state = _State(
        gather(cache, rows), empty, worst.at[:, 0].set(0.0), empty, counts, worst, jnp.int32(0)
    )
    log_probs = jnp.repeat(jax.nn.log_softmax(logits, axis=-1)[:, None], beams, axis=1)
    return _extend(state, log_probs, eos, penalty)[0]


@functools.partial(named_options, elsewhere=GENERATE)
def beam_search(
    model: Model,
    prompts: Prompts,
    method: MethodLike = "exact",
    *,
    beams: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 1.0,
    eos_ids: Sequence[int] | None = None,
    kernels: str = "auto",
    beyond_trained: bool = False,
) -> Beams:
    """The `beams` best continuations of each prompt (a string or a list of ids) through a cache of
    `method`.

    Length rule: a hypothesis of n tokens, its end token among them, scores (sum of log
    probabilities) / n**length_penalty; 0 compares sums, 1 means per token. A beam that reaches
    max_new_tokens without an end token competes as it is. `beyond_trained` as in `generate`. Raises
    UserError for empty prompts and those that are too long, and for more beams than the vocabulary
    has tokens."""
    check_counts(beams=beams, max_new_tokens=max_new_tokens)
    length_penalty = typed("length_penalty", length_penalty, float)
    ids = encode_prompts(model, prompts, most=room_of(model, None, beyond_trained))
    require_trained(model, list(map(len, ids)), max_new_tokens, beyond_trained)
    eos = jnp.asarray(end_ids(model, eos_ids))
    if beams > model.config.vocab_size:
        raise UserError(f"beams={beams}; the vocabulary has {model.config.vocab_size} tokens")
    counts = np.asarray([len(p) for p in ids], np.int32)
    tokens = padded(ids, bucket(int(counts.max())))
    capacity = capacity_for(model, ids, max_new_tokens, None)
    cache = init_cache(model, method, len(ids), capacity, kernels=kernels)
    logits, cache = prefill_donated(model, jnp.asarray(tokens), jnp.asarray(counts), cache)
    penalty = jnp.float32(length_penalty)
    state = _begin(cache, logits, eos, penalty, beams=beams, new=bucket(max_new_tokens))
    state = _search(model, state, eos, penalty, jnp.int32(max_new_tokens))
    require_finite(state.cache)
    return _best(state, length_penalty)


def _best(state: _State, penalty: float) -> Beams:
    """Rank the finished and the growing hypotheses of every prompt together."""
    state = jax.tree.map(np.asarray, state.replace(cache=None))
    length = int(state.length)
    tokens, scores = [], []
    for row in range(len(state.tokens)):
        ended = zip(state.ended_score[row], state.ended_length[row], state.ended[row], strict=True)
        hypotheses = [(float(s), t[:n].tolist()) for s, n, t in ended]
        growing = zip(state.total[row], state.tokens[row], strict=True)
        hypotheses += [
            (float(s) / length**penalty, t[:length].tolist()) for s, t in growing if s > _NONE / 2
        ]
        best = sorted((f for f in hypotheses if f[0] > _NONE / 2), key=lambda f: -f[0])[
            : state.tokens.shape[1]
        ]
        tokens.append([t for _, t in best])
        scores.append([s for s, _ in best])
    return Beams(tokens, scores)
