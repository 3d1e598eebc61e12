"""Decode attention on exact keys and values as a Mosaic GPU kernel for Hopper (contract of
`reference`).

With the queries q [R, D] of a KV head, the R query rows that share it, and its keys K and values V
[S, D], tokens on the first axis:

    s = K q' / sqrt(D)      [S, R]    scores
    p = 2^(s log2 e - m)    [S, R]    weights, with m [R] the largest of s log2 e
    out = V' p / sum p      [D, R]    the sum goes over tokens

One program is one warpgroup, which reads a stretch of one row's tokens for one KV head. It works
them off by tiles. Keys and values of a tile are copied to shared memory as they lie, and both are
left operands of products there: nothing is decoded. A tile's keys are overwritten by the next
tile's as soon as its scores are known, and its values as soon as they are summed:

    copies     keys 0, values 0 |         | keys 1   | values 1 | keys 2   | values 2
    products                    | scores 0 | values 0 | scores 1 | values 1 | scores 2 ...

An H100 reads 3.2 TB/s, which is 24 KB a microsecond for each of its 132 multiprocessors, and a read
takes about a microsecond. So 24 KB must be on their way to each multiprocessor all the time. Its
shared memory holds three programs (two of many query rows) with 32 KB of keys and 32 KB of values
each. While one of them computes, the copies of the others are on their way: 64 KB and more.

A row may also attend to tokens that lie outside the body (`Recent`). One call is then all of a
layer's attention. Otherwise XLA would launch some small kernels for these tokens and for merging
the results. The last program of a row and KV head takes them after its tiles, which are often fewer
than the others'.

Shapes in comments: R query rows (a multiple of 8), D channels, S tokens of a tile."""

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
from kvqjax.ops.packing.base import from_bits
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec, Recent, room
from kvqjax.pallas_kernels.forms import EXACT_HEAD_DIMS
from kvqjax.pallas_kernels.gpu import call as gpu_call
from kvqjax.pallas_kernels.gpu import parts as gpu_parts
from kvqjax.pallas_kernels.gpu.parts import (
    CHANNELS,
    State,
    along,
    load,
    products,
    put_transposed,
    tiled,
)
from kvqjax.pallas_kernels.gpu.unpack import STEP

TILE_BYTES = 2**15  # of a tile's keys, and of its values


class Beside(NamedTuple):
    """Tokens outside the body, N of them with padding, a multiple of 64."""

    vectors: Any  # [B, N, 2*K*D] bf16: keys, and values beside them
    seen: Any  # [B, N, R] i32: 1 where a column sees the token, else 0


class Operands(NamedTuple):
    """Arrays in device memory."""

    queries: Any  # [B, K, R, D] bf16
    keys: Any  # [L, B, slots, K*D] bf16
    values: Any  # as keys
    beside: Beside | None


class Buffers(NamedTuple):
    """Shared memory."""

    queries: Any  # [1, R, D] bf16
    keys: Any  # [1, S, D] bf16
    values: Any  # [1, S, D] bf16
    weights: Any  # [1, R, S] bf16


class Memory(NamedTuple):
    """Shared memory, and the barriers on which a program waits until copies have arrived."""

    buffers: Buffers
    queries_here: Any
    keys_here: Any
    values_here: Any


@dataclasses.dataclass(frozen=True)
class Plan(gpu_call.Plan):
    """Static choices of one call."""

    spec: ExactSpec

    @property
    def dim(self) -> int:
        return self.spec.head_dim

    @property
    def tile(self) -> int:
        return tile_tokens(self.spec)


def tile_tokens(spec: ExactSpec) -> int:
    """Count the tokens of a tile: 256, 128 or 64 for heads of 64, 128 or 256 channels."""
    return TILE_BYTES // (2 * spec.head_dim)


def memory(plan: Plan) -> Memory:
    """Declare shared memory and barriers."""
    of_queries = tiled((1, plan.rows, plan.dim), jnp.bfloat16)
    of_tile = tiled((1, plan.tile, plan.dim), jnp.bfloat16)
    of_weights = tiled((1, plan.rows, plan.tile), jnp.bfloat16)
    barriers = (plgpu.Barrier(num_arrivals=1) for _ in range(3))
    return Memory(Buffers(of_queries, of_tile, of_tile, of_weights), *barriers)


def resident(plan: Plan) -> int:
    """Count the programs that a multiprocessor's shared memory holds at a time. Its registers hold as
    many (benchmarks/records/gpu_registers.json)."""
    return gpu_parts.fitting(memory(plan))


