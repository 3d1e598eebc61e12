"""The decoder over a compressed cache, in two phases (docs/design.md, idea 2).

    attend     computes logits of the new tokens, and returns their sources; the cache stays as it is
    commit     appends these sources to the cache
    forward    does both

A public function checks its arguments. `run_step` then compiles the function of the same name with an underscore, and
on a mesh runs it on every device's part. The functions `..._begun` take tokens that begin at place 0 of their rows
(`Padding`)."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvqjax import cache as caches
from kvqjax._arguments import clipped
from kvqjax.cache.state import Cache, admitted, finite_tokens
from kvqjax.model import decoder
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import is_unrolled
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla_workarounds import depending_on, of_two, unknown_zero
from kvqjax.step.doors import check_new_tokens, check_pending, run_constants, run_step
from kvqjax.step.layer_step import attend_one, begin, check_capacity, first_flow
from kvqjax.step.padding import Padding, padding_of
from kvqjax.step.recurrence import Recurrence, after_commit

__all__ = ["attend", "commit", "forward", "known_ids", "last_logits"]

Pending = tuple  # one {source: [L, B, T, W]} per run, then per stack of recurrent layers


def attend(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"] | Bool[Array, "B T"],
    cache: Cache,
    *,
    within: str = "chunk",
    last: bool = False,
) -> tuple[Float[Array, "B V"] | Float[Array, "B T V"], Pending]:
    """Compute logits of T new tokens of each row, and their sources for `commit`; the cache stays as it is.

    Args:
        model: the model.
        tokens: token ids [B, T].
        counts: how many of each row's tokens are valid, from the first on; or a mask of the valid ones, as in
            `forward`.
        cache: the cache, one of this model.
        within: "chunk": new tokens attend to each other exactly. "step": each new token sees what decoding one token at
            a time would have shown it, so a verified draft equals plain decoding.
        last: gives only the logits of each row's last valid token.

    Returns:
        Logits, float32 [B, T, V], or [B, V] with `last`; those of tokens that are not valid mean nothing. From a token
        on whose key, value or other source is not finite they are NaN, also in later calls. Then what `commit` stores:
        a run's sources each, and those of recurrent layers.

    Raises:
        UserError: for counts outside 0 to T, a row of a mask with several runs, or token ids outside the vocabulary.
            Those that a trace hides are clipped; `commit`, for token ids `forward`, then raises the row's flag
            `cache.overflow[b]`.
    """
    check_new_tokens(model, tokens, counts, cache)
    out = ("logits" if last else "chunk", "pending")
    return run_step(_attend, model, cache, tokens, counts, out=out, within=within, last=last)


def _attend(model: Model, cache: Cache, tokens, counts, *, within: str, last: bool):
    """Do `attend` after its checks, on one device's part."""
    padding = padding_of(counts)
    recurrence = Recurrence(model, cache, clipped(padding.counts, 0, tokens.shape[1])[0], sources=True)
    out, (runs, carried) = _attend_begun(
        model, cache, padding.begun(tokens), padding, recurrence, within=within, last=last
    )
    return out, (*runs, *carried.kept)


