"""HIGGS on its own: keys and values coded by Hadamard transform and vector grid, no predictor
(arXiv 2411.17525; the baseline of arXiv 2501.19392, Table 1)."""

from typing import Any

from kvqjax._arguments import whole_number
from kvqjax._errors import UserError
from kvqjax.codecs import CENTRES, BlockCentred, centred
from kvqjax.codecs.higgs import Higgs
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.rotation import turning
from kvqjax.methods.spec import Method, method_factory, value_or

GROUPS = ("auto", "head", "width")


@method_factory
def higgs(
    *,
    bits: int = 2,
    key_bits: int | None = None,
    value_bits: int | None = None,
    dim: int = 2,
    group: str = "auto",
    seed: int | None = None,
    scales: str = "bfloat16",
    rope: str = "pre",
    window: int = 0,
    buffer: int = 128,
    sinks: int = 4,
    centre: str = "auto",
    norm: str = "plain",
    rotate: str = "none",
    value_rotate: str = "same",
) -> Method:
    """HIGGS (arXiv 2411.17525; a baseline of arXiv 2501.19392, Table 1): keys and values go through
    a Hadamard transform and get the nearest points of a grid that is optimal for Gaussian vectors.
    `group` channels of a token share a scale.

    - `bits` per number, in vectors of `dim` numbers: 2 to 4 in 1 or 2 dimensions, 2 or 3 in 4, 2 in
      6. `key_bits` and `value_bits` override `bits`.
    - `group` channels share a scale: "auto" (up to 1024), "head", "width" or a number. `scales` is
      its dtype, `seed` turns on fixed random signs.
    - `buffer` tokens leave the window together, beyond the newest `window`; `sinks` first tokens
      stay exact.
    - `rope="pre"` stores keys before RoPE, "post" after it. `centre` takes off the keys: "auto" the
      model's key bias, where it has one; "mean" a calibrated mean; "block" the bias, and the mean
      of every 128 tokens, which is stored for 1/8 bit a key's number (kvqjax.codecs.centring);
      "none" nothing.
    - `norm`: "plain", "corrected" (what is decoded keeps its length) or "unbiased" (scores along a
      key keep theirs).
    - `rotate` and `value_rotate` as in `kivi`: a rotation takes the place of the codec's own
      transform.

    A channel takes `bits + 16 / group` bits: with the defaults, Llama-3.1-8B stores 2.016 bits per
    channel. Raises UserError for values that are not listed here.
    """
    channels = whole_number(group)
    if group not in GROUPS and channels is None:
        raise UserError(f"group={group!r}; known: {', '.join(GROUPS)} or a number of channels")
    if centre not in (*CENTRES, "block"):
        raise UserError(f"centre={centre!r}; known: {', '.join(CENTRES)}, block")
    if centre == "block" and (rope, rotate) != ("pre", "none"):
        raise UserError(
            'centre="block": keys have a mean before RoPE alone; wanted rope=pre and rotate=none'
        )
    rotations = turning(rotate, value_rotate, rope)
    size: int | str | None = group if channels is None else channels
    if group == "auto":
        size = None
    shared = {"dim": dim, "group": size, "seed": seed, "dtype": scales, "norm": norm}

    def codec(bits: int, rotation: str) -> Higgs:
        # "pairs" mixes two channels only, so the codec keeps its own transform then.
        return Higgs(bits=bits, rotated=rotation not in ("none", "pairs"), **shared)

    key = codec(value_or(key_bits, bits), rotations["key_rotation"])
    value = codec(value_or(value_bits, bits), rotations["value_rotation"])
    timing: dict[str, Any] = {"rope": rope, "window": window, "unit": buffer, **rotations}
    # With "block" the model's bias is subtracted too, before the mean of a block. The bias is known
    # in float32, while a stored mean is rounded to the 8 bits of a bfloat16.
    key = BlockCentred(inner=key) if centre == "block" else centred(key, centre)
    layer = KeysAndValues(key=key, value=value, unbiased=centre in ("auto", "block"), **timing)
    return Method(name="higgs", layer=layer, sinks=sinks)
