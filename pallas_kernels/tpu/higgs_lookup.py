"""Look the codes of a tile up in the grid, chunk by chunk, for the TPU kernel on HIGGS bodies (see
`higgs`).

A tile's codes lie in columns of 128 codes. A chunk is `plan.chunk` tokens, C in shapes, that are
looked up together. A step looks up some columns of a chunk."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.ops.packing.base import PLANE, split_bits
from kvqjax.pallas_kernels.tpu.columns import aligned, loop, quotient
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.signposts import gathered


def _planes(ref, part: int, count: int, lanes, chunk):
    """Yield the codes' bits in one plane set, plane by plane.

    Args:
        ref: Reference to the words of the plane set, [1, 1, rows, all lanes] uint32.
        part: Bits of a code that the plane set holds.
        count: Planes of 32 tokens that a chunk has.
        lanes: The slice of 128 lanes.

    Yields:
        Words [32, 128] uint32 whose lowest `part` bits are those of one plane. The bits above are
        arbitrary."""
    # A block is 32 rows of words. Its `planes` planes are part of a chunk, or those of several
    # chunks.
    planes = 32 // part
    blocks = max(1, count * part // 32)  # that a chunk reaches
    first = quotient(chunk * part * count, 32) * PLANE
    # The chunk's first bit in the words of a block that holds several chunks.
    place = jax.lax.rem(chunk, jnp.int32(max(1, planes // count))) * (count * part)
    for block in range(blocks):
        words = ref[0, 0, pl.ds(pl.multiple_of(first + block * PLANE, PLANE), PLANE), lanes]
        words = words >> place.astype(jnp.uint32) if planes > count else words
        for plane in range(min(planes, count)):
            yield words >> jnp.uint32(plane * part) if plane else words


def _numbers(words, table, bits: int, count: int, lanes, chunk):
    """Look up the codes of a chunk on 128 lanes.

    Args:
        words: References to the words of each plane set.
        table: Reference to the grid, [8, 128 or 256] uint32: a point's two numbers as the halves of
            a word.
        count: Planes of 32 tokens that a chunk has.
        lanes: The slice of 128 lanes.

    Returns:
        Words of two numbers, [C, 128] uint32."""
    parts = split_bits(bits)
    sets = [_planes(ref, part, count, lanes, chunk) for ref, part in zip(words, parts, strict=True)]
    numbers = []
    for fields in zip(*sets, strict=True):
        pieces, low = [], 0  # the first plane set has the lowest bits of a code
        for field, part in zip(fields, parts, strict=True):
            piece = field & jnp.uint32((1 << part) - 1)
            pieces.append(piece << jnp.uint32(low) if low else piece)
            low += part
        numbers.append(gathered(functools.reduce(operator.or_, pieces).astype(jnp.int32), table))
    return jnp.concatenate(numbers)


def by_steps(numbers, plan, codes, table, bits: int, beside: int, begin, use, end) -> None:
    """Work off a tile chunk by chunk, and a chunk in steps of several columns.

    For every chunk this calls `begin(chunk)`, then `use` once a step, then `end(chunk)`. The
    numbers of a step are looked up while `use` works on the step before it: the two keep different
    units of the chip busy.

    Args:
        numbers: Reference [2, C, beside * 128] uint32 to memory for two steps: one in use, one
            being looked up.
        plan: Has tile, chunk and parts, the number of columns.
        codes: References to the words of each plane set.
        table: Reference to the grid, [8, 128 or 256] uint32: a point's two numbers as the halves of
            a word.
        beside: Columns of a step.
        begin: Called as `begin(chunk)`.
        use: Called as `use(chunk, first, words)`. `first` is the number of the step's first column,
            `words` a reference [C, beside * 128] to the numbers of its columns.
        end: Called as `end(chunk)`."""
    steps = plan.parts // beside  # of a chunk
    last = plan.tile // plan.chunk * steps - 1

    # Steps are numbered through the tile. Even ones use the first half of `numbers`, odd ones the
    # second half.
    def look_up(number):
        chunk, first = quotient(number, steps), jax.lax.rem(number, jnp.int32(steps)) * beside
        for i in range(beside):
            words = _numbers(
                codes, table, bits, plan.chunk // PLANE, aligned(first + i, LANES), chunk
            )
            numbers[jax.lax.rem(number, jnp.int32(2)), :, i * LANES : (i + 1) * LANES] = words

    def step(chunk, turn):
        number = chunk * steps + turn
        use(chunk, turn * beside, numbers.at[jax.lax.rem(number, jnp.int32(2))])
        # After the last step it is looked up once more, which does no harm and needs no branch.
        look_up(jnp.minimum(number + 1, last))

    def visit(chunk):
        begin(chunk)
        if steps == 1:  # all that is done for a chunk can be scheduled together
            step(chunk, jnp.int32(0))
        else:
            loop(steps, functools.partial(step, chunk))
        end(chunk)

    look_up(jnp.int32(0))
    loop(plan.tile // plan.chunk, visit)
