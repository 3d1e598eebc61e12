"""The body of the Hopper decode-attention kernel: one warpgroup reads a stretch of one row's tokens
for one KV head.

A tile is a block of words, 32 rows of them. It is worked off in quads of 256 tokens (`unpack`):
first the scores of a quad, then its softmax weights and the sum of its values. Copies from device
memory go on meanwhile. A tile's keys are copied while the last values of the tile before it are
summed. Its values are copied while its first scores are computed. With one quad a tile:

    copies     keys 0, values 0 |          | keys 1   | values 1 | keys 2   | values 2
    products                    | scores 0 | values 0 | scores 1 | values 1 | scores 2 ...

`keys` or `rope` compute scores. `values` sums values.

Shapes in comments: R query rows (a multiple of 8), D channels."""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.pallas_kernels.gpu import keys as gpu_keys
from kvqjax.pallas_kernels.gpu import parts as gpu_parts
from kvqjax.pallas_kernels.gpu import rope as gpu_rope
from kvqjax.pallas_kernels.gpu import values as gpu_values
from kvqjax.pallas_kernels.gpu.parts import State, load
from kvqjax.pallas_kernels.gpu.unpack import STEP, STEPS, Quad


class Operands(NamedTuple):
    """Arrays in device memory. S is the number of slots. A plan that does not need an array has
    None in its place."""

    queries: Any  # [B, K, D, R] f32, holding bfloat16 numbers
    key_codes: tuple  # of [L, B, rows, K*D] u32
    # [L, B, S/group, K*D] u16; with signposts [K, 2, 1, D] u16, scales and minima of all tokens
    key_scale: Any
    key_low: Any  # minima, as key_scale; None with signposts
    # of [L, B, 1 or K, S/64, 64] u16: the factor of each token's keys; or the scale and the
    # minimum, in place of key_scale and key_low; or the scale alone
    key_tokens: tuple
    value_codes: tuple  # as key_codes
    value_scale: Any  # [L, B, slices of all heads, S/64, 64] u16
    value_low: Any  # minima, as value_scale; None where there are none
    value_factors: tuple  # of [L, B, S/group, K*D] u16: the factors of channels, if there are any
    tables: Any = None  # [2, 8] u32: signposts of keys and of values
    turns: Any = None  # [S/128, D] f32
    offsets: Any = None  # [256, D/2] bf16


class Memory(NamedTuple):
    """Shared memory, and the barriers on which a program waits until copies have arrived."""

    keys: Any
    values: gpu_values.Values
    keys_here: Any  # of a tile
    values_here: Any  # of a tile
    shared_here: Any  # shared memory that all tiles need


def _keys(plan):
    """Return the module that computes scores: `rope` for keys before RoPE, else `keys`."""
    return gpu_rope if plan.spec.rope else gpu_keys


def memory(plan) -> Memory:
    """Declare shared memory and barriers.

    Returns:
        The declarations, in the places of what the kernel gets."""
    codes = len(plan.plane_sets)
    # A barrier lets threads through after one arrival per copy.
    # Keys of a tile: words of each plane set, rotations of its groups with RoPE, scales and minima
    # of its groups, numbers of its tokens.
    key_copies = codes + (1 if plan.spec.rope else 0) + (2 if plan.spec.key_group else 0)
    key_copies += plan.key_numbers
    # Values: words of each plane set, scales, minima, factors of channels.
    value_copies = codes + plan.value_numbers + (1 if plan.spec.value_factors else 0)
    # With RoPE: the table of offsets, and scales that hold for all tokens.
    shared_copies = 2 if plan.signposts else 1
    barriers = (plgpu.Barrier(num_arrivals=n) for n in (key_copies, value_copies, shared_copies))
    return Memory(_keys(plan).memory(plan), gpu_values.memory(plan), *barriers)


