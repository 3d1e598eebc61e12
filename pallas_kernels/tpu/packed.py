"""Decode attention on packed keys and values as a Pallas TPU kernel (same contract as
`reference.packed_attention`).

The grid is (row, split, tile). A tile of tokens of all KV heads is fetched at once and worked off
by lane groups: as few whole heads as fill the 128 lanes. The queries of the heads that share a lane
group are laid out block-diagonally, so the kernel sees one head of `lanes` channels. Per tile, with
codes c and e, scale s and minimum m of a key group g, scale r and minimum n of a value:

    scores_t = (q * s_g) . c_t + q . m_g            keys with scales per channel and group of tokens
             = s_t (q . c_t) + m_t sum(q)           keys with scales per token and head (OSCAR)
    out      = sum_t (p_t r_t) e_t + sum_t p_t n_t

A product takes the tokens of several key groups. The queries times the scales of all these groups
are stacked as rows of the product. Where groups have fewer than 128 tokens, key scales multiply the
codes instead (`keys`). `rope` says how keys before RoPE are scored, `signposts` how KVQuant's codes
become numbers, `outliers` what its outliers add.

The products run in bfloat16 with float32 sums. Tiles outside a row's bounds are neither fetched nor
computed."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check, row_slots
from kvqjax.pallas_kernels.tpu import keys as tpu_keys
from kvqjax.pallas_kernels.tpu import outliers as tpu_outliers
from kvqjax.pallas_kernels.tpu import rope as tpu_rope
from kvqjax.pallas_kernels.tpu.call import (
    BY_TOKEN,
    KEYS_BY_TOKEN,
    Operand,
    by_row,
    by_tile,
    constant,
    fetched,
    invoke,
    memory,
    of_body,
    scalars,
)
from kvqjax.pallas_kernels.tpu.kernel import kernel
from kvqjax.pallas_kernels.tpu.plan import LANES, Plan
from kvqjax.pallas_kernels.tpu.planning import make_plan
from kvqjax.pallas_kernels.tpu.rows import collect, lane_queries, row_bounds, tile_ends
from kvqjax.pallas_kernels.tpu.signposts import pair_table
from kvqjax.pallas_kernels.work import Work


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
    *,
    ways: int | None = None,
    work: Work | None = None,
    splits: int = 1,
    pages: Int[Array, "B N"] | None = None,
    interpret: object = False,
) -> Partial:
    """Attend as `reference.packed_attention` does, with the queries rounded to bfloat16.

    Args:
        start: First token that each query sees.
        stop: One past the last token that each query sees.
        ways: Fields of a word (`unpack`); None: the cheapest number.
        work: How a tile is worked off; None: as the table of kernels says. A tile is a multiple of
            the plan's block and of eight key groups.
        splits: Programs that share a row's tokens, where the batch alone does not fill the chip.
        pages: The pages of each row, where the body's rows are pages.
        interpret: As in `pl.pallas_call`.

    Raises:
        ValueError: A body that this kernel does not read."""
    check(q, body, spec, pages)
    nuq = spec.datatype == "nuq"
    # A key group of 0 without channels: scales are constants of the layer.
    if nuq != (spec.key_group == 0 == spec.key_channels) or (nuq and spec.rope is None):
        raise ValueError(
            f"{spec}: this kernel takes signposts with keys before RoPE that share their scales only"
        )
    if spec.key_channels not in (0, spec.head_dim):
        raise ValueError(f"{spec}: this kernel takes keys per token with one scale a head")
    if spec.scales != "bfloat16":
        raise ValueError(f"scales={spec.scales!r}; the TPU kernel takes bfloat16 scales")
    plan = make_plan(q, body, spec, ways, work, splits, row_slots(body, pages))
    if (spec.key_slots or spec.value_slots) and plan.lanes != LANES:
        raise ValueError(f"{spec}: this kernel has outliers of heads that fill {LANES} lanes")
    if plan.tile % plan.block:
        raise ValueError(f"tiles of {plan.tile} tokens; want a multiple of {plan.block}")
    ends = tile_ends(start, stop, plan.tile, plan.slots, pages)
    per_split = -(-plan.tiles // plan.splits)  # tiles
    form = ""
    if spec.rope is not None:
        form = f"{spec.datatype}_pre_"

    def tile(row, split, step, ends):
        return fetched(row, split * per_split + step, ends)

    rows = (plan.lane_groups, plan.rows)
    out, lse = invoke(
        functools.partial(kernel, per_split=per_split),
        plan,
        (q.shape[0], plan.splits, per_split),
        layer,
        ends,
        _operands(q, start, stop, body, plan, tile),
        ((*rows, plan.lanes), (*rows, 1)),
        _scratch(plan),
        name=f"packed_attention_{form}k{spec.key_bits}v{spec.value_bits}_{plan.tile}",
        interpret=interpret,
    )
    return collect(out, lse, q.shape, plan)


def _operands(
    q, start, stop, body: PackedBody, plan: Plan, tile: Callable
) -> dict[str, Operand | None]:
    """Declare what the kernel reads; `tile(row, split, step, ends)` is the number of the tile that
    is fetched.

    P lane groups, M query rows of a lane group, W its lanes, N key groups of the tile, C rows of
    value scales."""
    spec = plan.spec
    group = q.shape[2] // spec.kv_heads
    outliers = body.signposts is not None and (spec.key_slots > 0 or spec.value_slots > 0)

    def two_axes(x):
        """Make [1, W] of constants of a layer, [W]: registers have two axes."""
        return x[None] if x.ndim == 1 else x

    scale = two_axes(body.key_scale)
    low = two_axes(body.key_low)
    stored = body._replace(key_scale=scale, key_low=low, positions=None, signposts=None)
    by_token = BY_TOKEN
    if spec.key_channels:
        by_token += KEYS_BY_TOKEN
    table, turns = _rope(body, plan)
    key, value = _signposts(body, plan)
    return {
        # [1, P, M, W] bf16, block-diagonal over the heads of a lane group; before RoPE with q~
        # beside it, 2W
        "queries": by_row(lane_queries(q, plan)),
        # [1, M, 2] i32: first and last + 1 visible token
        "bounds": by_row(row_bounds(start, stop, plan, group)),
        # [1, block]: token of every lane
        "order": constant(jnp.asarray(plan.order[None], jnp.int32)),
        # [period, period]: brings scales into lane order
        "onehot": constant(jnp.asarray(plan.onehot, jnp.bfloat16)),
        # [block, 2W] bf16 or f32: cos | sin of tokens counted from the block's first
        "table": None if table is None else constant(table),
        # [rows, N] bf16: key groups of the tokens of a slab (`keys`)
        "patterns": constant(tpu_keys.patterns(plan)) if plan.slabs else None,
        # [1, blocks * 2W/128, 128] f32: cos | sin of the blocks' first positions
        "turns": None if turns is None else by_tile(turns, tile),
        "key_signposts": key,
        "value_signposts": value,
        # [2, 2] f32: outermost signposts of keys and of values
        "ends": scalars(_outermost(body)) if outliers else None,
        # [1, W] f32: turns per position of every lane
        "rates": constant(jnp.asarray(tpu_outliers.rates(plan))) if outliers else None,
        # words [1, 1, rows, P*W], scales [1, 1, N, P*W] and [1, 1, C, S]
        "body": of_body(stored, plan, tile, by_token),
    }


def _rope(body: PackedBody, plan: Plan) -> tuple:
    """Return the tables of `rope` for keys before RoPE: of offsets in a block, and of the blocks'
    first positions."""
    if plan.spec.rope is None or body.positions is None:
        return None, None
    return tpu_rope.table(plan), tpu_rope.turns(body.positions, plan) * plan.spread


def _signposts(body: PackedBody, plan: Plan) -> tuple[Operand | None, ...]:
    """Declare the signposts of keys and of values: [8, 128 or 256] u32 pairs, or [1, 2^b] f32
    scalars."""
    if body.signposts is None:
        return None, None
    operands = []
    widths = (plan.spec.key_bits, plan.spec.value_bits)
    for numbers, bits in zip(body.signposts, widths, strict=True):
        if plan.paired:
            operands.append(constant(pair_table(numbers, bits)))
        else:
            operands.append(scalars(numbers[None]))
    return tuple(operands)


def _outermost(body: PackedBody) -> Float[Array, "2 2"]:
    """Return the lowest and the highest signpost of keys and of values, rounded to bfloat16 as
    codes read them."""
    outermost = []
    for numbers in body.signposts or ():
        rounded = numbers.astype(jnp.bfloat16).astype(jnp.float32)
        outermost.append(rounded[jnp.array([0, -1])])
    return jnp.stack(outermost)


def _scratch(plan: Plan) -> dict:
    """Declare working memory. S tokens of the tile, P*W all channels, N key groups, C rows of value
    scales."""
    spec = plan.spec
    shape = (plan.lane_groups, plan.rows)
    scales = (plan.tile * plan.value_rows // LANES, LANES)
    factors = (spec.width * plan.key_rows // LANES, LANES)
    buffers = {
        "peak": memory(*shape, 1),  # running maximum
        "total": memory(*shape, 1),  # running sum of the softmax weights
        "limits": memory(plan.rows, plan.tile),  # NEVER where a row must not look, else infinite
        "scores": memory(plan.rows, plan.tile),
        "scales": memory(*scales),  # [S/128 * C, 128]: value scales in lane order
        "lows": memory(*scales),  # value minima, less the offset of the codes
        # [P*W/128 * N, 128]: key scales, times D^-1/2 log2(e) where queries are multiplied by them
        "factors": memory(*factors),
        "zeros": memory(*factors),  # key minima likewise, less the offset of the codes
    }
    if plan.slabs:
        # Scales and minima of the keys of a slab (`keys`).
        rows = tpu_keys.patterns(plan).shape[0]
        slabs = memory(rows, spec.width, dtype=jnp.bfloat16)
        buffers |= {"slab_scales": slabs, "slab_zeros": slabs}
    if spec.key_factors:
        # [S/128 * F, 128]: what a token's keys are multiplied by, in lane order
        buffers["token_factors"] = memory(plan.tile * spec.key_factors // LANES, LANES)
    if spec.key_channels:
        # [S/128 * K, 128]: scales and minima of a token's keys, times D^-1/2 log2(e)
        keys = memory(plan.tile * spec.kv_heads // LANES, LANES)
        return buffers | {"key_scales": keys, "key_lows": keys}
    if spec.value_factors:
        # [P*W/128 * N, 128]: what the values of a key group are multiplied by
        buffers["channel_factors"] = memory(*factors)
    return buffers | tpu_outliers.scratch(plan)
