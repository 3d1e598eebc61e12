"""Decode attention on bodies of coefficients as a Mosaic GPU kernel for Hopper: transform coding by
KV head (`kvqjax.pallas_kernels.klt`), heads of 128 channels.

One warpgroup reads a stretch of one row's tokens for one KV head, in tiles of 256 tokens and pairs
of two steps of 64. Coefficients are unpacked to shared memory, keys' and then values' in the same
place, where two products read them:

    keys      z [64, N] -> z B [64, D] -> * scale + mean -> RoPE -> scores [64, R]
    sums      z^T [N, 64] -> times weights [64, R] -> sums [N, R]

The sums leave the kernel. `klt.finished` applies the matrices of values. Steps' queries are rotated
back to their first token, keys are rotated by their offset in the step (`rope`). The scale of a
token multiplies its key, and the weight under which its coefficients are summed.

Shapes in comments: R query rows (a multiple of 8), D channels, N coefficients with padding."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.forms import KLT_HEAD_DIM as HEAD_DIM
from kvqjax.pallas_kernels.gpu import call as gpu_call
from kvqjax.pallas_kernels.gpu import coefficients as gpu_coefficients
from kvqjax.pallas_kernels.gpu import parts as gpu_parts
from kvqjax.pallas_kernels.gpu import rope as gpu_rope
from kvqjax.pallas_kernels.gpu.coefficients import PAIR, TILE
from kvqjax.pallas_kernels.gpu.parts import (
    CHANNELS,
    COLUMNS,
    ROWS,
    State,
    along,
    load,
    product,
    products,
    put_transposed,
    tiled,
)
from kvqjax.pallas_kernels.gpu.unpack import STEP
from kvqjax.pallas_kernels.klt import LANE, KltBody, KltSpec, count, finished, scales, steps

NUMBERS = 128  # coefficients of a head, padded
PAIRS = HEAD_DIM // 2  # pairs of channels that RoPE turns together
PAIRS_OF_TILE = TILE // (PAIR * STEP)


class Operands(NamedTuple):
    """Arrays in device memory."""

    queries: Any  # [B, K, D, R] f32, holding bfloat16 numbers
    key_codes: tuple  # of each level, of each plane set: [L, B, rows, K*n] u32
    key_scale: Any  # [B, K, S/64, 64] f32
    value_codes: tuple
    value_scale: Any
    back: Any  # [K, D, N] bf16: B, transposed, times the distances of points
    mean: Any  # [K, D] f32
    turns: Any  # [S/64, D] f32
    offsets: Any  # [128, D/2] bf16


class Tile(NamedTuple):
    """Shared memory."""

    key_codes: tuple  # of each level, of each plane set: [1, blocks, 32, n] u32
    value_codes: tuple
    back: Any  # [1, D, N] bf16
    z: Any  # [1, 2, 64, N] bf16: a pair's coefficients, of keys or of values
    # [1, 2, R, D] bf16: the queries rotated back to the first token of both steps; then, in the
    # first 64 lanes, softmax weights times scales, of keys or of values
    right: Any


class Shared(NamedTuple):
    """What all tiles share beside shared memory, in registers but for the mean."""

    queries: Any  # [D, R] f32
    cos: Any  # [64, D/2] bf16: of the offsets in a step
    sin: Any
    mean: Any  # a reference to device memory, [D] f32: a cache keeps it near


class Factors(NamedTuple):
    """What each of a pair's steps has in registers."""

    turns: list  # rotations to the first token, from `rope.load_turn`
    key_scales: list  # [64] f32, of the tokens
    value_scales: list


class Memory(NamedTuple):
    """Shared memory, and the barriers on which a program waits until copies have arrived."""

    buffers: Tile
    keys_here: Any  # of a tile
    values_here: Any  # of a tile
    shared_here: Any  # what all tiles need


@dataclasses.dataclass(frozen=True)
class Plan(gpu_call.Plan):
    """Static choices of one call."""

    spec: KltSpec
    tile: int = TILE


