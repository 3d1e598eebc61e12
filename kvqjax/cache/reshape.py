"""A cache in another shape: another capacity, another storage form, another number of devices.

    with_layout    another capacity (`kvqjax.resize`); `excess` finds the rows that do not fit
    convert        another storage form: layers as stacks or each by itself; bodies in planes, in lines and stripes, or
                   head by head. Saved caches all have one form, `CANONICAL`
    dealt_anew     another number of devices over which blocks are dealt, on the host, in NumPy

What they share moves tokens into arrays of another size:

    moved_body     writes a new body tile by tile; its caller says where the tiles come from:
      stored_tile    reads a tile of an old body
    padded_body    adds or cuts off slots of a body
    moved_window   moves the slots of the window to another ring

Nothing is decoded or encoded. Codes, scales and vectors are unpacked, and packed in their new
place, so that equal tokens keep equal words. New slots that no token of a row fills have undefined
contents, as in every cache."""

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from kvqjax._errors import UserError
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run, blank_body, empty_kept, ring_tokens
from kvqjax.ops import packing
from kvqjax.ops.layout import Field
from kvqjax.ops.packing import Packing, Stored

MOST_AT_ONCE = 2048  # tokens of a row that are unpacked at a time: a few MB of a wide layer's codes

Number = Int[Array, ""] | int

# tile(source, name, field, layer, row, token, size): body tokens `token` to `token + size - 1` of
# one row of one layer, as packings write them.
Tile = Callable[[str, str, Field, Number, Number, Number, int], Array]


