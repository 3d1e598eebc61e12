"""What a kernel on AQUA-KV's bodies is given (arXiv 2501.19392, Algorithm 1).

A body holds HIGGS codes of what a linear map of the layer below misses of keys and values:

    Kr = Kr_prev A + a + residual        Vr = [Kr, Vr_prev] B + b + residual

all before RoPE and over all KV heads, rounded to bfloat16. Kr and Vr are attended to, and flow on to the layer above.
The first layer has no maps: its codes are of keys and values themselves."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec
from kvqjax.pallas_kernels.packed import Rope

__all__ = ["Maps", "PredictedBody", "PredictedSpec"]


class Maps(NamedTuple):
    """The layer's linear maps; inputs of that of values are keys, then the values below."""

    key: Float[Array, "W W"]
    key_bias: Float[Array, " W"]
    value: Float[Array, "2*W W"]
    value_bias: Float[Array, " W"]


class PredictedBody(NamedTuple):
    """The stored codes, and the maps; None in a layer without."""

    codes: HiggsBody
    maps: Maps | None

    @property
    def slots(self) -> int:
        return self.codes.slots

    @property
    def positions(self) -> Int[Array, " stretches"]:
        return self.codes.positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedSpec:
    """`codes` describes the codes as a HIGGS body. `mapped` layers have maps. `dtype` is that of what flows from layer
    to layer, "compute" until a cache's is known. `target` names the chip, as in `PackedSpec`."""

    codes: HiggsSpec
    mapped: bool
    dtype: str = "compute"
    target: str = "cpu"

    @property
    def kv_heads(self) -> int:
        return self.codes.kv_heads

    @property
    def head_dim(self) -> int:
        return self.codes.head_dim

    @property
    def rope(self) -> Rope:
        return self.codes.rope

    @property
    def width(self) -> int:
        """Channels of a token's keys: K*D."""
        return self.codes.width
