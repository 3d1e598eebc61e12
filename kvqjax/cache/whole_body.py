"""One layer's attention to an encoded body without a loop over its blocks: from its packed words by a kernel, as it is
stored head by head, or decoded in straight code."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvqjax.cache.run_layout import AT_ONCE, RunLayout
from kvqjax.cache.state import Run, body_tokens
from kvqjax.cache.view import LayerView, NewTokens, body_view, expanded, payload_of, reached, seen
from kvqjax.codecs.kernel_form import Packed
from kvqjax.methods.direct import PIECE, Direct, attend_whole, slots_read, summed
from kvqjax.methods.wiring import SharedValues
from kvqjax.ops.allocation import leading_slots
from kvqjax.ops.attention import Partial
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla import cut_along, depending_on, kept_apart, known_after, row_major
from kvqjax.pallas_kernels.dispatch import packed_attention

__all__ = ["attend_decoded", "attend_packed", "attend_stored", "passed", "replaced"]

PASSED = 2**17  # body tokens of all rows that are read at a time where they are there decoded


def attend_packed(
    q,
    view: LayerView,
    tokens: NewTokens,
    packed: Packed,
    general: Callable[[], Any],
    **also: Any,
) -> Any:
    """Attend to the body straight from its packed words, by a kernel or by the plain form of uniform codes. `also`, and
    what is returned, as in `packed_attention`."""
    run = view.run
    first = run.deal.tokens(jnp.arange(0, run.slots_here, run.block)) + view.sinks
    body = packed.body(view.weights, view.constants, view.state.body, first)
    stop = jnp.broadcast_to(body_tokens(run, view.state)[:, None], tokens.positions.shape)
    if run.sliding is None:
        start = jnp.zeros_like(stop)
    else:
        start = run.deal.share(jnp.maximum(tokens.positions - run.sliding + 1 - view.sinks, 0))
    stop = run.deal.share(stop)
    return packed_attention(q, body, view.layer, start, stop, packed.spec, general, packed.trusted, **also)


def _read_after(run: RunLayout, state: Run, after: Array, size: int) -> Run:
    """`state`, whose body is read `size` tokens at a time and not before `after` is there. Where that is all of it, a
    slice has no beginning that XLA must know, so the codes depend on `after` themselves."""
    if size < run.slots_here:
        return state
    codecs = run.wiring.storage.codecs
    codes = {s: {n: state.body[s][n] for n, f in codec.fields.items() if f.packed} for s, codec in codecs.items()}
    codes = depending_on(after, codes)
    return state.replace(body={source: stored | codes[source] for source, stored in state.body.items()})


def passed(view: LayerView, tokens: NewTokens, size: int, carry: dict, after: jax.Array) -> dict:
    """Pass the carry of all body tokens through this layer, `size` tokens of every row at a time and not before
    `after` is there: XLA would copy it for the layer below, which reads it."""
    run, body = view.run, body_view(view, tokens)
    state, constants = _read_after(run, view.state, after, size), run.wiring.maps.prepare(view.constants)
    zero = known_after(after, 0)

    def one(j, carry):
        at = body.at(j, size) + zero
        payload = payload_of(run, state, view.layer, at, size)
        part = {name: jax.lax.dynamic_slice_in_dim(c, at, size, 1) for name, c in carry.items()}
        part = run.wiring.maps.decode(constants, payload, part)[1]
        done = j * size if run.slots_here % size else at
        return {name: replaced(c, part[name], at, done) for name, c in carry.items()}

    return jax.lax.fori_loop(*body.blocks(size), one, carry)


def replaced(carry, part, at, done):
    """Put `part` into the carry [B, S, W] from slot `at` on, but for slots below `done`, which hold theirs already."""
    part, size = saturated(part, carry.dtype), part.shape[1]
    if done is not at:
        old = jax.lax.dynamic_slice_in_dim(carry, at, size, 1)
        part = jnp.where((at + jnp.arange(size) < done)[None, :, None], old, part)
    return jax.lax.dynamic_update_slice_in_dim(carry, part, at, 1)


def _part(run: RunLayout, batch: int, is_decoded: bool) -> int:
    """Choose how many tokens of every row are read at a time: at least AT_ONCE, of few rows more, because every part
    takes kernels and seconds of compilation; fewer where sums of values are transformed (HIGGS), which 128K tokens
    would take 0.48 GB for instead of 0.28."""
    few = 2 if run.wiring.fast.summed else 4
    size = PASSED // batch if is_decoded else max(AT_ONCE, few * AT_ONCE // batch)
    return max(1, size // run.block) * run.block


def attend_decoded(
    q, kv_heads: int, view: LayerView, tokens: NewTokens, shared: SharedValues | None, carry: dict
) -> Partial:
    """Attend to the body in straight code, a part of every row decoded at a time: first all scores, then all sums of
    values. Each part waits for the one before it, or XLA would decode all at once. A `carry` is the body decoded."""
    run = view.run
    count = min(-(-reached(view) // run.block) * run.block, run.slots_here)
    positions, valid = body_view(view, tokens).places(0, count)
    mask = seen(view, tokens, positions, valid)
    constants = run.wiring.maps.prepare(view.constants)
    size = _part(run, q.shape[0], bool(carry))
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    if carry:  # or XLA would copy all of it beside the exact tokens, for one product by a matrix that both share
        view = view._replace(weights=kept_apart(view.weights))

    def decoded(part: slice, after):
        if carry:
            payload, found = {}, {name: c[:, part] for name, c in carry.items()}
        else:
            state, at = _read_after(run, view.state, after, size), known_after(after, part.start)
            payload = payload_of(run, state, view.layer, at, part.stop - part.start)
            found, _ = run.wiring.maps.decode(constants, payload, {})
        found = {name: saturated(x, view.new[name].dtype) for name, x in found.items()}
        return payload, found, expanded(view, found, positions[:, part])

    def scores(rows, _):
        made = []
        for part in parts:
            k = row_major(jnp.swapaxes(decoded(part, made[-1] if made else rows)[2][0], 1, 2))
            made.append(jnp.einsum("bkxd,bksd->bkxs", rows, k, preferred_element_type=jnp.float32))
        return [jnp.concatenate(made, -1)]

    def values(weights, _, dtype, piece):
        weights, total = weights[0].astype(dtype), weights[0][:, :, :, :1]
        for number, part in enumerate(parts):
            payload, found, (_, v) = decoded(part, total)
            if shared is not None:
                v = saturated(shared.read(view.weights, view.constants, payload, found)[:, :, None], dtype)
            rows = weights[..., part].reshape(v.shape[0], v.shape[2], -1, v.shape[1])  # shared values are one head's
            own = summed(rows, jnp.swapaxes(v, 1, 2), piece).reshape(*weights.shape[:3], -1)
            total = total + own if number else own
        return total

    piece = math.gcd(PIECE, run.slots_here // 2)
    return attend_whole(q, {"k": {}, "v": {}}, mask, Direct(scores, values), kv_heads, piece)


def attend_stored(q, kv_heads: int, view: LayerView, tokens: NewTokens, direct: Direct) -> Partial:
    """Attend to the body as it is stored, without a loop over its blocks; where rows are short, to a first part of
    it."""
    run, slots = view.run, view.run.slots_here
    count, cut = slots_read(reached(view), run.block, slots)
    body = jax.tree.map(lambda a: cut_along(a, view.layer, 1, 0), view.state.body)

    def first(source, stored):
        fields = run.wiring.storage.codecs[source].fields
        return {name: leading_slots(field, stored[name], slots, count) for name, field in fields.items()}

    body = body | {"k": first("k", body["k"])}
    if count < slots and direct.part is not None:
        direct = direct._replace(scores=direct.part)
    mask = seen(view, tokens, *body_view(view, tokens).places(0, count))
    piece = math.gcd(PIECE, slots // 2)
    return attend_whole(q, body, mask, direct, kv_heads, piece, functools.partial(first, "v") if cut else None)
