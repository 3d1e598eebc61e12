"""AQUA-KV (arXiv 2501.19392): quantise what a small model cannot predict from the layer below.

    K_pred = f_k(Kr_prev)              Kr = K_pred + Q^-1(Q(K - K_pred))
    V_pred = f_v([Kr, Vr_prev])        Vr = V_pred + Q^-1(Q(V - V_pred))        (Algorithm 1; keys first)

Kr and Vr are the reconstructions, of this layer and of the layer below (`_prev`), all before RoPE
and over all KV heads. They are the carry. The first layer has no predictor and a codec of its own.
Q is any codec: HIGGS, transform coding (kvqjax.codecs.klt), per token, per channel.

Encoder and decoder reconstruct with one function on one fixed tile, `unit` tokens of one row,
rounded to the carry's dtype. So they agree bit for bit, and the chain does not drift with depth.
GPUs and TPUs decode all tiles of a block at once, by the same function. If their matrix products
sum in another order, a number may round to its neighbour.

A predictor maps a vector x of I numbers to a vector y of O numbers of the same token (sections 3.1
and 4.3). Its kinds and their constants, with rank R and groups of g inputs:

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
from kvqjax.methods.layer_cache import Calibration, Chain, Clock, Cost, Wiring
from kvqjax.methods.spec import LayerSpec, Method, method_factory, value_or
from kvqjax.model.config import KVShape
from kvqjax.model.weight_codes import WEIGHT_GROUP, unpack_nibbles
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.xla_workarounds import kept_apart, rounded

UNIT = 128  # tokens that leave the window together
BACKBONES = ("higgs", "klt", "token", "channel")
INPUTS = ("k", "v", "kv", "none")
PREDICTORS = ("linear", "int4", "low_rank", "mlp", "none")
SPEC_FIELDS = {"k": "key", "v": "value"}  # source -> AquaLayer's field
NO_INPUTS = {"key_inputs": "none", "value_inputs": "none"}  # of an AquaLayer without predictors
FIT = Fit("kvqjax.calibrate.aqua", also=("kvqjax.calibrate.centre", "kvqjax.calibrate.klt"))
# The dtypes of a layer's constants by name. A name that is not listed has the compute dtype.
CONSTANT_DTYPES = {
    # the 4-bit weight of an `int4` predictor
    "codes": "uint32",
    "scale": "bfloat16",
    "low": "bfloat16",
    # a predictor's bias, and the two matrices of transform coding (kvqjax.codecs.klt)
    "bias": "float32",
    "into": "float32",
    "back": "float32",
}
# Multiply-accumulates per stored element of a constant, when one token is read. A word of "codes"
# holds 8 weights.
MULTIPLIED = {"weight": 1, "down": 1, "up": 1, "back": 1, "codes": 8}
NORM_EPS = 1e-5  # added to the variance in the MLP's layer norm


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
    """AQUA-KV (arXiv 2501.19392, sections 3 and 4.1): a small calibrated model predicts a layer's
    keys and values from those of the layer below. The error of the prediction is stored, in codes
    of `backbone`.

    - `bits` per number of the error (`key_bits` and `value_bits` override it). `backbone` is
      "higgs" (in `dim` dimensions), "token" or "channel" (uniform codes), with one scale for
      `group` channels or tokens; `seed` as in `higgs`. `backbone="klt"` is transform coding as in
      `klt`, of any number of bits from 0.125 to 6.
    - `first_bits` of the first layer, which has no predictor; 16 means exact. Its codec is
      transform coding if `backbone` is "klt", else HIGGS.
    - `predictor`: "linear", "int4", "low_rank" (of `rank`) or "mlp". `key_inputs` and
      `value_inputs` ("k", "v", "kv" or "none") and `rope` ("pre" or "post") give the paper's
      ablations.
    - Layers in `exact` ("3+7"; or by a policy, `aqua;3=exact`) stay exact, and the layer above
      predicts from them.
    - `buffer` tokens leave the window together, beyond the newest `window`; `sinks` first tokens
      stay exact.
    - `centre="auto"` subtracts the model's key bias, where it has one, from the keys of every layer
      (before RoPE). "mean" subtracts a calibrated mean from the first layer's keys (the layers
      above have the predictors' biases for it, and transform coding subtracts a mean by itself).
      "none" subtracts nothing.

    With the defaults, Llama-3.1-8B stores 2.078 bits per channel. Raises UserError for values that
    are not listed here.
    """
    if (key_inputs, value_inputs) == ("none", "k"):
        raise UserError(
            "key_inputs=none,value_inputs=k needs no layer below, and AQUA-KV is a chain of layers; "
            "klt:values=keys predicts values from the keys of their own layer"
        )
    shared = {"rope": rope, "window": window, "unit": buffer}
    unbiased = centre == "auto" and rope == "pre"
    transformed = backbone == "klt"

    # The layers above the first
    codec = functools.partial(_backbone, backbone, dim=dim, group=group, seed=seed)
    key = codec(value_or(key_bits, bits), KEY_SLOPE)
    value = codec(value_or(value_bits, bits), VALUE_SLOPE)
    inputs = {"key_inputs": key_inputs, "value_inputs": value_inputs}
    # Layers are compared by their fields, so a rank that no predictor uses stays at its default.
    low_rank = {"rank": rank} if predictor == "low_rank" else {}
    layer = AquaLayer(
        key=key, value=value, predictor=predictor, unbiased=unbiased, **low_rank, **inputs, **shared
    )

    # The first layer
    first_codec = codec
    if not transformed:
        # The group of a uniform backbone is one of its own codes, and says nothing of HIGGS's
        # blocks.
        higgs_group = group if backbone == "higgs" else None
        first_codec = functools.partial(_backbone, "higgs", dim=2, group=higgs_group, seed=seed)
    # Transform coding subtracts the mean by itself.
    first_centre = "none" if transformed and centre == "mean" else centre
    first = AquaLayer(
        key=centred(first_codec(first_bits, KEY_SLOPE), first_centre),
        value=first_codec(first_bits, VALUE_SLOPE),
        unbiased=unbiased,
        **NO_INPUTS,
        **shared,
    )

    plain = layer.admit(KeysAndValues(key=Exact(), value=Exact()))
    overrides = ((0, first), *((number, plain) for number in _numbers(exact)))
    return Method(name="aqua", layer=layer, sinks=sinks, overrides=overrides)


def _backbone(
    name: str, bits: int | float, slope: float, *, dim: int, group: int | None, seed: int | None
) -> CodecSpec:
    """Choose the codec of the predictors' errors.

    Args:
        name: of the backbone.
        bits: per number; 16 for no codes.
        slope: of transform coding (kvqjax.codecs.klt); other backbones ignore it.
        dim: dimensions of HIGGS's grid.
        group: channels or tokens that share a scale; None: the backbone's default.
        seed: of HIGGS's signs.

    Raises:
        UserError: for a backbone that does not exist, and for bits that it does not have.
    """
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
    """One layer of AQUA-KV.

    During a decode step the carry is in memory: one layer's keys and values, 2 S K D numbers of S
    body tokens."""

    key: CodecSpec
    value: CodecSpec
    # What the predictors see: "k", "v", "kv", or "none" for no predictor. The predictor of keys
    # sees keys and values of the layer below. The predictor of values sees keys of this layer and
    # values of the layer below.
    key_inputs: str = "k"
    value_inputs: str = "kv"
    predictor: str = "linear"
    rank: int = 0  # of a "low_rank" predictor
    rope: str = "pre"  # keys are cached and predicted before ("pre") or after ("post") RoPE
    window: int = 0
    unit: int = UNIT
    unbiased: bool = False  # codes, predictors and carry are of keys without the model's key bias

    def __post_init__(self):
        for name in ("key_inputs", "value_inputs"):
            if getattr(self, name) not in INPUTS:
                raise UserError(f"{name}={getattr(self, name)!r}; known: {', '.join(INPUTS)}")

    def admit(self, other: LayerSpec) -> LayerSpec:
        """Take a layer of keys and values with other codecs, or exact ones, into the chain.

        The layer gets no predictor, and this layer's window, unit and `rope`. The layer above
        predicts from its reconstruction. A rotated layer stays as it is: it is no part of the
        chain, and the carry passes it by."""
        if type(other) is not KeysAndValues or {other.key_rotation, other.value_rotation} != {
            "none"
        }:
            return other
        return dataclasses.replace(
            self, key=other.key, value=other.value, predictor="linear", rank=0, **NO_INPUTS
        )

    def sized(self, config: KVShape) -> "AquaLayer":
        """Fill in the sizes that codecs of an admitted layer leave open until the model is
        known."""
        heads = config.num_kv_heads, config.head_dim
        return dataclasses.replace(
            self, key=for_heads(self.key, *heads), value=for_heads(self.value, *heads)
        )

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
            raise UserError(
                f"rank={self.rank}; predictors of {width} channels have a rank from 1 to {width}"
            )
        codecs = {source: layer.codec(source).build(width) for source in SPEC_FIELDS}
        return _wired(layer, config, codecs)

    def needs(self, source: str, width: int) -> dict[str, tuple[int, ...]]:
        """Give the shapes of the constants of the predictor and of its codec, by name."""
        inputs = len(self.inputs(source)) * width
        shapes = predictor_shapes(self.kind(source), inputs, width, self.rank)
        return shapes | self.codec(source).build(width).needs


def _wired(layer: AquaLayer, config: KVShape, codecs: dict[str, Codec]) -> Wiring:
    """Make the layer's cache with these codecs of keys and values."""
    clock = Clock(("k", "v"), layer.window, layer.unit)
    base = keys_and_values(config, codecs, (clock,), layer.rope, layer.unbiased)
    width = config.kv_width

    def encode(constants, tile, carry):
        # Keys come first: the predictor of values sees their reconstruction.
        keys, keys_recon = encode_source(layer, codecs["k"], "k", constants, tile["k"], carry, None)
        values, values_recon = encode_source(
            layer, codecs["v"], "v", constants, tile["v"], carry, keys_recon
        )
        payload = {"k": keys, "v": values}
        recon = {"k": keys_recon, "v": values_recon}
        return payload, recon, recon

    def decode_tile(constants, payload, carry):
        k = reconstruct(layer, codecs["k"], "k", constants, payload["k"], carry, None)
        return {
            "k": k,
            "v": reconstruct(layer, codecs["v"], "v", constants, payload["v"], carry, k),
        }

    def decode_tile_on_tpu(constants, payload, carry):
        k = reconstruct(layer, codecs["k"], "k", constants, payload["k"], carry, None)
        # XLA for TPUs would look up the codes of keys and values in one operation, and spill.
        _, values = kept_apart((k, payload["v"]))
        return {"k": k, "v": reconstruct(layer, codecs["v"], "v", constants, values, carry, k)}

    def decode(constants, payload, carry):
        shape = carry["k"].shape  # [B, n, KD]
        tiles = {
            source: _tiles(codecs[source], payload[source], layer.unit) for source in ("k", "v")
        }
        below = {source: x.reshape(-1, layer.unit, width) for source, x in carry.items()}
        step = functools.partial(decode_tile, constants)
        step_on_tpu = functools.partial(decode_tile_on_tpu, constants)

        def loop(tiles, below):
            return jax.lax.map(lambda tile: step(*tile), (tiles, below))

        # On a GPU or a TPU a loop over tiles would take longer to start its operations than to run
        # them.
        recon = jax.lax.platform_dependent(
            tiles, below, cuda=jax.vmap(step), tpu=jax.vmap(step_on_tpu), default=loop
        )
        recon = {source: x.reshape(shape) for source, x in recon.items()}
        return recon, recon

    needs = {source: layer.needs(source, width) for source in ("k", "v")}
    needs = {source: shapes for source, shapes in needs.items() if shapes}
    kinds = {
        name: CONSTANT_DTYPES.get(name, "compute") for shapes in needs.values() for name in shapes
    }
    return Wiring(
        base.storage,
        base.maps._replace(encode=encode, decode=decode),
        chain=Chain({"k": width, "v": width}, read_in=None),
        calibration=Calibration(needs, kinds, FIT),
        cost=Cost(operations=_operations(needs)),
    )