def memory(plan: Plan) -> Memory:
    """Declare shared memory and barriers."""
    spec, rows = plan.spec, plan.rows
    buffers = Tile(
        gpu_coefficients.memory(spec.key_levels),
        gpu_coefficients.memory(spec.value_levels),
        tiled((1, HEAD_DIM, NUMBERS), jnp.bfloat16),
        tiled((1, PAIR, STEP, NUMBERS), jnp.bfloat16),
        tiled((1, PAIR, rows, HEAD_DIM), jnp.bfloat16),
    )
    copies = (
        gpu_coefficients.copy_count(spec.key_levels),
        gpu_coefficients.copy_count(spec.value_levels),
        1,
    )
    return Memory(buffers, *(plgpu.Barrier(num_arrivals=n) for n in copies))


def resident(spec: KltSpec, rows: int) -> int:
    """Count the programs that a multiprocessor holds at a time: its registers hold two."""
    return min(2, gpu_parts.fitting(memory(Plan(spec, rows, 1))))


def kernel(limits, data: Operands, smem: Memory, results, plan: Plan):
    """Attend to the tiles of one program. The grid is (row, KV head, split).

    Args:
        limits: References (ends, bounds), as `call.attend` gives them.
        results: References (out, lse), of which this program writes its own part."""
    (ends, bounds), (out, lse) = limits, results
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    begin, end = gpu_parts.share(ends, row, split, plan.splits)
    indices = (ends[2, row], row, head)

    def fetch(codes, buffer, levels, barrier, tile):
        """Start the copies of a tile's words."""
        for source, target in gpu_coefficients.copies(codes, _first(buffer), levels, indices, tile):
            plgpu.copy_gmem_to_smem(source, target, barrier)

    key_words = data.key_codes, smem.buffers.key_codes, plan.spec.key_levels, smem.keys_here
    value_words = (
        data.value_codes, smem.buffers.value_codes, plan.spec.value_levels, smem.values_here,
    )  # fmt: skip
    fetch_keys = functools.partial(fetch, *key_words)
    fetch_values = functools.partial(fetch, *value_words)

    @pl.when(begin < end)
    def _():
        fetch_keys(begin)
        fetch_values(begin)

    plgpu.copy_gmem_to_smem(data.back.at[head], smem.buffers.back.at[0], smem.shared_here)
    queries = load(data.queries.at[row, head], plgpu.Layout.WGMMA, optimized=False)
    cos, sin = (
        load(data.offsets.at[pl.ds(first, STEP)], plgpu.Layout.WGMMA, optimized=False)
        for first in (0, STEP)
    )
    shared = Shared(queries, cos, sin, data.mean.at[head])
    limits = gpu_parts.load_limits(bounds, row, (STEP, plan.rows))
    plgpu.barrier_wait(smem.shared_here)

    def step(pair, state):
        # Not in shared memory, which would hold a program less. They arrive during unpacking.
        numbers = [pair * PAIR + step for step in range(PAIR)]
        turns = [gpu_rope.load_turn(data.turns.at[x]) for x in numbers]
        key_scales, value_scales = (
            [load(scale.at[row, head, x], ROWS, optimized=False) for x in numbers]
            for scale in (data.key_scale, data.value_scale)
        )
        factors = Factors(turns, key_scales, value_scales)
        fetch = (fetch_keys, fetch_values)
        return _fold(smem, plan, fetch, (pair, end), factors, shared, limits, state)

    state = gpu_parts.begin_state(STEP, 2 * NUMBERS, plan.rows, 0)
    state = lax.fori_loop(begin * PAIRS_OF_TILE, end * PAIRS_OF_TILE, step, state)
    gpu_parts.finish(state, out.at[row, head, split], lse.at[row, head, split])


def _first(codes: tuple) -> tuple:
    """Take the references of words without their first axis, whose length is 1."""
    return tuple(tuple(ref.at[0] for ref in words) for words in codes)


