"""The body of the TPU kernel on AQUA-KV's bodies: one tile of tokens.

`predicted` has the mathematics and the shapes of the operands. A grid step reconstructs the keys,
then the values of its tile chunk by chunk, from those of the layer below and from the codes. Then
it attends to the tile.

Shapes in comments: P lane groups of 256 lanes, M query rows of each (a multiple of 8), S tokens of
the tile, C of a chunk, W channels of a token. A column is 256 channels, whose codes are 128, one
for each pair of channels. Scores are base-2 logarithms."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvqjax.ops.packing.base import from_bits
from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, loop
from kvqjax.pallas_kernels.tpu.higgs_lookup import by_steps
from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.predicted_plan import COLUMN, STEP
from kvqjax.pallas_kernels.tpu.rope import turned
from kvqjax.pallas_kernels.tpu.softmax import empty, over_tiles, to_weights
from kvqjax.pallas_kernels.tpu.tile import NEVER, write_limits

PIECE = 16  # tokens whose predictions and residuals are added at a time: the rows of a register of bfloat16


def kernel(refs: Refs, ends, plan):
    """Attend to one tile. The keys and values that it reconstructs replace those of the layer
    below.

    Args:
        refs: The kernel's references, as declared in `predicted`. `keys` and `values` are pairs of
            references [1, S, W]: those of the layer below, which are read, and this layer's, which
            are written.
        ends: First visible tile, one past the last, and the last tile to fetch, of every row
            (`rows.tile_ends`).
        plan: The call's plan. The grid is (row, tile)."""

    row = pl.program_id(0)

    def begin():
        empty(refs)

        # Of a row that sees no token one tile is fetched and written back all the same. It must not
        # be what happens to stand in memory.
        @pl.when(ends[row, 0] >= ends[row, 1])
        def _():
            for _, target in (refs.keys, refs.values):
                target[...] = jnp.zeros(target.shape, target.dtype)

    def work(tile):
        write_limits(refs, plan, tile)
        _reconstruct(refs, plan, "key", refs.keys[1], (refs.keys[0],))
        _reconstruct(refs, plan, "value", refs.values[1], (refs.keys[1], refs.values[0]))
        # All scores of the tile come before its values, so that the running sums are rescaled once
        # a tile.
        refs.top[...] = jnp.full(refs.top.shape, NEVER)
        loop(plan.blocks * plan.lane_groups, functools.partial(_score, refs, plan))
        to_weights(refs)
        loop(plan.lane_groups, functools.partial(_sum_values, refs, plan))

    over_tiles(refs, ends, work, begin)


def _reconstruct(refs: Refs, plan, source: str, target, inputs):
    """Write the tile's keys or values.

    Args:
        refs: The kernel's references.
        plan: The call's plan.
        source: "key" or "value".
        target: Reference to what is written, [1, S, W].
        inputs: References to what the layer's map predicts from, [1, S, W] each."""
    body, codes = refs.body, plan.spec.codes
    bits, scale = getattr(codes, f"{source}_bits"), getattr(body, f"{source}_scale")
    predict = functools.partial(_predict, refs, plan, source, inputs)

    def use(chunk, first, words):
        """Write the residuals, before H_n and the scale, and the predictions of some columns from
        `first` on."""
        for i in range(plan.beside):
            # The matrix unit takes bfloat16, which holds 8 of the 15 bits of a number. So a number
            # is a sum of two (`_numbers`), and the column's transform is one product for each.
            lanes = aligned(first + i, COLUMN)
            for number, part in enumerate(_numbers(words[:, i * LANES : (i + 1) * LANES])):
                product = dot(part, refs.transform[...], 0)
                refs.residuals[:, lanes] = product + refs.residuals[:, lanes] if number else product
            if plan.spec.mapped:
                predict(chunk, lanes)

    begin = functools.partial(_spread_scales, refs, plan, scale)
    end = functools.partial(_add, refs, plan, source, target)
    tables, words = getattr(refs, f"{source}_words"), getattr(body, f"{source}_codes")
    by_steps(refs.words, plan, words, tables, bits, plan.beside, begin, use, end)


