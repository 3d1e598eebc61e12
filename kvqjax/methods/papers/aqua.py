"""AQUA-KV (arXiv 2501.19392): quantise what a small model cannot predict from the layer below.

    K_pred = f_k(Kr_prev)              Kr = K_pred + Q^-1(Q(K - K_pred))
    V_pred = f_v([Kr, Vr_prev])        Vr = V_pred + Q^-1(Q(V - V_pred))        (Algorithm 1; keys first)

Kr and Vr are the reconstructions, of this layer and of the layer below (`_prev`), all before RoPE and over all KV
heads. They are the carry. The first layer has no predictor and a codec of its own. Q is any codec: HIGGS, transform
coding (kvqjax.codecs.klt), per token, per channel.

Encoder and decoder reconstruct with one function on one fixed tile, `unit` tokens of one row, rounded to the carry's
dtype. So they agree bit for bit, and the chain does not drift with depth. GPUs and TPUs decode all tiles of a block at
once, by the same function. Where its products sum in another order, a number may round to its neighbour.

Predictors map vectors to a vector of the same token (sections 3.1 and 4.3):

    linear    y = x W + b                                    {"weight": [I,O], "bias": [O]}
    int4      the same with W in 4 bits, decoded at use      {"codes": uint32 [I/8,O], "scale", "low": [I/g,O], "bias"}
    low_rank  y = (x A) B + b                                {"down": [I,R], "up": [R,O], "bias"}
    mlp       y = silu(norm(x) A + a) B + b                  {"gain", "offset": [I], "down": [I,2O], "inner": [2O], ...}
    none      y = 0                                          {}

Their products take the weights' dtype and accumulate in float32, and the result is float32.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.codecs import Codec, CodecSpec, Exact, Fit, Uniform, centred
from kvqjax.codecs.base import for_heads
from kvqjax.codecs.higgs import Higgs
from kvqjax.codecs.klt import KEY_SLOPE, VALUE_SLOPE, Klt
from kvqjax.codecs.uniform import at_least_one
from kvqjax.methods.keys_values import KeysAndValues, keys_and_values
from kvqjax.methods.layer_cache import Calibration, Chain, Clock, Cost, Fast, Wiring
from kvqjax.methods.spec import LayerSpec, Method, method_factory, value_or
from kvqjax.model.config import KVShape
from kvqjax.model.weight_codes import WEIGHT_GROUP, unpack_nibbles
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.xla_workarounds import kept_apart, rounded
from kvqjax.pallas_kernels.adapters import Packed, packed_form
from kvqjax.pallas_kernels.higgs import HiggsSpec
from kvqjax.pallas_kernels.predicted import Maps as PredictorMaps
from kvqjax.pallas_kernels.predicted import PredictedBody, PredictedSpec

__all__ = [
    "CONSTANT_DTYPES",
    "AquaLayer",
    "aqua",
    "encode_source",
    "missed",
    "predict",
    "predictor_inputs",
    "predictor_shapes",
    "reconstruct",
    "unpack_weight",
]

UNIT = 128  # tokens that leave the window together
BACKBONES = ("higgs", "klt", "token", "channel")
INPUTS = ("k", "v", "kv", "none")
PREDICTORS = ("linear", "int4", "low_rank", "mlp", "none")
SPEC_FIELDS = {"k": "key", "v": "value"}  # source -> AquaLayer's field
FIT = Fit("kvqjax.calibrate.aqua", also=("kvqjax.calibrate.centre", "kvqjax.calibrate.klt"))
# Of a layer's constants; others have the compute dtype. `into` and `back` are those of transform coding.
CONSTANT_DTYPES = {"codes": "uint32", "scale": "bfloat16", "low": "bfloat16"} | dict.fromkeys(
    ("bias", "into", "back"), "float32"
)
MULTIPLIED = {"weight": 1, "down": 1, "up": 1, "back": 1, "codes": 8}  # multiply-accumulates per stored element
NORM_EPS = 1e-5  # of the MLP's norm


# ---- The method and its options ----


@method_factory
def aqua(
    *,
    bits: int | float = 2,
    key_bits: int | float | None = None,
    value_bits: int | float | None = None,
    first_bits: int | float = 4,
    backbone: str = "higgs",
    dim: int = 2,
    group: int | None = None,
    seed: int | None = None,
    predictor: str = "linear",
    rank: int = 256,
    key_inputs: str = "k",
    value_inputs: str = "kv",
    rope: str = "pre",
    exact: str = "",
    buffer: int = UNIT,
    window: int = 0,
    sinks: int = 4,
    centre: str = "auto",
) -> Method:
    """AQUA-KV (arXiv 2501.19392, sections 3 and 4.1): a small calibrated model predicts a layer's keys and values from
    those of the layer below. The error of the prediction is stored, in codes of `backbone`.

    - `bits` per number (`key_bits` and `value_bits` override it) by `backbone` "higgs" (in `dim` dimensions), "token"
      or "channel" (uniform), a scale for `group` channels or tokens; `seed` as in `higgs`. `backbone="klt"` is
      transform coding as in `klt`, of any number of bits from 0.125 to 6. The first layer has no predictor and
      `first_bits` by HIGGS, or by transform coding where that is the backbone; 16 means exact.
    - `predictor`: "linear", "int4", "low_rank" (of `rank`) or "mlp". `key_inputs` and `value_inputs` ("k", "v", "kv" or
      "none") and `rope` ("pre" or "post") give the paper's ablations.
    - Layers in `exact` ("3+7"; or by a policy, `aqua;3=exact`) stay exact, and the layer above predicts from them.
    - `buffer` tokens leave the window together, beyond the newest `window`; `sinks` first tokens stay exact.
    - `centre="auto"` takes the model's key bias, where it has one, off the keys of every layer (before RoPE); "mean" a
      calibrated mean off the first layer's (the predictors' biases do so above it, and transform coding does so by
      itself); "none" nothing.

    With the defaults, Llama-3.1-8B stores 2.078 bits per channel. Raises UserError for values that are not listed
    here.
    """
    shared = {"rope": rope, "window": window, "unit": buffer}
    unbiased = centre == "auto" and rope == "pre"
    codec = functools.partial(_backbone, backbone, dim=dim, group=group, seed=seed)
    key, value = codec(value_or(key_bits, bits), KEY_SLOPE), codec(value_or(value_bits, bits), VALUE_SLOPE)
    no_inputs = {"key_inputs": "none", "value_inputs": "none"}
    transformed = backbone == "klt"
    if not transformed:
        codec = functools.partial(_backbone, "higgs", dim=2, group=group if backbone == "higgs" else None, seed=seed)
    starts = codec(first_bits, KEY_SLOPE), codec(first_bits, VALUE_SLOPE)
    # A transform takes the mean off by itself.
    start = centred(starts[0], "none" if transformed and centre == "mean" else centre)
    first = AquaLayer(key=start, value=starts[1], unbiased=unbiased, **no_inputs, **shared)
    inputs = {"key_inputs": key_inputs, "value_inputs": value_inputs}
    low_rank = {"rank": rank} if predictor == "low_rank" else {}
    layer = AquaLayer(key=key, value=value, predictor=predictor, unbiased=unbiased, **low_rank, **inputs, **shared)
    plain = layer.admit(KeysAndValues(key=Exact(), value=Exact()))
    overrides = ((0, first), *((number, plain) for number in _numbers(exact)))
    return Method(name="aqua", layer=layer, sinks=sinks, overrides=overrides)


def _backbone(
    name: str, bits: int | float, slope: float, *, dim: int, group: int | None, seed: int | None
) -> CodecSpec:
    """Choose the codec of what the predictors miss. `slope` is that of transform coding."""
    if bits == 16:
        return Exact()
    if name == "klt":
        return Klt(bits=float(bits), slope=slope)
    if bits != int(bits):
        raise UserError(f"bits={bits}; wanted a whole number (backbone=klt takes any)")
    bits = int(bits)
    if name == "higgs":
        return Higgs(bits=bits, dim=dim, group=group, seed=seed)
    if name == "token":  # the uniform quantiser of the paper's "Quanto" rows
        return Uniform(bits=bits, along="channels", group=at_least_one(value_or(group, 64)))
    if name == "channel":
        return Uniform(bits=bits, along="tokens", group=value_or(group, UNIT))
    raise UserError(f"backbone={name!r}; known: {', '.join(BACKBONES)}")


def _numbers(text: str) -> tuple[int, ...]:
    """Read layer numbers joined by +."""
    try:
        return tuple(int(part) for part in text.split("+") if part)
    except ValueError:
        raise UserError(f"exact={text!r}; wanted layer numbers joined by +, such as 3+7") from None


# ---- One layer ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class AquaLayer:
    """One layer. `key_inputs` and `value_inputs` name what each predictor sees: "k", "v", "kv", or "none" for no
    predictor. A predictor of keys sees the previous layer's keys and values. One of values sees this layer's keys and
    the previous layer's values.

    During a decode step one layer's keys and values, 2 S K D numbers of S body tokens, are in memory.

    `unbiased` keys are those without the model's key bias, in codes, predictors and carry alike."""

    key: CodecSpec
    value: CodecSpec
    key_inputs: str = "k"
    value_inputs: str = "kv"
    predictor: str = "linear"
    rank: int = 0
    rope: str = "pre"
    window: int = 0
    unit: int = UNIT
    unbiased: bool = False

    def __post_init__(self):
        for name in ("key_inputs", "value_inputs"):
            if getattr(self, name) not in INPUTS:
                raise UserError(f"{name}={getattr(self, name)!r}; known: {', '.join(INPUTS)}")

    def admit(self, other: LayerSpec) -> LayerSpec:
        """Take a layer of keys and values by other codecs, exact ones among them, into the chain. It gets no predictor,
        and this layer's window, unit and `rope`. The layer above predicts from its reconstruction. A rotated layer
        stays as it is: the chain passes it by."""
        if not isinstance(other, KeysAndValues) or {other.key_rotation, other.value_rotation} != {"none"}:
            return other
        no_inputs = {"key_inputs": "none", "value_inputs": "none", "predictor": "linear", "rank": 0}
        return dataclasses.replace(self, key=other.key, value=other.value, **no_inputs)

    def sized(self, config: KVShape) -> "AquaLayer":
        """Fill in what the codecs of a layer that was admitted leave open."""
        heads = config.num_kv_heads, config.head_dim
        return dataclasses.replace(self, key=for_heads(self.key, *heads), value=for_heads(self.value, *heads))

    def codec(self, source: str) -> CodecSpec:
        """Give the codec of "k" or "v"."""
        return getattr(self, SPEC_FIELDS[source])

    def inputs(self, source: str) -> str:
        """Name the inputs of the predictor of "k" or "v"."""
        return self.key_inputs if source == "k" else self.value_inputs

    def kind(self, source: str) -> str:
        """Name the kind of the predictor of "k" or "v"."""
        return "none" if self.inputs(source) == "none" else self.predictor

    def build(self, config: KVShape) -> Wiring:
        layer, width = self.sized(config), config.kv_width
        if self.predictor == "low_rank" and not 1 <= self.rank <= width:
            raise UserError(f"rank={self.rank}; predictors of {width} channels have a rank from 1 to {width}")
        codecs = {source: layer.codec(source).build(width) for source in SPEC_FIELDS}
        return _wired(layer, config, codecs)

    def packed(self, config: KVShape) -> Packed | None:
        """Name the kernel for layers with the usual linear predictors, or with none."""
        inputs, linear = (self.key_inputs, self.value_inputs), self.predictor == "linear"
        if not linear or inputs not in (("k", "kv"), ("none", "none")):
            return None
        if self.unbiased and config.known_key_bias:
            return None
        return _predicted_form(packed_form(self.key, self.value, self.rope, config), inputs == ("k", "kv"))

    def needs(self, source: str, width: int) -> dict[str, tuple[int, ...]]:
        """Give the shapes of the constants of the predictor and of its codec, by name."""
        inputs = len(self.inputs(source)) * width
        shapes = predictor_shapes(self.kind(source), inputs, width, self.rank)
        return shapes | self.codec(source).build(width).needs