def _fold(
    smem: Memory,
    plan: Plan,
    fetch,
    place,
    factors: Factors,
    shared: Shared,
    limits,
    state: State,
) -> State:
    """Fold a pair of steps into the online softmax.

    Args:
        fetch: Two functions, `fetch_keys(tile)` and `fetch_values(tile)`, which start the copies of
            a tile.
        place: The pair's number, counted through all tiles of a row, and one past the program's
            last tile.
        limits: Which tokens the columns see, from `parts.load_limits`.

    Returns:
        The online softmax with the pair's tokens."""
    (fetch_keys, fetch_values), (pair, end) = fetch, place
    buffers = gpu_parts.hidden(smem.buffers, pair)
    tile, part = lax.div(pair, PAIRS_OF_TILE), lax.rem(pair, PAIRS_OF_TILE)
    has_next_tile = (part == PAIRS_OF_TILE - 1) & (tile + 1 < end)

    pl.when(part == 0)(lambda: plgpu.barrier_wait(smem.keys_here))
    gpu_coefficients.put(buffers.key_codes, plan.spec.key_levels, pair, buffers.z)
    for step, turn in enumerate(factors.turns):
        gpu_rope.rotate_back(shared.queries, turn, buffers.right.at[step])
    # Products read what all threads wrote, and the next copy overwrites what all must have read.
    plgpu.commit_smem()
    pl.when(has_next_tile)(lambda: fetch_keys(tile + 1))
    scores = [_scores(buffers, shared, step, factors.key_scales[step]) for step in range(PAIR)]
    first = pair * (PAIR * STEP)
    scores = gpu_parts.base2_scores(scores, HEAD_DIM, first, limits)
    plgpu.commit_smem()  # weights overwrite the queries, which all products must have read

    pl.when(part == 0)(lambda: plgpu.barrier_wait(smem.values_here))

    weights = []

    def write_weights(peak):
        weights.extend(jnp.exp2(score - along(peak, score)) for score in scores)  # [64, R]
        _put_weights(buffers, weights, factors.key_scales)
        return sum(weights[1:], weights[0]), ()

    def weigh():
        plgpu.commit_smem()  # products read the weights that all threads wrote
        sums = _sums(buffers)
        plgpu.commit_smem()  # coefficients and weights are overwritten, which all must have read
        _put_weights(buffers, weights, factors.value_scales)
        gpu_coefficients.put(buffers.value_codes, plan.spec.value_levels, pair, buffers.z)
        plgpu.commit_smem()  # as after the keys' coefficients
        pl.when(has_next_tile)(lambda: fetch_values(tile + 1))
        sums = sums + _sums(buffers)
        plgpu.commit_smem()  # coefficients, weights and queries are overwritten next
        return sums

    return gpu_parts.fold(state, scores, write_weights, weigh)


def _scores(buffers: Tile, shared: Shared, step: int, scale):
    """Compute q . k of a step, before the factor D^-1/2, [64, R].

    Args:
        scale: Of the step's tokens, [64]."""
    keys = product((buffers.z.at[step], buffers.back))  # [64, D]
    mean = lax.broadcast_in_dim(load(shared.mean, COLUMNS, optimized=False), keys.shape, [1])
    keys = keys * lax.broadcast_in_dim(scale, keys.shape, [0]) + mean
    first, second = (keys[:, x : x + PAIRS].astype(jnp.bfloat16) for x in (0, PAIRS))
    cos, sin = shared.cos, shared.sin
    queries = buffers.right.at[step]
    return product(
        (first * cos - second * sin, queries.at[:, pl.ds(0, PAIRS)]),
        (second * cos + first * sin, queries.at[:, pl.ds(PAIRS, PAIRS)]),
    )


def _put_weights(buffers: Tile, weights: list, scales: list) -> None:
    """Write softmax weights times the tokens' scales, [64, R] and [64] for each step."""
    for step, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        scaled = weight * lax.broadcast_in_dim(scale, weight.shape, [0])
        put_transposed(_weights(buffers, step), scaled.astype(jnp.bfloat16))


def _weights(buffers: Tile, step: int):
    """Refer to the weights of a step, [R, 64]."""
    return buffers.right.at[step, :, pl.ds(0, STEP)]


