"""Compute scores of packed keys before RoPE in a Hopper kernel: uniform codes (KIVI*) and signposts
(KVQuant).

    R(p + o) k . q = R(o) k . R(-p) q       R(p): the rotation to position p

The query q comes rotated to its own position. It is rotated back by p, the position of the first
token of every group of 128. The keys are rotated by their offset o within the group. The table of
cos and sin of offsets is the same for all groups. Keys are decoded and rotated in registers, two
bfloat16 numbers at a time: one multiply-add for scale and minimum, two for the rotation. Channels i
and i + D/2 are a pair. 32 pairs are taken at a time, which bounds the registers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from kvqjax.pallas_kernels.gpu import keys as gpu_keys
from kvqjax.pallas_kernels.gpu import lookup as gpu_lookup
from kvqjax.pallas_kernels.gpu import unpack as gpu_unpack
from kvqjax.pallas_kernels.gpu.parts import COLUMNS, ROWS, load, product, put_transposed, tiled
from kvqjax.pallas_kernels.gpu.unpack import STEP, STEPS, Quad

GROUP = 128  # tokens that a rotated query serves
GROUPS = STEPS * STEP // GROUP  # of a quad
PAIRS_AT_ONCE = 32  # pairs of channels that are taken at a time; more would take more registers
PAIRS = 64  # pairs of channels of a head, which has 128


class Keys(NamedTuple):
    """Shared memory for the keys of a tile."""

    codes: tuple  # of [1, 32, D] u32, one per plane set
    # [1, 2, N, D] u16: scales and minima of the N groups of a tile; with signposts of all tokens, N
    # = 1
    factors: Any
    turns: Any  # [1, groups, D] f32: cos, then sin, of the first positions of a tile's groups
    # [1, 256, D/2] bf16: cos, then sin, of the first 64 offsets in a group; then those of the last
    # 64
    offsets: Any
    rotated: (
        Any  # [1, 2, R, D] bf16: the queries rotated back to the first token of a quad's groups
    )


def _angles(positions, spec) -> Float[Array, "N D"]:
    """Compute cos, then sin, of the angle of every pair of channels at N positions."""
    angle = (
        positions.astype(jnp.float32)[:, None]
        * jnp.asarray(spec.rope.frequencies, jnp.float32)[None]
    )
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1)


def turns(body, spec, group: int = GROUP) -> Float[Array, "_ D"]:
    """Make the rotations by which queries are rotated back.

    Args:
        body: The packed body. Its `positions` are those of the first tokens of equal stretches of
            slots.
        group: Tokens that a rotated query serves.

    Returns:
        cos, then sin, of the position of the first token of every group of the body, times the
        factor of the rope."""
    stretch = body.slots // body.positions.shape[0]
    first = body.positions[:, None] + jnp.arange(0, stretch, group, dtype=jnp.int32)[None]
    return _angles(first.reshape(-1), spec) * spec.rope.factor


def offsets(spec, group: int = GROUP) -> BFloat16[Array, "_ _"]:
    """Make the rotations of keys by their offsets within a group.

    Returns:
        64 rows of cos and 64 of sin for the first 64 tokens of a group, then the same for the
        next."""
    table = _angles(jnp.arange(group), spec).reshape(group // STEP, STEP, 2, -1)
    return table.transpose(0, 2, 1, 3).reshape(2 * group, -1).astype(jnp.bfloat16)


def memory(plan) -> Keys:
    """Declare the shared memory of `Keys`.

    Returns:
        The declarations, in the places of the references."""
    dim = plan.spec.head_dim
    return Keys(
        gpu_keys.words(plan),
        plgpu.SMEM((1, 2, plan.groups, dim), jnp.uint16),
        plgpu.SMEM((1, plan.tile // GROUP, dim), jnp.float32),
        # PAIRS_AT_ONCE bfloat16 numbers are 2 * PAIRS_AT_ONCE bytes: tiles are as wide as what is
        # taken at a time.
        tiled((1, 2 * GROUP, dim // 2), jnp.bfloat16, swizzle=2 * PAIRS_AT_ONCE),
        tiled((1, GROUPS, plan.rows, dim), jnp.bfloat16, swizzle=2 * PAIRS_AT_ONCE),
    )


def copies(data, keys: Keys, plan, indices, tile):
    """List the copies that bring a tile's keys to shared memory, with the arguments and results of
    `keys.copies`."""
    groups = plan.tile // GROUP
    yield data.turns.at[pl.ds(tile * groups, groups)], keys.turns.at[0]
    yield from gpu_keys.word_copies(data.key_codes, keys.codes, plan, indices, tile)
    if not plan.signposts:
        sources = data.key_scale, data.key_low
        yield from gpu_keys.factor_copies(sources, keys.factors, plan, indices, tile)


def start(data, keys: Keys, plan, indices, queries, barrier) -> None:
    """Copy what all tiles share, before the first one: offsets, and scales that hold for all
    tokens.

    Args:
        indices: The numbers of layer, row and KV head.
        queries: Not used. `keys.start` writes them.
        barrier: The barrier at which the copies arrive."""
    del queries
    plgpu.copy_gmem_to_smem(data.offsets, keys.offsets.at[0], barrier)
    if plan.signposts:
        plgpu.copy_gmem_to_smem(data.key_scale.at[indices[2]], keys.factors.at[0], barrier)
    plgpu.barrier_wait(barrier)


def prepare(keys: Keys, plan, quad: Quad, queries) -> None:
    """Write the queries rotated back to the first token of each of a quad's groups, once the keys
    of its tile have arrived.

    Args:
        keys: References to shared memory; `rotated` is written.
        queries: The queries in registers, [D, R] float32."""
    for i in range(GROUPS):
        turn = load_turn(keys.turns.at[quad.part * GROUPS + i])
        rotate_back(queries, turn, keys.rotated.at[i])


def load_turn(turn) -> list:
    """Load cos and sin of a position, [D/2] each.

    Args:
        turn: A reference to them side by side, [D] float32."""
    return [load(turn.at[pl.ds(first, PAIRS)], ROWS, optimized=False) for first in (0, PAIRS)]


def rotate_back(queries, turn: list, target) -> None:
    """Write queries rotated back to a position.

    Args:
        queries: The queries in registers, [D, R] float32.
        turn: From `load_turn`.
        target: A reference to shared memory, [R, D] bfloat16."""
    # The two channels of every pair, [D/2, R] each.
    first, second = queries[:PAIRS], queries[PAIRS:]
    cos, sin = (lax.broadcast_in_dim(x, first.shape, [0]) for x in turn)
    rotated_back = ((0, first * cos + second * sin), (PAIRS, second * cos - first * sin))
    for channel, part in rotated_back:
        put_transposed(target.at[:, pl.ds(channel, PAIRS)], part.astype(jnp.bfloat16))


def _decode(keys: Keys, plan, quad: Quad, table, lane: int) -> list:
    """Decode the keys of the four steps of a quad, PAIRS_AT_ONCE channels from `lane` on: [64, PAIRS_AT_ONCE]
    bfloat16 each."""
    bits, lanes = plan.spec.key_bits, pl.ds(lane, PAIRS_AT_ONCE)
    nibbles = gpu_unpack.key_nibbles([x.at[:, lanes] for x in keys.codes], bits, quad)
    if plan.signposts:
        codes = gpu_lookup.look_up(nibbles, table, bits)
    else:
        codes = [
            gpu_unpack.codes(nibbles, step, bits) - gpu_unpack.base(step, bits)
            for step in range(STEPS)
        ]
    step_keys = []
    for step, code in enumerate(codes):
        group = 0 if plan.signposts else quad.part * GROUPS + step * STEP // GROUP
        stored = (
            load(keys.factors.at[i, group, lanes], COLUMNS, optimized=False) for i in range(2)
        )
        factors = (lax.bitcast_convert_type(x, jnp.bfloat16) for x in stored)
        scale, low = (lax.broadcast_in_dim(x, code.shape, [1]) for x in factors)
        step_keys.append(code * scale + low)
    return step_keys


def _rotate(keys: Keys, step: int, lane: int, first, second):
    """Rotate pairs of channels, `first` and `second` [64, PAIRS_AT_ONCE], by the offsets of the tokens of a
    step."""
    # A group is two steps. The step's half of the table has 64 rows of cos, then 64 of sin.
    rows = (pl.ds(step % 2 * GROUP + first_row, STEP) for first_row in (0, STEP))
    cos, sin = (
        load(keys.offsets.at[x, pl.ds(lane, PAIRS_AT_ONCE)], plgpu.Layout.WGMMA) for x in rows
    )
    return first * cos - second * sin, second * cos + first * sin


def scores(keys: Keys, plan, quad: Quad, table) -> list:
    """Compute the scores of a quad, before the factor D^-1/2.

    Args:
        table: A reference to the signposts' table (`lookup.table_words`); None for uniform codes.

    Returns:
        q . k of the tokens of every step, [64, R] each."""
    out = [0.0] * STEPS
    for lane in range(0, PAIRS, PAIRS_AT_ONCE):
        first, second = (
            _decode(keys, plan, quad, table, channel) for channel in (lane, PAIRS + lane)
        )
        for step in range(STEPS):
            step_keys = _rotate(keys, step, lane, first[step], second[step])
            queries = keys.rotated.at[step * STEP // GROUP]
            lanes = (pl.ds(channel, PAIRS_AT_ONCE) for channel in (lane, PAIRS + lane))
            # One product for the first channels of the pairs, one for the second ones; both are
            # summed.
            pairs = ((x, queries.at[:, part]) for x, part in zip(step_keys, lanes, strict=True))
            out[step] += product(*pairs)
    return out
