"""The arguments of a kernel on AQUA-KV's bodies (arXiv 2501.19392, Algorithm 1).

Linear maps predict a layer's keys and values from those of the layer below. A body holds HIGGS
codes of the residuals, which are what the predictions miss:

    Kr = Kr_prev A + a + residual        Vr = [Kr, Vr_prev] B + b + residual

Kr and Vr are the reconstructed keys and values, before RoPE, over all KV heads, rounded to
bfloat16. Queries attend to them, and they flow on to the layer above. The first layer has no maps:
its codes are of keys and values themselves."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec
from kvqjax.pallas_kernels.packed import Rope


class Maps(NamedTuple):
    """The layer's linear maps. Inputs of the values' map are this layer's keys, then the values of
    the layer below."""

    key: Float[Array, "W W"]
    key_bias: Float[Array, " W"]
    value: Float[Array, "2*W W"]
    value_bias: Float[Array, " W"]


class PredictedBody(NamedTuple):
    """The stored codes, and the layer's maps; None in a layer without maps."""

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
    """Everything static about a call.

    Attributes:
        codes: The codes, described as a HIGGS body.
        mapped: Whether the layer has maps.
        dtype: dtype of the keys and values that flow from layer to layer; "compute" until the
            cache's is known.
        target: The chip, as in `PackedSpec`."""

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
