"""The body of the TPU kernel on AQUA-KV's bodies: one tile of tokens (see `predicted` for the mathematics and for the
shapes of the operands).

Shapes in comments: P lane groups of 256 lanes, M query rows of each (a multiple of 8), S tokens of the tile, C of a
chunk, W channels of a token. Scores are base-2 logarithms."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvqjax.ops.packing.words import from_bits
from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, loop
from kvqjax.pallas_kernels.tpu.higgs_lookup import by_steps
from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.predicted_plan import COLUMN, STEP
from kvqjax.pallas_kernels.tpu.rope import turned
from kvqjax.pallas_kernels.tpu.softmax import empty, over_tiles, to_weights
from kvqjax.pallas_kernels.tpu.tile import NEVER, write_limits

__all__ = ["kernel"]

PIECE = 16  # tokens whose predictions and residuals are added at a time: registers of bfloat16


def kernel(refs: Refs, ends, plan):
    """Attend to one tile, and put what it reconstructs in the place of what the layer below did. Grid (row, tile);
    `refs` as declared in `predicted`, `ends` from `rows.tile_ends`."""

    row = pl.program_id(0)

    def begin():
        empty(refs)

        @pl.when(ends[0, row] >= ends[1, row])
        def _():  # of a row that sees nothing a tile is fetched, and written back, all the same
            for _, new in (refs.keys, refs.values):
                new[...] = jnp.zeros(new.shape, new.dtype)

    def work(tile):
        write_limits(refs, plan, tile)
        _reconstruct(refs, plan, "key", refs.keys[1], (refs.keys[0],))
        _reconstruct(refs, plan, "value", refs.values[1], (refs.keys[1], refs.values[0]))
        # All of a tile's scores come first, so that its running sums are rescaled once.
        refs.top[...] = jnp.full(refs.top.shape, NEVER)
        loop(plan.blocks * plan.lane_groups, functools.partial(_score, refs, plan))
        to_weights(refs)
        loop(plan.lane_groups, functools.partial(_sum_values, refs, plan))

    over_tiles(refs, ends, work, begin)


def _reconstruct(refs: Refs, plan, source: str, new, inputs):
    """Write the tile's keys or values into `new` [1, S, W], predicted from `inputs`, [1, S, W] each."""
    body, codes = refs.body, plan.spec.codes
    bits, scale = getattr(codes, f"{source}_bits"), getattr(body, f"{source}_scale")
    predict = functools.partial(_predict, refs, plan, source, inputs)

    # A column is turned back by one product for each of the two pieces of its numbers, which are exact in bfloat16.
    # Its prediction is made beside it, since both meet in `_add`.
    def use(chunk, first, words):
        for i in range(plan.beside):
            lanes = aligned(first + i, COLUMN)
            for number, part in enumerate(_numbers(words[:, i * LANES : (i + 1) * LANES])):
                product = dot(part, refs.transform[...], 0)
                refs.residuals[:, lanes] = product + refs.residuals[:, lanes] if number else product
            if plan.spec.mapped:
                predict(chunk, lanes)

    begin, end = functools.partial(_spread_scales, refs, plan, scale), functools.partial(_add, refs, plan, source, new)
    tables, words = getattr(refs, f"{source}_words"), getattr(body, f"{source}_codes")
    by_steps(refs.words, plan, words, tables, bits, plan.beside, begin, use, end)


