"""KVQuant (arXiv 2401.18079): keys per channel before RoPE, values per token, non-uniform
signposts, exact outliers."""

from typing import Any

from kvqjax.codecs.nuq import Nuq
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.rotation import turning
from kvqjax.methods.spec import Method, method_factory, value_or


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
    """KVQuant (arXiv 2401.18079, section 3): each number is stored as the index of the nearest
    calibrated level. Keys are quantised before RoPE, with a calibrated range for each channel;
    values with a range for each token. The largest outliers are stored by themselves.

    - `bits` of a code, 2 to 4; `key_bits` and `value_bits` override it.
    - `outliers`: the share of a token's channels that stay exact (from 0 to below 0.5), in a fixed
      number of slots a token; `slots` gives keys another number than the share rounded up.
      `outlier_dtype` is theirs, `scales` that of the values' scales.
    - `sinks` first tokens stay exact (section 3.5), and `window` newest ones: none in the paper.
      `buffer` tokens are encoded together and stay exact until then: 1, as in the paper, or a
      multiple of 32, which are written as whole rows of words instead of a few bits of one at a
      time.
    - `datatype`: "nuq" needs calibrated signposts; "nf" and "int" are the paper's baselines, whose
      keys still need thresholds. `q_norm` is the released code's correction for 2 bits.
    - `rope="pre"` stores keys before RoPE, "post" after it. `rotate` and `value_rotate` as in
      `kivi`; calibration then sees rotated keys and values, and keys before RoPE take only
      rotations that commute with it.

    A model's key bias costs nothing, since a channel's thresholds hold it. With the defaults,
    Llama-3.1-8B stores 3.391 bits per channel. Raises UserError for values that are not listed
    here.
    """
    shared = {
        "outliers": outliers,
        "datatype": datatype,
        "q_norm": q_norm,
        "dtype": scales,
        "outlier_dtype": outlier_dtype,
    }
    key = Nuq(bits=value_or(key_bits, bits), per="channel", slots=slots, **shared)
    value = Nuq(bits=value_or(value_bits, bits), per="token", **shared)
    # Fitted rotations need codecs without calibrated tables.
    rotations: dict[str, Any] = turning(rotate, value_rotate, rope, fitted=False)
    layer = KeysAndValues(key=key, value=value, rope=rope, window=window, unit=buffer, **rotations)
    return Method(name="kvquant", layer=layer, sinks=sinks)