def _attend_begun(
    model: Model, cache: Cache, tokens, padding: Padding, recurrence: Recurrence, *, within: str, last: bool
):
    """Do `_attend` for tokens that begin at place 0 of their rows.

    Args:
        model: the model.
        cache: the cache.
        tokens: token ids [B, T], rolled by `padding`.
        padding: where the caller's tokens stand.
        recurrence: the recurrent layers of the call.
        within: as in `attend`.
        last: as in `attend`.

    Returns:
        Logits, where the caller's tokens stand. Then (sources of every run, what the recurrent layers keep).
    """
    constants = run_constants(model.constants, cache.layout)
    call = begin(cache, padding.counts, tokens.shape[1], constants, within)
    positions, config = call.tokens.positions, model.config
    tokens = known_ids(tokens, padding.counts, config)[0]  # `forward` alone returns a cache, and so raises its flag
    # XLA for GPUs makes a slow kernel of a product of one row, which this is in a step of one row (`of_two`).
    is_single_token = positions.size == 1 and call.runs[0].on_gpu

    def project(weights, h, first):
        """Make queries, keys and values. All layers of a run rotate and normalise as its `first` layer does."""
        make = functools.partial(decoder.project, weights, config=config, index=first)
        return of_two(make, h, positions) if is_single_token else make(h, positions)

    def step(number, loop, index):
        """Run layer `index` of run `number`, with the recurrent layers before it."""
        h, flow, carried = loop
        h, carried = recurrence.before(call.runs[number].first + index, h, carried)
        weights = decoder.layer(model.params, call.runs[number].first + index)
        projected = project(weights, h, call.runs[number].first)
        # Where devices share the tokens of a KV head, each attends with the queries of all of them.
        all_heads = projected._replace(q=decoder.whole_heads(projected.q, config))
        partial, new, flow = attend_one(call, number, index, weights, all_heads, flow)
        attended = saturated(decoder.own_heads(partial.out, config, projected.q.shape[2]), h.dtype)
        return (decoder.finish(weights, h, attended, config), flow, carried), new

    loop = decoder.embed(model.params, tokens, config), first_flow(call), recurrence.first(tokens.shape[1])
    loop_over = _unrolled if is_unrolled(model.params) else _scanned
    pending = []
    for number, run in enumerate(call.runs):
        loop, new = loop_over(functools.partial(step, number), loop, run.count, cache)
        pending.append(new)
    h, _, carried = loop
    h, carried = recurrence.before(config.num_layers, h, carried)  # recurrent layers behind the last layer of attention
    # Sources of a layer outside a loop are ready before its attention has read the body, which XLA would then copy.
    pending = [depending_on(h, new) if run.count == 1 else new for run, new in zip(call.runs, pending, strict=True)]
    if last:
        out = last_logits(model, h, padding.counts)
    else:  # hidden states are rolled back, not logits, which are wider
        out = decoder.unembed(model.params, padding.as_given(h), config)
    return out, (tuple(pending), carried)


def known_ids(
    tokens: Int[Array, "B T"], counts: Int[Array, " B"], config: ModelConfig
) -> tuple[Int[Array, "B T"], Bool[Array, " B"]]:
    """Clip token ids into the vocabulary.

    Args:
        tokens: token ids.
        counts: how many of each row's ids are valid, from the first on.
        config: the model's config.

    Returns:
        (ids in the vocabulary, which rows had a valid id outside it).
    """
    fits, foreign = clipped(tokens, 0, config.vocab_size - 1)
    return fits, (foreign & (jnp.arange(tokens.shape[1])[None] < counts[:, None])).any(1)


def _scanned(step, loop, count: int, cache: Cache):
    """Run `step` over the layers of a run, whose weights are stacked: (loop, new sources [count, B, T, W])."""
    # XLA must not know the first number, or it would unroll a loop of one turn (`unknown_zero`).
    return jax.lax.scan(step, loop, unknown_zero(cache.lengths) + jnp.arange(count))


def _unrolled(step, loop, count: int, cache: Cache):
    """Do as `_scanned` in straight code, for weights that are a list of layers."""
    new = []
    for index in range(count):
        loop, sources = step(loop, index)
        new.append(sources)
    return loop, jax.tree.map(lambda *x: jnp.stack(x), *new)


