"""Some channels kept as they are beside any codec for the rest (XQuant, arXiv 2508.10395, Table
B.1: the first latent).

The inner codec still sees vectors of all channels, in which a neighbour's numbers stand in a kept
channel's place. So its lanes stay aligned, and a kept channel does not widen the range of a group.
The price is that kept channels have codes too, which no reader looks at: with e bits a code, a kept
channel costs 16/W bits per number instead of (16 - e)/W.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec, CodecSpec
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutlierChannels:
    """Store `channels` in `dtype`, and the other channels by the codec `inner`."""

    channels: tuple[int, ...]
    inner: CodecSpec
    dtype: str = "bfloat16"

    def build(self, width: int) -> Codec:
        exact = sorted(set(self.channels))
        if not exact or exact[0] < 0 or exact[-1] >= width or len(exact) == width:
            raise UserError(f"channels={self.channels}; wanted some, not all, of 0 to {width - 1}")
        # Where `inner` finds the numbers for each channel: in the channel itself, or for a kept
        # channel in the next one that is not kept. That one shares the kept channel's group along
        # channels, except at a group's edge.
        source = [
            next(c % width for c in range(i, i + width) if c % width not in exact)
            for i in range(width)
        ]
        inner = self.inner.build(width)
        kept_channels, neighbour = np.asarray(exact), np.asarray(source)
        field = Field(kind="token", width=len(exact), role="outliers", dtype=self.dtype)

        def encode(constants, x):
            return {**inner.encode(constants, x[:, neighbour]), "kept": wide(x[:, kept_channels]).T}

        def decode(constants, tile):
            numbers = inner.decode(
                constants, {name: a for name, a in tile.items() if name != "kept"}
            )
            return numbers.at[..., kept_channels].set(
                jnp.swapaxes(tile["kept"], -1, -2).astype(numbers.dtype)
            )

        return Codec(
            width,
            inner.unit,
            {**inner.fields, "kept": field},
            encode,
            decode,
            inner.needs,
            inner.fit,
        )
