"""Unpack words to signposts inside a TPU kernel (KVQuant's non-uniform codes). The bfloat16
signposts come out exactly.

There are two ways. Which one is cheaper depends on the chip (benchmarks/records/tpu_bundles.json):

- by selection: The bits of a code choose among the 2^b signposts, bit after bit. Two codes of a
  word are treated at a time, as 16-bit numbers.
- in pairs: Two neighbouring codes of a word are one index into a table of pairs of signposts. An
  entry of the table is a word of two bfloat16 numbers. The table lies along the lanes and is
  gathered from. This is for chips whose vector units compare 32 bits at a time.

Both ways yield two tokens a word. Selection yields tokens in the `token_order` of ways = 2, pairs
in `pair_order`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kvqjax.ops.packing.base import PLANE, split_bits
from kvqjax.pallas_kernels.tpu.unpack import spread_sets

MOST_ENTRIES = 128  # the most entries of a table that one gather reaches


def pair_order(base: int, block: int) -> np.ndarray:
    """Return the token at each position of `block` tokens that are unpacked in pairs, [block]:
    planes 2j and 2j + 1 alternate."""
    planes = 32 // base
    # Axes: pair of planes, row of words, member of the pair.
    plane = np.arange(planes).reshape(-1, 1, 2)
    row = np.arange(PLANE)[None, :, None]
    order = (plane * PLANE + row).reshape(-1)
    # The order repeats itself for every stretch of tokens that share words.
    first = np.arange(0, block, order.size)
    return (first[:, None] + order[None]).reshape(-1)


def _places(bits: int) -> list[tuple[int, int, int]]:
    """Say where the bits of two codes lie in an index of the table of pairs.

    An index has a region of 2 * base bits for each plane set. In it the bits of both codes lie as
    they lie in the set's words: `base` bits apart.

    Returns:
        (bits of the set, lowest bit of the code that the set holds, first bit of the set's region),
        for every plane set."""
    parts = split_bits(bits)
    base = parts[0]
    places = []
    low = 0
    for i, part in enumerate(parts):
        region = 2 * base * i
        places.append((part, low, region))
        low += part
    return places


def pair_table(signposts: jax.Array, bits: int) -> jax.Array:
    """Make the table of pairs.

    Args:
        signposts: [2^bits] numbers that codes stand for.

    Returns:
        [8, 128 or 256] uint32, all rows equal: at each index the signposts of its two codes,
        rounded to bfloat16, the first one's in the lower half. Entries that no index of two codes
        names are arbitrary."""
    base = split_bits(bits)[0]
    # Two codes of 4 bits make 256 indices. Those of fewer bits fit 128.
    index = np.arange(1 << 2 * bits if bits == 4 else MOST_ENTRIES)

    def code(member: int):
        """Take the first (0) or second code (1) out of every index."""
        codes = np.zeros_like(index)
        for part, low, region in _places(bits):
            bits_of_set = (index >> region + base * member) & ((1 << part) - 1)
            codes |= bits_of_set << low
        return codes

    rounded = signposts.astype(jnp.bfloat16)
    halves = jax.lax.bitcast_convert_type(rounded, jnp.uint16).astype(jnp.uint32)
    row = halves[code(0)] | (halves[code(1)] << jnp.uint32(16))
    return jnp.broadcast_to(row[None], (8, row.size))


def chunks(words: list[jax.Array], bits: int, table, paired: bool):
    """Yield the signposts of a block's words, as successive bfloat16 [64, W].

    Args:
        words: [rows, W] uint32 of each plane set.
        table: A reference to a `pair_table` if `paired`, else to the signposts as float32 scalars
            [1, 2^bits].
        paired: Whether two codes are looked up at a time."""
    base = split_bits(bits)[0]
    for block in spread_sets(words, bits, base):
        if paired:
            for first in range(0, 32, 2 * base):
                index = _pair_index(block, bits, first)
                yield pltpu.bitcast(gathered(index, table), jnp.bfloat16)
        else:
            for first in range(0, 16, base):
                yield _selected(block, bits, first, table)


def _selected(block, bits: int, first: int, table) -> jax.Array:
    """Select the signposts of the codes whose lowest bit lies `first` bits up in both halves of the
    words."""
    is_set = []  # a mask for each bit of the code, the lowest bit first
    for words, part in zip(block, split_bits(bits), strict=True):
        half = pltpu.bitcast(words >> jnp.uint32(first), jnp.int16)
        is_set += [(half & jnp.int16(1 << i)) != 0 for i in range(part)]
    numbers = [jnp.full((1, 1), table[0, i]).astype(jnp.bfloat16) for i in range(1 << bits)]
    candidates = [jnp.broadcast_to(x, is_set[0].shape) for x in numbers]
    # Each bit halves the candidates: the lowest bit decides between neighbours.
    for mask in is_set:
        neighbours = zip(candidates[::2], candidates[1::2], strict=True)
        candidates = [jnp.where(mask, high, low) for low, high in neighbours]
    return candidates[0]


def _pair_index(block, bits: int, first: int) -> jax.Array:
    """Return the index of the pair of codes that begins `first` bits up in every word."""
    base = split_bits(bits)[0]
    index = jnp.uint32(0)
    for words, (part, _, region) in zip(block, _places(bits), strict=True):
        both_codes = 1 | 1 << base  # a factor that repeats a mask `base` bits further up
        mask = ((1 << part) - 1) * both_codes << region
        shift = first - region  # down, or up where the region lies higher than the codes
        if shift >= 0:
            shifted = words >> jnp.uint32(shift)
        else:
            shifted = words << jnp.uint32(-shift)
        index = index | (shifted & jnp.uint32(mask))
    return index.astype(jnp.int32)


def gathered(index: jax.Array, table) -> jax.Array:
    """Return table[index], [rows, W] like `index`. It is looked up one register, 8 rows of 128
    lanes, at a time."""
    height, width = index.shape
    rows = []
    for row in range(0, height, 8):
        pieces = []
        for lane in range(0, width, MOST_ENTRIES):
            register = index[row : row + 8, lane : lane + MOST_ENTRIES]
            pieces.append(_look_up(register, table))
        rows.append(jnp.concatenate(pieces, axis=1))
    return jnp.concatenate(rows)


def _look_up(index: jax.Array, table) -> jax.Array:
    """Return table[index] for one register of indices, [8, 128]."""
    take = {"axis": 1, "mode": "promise_in_bounds"}
    if table.shape[1] == MOST_ENTRIES:
        return jnp.take_along_axis(table[...], index, **take)
    # A gather reaches 128 lanes. A table of 256 entries is gathered from twice.
    within = index & jnp.int32(MOST_ENTRIES - 1)
    low = jnp.take_along_axis(table[:, :MOST_ENTRIES], within, **take)
    high = jnp.take_along_axis(table[:, MOST_ENTRIES:], within, **take)
    return jnp.where(index >= MOST_ENTRIES, high, low)
