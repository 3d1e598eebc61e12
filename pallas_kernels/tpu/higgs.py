"""Decode attention on HIGGS bodies as a Pallas TPU kernel (see `higgs_plan` for how the transform is taken apart).

The grid is (row, tile). A code is looked up as one word of 32 bits, which holds both numbers of its pair as bfloat16:
the grid lies along the lanes and is gathered from. Words of rows of tokens, read as bfloat16, are rows of first and of
second numbers in turn, and stay so: queries have rows for the first and for the second channels of pairs, and a token
has two lanes of scores and of weights. Per tile:

    z      = y H_(D/2)                             on the matrix unit, all heads
    scores = s_t (q' . z cos + q'~ . z sin)        tables of offsets in a chunk; q' is the query rotated back by the
                                                   chunk's first position, its signs those of H_n
    out    = sum_t p_t s_t y_t                     transformed once, after the sum over all tokens
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt
from scipy.linalg import hadamard

from kvqjax.ops.attention import Partial
from kvqjax.ops.layout import to_bits
from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec, HiggsStored
from kvqjax.pallas_kernels.tpu.higgs_kernel import kernel
from kvqjax.pallas_kernels.tpu.higgs_plan import HiggsPlan, plan_higgs
from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.rope import angles, swapped
from kvqjax.pallas_kernels.tpu.rows import body_specs, compiler_params, fetched, row_bounds, tile_ends
from kvqjax.pallas_kernels.tpu.tile import NEVER

__all__ = ["packed_attention"]


class Inputs(NamedTuple):
    """What a call takes besides the body, in the order of `tpu_higgs_kernel.Refs`, which has the shapes."""

    queries: Any
    bounds: Any
    turns: Any
    table: Any
    signs: Any
    within: Any
    onehot: Any
    key_words: Any
    value_words: Any


def packed_attention(
    q: Float[Array, "B T H D"],
    body: HiggsBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: HiggsSpec,
    *,
    tile: int | None = None,
    interpret: object = False,
) -> Partial:
    """As `reference.packed_attention`. Queries, grids and transformed keys are rounded to bfloat16 before they are
    multiplied."""
    group = q.shape[2] // spec.kv_heads
    plan = plan_higgs(spec, body.slots, body.slots // len(body.positions), q.shape[1] * group, tile)
    bounds = row_bounds(start, stop, plan, group)
    inputs = Inputs(_queries(q, plan), bounds, *_rope_inputs(body, plan), *_maps(body, plan))
    layer, ends = jnp.asarray(layer, jnp.int32).reshape(1), tile_ends(start, stop, plan.tile, plan.slots)
    out, lse = _call(plan, q.shape[0], inputs, body.stored, interpret)(layer, ends, inputs, body.stored)
    return _collect(out, lse, q.shape, plan)


def _queries(q, plan: HiggsPlan) -> Float[Array, "B rows lanes"]:
    """Scaled queries q | q~: rows for the first channels of pairs, then for the second ones; a head's pairs as often
    as heads share 128 lanes."""
    batch, length, _, dim = q.shape
    q = q.astype(jnp.float32).reshape(batch, length, plan.spec.kv_heads, -1, dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(batch, plan.used, dim) * (LOG2E * dim**-0.5 / plan.spec.group)

    def rows(x):
        x = jnp.pad(x, ((0, 0), (0, plan.rows - plan.used), (0, 0))).reshape(batch, plan.rows, plan.pairs, 2)
        return jnp.tile(x.transpose(0, 3, 1, 2).reshape(batch, 2 * plan.rows, plan.pairs), (1, 1, LANES // plan.pairs))

    return jnp.concatenate([rows(q), rows(swapped(q))], axis=-1)


def _rates(plan: HiggsPlan) -> np.ndarray:
    """Angle per position of the first and second channels of the pairs on 128 lanes, [2 * 128]."""
    rates = np.tile(np.asarray(plan.spec.rope.frequencies, np.float64), 2).reshape(plan.pairs, 2)
    return np.tile(rates.T, (1, LANES // plan.pairs)).reshape(-1)


def _rope_inputs(body: HiggsBody, plan: HiggsPlan) -> tuple:
    """Cosine and sine of every chunk's first position, [tiles, chunks * 4, 128]; of every offset in a chunk, cos | sin,
    [2C, 2 * 128]."""
    positions, rates = body.positions, _rates(plan)
    each = plan.slots // len(positions) // plan.chunk
    first = (positions[:, None] + jnp.arange(each)[None] * plan.chunk).reshape(-1)
    first = jnp.pad(first, (0, plan.tiles * (plan.tile // plan.chunk) - first.size))  # the last tile may reach beyond
    turn = angles(first, rates)
    turns = jnp.stack([jnp.cos(turn), jnp.sin(turn)], 1) * plan.spec.rope.factor
    turn = np.arange(plan.chunk)[:, None] * rates[None]
    tables = [f(turn).reshape(2 * plan.chunk, LANES) for f in (np.cos, np.sin)]
    table = jnp.asarray(np.concatenate(tables, 1), jnp.float32)
    table = table if plan.wide else _halves(table[0::2], table[1::2])
    return turns.reshape(plan.tiles, -1, LANES), table


def _maps(body: HiggsBody, plan: HiggsPlan) -> tuple:
    """Signs of the queries for every 128 codes [N, M, 128], the transform within heads, the matrix that gives a token's
    scales to its two lanes, and both grids as words."""
    signs = np.repeat(plan.between, plan.pairs, axis=0)  # [codes, heads]
    signs = np.repeat(signs, plan.used // plan.spec.kv_heads, axis=1).reshape(plan.parts, LANES, plan.used)
    signs = np.pad(signs.transpose(0, 2, 1), ((0, 0), (0, plan.rows - plan.used), (0, 0)))
    onehot = jnp.asarray(np.repeat(np.eye(LANES), 2, axis=1), jnp.bfloat16)
    words = [_words(grid) for grid in (body.key_grid, body.value_grid)]
    return jnp.asarray(signs, jnp.float32), jnp.asarray(plan.within, jnp.bfloat16), onehot, *words


def _words(grid: Float[Array, "n 2"]) -> UInt[Array, "8 _"]:
    """Sum and difference of a point's numbers (H_2) as the low and high half of a word, on whole registers of lanes."""
    first, second = grid[:, 0].astype(jnp.float32), grid[:, 1].astype(jnp.float32)
    row = jnp.pad(_halves(first + second, first - second), (0, -len(grid) % LANES))
    return jnp.broadcast_to(row[None], (8, row.size))


