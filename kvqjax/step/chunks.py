"""Texts that were read alone stand behind each other in one cache.

    chunk          sinks | body ......... | window
                     |          |             |
    row   ..... | read anew | as it is coded | encoded when due

A chunk is a cache of a text that was read alone, such as a document of a retrieval. `concatenate`
puts its tokens behind a row, at new places:

- Sinks and window of a chunk are exact. They enter the row as new tokens do, and are encoded when
  they are due.
- Tokens of its body are decoded and enter the row in the same way. Then their codes take the place
  of those that the row made of them, so that nothing is coded twice.

Keys that are stored before RoPE have no place. Exact keys that are stored after it are turned by
the distance. Codes of turned keys cannot move (kvqjax/cache/moves.py).

Numbers that a group of tokens shares, such as the scales of KIVI's keys, move only with their whole
group. If the distance is not a multiple of the group's length, the row's own codes stay, which were
made of decoded vectors."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_integer, check_integers, is_known, named
from kvqjax._errors import UserError
from kvqjax.cache import append as caches
from kvqjax.cache.append import at_layer
from kvqjax.cache.layout import RunLayout
from kvqjax.cache.moves import check_movable, turn_of
from kvqjax.cache.pages import require_own_bodies
from kvqjax.cache.reshape import moved_body, stored_tile
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run, body_tokens, check_cache
from kvqjax.cache.surgery import check_same, resize
from kvqjax.model.loading import Model
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla_workarounds import modulo
from kvqjax.parallel.sharding import of_constants, on_parts
from kvqjax.step.checks import (
    check_both,
    check_entries,
    check_ids,
    kept_program,
    run_constants,
    with_own_constants,
)
from kvqjax.step.forward import forward, slab

# Tokens of a row that are decoded and appended at a time: a few MB of a wide layer's vectors.
MOST_AT_ONCE = 1024


def concatenate(
    caches: Sequence[Cache],
    *,
    model: Model | None = None,
    constants=None,
    tokens: Sequence[Int[Array | np.ndarray, "B _"]] | None = None,
    recompute: int = 0,
    capacity: int | None = None,
) -> Cache:
    """Put texts that were read alone behind each other: the first cache goes on with the tokens of
    the second, then with those of the third.

    - Row i of the result holds the texts of row i of every cache, which may be of any lengths.
    - A chunk's codes stay as they are, but for less than a unit (1 to 128 tokens) of its newest
      ones. The row may not have encoded that many tokens yet: these stand in its window as decoded,
      and are encoded again.
    - Where a group of tokens shares scales (`kivi_star`), codes stay in rows whose length before
      the chunk is a multiple of the group's. In other rows all codes of the chunk are made again.
    - Exact keys that are stored after RoPE (`exact`, layers of a policy) are turned by the
      distance, in float32.
    - A chunk's tokens have not seen the texts before it, and its first tokens were read as the
      beginning of a text. `recompute` reads that many of its first tokens anew, behind what comes
      before. What answers lose is measured in docs/evaluation.md.

    Args:
        caches: At least two, of one method and with as many rows. The first one is the beginning.
        model: The model of the caches, for `recompute` and for the constants of a method that is
            calibrated.
        constants: An artifact's, where no model is given.
        tokens: The ids of the chunks' texts, an array [B, n] for every cache but the first, with n
            of at least `recompute`. Later ones are not looked at.
        recompute: How many of a chunk's first tokens are read anew. Static.
        capacity: Tokens a row of the result; by default those of the first cache. Static.

    Returns:
        The cache of all texts, to go on with.

    Raises:
        UserError: Caches whose tokens cannot move, as for `drop`; caches of different methods,
            capacities above the result's, or numbers of rows; bodies in pages; a row that does not
            fit `capacity` (inside jit what is beyond it is not stored, and the row's flag
            `overflow[b]` is raised); missing tokens or constants, or ids outside the vocabulary.
    """
    joined, chunks = _checked(caches, capacity)
    recompute = check_integer("recompute", recompute, 0)
    ids = _checked_ids(tokens, recompute, len(chunks), joined.batch, model)
    check_entries(constants)
    if model is not None:
        check_both(model, joined)
        constants = constants or with_own_constants(model, joined.layout.method).constants
    for chunk, text in zip(chunks, ids, strict=True):
        first = jnp.minimum(recompute, chunk.lengths)
        if recompute:
            assert model is not None
            assert text is not None
            beginning = jnp.asarray(text)[:, :recompute]
            _, joined = forward(model, beginning, first, joined, last=True)
        joined = _extended(joined, chunk, first, constants)
    return joined


def _checked(caches: Any, capacity: int | None) -> tuple[Cache, list[Cache]]:
    """Check the caches, and give the first one, with the capacity of the result, and the chunks."""
    if not isinstance(caches, list | tuple) or len(caches) < 2:
        raise UserError(
            f"caches is {named(caches)}; wanted a list of at least two caches, the first one being "
            "the beginning"
        )
    check_cache(*caches)
    first, *chunks = caches
    check_movable(first.layout, "concatenate")
    for cache in caches:
        require_own_bodies(cache, "concatenate")
    joined = first if capacity is None else resize(first, capacity)
    for chunk in chunks:
        check_same(joined, chunk)
        if chunk.batch != joined.batch:
            raise UserError(
                f"a cache of {chunk.batch} rows cannot stand behind one of {joined.batch}; "
                "kvqjax.repeat or gather makes more"
            )
    lengths = [cache.lengths for cache in caches]
    if is_known(*lengths):
        totals = np.sum([np.asarray(length) for length in lengths], 0)
        row = int(totals.argmax())
        if totals[row] > joined.layout.capacity:
            raise UserError(
                f"row {row} would hold {totals[row]} tokens, which do not fit a capacity of "
                f"{joined.layout.capacity}; pass capacity="
            )
    return joined, chunks


def _checked_ids(
    tokens: Any, recompute: int, count: int, batch: int, model: Model | None
) -> list[Array | np.ndarray | None]:
    """Check the ids of `count` chunks, and give them; None for each where nothing is read anew."""
    if not recompute:
        return [None] * count
    if model is None:
        raise UserError(f"recompute={recompute} reads tokens anew; pass model=")
    if not isinstance(tokens, list | tuple) or len(tokens) != count:
        raise UserError(
            f"tokens is {named(tokens)}; recompute={recompute} wants a list of the ids of "
            f"{count} chunk{'s' * (count > 1)}, one array [B, n] each"
        )
    for text in tokens:
        check_integers("tokens", text, (batch, "n"), "the ids of a chunk")
        if text.shape[1] < recompute:
            raise UserError(
                f"tokens have {text.shape[1]} ids a row; recompute={recompute} wants as many"
            )
        check_ids("tokens", text[:, :recompute], model.config.vocab_size)
    return list(tokens)


@kept_program
def _extended(cache: Cache, chunk: Cache, first: Int[Array, " B"], constants) -> Cache:
    """Put the tokens of a chunk from `first` on behind those of a cache, on one device or on every
    device's part of the cache's mesh."""
    fixed = run_constants(constants, cache.layout)
    rules = cache.layout.rules
    if rules is None:
        return _extended_here(cache, chunk, first, fixed)

    def local(cache, chunk, first, fixed):
        local_chunk = chunk.replace(layout=rules.local_layout(chunk.layout))
        return _extended_here(cache, local_chunk, first, fixed)

    specs = rules.cache(chunk), PartitionSpec(rules.batch), of_constants(rules, fixed)
    return on_parts(local, rules, cache, chunk, first, fixed, specs=specs, out=rules.cache(cache))


def _extended_here(
    cache: Cache, chunk: Cache, first: Int[Array, " B"], fixed: tuple[dict, ...]
) -> Cache:
    """Do `_extended` on one device's part. `fixed` are the runs' constants."""
    before = cache.lengths
    counts = jnp.maximum(chunk.lengths - first, 0)
    place = _Place(first, before - first, chunk.layout.method.sinks)
    # One block for all runs, because carries go from one run to the next.
    block = math.lcm(*(run.block for run in runs_of(chunk.layout) if run.slots))
    size = -(-min(MOST_AT_ONCE, chunk.layout.capacity) // block) * block

    def append(number, joined):
        start = number * size
        sources = _sources(chunk, place, start, size, block, fixed)
        return caches.commit(joined, sources, jnp.clip(counts - start, 0, size), fixed)

    joined = jax.lax.fori_loop(0, (counts.max() + size - 1) // size, append, cache)
    grain = _grain(chunk)
    runs = []
    parts = zip(runs_of(chunk.layout), runs_of(cache.layout), chunk.runs, joined.runs, strict=True)
    for old, new, chunk_state, state in parts:
        runs.append(_with_codes(old, new, chunk_state, state, place, grain))
    # A chunk's token that is not finite was stored as 0, and later ones were computed from it.
    broken = chunk.finite < chunk.lengths
    finite = jnp.minimum(joined.finite, before + jnp.maximum(chunk.finite - first, 0))
    finite = jnp.where(broken, finite, joined.finite)
    overflow = joined.overflow | chunk.overflow
    return joined.replace(runs=tuple(runs), finite=finite, overflow=overflow)


class _Place(NamedTuple):
    """Where a chunk's tokens come to stand.

    Attributes:
        first: The chunk's first token that moves.
        shift: Token t of the chunk is token t + `shift` of the row.
        sinks: How many first tokens of a row are sinks."""

    first: Int[Array, " B"]
    shift: Int[Array, " B"]
    sinks: int


def _sources(
    chunk: Cache, place: _Place, start: Int[Array, ""], size: int, block: int, fixed
) -> tuple[dict[str, Float[Array, "L B T W"]], ...]:
    """Give the vectors of `size` tokens of every row, from token `place.first + done` on, as each
    run of layers caches them.

    Args:
        chunk: The cache.
        place: Where its tokens come to stand.
        start: How many tokens came before.
        size: A multiple of `block`.
        block: The tokens that bodies are read in multiples of.
        fixed: The runs' constants.

    Returns:
        {source: vectors} for each run. They mean nothing behind a row's last token."""
    layout = chunk.layout
    index = place.first[:, None] + start + jnp.arange(size)[None] - place.sinks  # body tokens
    flowing = [run for run in runs_of(layout) if run.wiring.chain.flows]
    carry = slab(flowing, (chunk.batch, size + block), layout.dtype)
    sources = []
    for run, state, constants in zip(runs_of(layout), chunk.runs, fixed, strict=True):

        def layer_step(carry, layer, run=run, state=state, constants=constants):
            layer_constants = at_layer(constants, layer)
            coded, carry = _decoded(run, state, layer, index, block, layer_constants, carry)
            vectors = {}
            for source, x in coded.items():
                vectors[source] = _exact_or(run, state, layer, source, index, place.sinks, x)
            for source in run.wiring.maps.turned or ():
                distances = jnp.broadcast_to(-place.shift[:, None], index.shape)
                vectors[source] = turn_of(run.shape, source)(vectors[source], distances)
            return carry, {name: x.astype(layout.dtype) for name, x in vectors.items()}

        carry, vectors = jax.lax.scan(layer_step, carry, jnp.arange(run.count))
        sources.append(vectors)
    return tuple(sources)


