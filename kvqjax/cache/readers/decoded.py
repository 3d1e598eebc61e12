"""Reader `decoded`: the body is decoded a large part at a time, in loops whose number of turns is static. A GPU's host
decides on every turn of any other loop, which takes longer than a turn.

A part holds the same slots of every row, or spans of rows. Spans serve batches whose rows together hold few tokens
beside as many rows of the longest one's length (`LengthBound.total`). Each span has a row and a first slot that are
data. A batch then costs what its rows hold, rounded up to a span each. Parts are merged by log-sum-exp."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.readers.blocks import put_into_carry
from kvqjax.cache.readers.reader import BodyCall, Carry
from kvqjax.cache.run_layout import MOST_ROWS, RunLayout, few_block
from kvqjax.cache.state import Run, body_tokens
from kvqjax.cache.view import LayerView, NewTokens, body_view, expanded, payload_of, reached, seen
from kvqjax.methods.direct import PIECE, Direct, attend_whole, scaled, summed
from kvqjax.ops.attention import Partial, combined
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla_workarounds import (
    all_lanes,
    cut_along,
    cut_at,
    depending_on,
    filled_by,
    given_to_gpus,
    kept_apart,
    known_after,
    put_at,
    row_major,
)

__all__ = ["attend_decoded", "read_at_a_time"]

PASSED = 3 * 2**16, 3 * 2**17  # the fewest body tokens of all rows that are cut in parts, and the most of a part
PARTS = 2  # that a body is read in, between those
MOST_SPAN = 1024  # tokens of a row that a part takes or leaves, where rows are read as far as they are filled


class Part(NamedTuple):
    """Body slots that are attended to together: as many as `positions` has of every row from slot `first` on, or, with
    `rows`, of rows[i] from first[i] on. `mask` says which of them each query sees. Parts of equal sizes are one value
    whose arrays have an axis of P in front."""

    first: Int[Array, "*P"] | Int[Array, "*P n"]
    positions: Int[Array, "*P n size"]
    mask: Bool[Array, "*P n T size"]
    rows: Int[Array, "*P n"] | None = None


def attend_decoded(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body part by part. Where layers feed each other, the carry of all tokens is computed first, and is
    what keys and values are made of."""
    run, (batch, length, heads, _) = call.view.run, call.q.shape
    if not run.wiring.chain.carry:
        return _attend_parts(call, {}), carry
    carry = _carry_through(call.view, call.tokens, few_block(run, batch, length * heads), carry, call.q)
    return _attend_parts(call, carry), carry


def _attend_parts(call: BodyCall, carry: Carry) -> Partial:
    """Attend to the body, a part decoded at a time. A `carry` is the body decoded."""
    # The exact tokens meet the same weights. XLA would make one product of both, and copy all of the carry for it.
    if carry:
        call = call._replace(view=call.view._replace(weights=kept_apart(call.view.weights)))
    view, tokens, q = call.view, call.tokens, call.q
    constants = view.run.wiring.maps.prepare(view.constants)
    spans = None if carry else _spans(view, tokens, q.shape[0])
    parts = _parts(view, tokens, q.shape[0]) if spans is None else spans.parts
    call = call._replace(q=scaled(q))
    partial = _attend_in_turn(lambda part, after: _attend_part(call, constants, part, carry, after), parts, q)
    if spans is None:
        return Partial(combined(partial.lse, partial.out), jax.nn.logsumexp(partial.lse, axis=0))
    return _by_rows(Partial(*(x.reshape(-1, *x.shape[2:]) for x in partial)), spans)


def _attend_in_turn(attend: Callable[[Part, Array], Partial], parts: Part, q) -> Partial:
    """Attend to one part after the other. Each waits for those before it, or XLA would decode all at once. Several
    parts take a loop: straight code would compile in a time that grows with their number."""
    count, part = parts.mask.shape[0], lambda j: jax.tree.map(lambda x: x[j], parts)
    if count == 1:
        return jax.tree.map(lambda x: x[None], attend(part(0), q))

    def step(j, partials):
        new = attend(part(j), partials.out)
        return jax.tree.map(lambda x, y: put_at(x, y[None], (j, *[0] * y.ndim)), partials, new)

    shapes = jax.eval_shape(attend, part(0), q)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), shapes)
    return jax.lax.fori_loop(0, count, step, filled_by(q, shapes))