def kernel(limits, data: Operands, smem: Memory, results, plan: Plan):
    """Attend to the tiles of one program. The grid is (row, KV head, split).

    Args:
        limits: References (ends, bounds), as `call.attend` gives them.
        results: References (out, lse), of which this program writes its own part."""
    (ends, bounds), (out, lse) = limits, results
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    begin, end = gpu_parts.share(ends, row, split, plan.splits)
    layer = ends[2, row]

    def fetch(source, target, barrier, tile):
        """Start the copy of a tile's keys or values."""
        tokens = pl.ds(tile * plan.tile, plan.tile)
        channels = pl.ds(head * plan.dim, plan.dim)
        plgpu.copy_gmem_to_smem(source.at[layer, row, tokens, channels], target.at[0], barrier)

    buffers = smem.buffers
    fetch_keys = functools.partial(fetch, data.keys, buffers.keys, smem.keys_here)
    fetch_values = functools.partial(fetch, data.values, buffers.values, smem.values_here)

    @pl.when(begin < end)
    def _():
        fetch_keys(begin)
        fetch_values(begin)

    queries = data.queries.at[row, head]
    plgpu.copy_gmem_to_smem(queries, buffers.queries.at[0], smem.queries_here)
    limits = gpu_parts.load_limits(bounds, row, (STEP, plan.rows))
    plgpu.barrier_wait(smem.queries_here)

    def step(tile, state):
        return _fold(smem, plan, (fetch_keys, fetch_values), (tile, end), limits, state)

    state = gpu_parts.begin_state(STEP, plan.dim, plan.rows, 0)
    state = lax.fori_loop(begin, end, step, state)
    if data.beside is not None:
        is_last = split == plan.splits - 1
        state = _fold_beside(data.beside, smem, plan, (row, head, is_last), state)
    gpu_parts.finish(state, out.at[row, head, split], lse.at[row, head, split])


def _fold(smem: Memory, plan: Plan, fetch, place, limits, state: State) -> State:
    """Fold one tile into the online softmax.

    Args:
        fetch: Two functions, `fetch_keys(tile)` and `fetch_values(tile)`, which start the copies of
            a tile.
        place: The tile's number, and one past the program's last tile.
        limits: Which tokens the columns see, from `parts.load_limits`.

    Returns:
        The online softmax with the tile's tokens."""
    (fetch_keys, fetch_values), (tile, end) = fetch, place
    has_next_tile = tile + 1 < end
    # With the index 0 itself, a program of 8 query rows would take 137 registers instead of 62.
    buffers = gpu_parts.hidden(smem.buffers, tile)

    plgpu.barrier_wait(smem.keys_here)
    scores = _scores(buffers, plan.tile)
    scores = gpu_parts.base2_scores(scores, plan.dim, tile * plan.tile, limits)
    plgpu.commit_smem()  # the next copy overwrites the keys, which all threads must have read
    pl.when(has_next_tile)(lambda: fetch_keys(tile + 1))

    def weigh():
        plgpu.commit_smem()  # products read the weights that all threads wrote
        plgpu.barrier_wait(smem.values_here)
        sums = _sums(buffers, plan, plan.tile)
        # Values and weights are overwritten next, and all threads must have read them
        plgpu.commit_smem()
        pl.when(has_next_tile)(lambda: fetch_values(tile + 1))
        return sums

    return gpu_parts.fold(state, scores, _writes_weights(buffers, scores), weigh)


def _writes_weights(buffers: Buffers, scores: list):
    """Return the function that writes softmax weights, as `parts.fold` wants it. `scores` are those
    of consecutive steps of 64 tokens, [64, R] each."""

    def write(peak):
        weights = [jnp.exp2(score - along(peak, score)) for score in scores]  # [64, R]
        for step, weight in enumerate(weights):
            target = buffers.weights.at[:, pl.ds(step * STEP, STEP)]
            put_transposed(target, weight.astype(jnp.bfloat16))
        return sum(weights[1:], weights[0]), ()

    return write


def _scores(buffers: Buffers, tokens: int) -> tuple:
    """Compute q . k of the first tokens, before the factor D^-1/2: [64, R] for every 64 tokens."""
    steps = [buffers.keys.at[pl.ds(first, STEP)] for first in range(0, tokens, STEP)]
    return products(*([(keys, buffers.queries)] for keys in steps))


def _sums(buffers: Buffers, plan: Plan, tokens: int) -> tuple:
    """Sum the first tokens' values under their weights: [64, R] for every 64 channels."""
    weights = buffers.weights.at[:, pl.ds(0, tokens)]
    sums = []
    for first in range(0, plan.dim, CHANNELS):
        values = buffers.values.at[pl.ds(0, tokens), pl.ds(first, CHANNELS)]
        sums.append([(values.transpose((1, 0)), weights)])
    return products(*sums)


