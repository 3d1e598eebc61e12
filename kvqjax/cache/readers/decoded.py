"""Reader `decoded`: the body is decoded a large part at a time, on GPUs. The loops have a static
number of turns: the host decides on every turn of any other loop, which takes longer than the turn
itself.

A part holds either the same slots of every row, or spans. A span is some consecutive slots of one
row. Its row and its first slot are data. A batch then costs what its rows hold, each rounded up to
whole spans. Spans are taken where the rows are promised to hold fewer tokens together
(`LengthBound.total`) than as many rows of the longest one's length. Parts are merged by
log-sum-exp."""

import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.layout import MOST_ROWS, RunLayout, as_coefficients, few_block
from kvqjax.cache.readers.blocks import put_into_carry
from kvqjax.cache.readers.coefficients import direct_from
from kvqjax.cache.state import Run, body_tokens
from kvqjax.cache.view import (
    BodyCall,
    Carry,
    LayerView,
    NewTokens,
    body_view,
    expanded,
    payload_of,
    reached,
    seen,
)
from kvqjax.methods.direct import PIECE, Direct, attend_whole, scaled, summed
from kvqjax.model.rope import Waves, unrotated, waves_from_first
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

# Body tokens, those of all rows counted together. Every part takes kernels, and memory for each of
# its tokens.
SMALLEST_PART = 3 * 2**16  # a body with no more tokens is one part
LARGEST_PART = 3 * 2**17  # no part has more tokens
BODY_PARTS = 2  # of a larger body, unless they would exceed LARGEST_PART
MOST_SPAN = 1024  # tokens of a span, at most: the tokens of a row are rounded up to whole spans


class Part(NamedTuple):
    """Body slots that are attended to together. P parts of equal sizes are one value, with an axis
    of P in front.

    Attributes:
        first: The first slot, of every row, or of span i.
        positions: The positions of `size` tokens of n rows, or of n spans.
        mask: Which of these tokens each query sees.
        rows: The row of span i. None: the part has the same slots of every row.
    """

    first: Int[Array, "*P"] | Int[Array, "*P n"]
    positions: Int[Array, "*P n size"]
    mask: Bool[Array, "*P n T size"]
    rows: Int[Array, "*P n"] | None = None


