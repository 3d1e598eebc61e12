"""Unpack words to signposts inside a TPU kernel (KVQuant's non-uniform codes), as bfloat16 and exactly.

Two ways, the cheaper one by chip (benchmarks/records/tpu_bundles.json):

- by selection: the bits of a code choose among the 2^b signposts, two codes of a word at a time as 16-bit numbers;
- in pairs: two neighbouring codes of a word are one index into a table of pairs of signposts, a word of two bfloat16
  numbers each. The table lies along the lanes and is gathered from. For chips whose vector units compare 32 bits at a
  time.

Both yield two tokens a word, in an order of their own: `token_order` of two ways, or `pair_order`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kvqjax.ops.packing.words import PLANE, split_bits
from kvqjax.pallas_kernels.tpu.unpack import spread_sets

__all__ = ["chunks", "gathered", "pair_order", "pair_table"]

LANES = 128


def pair_order(base: int, block: int) -> np.ndarray:
    """Return the token at each position of `block` tokens that are unpacked in pairs, [block]: planes 2j and 2j + 1
    alternate."""
    planes = 32 // base
    plane = np.arange(planes).reshape(-1, 1, 2)
    order = (plane * PLANE + np.arange(PLANE)[None, :, None]).reshape(-1)
    return (np.arange(0, block, order.size)[:, None] + order[None]).reshape(-1)


def _places(bits: int) -> list[tuple[int, int, int]]:
    """List for every plane set its bits, the lowest bit of the code that it holds, and the first bit of its region of
    an index."""
    base, low, places = split_bits(bits)[0], 0, []
    for i, part in enumerate(split_bits(bits)):
        places.append((part, low, 2 * base * i))
        low += part
    return places


def pair_table(signposts: jax.Array, bits: int) -> jax.Array:
    """Return the table of pairs, uint32 [8, 128 or 256], from [2^b] signposts. Unreferenced entries are arbitrary."""
    base, index = split_bits(bits)[0], np.arange(max(LANES, 1 << 2 * bits if bits == 4 else 0))
    codes = [
        sum((index >> region + base * i & (1 << part) - 1) << low for part, low, region in _places(bits))
        for i in range(2)
    ]
    halves = jax.lax.bitcast_convert_type(signposts.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    row = halves[codes[0]] | (halves[codes[1]] << jnp.uint32(16))
    return jnp.broadcast_to(row[None], (8, row.size))


def chunks(words: list[jax.Array], bits: int, table, paired: bool):
    """Yield the signposts of a block's words, [rows, W] uint32 of each plane set, as successive bfloat16 [64, W].
    `table` is a reference to a `pair_table`, or to the signposts as float32 scalars [1, 2^b]."""
    base = split_bits(bits)[0]
    for block in spread_sets(words, bits, base):
        if paired:
            for first in range(0, 32, 2 * base):
                yield pltpu.bitcast(gathered(_pair_index(block, bits, first), table), jnp.bfloat16)
        else:
            for first in range(0, 16, base):
                yield _selected(block, bits, first, table)


def _selected(block, bits: int, first: int, table) -> jax.Array:
    """Select the signposts of the codes whose lowest bit lies `first` bits up in both halves of the words."""
    tests = []
    for words, part in zip(block, split_bits(bits), strict=True):
        half = pltpu.bitcast(words >> jnp.uint32(first), jnp.int16)
        tests += [(half & jnp.int16(1 << i)) != 0 for i in range(part)]
    numbers = [jnp.full((1, 1), table[0, i]).astype(jnp.bfloat16) for i in range(1 << bits)]
    chosen = [jnp.broadcast_to(x, tests[0].shape) for x in numbers]
    for test in tests:
        chosen = [jnp.where(test, high, low) for low, high in zip(chosen[::2], chosen[1::2], strict=True)]
    return chosen[0]


def _pair_index(block, bits: int, first: int) -> jax.Array:
    """Return the index of the pair of codes that begins `first` bits up in every word."""
    base, index = split_bits(bits)[0], jnp.uint32(0)
    for words, (part, _, region) in zip(block, _places(bits), strict=True):
        mask = ((1 << part) - 1) * (1 | 1 << base) << region
        shift = first - region
        shifted = words >> jnp.uint32(shift) if shift >= 0 else words << jnp.uint32(-shift)
        index = index | (shifted & jnp.uint32(mask))
    return index.astype(jnp.int32)


def gathered(index: jax.Array, table) -> jax.Array:
    """Return table[index], a register of 8 rows of 128 lanes at a time; a table of 256 is gathered from twice."""
    rows = []
    for row in range(0, index.shape[0], 8):
        pieces = [_look_up(index[row : row + 8, i : i + LANES], table) for i in range(0, index.shape[1], LANES)]
        rows.append(jnp.concatenate(pieces, axis=1))
    return jnp.concatenate(rows)


def _look_up(index: jax.Array, table) -> jax.Array:
    """Return table[index] for one register of indices, [8, 128]."""
    take = {"axis": 1, "mode": "promise_in_bounds"}
    if table.shape[1] == LANES:
        return jnp.take_along_axis(table[...], index, **take)
    within = index & jnp.int32(LANES - 1)
    low, high = (jnp.take_along_axis(table[:, i : i + LANES], within, **take) for i in (0, LANES))
    return jnp.where(index >= LANES, high, low)