def _wired(layer: AquaLayer, config: KVShape, codecs: dict[str, Codec]) -> Wiring:
    """Make the layer's cache with these codecs of keys and values."""
    base = keys_and_values(config, codecs, (Clock(("k", "v"), layer.window, layer.unit),), layer.rope, layer.unbiased)
    width = config.kv_width

    def encode(constants, tile, carry):
        payload, recon = {}, {"k": None}
        for source in ("k", "v"):
            payload[source], recon[source] = encode_source(
                layer, codecs[source], source, constants, tile[source], carry, recon["k"]
            )
        return payload, recon, recon

    def tile_step(constants, payload, carry, after=lambda k, payload: payload):
        k = reconstruct(layer, codecs["k"], "k", constants, payload["k"], carry, None)
        values = after(k, payload["v"])
        return {"k": k, "v": reconstruct(layer, codecs["v"], "v", constants, values, carry, k)}

    def after_keys(k, payload):
        # XLA for TPUs would look up the codes of both in one operation, and spill.
        return kept_apart((k, payload))[1]

    def decode(constants, payload, carry):
        shape = carry["k"].shape
        tiles = {source: _tiles(codecs[source], payload[source], layer.unit) for source in ("k", "v")}
        below = {source: x.reshape(-1, layer.unit, width) for source, x in carry.items()}
        step = functools.partial(tile_step, constants)
        # On a GPU or a TPU a loop over tiles would take longer to start its operations than to run them.
        keys_first = jax.vmap(functools.partial(step, after=after_keys))
        loop = lambda *pair: jax.lax.map(lambda tile: step(*tile), pair)  # noqa: E731
        recon = jax.lax.platform_dependent(tiles, below, cuda=jax.vmap(step), tpu=keys_first, default=loop)
        recon = {source: x.reshape(shape) for source, x in recon.items()}
        return recon, recon

    needs = {source: shape for source in ("k", "v") if (shape := layer.needs(source, width))}
    kinds = {name: CONSTANT_DTYPES.get(name, "compute") for names in needs.values() for name in names}
    return Wiring(
        base.storage,
        base.maps._replace(encode=encode, decode=decode),
        chain=Chain({"k": width, "v": width}, read_in=None),
        fast=Fast(packed=layer.packed(config)),
        calibration=Calibration(needs, kinds, FIT),
        cost=Cost(operations=_operations(needs)),
    )


