"""The exact codec: vectors stored as they are. With it the exact cache is one more method, measured by the same code."""

import dataclasses

from kvqjax.codecs.base import Codec
from kvqjax.layout import Field

__all__ = ["Exact"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact:
    """Store the compute dtype itself. `dtype` is filled in by the cache when it is made."""

    dtype: str = "float32"

    def build(self, width: int) -> Codec:
        field = Field(kind="plain", width=width, role="payload", dtype=self.dtype)
        return Codec(width, 1, {"x": field}, lambda _, x: {"x": x}, lambda _, tile: tile["x"])
