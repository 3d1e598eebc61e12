"""Greedy speculative decoding: a draft of several tokens is checked in one call, and only what was
right is committed.

The target reads a draft with `attend(within="step")`: each drafted token sees what decoding one
token at a time would have shown it. Then the target commits the accepted tokens. So its output is
that of plain greedy decoding on the same cache, and no committed token is ever taken back. A
drafting model decodes on a temporary cache. What it computed for accepted tokens is then committed
to its lasting cache, which so needs no `crop`, and nothing is encoded twice."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from kvqjax._arguments import check_counts, check_integer
from kvqjax._errors import UserError
from kvqjax._options import named_options
from kvqjax.cache import Cache, Leaf
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
from kvqjax.step.checks import check_model
from kvqjax.step.forward import attend, commit
from kvqjax.step.new_cache import init_cache
from kvqjax.step.prompt import prefill_donated

MOST_NGRAM = 64  # tokens that are looked up; every number adds to the program


class Speculated(NamedTuple):
    """`tokens[b]` (without the end token) of every prompt; `rounds` calls of the target made them,
    after its prefill; `accepted` and `drafted` count tokens over all rows."""

    tokens: list[list[int]]
    rounds: int
    accepted: int
    drafted: int


class _State(struct.PyTreeNode):
    """`known[b, :length[b]]` are prompt and new tokens; the last one is not in the caches yet."""

    cache: Cache
    drafter: Cache | None
    known: Leaf  # Int[B, N]
    length: Leaf  # Int[B]
    limit: Leaf  # Int[B], where a row ends
    done: Leaf  # Bool[B]
    rounds: Leaf
    accepted: Leaf
    drafted: Leaf


def lookup(
    tokens: Int[Array, "B N"], length: Int[Array, " B"], draft: int, ngram: int
) -> Int[Array, "B draft"]:
    """What followed the latest earlier occurrence of the row's last `ngram` tokens, or of fewer,
    where there is none (prompt lookup decoding). A row that never repeats itself drafts whatever
    follows its start."""
    size = tokens.shape[1]
    place = jnp.arange(size)[None]

    def token(offset):  # [B, 1], counted back from the end of the row
        return jnp.take_along_axis(tokens, jnp.maximum(length - 1 - offset, 0)[:, None], axis=1)

    matches, end = jnp.ones_like(tokens, bool), jnp.zeros_like(length)
    for back in range(ngram):
        # matches[b, j]: the `back + 1` tokens up to j equal the row's last ones.
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :size]
        matches = matches & (shifted == token(back)) & (place < length[:, None] - 1)
        last = jnp.where(matches, place, -1).max(-1)
        end = jnp.where(last >= 0, last, end)
    ahead = jnp.minimum(end[:, None] + 1 + jnp.arange(draft)[None], size - 1)
    return jnp.take_along_axis(tokens, ahead, axis=1)


def _newest(state: _State) -> Int[Array, "B 1"]:
    return jnp.take_along_axis(state.known, state.length[:, None] - 1, axis=1)


def _decode_draft(model: Model, state: _State, draft: int):
    """`draft` greedy tokens of the drafting model [B, draft], and its sources of these and the
    newest token."""
    ones = (~state.done).astype(jnp.int32)

    def step(loop, _):
        cache, token = loop
        logits, pending = attend(model, token, ones, cache, last=True)
        next_token = logits.argmax(-1).astype(jnp.int32)[:, None]
        return (commit(model, cache, pending, ones), next_token), (next_token[:, 0], pending)

    _, (tokens, pending) = jax.lax.scan(step, (state.drafter, _newest(state)), length=draft + 1)
    # [T, L, B, 1, W] -> [L, B, T, W]
    joined = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, :, 0], 0, 2), pending)
    return tokens[:draft].T, joined


def _verify(model: Model, state: _State, drafted: Int[Array, "B draft"], eos: Int[Array, " N"]):
    """Check a draft: (what is greedy after each of its prefixes [B, draft+1], how many tokens the
    row gains [B], which rows end, sources of the newest token and the draft)."""
    draft = drafted.shape[1]
    tokens = jnp.concatenate([_newest(state), drafted], axis=1)
    alive = jnp.where(state.done, 0, draft + 1)
    logits, pending = attend(model, tokens, alive, state.cache, within="step")
    greedy = logits.argmax(-1).astype(jnp.int32)
    right = jnp.cumprod((greedy[:, :draft] == drafted).astype(jnp.int32), axis=1).sum(1)
    ends = (greedy[:, :, None] == eos[None, None]).any(-1)
    first_end = jnp.where(ends.any(1), ends.argmax(1), draft + 1).astype(jnp.int32)
    room = state.limit - state.length
    gained = jnp.minimum(jnp.minimum(right + 1, room), first_end)
    finished = (first_end <= right) & (first_end <= room) | (gained >= room)
    return greedy, jnp.where(state.done, 0, gained), state.done | finished, pending


@functools.partial(jax.jit, static_argnames=("draft", "ngram"), donate_argnames="state")
@jax.enable_x64(False)
def _rounds(
    model: Model,
    draft_model: Model | None,
    state: _State,
    eos: Int[Array, " N"],
    *,
    draft: int,
    ngram: int,
) -> _State:
    """Draft, check and commit until every row is done, in one while_loop."""

    def step(state: _State) -> _State:
        if draft_model is None:
            drafted, draft_sources = lookup(state.known, state.length, draft, ngram), None
        else:
            drafted, draft_sources = _decode_draft(draft_model, state, draft)
        greedy, gained, done, pending = _verify(model, state, drafted, eos)
        # The newest token enters the cache with the accepted part of the draft; the correction
        # stays outside.
        cache = commit(model, state.cache, pending, gained)
        drafter = state.drafter
        if draft_model is not None and drafter is not None and draft_sources is not None:
            drafter = commit(draft_model, drafter, draft_sources, gained)
        span = jnp.arange(draft + 1)[None]
        place = jnp.where(
            span < gained[:, None], state.length[:, None] + span, state.known.shape[1]
        )
        rows = jnp.arange(len(place))[:, None]
        return state.replace(
            cache=cache,
            drafter=drafter,
            known=state.known.at[rows, place].set(greedy, mode="drop"),
            length=state.length + gained,
            done=done,
            rounds=state.rounds + 1,
            accepted=state.accepted + jnp.maximum(gained - 1, 0).sum(),
            drafted=state.drafted + draft * (~state.done).sum(),
        )

    return jax.lax.while_loop(lambda state: ~state.done.all(), step, state)


def _begin(model: Model, method: MethodLike, tokens, counts, capacity: int, kernels: str):
    cache = init_cache(model, method, len(counts), capacity, kernels=kernels)
    return prefill_donated(model, jnp.asarray(tokens), jnp.asarray(counts), cache)


@functools.partial(named_options, elsewhere=GENERATE)
def speculate(
    model: Model,
    prompts: Prompts,
    method: MethodLike = "exact",
    *,
    max_new_tokens: int = 64,
    draft: int = 4,
    ngram: int = 3,
    drafter: Model | None = None,
    drafter_method: MethodLike = "exact",
    eos_ids: Sequence[int] | None = None,
    kernels: str = "auto",
    beyond_trained: bool = False,
) -> Speculated:
    """Continue prompts (strings or lists of ids) greedily, with `draft` tokens drafted per call of
    the model.

    A draft follows from looking up the row's last `ngram` tokens in what it holds, or from a second
    model of the same vocabulary with a cache of its own (`drafter`).

    Lengths are data and capacities are rounded up, so that prompts of other lengths compile nothing
    new within a bucket. `beyond_trained` as in `generate`, of the model alone: a drafter beyond
    what it was trained for is refused nothing, since it changes no token. Raises UserError for
    prompts that are empty or too long, or a drafter of another vocabulary."""
    check_counts(draft=draft, max_new_tokens=max_new_tokens)
    check_integer("ngram", ngram, 1, MOST_NGRAM)
    draft = min(draft, max_new_tokens)  # a longer one would be drafted for nothing
    ids = encode_prompts(model, prompts, most=room_of(model, None, beyond_trained))
    require_trained(model, list(map(len, ids)), max_new_tokens, beyond_trained)
    eos = jnp.asarray(end_ids(model, eos_ids))
    if drafter is not None:
        check_model(drafter, "drafter")
    if drafter is not None and drafter.config.vocab_size != model.config.vocab_size:
        actual, expected = drafter.config.vocab_size, model.config.vocab_size
        raise UserError(f"the drafter has a vocabulary of {actual} tokens, the model of {expected}")
    counts = np.asarray([len(p) for p in ids], np.int32)
    width = bucket(int(counts.max()))
    capacity = capacity_for(model, ids, max_new_tokens, None)
    tokens = padded(ids, capacity)
    logits, cache = _begin(model, method, tokens[:, :width], counts, capacity, kernels)
    drafter_cache = None
    if drafter is not None:
        # A kernel that is forced is forced on the model's cache alone.
        drafter_kernels = "off" if kernels == "off" else "auto"
        drafter_cache = _begin(
            drafter, drafter_method, tokens[:, :width], counts, capacity, drafter_kernels
        )[1]
    state = _first(_state(cache, drafter_cache, tokens, counts, max_new_tokens), logits, eos)
    state = _rounds(model, drafter, state, eos, draft=draft, ngram=ngram)
    require_finite(state.cache)
    tokens, length = np.asarray(state.known), np.asarray(state.length)
    rows = [
        row[start:stop].tolist() for row, start, stop in zip(tokens, counts, length, strict=True)
    ]
    return Speculated(rows, int(state.rounds), int(state.accepted), int(state.drafted))


def _state(cache: Cache, drafter: Cache | None, tokens, counts, new: int) -> _State:
    length, zero = jnp.asarray(counts), jnp.zeros((), jnp.int32)
    done = jnp.zeros(length.shape, bool)
    return _State(
        cache,
        drafter,
        jnp.asarray(tokens),
        length,
        length + new,
        done,
        zero,
        jnp.copy(zero),
        jnp.copy(zero),
    )


@functools.partial(jax.jit, donate_argnames="state")
@jax.enable_x64(False)
def _first(state: _State, logits, eos) -> _State:
    """Record the token that the prefill chose."""
    token = logits.argmax(-1).astype(jnp.int32)
    ended = (token[:, None] == eos[None]).any(-1)
    tokens = state.known.at[jnp.arange(len(token)), state.length].set(token)
    length = state.length + (~ended).astype(jnp.int32)
    return state.replace(known=tokens, length=length, done=ended | (length >= state.limit))