def _tiles(codec: Codec, payload: dict, unit: int) -> dict:
    """Reshape a payload [B, ...] of n tokens to [B * n / unit, ...] tiles of `unit` tokens, the shapes that `encode`
    makes."""
    return {name: field.split_tiles(payload[name], unit) for name, field in codec.fields.items()}


def _operations(needs: dict[str, dict[str, tuple[int, ...]]]) -> int:
    """Count the operations of predictors of these constants for one token."""
    constants = (item for group in needs.values() for item in group.items())
    return sum(2 * MULTIPLIED.get(name, 0) * math.prod(shape) for name, shape in constants)


def _predicted_form(form: Packed | None, mapped: bool) -> Packed | None:
    """Name the kernel for codes that `form` reads: of what linear predictors miss (`mapped`), or of keys and values
    themselves. None for codes other than HIGGS."""
    if form is None or not isinstance(form.spec, HiggsSpec):
        return None

    def body(weights, constants, stored, positions):
        codes = form.body(weights, constants, stored, positions)
        if not mapped:
            return PredictedBody(codes, None)
        maps = (constants[source][name] for source in ("k", "v") for name in ("weight", "bias"))
        return PredictedBody(codes, PredictorMaps(*maps))

    return Packed(PredictedSpec(codes=form.spec, mapped=mapped), body)