def _tiles(codec: Codec, payload: dict, unit: int) -> dict:
    """Reshape a payload [B, ...] of n tokens a row to [B * n / unit, ...] tiles of `unit` tokens. A
    tile has the shape that `encode` makes."""
    return {name: field.split_tiles(payload[name], unit) for name, field in codec.fields.items()}


def _operations(needs: dict[str, dict[str, tuple[int, ...]]]) -> int:
    """Count the operations that these constants take to read one token. A multiply-accumulate
    counts as two."""
    multiplied = 0
    for shapes in needs.values():
        for name, shape in shapes.items():
            multiplied += MULTIPLIED.get(name, 0) * math.prod(shape)
    return 2 * multiplied


# ---- One source of one tile: its prediction, its codes, its reconstruction ----


def predictor_inputs(
    names: str, keys: Float[Array, "u W"], values: Float[Array, "u W"]
) -> Float[Array, "u I"]:
    """Concatenate `keys` and `values` as `names` asks, keys first as in the released predictors."""
    parts = [x for name, x in (("k", keys), ("v", values)) if name in names]
    return jnp.concatenate(parts, axis=-1)


def _prediction(
    layer: AquaLayer, source: str, constants: dict, carry: dict, keys
) -> Float[Array, "u W"]:
    """Predict one source's tile, float32. The arguments are those of `reconstruct`."""
    if layer.inputs(source) == "none":
        return jnp.zeros(carry[source].shape, jnp.float32)
    seen_keys = carry["k"] if source == "k" else keys
    x = predictor_inputs(layer.inputs(source), seen_keys, carry["v"])
    return predict(layer.predictor, constants.get(source, {}), x)


