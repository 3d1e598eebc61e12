"""Asymmetric uniform quantisation with a float minimum (KIVI, arXiv 2402.02750, section 3; also the per-token
baseline).

    q = clip(round((x - m) / s), 0, 2^b - 1)        x_hat = q * s + m

with m the group's minimum and s its range over 2^b - 1, both as *stored*. Before codes are computed, m is rounded down
and s up to the storage dtype, so that rounding costs range and never bias. Round half to even.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field

__all__ = ["GROUPS", "Uniform", "at_least_one", "check_group", "fitting_group", "round_toward"]


GROUPS = (128, 64, 32)  # channels, as the papers have them


def round_toward(x: Float[Array, "*S"], dtype: str, up: bool) -> Float[Array, "*S"]:
    """Round float32 numbers to the nearest value of `dtype` that is not below (`up`) or not above (down) them."""
    nearest = x.astype(dtype)
    stored = nearest.astype(jnp.float32)
    overshoots = stored < x if up else stored > x
    # The bits of a float count its distance from zero; `jnp.nextafter` gives the same by three times the operations.
    width = 8 * nearest.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(nearest, f"uint{width}")
    nearer = bits >> width - 1 == int(up)  # the first bit is that of negative numbers
    neighbour = jnp.where(nearer, bits - 1, bits + 1)
    return jnp.where(overshoots, jax.lax.bitcast_convert_type(neighbour, nearest.dtype), nearest)


def _parameters(x, axis: int, bits: int, dtype: str):
    """Compute the stored scale and minimum of each group along `axis` (kept with size 1), in `dtype`."""
    low = round_toward(x.min(axis, keepdims=True), dtype, up=False)
    reach = x.max(axis, keepdims=True) - low.astype(jnp.float32)
    return round_toward(reach / (2**bits - 1), dtype, up=True), low


def _quantise(x, scale, low, bits: int):
    """Compute codes against the stored parameters; a constant group has scale 0 and code 0."""
    scale, low = scale.astype(jnp.float32), low.astype(jnp.float32)
    steps = (x - low) / jnp.where(scale > 0, scale, 1.0)
    return jnp.clip(jnp.round(steps), 0, 2**bits - 1).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """`along="tokens"`: one scale and minimum per channel for `group` consecutive tokens (KIVI's keys).
    `along="channels"`: one per token for `group` consecutive channels (KIVI's values), 0 for those of a head. With
    `fit` the group becomes smaller where the model's channels ask for it (`fitting_group`)."""

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
    """Give back a number of channels that share a scale. Raises UserError for less than one."""
    if group < 1:
        raise UserError(f"group={group}; a group has at least 1 channel")
    return group


def fitting_group(width: int, most: int = GROUPS[0]) -> int:
    """Choose how many channels share a scale where nobody says: the largest of 128, 64 and 32, up to `most`, that
    divides `width` or exceeds it. `most` where none does."""
    return next((group for group in GROUPS if group <= most and width % min(group, width) == 0), most)


def check_group(group: int, width: int, least: int = 1) -> None:
    """Raise UserError unless `group` channels divide `width` or exceed it, naming a smaller group that does: a power
    of two of `least` at least."""
    if width % min(at_least_one(group), width) == 0:
        return
    fitting = [2**i for i in range(group.bit_length()) if least <= 2**i < group and width % 2**i == 0]
    hint = f"group={fitting[-1]} does" if fitting else f"nor does any power of two from {least} on"
    raise UserError(f"group={group} does not divide the width {width}; {hint}")


def _per_token(spec: Uniform, width: int) -> Codec:
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
        codes = tile["codes"]
        groups = codes.reshape(*codes.shape[:-1], count, group).astype(jnp.float32)
        scale, low = (jnp.swapaxes(tile[name], -1, -2)[..., None].astype(jnp.float32) for name in ("scale", "low"))
        return (groups * scale + low).reshape(codes.shape)

    def by_products(tile):
        """Give the same bits by products with 0 and 1, which spread a group's scale over its channels. A TPU would move
        every group of channels to lanes of its own and back. A sum of one bfloat16 number and zeros is exact."""
        members = jnp.asarray(np.repeat(np.eye(count), group, axis=1), jnp.bfloat16)
        spread = functools.partial(jnp.einsum, "...gn,gc->...nc", preferred_element_type=jnp.float32)
        return tile["codes"].astype(jnp.float32) * spread(tile["scale"], members) + spread(tile["low"], members)

    def decode(_, tile):
        forms = {"tpu": by_products} if spec.dtype == "bfloat16" else {}
        return jax.lax.platform_dependent(tile, **forms, default=by_groups)

    return Codec(width, 1, fields, encode, decode, apart=True)