def read_at_a_time(tokens: int) -> int:
    """Return how many of the body tokens of all rows are read at a time: every part takes kernels, and memory for each
    of its tokens."""
    fewest, most = PASSED
    return min(max(fewest, -(-tokens // PARTS)), most)


def _attend_part(call: BodyCall, constants, part: Part, carry: Carry, after) -> Partial:
    """Attend to one part, which is not read before `after` is there.

    Keys are written in the queries' dtype, and a product reads them. To sum them in the kernel that decodes them, for
    each of the few queries, would spare their bytes; it took an H100 six times as long as writing and reading them.
    """
    q, view, shared = call.q, call.view, call.shared
    run, size, dtype = view.run, part.positions.shape[-1], call.q.dtype
    # Queries that take a part of the keys' transform meet the keys of all heads: KV heads times as many rows in a
    # product, which a GPU's matrix units pad to as many anyway.
    mixed = run.wiring.fast.mixed if q.shape[1] * q.shape[2] <= MOST_ROWS and not carry else None
    if part.rows is not None:
        q = q[part.rows]

    def decoded(after):
        if carry:
            payload, sources = {}, {name: cut_along(c, part.first, size, 1) for name, c in carry.items()}
        else:
            payload = _payload(view, part, after)
            sources, _ = run.wiring.maps.decode(constants, payload, {})
            if mixed is not None:  # keys as decoded then have no user
                sources = sources | {"k": mixed.read(payload["k"])}
        sources = {name: saturated(x, view.new[name].dtype) for name, x in sources.items()}
        return payload, sources, expanded(view, sources, part.positions, body=True)

    def scores(rows, _):
        k = decoded(after)[2][0]
        if mixed is not None:
            rows = all_lanes(rows[:, :, :, None], mixed.mix).reshape(*rows.shape[:3], -1)
            k = row_major(k.reshape(*k.shape[:2], -1))
            return [jnp.einsum("bkxl,bsl->bkxs", rows, k, preferred_element_type=jnp.float32)]
        k = row_major(jnp.swapaxes(k, 1, 2))
        return [jnp.einsum("bkxd,bksd->bkxs", rows, k, preferred_element_type=jnp.float32)]

    def values(weights, _, __, piece):
        payload, sources, (_, v) = decoded(weights[0])
        if shared is not None:
            v = saturated(shared.read(view.weights, view.constants, payload, sources)[:, :, None], dtype)
        rows = weights[0].astype(dtype).reshape(v.shape[0], v.shape[2], -1, v.shape[1])  # shared values: one head's
        return summed(rows, jnp.swapaxes(v, 1, 2), piece).reshape(*weights[0].shape[:3], -1)

    piece = math.gcd(PIECE, run.slots_here // 2)
    direct = Direct(scores, values)
    return attend_whole(q, {"k": {}, "v": {}}, part.mask, direct, call.kv_heads, piece, softcap=call.ask.softcap)


def _payload(view: LayerView, part: Part, after: Array) -> dict:
    """Read and unpack a part's tokens, not before `after` is there."""
    run, size = view.run, part.positions.shape[-1]
    if part.rows is None:
        state, at = _read_after(run, view.state, after, size), known_after(after, part.first)
        return payload_of(run, state, view.layer, at, size)
    first, slots = depending_on(after, part.first), run.slots_here
    body = {
        source: {
            name: field.packing.spans(view.state.body[source][name], slots, view.layer, part.rows, first, size)
            for name, field in codec.fields.items()
        }
        for source, codec in run.wiring.storage.codecs.items()
    }
    return payload_of(run, view.state.replace(body=body), 0, 0, size)


def _read_after(run: RunLayout, state: Run, after: Array, size: int) -> Run:
    """`state`, whose body is read `size` tokens at a time and not before `after` is there. Where that is all of it, a
    slice has no beginning that XLA must know, so the body itself depends on `after`."""
    return state if size < run.slots_here else state.replace(body=depending_on(after, state.body))


def _parts(view: LayerView, tokens: NewTokens, batch: int) -> Part:
    """Cut a body into parts of the same slots of every row, as few as may be, because every part takes kernels and
    seconds of compilation. The last one may begin in the one before it, which sees what both hold."""
    run = view.run
    blocks = min(-(-reached(view) // run.block), run.slots_here // run.block)
    total = blocks * run.block * batch
    count = min(blocks, -(-total // read_at_a_time(total)))
    size = run.block * -(-blocks // count)
    start = jnp.arange(count) * size
    first = jnp.minimum(start, blocks * run.block - size)
    positions, valid = body_view(view, tokens).places(0, blocks * run.block)
    mask = seen(view, tokens, positions, valid)
    cut = jax.vmap(lambda x, at: cut_along(x, at, size, x.ndim - 1), (None, 0))
    in_part = first[:, None] + jnp.arange(size)[None] >= start[:, None]
    return Part(first, cut(positions, first), cut(mask, first) & in_part[:, None, None])


class Spans(NamedTuple):
    """A body cut into spans of rows, those of a row one after the other.

    - `parts` hold the spans.
    - `start` is the number of each row's first span, `counts` how many it has, `most` at most."""

    parts: Part
    start: Int[Array, " B"]
    counts: Int[Array, " B"]
    most: int


def _spans(view: LayerView, tokens: NewTokens, batch: int) -> Spans | None:
    """Cut a body into spans of what its rows hold. None where that is no less than the same slots of every row."""
    run = view.run
    if view.bound is None or view.bound.total is None:
        return None
    blocks = run.slots_here // run.block
    size = run.block * max(n for n in range(1, max(1, MOST_SPAN // run.block) + 1) if blocks % n == 0)
    most = min(-(-reached(view) // size), run.slots_here // size)
    number = -(-min(view.bound.total, run.slots_here * batch) // size) + batch
    count = -(-number * size // read_at_a_time(number * size))
    number = count * -(-number // count)
    if number >= most * batch:
        return None
    counts = -(-run.deal.share(body_tokens(run, view.state)) // size)
    stop = jnp.cumsum(counts)
    numbers = jnp.arange(number)
    rows = jnp.minimum((stop[None] <= numbers[:, None]).sum(1), batch - 1)
    first = jnp.minimum((numbers - (stop - counts)[rows]) * size, (most - 1) * size)
    rows, first = given_to_gpus((rows, first))  # those after the last span are read for nothing
    positions, valid = body_view(view, tokens).places(0, most * size)
    mask = seen(view, tokens, positions, valid)

    def of(x):  # [B, .., most * size] to [P, n, .., size]
        shape = (1, *x.shape[1:-1], size)
        spans = jax.vmap(lambda row, at: cut_at(x, (row, *[0] * (x.ndim - 2), at), shape)[0])(rows, first)
        return spans.reshape(count, -1, *spans.shape[1:])

    parts = Part(first.reshape(count, -1), of(positions), of(mask), rows.reshape(count, -1))
    return Spans(parts, stop - counts, counts, most)


def _by_rows(partials: Partial, spans: Spans) -> Partial:
    """Merge the partial results of each row's spans."""
    number = jnp.arange(spans.most)[:, None]
    at = jnp.minimum(spans.start[None] + number, partials.lse.shape[0] - 1)  # [most, B]
    valid = number < spans.counts[None]
    lse = jnp.where(valid[..., None, None], partials.lse[at], -jnp.inf)
    out = jnp.where(valid[..., None, None, None], partials.out[at], 0.0)
    return Partial(combined(lse, out), jax.nn.logsumexp(lse, axis=0))


def _carry_through(view: LayerView, tokens: NewTokens, size: int, carry: Carry, after: jax.Array) -> Carry:
    """Pass the carry of all body tokens through this layer, `size` tokens of every row at a time and not before
    `after` is there: XLA would copy it for the layer below, which reads it."""
    run, body = view.run, body_view(view, tokens)
    state, constants = _read_after(run, view.state, after, size), run.wiring.maps.prepare(view.constants)
    zero = known_after(after, 0)

    def block_step(j, carry):
        at = body.at(j, size) + zero
        payload = payload_of(run, state, view.layer, at, size)
        part = {name: jax.lax.dynamic_slice_in_dim(c, at, size, 1) for name, c in carry.items()}
        part = run.wiring.maps.decode(constants, payload, part)[1]
        start = j * size if run.slots_here % size else at
        return {name: put_into_carry(c, part[name], at, start) for name, c in carry.items()}

    return jax.lax.fori_loop(*body.blocks(size), block_step, carry)
