"""Asymmetric uniform quantisation with a float minimum (KIVI, arXiv 2402.02750, section 3; also the
per-token baseline).

    q = clip(round((x - m) / s), 0, 2^b - 1)        x_hat = q * s + m

m is the group's minimum, s its range over 2^b - 1, both as *stored*. Before codes are computed, m
is rounded down and s up to the storage dtype, so that the codes still cover the whole group.
Rounding makes steps a little longer, but adds no bias. `round` rounds halves to even.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field

GROUPS = (128, 64, 32)  # channels, as the papers have them


def round_toward(x: Float[Array, "*S"], dtype: str, up: bool) -> Float[Array, "*S"]:
    """Round float32 numbers to values of `dtype`, upwards (`up`) or downwards: to the nearest value
    that is not below the number, or not above it."""
    nearest = x.astype(dtype)
    stored = nearest.astype(jnp.float32)
    # Where the nearest value lies on the wrong side of the number, its neighbour on the other side
    # is taken.
    is_wrong = stored < x if up else stored > x
    # The bits of a float, without its sign, count values away from zero. So the neighbour's bits
    # are one more or one less. `jnp.nextafter` takes three times the operations.
    width = 8 * nearest.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(nearest, f"uint{width}")
    sign = bits >> width - 1  # 1 for negative numbers
    towards_zero = sign == int(up)  # up from a negative number, or down from a positive one
    neighbour = jnp.where(towards_zero, bits - 1, bits + 1)
    return jnp.where(is_wrong, jax.lax.bitcast_convert_type(neighbour, nearest.dtype), nearest)


def _parameters(x, axis: int, bits: int, dtype: str):
    """Compute the scale and minimum of each group along `axis`, as they are stored in `dtype`. The
    axis is kept with size 1."""
    low = round_toward(x.min(axis, keepdims=True), dtype, up=False)
    reach = x.max(axis, keepdims=True) - low.astype(jnp.float32)
    return round_toward(reach / (2**bits - 1), dtype, up=True), low


def _quantise(x, scale, low, bits: int):
    """Compute codes against the stored parameters. A group of equal numbers has scale 0 and codes
    0."""
    scale, low = scale.astype(jnp.float32), low.astype(jnp.float32)
    steps = (x - low) / jnp.where(scale > 0, scale, 1.0)
    return jnp.clip(jnp.round(steps), 0, 2**bits - 1).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """Uniform codes with a scale and a minimum for each group.

    Attributes:
        bits: of a code.
        along: "tokens": a group is `group` consecutive tokens of one channel (KIVI's keys).
            "channels": a group is `group` consecutive channels of one token (KIVI's values).
        group: how many numbers share a scale; 0 along channels: those of a head.
        dtype: of scales and minima.
        fit: whether the group becomes smaller where the model's channels ask for it
            (`fitting_group`).
    """

    bits: int
    along: str
    group: int = 32
    dtype: str = "bfloat16"
    fit: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.bits not in (1, 2, 3, 4, 5, 6, 8):
            raise UserError(f"bits={self.bits}; uniform codes have 1, 2, 3, 4, 5, 6 or 8 bits")
        if self.along not in ("tokens", "channels"):
            raise UserError(f"along={self.along!r}; known: tokens, channels")
        if self.along == "tokens" and self.group not in (32, 64, 128):
            raise UserError(f"group={self.group}; groups along tokens have 32, 64 or 128 tokens")
        if self.group < 0:  # 0 is open (`for_heads`)
            raise UserError(f"group={self.group}; a group has at least 1 channel")
        if self.dtype not in ("bfloat16", "float32"):
            raise UserError(f"dtype={self.dtype!r}; scales are stored as bfloat16 or float32")

    def for_heads(self, heads: int, head_dim: int) -> "Uniform":
        group = fitting_group(heads * head_dim, self.group) if self.fit else self.group or head_dim
        return dataclasses.replace(self, group=group, fit=False)

    def build(self, width: int) -> Codec:
        return _per_channel(self, width) if self.along == "tokens" else _per_token(self, width)


def _per_channel(spec: Uniform, width: int) -> Codec:
    """Build the codec with groups along tokens."""
    size = {"kind": "group", "width": width, "group": spec.group, "dtype": spec.dtype}
    fields = {
        "codes": Field(kind="codes", width=width, bits=spec.bits, role="payload"),
        "scale": Field(role="scales", **size),
        "low": Field(role="zeros", **size),
    }

    def encode(_, x: Float[Array, "u W"]) -> dict[str, Num[Array, "rows lanes"]]:
        groups = wide(x).reshape(-1, spec.group, width)
        scale, low = _parameters(groups, 1, spec.bits, spec.dtype)
        codes = _quantise(groups, scale, low, spec.bits)
        return {"codes": codes.reshape(x.shape), "scale": scale[:, 0], "low": low[:, 0]}

    def decode(_, tile):
        codes = tile["codes"]
        groups = codes.reshape(*codes.shape[:-2], -1, spec.group, width).astype(jnp.float32)
        scale, low = (tile[name][..., None, :].astype(jnp.float32) for name in ("scale", "low"))
        return (groups * scale + low).reshape(codes.shape)

    return Codec(width, spec.group, fields, encode, decode, apart=True)


def at_least_one(group: int) -> int:
    """Return `group`, a number of channels that share a scale. Raises UserError for less than
    one."""
    if group < 1:
        raise UserError(f"group={group}; a group has at least 1 channel")
    return group


def fitting_group(width: int, most: int = GROUPS[0]) -> int:
    """Choose how many channels share a scale, for a user who names no number.

    Args:
        width: channels of a vector.
        most: the largest number that may be chosen.

    Returns:
        The largest of 128, 64 and 32 that is not above `most` and that divides `width` or exceeds
        it; `most` where none does.
    """
    return next(
        (group for group in GROUPS if group <= most and width % min(group, width) == 0), most
    )


class GroupError(UserError):
    """A group does not divide a width. `fitting` are smaller groups that do, the largest first."""

    def __init__(self, message: str, fitting: Sequence[int]):
        super().__init__(message)
        self.fitting = fitting


def check_group(group: int, width: int, least: int = 1) -> None:
    """Raise GroupError unless `group` channels divide `width` or exceed it. What fits is a power of
    two, at least `least`."""
    if width % min(at_least_one(group), width) == 0:
        return
    fitting = [
        2**i for i in range(group.bit_length()) if least <= 2**i < group and width % 2**i == 0
    ]
    rest = "" if fitting else f"; nor does any power of two from {least} on"
    raise GroupError(f"group={group} does not divide the width {width}{rest}", fitting[::-1])


def _per_token(spec: Uniform, width: int) -> Codec:
    """Build the codec with groups along channels."""
    check_group(spec.group, width)
    group = min(spec.group, width)
    count = width // group
    fields = {
        "codes": Field(kind="codes", width=width, bits=spec.bits, role="payload"),
        "scale": Field(kind="token", width=count, role="scales", dtype=spec.dtype),
        "low": Field(kind="token", width=count, role="zeros", dtype=spec.dtype),
    }

    def encode(_, x: Float[Array, "u W"]) -> dict[str, Num[Array, "rows lanes"]]:
        groups = wide(x).reshape(-1, count, group)
        scale, low = _parameters(groups, 2, spec.bits, spec.dtype)
        codes = _quantise(groups, scale, low, spec.bits)
        return {"codes": codes.reshape(x.shape), "scale": scale[..., 0].T, "low": low[..., 0].T}

    def by_groups(tile):
        """Decode group by group."""
        codes = tile["codes"]
        groups = codes.reshape(*codes.shape[:-1], count, group).astype(jnp.float32)
        scale, low = (
            jnp.swapaxes(tile[name], -1, -2)[..., None].astype(jnp.float32)
            for name in ("scale", "low")
        )
        return (groups * scale + low).reshape(codes.shape)

    def by_products(tile):
        """Decode to the same bits by products with 0 and 1, which spread a group's scale over its
        channels.

        With an axis of groups, a TPU would move every group of channels to lanes of its own and
        back. The products are
        exact: each sums one bfloat16 number and zeros."""
        members = jnp.asarray(np.repeat(np.eye(count), group, axis=1), jnp.bfloat16)
        spread = functools.partial(
            jnp.einsum, "...gn,gc->...nc", preferred_element_type=jnp.float32
        )
        return tile["codes"].astype(jnp.float32) * spread(tile["scale"], members) + spread(
            tile["low"], members
        )

    def decode(_, tile):
        forms = {"tpu": by_products} if spec.dtype == "bfloat16" else {}
        return jax.lax.platform_dependent(tile, **forms, default=by_groups)

    return Codec(width, 1, fields, encode, decode, apart=True)
