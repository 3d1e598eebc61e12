"""Decode attention on packed keys and values as a Mosaic GPU kernel for Hopper (contract of `reference`).

For KIVI bodies of 2 or 4 bits, keys and values alike, key groups of 128 tokens, one value scale per token and head. The
mathematics is that of `tpu`: key scales fold into the query, their minima are one product per group, value scales
and minima fold into the weights; products in bfloat16 with float32 sums. `gpu_kernel` has the body.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.attention import Partial
from kvqjax.pallas_kernels import gpu_call
from kvqjax.pallas_kernels.gpu_kernel import PART, kernel, scratch
from kvqjax.pallas_kernels.gpu_unpack import HALF
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check

__all__ = ["Plan", "packed_attention", "tile_tokens"]

RESIDENT = 2  # programs that a multiprocessor's registers hold (benchmarks/records/gpu_registers.json)


def tile_tokens(bits: int) -> int:
    """Tokens of a tile: two blocks of words. A body must have as many."""
    return 2 * HALF * (32 // bits)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call: query rows of a KV head (a multiple of 8), and programs that share a row's tokens."""

    spec: PackedSpec
    slots: int
    rows: int
    splits: int

    @property
    def kv_heads(self) -> int:
        return self.spec.kv_heads

    @property
    def planes(self) -> int:
        """Planes of a block: the codes of a word."""
        return 32 // self.spec.key_bits

    @property
    def parts(self) -> int:
        """Steps in which a tile is worked off."""
        return self.planes // PART

    @property
    def block(self) -> int:
        return self.tile // 2

    @property
    def tile(self) -> int:
        return tile_tokens(self.spec.key_bits)

    @property
    def groups(self) -> int:
        """Key groups of a block."""
        return self.block // self.spec.key_group

    def first_token(self, tile):
        """First token that is read for a tile: the last tile is moved back into the body."""
        return jnp.minimum(tile * self.tile, self.slots - self.tile)


def _check(plan: Plan) -> None:
    spec = plan.spec
    if not spec.plain:
        raise ValueError(f"{spec}: this kernel has uniform codes of keys after RoPE")
    if spec.key_bits != spec.value_bits or spec.key_bits not in (2, 4) or spec.scales != "bfloat16":
        raise ValueError(
            f"keys of {spec.key_bits} and values of {spec.value_bits} bits with {spec.scales} scales; "
            "this kernel has 2 or 4 for both, bfloat16"
        )
    if spec.head_dim != 128 or spec.value_group != 128 or spec.key_group != 128:
        raise ValueError(f"head_dim, key_group and value_group of {spec}; this kernel has 128 for each")
    if plan.slots < plan.tile:
        raise ValueError(f"a body of {plan.slots} slots; this kernel reads {plan.tile} at a time")


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
    *,
    splits: int | None = None,
) -> Partial:
    """As `reference.packed_attention`, with the queries rounded to bfloat16. `splits` programs share a row's tokens; by
    default as many as fill the chip. ValueError for bodies this kernel does not read."""
    check(q, body, spec)
    batch, slots = q.shape[0], body.value_scale.shape[-1]
    queries = gpu_call.columns(q.astype(jnp.bfloat16).astype(jnp.float32), spec.kv_heads)
    chosen = splits or gpu_call.default_splits(slots // tile_tokens(spec.key_bits), batch * spec.kv_heads, RESIDENT)
    plan = Plan(spec, slots, queries.shape[-1], chosen)
    _check(plan)
    operands = (queries, *body.key_codes, body.key_scale, body.key_low)
    operands += (*body.value_codes, *(_by_plane(x, plan) for x in (body.value_scale, body.value_low)))
    return gpu_call.attend(plan, kernel, scratch(plan), operands, q.shape, layer, start, stop)


def _by_plane(x, plan: Plan):
    """[L, B, K, S] as [L, B, K, blocks, planes, 32]; no data moves."""
    return x.reshape(*x.shape[:3], -1, plan.planes, HALF)