def _halves(low, high) -> UInt[Array, "*S"]:
    """Words of two bfloat16 numbers."""
    low, high = (to_bits(x.astype(jnp.bfloat16)).astype(jnp.uint32) for x in (low, high))
    return low | (high << jnp.uint32(16))


def _collect(out, lse, shape: tuple[int, ...], plan: HiggsPlan) -> Partial:
    """Transform the summed values, take every head's own channels, and bring query rows back to [B, T, H]."""
    (batch, length, count, dim), spec = shape, plan.spec
    heads, groups = spec.group // dim, spec.groups
    lse = jnp.where(lse > NEVER / 2, lse, -jnp.inf)[:, : plan.used, 0]
    out = out.reshape(batch, 2, plan.rows, groups, spec.group // 2)[:, :, : plan.used]
    # A row's own group, then of its transform the row's own head: [B, 2, group, head, row of a head, group / 2]
    out = out.reshape(batch, 2, groups, heads, -1, groups, spec.group // 2)
    out = jnp.diagonal(out, axis1=2, axis2=5)  # [B, 2, head, row, group / 2, groups]
    matrix = jnp.asarray(hadamard(spec.group // 2), jnp.float32).reshape(heads, plan.pairs, -1) / spec.group
    out = jnp.einsum("bchrng,hpn->bghrpc", out, matrix, precision=jax.lax.Precision.HIGHEST)

    def rows(x, last: int):
        x = x.reshape(batch, spec.kv_heads, length, count // spec.kv_heads, last)
        return x.transpose(0, 2, 1, 3, 4).reshape(batch, length, count, last)

    return Partial(rows(out, dim), rows(lse, 1)[..., 0])


def _scratch(plan: HiggsPlan) -> dict:
    """Working memory by its name in `tpu_higgs_kernel.Refs`."""
    sizes = dict.fromkeys(("peak", "total"), (plan.rows, 1)) | {"top": (plan.rows, LANES)}
    sizes |= dict.fromkeys(("key_scales", "value_scales"), (plan.spec.groups, 2 * plan.tile))
    sizes |= {"scores": (plan.rows, 2 * plan.tile)}
    memory = {name: pltpu.VMEM(size, jnp.float32) for name, size in sizes.items()}
    memory |= {"weights": pltpu.VMEM((2 * plan.rows, 2 * plan.chunk), jnp.bfloat16)}
    memory |= {"words": pltpu.VMEM((2, plan.chunk, plan.value_columns * LANES), jnp.uint32)}
    memory |= {"keys": pltpu.VMEM((2 * plan.chunk, LANES), jnp.float32 if plan.wide else jnp.bfloat16)}
    return memory | {"products": pltpu.VMEM((2 * plan.rows, 2 * plan.chunk), jnp.float32)}


def _specs(plan: HiggsPlan, inputs: Inputs, body: HiggsStored):
    """Block specs of the inputs and of the body."""
    given = jax.tree.map(lambda array: pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim), inputs)
    given = given._replace(
        queries=pl.BlockSpec((1, *inputs.queries.shape[1:]), lambda b, *_: (b, 0, 0)),
        bounds=pl.BlockSpec((1, plan.rows, 2), lambda b, *_: (b, 0, 0)),
        turns=pl.BlockSpec((1, *inputs.turns.shape[1:]), lambda b, j, layer, ends: (fetched(b, j, ends), 0, 0)),
    )
    return given, body_specs(plan, body, fetched, by_token=("key_scale", "value_scale"))


def _call(plan: HiggsPlan, batch: int, inputs: Inputs, body: HiggsStored, interpret):
    """The pallas_call of a plan, taking (layer, ends, inputs, body)."""
    sizes = (2 * plan.rows, plan.lanes), (plan.rows, 1)
    return pl.pallas_call(
        functools.partial(kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, plan.tiles),
            in_specs=_specs(plan, inputs, body),
            out_specs=[pl.BlockSpec((1, *size), lambda b, *_: (b, 0, 0)) for size in sizes],
            scratch_shapes=[_scratch(plan)],
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, *size), jnp.float32) for size in sizes],
        compiler_params=compiler_params(1),
        name=f"packed_attention_higgs_k{plan.spec.key_bits}v{plan.spec.value_bits}_{plan.tile}",
        interpret=interpret,
    )
