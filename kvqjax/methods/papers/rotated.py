"""Methods of uniform codes in a rotated frame: OScaR (here `omniscale`), KVarN and OSCAR. What they
share is the rotation (kvqjax.methods.rotation); they differ in the factors that are divided out, or
the values that are cut off, before encoding."""

from typing import Any

from kvqjax._errors import UserError
from kvqjax.codecs import Uniform, centred
from kvqjax.codecs.balanced import Balanced
from kvqjax.codecs.clipped import Clipped
from kvqjax.codecs.scaled import Scaled
from kvqjax.codecs.uniform import at_least_one
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.rotation import turning
from kvqjax.methods.spec import Method, method_factory, value_or
from kvqjax.ops.packing.base import PLANE


@method_factory
def omniscale(
    *,
    bits: int = 2,
    key_bits: int | None = None,
    value_bits: int | None = None,
    group: int = 32,
    value_group: int | None = None,
    norm: str = "layer",
    window: int = 128,
    sinks: int = 0,
    scales: str = "bfloat16",
    rotate: str = "hadamard",
    value_rotate: str = "same",
    centre: str = "auto",
) -> Method:
    """OScaR (arXiv 2605.19660): KIVI on keys that are rotated and divided by the norm of their
    token, and on rotated values. Nothing is calibrated.

    `norm` is one of a token over all KV heads ("layer", as released) or one of each head ("head").
    `bits`, `key_bits`, `value_bits`, groups (tokens and channels), `window`, `sinks` and `scales`
    as in `kivi`; `rotate`, `value_rotate` and `centre` too. With the defaults, Llama-3.1-8B stores
    3.008 bits per channel. Raises UserError for values that are not listed here.
    """
    if norm not in ("layer", "head"):
        raise UserError(f"norm={norm!r}; known: layer, head")
    key = Uniform(bits=value_or(key_bits, bits), along="tokens", group=group, dtype=scales)
    channels = at_least_one(value_or(value_group, group))
    value = Uniform(bits=value_or(value_bits, bits), along="channels", group=channels, dtype=scales)
    scaled = Scaled(inner=key, parts=1 if norm == "layer" else 0, dtype=scales)
    timing: dict[str, Any] = {"window": window, "unit": group, **turning(rotate, value_rotate)}
    layer = KeysAndValues(
        key=centred(scaled, centre), value=value, unbiased=centre == "auto", **timing
    )
    return Method(name="omniscale", layer=layer, sinks=sinks)


@method_factory
def kvarn(
    *,
    bits: int = 2,
    key_bits: int | None = None,
    value_bits: int | None = None,
    group: int = 128,
    rounds: int = 8,
    floor: float | None = None,
    window: int = 0,
    sinks: int = 128,
    scales: str = "bfloat16",
    rotate: str = "hadamard",
    value_rotate: str = "same",
    centre: str = "auto",
) -> Method:
    """KVarN (arXiv 2606.03458): keys and values are rotated; each tile of `group` tokens of a head
    is scaled so that its rows and its columns have equal variance; then keys get uniform codes
    channel by channel, values token by token. Nothing is calibrated.

    `bits` of a code, 1 to 6 or 8 (`key_bits` and `value_bits` override it); `group` is 32, 64 or
    128 tokens. `rounds` of balancing; `floor` bounds the logarithms of its factors from below (-0.3
    in the released code, which then hardly balances what varies little). `window` newest and
    `sinks` first tokens stay exact; `scales` is the dtype of scales, minima and factors; `rotate`,
    `value_rotate` and `centre` as in `kivi`. With the defaults, Llama-3.1-8B stores 2.375 bits per
    channel. Raises UserError for values that are not listed here.
    """
    spec = {"heads": 0, "group": group, "rounds": rounds, "floor": floor, "dtype": scales}
    key = Balanced(bits=value_or(key_bits, bits), along="tokens", **spec)
    value = Balanced(bits=value_or(value_bits, bits), along="channels", **spec)
    timing: dict[str, Any] = {"window": window, "unit": group, **turning(rotate, value_rotate)}
    layer = KeysAndValues(
        key=centred(key, centre), value=value, unbiased=centre == "auto", **timing
    )
    return Method(name="kvarn", layer=layer, sinks=sinks)


@method_factory
def oscar(
    *,
    bits: int = 2,
    key_bits: int | None = None,
    value_bits: int | None = None,
    group: int = 0,
    clip: float = 0.96,
    value_clip: float = 0.92,
    window: int = 256,
    sinks: int = 64,
    scales: str = "bfloat16",
    rotate: str = "fitted",
    value_rotate: str = "same",
    centre: str = "auto",
) -> Method:
    """OSCAR (arXiv 2605.17757): keys and values are rotated by calibrated matrices, so that errors
    harm the output of attention little, the largest numbers of each head are clipped, and each
    token gets uniform codes.

    `bits` of a code, 1 to 6 or 8 (`key_bits` and `value_bits` override it); `group` channels share
    a scale and a minimum (0: a head's); `clip` and `value_clip` are the shares of a head's numbers,
    0.5 to 1, that are not clipped. `window` newest and `sinks` first tokens stay exact. The
    matrices come from `kvqjax calibrate`; other rotations need none. `scales` is the dtype of
    scales and minima, float32 in the released code; `centre` as in `kivi`. With the defaults,
    Llama-3.1-8B stores 2.25 bits per channel. Raises UserError for values that are not listed here.
    """
    uniform = {"along": "channels", "group": group, "dtype": scales}
    key = Clipped(inner=Uniform(bits=value_or(key_bits, bits), **uniform), parts=0, ratio=clip)
    value = Clipped(
        inner=Uniform(bits=value_or(value_bits, bits), **uniform), parts=0, ratio=value_clip
    )
    timing: dict[str, Any] = {"window": window, "unit": PLANE, **turning(rotate, value_rotate)}
    layer = KeysAndValues(
        key=centred(key, centre), value=value, unbiased=centre == "auto", **timing
    )
    return Method(name="oscar", layer=layer, sinks=sinks)