def _sums(buffers: Tile) -> tuple:
    """Sum the coefficients of a pair under its weights: [64, R] for every 64 coefficients."""
    sums = []
    for first in range(0, NUMBERS, CHANNELS):
        z = buffers.z.at[:, :, pl.ds(first, CHANNELS)]
        sums.append(
            [(z.at[step].transpose((1, 0)), _weights(buffers, step)) for step in range(PAIR)]
        )
    return products(*sums)


def _check(body: KltBody, spec: KltSpec) -> None:
    """Raise ValueError for bodies that this kernel does not read."""
    levels = spec.key_levels + spec.value_levels
    if spec.head_dim != HEAD_DIM or any(n % LANE for _, n in levels):
        raise ValueError(
            f"heads of {spec.head_dim} channels and levels {levels}; "
            f"this kernel has {HEAD_DIM}, and multiples of {LANE} coefficients"
        )
    stretch = body.slots // len(body.positions)
    if body.slots % len(body.positions) or stretch % TILE:
        raise ValueError(f"stretches of {stretch} tokens; want a multiple of {TILE}")


def packed_attention(
    q: Float[Array, "B T H D"],
    body: KltBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: KltSpec,
    *,
    splits: int | None = None,
) -> Partial:
    """Attend to keys and values that coefficients stand for, with the queries rounded to bfloat16.

    Args:
        start: The first token that each query sees.
        stop: One past the last token that each query sees.
        splits: How many programs share a row's tokens. None: as `call.default_splits` chooses.

    Raises:
        ValueError: A body that this kernel does not read."""
    _check(body, spec)
    return _attend(q, body, layer, start, stop, spec, splits)


# Jitted by itself, so that a program lowers the kernel once and not for every layer that calls it.
@functools.partial(jax.jit, static_argnames=("spec", "splits"))
def _attend(q, body: KltBody, layer, start, stop, spec: KltSpec, splits: int | None) -> Partial:
    """Call the kernel."""
    batch, length, heads, _ = q.shape
    queries = gpu_call.columns(q.astype(jnp.bfloat16).astype(jnp.float32), spec.kv_heads)
    rows, pairs = queries.shape[-1], batch * spec.kv_heads
    split_count = splits or gpu_call.default_splits(body.slots // TILE, pairs, resident(spec, rows))
    plan = Plan(spec, rows, split_count)
    operands = _operands(queries, body, layer, spec)
    shape = (batch, length, heads, 2 * NUMBERS)
    sums, lse = gpu_call.attend(plan, kernel, memory(plan), operands, shape, layer, start, stop)
    # Both parts without their padding.
    key, value = (count(levels) for levels in (spec.key_levels, spec.value_levels))
    means = jnp.concatenate([sums[..., :key], sums[..., NUMBERS : NUMBERS + value]], -1)
    values = finished(body, spec, means)
    # A query that sees no token gets zeros, and not the mean of values.
    return Partial(jnp.where(jnp.isneginf(lse)[..., None], 0.0, values), lse)


def _operands(queries, body: KltBody, layer, spec: KltSpec) -> Operands:
    """Lay out the operands. Of what grows with tokens only scales are copied, 8 bits a token and
    head as float32."""
    back = body.back.astype(jnp.float32) * steps(spec.key_levels)[None, :, None]
    back = jnp.pad(back, ((0, 0), (0, NUMBERS - back.shape[1]), (0, 0))).swapaxes(1, 2)
    key_scale, value_scale = (
        scales(coded, layer).reshape(len(queries), spec.kv_heads, -1, STEP)
        for coded in (body.keys, body.values)
    )
    return Operands(
        queries,
        body.keys.codes,
        key_scale,
        body.values.codes,
        value_scale,
        back.astype(jnp.bfloat16),
        body.mean.astype(jnp.float32).reshape(spec.kv_heads, HEAD_DIM),
        gpu_rope.turns(body, spec, STEP),
        gpu_rope.offsets(spec, STEP),
    )
