"""Call a Hopper decode-attention kernel: lay queries and bounds out for it, and merge its splits.

The grid is (row, KV head, split). Each program writes a normalised output, transposed, and a log-sum-exp for the R
query rows of its head. The splits of the token axis are merged by their log-sum-exps outside the kernel."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.gpu.parts import NEVER

__all__ = ["attend", "columns", "default_splits"]

MULTIPROCESSORS = 132  # of an H100 or H200


def default_splits(tiles: int, pairs: int, resident: int) -> int:
    """Return how many programs share the `tiles` of each of the `pairs` of row and head.

    A multiprocessor holds `resident` programs; those that find no place wait for a round of their own, which lasts as
    long as the first. So the best number makes the product of rounds and tiles of a program least. It is sought among
    numbers that fill up to four rounds; of equal ones the fewest, whose results are quickest to merge."""
    places = MULTIPROCESSORS * resident
    most = max(1, min(tiles, 4 * places // pairs))
    return min(range(1, most + 1), key=lambda splits: -(-pairs * splits // places) * -(-tiles // splits))


def columns(q: Float[Array, "B T H D"], kv_heads: int) -> Float[Array, "B K D R"]:
    """Lay queries out as columns: the T*G rows of a KV head, padded to a multiple of 8."""
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    q = q.transpose(0, 2, 4, 1, 3).reshape(batch, kv_heads, dim, -1)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -q.shape[-1] % 8)))


def _bounds(start, stop, group: int, rows: int) -> Int[Array, "B 2 R"]:
    """Return first and last + 1 visible token of every column; nothing for the columns of padding."""
    bounds = jnp.repeat(jnp.stack([start, stop], 1), group, axis=2)
    return jnp.pad(bounds, ((0, 0), (0, 0), (0, rows - bounds.shape[-1]))).astype(jnp.int32)


def attend(plan, kernel, memory, operands, shape: tuple[int, ...], layer, start, stop) -> Partial:
    """Run a kernel body for queries of `shape` [B, T, H, D]. `plan` has kv_heads, rows, tile and splits. `operands` are
    trees of arrays, `memory` one of scratch memory; the body takes references to the same trees:

        kernel((ends, bounds), operands, memory, (out, lse), plan)

    `ends` [3, B] are first tile, last tile + 1 and layer; `bounds` [B, 2, R] is from `_bounds`."""
    operands, operands_tree = jax.tree.flatten(operands)
    scratch, memory_tree = jax.tree.flatten(memory)

    def body(ends, bounds, *refs):
        data, results = refs[: len(operands)], refs[len(operands) : len(operands) + 2]
        memory = memory_tree.unflatten(refs[len(operands) + 2 :])
        kernel((ends, bounds), operands_tree.unflatten(data), memory, results, plan)

    batch, _, heads, dim = shape
    ends = [start.min(1) // plan.tile, -(-stop.max(1) // plan.tile), jnp.full((batch,), layer)]
    ends = jnp.stack([x.astype(jnp.int32) for x in ends])
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
        # No automatic barriers: every write of shared memory that other threads read, and every reading that a copy or
        # a write may follow, ends with a `commit_smem` in the kernel itself. The simulator in tests/gpu_simulator.py
        # refuses a reading or an overwriting without one. Automatic ones would be several times as many.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    out, lse = call(ends, _bounds(start, stop, heads // plan.kv_heads, plan.rows), *operands)
    return _merge(out, lse, shape)


def _merge(out: Float[Array, "B K N D R"], lse: Float[Array, "B K N R"], shape: tuple[int, ...]) -> Partial:
    """Merge N splits into one result, and bring columns back to [B, T, H]."""
    batch, length, heads, dim = shape
    peak = lse.max(2, keepdims=True)
    weights = jnp.exp(lse - peak)
    total, peak = weights.sum(2), peak[:, :, 0]
    lse = jnp.where(peak > NEVER / 2, jnp.log(total) + peak, -jnp.inf)
    out = (out * (weights / total[:, :, None])[:, :, :, None]).sum(2)
    kv_heads = out.shape[1]
    used = length * heads // kv_heads
    out = out[..., :used].reshape(batch, kv_heads, dim, length, -1).transpose(0, 3, 1, 4, 2)
    lse = lse[..., :used].reshape(batch, kv_heads, length, -1).transpose(0, 2, 1, 3)
    return Partial(out.reshape(shape), lse.reshape(batch, length, heads))
