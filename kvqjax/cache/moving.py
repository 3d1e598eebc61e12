"""Moving what a cache holds into arrays of another size: of another capacity, or shifted along the tokens.

Nothing is decoded or encoded: codes, scales and vectors are unpacked from where they stand and packed where they
belong, so that equal tokens keep equal words. What no row holds in the new arrays is undefined, as in every cache."""

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
    """Read `size` body tokens of one row of one layer from body token `token` on, which begins a group.

    Tokens that the row does not hold, below 0 and beyond the end too, come as whatever stands somewhere."""
    field, stored = run.wiring.storage.codecs[source].fields[name], state.body[source][name]
    packing = field.packing.in_bits  # 16-bit numbers travel as the integers that hold their bits
    first = jnp.floor_divide(token, run.block)
    blocks = jnp.mod(first + jnp.arange(size // run.block + 1), run.slots // run.block)
    rows = jnp.broadcast_to(jnp.asarray(row, jnp.int32), blocks.shape)
    span = packing.spans(stored, run.slots, layer, rows, blocks * run.block, run.block)
    tiles = packing.read(span, 0, 0, run.block)
    return field.cut_tile(field.join_tiles(tiles), token - first * run.block, size)


def _moved_field(run: RunLayout, field: Field, encoded: Int[Array, " B"], tile: Callable) -> Stored:
    """Write the field of all rows and layers, tile by tile in the order of slots, as far as the longest row reaches."""
    packing = field.packing
    count, batch, blocks = run.count, encoded.shape[0], run.slots // run.block
    at_once = max(n for n in range(1, blocks + 1) if blocks % n == 0 and (n == 1 or n * run.block <= MOST_AT_ONCE))
    size = run.block * (1 if run.wraps else at_once)
    chunks, used_chunks = run.slots // size, run.slots // size
    if not run.wraps:  # else any block may be the newest
        used_chunks = jnp.minimum(chunks, (encoded.max() + size - 1) // size)

    def put(number, out):
        # Chunks outermost, then layers, then rows: `line` numbers the rows of all layers.
        chunk, line = number // (count * batch), number % (count * batch)
        layer, row = line // batch, line % batch
        token = chunk * size
        if run.wraps:  # the newest block of the row that belongs here
            last = jnp.floor_divide(encoded[row] - 1, size)
            token = (last - jnp.mod(last - chunk, chunks)) * size
        return packing.in_bits.write(out, (layer, row), chunk * size, tile(layer, row, token, size))

    return jax.lax.fori_loop(0, used_chunks * count * batch, put, packing.allocate((count, batch), run.slots))


def moved_body(run: RunLayout, encoded: tuple[Int[Array, " B"], ...], tile: Tile) -> dict:
    """Make the body of a run whose clocks have `encoded` so many tokens of each row, every tile as `tile` gives it."""
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
    """Give the body of a run that keeps all tokens in their order more or fewer slots, on every device that blocks are
    dealt over. The fields must be stored alike."""
    devices = old.deal.parts

    def resized(packing: Packing, x: Array) -> Array:
        axis = packing.token_axis
        shares = x.reshape(*x.shape[:axis], devices, -1, *x.shape[axis + 1 :])
        resize = jax.vmap(lambda x: packing.resized((x,), old.slots, new.slots)[0], axis, axis)
        return resize(shares).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def fields_of(source: str, fields: dict) -> dict:
        about = old.wiring.storage.codecs[source].fields
        return {name: tuple(resized(about[name].packing, x) for x in stored) for name, stored in fields.items()}

    return {source: fields_of(source, fields) for source, fields in body.items()}


def moved_window(
    old: int, new: int, end: Int[Array, " B"], shift: int, array: Shaped[Array, "..."], axis: int = 2
) -> Shaped[Array, "..."]:
    """Move window slots, along `axis` behind the rows, from a ring of `old` to one of `new` slots. Body token t of the
    new cache, which holds `end` of them, is body token t + `shift` of the old one."""
    if old == new and shift % old == 0:
        return array
    slots = jnp.mod(ring_tokens(new, jnp.maximum(end - new, 0)) + shift, old)
    index = slots.reshape((1,) * (axis - 1) + slots.shape + (1,) * (array.ndim - axis - 1))
    return jnp.take_along_axis(array, index, axis)