# ---- One source of one tile: its prediction, its codes, its reconstruction ----


def predictor_inputs(names: str, keys: Float[Array, "u W"], values: Float[Array, "u W"]) -> Float[Array, "u I"]:
    """Concatenate `keys` and `values` as `names` asks, keys first as in the released predictors."""
    parts = [x for name, x in (("k", keys), ("v", values)) if name in names]
    return jnp.concatenate(parts, axis=-1)


def _prediction(layer: AquaLayer, source: str, constants: dict, carry: dict, keys) -> Float[Array, "u W"]:
    """Predict one source's tile, float32. `keys` is Kr of this layer, used for values only."""
    if layer.inputs(source) == "none":
        return jnp.zeros(carry[source].shape, jnp.float32)
    x = predictor_inputs(layer.inputs(source), carry["k"] if source == "k" else keys, carry["v"])
    return predict(layer.predictor, constants.get(source, {}), x)


def missed(layer: AquaLayer, source: str, constants: dict, x, carry: dict, keys) -> Float[Array, "u W"]:
    """Compute what the predictor misses of one source's `x` [u, W], float32. The other arguments are those of
    `reconstruct`."""
    return wide(x) - _prediction(layer, source, constants, carry, keys)


def reconstruct(layer: AquaLayer, codec: Codec, source: str, constants: dict, payload: dict, carry: dict, keys):
    """Reconstruct one source's tile. Encoder and decoder both use this one function.

    Args:
        layer: the layer's spec.
        codec: the source's.
        source: "k" or "v".
        constants: the layer's.
        payload: the tile's codes.
        carry: reconstructions of the layer below.
        keys: Kr of this layer, which a predictor of values may see; None for keys.

    Returns:
        The reconstruction [u, W], in the carry's dtype.
    """
    residual = codec.decode(constants.get(source, {}), payload).astype(jnp.float32)
    total = _prediction(layer, source, constants, carry, keys) + residual
    dtype = carry[source].dtype
    return saturated(rounded(total, dtype), dtype)