def _fold_beside(data: Beside, smem: Memory, plan: Plan, place, state: State) -> State:
    """Fold the tokens outside the body into the online softmax, 64 at a time.

    Args:
        place: The numbers of the row and the KV head, and whether this program does so."""
    row, head, here = place

    def step(number, state):
        buffers = gpu_parts.hidden(smem.buffers, number)
        tokens, first_channel = pl.ds(number * STEP, STEP), head * plan.dim
        for part, barrier, target in (
            (0, smem.keys_here, buffers.keys),
            (1, smem.values_here, buffers.values),
        ):
            channels = pl.ds(part * plan.spec.width + first_channel, plan.dim)
            source = data.vectors.at[row, tokens, channels]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(0, STEP)], barrier)
        seen = load(data.seen.at[row, tokens], plgpu.Layout.WGMMA, optimized=False) > 0
        plgpu.barrier_wait(smem.keys_here)
        scores = gpu_parts.masked(_scores(buffers, STEP), plan.dim, [seen])
        plgpu.barrier_wait(smem.values_here)

        def weigh():
            plgpu.commit_smem()  # products read the weights that all threads wrote
            sums = _sums(buffers, plan, STEP)
            plgpu.commit_smem()  # the next copies overwrite what all threads must have read
            return sums

        return gpu_parts.fold(state, scores, _writes_weights(buffers, scores), weigh)

    return lax.fori_loop(0, jnp.where(here, data.seen.shape[1] // STEP, 0), step, state)


def _check(body: ExactBody, spec: ExactSpec) -> None:
    """Raise ValueError for bodies that this kernel does not read."""
    if spec.dtype != "bfloat16" or spec.head_dim not in EXACT_HEAD_DIMS:
        raise ValueError(
            f"heads of {spec.head_dim} channels in {spec.dtype}; "
            f"this kernel has {EXACT_HEAD_DIMS} in bfloat16"
        )
    tile = tile_tokens(spec)
    if body.slots % tile:
        raise ValueError(f"a body of {body.slots} slots; want a multiple of {tile}")


def packed_attention(
    q: Float[Array, "B T H D"],
    body: ExactBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: ExactSpec,
    recent: Recent | None = None,
    *,
    splits: int | None = None,
) -> Partial:
    """Attend as `reference.packed_attention` does, and to `recent` tokens as well. Queries and
    softmax weights are rounded to bfloat16.

    Args:
        start: The first token that each query sees.
        stop: One past the last token that each query sees.
        splits: How many programs share a row's tokens. None: as `call.default_splits` chooses.

    Raises:
        ValueError: A body that this kernel does not read."""
    _check(body, spec)
    return _attend(q, body, layer, start, stop, spec, recent, splits)


# Jitted by itself, so that a program lowers the kernel once and not for every layer that calls it.
@functools.partial(jax.jit, static_argnames=("spec", "splits"))
def _attend(
    q,
    body: ExactBody,
    layer,
    start,
    stop,
    spec: ExactSpec,
    recent: Recent | None,
    splits: int | None,
) -> Partial:
    """Call the kernel."""
    queries = gpu_call.columns(q.astype(jnp.bfloat16), spec.kv_heads).swapaxes(2, 3)
    plan = Plan(spec, queries.shape[2], splits or 1)
    if splits is None:
        tiles, pairs = body.slots // plan.tile, q.shape[0] * spec.kv_heads
        chosen = gpu_call.default_splits(tiles, pairs, resident(plan))
        plan = dataclasses.replace(plan, splits=chosen)
    # XLA for GPUs takes the same bits for other numbers without a copy (tests/aot/test_gpu.py).
    keys, values = (from_bits(x, spec.dtype) for x in body)
    beside = None
    if recent is not None:
        beside = _beside(recent, layer, q.shape[2] // spec.kv_heads, plan.rows)
    operands = Operands(queries, keys, values, beside)
    return gpu_call.attend(plan, kernel, memory(plan), operands, q.shape, layer, start, stop)


def _beside(recent: Recent, layer, group: int, rows: int) -> Beside:
    """Put the tokens outside the body one below the other.

    Args:
        recent: The tokens, and which query sees them.
        layer: The number of the layer in `recent.held`.
        group: Query heads of a KV head, G.
        rows: Query rows R of a KV head."""
    missing = -recent.seen.shape[2] % STEP

    def every(part: int):
        """Put all keys (`part` 0) or values (1) below each other, with zeros where there is no
        token."""
        from_cache = [lax.dynamic_index_in_dim(x[part], layer, 0, False) for x in recent.held]
        places = []
        for x in (*from_cache, recent.new[part]):
            places.append(_padded(x, room(x.shape[1]) - x.shape[1]))
        return _padded(jnp.concatenate(places, axis=1), missing)

    seen = _padded(recent.seen.swapaxes(1, 2), missing)  # [B, N, T]
    seen = jnp.repeat(seen, group, axis=2)
    seen = jnp.pad(seen, ((0, 0), (0, 0), (0, rows - seen.shape[2])))
    return Beside(jnp.concatenate([every(0), every(1)], axis=2), seen.astype(jnp.int32))


def _padded(x, count: int):
    """Append `count` zeros along the axis 1 of three."""
    return jnp.pad(x, ((0, 0), (0, count), (0, 0)))
