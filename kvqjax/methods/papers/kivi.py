"""KIVI (arXiv 2402.02750), and two baselines of the same layers of keys and values: the exact
cache, and uniform codes per token."""

from typing import Any

from kvqjax._errors import UserError
from kvqjax.codecs import Exact, Uniform, centred
from kvqjax.codecs.uniform import GROUPS, at_least_one
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.layer_cache import Clock
from kvqjax.methods.rotation import turning
from kvqjax.methods.spec import Method, first_layers, method_factory, value_or
from kvqjax.ops.packing.base import PLANE

# ---- The methods and their options ----


@method_factory
def exact(*, window: int = 0, sinks: int = 0) -> Method:
    """Keys and values as computed: the reference that every other method is measured against. In
    bfloat16 it stores 16 bits per channel. `window` and `sinks` (tokens) are accepted for symmetry
    with other methods; they do not change results."""
    return Method(
        name="exact",
        layer=KeysAndValues(key=Exact(), value=Exact(), window=window, unit=PLANE),
        sinks=sinks,
    )


@method_factory
def uniform(
    *,
    bits: int = 4,
    group: int | None = None,
    window: int = 0,
    sinks: int = 0,
    scales: str = "bfloat16",
    centre: str = "auto",
    rotate: str = "none",
    value_rotate: str = "same",
) -> Method:
    """The simplest compression, a baseline: uniform codes of keys (after RoPE) and values, with a
    scale and a minimum for every `group` channels of a token: by default 128, or 64 or 32 where the
    model's channels are no multiple of that.

    `bits` of a code, 1 to 6 or 8. `window` newest and `sinks` first tokens stay exact; `scales` is
    the dtype of scales and minima. `centre` takes off the keys first: "auto" the model's key bias,
    where it has one; "mean" a calibrated mean. `rotate` and `value_rotate` as in `kivi`: with them
    it is the rotated q4 and q8 of other engines. A channel takes `bits + 32 / group` bits: with the
    defaults, Llama-3.1-8B stores 4.25 bits per channel. Raises UserError as `kivi` does.
    """
    channels = GROUPS[0] if group is None else at_least_one(group)
    codec = Uniform(bits=bits, along="channels", group=channels, dtype=scales, fit=group is None)
    rotations: dict[str, Any] = turning(rotate, value_rotate)
    key, unbiased = centred(codec, centre), centre == "auto"
    layer = KeysAndValues(
        key=key, value=codec, window=window, unit=PLANE, unbiased=unbiased, **rotations
    )
    return Method(name="uniform", layer=layer, sinks=sinks)


@method_factory
def kivi(
    *,
    bits: int = 2,
    key_bits: int | None = None,
    value_bits: int | None = None,
    group: int = 32,
    value_group: int | None = None,
    window: int = 128,
    sinks: int = 0,
    rope: str = "post",
    rule: str = "together",
    scales: str = "bfloat16",
    centre: str = "none",
    rotate: str = "none",
    value_rotate: str = "same",
) -> Method:
    """KIVI (arXiv 2402.02750, section 3.2): uniform codes. Each channel of keys has a scale and a
    minimum for every `group` tokens, each token's values have them for every `group` channels:
    32/group bits per number beside the codes.

    - `bits` of a code, 1 to 6 or 8; `key_bits` and `value_bits` override it.
    - `group`: 32, 64 or 128 tokens that share the scale and minimum of a key channel, and leave the
      window together. `value_group`: channels that share those of a token's values; by default
      `group`, or 64 or 32 where the model's channels are no multiple of that.
    - `window` newest and `sinks` first tokens stay exact. `rule="together"` moves keys and values
      out in whole groups; "published" does as the released code: keys all at once every `window`
      tokens, values one token at a time.
    - `rope="pre"` stores keys before RoPE, "post" after it. `scales` is the dtype of scales and
      minima.
    - `centre="mean"` subtracts a calibrated mean from the keys first (kvqjax.codecs.centring).
      "auto" subtracts the model's key bias before RoPE. It gains nothing here, because the minimum
      of every channel takes up the bias, and no kernel reads such keys.
    - `rotate` turns what is encoded (kvqjax.methods.rotation); `value_rotate` gives values another
      rotation.

    A key channel takes `bits + 32 / group` bits, a value channel `bits + 32 / value_group`: with
    the defaults, Llama-3.1-8B stores 3 bits per channel. Raises UserError for values that are not
    listed here.
    """
    layer = _kivi_layer(
        value_or(key_bits, bits),
        value_or(value_bits, bits),
        group,
        value_group,
        window,
        rope,
        rule,
        scales,
        centre,
        **turning(rotate, value_rotate, rope),
    )
    return Method(name="kivi", layer=layer, sinks=sinks)


@method_factory
def kivi_star(
    *, bits: int = 2, protected: int = 3, window: int = 0, sinks: int = 0, centre: str = "none"
) -> Method:
    """KIVI* (arXiv 2508.10395, section 4), the baseline of XQuant's paper: KIVI with keys before
    RoPE and groups of 128 tokens and channels.

    `bits` of a code, 1 to 6 or 8; the first `protected` layers have at least 4. `window` newest and
    `sinks` first tokens stay exact; `centre` as in `kivi`. With the defaults, Llama-3.1-8B stores
    2.438 bits per channel. Raises UserError as `kivi` does.
    """
    options: dict[str, Any] = {
        "group": 128,
        "value_group": None,
        "window": window,
        "rope": "pre",
        "rule": "together",
        "scales": "bfloat16",
        "centre": centre,
    }
    layer = _kivi_layer(bits, bits, **options)
    high_bits = max(bits, 4)
    first = _kivi_layer(high_bits, high_bits, **options)
    overrides = tuple((i, first) for i in first_layers("protected", protected))
    return Method(name="kivi_star", layer=layer, sinks=sinks, overrides=overrides)


# ---- One layer ----


def _kivi_layer(
    key_bits, value_bits, group, value_group, window, rope, rule, scales, centre="none", **rotations
) -> KeysAndValues:
    """Make one layer of KIVI. The arguments are the options of `kivi`; `rotations` are fields of
    KeysAndValues."""
    key = Uniform(bits=key_bits, along="tokens", group=group, dtype=scales)
    channels = group if value_group is None else at_least_one(value_group)
    value = Uniform(
        bits=value_bits, along="channels", group=channels, dtype=scales, fit=value_group is None
    )
    if rule not in ("together", "published"):
        raise UserError(f"rule={rule!r}; known: together, published")
    clocks = ()
    if rule == "published":
        # As the released code does: keys leave the window all at once, values one by one.
        if window == 0 or window % group:
            raise UserError(
                f"rule=published needs a window that is a multiple of group={group}, got {window}"
            )
        clocks = (Clock(("k",), 0, window), Clock(("v",), window, 1))
    timing: dict[str, Any] = {
        "rope": rope,
        "window": window,
        "unit": group,
        "clocks": clocks,
        **rotations,
    }
    return KeysAndValues(key=centred(key, centre), value=value, unbiased=centre == "auto", **timing)
