"""Decode attention on CommVQ's codes as a Pallas TPU kernel: codebook rows are summed by products with one-hot columns
that never leave the chip.

The grid is (row, tile). Per tile of S tokens, with tokens on the lanes: the levels of all keys are unpacked once, then
for each KV head

    K^T = matrix @ one-hot columns          on the matrix unit, [D, S], float32 sums over 2R levels a token
    k   = K * cos + swap(K) * sin           tables of offsets inside a tile: the same for every tile
    scores = prescale * (q . k)             the query being rotated back by the tile's first position

and, after the online softmax of all query heads, out = sum_t p_t gain_t bits_t. The columns are what a product holds
still, so that the codebook passes by once for 256 tokens; they are made as pairs of halves of 32-bit words, one
comparison and one choice for sixteen levels of 128 tokens.

Codebook rows are rounded to bfloat16, so a key is off by 2^-9 of the sum of its rows' sizes at most; it is rounded once
more, like the query, before they meet.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.ops.layout import PLANE, split_bits
from kvqjax.pallas_kernels.commvq import CommVQBody, CommVQSpec
from kvqjax.pallas_kernels.tpu.commvq_kernel import kernel
from kvqjax.pallas_kernels.tpu.commvq_plan import CommVQPlan, plan_commvq
from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.rope import angles, swapped
from kvqjax.pallas_kernels.tpu.rows import compiler_params, fetched, row_bounds, tile_ends
from kvqjax.pallas_kernels.tpu.tile import NEVER

__all__ = ["packed_attention"]


class Inputs(NamedTuple):
    """What a call takes, in the order of `tpu_commvq_tile.Refs`, which has the shapes."""

    queries: Any
    bounds: Any
    order: Any
    places: Any
    cos: Any
    sin: Any
    matrix: Any
    key_codes: Any
    prescale: Any
    value_bits: Any
    gain: Any


def packed_attention(
    q: Float[Array, "B T H D"],
    body: CommVQBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: CommVQSpec,
    *,
    interpret: object = False,
) -> Partial:
    """Means of gain * bits [B, T, H, N] under attention to the decoded keys, and the log-sum-exp. Query t of row b sees
    body tokens start[b, t] <= s < stop[b, t]; `q` carries its rotation and not yet the D^-1/2. Queries, keys and
    codebook are rounded to bfloat16 before they are multiplied."""
    group = q.shape[2] // spec.kv_heads
    plan = plan_commvq(spec, body.slots, body.slots // len(body.positions), q.shape[1] * group)
    layer, ends = jnp.asarray(layer, jnp.int32).reshape(1), tile_ends(start, stop, plan.tile, plan.slots)
    rows = {"queries": _queries(q, body.positions, plan), "bounds": row_bounds(start, stop, plan, group)}
    fields = {name: getattr(body, name) for name in ("matrix", "key_codes", "prescale", "value_bits", "gain")}
    inputs = Inputs(**rows, **_tables(plan), **fields)
    out, lse = _call(plan, inputs, interpret)(layer, ends, inputs)
    return _collect(out, lse, q.shape, plan)


def _queries(q, positions, plan: CommVQPlan) -> Float[Array, "B tiles P M W"]:
    """Scaled queries of the heads of every group, each in its own head's lanes and zero elsewhere, rotated back by the
    first position of every tile."""
    batch, length, count, dim = q.shape
    each = plan.slots // len(positions) // plan.tile
    first = (positions[:, None] + jnp.arange(each)[None] * plan.tile).reshape(-1)
    cos, sin = (jnp.tile(x, (1, 2))[None, :, None, None] for x in _cos_sin(first, plan))
    q = (q.astype(jnp.float32) * (LOG2E * dim**-0.5 * plan.spec.rope.factor))[:, None]
    q = (q * cos + swapped(q) * sin).astype(jnp.bfloat16)  # [B, tiles, T, H, D]
    q = q.reshape(batch, plan.tiles, length, plan.groups, plan.shared, count // plan.spec.kv_heads, dim)
    own = jnp.eye(plan.shared, dtype=q.dtype).reshape(1, 1, 1, plan.shared, 1, 1, plan.shared, 1)
    rows = (q.transpose(0, 1, 3, 4, 2, 5, 6)[..., None, :] * own).reshape(*q.shape[:2], plan.groups, plan.used, -1)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, plan.rows - plan.used), (0, 0)))


def _cos_sin(positions, plan: CommVQPlan) -> tuple:
    """[n, D/2] each, float32."""
    turn = angles(positions, np.asarray(plan.spec.rope.frequencies, np.float64))
    return jnp.cos(turn), jnp.sin(turn)


def _tables(plan: CommVQPlan) -> dict:
    """Token of every lane of a tile and where its word is; cosine and sine of every token's offset, [D/2, S]."""
    order = jnp.asarray(plan.order.reshape(1, -1), jnp.int32)
    cos, sin = _cos_sin(order[0], plan)
    return {"order": order, "places": jnp.asarray(plan.places, jnp.int32), "cos": cos.T, "sin": sin.T}


