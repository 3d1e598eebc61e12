"""Call a Hopper decode-attention kernel: lay queries and bounds out for it, and merge its splits.

The grid is (row, KV head, split). A split is a stretch of a row's tokens, which one program reads.
Each program writes a normalised output, transposed, [D, R], and a log-sum-exp [R], for the R query
rows of its head. The splits of a row are merged by their log-sum-exps outside the kernel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.gpu.parts import NEVER

MULTIPROCESSORS = 132  # of an H100 or H200


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call that all kernels have.

    Attributes:
        spec: The static description of the body.
        rows: Query rows of a KV head, padded to a multiple of 8.
        splits: Programs that share a row's tokens."""

    spec: Any
    rows: int
    splits: int

    @property
    def kv_heads(self) -> int:
        return self.spec.kv_heads


def default_splits(tiles: int, pairs: int, resident: int) -> int:
    """Choose how many programs share the tokens of a row.

    Programs beyond those that fit the chip wait for a further round, which lasts as long as the
    first. So the best number makes the product of rounds and tiles of a program least. Numbers that
    fill up to four rounds are compared. Of equally good ones the smallest is taken, because fewer
    results are quicker to merge.

    Args:
        pairs: Pairs of row and KV head, each of which has this many programs.
        resident: How many programs a multiprocessor holds at a time."""
    places = MULTIPROCESSORS * resident  # programs that the chip holds at a time
    most = max(1, min(tiles, 4 * places // pairs))

    def duration(splits: int) -> int:
        """Estimate the time, in tiles: rounds times the tiles of a program."""
        rounds = -(-pairs * splits // places)
        tiles_of_program = -(-tiles // splits)
        return rounds * tiles_of_program

    return min(range(1, most + 1), key=duration)


def columns(q: Float[Array, "B T H D"], kv_heads: int) -> Float[Array, "B K D R"]:
    """Lay queries out as columns.

    Returns:
        The T*G query rows of every KV head, in the order (token, query head), padded with zeros to
        R, a multiple of 8."""
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    q = q.transpose(0, 2, 4, 1, 3).reshape(batch, kv_heads, dim, -1)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -q.shape[-1] % 8)))


def _bounds(start, stop, group: int, rows: int) -> Int[Array, "B 2 R"]:
    """Make the first visible token and the one after the last, of every column. `group` is the
    number G of query heads of a KV head. Columns of padding see no token: both numbers are 0."""
    bounds = jnp.repeat(jnp.stack([start, stop], 1), group, axis=2)
    return jnp.pad(bounds, ((0, 0), (0, 0), (0, rows - bounds.shape[-1]))).astype(jnp.int32)


def attend(plan, kernel, memory, operands, shape: tuple[int, ...], layer, start, stop) -> Partial:
    """Run a kernel on a grid (row, KV head, split), and merge its splits.

    Args:
        plan: Has kv_heads, rows, tile and splits.
        kernel: The kernel's body, called as kernel((ends, bounds), operands, memory, (out, lse),
            plan) with references. `ends` [3, B] are first tile, last tile + 1 and layer of every
            row. `bounds` [B, 2, R] is from `_bounds`. `out` is [B, K, splits, D, R] and `lse` [B,
            K, splits, R], both float32.
        memory: A tree of declarations of scratch memory. The body gets a tree of references like
            it.
        operands: A tree of arrays. The body gets a tree of references like it.
        shape: The shape [B, T, H, D] of the queries.
        layer: The number of the layer in the operands.
        start: The first token that each query sees, [B, T].
        stop: One past the last token that each query sees, [B, T].

    Returns:
        Attention to these tokens."""
    operands, operands_tree = jax.tree.flatten(operands)
    scratch, memory_tree = jax.tree.flatten(memory)

    def body(ends, bounds, *refs):
        data, results = refs[: len(operands)], refs[len(operands) : len(operands) + 2]
        memory = memory_tree.unflatten(refs[len(operands) + 2 :])
        kernel((ends, bounds), operands_tree.unflatten(data), memory, results, plan)

    batch, _, heads, dim = shape
    first_tile, end_tile = start.min(1) // plan.tile, -(-stop.max(1) // plan.tile)
    # [3, B]
    ends = jnp.stack(
        [x.astype(jnp.int32) for x in (first_tile, end_tile, jnp.full((batch,), layer))]
    )
    lead = (batch, plan.kv_heads, plan.splits)
    call = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((*lead, dim, plan.rows), jnp.float32),
            jax.ShapeDtypeStruct((*lead, plan.rows), jnp.float32),
        ],
        scratch_types=scratch,
        grid=lead,
        grid_names=("row", "head", "split"),
        # No automatic barriers, which would be several times as many. The kernel itself has a
        # `commit_smem` after every write to shared memory that other threads read, and after every
        # read of memory that is overwritten later. The simulator in tests/gpu_simulator.py refuses
        # a read or an overwrite without one.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    out, lse = call(ends, _bounds(start, stop, heads // plan.kv_heads, plan.rows), *operands)
    return _merge(out, lse, shape)


def _merge(
    out: Float[Array, "B K N D R"], lse: Float[Array, "B K N R"], shape: tuple[int, ...]
) -> Partial:
    """Merge N splits into one result, and bring columns back to [B, T, H]."""
    batch, length, heads, dim = shape
    kv_heads = out.shape[1]
    used_rows = length * heads // kv_heads  # columns behind these are padding
    out, lse = out[..., :used_rows], lse[..., :used_rows]
    # A split that sees no token has NEVER as its log-sum-exp, which is finite, so that its weight
    # is 0 and not NaN.
    peak = lse.max(2, keepdims=True)
    weights = jnp.exp(lse - peak)  # [B, K, N, T*G]
    total, peak = weights.sum(2), peak[:, :, 0]
    lse = jnp.where(peak > NEVER / 2, jnp.log(total) + peak, -jnp.inf)
    out = (out * (weights / total[:, :, None])[:, :, :, None]).sum(2)
    out = out.reshape(batch, kv_heads, dim, length, -1).transpose(0, 3, 1, 4, 2)
    lse = lse.reshape(batch, kv_heads, length, -1).transpose(0, 2, 1, 3)
    return Partial(out.reshape(shape), lse.reshape(batch, length, heads))