def attend_decoded(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body part by part.

    Where layers feed each other, the carry of all tokens is passed through this layer first. Keys
    and values are then made of the carry.

    Args:
        carry: What flows from layer to layer, as the layer below made it.

    Returns:
        (attention to the body, the carry of this layer)."""
    run = call.view.run
    if as_coefficients(call.ask):
        form = run.wiring.fast.coefficients
        assert form is not None  # or the body would not be read as coefficients
        partial = _attend_parts(call, {})
        return partial._replace(out=form.finish(call.view.constants, partial.out)), carry
    if not run.wiring.chain.carry:
        return _attend_parts(call, {}), carry
    batch, length, heads, _ = call.q.shape
    size = few_block(run, batch, length * heads)
    carry = _carry_through(call.view, call.tokens, size, carry, call.q)
    return _attend_parts(call, carry), carry


def _attend_parts(call: BodyCall, carry: Carry) -> Partial:
    """Attend to the body, a part at a time. A `carry` that is not empty is the decoded body."""
    # Sinks, window and new tokens are multiplied by the same weight matrices. XLA would make one
    # product of them and of the body, and copy all of the carry for it.
    if carry:
        call = call._replace(view=call.view._replace(weights=kept_apart(call.view.weights)))
    view = call.view
    q = call.q
    constants = view.run.wiring.maps.prepare(view.constants)
    batch = q.shape[0]
    spans = None if carry else _spans(view, call.tokens, batch)
    parts = _parts(view, call.tokens, batch) if spans is None else spans.parts
    call = call._replace(q=scaled(q))

    def attend(part: Part, after) -> Partial:
        return _attend_part(call, constants, part, carry, after)

    partial = _attend_in_turn(attend, parts, q)
    if spans is None:
        return Partial(combined(partial.lse, partial.out), jax.nn.logsumexp(partial.lse, axis=0))
    # [P, n, ..] -> all spans in one axis
    by_span = Partial(*(x.reshape(-1, *x.shape[2:]) for x in partial))
    return _by_rows(by_span, spans)


def _attend_in_turn(attend: Callable[[Part, Array], Partial], parts: Part, q) -> Partial:
    """Attend to one part after the other.

    Each part waits for those before it, because XLA would decode all of them at once. Several parts
    take a loop, because the time to compile straight code grows with their number.

    Returns:
        The partial results, with an axis of parts in front."""
    count = parts.mask.shape[0]

    def part(j):
        return jax.tree.map(operator.itemgetter(j), parts)

    if count == 1:
        return jax.tree.map(lambda x: x[None], attend(part(0), q))

    def step(j, partials):
        new = attend(part(j), partials.out)

        def put(of_parts, x):
            return put_at(of_parts, x[None], (j, *[0] * x.ndim))

        return jax.tree.map(put, partials, new)

    shapes = jax.eval_shape(attend, part(0), q)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), shapes)
    return jax.lax.fori_loop(0, count, step, filled_by(q, shapes))


def read_at_a_time(tokens: int) -> int:
    """Choose how many body tokens a part may have.

    Args:
        tokens: The body tokens of all rows together.

    Returns:
        The most tokens of a part, those of all rows together."""
    return min(max(SMALLEST_PART, -(-tokens // BODY_PARTS)), LARGEST_PART)


def _attend_part(call: BodyCall, constants, part: Part, carry: Carry, after) -> Partial:
    """Attend to one part, which is not read before `after` has been computed.

    Keys are decoded into memory, in the queries' dtype, and a product reads them. To sum the scores
    of the few queries in the kernel that decodes the keys would spare these bytes. An H100 took six
    times as long for that.
    """
    q = call.q
    view = call.view
    shared = call.shared
    run = view.run
    size = part.positions.shape[-1]
    dtype = q.dtype
    # Queries that take the keys' transform between heads meet the keys of all heads. A product then
    # has K times the query rows, with K KV heads. A GPU's matrix units would pad few rows to about
    # that number.
    is_few = q.shape[1] * q.shape[2] <= MOST_ROWS
    mixed = run.wiring.fast.mixed if is_few and not carry else None
    if part.rows is not None:
        q = q[part.rows]
    # Tokens of a part follow each other, but for those of bodies that are dealt over devices. Then
    # keys before RoPE are turned as if the first token had position 0, by one table for all rows
    # and heads. XLA would compute a cosine and a sine for every number of every key.
    waves: Waves | None = None
    if run.wiring.fast.before_rope and run.deal.parts == 1 and run.shape.turning is not None:
        first = jnp.broadcast_to(part.positions[:, :1], q.shape[:2])
        q = unrotated(q, first, run.shape)
        waves = given_to_gpus(waves_from_first(size, run.shape))
    form = run.wiring.fast.coefficients
    if form is not None and as_coefficients(call.ask):
        payload = functools.partial(_payload, view, part)
        direct = direct_from(form, view.constants, payload, after, waves, run.shape, dtype)
        return _attend_whole(call, q, part, direct)

    def decode_part(after):
        """Decode the part once `after` has been computed: (payload, sources, (keys, values))."""
        if carry:
            payload = {}
            sources = {name: cut_along(x, part.first, size, 1) for name, x in carry.items()}
        else:
            payload = _payload(view, part, after)
            sources, _ = run.wiring.maps.decode(constants, payload, {})
            if mixed is not None:
                # Nothing uses the decoded keys then, so that XLA leaves their decoding out.
                sources = sources | {"k": mixed.read(payload["k"])}
        sources = {name: saturated(x, view.new[name].dtype) for name, x in sources.items()}
        positions = part.positions if waves is None else waves
        return payload, sources, expanded(view, sources, positions, body=True)

    def scores(rows, _):
        """Compute the scores of query rows [B, K, X, D], as `Direct.scores`: one plane [B, K, X,
        size]."""
        _, _, (k, _) = decode_part(after)
        if mixed is not None:
            rows = all_lanes(rows[:, :, :, None], mixed.mix).reshape(*rows.shape[:3], -1)
            k = row_major(k.reshape(*k.shape[:2], -1))
            return [jnp.einsum("bkxl,bsl->bkxs", rows, k, preferred_element_type=jnp.float32)]
        k = row_major(jnp.swapaxes(k, 1, 2))
        return [jnp.einsum("bkxd,bksd->bkxs", rows, k, preferred_element_type=jnp.float32)]

    def values(weights, _, __, piece):
        """Sum the values under the weights, one plane [B, K, X, size], as `Direct.values`."""
        # The part is decoded anew, not before the weights have been computed.
        payload, sources, (_, v) = decode_part(weights[0])
        if shared is not None:
            shared_values = shared.read(view.weights, view.constants, payload, sources)
            v = saturated(shared_values[:, :, None], dtype)
        # Values that heads share are those of a single head, so that the query rows of all heads
        # are its rows.
        rows = weights[0].astype(dtype).reshape(v.shape[0], v.shape[2], -1, v.shape[1])
        return summed(rows, jnp.swapaxes(v, 1, 2), piece).reshape(*weights[0].shape[:3], -1)

    return _attend_whole(call, q, part, Direct(scores, values))


def _attend_whole(call: BodyCall, q, part: Part, direct: Direct) -> Partial:
    """Attend to a part by functions that read it themselves."""
    piece = math.gcd(PIECE, call.view.run.slots_here // 2)
    nothing: dict = {"k": {}, "v": {}}
    return attend_whole(
        q, nothing, part.mask, direct, call.kv_heads, piece, softcap=call.ask.softcap
    )


def _payload(view: LayerView, part: Part, after: Array) -> dict:
    """Read and unpack a part's tokens, not before `after` has been computed."""
    run = view.run
    size = part.positions.shape[-1]
    if part.rows is None:
        state = _read_after(run, view.state, after, size)
        slot = known_after(after, part.first)
        return payload_of(run, state, view.layer, slot, size)
    first = depending_on(after, part.first)
    body: dict = {}
    for source, codec in run.wiring.storage.codecs.items():
        body[source] = {}
        for name, field in codec.fields.items():
            stored = view.state.body[source][name]
            body[source][name] = field.packing.spans(
                stored, run.slots_here, view.layer, part.rows, first, size
            )
    return payload_of(run, view.state.replace(body=body), 0, 0, size)


def _read_after(run: RunLayout, state: Run, after: Array, size: int) -> Run:
    """Return `state`, whose body is read `size` tokens at a time, and not before `after` has been
    computed.

    A slice of a part waits because its first slot is made to depend on `after` (`known_after`). A
    slice of the whole body has no first slot that XLA must know. Then the body itself is made to
    depend on `after`."""
    if size < run.slots_here:
        return state
    return state.replace(body=depending_on(after, state.body))


def _parts(view: LayerView, tokens: NewTokens, batch: int) -> Part:
    """Cut a body into parts of the same slots of every row.

    Parts are as few as `read_at_a_time` allows, because every part takes kernels and seconds of
    compilation. All have the same size, so that the last one may begin within the part before it.
    Tokens of both are seen in the earlier one only."""
    run = view.run
    blocks = min(-(-reached(view) // run.block), run.slots_here // run.block)
    tokens_total = blocks * run.block * batch
    count = min(blocks, -(-tokens_total // read_at_a_time(tokens_total)))
    size = run.block * -(-blocks // count)
    start = jnp.arange(count) * size
    first = jnp.minimum(start, blocks * run.block - size)
    positions, valid = body_view(view, tokens).places(0, blocks * run.block)
    mask = seen(view, tokens, positions, valid)

    def cut_part(x, slot):
        return cut_along(x, slot, size, x.ndim - 1)

    cut = jax.vmap(cut_part, (None, 0))
    # False for the slots of the last part that the part before it has.
    in_part = first[:, None] + jnp.arange(size)[None] >= start[:, None]
    return Part(first, cut(positions, first), cut(mask, first) & in_part[:, None, None])


class Spans(NamedTuple):
    """A body cut into spans. Those of row 0 come first, then those of row 1, and so on.

    Attributes:
        parts: The parts that hold the spans, in this order.
        start: The number of each row's first span.
        counts: How many spans each row has.
        most: The most spans that a row may have.
    """

    parts: Part
    start: Int[Array, " B"]
    counts: Int[Array, " B"]
    most: int


def _spans(view: LayerView, tokens: NewTokens, batch: int) -> Spans | None:
    """Cut the tokens that rows hold into spans. None where that is no less than the same slots of
    every row.

    The number of spans is static: the most that rows can have which keep the promise
    (`LengthBound`)."""
    run = view.run
    if view.bound is None or view.bound.total is None:
        return None
    blocks = run.slots_here // run.block
    # The largest span of whole blocks that divides the body.
    span_blocks = max(1, MOST_SPAN // run.block)
    while blocks % span_blocks:
        span_blocks -= 1
    size = run.block * span_blocks
    row_spans = min(-(-reached(view) // size), run.slots_here // size)
    # Each row's last span may be filled in part, so that a span for every row is added.
    span_count = -(-min(view.bound.total, run.slots_here * batch) // size) + batch
    part_count = -(-span_count * size // read_at_a_time(span_count * size))
    # Rounded up, so that all parts have as many.
    span_count = part_count * -(-span_count // part_count)
    if span_count >= row_spans * batch:
        return None
    counts = -(-run.deal.share(body_tokens(run, view.state)) // size)
    span_ends = jnp.cumsum(counts)
    numbers = jnp.arange(span_count)
    # The number of span n's row is how many rows have all their spans before it: `span_ends` is at
    # most n. Spans after the last row's get a valid row and slot too. They are read for nothing,
    # and `_by_rows` leaves them out.
    rows = jnp.minimum((span_ends[None] <= numbers[:, None]).sum(1), batch - 1)
    first = jnp.minimum((numbers - (span_ends - counts)[rows]) * size, (row_spans - 1) * size)
    rows, first = given_to_gpus((rows, first))
    positions, valid = body_view(view, tokens).places(0, row_spans * size)
    mask = seen(view, tokens, positions, valid)

    def cut_spans(x):
        """Cut the last axis of an array into spans: [B, .., row_spans * size] to [P, n, ..,
        size]."""
        shape = (1, *x.shape[1:-1], size)

        def cut_span(row, slot):
            return cut_at(x, (row, *[0] * (x.ndim - 2), slot), shape)[0]

        spans = jax.vmap(cut_span)(rows, first)
        return spans.reshape(part_count, -1, *spans.shape[1:])

    parts = Part(
        first.reshape(part_count, -1),
        cut_spans(positions),
        cut_spans(mask),
        rows.reshape(part_count, -1),
    )
    return Spans(parts, span_ends - counts, counts, row_spans)


def _by_rows(partials: Partial, spans: Spans) -> Partial:
    """Merge the partial results of each row's spans, given with an axis of all spans in front."""
    number = jnp.arange(spans.most)[:, None]
    span = jnp.minimum(spans.start[None] + number, partials.lse.shape[0] - 1)  # [most, B]
    # A row with fewer spans than `most` gets those of other rows here, at no weight.
    valid = number < spans.counts[None]
    lse = jnp.where(valid[..., None, None], partials.lse[span], -jnp.inf)
    out = jnp.where(valid[..., None, None, None], partials.out[span], 0.0)
    return Partial(combined(lse, out), jax.nn.logsumexp(lse, axis=0))


def _carry_through(
    view: LayerView, tokens: NewTokens, size: int, carry: Carry, after: jax.Array
) -> Carry:
    """Pass the carry of all body tokens through this layer, `size` tokens of every row at a time.

    It begins when `after` has been computed. The layer below reads the carry, and XLA would copy it
    if this layer could write it earlier."""
    run = view.run
    body = body_view(view, tokens)
    state = _read_after(run, view.state, after, size)
    constants = run.wiring.maps.prepare(view.constants)
    zero = known_after(after, 0)

    def block_step(j, carry):
        slot = body.at(j, size) + zero
        payload = payload_of(run, state, view.layer, slot, size)
        below = {name: jax.lax.dynamic_slice_in_dim(x, slot, size, 1) for name, x in carry.items()}
        _, part = run.wiring.maps.decode(constants, payload, below)
        # Where blocks do not divide the body, the last one begins within the one before it, whose
        # tokens it leaves alone.
        start = j * size if run.slots_here % size else slot
        return {name: put_into_carry(x, part[name], slot, start) for name, x in carry.items()}

    return jax.lax.fori_loop(*body.blocks(size), block_step, carry)
