"""Decode attention on packed keys and values as a Mosaic GPU kernel for Hopper (contract of
`reference`).

The kernel reads bodies whose keys and values have the same number of bits: 2, 3 or 4.

- KIVI: uniform codes after RoPE, with heads of 64, 128 or 256 channels. Key groups have 128 tokens
  and value groups a head's channels, or both 32 (not with 256 channels). OScaR: the same for heads
  of 64 and 128 channels, with a factor for each token's keys.
- OSCAR: uniform codes of such heads, with a scale and a minimum for each token and head.
- TurboQuant: signposts of such heads, with a scale for each token and head.
- KVarN: as OScaR in groups of 128, with factors of each token and head, and with factors of values
  for each channel and group.
- KIVI*: heads of 128 channels before RoPE, and groups of 128.
- KVQuant: signposts, heads of 128 channels before RoPE. Keys have scales per channel that hold for
  all tokens, values one scale per token. Bodies with outliers are not read.

Products are in bfloat16 with float32 sums. kernel.py has the kernel's body.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.ops.packing.base import split_bits, to_bits
from kvqjax.pallas_kernels.gpu import call as gpu_call
from kvqjax.pallas_kernels.gpu import rope as gpu_rope
from kvqjax.pallas_kernels.gpu.kernel import Operands, kernel, memory
from kvqjax.pallas_kernels.gpu.lookup import table_words
from kvqjax.pallas_kernels.gpu.parts import CHANNELS
from kvqjax.pallas_kernels.gpu.unpack import STEP, STEPS
from kvqjax.pallas_kernels.gpu.words import HALF
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check

GROUP = 128  # tokens for which channels of values may have factors
# Channels of a head -> groups of keys (tokens) and of values (channels) after RoPE.
# Heads of 256 channels in groups of 32 spill registers at 2 bits, and at 4 bits a multiprocessor
# holds one program.
PLAIN_GROUPS = {256: ((128, 256),), 128: ((128, 128), (32, 32)), 64: ((128, 64), (32, 32))}


def tile_tokens(bits: int) -> int:
    """Count the tokens of a tile: a block of the widest plane set.

    Returns:
        The number of tokens. A body must have as many."""
    # A block is 32 rows of 32-bit words: 1024 bits of every channel.
    return 1024 // split_bits(bits)[0]


def resident(spec: PackedSpec) -> int:
    """Count the programs that a multiprocessor holds at a time.

    Returns:
        The number that its registers and shared memory allow, by ptxas's report on the compiled
        kernels (benchmarks/records/gpu_registers.json)."""
    # Twice the results of a product.
    short = spec.value_group < CHANNELS
    # The signposts of four steps are in registers at a time.
    looked_up = spec.datatype == "nuq"
    # The sums of a group are apart from those of the groups before, for 64 channels each.
    apart = spec.value_factors and spec.head_dim > CHANNELS
    wide = spec.head_dim > GROUP
    more = short or looked_up or apart or wide or spec.rope is not None
    return 2 if more or spec.key_bits == 3 else 3


@dataclasses.dataclass(frozen=True)
class Plan(gpu_call.Plan):
    """Static choices of one call."""

    spec: PackedSpec

    @property
    def plane_sets(self) -> tuple[int, ...]:
        """Bits of each plane set, for keys and values alike."""
        return split_bits(self.spec.key_bits)

    @property
    def tile(self) -> int:
        return tile_tokens(self.spec.key_bits)

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.tile // STEP

    @property
    def quads(self) -> int:
        """Quads of a tile."""
        return self.steps // STEPS

    @property
    def signposts(self) -> bool:
        return self.spec.datatype == "nuq"

    @property
    def groups(self) -> int:
        """Key groups of a tile; 1 where keys have no groups."""
        return self.tile // self.spec.key_group if self.spec.key_group else 1

    @property
    def key_numbers(self) -> int:
        """Count the numbers of each token that are applied to its scores: 0, 1 (a factor, or a
        scale), or 2 (a scale and a minimum)."""
        if self.spec.key_channels:
            return self.value_numbers
        return min(1, self.spec.key_factors)

    @property
    def head_numbers(self) -> bool:
        """Say whether each KV head of a token has such numbers of its own."""
        return self.spec.key_channels > 0 or self.spec.key_factors > 1

    @property
    def value_numbers(self) -> int:
        """Count the numbers of a token's values in each slice: a scale, and a minimum where there
        are minima."""
        return 2 if self.spec.minima else 1

    @property
    def slices(self) -> tuple[int, int]:
        """Count the slices of a head's channels that have value scales of their own, and those of
        one product."""
        slices = max(1, self.spec.head_dim // self.spec.value_group)
        return slices, max(1, CHANNELS // self.spec.value_group)

    @property
    def low_slices(self) -> int:
        """Count the slices whose channels share a sum of minima (`parts.State.low`)."""
        return self.slices[0] if self.spec.minima and not self.spec.value_factors else 0

    def word_rows(self, tile, bits: int):
        """Slice the rows of words of a tile out of a plane set.

        Args:
            bits: Bits of the plane set.

        Returns:
            The slice of 32 rows."""
        # A block of narrower bits has more tokens than a tile, so that several tiles read the same
        # rows.
        return pl.ds(lax.div(tile * self.tile, 1024 // bits) * HALF, HALF)


def _check(spec: PackedSpec) -> None:
    """Raise ValueError for bodies that this kernel does not read."""
    if (
        spec.key_bits != spec.value_bits
        or spec.key_bits not in (2, 3, 4)
        or spec.scales != "bfloat16"
    ):
        raise ValueError(
            f"keys of {spec.key_bits} and values of {spec.value_bits} bits with {spec.scales} scales; "
            "this kernel has 2, 3 or 4 for both, bfloat16"
        )
    groups = spec.key_group, spec.value_group
    if spec.key_channels:
        by_head = spec.key_channels == spec.head_dim and groups == (0, spec.head_dim)
        fits = spec.rope is None and by_head and spec.head_dim in (64, 128)
    elif spec.rope is None:
        fits = spec.datatype == "uniform" and groups in PLAIN_GROUPS.get(spec.head_dim, ())
    elif spec.datatype == "nuq":
        fits = spec.head_dim == 128 and groups == (0, spec.width)
    else:
        fits = spec.head_dim == 128 and groups == (128, 128)
    if not fits:
        raise ValueError(f"head_dim, groups and rope of {spec}; this kernel has others")
    if spec.key_slots or spec.value_slots:
        raise ValueError("a body with outliers; this kernel has none")
    plain = spec.rope is None and not spec.key_channels and spec.datatype == "uniform"
    if (spec.key_factors and not plain) or (spec.value_factors and spec.key_group != GROUP):
        raise ValueError(f"factors of {spec}; this kernel has none there")


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
    """Attend as `reference.packed_attention` does, with the queries rounded to bfloat16.

    Args:
        start: The first token that each query sees.
        stop: One past the last token that each query sees.
        splits: How many programs share a row's tokens. None: as `call.default_splits` chooses.

    Raises:
        ValueError: A body that this kernel does not read."""
    check(q, body, spec)
    _check(spec)
    return _attend(q, body, layer, start, stop, spec, splits)


# Jitted by itself, so that a program lowers the kernel once and not for every layer that calls it.
# Lowering took half a second a layer (jax 0.11.2).
@functools.partial(jax.jit, static_argnames=("spec", "splits"))
def _attend(
    q, body: PackedBody, layer, start, stop, spec: PackedSpec, splits: int | None
) -> Partial:
    """Call the kernel."""
    batch, slots = q.shape[0], body.value_scale.shape[-1]
    queries = gpu_call.columns(q.astype(jnp.bfloat16).astype(jnp.float32), spec.kv_heads)
    tiles = slots // tile_tokens(spec.key_bits)
    split_count = splits or gpu_call.default_splits(tiles, batch * spec.kv_heads, resident(spec))
    plan = Plan(spec, queries.shape[-1], split_count)
    operands = _operands(queries, body, spec)
    return gpu_call.attend(plan, kernel, memory(plan), operands, q.shape, layer, start, stop)


def _operands(queries, body: PackedBody, spec: PackedSpec) -> Operands:
    """Lay out the operands. No array of a body that grows with its tokens is copied."""

    def in_steps(x):
        """Split the axis of tokens: [L, B, slices, S/64, 64]."""
        return x.reshape(*x.shape[:3], -1, STEP)

    by_channel, by_token = (body.key_scale, body.key_low), (body.key_factor,)
    if spec.key_channels:
        by_channel, by_token = (None, None), by_channel
    tokens = tuple(in_steps(x) for x in by_token if x is not None)
    value_low = in_steps(body.value_low) if spec.minima else None
    factors = () if body.value_factor is None else (body.value_factor,)
    values = body.value_codes, in_steps(body.value_scale), value_low, factors
    operands = Operands(queries, body.key_codes, *by_channel, tokens, *values)
    if spec.rope is not None:
        operands = operands._replace(
            turns=gpu_rope.turns(body, spec), offsets=gpu_rope.offsets(spec)
        )
    if body.signposts is not None:
        tables = jnp.stack([table_words(x) for x in body.signposts])
        operands = operands._replace(tables=tables)
    if body.signposts is not None and spec.rope is not None:
        # Scales and minima of a channel hold for all tokens: [K, 2, 1, D], a slice for each KV
        # head.
        factors = jnp.stack([body.key_scale, body.key_low]).reshape(
            2, spec.kv_heads, 1, spec.head_dim
        )
        operands = operands._replace(
            key_scale=to_bits(factors.swapaxes(0, 1).astype(jnp.bfloat16)),
            key_low=None,
        )
    return operands