def _numbers(words) -> list:
    """Split words of two integers of 16 bits, [C, 128]: all low ones, then all high ones, as two arrays of bfloat16
    numbers that add up to them, [C, 256] each."""
    words = pltpu.bitcast(words, jnp.int32)
    wide = [half.astype(jnp.float32) for half in ((words << 16) >> 16, words >> 16)]
    tops = [pltpu.bitcast(pltpu.bitcast(x, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32) for x in wide]
    parts = tops, [x - top for x, top in zip(wide, tops, strict=True)]
    return [jnp.concatenate([x.astype(jnp.bfloat16) for x in part], axis=1) for part in parts]


def _predict(refs: Refs, plan, source: str, inputs, chunk, lanes):
    """Write what is predicted of 256 channels of a chunk, but for the bias."""
    weight, tokens, depth = getattr(refs, f"{source}_map"), aligned(chunk, plan.chunk), plan.depth
    for first in range(0, plan.spec.width * len(inputs), depth):
        number, inner = divmod(first, plan.spec.width)
        product = dot(inputs[number][0, tokens, inner : inner + depth], weight[first : first + depth, lanes], 0)
        refs.predictions[:, lanes] = product + refs.predictions[:, lanes] if first else product


def _spread_scales(refs: Refs, plan, scale, chunk):
    """Write a chunk's scales on all lanes of a register: [groups, C] to [groups, C, 128]. Products with 1 are exact."""
    codes, columns = plan.spec.codes, plan.chunk // LANES

    def step(number):
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
        stored = from_bits(scale[0, 0, :, aligned(chunk * columns + number, LANES)], codes.scales).astype(jnp.float32)
        for group in range(codes.groups):
            diagonal = jnp.where(row == lane, jnp.broadcast_to(stored[group : group + 1], (LANES, LANES)), 0.0)
            # A transposition would move every number by itself. The product puts each token's scale on all its lanes.
            spread = dot(diagonal.astype(jnp.bfloat16), jnp.ones((LANES, LANES), jnp.bfloat16), 0)
            refs.scales[group, aligned(number, LANES)] = spread * (STEP / codes.group)

    loop(columns, step)


def _mixed(columns: list) -> list:
    """Multiply a list of 2^n arrays by Sylvester's matrix."""
    if len(columns) == 1:
        return columns
    first, second = (_mixed(half) for half in (columns[: len(columns) // 2], columns[len(columns) // 2 :]))
    return [a + b for a, b in zip(first, second, strict=True)] + [a - b for a, b in zip(first, second, strict=True)]


def _add(refs: Refs, plan, source: str, new, chunk):
    """Add residuals and predictions of a chunk and write the sums into `new`."""
    columns = plan.spec.codes.group // COLUMN

    def step(piece):
        rows, tokens = aligned(piece, PIECE), aligned(chunk * (plan.chunk // PIECE) + piece, PIECE)
        for group in range(plan.spec.codes.groups):
            lanes = [slice(i * COLUMN, (i + 1) * COLUMN) for i in range(group * columns, (group + 1) * columns)]
            # Sylvester's matrix of a group's columns comes after that of 256 within each (`_reconstruct`).
            scale = jnp.concatenate([refs.scales[group, rows]] * (COLUMN // LANES), axis=1)
            for part, mixed in zip(lanes, _mixed([refs.residuals[rows, part] for part in lanes]), strict=True):
                total = mixed * scale
                if plan.spec.mapped:
                    total = refs.predictions[rows, part] + getattr(refs, f"{source}_bias")[:, part] + total
                new[0, tokens, part] = total.astype(jnp.bfloat16)

    loop(plan.chunk // PIECE, step)


def _score(refs: Refs, plan, number):
    """Write the scores of a lane group and a chunk, and raise `top` to them. Keys are multiplied by cos and sin of
    their offsets in the chunk, and meet the queries that were turned back to its first position (`rope`)."""
    chunk, group = (f(number, jnp.int32(plan.lane_groups)) for f in (jax.lax.div, jax.lax.rem))
    tokens, rows = aligned(chunk, plan.chunk), aligned(group, plan.rows)
    spread = LOG2E * plan.spec.head_dim**-0.5 * plan.spec.rope.factor
    queries = jnp.concatenate(turned(refs, plan, group, chunk), axis=1) * spread
    keys = refs.keys[1][0, tokens, aligned(group, plan.lanes)].astype(refs.table.dtype)
    turns = refs.table[:, :LANES], refs.table[:, LANES:]
    waves = [keys[:, first : first + LANES] * turn for turn in turns for first in range(0, plan.lanes, LANES)]
    scores = dot(queries.astype(jnp.bfloat16), jnp.concatenate(waves, axis=1).astype(jnp.bfloat16), 1)
    # Tokens that a query does not see have a limit of NEVER, the others none.
    scores = jnp.minimum(scores, refs.limits[:, tokens])
    refs.scores[rows, tokens] = scores
    refs.top[rows] = jnp.maximum(refs.top[rows], scores.max(-1, keepdims=True))


def _sum_values(refs: Refs, plan, group):
    """Add the tile's weighted values of a lane group to the running sums."""
    rows = aligned(group, plan.rows)
    product = dot(refs.scores[rows].astype(jnp.bfloat16), refs.values[1][0, :, aligned(group, plan.lanes)], 0)
    refs.out[0, rows] = refs.out[0, rows] * refs.top[rows] + product