def _collect(out, lse, shape: tuple[int, ...], plan: CommVQPlan) -> Partial:
    """Bring query rows back to [B, T, H]."""
    batch, length, count, _ = shape
    lse = jnp.where(lse > NEVER / 2, lse, -jnp.inf)

    def rows(x):
        x = x.reshape(batch, plan.groups, plan.rows, -1)[:, :, : plan.used]
        x = x.reshape(batch, plan.spec.kv_heads, length, count // plan.spec.kv_heads, -1)
        return x.transpose(0, 2, 1, 3, 4).reshape(batch, length, count, -1)

    return Partial(rows(out), rows(lse)[..., 0])


def _scratch(plan: CommVQPlan) -> dict:
    """Working memory by its name in `tpu_commvq_tile.Refs`."""
    rows, columns = plan.groups * plan.rows, plan.tile // LANES
    sizes = dict.fromkeys(("peak", "total", "top"), (rows, 1)) | dict.fromkeys(("sizes", "gains"), (columns, LANES))
    sizes |= {
        "limits": (plan.rows, plan.tile),
        "scores": (rows, plan.tile),
        "products": (plan.summands, plan.lanes, plan.tile),
    }
    memory = {name: pltpu.VMEM(size, jnp.float32) for name, size in sizes.items()}
    levels = pltpu.VMEM((columns * plan.key_rows, LANES), jnp.int32)
    words = pltpu.VMEM((len(split_bits(plan.spec.bits)), plan.key_rows, LANES), jnp.int32)
    weights = pltpu.VMEM((rows, plan.tile), jnp.bfloat16)
    return memory | {"words": words, "pairs": levels, "ones": levels, "weights": weights}


def _specs(plan: CommVQPlan, inputs: Inputs) -> Inputs:
    """Block specs of the inputs."""

    def columns(array):
        lanes = min(LANES, array.shape[3])
        block = (1, 1, array.shape[2], lanes)
        each = lanes * plan.tiles // array.shape[3]  # tiles of a block
        return pl.BlockSpec(block, lambda b, j, layer, ends: (layer[0], b, 0, jax.lax.div(fetched(b, j, ends), each)))

    token = pl.BlockSpec((1, 1, 1, plan.tile), lambda b, j, layer, ends: (layer[0], b, 0, fetched(b, j, ends)))
    given = jax.tree.map(lambda array: pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim), inputs)
    bits = (1, 1, PLANE, plan.spec.value_width)
    query = (1, 1, *inputs.queries.shape[2:])
    return given._replace(
        queries=pl.BlockSpec(query, lambda b, j, layer, ends: (b, fetched(b, j, ends), 0, 0, 0)),
        bounds=pl.BlockSpec((1, plan.rows, 2), lambda b, *_: (b, 0, 0)),
        key_codes=tuple(map(columns, inputs.key_codes)),
        value_bits=pl.BlockSpec(bits, lambda b, j, layer, ends: (layer[0], b, fetched(b, j, ends), 0)),
        prescale=token,
        gain=token,
    )


def _call(plan: CommVQPlan, inputs: Inputs, interpret):
    """The pallas_call of a plan, taking (layer, ends, inputs)."""
    spec, batch, rows = plan.spec, len(inputs.queries), plan.groups * plan.rows
    widths = spec.value_width, 1
    return pl.pallas_call(
        functools.partial(kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, plan.tiles),
            in_specs=[_specs(plan, inputs)],
            out_specs=[pl.BlockSpec((1, rows, n), lambda b, *_: (b, 0, 0)) for n in widths],
            scratch_shapes=[_scratch(plan)],
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, rows, n), jnp.float32) for n in widths],
        compiler_params=compiler_params(1),
        name=f"packed_attention_commvq_k{spec.bits}v{spec.value_width // (spec.kv_heads * spec.head_dim)}_{plan.tile}",
        interpret=interpret,
    )