def missed(
    layer: AquaLayer, source: str, constants: dict, x, carry: dict, keys
) -> Float[Array, "u W"]:
    """Compute the predictor's error, source minus prediction, for one source's tile `x` [u, W];
    float32. The other arguments are those of `reconstruct`."""
    return wide(x) - _prediction(layer, source, constants, carry, keys)


def reconstruct(
    layer: AquaLayer, codec: Codec, source: str, constants: dict, payload: dict, carry: dict, keys
):
    """Reconstruct one source's tile. Encoder and decoder both use this one function.

    Args:
        layer: the layer's spec.
        codec: the source's.
        source: "k" or "v".
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


def encode_source(
    layer: AquaLayer, codec: Codec, source: str, constants: dict, x, carry: dict, keys
):
    """Encode one source's tile `x` [u, W]. The other arguments are those of `reconstruct`.

    Returns:
        The tile's payload and its reconstruction.
    """
    residual = missed(layer, source, constants, x, carry, keys)
    payload = codec.encode(constants.get(source, {}), residual)
    return payload, reconstruct(layer, codec, source, constants, payload, carry, keys)


# ---- Predictors ----


def predictor_shapes(
    kind: str, inputs: int, outputs: int, rank: int = 0
) -> dict[str, tuple[int, ...]]:
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
    hidden = 2 * outputs  # the paper's MLP has two layers and twice as many hidden units as outputs
    layers = {"down": (inputs, hidden), "inner": (hidden,), "up": (hidden, outputs), "bias": bias}
    return {"gain": (inputs,), "offset": (inputs,), **layers}


def unpack_weight(constants: dict[str, Array]) -> Float[Array, "I O"]:
    """Decode the float32 weight of an `int4` predictor: codes * scale + low per group of inputs."""
    codes = unpack_nibbles(constants["codes"]).astype(jnp.float32)
    groups = codes.reshape(constants["scale"].shape[0], -1, codes.shape[1])
    scale, low = (constants[name].astype(jnp.float32)[:, None] for name in ("scale", "low"))
    return (groups * scale + low).reshape(codes.shape)


def _times(x: Float[Array, "u I"], weight: Float[Array, "I O"]) -> Float[Array, "u O"]:
    """Multiply in the weight's dtype, with float32 sums."""
    return jnp.einsum(
        "ti,io->to", x.astype(weight.dtype), weight, preferred_element_type=jnp.float32
    )


