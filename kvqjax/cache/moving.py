"""Moving tokens of a cache into arrays of another size: for another capacity, or shifted along the tokens.

    moved_body     writes a new body tile by tile; its caller says where the tiles come from:
      stored_tile    reads a tile of an old body
    padded_body    adds or cuts off slots of a body
    moved_window   moves the window's slots to another ring

Nothing is decoded or encoded. Codes, scales and vectors are unpacked, and packed in their new place, so that equal
tokens keep equal words. New slots that no token of a row fills have undefined contents, as in every cache."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.state import Run, ring_tokens
from kvqjax.ops.layout import Field
from kvqjax.ops.packing import Packing, Stored

__all__ = ["Tile", "moved_body", "moved_window", "padded_body", "stored_tile"]

MOST_AT_ONCE = 2048  # tokens of a row that are unpacked at a time: a few MB of a wide layer's codes

Number = Int[Array, ""] | int

# tile(source, name, field, layer, row, token, size): body tokens `token` to `token + size - 1` of one row of one layer,
# as packings write them.
Tile = Callable[[str, str, Field, Number, Number, Number, int], Array]


def stored_tile(
    run: RunLayout, state: Run, source: str, name: str, layer: Number, row: Number, token: Number, size: int
) -> Shaped[Array, "rows lanes"]:
    """Read body tokens of one row of one layer, as their packing writes them.

    Args:
        run: The run's plan.
        state: The run's arrays.
        source: The source whose field is read.
        name: The field.
        layer: The layer's number in the run.
        row: The row.
        token: The first body token, at which a group begins. It may be negative.
        size: How many tokens, a multiple of the block.

    Returns:
        The tile. Its contents are undefined for tokens that the row does not hold, below 0 and beyond the end too."""
    field, stored = run.wiring.storage.codecs[source].fields[name], state.body[source][name]
    packing = field.packing.in_bits  # 16-bit numbers travel as the integers that hold their bits
    # The tile may begin inside a block. One more block than its size is read, and the tile is cut out of them. Modulo
    # the body's blocks every number is a valid one, in rings and beyond the ends of a body.
    first = jnp.floor_divide(token, run.block)
    blocks = jnp.mod(first + jnp.arange(size // run.block + 1), run.slots // run.block)
    rows = jnp.broadcast_to(jnp.asarray(row, jnp.int32), blocks.shape)
    span = packing.spans(stored, run.slots, layer, rows, blocks * run.block, run.block)
    tiles = packing.read(span, 0, 0, run.block)
    return field.cut_tile(field.join_tiles(tiles), token - first * run.block, size)


def _moved_field(run: RunLayout, field: Field, encoded: Int[Array, " B"], tile: Callable) -> Stored:
    """Write a field of a new body, of all rows and layers.

    Args:
        run: The plan of the new body's run.
        field: The field.
        encoded: How many body tokens each row has encoded.
        tile: `tile(layer, row, token, size)` gives the tokens to write, from body token `token` on.

    Returns:
        The field's arrays. Slots behind the longest row's last token are not written."""
    packing = field.packing
    count, batch, blocks = run.count, encoded.shape[0], run.slots // run.block
    most = max(1, MOST_AT_ONCE // run.block)
    at_once = max(n for n in range(1, blocks + 1) if blocks % n == 0 and n <= most)
    size = run.block * (1 if run.wraps else at_once)
    chunks, used_chunks = run.slots // size, run.slots // size
    if not run.wraps:  # in a ring any block may hold the newest tokens, so that all are written
        used_chunks = jnp.minimum(chunks, (encoded.max() + size - 1) // size)

    def put(number, out):
        # One loop goes over chunks of slots, then layers, then rows. `line` numbers the rows of all layers.
        chunk, line = number // (count * batch), number % (count * batch)
        layer, row = line // batch, line % batch
        token = chunk * size
        if (
            run.wraps
        ):  # the newest block of the row that has its place here: the greatest j <= last, j mod chunks = chunk
            last = jnp.floor_divide(encoded[row] - 1, size)
            token = (last - jnp.mod(last - chunk, chunks)) * size
        return packing.in_bits.write(out, (layer, row), chunk * size, tile(layer, row, token, size))

    return jax.lax.fori_loop(0, used_chunks * count * batch, put, packing.allocate((count, batch), run.slots))


def moved_body(run: RunLayout, encoded: tuple[Int[Array, " B"], ...], tile: Tile) -> dict:
    """Make a new body of a run.

    Args:
        run: The plan of the new body.
        encoded: How many body tokens each clock has encoded, [B] for each clock.
        tile: Gives the tokens that are written.

    Returns:
        {source: {field: arrays}}; empty where the plan has no slots."""
    body = {}
    for clock, tokens in zip(run.wiring.storage.clocks, encoded, strict=True):
        for source in clock.sources if run.slots else ():
            fields = run.wiring.storage.codecs[source].fields
            body[source] = {
                name: _moved_field(run, field, tokens, functools.partial(tile, source, name, field))
                for name, field in fields.items()
            }
    return body


def padded_body(old: RunLayout, new: RunLayout, body: dict) -> dict:
    """Give a body more or fewer slots.

    Args:
        old: The plan of the body, which keeps all tokens in their order.
        new: Its new plan, in which fields are packed alike and blocks are dealt alike.
        body: The body, {source: {field: arrays}}.

    Returns:
        The body with as many slots as `new` says."""
    devices = old.deal.parts

    def resized(packing: Packing, x: Array) -> Array:
        axis = packing.token_axis
        # Every device's share becomes longer or shorter by itself: [.., devices, slots_here, ..].
        shares = x.reshape(*x.shape[:axis], devices, -1, *x.shape[axis + 1 :])
        resize = jax.vmap(lambda x: packing.resized((x,), old.slots, new.slots)[0], axis, axis)
        return resize(shares).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def fields_of(source: str, fields: dict) -> dict:
        plans = old.wiring.storage.codecs[source].fields
        return {name: tuple(resized(plans[name].packing, x) for x in stored) for name, stored in fields.items()}

    return {source: fields_of(source, fields) for source, fields in body.items()}


def moved_window(
    old: int, new: int, end: Int[Array, " B"], shift: int, array: Shaped[Array, "..."], axis: int = 2
) -> Shaped[Array, "..."]:
    """Move the window's slots from one ring to another.

    Args:
        old: How many slots the ring has.
        new: How many slots the new ring has.
        end: How many body tokens each row of the new cache holds.
        shift: Body token t of the new cache is body token t + `shift` of the old one.
        array: What the slots hold: [L, B, old, W], or [B, old] with `axis` 1.
        axis: The axis of slots, which follows that of rows.

    Returns:
        The array with `new` slots."""
    if old == new and shift % old == 0:
        return array
    slots = jnp.mod(ring_tokens(new, jnp.maximum(end - new, 0)) + shift, old)
    index = slots.reshape((1,) * (axis - 1) + slots.shape + (1,) * (array.ndim - axis - 1))
    return jnp.take_along_axis(array, index, axis)
