"""The exact codec: vectors stored as they are. With it the exact cache is one more method, measured
by the same code."""

import dataclasses

from kvqjax.codecs.base import Codec
from kvqjax.ops.layout import Field


@dataclasses.dataclass(frozen=True)
class Exact:
    """Store the compute dtype itself, one vector per token."""

    def build(self, width: int) -> Codec:
        field = Field(kind="plain", width=width, role="payload", dtype="compute")
        return Codec(
            width,
            1,
            {"x": field},
            lambda _, x: {"x": x},
            lambda _, tile: tile["x"],
            apart=True,
            lossless=True,
        )