def stored_tile(
    run: RunLayout,
    state: Run,
    source: str,
    name: str,
    layer: Number,
    row: Number,
    token: Number,
    size: int,
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
        The tile. Its contents are undefined for tokens that the row does not hold, below 0 and
        beyond the end too."""
    field = run.wiring.storage.codecs[source].fields[name]
    stored = state.body[source][name]
    packing = field.packing.in_bits  # 16-bit numbers travel as the integers that hold their bits
    # The tile may begin inside a block. One more block than its size is read, and the tile is cut
    # out of them. Modulo the body's blocks every number is a valid one, in rings and beyond the
    # ends of a body.
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
    count = run.count
    batch = encoded.shape[0]
    size = run.block if run.wraps else _chunk(run)
    chunks = run.slots // size
    used_chunks = chunks
    if not run.wraps:  # in a ring any block may hold the newest tokens, so that all are written
        used_chunks = jnp.minimum(chunks, (encoded.max() + size - 1) // size)

    def put(number, out):
        # One loop goes over chunks of slots, then layers, then rows. `line` numbers the rows of all
        # layers.
        chunk = number // (count * batch)
        line = number % (count * batch)
        layer = line // batch
        row = line % batch
        token = chunk * size
        if run.wraps:
            # The newest block of the row that has its place here: the greatest j <= last with
            # j mod chunks = chunk.
            last = jnp.floor_divide(encoded[row] - 1, size)
            token = (last - jnp.mod(last - chunk, chunks)) * size
        return packing.in_bits.write(out, (layer, row), chunk * size, tile(layer, row, token, size))

    turns = used_chunks * count * batch
    return jax.lax.fori_loop(0, turns, put, packing.allocate((count, batch), run.slots))


def _chunk(run: RunLayout) -> int:
    """Choose how many tokens of a row are moved at a time: the most whole blocks, up to
    MOST_AT_ONCE tokens, that divide the body."""
    blocks = run.slots // run.block
    at_once = max(1, MOST_AT_ONCE // run.block)
    while blocks % at_once:
        at_once -= 1
    return run.block * at_once


def moved_body(run: RunLayout, encoded: tuple[Int[Array, " B"], ...], tile: Tile) -> dict:
    """Make a new body of a run.

    Args:
        run: The plan of the new body.
        encoded: How many body tokens each clock has encoded, [B] for each clock.
        tile: Gives the tokens that are written.

    Returns:
        {source: {field: arrays}}; empty where the plan has no slots."""
    body: dict = {}
    if not run.slots:
        return body
    for clock, tokens in zip(run.wiring.storage.clocks, encoded, strict=True):
        for source in clock.sources:
            body[source] = {}
            for name, field in run.wiring.storage.codecs[source].fields.items():
                field_tile = functools.partial(tile, source, name, field)
                body[source][name] = _moved_field(run, field, tokens, field_tile)
    return body


def padded_body(old: RunLayout, new: RunLayout, body: dict) -> dict:
    """Change the number of a body's slots.

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

        def of_device(share: Array) -> Array:
            return packing.resized((share,), old.slots, new.slots)[0]

        resized_shares = jax.vmap(of_device, axis, axis)(shares)
        return resized_shares.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    padded: dict = {}
    for source, fields in body.items():
        padded[source] = {}
        for name, stored in fields.items():
            packing = old.wiring.storage.codecs[source].fields[name].packing
            padded[source][name] = tuple(resized(packing, x) for x in stored)
    return padded


def moved_window(
    old: int,
    new: int,
    end: Int[Array, " B"],
    shift: Int[Array, "B C"] | int,
    array: Shaped[Array, "..."],
    axis: int = 2,
) -> Shaped[Array, "..."]:
    """Move the window's slots from one ring to another.

    Args:
        old: How many slots the ring has.
        new: How many slots the new ring has.
        end: How many body tokens each row of the new cache holds.
        shift: Body token t of the new cache is body token t + `shift` of the old one; an array has
            the shift of every new slot's token.
        array: What the slots hold: [L, B, old, W], or [B, old] with `axis` 1.
        axis: The axis of slots, which follows that of rows.

    Returns:
        The array with `new` slots."""
    if isinstance(shift, int) and old == new and shift % old == 0:
        return array
    slots = jnp.mod(ring_tokens(new, jnp.maximum(end - new, 0)) + shift, old)
    # [B, new] gets axes of one around it, until it has as many as `array`.
    index = slots.reshape((1,) * (axis - 1) + slots.shape + (1,) * (array.ndim - axis - 1))
    return jnp.take_along_axis(array, index, axis)


def check_means(old: CacheLayout, new: CacheLayout) -> None:
    """Raise UserError for layouts between which no cache can be resized, whatever its rows hold."""
    if old.dealt <= 1:
        return
    for old_run, new_run in zip(runs_of(old), runs_of(new), strict=True):
        if not _is_padded(old_run, new_run):
            raise UserError(
                f"a body dealt over {old.dealt} devices cannot change from a capacity of {old.capacity} to "
                f"{new.capacity}: its blocks or rings would have another length; make a cache with that capacity "
                "and fill it"
            )


def _is_padded(old: RunLayout, new: RunLayout) -> bool:
    """Say whether the arrays of a run's body only become longer or shorter."""
    if old.wraps or new.wraps or old.budget or new.budget:
        return False  # slots are not in the order of tokens
    if old.deal != new.deal or (old.slots > 0) != (new.slots > 0):
        return False
    if old.wiring.storage == new.wiring.storage:
        return True
    # Long bodies on CPUs are packed in another way than short ones (kvqjax/cache/runs.py).
    new_codecs = new.wiring.storage.codecs
    old_codecs = old.wiring.storage.codecs.items()
    return all(codec.fields == new_codecs[source].fields for source, codec in old_codecs)


def _groups(cache: Cache) -> Bool[Array, "B G"]:
    """Mark the groups of an evicting body that hold a token."""
    positions = cache.kept["positions"]
    # With eviction all sources have one clock.
    unit = runs_of(cache.layout)[0].wiring.storage.clocks[0].unit
    return (positions.reshape(positions.shape[0], -1, unit) >= 0).any(-1)


def excess(cache: Cache, layout: CacheLayout) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Find the rows that do not fit a smaller layout.

    Args:
        cache: The cache.
        layout: The smaller layout.

    Returns:
        (how many tokens each row may be cropped to so that it fits, which rows do not fit as they
        are)."""
    most = jnp.full_like(cache.lengths, layout.capacity)
    misfits = cache.lengths > most
    if "positions" in cache.kept:
        unit = runs_of(cache.layout)[0].wiring.storage.clocks[0].unit
        body_tokens = _groups(cache).sum(1) * unit
        crowded = body_tokens > runs_of(layout)[0].budget
        # Which groups a crop leaves depends on positions: only an empty row fits for sure.
        return jnp.where(crowded, 0, most), misfits | crowded
    for run, new, state in zip(runs_of(cache.layout), runs_of(layout), cache.runs, strict=True):
        if new.wraps:
            continue  # a ring keeps the newest tokens, however many were encoded
        for clock, count in zip(run.wiring.storage.clocks, state.flushed, strict=True):
            # A crop may have left more encoded than rows of that capacity ever encode.
            crowded = count * clock.unit > new.slots
            most = jnp.where(crowded, jnp.minimum(most, new.slots + layout.method.sinks), most)
            misfits = misfits | crowded
    return most, misfits


@functools.partial(jax.jit, static_argnames="layout")
@jax.enable_x64(False)
def with_layout(cache: Cache, layout: CacheLayout) -> Cache:
    """Move a cache to another layout.

    Args:
        cache: The cache. All its rows fit the layout (`excess`).
        layout: The cache's own, but for the capacity.

    Returns:
        The cache in that layout."""
    body_lengths = cache.lengths - layout.method.sinks
    kept, order = _kept(cache, layout)
    runs = []
    for old, new, state in zip(runs_of(cache.layout), runs_of(layout), cache.runs, strict=True):
        runs.append(_resized_run(old, new, state, body_lengths, order))
    return cache.replace(runs=tuple(runs), kept=kept, layout=layout)


def _resized_run(
    old: RunLayout, new: RunLayout, state: Run, body_lengths: Int[Array, " B"], order
) -> Run:
    """Move the arrays of a run from its plan `old` to its plan `new`. `order` is that of
    `_kept`."""
    window = {}
    for name, x in state.window.items():
        window[name] = moved_window(old.ring, new.ring, body_lengths, 0, x)
    return state.replace(body=_body(old, new, state, order), window=window)


def _body(old: RunLayout, new: RunLayout, state: Run, order: Int[Array, "B G"] | None) -> dict:
    """Move the body of a run. `order` has the groups of an evicting body that go to slots 0, u, 2
    u, ...; else None."""
    if not new.slots:
        return {}
    if not old.slots:  # nothing is encoded yet
        return blank_body(new, state.flushed[0].shape[0], new.slots)
    if _is_padded(old, new):
        return padded_body(old, new, state.body)
    if order is not None:
        return _body_of_groups(old, new, state, order)
    clocks = zip(state.flushed, old.wiring.storage.clocks, strict=True)
    encoded = tuple(count * clock.unit for count, clock in clocks)

    def tile(source, name, field, layer, row, token, size):
        return stored_tile(old, state, source, name, layer, row, token, size)

    return moved_body(new, encoded, tile)


def _body_of_groups(old: RunLayout, new: RunLayout, state: Run, order: Int[Array, "B G"]) -> dict:
    """Move the groups of an evicting body: group `order[b, i]` of row b goes to the slots of group
    i."""
    unit = old.wiring.storage.clocks[0].unit
    groups = new.slots // unit
    # Further groups of a longer body are copies of group 0, which `kept` calls empty.
    order = jnp.pad(order, ((0, 0), (0, max(0, groups - order.shape[1]))))[:, :groups]

    def tile(source, name, field, layer, row, token, size):
        def group(number):
            first = order[row, token // unit + number] * unit
            return stored_tile(old, state, source, name, layer, row, first, unit)

        return field.join_tiles(jax.vmap(group)(jnp.arange(size // unit)))

    # All slots are written: with eviction `flushed` counts every unit that left the window, not
    # those in the body.
    encoded = jnp.full((order.shape[0],), new.slots, jnp.int32)
    return moved_body(new, (encoded,), tile)


def _kept(cache: Cache, layout: CacheLayout) -> tuple[dict, Int[Array, "B G"] | None]:
    """Move the bookkeeping of evicted tokens.

    Args:
        cache: The cache.
        layout: The new layout.

    Returns:
        (`Cache.kept`; the groups of the old body in the order in which the new one has them, those
        that hold tokens first). None in place of the order where nothing is evicted, and where one
        of the two bodies has no slots."""
    old = runs_of(cache.layout)[0]
    new = runs_of(layout)[0]
    unit = new.wiring.storage.clocks[0].unit
    if not new.budget or not cache.kept:
        return empty_kept(new, cache.batch), None
    groups = new.budget // unit
    # False comes first: groups with tokens, in their order.
    order = jnp.argsort(~_groups(cache), axis=1, stable=True).astype(jnp.int32)

    by_group = cache.kept["positions"].reshape(cache.batch, old.budget // unit, unit)
    by_group = jnp.take_along_axis(by_group, order[:, :, None], 1)[:, :groups]
    padding = ((0, 0), (0, groups - by_group.shape[1]), (0, 0))
    by_group = jnp.pad(by_group, padding, constant_values=-1)
    return {"positions": by_group.reshape(cache.batch, -1)}, order


CANONICAL = {"layers": "scan", "form": "planes"}

Member = tuple[RunLayout, Run, int]  # one layer: its run, the run's state, the layer's number in it


def convert(cache: Cache, *, layers: str, form: str) -> Cache:
    """Store a cache in another form.

    Args:
        cache: any cache. Where its blocks are dealt over devices, this runs inside `shard_map`, on
            each device's part.
        layers: as `CacheLayout.layers`.
        form: as `CacheLayout.form`.

    Returns:
        The same cache, with these in its layout. It shares the arrays that do not change with
        `cache`.

    Raises:
        UserError: a dealt cache is to change its form outside `shard_map`.
    """
    layout = dataclasses.replace(cache.layout, layers=layers, form=form)
    if layout == cache.layout:
        return cache
    if layout.dealt > 1 and not layout.dealt_over and form != cache.layout.form:
        raise UserError(
            f"a cache whose blocks are dealt over {layout.dealt} devices changes its form on its mesh only"
        )
    members = []
    for run, state in zip(runs_of(cache.layout), cache.runs, strict=True):
        members += [(run, state, index) for index in range(run.count)]
    runs = []
    for run in runs_of(layout):
        runs.append(_converted_run(run, members[run.first : run.first + run.count]))
    return cache.replace(runs=tuple(runs), states=_states(cache, layers), layout=layout)


def _states(cache: Cache, layers: str) -> tuple[dict, ...]:
    """Store the states of recurrent layers as one stack, or each by itself."""
    if not cache.states or layers == cache.layout.layers:
        return cache.states
    if layers == "scan":
        return (jax.tree.map(_joined, *cache.states),)
    assert cache.layout.shape.recurrent is not None
    count = len(cache.layout.shape.recurrent.layers)
    return tuple(_cut(cache.states[0], index, count) for index in range(count))


def _converted_run(run: RunLayout, members: list[Member]) -> Run:
    """Make the arrays of a run whose layers are `members`."""

    def field(source: str, name: str, new: Packing) -> Stored:
        """Pack one field of all members anew, and stack the layers."""
        parts = []
        for old_run, state, index in members:
            old = old_run.wiring.storage.codecs[source].fields[name].packing
            stored = _cut(state.body[source][name], index, old_run.count)
            parts.append(_packed_anew(old, new, stored, old_run.slots_here, run.slots_here))
        # A field may be stored in several arrays. Each is stacked by itself.
        return tuple(_joined(*layers) for layers in zip(*parts, strict=True))

    body: dict = {}
    if run.slots:
        for source, codec in run.wiring.storage.codecs.items():
            fields = codec.fields.items()
            body[source] = {name: field(source, name, new.packing) for name, new in fields}
    exact = []
    for old_run, state, index in members:
        exact.append(_cut((state.sinks, state.window), index, old_run.count))
    sinks, window = jax.tree.map(_joined, *exact)
    # Layers of a run have encoded equally many units, so that the counts of the first stand for
    # all.
    first_state = members[0][1]
    return Run(body=body, sinks=sinks, window=window, flushed=first_state.flushed)


def _packed_anew(old: Packing, new: Packing, stored: Stored, slots: int, new_slots: int) -> Stored:
    """Pack one layer's field in another way. The number of slots may change, since blocks depend on
    the form."""
    if old == new:
        return old.resized(stored, slots, new_slots)
    return packing.convert(old, new, stored, slots, new_slots)


def _cut(tree, index: int, count: int):
    """Cut layer `index` out of a run of `count`, as a stack of one."""
    if count == 1:
        return tree
    return jax.tree.map(operator.itemgetter(slice(index, index + 1)), tree)


def _joined(*parts):
    """Stack arrays [1, ...] of layers. Of a single layer the array itself is returned, not a
    copy."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _places(run: RunLayout) -> Int[np.ndarray, " n"]:
    """Find where each ring block is stored: devices come one after the other, each with its own
    blocks in order."""
    ring = np.arange(run.slots // run.block)
    deal = run.deal
    blocks = max(1, deal.block // run.block)  # of the run, in one block that is dealt
    dealt_block = ring // blocks
    device = dealt_block % deal.parts
    number = dealt_block // deal.parts * blocks + ring % blocks  # among the device's blocks
    return device * (len(ring) // deal.parts) + number


def _moved(
    old: RunLayout,
    new: RunLayout,
    encoded: Int[np.ndarray, " B"],
    array: Shaped[np.ndarray, "L B R W"],
    axis: int,
) -> Shaped[np.ndarray, "L B r w"]:
    """Move the blocks of one array of a field.

    Args:
        old: The run's plan so far.
        new: Its new plan.
        encoded: How many body tokens each row has encoded.
        array: The array.
        axis: The axis along which tokens follow each other.

    Returns:
        The array of the new plan. A ring holds the newest blocks of a row. Where the new ring is
        longer, blocks that the old one no longer held are zero."""
    count = old.slots // old.block
    new_count = new.slots // new.block
    blocks = np.moveaxis(array, axis, 2)
    # [L, B, blocks, entries of a block along the axis, W]
    blocks = blocks.reshape(*blocks.shape[:2], count, -1, *blocks.shape[3:])
    moved = np.zeros((*blocks.shape[:2], new_count, *blocks.shape[3:]), array.dtype)
    source = _places(old)
    target = _places(new)
    for row, last in enumerate((encoded - 1) // old.block):
        # The block of the row that each block of the new ring holds: negative for none.
        newest = last - (last - np.arange(new_count)) % new_count
        stored = (newest >= 0) & (newest > last - count)
        moved[:, row, target[stored]] = blocks[:, row, source[newest[stored] % count]]
    return np.moveaxis(moved.reshape(*moved.shape[:2], -1, *moved.shape[4:]), 2, axis)


def _dealt_run(old: RunLayout, new: RunLayout, state: Run) -> Run:
    """Deal the body of a run anew. Sinks and window are not dealt."""
    if not state.body:
        return state
    body: dict = {}
    for clock, flushed in zip(old.wiring.storage.clocks, state.flushed, strict=True):
        encoded = flushed * clock.unit
        for source in clock.sources:
            body[source] = {}
            for name, stored in state.body[source].items():
                packing = old.wiring.storage.codecs[source].fields[name].packing
                moved = [_moved(old, new, encoded, x, packing.token_axis) for x in stored]
                body[source][name] = tuple(moved)
    return dataclasses.replace(state, body=body)


def dealt_anew(cache: Cache, layout: CacheLayout) -> Cache:
    """Deal a cache over other devices.

    Args:
        cache: The cache, of NumPy's arrays.
        layout: Its layout, but for the devices that blocks are dealt over.

    Returns:
        The cache in that layout."""
    runs = []
    for old, new, state in zip(runs_of(cache.layout), runs_of(layout), cache.runs, strict=True):
        runs.append(_dealt_run(old, new, state))
    return cache.replace(runs=tuple(runs), layout=layout)
