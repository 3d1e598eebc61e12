"""The exact codec: vectors stored as they are. With it the exact cache is one more method, measured by the same
code."""

import dataclasses

from kvqjax.codecs.base import Codec, CodecSpec
from kvqjax.codecs.kernel_form import Packed
from kvqjax.model.config import KVShape
from kvqjax.ops.layout import Field
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec

__all__ = ["Exact"]


@dataclasses.dataclass(frozen=True)
class Exact:
    """Store the compute dtype itself, one vector per token."""

    def build(self, width: int) -> Codec:
        field = Field(kind="plain", width=width, role="payload", dtype="compute")
        return Codec(width, 1, {"x": field}, lambda _, x: {"x": x}, lambda _, tile: tile["x"], apart=True)

    def packed(self, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
        """Name the kernel for exact keys after RoPE beside exact values."""
        if not isinstance(value, Exact) or (rope != "post" and shape.rope is not None):
            return None
        body = lambda weights, constants, stored, first: ExactBody(*(stored[s]["x"][0] for s in ("k", "v")))  # noqa: E731
        return Packed(ExactSpec(kv_heads=shape.num_kv_heads, head_dim=shape.head_dim), body)