def predict(kind: str, constants: dict[str, Array], x: Float[Array, "u I"]) -> Float[Array, "u O"]:
    """Predict vectors of u tokens, float32. Raises UserError for a kind that is not evaluated."""
    if kind == "linear":
        y = _times(x, constants["weight"])
    elif kind == "int4":
        y = _times(x, unpack_weight(constants).astype(constants["scale"].dtype))
    elif kind == "low_rank":
        y = _times(_times(x, constants["down"]), constants["up"])
    elif kind == "mlp":
        # Layer norm
        numbers = x.astype(jnp.float32)
        deviation = numbers - numbers.mean(-1, keepdims=True)
        normed = deviation * jax.lax.rsqrt(
            (deviation * deviation).mean(-1, keepdims=True) + NORM_EPS
        )
        normed = (
            normed * constants["gain"].astype(jnp.float32)[None]
            + constants["offset"].astype(jnp.float32)[None]
        )
        inner = _times(normed, constants["down"]) + constants["inner"].astype(jnp.float32)[None]
        y = _times(jax.nn.silu(inner), constants["up"])
    else:
        raise UserError(
            f"predictor={kind!r} cannot be evaluated; known: {', '.join(PREDICTORS[:-1])}"
        )
    return y + constants["bias"].astype(jnp.float32)[None]