def _decoded(
    run: RunLayout,
    state: Run,
    layer: Int[Array, ""],
    index: Int[Array, "B T"],
    block: int,
    constants: dict,
    carry: dict,
) -> tuple[dict[str, Float[Array, "B T W"]], dict]:
    """Decode body tokens of a layer.

    Args:
        run: The plan of the layer's run.
        state: The run's arrays.
        layer: The layer's number in the run.
        index: T body tokens of each row that follow each other. Those that a row does not have may
            be among them.
        block: The tokens that bodies are read in multiples of.
        constants: The layer's.
        carry: Of the layer below, of the T tokens and of one block more.

    Returns:
        (the sources, this layer's carry)."""
    batch, size = index.shape
    if not run.slots:
        blank = {}
        for name, width in run.wiring.storage.sources.items():
            blank[name] = jnp.zeros((batch, size, width))
        return blank, carry
    # Groups of tokens and bytes of codes begin with a block.
    start: Array = jnp.floor_divide(index[:, 0], block) * block

    def read(source: str, name: str, row):
        """Read a field's part of a row, whole blocks that hold its tokens."""
        field = run.wiring.storage.codecs[source].fields[name]
        tile = stored_tile(run, state, source, name, layer, row, start[row], size + block)
        if field.packed:
            return tile
        return jax.lax.bitcast_convert_type(tile, field.dtype)

    def payload(row):
        """Read all fields of a row, {source: {field: tile}}."""
        parts = {}
        for source, codec in run.wiring.storage.codecs.items():
            parts[source] = {name: read(source, name, row) for name in codec.fields}
        return parts

    maps = run.wiring.maps
    stored = jax.lax.map(payload, jnp.arange(batch))
    read_carry = {name: carry[name] for name in run.wiring.chain.read}
    sources, new_carry = maps.decode(maps.prepare(constants), stored, read_carry)
    carry = carry | {name: saturated(x, carry[name].dtype) for name, x in new_carry.items()}
    if maps.frame is not None:
        sources = {name: maps.frame.turn(constants, name, x, True) for name, x in sources.items()}

    def cut(x, offset):
        return jax.lax.dynamic_slice_in_dim(x, offset, size, 0)

    offsets = index[:, 0] - start
    return {name: jax.vmap(cut)(x, offsets) for name, x in sources.items()}, carry


