"""Plan a call of the TPU decode-attention kernel: into how many fields words are cut, how large
tiles are, and in which order a tile is worked off."""

import dataclasses
import math

from kvqjax.pallas_kernels.chips import TPUS
from kvqjax.pallas_kernels.forms import form_of
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec
from kvqjax.pallas_kernels.support import lookup
from kvqjax.pallas_kernels.tpu.plan import LANES, VMEM_BYTES, Plan, lane_groups
from kvqjax.pallas_kernels.tpu.unpack import fitting_ways
from kvqjax.pallas_kernels.work import SHORT, Work


def cheapest_ways(spec: PackedSpec) -> int:
    """Choose how many fields a word is cut into (`unpack`): the cheapest number by the records in
    benchmarks/records.

    Chips whose vector units have bfloat16 convert narrow integers fast. The others are faster at
    or-ing codes into a mantissa, which is 2 fields."""
    most = min(fitting_ways(spec.key_bits), fitting_ways(spec.value_bits))
    if spec.datatype == "nuq" or (most == 8 and not TPUS[spec.target].vector_bfloat16):
        return 2
    by_token = spec.key_channels > 0
    # 8 fields spill registers where scales multiply the codes of keys (`Plan.multiplied`).
    scales_multiply_queries = by_token or (spec.rope is None and spec.key_group >= LANES)
    return most if scales_multiply_queries else 4


def work_of(spec: PackedSpec, per_head: int) -> Work:
    """Choose how a tile is worked off with `per_head` query rows of a KV head: as the table says,
    or as is usual."""
    entry = lookup(form_of(spec), spec.target)
    # The table's choices were made by compiling kernels with up to 8 query rows of a KV head.
    if per_head <= 8 and entry is not None and entry.work is not None:
        return entry.work
    if spec.rope is None and spec.key_group >= 128:
        return TPUS[spec.target].usual_work
    return SHORT


def _rows(spec: PackedSpec, per_head: int) -> int:
    """Return the query rows of a lane group, padded to a multiple of 8, with `per_head` = T*G rows
    of a KV head."""
    return -(-spec.width // lane_groups(spec) // spec.head_dim * per_head // 8) * 8


def make_plan(
    q,
    body: PackedBody,
    spec: PackedSpec,
    ways: int | None = None,
    work: Work | None = None,
    splits: int = 1,
    slots: int | None = None,
) -> Plan:
    """Make the plan of a call.

    Args:
        q: Queries [B, T, H, D].
        ways: Fields of a word; None: `cheapest_ways`.
        work: How a tile is worked off; None: `work_of`, with tiles halved until their words fit the
            memory.
        splits: Programs that share a row's tokens. There are never more than tiles.
        slots: Slots of a row; None: the body's. A row of several pages has more slots than the
            body's rows, which are pages."""
    slots, lanes = slots or body.slots, spec.width // lane_groups(spec)
    per_head = q.shape[1] * q.shape[2] // spec.kv_heads
    rows = _rows(spec, per_head)
    chosen = work or work_of(spec, per_head)
    tile = chosen.tile
    # Two tiles are in memory at a time: one is worked off while the next one is fetched. Their
    # words may take half of what a kernel may use.
    token_bits = spec.width * (spec.key_bits + spec.value_bits)
    while not work and 2 * tile * token_bits > 8 * VMEM_BYTES // 2:
        tile //= 2
    tile = min(tile, body.slots)
    splits, ways = min(splits, -(-slots // tile)), ways or cheapest_ways(spec)
    plan = Plan(spec, slots, rows, per_head, tile, ways, lanes, splits, ahead=chosen.ahead)
    return dataclasses.replace(plan, pieces=math.gcd(chosen.pieces, plan.blocks))
