"""Transform coding of keys and values by calibrated second moments (kvqjax.codecs.klt)."""

from kvqjax.codecs.klt import KEY_SLOPE, VALUE_SLOPE, Klt
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.spec import Method, method_factory, value_or


@method_factory
def klt(
    *,
    bits: float = 2.0,
    key_bits: float | None = None,
    value_bits: float | None = None,
    key_slope: float = KEY_SLOPE,
    value_slope: float = VALUE_SLOPE,
    scale: str = "token",
    scales: str = "bfloat16",
    window: int = 0,
    buffer: int = 128,
    sinks: int = 4,
) -> Method:
    """Transform coding (as KVTC, arXiv 2511.01815, does for stored caches): keys before RoPE and
    values are turned into uncorrelated coefficients, and those of more variance get more bits.

    - `bits` per channel on average, any number from 0.125 to 6; `key_bits` and `value_bits`
      override it.
    - `key_slope` and `value_slope` say how fast bits fall from the first coefficient to the last
      (kvqjax.codecs.klt).
    - `scale="token"` stores a scale of the dtype `scales` for each token, "none" does not.
    - `buffer` tokens leave the window together, beyond the newest `window`; `sinks` first tokens
      stay exact.

    Calibration measures means and covariances. With the defaults, Llama-3.1-8B stores 2.016 bits
    per channel. Raises UserError for values that are not listed here.
    """
    shared = {"scale": scale, "dtype": scales}
    key = Klt(bits=value_or(key_bits, bits), slope=key_slope, **shared)
    value = Klt(bits=value_or(value_bits, bits), slope=value_slope, **shared)
    layer = KeysAndValues(key=key, value=value, rope="pre", window=window, unit=buffer)
    return Method(name="klt", layer=layer, sinks=sinks)