def _exact_or(
    run: RunLayout,
    state: Run,
    layer: Int[Array, ""],
    source: str,
    index: Int[Array, "B T"],
    sinks: int,
    decoded: Float[Array, "B T W"],
) -> Float[Array, "B T W"]:
    """Take vectors from sinks and window where a row has not encoded them, and the others from
    `decoded`."""
    # A token that is encoded in one source alone stands in the window, there as decoded.
    encoded = body_tokens(run, state)[:, None]
    window = at_layer(state.window[source], layer)
    slots = jnp.expand_dims(modulo(index, run.ring), 2)
    vectors = jnp.take_along_axis(window, slots, axis=1).astype(decoded.dtype)
    vectors = jnp.where((index < encoded)[..., None], decoded, vectors)
    if not sinks:
        return vectors
    # Body tokens are numbered from the first one after the sinks.
    exact = at_layer(state.sinks[source], layer)
    places = jnp.clip(index + sinks, 0, sinks - 1)[..., None]
    first = jnp.take_along_axis(exact, places, axis=1).astype(decoded.dtype)
    return jnp.where((index < 0)[..., None], first, vectors)


def _grain(chunk: Cache) -> int:
    """Give the tokens that share numbers in any layer. Codes of different layers and sources may
    depend on each other, so that all of them move or none."""
    groups = []
    for run in runs_of(chunk.layout):
        for codec in run.wiring.storage.codecs.values():
            groups += [field.group for field in codec.fields.values()]
    return math.lcm(*groups)


