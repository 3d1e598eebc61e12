"""KVQuant's dense-and-sparse quantisation of keys per channel and values per token (arXiv
2401.18079, sections 3.1 to 3.4).

    u = (x - z) / s        code = index of the signpost nearest to u        x_hat = s * signpost[code] + z

z is the centre of a range and s half of its width, so that the numbers in the range have u from -1
to 1. The signposts are 2^bits numbers in these units. Outliers are stored exactly and replace
x_hat.

Keys (before RoPE): z and s of every channel are fixed offline. They follow from the channel's
thresholds `upper` and `lower`. A number beyond a threshold is an outlier.

Values: z and s of every token come from the token itself, over all KV heads. With n outlier slots,
the n/2 largest and the n/2 smallest entries of the token are its outliers. The next largest and the
next smallest entry are the ends of its range. This is the top-k rule of the released kernels. The
quantile rule of the released simulation flags the same entries, except that it may flag any number
of equal entries at the limit.

An outlier is stored in 32 bits: the value in bfloat16 and the channel in int16. A token has a fixed
number of slots for outliers. A key with more outliers than slots keeps those that lie farthest out
in units of u, on either side. Its other outliers saturate at the outermost signposts, and `excess`
counts them. Unused slots carry the channel W, which does not exist and is never written.

Codes are computed against the *stored* z and s. First z is rounded to the storage dtype, then s is
rounded upwards, so that the range still covers all numbers. Rounding makes steps a little longer,
but adds no bias. A token or channel of one repeated value has s = 0 and reads as z.

If KV heads are sharded over devices, each shard has the codes, thresholds and ranges of its own
channels of keys. What is stored per token holds for all heads and belongs on every shard: z and s
of values, and the outlier slots of keys and values, which number channels over all heads. Encoding
needs the whole token, because the range of a value and the choice of outliers span the shards. (The
n + 2 extremes of each shard would be enough.) Reading needs no exchange: a shard takes the slots
that name its own channels.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec, Fit
from kvqjax.codecs.nuq_outliers import restore_outliers, store_outliers
from kvqjax.codecs.nuq_range import (
    channel_range,
    divisor,
    normalise_keys,
    stored_range,
    token_range,
)
from kvqjax.codecs.nuq_table import DATATYPES, fixed_signposts, look_up, nearest
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field
from kvqjax.ops.packing.base import slot_rows

FIT = Fit("kvqjax.calibrate.kvquant")
# The largest int16: slots store channel numbers, and the width itself where they are unused
MAX_WIDTH = 32767


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nuq:
    """KVQuant's codec for keys or for values.

    Attributes:
        bits: of a code: 2, 3 or 4.
        per: "channel" for keys, whose thresholds are calibrated; "token" for values, whose range
            and outliers are found in the token.
        outliers: the fraction of a token's channels that is stored exactly.
        slots: outliers that a token can have; 0: the number that the fraction asks for. Values have
            an even number, half of them for each end.
        datatype: "nuq", "nf" or "int" (kvqjax.codecs.nuq_table).
        q_norm: whether signposts are read through a calibrated scale and offset: the released
            code's Q-Norm, meant for 2 bits.
        dtype: of the values' scales and centres.
        outlier_dtype: of the outliers; bfloat16 stores bfloat16 vectors exactly.
    """

    bits: int
    per: str
    outliers: float = 0.0
    slots: int = 0
    datatype: str = "nuq"
    q_norm: bool = False
    dtype: str = "bfloat16"
    outlier_dtype: str = "bfloat16"

    def __post_init__(self):
        check_fields(self)
        if self.bits not in (2, 3, 4):
            raise UserError(f"bits={self.bits}; KVQuant's codes have 2, 3 or 4 bits")
        if self.per not in ("channel", "token"):
            raise UserError(f"per={self.per!r}; known: channel, token")
        if self.datatype not in DATATYPES:
            raise UserError(f"datatype={self.datatype!r}; known: {', '.join(DATATYPES)}")
        if not 0 <= self.outliers < 0.5:
            raise UserError(
                f"outliers={self.outliers}; a fraction of the channels from 0 to below 0.5 is wanted"
            )
        if self.slots < 0 or (self.per == "token" and self.slots % 2):
            raise UserError(
                f"slots={self.slots}; a token has 0 or more slots, values an even number"
            )
        for name in ("dtype", "outlier_dtype"):
            if getattr(self, name) not in ("bfloat16", "float32"):
                raise UserError(f"{name}={getattr(self, name)!r}; known: bfloat16, float32")

    def slot_count(self, width: int) -> int:
        """Count the outlier slots of a token of W channels. Each end has half the number that the
        fraction asks for, rounded up."""
        # Rounded to 9 digits first: 0.07 / 2 * 200 is 7.000000000000001 as a float, and means 7.
        return self.slots or 2 * math.ceil(round(self.outliers / 2 * width, 9))

    def build(self, width: int) -> Codec:
        if width > MAX_WIDTH:
            raise UserError(f"width={width}; KVQuant's codes have at most {MAX_WIDTH} channels")
        slots = self.slot_count(width)
        if (
            slots > width - 2
        ):  # two entries of a value beside its outliers are the ends of its range
            cause = f"slots={self.slots}" if self.slots else f"outliers={self.outliers}"
            raise UserError(
                f"{cause}: {slots} outliers in a width of {width} channels; at least 2 must be none"
            )
        return _per_channel(self, width) if self.per == "channel" else _per_token(self, width)


def _fields(spec: Nuq, width: int) -> dict[str, Field]:
    """Describe the fields that keys and values have in common."""
    fields = {"codes": Field(kind="codes", width=width, bits=spec.bits, role="payload")}
    if count := spec.slot_count(width):
        rows = slot_rows(count, spec.outlier_dtype)
        fields["outliers"] = Field(kind="token", width=rows, role="outliers", dtype="uint16")
    return fields


def _needs(spec: Nuq) -> dict[str, tuple[int, ...]]:
    """Name the constants that keys and values have in common, with their shapes."""
    needs: dict[str, tuple[int, ...]] = (
        {"signposts": (2**spec.bits,)} if spec.datatype == "nuq" else {}
    )
    return needs | ({"norm": (2,)} if spec.q_norm else {})


def signposts(spec: Nuq, constants) -> Float[Array, " M"]:
    """Give the sorted signposts that codes of this spec index, before Q-Norm."""
    if spec.datatype == "nuq":
        return constants["signposts"].astype(jnp.float32)
    return jnp.asarray(fixed_signposts(spec.datatype, spec.bits))


def read_signposts(spec: Nuq, constants) -> Float[Array, " M"]:
    """Give the numbers that codes of this spec are read as: the signposts, through Q-Norm if the
    spec has it."""
    table = signposts(spec, constants)
    return table * constants["norm"][0] + constants["norm"][1] if spec.q_norm else table


def _per_channel(spec: Nuq, width: int) -> Codec:
    """Build the codec of keys."""
    count = spec.slot_count(width)

    def encode(constants, x: Float[Array, "u W"]) -> dict[str, Num[Array, "rows lanes"]]:
        x = wide(x)
        u, outside = normalise_keys(constants, x)
        tile = {"codes": nearest(u, signposts(spec, constants))}
        if count:
            # The outliers that lie farthest out get the slots. Other numbers rank below them all,
            # by -1.
            # [u, count]
            size, channels = jax.lax.top_k(jnp.where(outside, jnp.abs(u), -1.0), count)
            # `width` marks a slot that stays empty
            channels = jnp.where(size >= 0, channels, width)
            tile["outliers"] = store_outliers(x, channels, spec.outlier_dtype)
        return tile

    def decode(constants, tile):
        centre, scale = channel_range(constants)
        lead = (1,) * (tile["codes"].ndim - 1)  # any number of leading axes
        u = look_up(tile["codes"], read_signposts(spec, constants))
        dense = u * scale.reshape(*lead, width) + centre.reshape(*lead, width)
        return _restored(spec, dense, tile)

    needs = {"upper": (width,), "lower": (width,), **_needs(spec)}
    return Codec(width, 1, _fields(spec, width), encode, decode, needs, FIT, apart=True)


def _per_token(spec: Nuq, width: int) -> Codec:
    """Build the codec of values."""
    count = spec.slot_count(width)
    number = {"kind": "token", "width": 1, "dtype": spec.dtype}
    fields = _fields(spec, width)
    fields |= {"scale": Field(role="scales", **number), "centre": Field(role="zeros", **number)}

    def encode(constants, x: Float[Array, "u W"]) -> dict[str, Num[Array, "rows lanes"]]:
        x = wide(x)
        high, low, channels = token_range(x, count // 2)
        centre, scale = stored_range(high, low, spec.dtype)
        # Normalised by the range as it is stored, because decoding knows no other.
        u = (x - centre.astype(jnp.float32)) / divisor(scale.astype(jnp.float32))
        tile = {
            "codes": nearest(u, signposts(spec, constants)),
            "scale": scale.T,
            "centre": centre.T,
        }
        return (
            tile
            if channels is None
            else tile | {"outliers": store_outliers(x, channels, spec.outlier_dtype)}
        )

    def decode(constants, tile):
        scale, centre = (
            jnp.swapaxes(tile[name], -1, -2).astype(jnp.float32) for name in ("scale", "centre")
        )
        return _restored(
            spec, look_up(tile["codes"], read_signposts(spec, constants)) * scale + centre, tile
        )

    return Codec(width, 1, fields, encode, decode, _needs(spec), FIT, apart=True)


def _restored(spec: Nuq, dense, tile):
    """Put the outliers back in place in the dense numbers."""
    count = spec.slot_count(dense.shape[-1])
    return restore_outliers(dense, tile["outliers"], count, spec.outlier_dtype) if count else dense
