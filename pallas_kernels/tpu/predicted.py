"""Decode attention on AQUA-KV's bodies as a Pallas TPU kernel.

The grid is (row, tile). Tile by tile, keys and values are predicted from those of the layer below,
corrected by their codes, and attended to. They are written over those of the layer below, for the
layer above. Per chunk of a tile's tokens, for keys and then for values:

    z = y H_256                                    on the matrix unit, for every column of 128 codes, y from the grid
    x = x_below A + a + s (H_n z) / h              H_n: sums and differences of columns; s: the scale of h channels

x is rounded to bfloat16. Then all queries attend to the tile, whose keys are turned by tables of
offsets as in `rope`. The plain path computes the same numbers, but its products sum in another
order, so that a number may round to its neighbour."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.packed import row_slots
from kvqjax.pallas_kernels.predicted import PredictedBody, PredictedSpec
from kvqjax.pallas_kernels.tpu.call import (
    InPlace,
    Operand,
    by_row,
    by_tile,
    constant,
    fetched,
    invoke,
    memory,
    of_body,
)
from kvqjax.pallas_kernels.tpu.higgs import turned_grid
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.predicted_kernel import kernel
from kvqjax.pallas_kernels.tpu.predicted_plan import STEP, PredictedPlan, plan_predicted
from kvqjax.pallas_kernels.tpu.rope import turns
from kvqjax.pallas_kernels.tpu.rows import collect, lane_queries, row_bounds, tile_ends


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PredictedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PredictedSpec,
    *,
    carry: dict[str, Float[Array, "B S W"]],
    tile: int | None = None,
    pages: Int[Array, "B N"] | None = None,
    interpret: object = False,
) -> tuple[Partial, dict[str, Float[Array, "B S W"]]]:
    """Attend as `reference.packed_attention` does, with queries and turned keys rounded to
    bfloat16.

    Args:
        q: The queries.
        body: The codes and maps.
        layer: Number of the layer in the body.
        start: First token that each query sees.
        stop: One past the last token that each query sees.
        spec: The form of the body.
        carry: Keys "k" and values "v" of the layer below.
        tile: Tokens of a tile; None: the usual number.
        pages: The pages of each row, where the body's rows are pages.
        interpret: As in `pl.pallas_call`.

    Returns:
        (attention, the carry of this layer). In the carry only the tiles that a row sees are this
        layer's."""
    slots, group = row_slots(body, pages), q.shape[2] // spec.kv_heads
    plan = plan_predicted(spec, slots, slots // len(body.positions), q.shape[1] * group, tile)
    bounds = row_bounds(start, stop, plan, group)
    out, lse, keys, values = invoke(
        kernel,
        plan,
        (q.shape[0], plan.tiles),
        layer,
        tile_ends(start, stop, plan.tile, plan.slots, pages),
        _operands(q, bounds, body, plan),
        ((plan.lane_groups * plan.rows, plan.lanes), (plan.lane_groups * plan.rows, 1)),
        _scratch(plan),
        in_place={"keys": _of_carry(carry["k"], plan), "values": _of_carry(carry["v"], plan)},
        name=f"packed_attention_predicted_k{spec.codes.key_bits}v{spec.codes.value_bits}_{plan.tile}",
        interpret=interpret,
    )
    by_group = (q.shape[0], 1, plan.lane_groups, plan.rows)  # one split
    part = collect(out.reshape(*by_group, plan.lanes), lse.reshape(*by_group, 1), q.shape, plan)
    return part, {"k": keys, "v": values}


def _of_carry(array, plan: PredictedPlan) -> InPlace:
    """Declare keys or values [B, slots, W], which the kernel reads and writes tile by tile, [1, S,
    W]. A layer without maps does not read them."""
    spec = pl.BlockSpec(
        (1, plan.tile, array.shape[2]),
        lambda row, tile, _, ends: (row, fetched(row, tile, ends), 0),
    )
    return InPlace(array, spec if plan.spec.mapped else pl.BlockSpec(memory_space=pl.ANY), spec)


def _table(plan: PredictedPlan) -> Float[Array, "C 256"]:
    """Return cos | sin of every offset in a chunk, on the lanes of the heads that fill 128."""
    rates = np.tile(plan.frequencies, 2 * LANES // plan.spec.head_dim)
    turn = np.arange(plan.chunk)[:, None] * rates[None]
    cells = np.concatenate([np.cos(turn), np.sin(turn)], axis=1)
    return jnp.asarray(cells, jnp.float32 if plan.wide else jnp.bfloat16)


def _operands(q, bounds, body: PredictedBody, plan: PredictedPlan) -> dict[str, Operand | None]:
    """Declare what the kernel reads beside keys and values of the layer below. P lane groups of W
    lanes, M query rows, S tokens of the tile, C of a chunk."""
    maps, codes = body.maps, body.codes
    arrays = {}
    if maps is not None:
        arrays = {"key_map": maps.key, "value_map": maps.value}
        arrays |= {"key_bias": maps.key_bias[None], "value_bias": maps.value_bias[None]}
    return {
        "queries": by_row(
            lane_queries(q, plan)
        ),  # [1, P, M, 2W] bf16: q | q~, each head's in its own lanes
        "bounds": by_row(bounds),  # [1, M, 2] i32: first and last + 1 visible token of a row
        "turns": by_tile(
            turns(codes.positions, plan)
        ),  # [1, rows, 128] f32: cos | sin of a chunk's first position
        "order": constant(
            jnp.arange(plan.chunk, dtype=jnp.int32)[None]
        ),  # [1, C] i32: the token of every lane
        "table": constant(_table(plan)),  # [C, 256] bf16, or f32
        "transform": constant(
            jnp.asarray(plan.transform, jnp.bfloat16)
        ),  # [256, 256]: of a column of codes
        "key_words": _words(
            codes.key_grid
        ),  # [8, 128 or 256] u32: the grid, a pair of integers to a word
        "value_words": _words(codes.value_grid),
        # words [1, 1, rows, codes], scales [1, 1, groups, S]
        "body": of_body(codes.stored, plan, by_token=("key_scale", "value_scale")),
        **{
            name: constant(x) for name, x in arrays.items()
        },  # maps [inputs, channels] bf16, biases [1, channels] f32
    }


def _words(grid: Float[Array, "n 2"]) -> Operand:
    """Write sums and differences of a grid's points as words of two 16-bit integers, in units of
    STEP."""
    numbers = jnp.round(turned_grid(grid) / STEP).astype(jnp.int32)
    words = (numbers[:, 0] & 0xFFFF) | (numbers[:, 1] << 16)
    row = jnp.pad(jax.lax.bitcast_convert_type(words, jnp.uint32), (0, -len(grid) % LANES))
    return constant(jnp.broadcast_to(row[None], (8, row.size)))


def _scratch(plan: PredictedPlan) -> dict:
    """Declare working memory. R = P*M query rows, S tokens of the tile, C of a chunk."""
    rows, width, chunk = plan.lane_groups * plan.rows, plan.spec.width, plan.chunk
    return {
        "peak": memory(rows, 1),  # running maximum
        "total": memory(rows, 1),  # running sum of the softmax weights
        "top": memory(rows, 1),  # maxima of this tile's scores, then the rescale factor
        "limits": memory(plan.rows, plan.tile),  # NEVER where a row must not look, else infinite
        "scores": memory(rows, plan.tile),  # scores, then softmax weights
        "words": memory(
            2, chunk, plan.beside * LANES, dtype=jnp.uint32
        ),  # numbers of some columns, twice
        "scales": memory(plan.spec.codes.groups, chunk, LANES),  # over h, on all lanes
        "residuals": memory(chunk, width),  # before columns are added up and scaled
        "predictions": memory(chunk, width),  # before the bias
    }