def _numbers(words) -> list:
    """Split words of two 16-bit integers each, [C, 128], into numbers that bfloat16 holds exactly.

    Returns:
        Two arrays [C, 256] bfloat16 whose sum are the integers: those in low halves of words, then
        those in high halves. They are multiples of STEP, and less than 2^15 in size."""
    words = pltpu.bitcast(words, jnp.int32)
    # The arithmetic shift to the right extends the sign of either half.
    integers = [half.astype(jnp.float32) for half in ((words << 16) >> 16, words >> 16)]
    # The upper 16 bits of a float32 number are a bfloat16 number: its 8 leading bits. What is left
    # has 7 bits.
    tops = [
        pltpu.bitcast(pltpu.bitcast(x, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32)
        for x in integers
    ]
    parts = tops, [x - top for x, top in zip(integers, tops, strict=True)]
    return [jnp.concatenate([x.astype(jnp.bfloat16) for x in part], axis=1) for part in parts]


def _predict(refs: Refs, plan, source: str, inputs, chunk, lanes):
    """Write the predictions of the 256 channels `lanes` of a chunk, without the bias.

    The map's rows are the channels of all `inputs`, one input after the other. They are multiplied
    `plan.depth` at a time."""
    weight, tokens, depth = getattr(refs, f"{source}_map"), aligned(chunk, plan.chunk), plan.depth
    for first in range(0, plan.spec.width * len(inputs), depth):
        number, channel = divmod(first, plan.spec.width)
        product = dot(
            inputs[number][0, tokens, channel : channel + depth],
            weight[first : first + depth, lanes],
            0,
        )
        refs.predictions[:, lanes] = product + refs.predictions[:, lanes] if first else product


def _spread_scales(refs: Refs, plan, scale, chunk):
    """Write a chunk's scales to all lanes of their tokens' rows: [groups, C] to [groups, C, 128].

    They come with what the transform leaves out. Integers count in units of STEP, and H H^T = h I
    for groups of h channels."""
    codes, columns = plan.spec.codes, plan.chunk // LANES

    def step(number):
        """Write the scales of 128 tokens."""
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
        scales = from_bits(
            scale[0, 0, :, aligned(chunk * columns + number, LANES)], codes.scales
        ).astype(jnp.float32)
        for group in range(codes.groups):
            # Tokens lie on the lanes of `scales`, and must come to lie on the rows. A transposition
            # would move every number by itself. The diagonal matrix times ones puts each token's
            # scale on all lanes of its row. A sum of one number and zeros rounds nothing.
            diagonal = jnp.where(
                row == lane, jnp.broadcast_to(scales[group : group + 1], (LANES, LANES)), 0.0
            )
            by_row = dot(diagonal.astype(jnp.bfloat16), jnp.ones((LANES, LANES), jnp.bfloat16), 0)
            refs.scales[group, aligned(number, LANES)] = by_row * (STEP / codes.group)

    loop(columns, step)


def _mix(columns: list) -> list:
    """Multiply 2^n arrays by Sylvester's matrix H_{2^n} = H_2 (x) H_{2^(n-1)}: their sums and
    differences."""
    if len(columns) == 1:
        return columns
    middle = len(columns) // 2
    first, second = _mix(columns[:middle]), _mix(columns[middle:])
    sums = [a + b for a, b in zip(first, second, strict=True)]
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return sums + differences


def _add(refs: Refs, plan, source: str, target, chunk):
    """Add residuals and predictions of a chunk and write the sums into `target`, [1, S, W]."""
    columns = plan.spec.codes.group // COLUMN

    def step(piece):
        rows, tokens = aligned(piece, PIECE), aligned(chunk * (plan.chunk // PIECE) + piece, PIECE)
        for group in range(plan.spec.codes.groups):
            lanes = [
                slice(i * COLUMN, (i + 1) * COLUMN)
                for i in range(group * columns, (group + 1) * columns)
            ]
            # H of a group is H_n (x) H_256. `_reconstruct` has applied H_256 within every column.
            # H_n mixes the n columns of the group.
            scale = jnp.concatenate([refs.scales[group, rows]] * (COLUMN // LANES), axis=1)
            residuals = _mix([refs.residuals[rows, part] for part in lanes])
            for part, residual in zip(lanes, residuals, strict=True):
                total = residual * scale
                if plan.spec.mapped:
                    total = (
                        refs.predictions[rows, part]
                        + getattr(refs, f"{source}_bias")[:, part]
                        + total
                    )
                target[0, tokens, part] = total.astype(jnp.bfloat16)

    loop(plan.chunk // PIECE, step)


def _score(refs: Refs, plan, number):
    """Write the scores of a chunk's tokens and a lane group's queries, and raise `top` to their
    maximum.

    `number` counts lane groups within chunks. Keys are multiplied by cos and sin of their offsets
    in the chunk. They meet queries that were turned back to the chunk's first position (`rope`)."""
    chunk = jax.lax.div(number, jnp.int32(plan.lane_groups))
    group = jax.lax.rem(number, jnp.int32(plan.lane_groups))
    tokens, rows = aligned(chunk, plan.chunk), aligned(group, plan.rows)
    score_scale = LOG2E * plan.spec.head_dim**-0.5 * plan.spec.rope.factor
    queries = jnp.concatenate(turned(refs, plan, group, chunk), axis=1) * score_scale  # y | y~
    keys = refs.keys[1][0, tokens, aligned(group, plan.lanes)].astype(refs.table.dtype)
    turns = refs.table[:, :LANES], refs.table[:, LANES:]  # cos, sin
    # Every 128 channels of a lane group have the same rates, so that 128 lanes of cos and of sin
    # serve all of them.
    firsts = range(0, plan.lanes, LANES)
    turned_keys = [keys[:, first : first + LANES] * turn for turn in turns for first in firsts]
    queries = queries.astype(jnp.bfloat16)
    # Keys times cos | keys times sin.
    waves = jnp.concatenate(turned_keys, axis=1).astype(jnp.bfloat16)
    scores = dot(queries, waves, 1)
    # The limit of a token that a query does not see is NEVER, of other tokens infinity.
    scores = jnp.minimum(scores, refs.limits[:, tokens])
    refs.scores[rows, tokens] = scores
    refs.top[rows] = jnp.maximum(refs.top[rows], scores.max(-1, keepdims=True))


def _sum_values(refs: Refs, plan, group):
    """Add the tile's weighted values of a lane group to the running sums."""
    # `to_weights` has turned `scores` into softmax weights, and `top` into the factor that rescales
    # running sums.
    rows = aligned(group, plan.rows)
    product = dot(
        refs.scores[rows].astype(jnp.bfloat16), refs.values[1][0, :, aligned(group, plan.lanes)], 0
    )
    refs.out[0, rows] = refs.out[0, rows] * refs.top[rows] + product
