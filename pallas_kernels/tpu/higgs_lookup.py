"""Look the codes of a tile up in the grid, chunk by chunk, for the TPU kernel on HIGGS bodies (see `higgs`)."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.ops.packing.words import PLANE, split_bits
from kvqjax.pallas_kernels.tpu.columns import aligned, loop, quotient
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.signposts import gathered

__all__ = ["by_steps"]


def _planes(ref, part: int, count: int, lanes, chunk):
    """Yield the fields of `part` bits of a chunk's `count` planes of 32 tokens, [32, 128] each. Bits above the field
    are arbitrary."""
    blocks, planes = max(1, count * part // 32), 32 // part  # of words that a chunk reaches, planes in a block
    first = quotient(chunk * part * count, 32) * PLANE
    place = jax.lax.rem(chunk, jnp.int32(max(1, planes // count))) * (count * part)  # where a block has more
    for block in range(blocks):
        words = ref[0, 0, pl.ds(pl.multiple_of(first + block * PLANE, PLANE), PLANE), lanes]
        words = words >> place.astype(jnp.uint32) if planes > count else words
        for plane in range(min(planes, count)):
            yield words >> jnp.uint32(plane * part) if plane else words


def _numbers(words, table, bits: int, count: int, lanes, chunk):
    """Look up the codes of a chunk of `count` planes on 128 lanes: words of two numbers, [C, 128] uint32."""
    parts = split_bits(bits)
    sets, numbers = [_planes(ref, part, count, lanes, chunk) for ref, part in zip(words, parts, strict=True)], []
    for fields in zip(*sets, strict=True):
        pieces, low = [], 0
        for field, part in zip(fields, parts, strict=True):
            piece = field & jnp.uint32((1 << part) - 1)
            pieces.append(piece << jnp.uint32(low) if low else piece)
            low += part
        numbers.append(gathered(functools.reduce(operator.or_, pieces).astype(jnp.int32), table))
    return jnp.concatenate(numbers)


def by_steps(numbers, plan, codes, table, bits: int, beside: int, begin, use, end) -> None:
    """Call, for every chunk, `begin(chunk)`, then `use(chunk, first, words)` for every `beside` columns from `first`
    on, then `end(chunk)`. `words` [C, beside * 128] are the numbers of these columns. They were looked up one step
    before, into the half of `numbers` that is not in use: looking up keeps other units busy than `use` does."""
    steps = plan.parts // beside
    last = plan.tile // plan.chunk * steps - 1

    def look_up(number):
        chunk, first = quotient(number, steps), jax.lax.rem(number, jnp.int32(steps)) * beside
        for i in range(beside):
            words = _numbers(codes, table, bits, plan.chunk // PLANE, aligned(first + i, LANES), chunk)
            numbers[jax.lax.rem(number, jnp.int32(2)), :, i * LANES : (i + 1) * LANES] = words

    def step(chunk, turn):
        number = chunk * steps + turn
        use(chunk, turn * beside, numbers.at[jax.lax.rem(number, jnp.int32(2))])
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