def _with_codes(
    old: RunLayout, new: RunLayout, chunk: Run, state: Run, place: _Place, grain: int
) -> Run:
    """Put a chunk's codes in the place of those that the row made of decoded vectors.

    Args:
        old: The plan of the chunk's run.
        new: The plan of the row's run.
        chunk: The chunk's arrays.
        state: The row's arrays.
        place: Where the chunk's tokens stand.
        grain: The tokens that move together.

    Returns:
        The row's arrays."""
    if not old.slots or not new.slots:
        return state
    coded = body_tokens(old, chunk)
    first = jnp.maximum(place.first - place.sinks, 0)
    keeps_groups = jnp.equal(modulo(place.shift, grain), 0)
    # Exact keys: the row has them as they were turned.
    turned = new.wiring.maps.turned or ()

    def is_coded(row, tokens: Int[Array, " n"]) -> Bool[Array, " n"]:
        """Mark the row's body tokens whose codes the chunk has."""
        index = tokens - place.shift[row]
        group = jnp.floor_divide(index, grain) * grain
        return keeps_groups[row] & (group >= first[row]) & (index < coded[row])

    def tile(source, name, field, layer, row, token, size):
        row_tile = stored_tile(new, state, source, name, layer, row, token, size)
        if source in turned:
            return row_tile
        shift = place.shift[row]
        chunk_tile = stored_tile(old, chunk, source, name, layer, row, token - shift, size)
        return field.choose(is_coded(row, token + jnp.arange(size)), chunk_tile, row_tile)

    clocks = zip(new.wiring.storage.clocks, state.flushed, strict=True)
    encoded = tuple(count * clock.unit for clock, count in clocks)
    return state.replace(body=moved_body(new, encoded, tile))