def encode_source(layer: AquaLayer, codec: Codec, source: str, constants: dict, x, carry: dict, keys):
    """Encode one source's tile `x` [u, W]. The other arguments are those of `reconstruct`.

    Returns:
        The tile's payload and its reconstruction.
    """
    residual = missed(layer, source, constants, x, carry, keys)
    payload = codec.encode(constants.get(source, {}), residual)
    return payload, reconstruct(layer, codec, source, constants, payload, carry, keys)


# ---- Predictors ----


def predictor_shapes(kind: str, inputs: int, outputs: int, rank: int = 0) -> dict[str, tuple[int, ...]]:
    """Give the shapes of one predictor's constants by name, without the layer axis.

    Args:
        kind: of the predictor.
        inputs: I, the numbers that it sees.
        outputs: O, the numbers that it predicts.
        rank: R of a "low_rank" predictor.

    Returns:
        {name: shape}, nothing for "none".

    Raises:
        UserError: for a kind that does not exist.
    """
    if kind not in PREDICTORS:
        raise UserError(f"predictor={kind!r}; known: {', '.join(PREDICTORS)}")
    if kind == "none":
        return {}
    bias: tuple[int, ...] = (outputs,)
    if kind == "linear":
        return {"weight": (inputs, outputs), "bias": bias}
    if kind == "low_rank":
        return {"down": (inputs, rank), "up": (rank, outputs), "bias": bias}
    if kind == "int4":
        groups = (inputs // math.gcd(inputs, WEIGHT_GROUP), outputs)
        return {"codes": (inputs // 8, outputs), "scale": groups, "low": groups, "bias": bias}
    hidden = 2 * outputs
    layers = {"down": (inputs, hidden), "inner": (hidden,), "up": (hidden, outputs), "bias": bias}
    return {"gain": (inputs,), "offset": (inputs,), **layers}


def unpack_weight(constants: dict[str, Array]) -> Float[Array, "I O"]:
    """Decode the float32 weight of an `int4` predictor: codes * scale + low per group of inputs."""
    codes = unpack_nibbles(constants["codes"]).astype(jnp.float32)
    groups = codes.reshape(constants["scale"].shape[0], -1, codes.shape[1])
    scale, low = (constants[name].astype(jnp.float32)[:, None] for name in ("scale", "low"))
    return (groups * scale + low).reshape(codes.shape)


def _times(x, weight):
    return jnp.einsum("ti,io->to", x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)


def predict(kind: str, constants: dict[str, Array], x: Float[Array, "u I"]) -> Float[Array, "u O"]:
    """Predict vectors of u tokens, float32. Raises UserError for a kind that is not evaluated."""
    if kind == "linear":
        y = _times(x, constants["weight"])
    elif kind == "int4":
        y = _times(x, unpack_weight(constants).astype(constants["scale"].dtype))
    elif kind == "low_rank":
        y = _times(_times(x, constants["down"]), constants["up"])
    elif kind == "mlp":
        numbers = x.astype(jnp.float32)
        deviation = numbers - numbers.mean(-1, keepdims=True)
        normed = deviation * jax.lax.rsqrt((deviation * deviation).mean(-1, keepdims=True) + NORM_EPS)
        normed = normed * constants["gain"].astype(jnp.float32)[None] + constants["offset"].astype(jnp.float32)[None]
        inner = _times(normed, constants["down"]) + constants["inner"].astype(jnp.float32)[None]
        y = _times(jax.nn.silu(inner), constants["up"])
    else:
        raise UserError(f"predictor={kind!r} cannot be evaluated; known: {', '.join(PREDICTORS[:-1])}")
    return y + constants["bias"].astype(jnp.float32)[None]