def last_logits(model: Model, h: Float[Array, "B T E"], counts: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Compute the logits of each row's last valid token."""
    h = jnp.take_along_axis(h, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return decoder.unembed(model.params, h, model.config)[:, 0]


def commit(model: Model, cache: Cache, pending: Pending, counts: Int[Array, " B"] | Bool[Array, "B T"]) -> Cache:
    """Append pending tokens of each row and encode what is due.

    Args:
        model: the model.
        cache: the cache that `attend` was given.
        pending: what `attend` returned. Its tokens begin with a row's first valid one, however `attend` was given them.
        counts: how many pending tokens of each row are stored, from the first on. Of a mask only their number counts.

    Returns:
        The cache that holds them.

    Raises:
        UserError: outside jit, for counts outside 0 to T and where a row would exceed the capacity. Inside jit such
            counts are clipped, the excess is not stored, and the row's flag `cache.overflow[b]` is raised.
    """
    check_pending(model, cache, pending, counts)
    check_capacity(cache, counts)
    return run_step(_commit, model, cache, pending, counts, out=("cache",))


def _commit(model: Model, cache: Cache, pending: Pending, counts) -> Cache:
    """Do `commit` after its checks, on one device's part."""
    # `pending` has the sources of all runs, then those of recurrent layers.
    first_recurrent = len(cache.runs)
    new_cache = _commit_begun(model, cache, pending[:first_recurrent], padding_of(counts))
    return after_commit(model, cache, new_cache, pending[first_recurrent:])


def _commit_begun(model: Model, cache: Cache, pending: Pending, padding: Padding) -> Cache:
    """Do `_commit` for layers of attention. `pending` has nothing of recurrent layers here."""
    new_cache = caches.commit(cache, pending, padding.counts, run_constants(model.constants, cache.layout))
    return new_cache.replace(overflow=padding.flagged(new_cache.overflow))


def forward(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"] | Bool[Array, "B T"],
    cache: Cache,
    *,
    last: bool = False,
) -> tuple[Float[Array, "B V"] | Float[Array, "B T V"], Cache]:
    """Compute logits of T new tokens, and the cache that holds them: `attend`, then `commit`. Pure; works inside and
    outside jit.

    Positions beyond those that the model was trained for (`model.config.trained_length`) are computed like any others,
    without a word: how many tokens a row holds is known inside jit alone. Logits mean less and less there. `generate`
    and its like refuse such texts unless told otherwise.

    Args:
        model: the model.
        tokens: token ids [B, T].
        counts: how many of each row's tokens are valid, from the first on. A mask Bool[B, T] in its place says which
            are: any single run of each row, so that prompts padded on the left, or on both sides, come as they are.
            A row without valid tokens stays as it is.
        cache: the cache, one of this model.
        last: gives only the logits of each row's last valid token.

    Returns:
        Logits, float32 [B, T, V], or [B, V] with `last`, where the caller's tokens stand; those of tokens that are not
        valid mean nothing. Then the cache, which is to the bit that of tokens padded on the right: positions follow
        what a row holds.

    Raises:
        UserError: for counts outside 0 to T, a row of a mask with several runs, token ids outside the vocabulary and
            where a row would exceed the capacity. Inside jit such numbers are clipped, of several runs the first
            counts, the excess is not stored, and the row's flag `cache.overflow[b]` is raised.
    """
    check_new_tokens(model, tokens, counts, cache)
    check_capacity(cache, counts)
    out = ("logits" if last else "chunk", "cache")
    return run_step(_forward, model, cache, tokens, counts, out=out, last=last)


def _forward(model: Model, cache: Cache, tokens, counts, *, last: bool):
    """Do `forward` after its checks, on one device's part."""
    padding = padding_of(counts)
    tokens = padding.begun(tokens)
    # States take in only the tokens that the cache has room for, so the logits of later ones mean nothing.
    stored = admitted(cache, padding.counts, tokens.shape[1])[0]
    recurrence = Recurrence(model, cache, stored)
    out, (runs, carried) = _attend_begun(model, cache, tokens, padding, recurrence, within="chunk", last=last)
    new_cache = _commit_begun(model, cache, runs, padding)
    if cache.states:
        finite = jnp.minimum(new_cache.finite, finite_tokens(cache, carried.finite_count, stored))
        new_cache = new_cache.replace(states=carried.kept, finite=finite)
    return out, new_cache.replace(overflow=new_cache.overflow | known_ids(tokens, padding.counts, model.config)[1])