def kernel(limits, data: Operands, smem: Memory, results, plan):
    """Attend to the tiles of one program. The grid is (row, KV head, split).

    Args:
        limits: References (ends, bounds), as `call.attend` gives them.
        results: References (out, lse), of which this program writes its own part."""
    (ends, bounds), (out, lse) = limits, results
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    begin, end = gpu_parts.share(ends, row, split, plan.splits)
    indices = (ends[2, row], row, head)

    def fetch_keys(tile):
        _fetch(_keys(plan).copies, data, smem.keys, smem.keys_here, plan, indices, tile)

    def fetch_values(tile):
        _fetch(gpu_values.copies, data, smem.values, smem.values_here, plan, indices, tile)

    @pl.when(begin < end)
    def _():
        fetch_keys(begin)
        fetch_values(begin)

    queries = load(data.queries.at[row, head], plgpu.Layout.WGMMA, optimized=False)
    _keys(plan).start(data, smem.keys, plan, indices, queries, smem.shared_here)
    plgpu.commit_smem()  # products read what all threads wrote in `start`
    limits = gpu_parts.load_limits(bounds, row, (STEP, plan.rows))

    def step(number, state):
        """Fold the quad with this number into the online softmax. Quads are numbered through all
        tiles of a row."""
        quad = Quad(lax.div(number, plan.quads), lax.rem(number, plan.quads))
        return _fold(
            data, smem, plan, (fetch_keys, fetch_values), quad, end, queries, limits, state
        )

    state = gpu_parts.begin_state(STEP, plan.spec.head_dim, plan.rows, plan.low_slices)
    state = lax.fori_loop(begin * plan.quads, end * plan.quads, step, state)
    gpu_parts.finish(state, out.at[row, head, split], lse.at[row, head, split])


def _fetch(copies, data: Operands, target, barrier, plan, indices, tile) -> None:
    """Start the copies of a tile into shared memory. Each arrives at `barrier`."""
    for source, into in copies(data, target, plan, indices, tile):
        plgpu.copy_gmem_to_smem(source, into, barrier)


def _fold(
    data: Operands, smem: Memory, plan, fetch, quad: Quad, end, queries, limits, state: State
) -> State:
    """Fold one quad into the online softmax.

    Args:
        fetch: Two functions, `fetch_keys(tile)` and `fetch_values(tile)`, which start the copies of
            a tile.
        end: One past the program's last tile.
        queries: The queries in registers, [D, R] float32.
        limits: Which tokens the columns see, from `parts.load_limits`.

    Returns:
        The online softmax with the quad's tokens."""
    fetch_keys, fetch_values = fetch
    keys, values = gpu_parts.hidden((smem.keys, smem.values), quad.tile)
    tables = [data.tables.at[i] if plan.signposts else None for i in range(2)]
    # After a tile's last quad its memory is free for the next tile.
    has_next_tile = (quad.part == plan.quads - 1) & (quad.tile + 1 < end)

    pl.when(quad.part == 0)(lambda: plgpu.barrier_wait(smem.keys_here))
    _keys(plan).prepare(keys, plan, quad, queries)
    plgpu.commit_smem()  # products read the queries that all threads wrote in `prepare`
    first = (quad.tile * plan.quads + quad.part) * (STEPS * STEP)
    scores = _keys(plan).scores(keys, plan, quad, tables[0])
    scores = gpu_parts.base2_scores(scores, plan.spec.head_dim, first, limits)
    plgpu.commit_smem()  # the next copy overwrites the keys, which all threads must have read
    pl.when(has_next_tile)(lambda: fetch_keys(quad.tile + 1))

    pl.when(quad.part == 0)(lambda: plgpu.barrier_wait(smem.values_here))

    def write_weights(peak):
        return gpu_values.write_weights(values, plan, quad, scores, peak)

    def weigh():
        plgpu.commit_smem()  # products read the weights that all threads wrote
        sums = gpu_values.weigh(values, plan, quad, tables[1])
        # Values and weights are overwritten next, and all threads must have read them
        plgpu.commit_smem()
        pl.when(has_next_tile)(lambda: fetch_values(quad.tile + 1))
        return sums

    return gpu_parts.fold(state, scores, write_weights, weigh)
