"""KVQuant (arXiv 2401.18079): keys per channel before RoPE, values per token, non-uniform signposts, exact
outliers."""

from typing import Any

from kvqjax.codecs.nuq import Nuq
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.rotation import turning
from kvqjax.methods.spec import Method, method_factory

__all__ = ["kvquant"]


@method_factory
def kvquant(
    *,
    bits: int = 3,
    key_bits: int | None = None,
    value_bits: int | None = None,
    outliers: float = 0.01,
    slots: int = 0,
    sinks: int = 1,
    datatype: str = "nuq",
    rope: str = "pre",
    q_norm: bool = False,
    window: int = 0,
    buffer: int = 1,
    scales: str = "bfloat16",
    outlier_dtype: str = "bfloat16",
    rotate: str = "none",
    value_rotate: str = "same",
) -> Method:
    """Keys per channel with calibrated thresholds and values per token, 2, 3 or 4 bits (KVQuant, section 3).

    `outliers` of each token's channels stay exact, in a fixed number of slots (`slots` gives keys another number than
    the fraction rounded up); `sinks` first tokens stay exact (section 3.5); no window, as in the paper. `datatype`
    "nuq" needs calibrated signposts, "nf" and "int" are the paper's baselines, whose keys still need thresholds.
    `q_norm` is the released code's correction for 2 bits. `buffer` tokens are encoded together: 1, as in the paper, or
    a multiple of 32, which stay exact until they are as many; on TPUs each then costs a fraction (benchmarks/scale.md).
    `scales` and `outlier_dtype` are the dtypes of the values' scales and of outliers.
    A model's key bias costs nothing, since a channel's thresholds hold it.
    `rotate` and `value_rotate` as in `kivi`; calibration then sees rotated keys and values. Keys before RoPE take only
    rotations that commute with it.
    """
    shared = {
        "outliers": outliers,
        "datatype": datatype,
        "q_norm": q_norm,
        "dtype": scales,
        "outlier_dtype": outlier_dtype,
    }
    key = Nuq(bits=key_bits or bits, per="channel", slots=slots, **shared)
    value = Nuq(bits=value_bits or bits, per="token", **shared)
    rotations: dict[str, Any] = turning(rotate, value_rotate, rope, fitted=False)
    layer = KeysAndValues(key=key, value=value, rope=rope, window=window, unit=buffer, **rotations)
    return Method(name="kvquant", layer=layer, sinks=sinks)
