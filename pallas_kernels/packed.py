"""The arguments of a kernel on packed keys and values: a body's arrays and a static description.

There are two kinds of codes:

- uniform (KIVI, arXiv 2402.02750): x_hat = code * scale + low. Keys have one scale and minimum per
  channel for `key_group` consecutive tokens. Values have one per token for `value_group`
  consecutive channels. Keys may also have one per token for `key_channels` channels (OSCAR).
- nuq (KVQuant, arXiv 2401.18079): x_hat = signpost[code] * scale + low. One table of 2^b signposts
  is for keys, another one for values. A channel of keys has a scale and a centre (`low`) that are
  constants of the layer. A value has those of its token. `key_slots` and `value_slots` outliers per
  token replace what their codes say. Keys after RoPE and values may instead have one scale for each
  token and head, and no minimum: x_hat = signpost[code] * scale (TurboQuant, arXiv 2504.19874).

Uniform keys may be multiplied by factors of their token: one factor for all KV heads (OScaR), or
one for each (KVarN). Values may then be multiplied by a factor for each channel and `key_group`
tokens (KVarN).

Keys may be stored before RoPE (`PackedSpec.rope`). The body then says where each stretch of tokens
begins in the sequence. The arrays lie in planes (`kvqjax.ops.packing.base`), all KV heads side by
side: head h lies in lanes h*D to (h+1)*D - 1."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int, Shaped, UInt

from kvqjax.ops.packing.base import slot_rows, split_bits
from kvqjax.ops.packing.planes import words_shape
from kvqjax.pallas_kernels.chips import family


class Rope(NamedTuple):
    """The rotation of keys that are stored before RoPE.

    Attributes:
        frequencies: Angle per position of each pair of channels (i, i + D/2), in radians.
        factor: Multiplies cos and sin."""

    frequencies: tuple[float, ...]
    factor: float = 1.0


class Signposts(NamedTuple):
    """The sorted numbers that nuq codes index."""

    key: Float[Array, " 2**key_bits"]
    value: Float[Array, " 2**value_bits"]


class PackedBody(NamedTuple):
    """The stored fields of one run of layers: L layers, B rows, S slots, W = K*D lanes.

    Codes of b bits have S*b/32 rows of words, one array per plane set (`split_bits`). Where the
    spec is `striped`, keys are lines [L, B, K, S/32, D*b/32, 32] and values stripes [L, B, S/1024,
    W, 32*b]. Scales and minima have the dtype `scales` of the spec. Those of 16 bits are stored as
    the integers that hold their bits. Where `key_group` and `key_channels` are 0, scales and minima
    of keys are constants of the layer, [W] float32.

    `positions` are given for keys before RoPE. The slots are cut into n equal stretches, each a
    multiple of the spec's `unit`. Each stretch has consecutive positions, of which the first one is
    given. Outliers are 16-bit words: the values of a token's slots, then their channels
    (kvqjax.codecs.nuq_outliers)."""

    key_codes: tuple[UInt[Array, "L B ..."], ...]
    # [L, B, W/key_channels, S] of keys per token
    key_scale: Shaped[Array, "L B S/key_group W"] | Float[Array, " W"]
    key_low: Any  # as key_scale; None where the spec has no `minima`
    value_codes: tuple[UInt[Array, "L B ..."], ...]
    value_scale: Shaped[Array, "L B W/value_group S"]
    value_low: Any  # as value_scale; None likewise
    positions: Int[Array, " n"] | None = None
    signposts: Signposts | None = None
    key_outliers: UInt[Array, "L B _ S"] | None = None
    value_outliers: UInt[Array, "L B _ S"] | None = None
    key_factor: Shaped[Array, "L B key_factors S"] | None = None
    value_factor: Shaped[Array, "L B S/key_group W"] | None = None

    @property
    def slots(self) -> int:
        return self.value_scale.shape[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """Everything static about a call.

    Attributes:
        key_bits: Bits of a key's code.
        value_bits: Bits of a value's code.
        key_group: Tokens that share a scale of a channel of keys; 0 where all tokens share it, and
            where keys have scales per token.
        value_group: Channels that share a scale of a token's value.
        kv_heads: KV heads, K.
        head_dim: Channels of a head, D.
        scales: Dtype of scales and minima.
        target: The chip that the program is compiled for.
        rope: How keys are rotated; None for keys after RoPE.
        datatype: "uniform" or "nuq".
        key_slots: Outliers of a token's keys.
        value_slots: Outliers of a token's values.
        key_factors: How many factors a token has that multiply its keys: 0, 1, or one for each KV
            head.
        value_factors: Whether values have factors too.
        key_channels: Channels that share a scale of a token's key; 0 where keys have scales per
            channel.
        striped: Whether keys lie in lines and values in stripes. Only the plain computation reads
        these."""

    key_bits: int
    value_bits: int
    key_group: int
    value_group: int
    kv_heads: int
    head_dim: int
    scales: str = "bfloat16"
    target: str = "cpu"
    rope: Rope | None = None
    datatype: str = "uniform"
    key_slots: int = 0
    value_slots: int = 0
    key_factors: int = 0
    value_factors: bool = False
    key_channels: int = 0
    striped: bool = False

    def __post_init__(self):
        family(self.target)  # refuses what is no target
        if self.datatype not in ("uniform", "nuq"):
            raise ValueError(f"datatype={self.datatype!r}; known: uniform, nuq")
        if self.width % self.value_group:
            raise ValueError(
                f"value_group={self.value_group} does not divide the width {self.width}"
            )

    @property
    def width(self) -> int:
        """Lanes of a row: K*D."""
        return self.kv_heads * self.head_dim

    @property
    def unit(self) -> int:
        """The least number of tokens that is a whole number of blocks, or groups, of every
        array."""
        if self.striped:
            return math.lcm(1024, self.key_group)
        key, value = split_bits(self.key_bits), split_bits(self.value_bits)
        return math.lcm(*(1024 // part for part in key + value), self.key_group or 1)

    @property
    def plain(self) -> bool:
        """Say whether these are uniform codes of keys after RoPE per channel, without factors: what
        `reference` reads."""
        extras = (
            self.key_slots,
            self.value_slots,
            self.key_factors,
            self.value_factors,
            self.key_channels,
        )
        return self.rope is None and self.datatype == "uniform" and not any(extras)

    @property
    def minima(self) -> bool:
        """Say whether codes have minima: signposts with a scale for each token and head lie around
        0 (TurboQuant)."""
        return self.datatype == "uniform" or not self.key_channels

    @property
    def value_slice(self) -> int:
        """Channels that share both a KV head and a value scale: the width of one product with the
        values."""
        return math.gcd(self.head_dim, self.value_group)


def uniform_body(constants, stored, positions) -> PackedBody:
    """Name the stored fields of keys and values that are both uniform as kernels name them."""
    keys, values = stored["k"], stored["v"]
    (key_scale,), (key_low,), (value_scale,), (value_low,) = (
        keys["scale"],
        keys["low"],
        values["scale"],
        values["low"],
    )
    return PackedBody(
        keys["codes"], key_scale, key_low, values["codes"], value_scale, value_low, positions
    )


def _expected_shapes(body: PackedBody, spec: PackedSpec, lead: tuple[int, ...]):
    """Yield (name, array, expected shape) of every array. `lead` is (layers, rows). The number of
    slots is taken from the value scales."""
    slots = body.value_scale.shape[-1]
    for name, codes, bits in (
        ("key", body.key_codes, spec.key_bits),
        ("value", body.value_codes, spec.value_bits),
    ):
        parts = split_bits(bits)
        if len(codes) != len(parts):
            raise ValueError(
                f"{name}_codes: got {len(codes)} arrays, want {len(parts)} for {bits} bits"
            )
        for words, part in zip(codes, parts, strict=True):
            shape = (slots * part // 32, spec.width)
            if spec.striped:
                keys = words_shape(spec.kv_heads, spec.head_dim, part, slots)
                shape = keys if name == "key" else (slots // 1024, spec.width, 32 * part)
            yield f"{name}_codes", words, (*lead, *shape)
    shape = (*lead, slots // spec.key_group, spec.width) if spec.key_group else (spec.width,)
    if spec.key_channels:
        shape = (*lead, spec.width // spec.key_channels, slots)
    of_values = (*lead, spec.width // spec.value_group, slots)
    yield "key_scale", body.key_scale, shape
    yield "value_scale", body.value_scale, of_values
    if spec.minima:
        yield "key_low", body.key_low, shape
        yield "value_low", body.value_low, of_values
    if body.signposts is not None:
        yield "signposts.key", body.signposts.key, (2**spec.key_bits,)
        yield "signposts.value", body.signposts.value, (2**spec.value_bits,)
    for name, count in (("key_outliers", spec.key_slots), ("value_outliers", spec.value_slots)):
        if getattr(body, name) is not None:
            yield name, getattr(body, name), (*lead, slot_rows(count, spec.scales), slots)
    if body.key_factor is not None:
        yield "key_factor", body.key_factor, (*lead, spec.key_factors, slots)
    if body.value_factor is not None:
        yield "value_factor", body.value_factor, (*lead, slots // spec.key_group, spec.width)


def row_slots(body, pages: Int[Array, "B N"] | None) -> int:
    """Count the slots of a row: those of the body's arrays, or of all N pages that a row may
    have."""
    return body.slots if pages is None else body.slots * pages.shape[1]


def check(
    q: jax.Array, body: PackedBody, spec: PackedSpec, pages: Int[Array, "B N"] | None = None
) -> None:
    """Raise ValueError, while the program is traced, unless the query and every array have the
    shapes that `spec` says. Where a table of `pages` is given, the body's rows are pages, and each
    of the query's rows may have N of them."""
    heads, dim = q.shape[2:]
    if dim != spec.head_dim or heads % spec.kv_heads:
        raise ValueError(
            f"q: got {q.shape}, want [B, T, a multiple of {spec.kv_heads}, {spec.head_dim}]"
        )
    if body.slots % spec.unit:
        raise ValueError(f"a body of {body.slots} slots; want a multiple of {spec.unit}")
    count = 0 if body.positions is None else len(body.positions)
    # Positions are those of a row's tokens, also where the arrays' rows are pages.
    slots = row_slots(body, pages)
    if spec.rope is not None and (not count or slots % (spec.unit * count)):
        raise ValueError(f"positions: got {count} for {slots} slots; want stretches of {spec.unit}")
    for name, present in (
        ("key_low", spec.minima),
        ("value_low", spec.minima),
        ("signposts", spec.datatype == "nuq"),
        ("key_outliers", spec.key_slots > 0),
        ("value_outliers", spec.value_slots > 0),
        ("key_factor", spec.key_factors > 0),
        ("value_factor", spec.value_factors),
    ):
        if present and getattr(body, name) is None:
            raise ValueError(f"{name}: got None, want those of {spec}")
    layers, stored_rows = body.value_scale.shape[:2]
    rows = len(q) if pages is None else stored_rows  # a pool may have any number of pages
    for name, array, shape in _expected_shapes(body, spec, (layers, rows)):
        if array.shape != shape:
            raise ValueError(f"{name}: got {array.shape}, want {shape}")
