"""AQUA-KV (arXiv 2501.19392): options and their layers. What a layer does is in kvqjax.methods.aqua_layer."""

from kvqjax._errors import UserError
from kvqjax.codecs import CodecSpec, Exact, Uniform, centred
from kvqjax.codecs.higgs import Higgs
from kvqjax.methods.aqua_layer import UNIT, AquaLayer
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.spec import Method, given, method_factory

__all__ = ["aqua"]

BACKBONES = ("higgs", "token", "channel")


def _backbone(name: str, bits: int, dim: int, group: int | None, seed: int | None) -> CodecSpec:
    if bits == 16:
        return Exact()
    if name == "higgs":
        return Higgs(bits=bits, dim=dim, group=group, seed=seed)
    if name == "token":  # the uniform quantiser of the paper's "Quanto" rows
        return Uniform(bits=bits, along="channels", group=group or 64)
    if name == "channel":
        return Uniform(bits=bits, along="tokens", group=group or UNIT)
    raise UserError(f"backbone={name!r}; known: {', '.join(BACKBONES)}")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split("+") if part)
    except ValueError:
        raise UserError(f"exact={text!r}; wanted layer numbers joined by +, such as 3+7") from None


@method_factory
def aqua(
    *,
    bits: int = 2,
    key_bits: int | None = None,
    value_bits: int | None = None,
    first_bits: int = 4,
    backbone: str = "higgs",
    dim: int = 2,
    group: int | None = None,
    seed: int | None = None,
    predictor: str = "linear",
    rank: int = 256,
    key_inputs: str = "k",
    value_inputs: str = "kv",
    rope: str = "pre",
    copy: str = "layer",
    exact: str = "",
    buffer: int = UNIT,
    window: int = 0,
    sinks: int = 4,
    centre: str = "auto",
) -> Method:
    """AQUA-KV (arXiv 2501.19392, sections 3 and 4.1): a small calibrated model predicts a layer's keys and values from
    those of the layer below. The error of the prediction is stored, in codes of `backbone`.

    - `bits` per number (`key_bits` and `value_bits` override it) by `backbone` "higgs" (in `dim` dimensions), "token"
      or "channel" (uniform), a scale for `group` channels or tokens; `seed` as in `higgs`. The first layer has no
      predictor and `first_bits` by HIGGS; 16 means exact.
    - `predictor`: "linear", "int4", "low_rank" (of `rank`) or "mlp". `key_inputs` and `value_inputs` ("k", "v", "kv" or
      "none") and `rope` ("pre" or "post") give the paper's ablations.
    - Layers in `exact` ("3+7"; or by a policy, `aqua;3=exact`) stay exact, and the layer above predicts from them.
    - `buffer` tokens leave the window together, beyond the newest `window`; `sinks` first tokens stay exact.
    - `copy`, what a decode step holds of the layer below: "layer", "none" or "all", see `AquaLayer`.
    - `centre="auto"` takes the model's key bias, where it has one, off the keys of every layer (before RoPE); "mean" a
      calibrated mean off the first layer's (the predictors' biases do so above it); "none" nothing.

    With the defaults, Llama-3.1-8B stores 2.078 bits per channel. Raises UserError for values that are not listed
    here.
    """
    shared = {"rope": rope, "copy": copy, "window": window, "unit": buffer}
    unbiased = centre == "auto" and rope == "pre"
    key, value = (_backbone(backbone, given(b, bits), dim, group, seed) for b in (key_bits, value_bits))
    alone = {"key_inputs": "none", "value_inputs": "none"}
    start = _backbone("higgs", first_bits, 2, group if backbone == "higgs" else None, seed)
    first = AquaLayer(key=centred(start, centre), value=start, unbiased=unbiased, **alone, **shared)
    inputs = {"key_inputs": key_inputs, "value_inputs": value_inputs}
    low_rank = {"rank": rank} if predictor == "low_rank" else {}
    layer = AquaLayer(key=key, value=value, predictor=predictor, unbiased=unbiased, **low_rank, **inputs, **shared)
    plain = layer.admit(KeysAndValues(key=Exact(), value=Exact()))
    overrides = ((0, first), *((number, plain) for number in _numbers(exact)))
    return Method(name="aqua", layer=layer, sinks=sinks, overrides=overrides)
