"""AQUA-KV (arXiv 2501.19392): quantise what a small model cannot predict from the layer below.

    K_pred = f_k(Kr_prev)              Kr = K_pred + Q^-1(Q(K - K_pred))
    V_pred = f_v([Kr, Vr_prev])        Vr = V_pred + Q^-1(Q(V - V_pred))        (Algorithm 1; keys first)

Kr and Vr are the reconstructions, of this layer and of the layer below (`_prev`), all before RoPE and over all KV
heads; they are the carry. The first layer has no predictor and a codec of its own. Q is any codec: HIGGS, per token,
per channel.

Encoder and decoder reconstruct with one function on one fixed tile, `unit` tokens of one row, rounded to the carry's
dtype: so they agree bit for bit, and the chain does not drift with depth. GPUs and TPUs decode all tiles of a block at
once, by the same function: where its products sum in another order, a number may round to its neighbour.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.codecs import Centred, Codec, CodecSpec, Fit
from kvqjax.codecs.kernel_form import Packed, packed_form
from kvqjax.methods.aqua_packed import predicted_form
from kvqjax.methods.keys_values import KeysAndValues, keys_and_values
from kvqjax.methods.predictors import DTYPES, predict, shapes
from kvqjax.methods.spec import LayerSpec
from kvqjax.methods.wiring import Calibration, Chain, Clock, Cost, Fast, Wiring
from kvqjax.model.config import KVShape
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.layout import Field
from kvqjax.ops.xla_workarounds import kept_apart, rounded

__all__ = ["UNIT", "AquaLayer", "encode_source", "predictor_inputs", "reconstruct"]

UNIT = 128
FIT = Fit("kvqjax.calibrate.aqua", also=("kvqjax.calibrate.centre",))
MULTIPLIED = {"weight": 1, "down": 1, "up": 1, "codes": 8}  # multiply-accumulates per stored element
COPIES = ("none", "layer", "all")
KEPT = {"k": "key", "v": "value"}  # source -> AquaLayer's field


@dataclasses.dataclass(frozen=True, kw_only=True)
class AquaLayer:
    """One layer. `key_inputs` and `value_inputs` name what each predictor sees: "k", "v", "kv", or "none" for no
    predictor. For keys they are the previous layer's keys and values; for values, this layer's keys and the previous
    values.

    `copy` trades memory for compute at every decode step, L layers and S body tokens. "layer": one layer's keys and
    values, 2 S K D numbers, live during the call; L predictions per token. "none": one block's; every layer is computed
    anew from the first one, L (L + 1) / 2 predictions. "all": every layer's reconstruction is stored beside its codes
    and no prediction is needed, which saves no memory against the exact cache.

    `unbiased` keys are those without the model's key bias, in codes, predictors and carry alike."""

    key: CodecSpec
    value: CodecSpec
    key_inputs: str = "k"
    value_inputs: str = "kv"
    predictor: str = "linear"
    rank: int = 0
    rope: str = "pre"
    copy: str = "layer"
    window: int = 0
    unit: int = UNIT
    unbiased: bool = False

    def __post_init__(self):
        for name, known in (("key_inputs", ("k", "v", "kv", "none")), ("value_inputs", ("k", "v", "kv", "none"))):
            if getattr(self, name) not in known:
                raise UserError(f"{name}={getattr(self, name)!r}; known: {', '.join(known)}")
        if self.copy not in COPIES:
            raise UserError(f"copy={self.copy!r}; known: {', '.join(COPIES)}")

    def admit(self, other: LayerSpec) -> LayerSpec:
        """Take a layer of keys and values by other codecs, exact ones among them, into the chain. It has no predictor,
        and this layer's window, unit and `rope`; the layer above predicts from its reconstruction."""
        if not isinstance(other, KeysAndValues):
            return other
        alone = {"key_inputs": "none", "value_inputs": "none", "predictor": "linear", "rank": 0}
        return dataclasses.replace(self, key=other.key, value=other.value, **alone)

    def inputs(self, source: str) -> str:
        """Name the inputs of the predictor of "k" or "v"."""
        return self.key_inputs if source == "k" else self.value_inputs

    def kind(self, source: str) -> str:
        return "none" if self.inputs(source) == "none" else self.predictor

    def build(self, config: KVShape) -> Wiring:
        width = config.kv_width
        codecs = {"k": self.key.build(width), "v": self.value.build(width)}
        if self.copy == "all":
            codecs = {name: _with_copy(codec) for name, codec in codecs.items()}
        return _aqua_wiring(self, config, codecs)

    def packed(self, config: KVShape) -> Packed | None:
        """Name the kernel for layers with the usual linear predictors, or with none, where one layer's reconstruction
        flows upwards."""
        seen, linear = (self.key_inputs, self.value_inputs), self.predictor == "linear"
        if self.copy != "layer" or not linear or seen not in (("k", "kv"), ("none", "none")):
            return None
        if self.unbiased and config.known_key_bias:
            return None
        return predicted_form(packed_form(self.key, self.value, self.rope, config), seen == ("k", "kv"))

    def needs(self, source: str, width: int) -> dict[str, tuple[int, ...]]:
        """Give the shapes of the predictor's constants by name, and of the mean of keys that are centred."""
        own = shapes(self.kind(source), len(self.inputs(source)) * width, width, self.rank)
        return own | ({"mean": (width,)} if isinstance(getattr(self, KEPT[source]), Centred) else {})


def _operations(needs: dict[str, dict[str, tuple[int, ...]]]) -> int:
    """Count the operations of predictors of these constants for one token."""
    constants = (item for group in needs.values() for item in group.items())
    return sum(2 * MULTIPLIED.get(name, 0) * math.prod(shape) for name, shape in constants)


def _with_copy(codec: Codec) -> Codec:
    """Give the codec a field for the reconstruction beside the codes."""
    copy = Field(kind="plain", width=codec.width, role="copies", dtype="compute")
    return codec._replace(fields=codec.fields | {"copy": copy})


def predictor_inputs(names: str, keys: Float[Array, "u W"], values: Float[Array, "u W"]) -> Float[Array, "u I"]:
    """Concatenate `keys` and `values` as `names` asks, keys first as in the released predictors."""
    parts = [x for name, x in (("k", keys), ("v", values)) if name in names]
    return jnp.concatenate(parts, axis=-1)


def source_prediction(layer: AquaLayer, source: str, constants: dict, carry: dict, keys) -> Float[Array, "u W"]:
    """Predict one source's tile, float32. `keys` is Kr of this layer, used for values only."""
    if layer.inputs(source) == "none":
        return jnp.zeros(carry[source].shape, jnp.float32)
    x = predictor_inputs(layer.inputs(source), carry["k"] if source == "k" else keys, carry["v"])
    return predict(layer.predictor, constants.get(source, {}), x)


def reconstruct(layer: AquaLayer, codec: Codec, source: str, constants: dict, payload: dict, carry: dict, keys):
    """Reconstruct one source's tile [u, W] in the carry's dtype. Encoder and decoder both use this one function."""
    residual = codec.decode(constants.get(source, {}), payload).astype(jnp.float32)
    total = source_prediction(layer, source, constants, carry, keys) + residual
    dtype = carry[source].dtype
    return saturated(rounded(total, dtype), dtype)


def encode_source(layer: AquaLayer, codec: Codec, source: str, constants: dict, x, carry: dict, keys):
    """Encode one source's tile `x` [u, W]. Gives its payload and its reconstruction."""
    residual = wide(x) - source_prediction(layer, source, constants, carry, keys)
    payload = codec.encode(constants.get(source, {}), residual)
    return payload, reconstruct(layer, codec, source, constants, payload, carry, keys)


def _tiles(codec: Codec, payload: dict, unit: int) -> dict:
    """Reshape a payload [B, ...] of n tokens to [B * n / unit, ...] tiles of `unit` tokens, the shapes that `encode`
    makes."""

    return {name: field.split_tiles(payload[name], unit) for name, field in codec.fields.items()}


def _aqua_wiring(layer: AquaLayer, config: KVShape, codecs: dict[str, Codec]) -> Wiring:
    base = keys_and_values(config, codecs, (Clock(("k", "v"), layer.window, layer.unit),), layer.rope, layer.unbiased)
    width = config.kv_width

    def encode(constants, tile, carry):
        payload, recon = {}, {"k": None}
        for source in ("k", "v"):
            payload[source], recon[source] = encode_source(
                layer, codecs[source], source, constants, tile[source], carry, recon["k"]
            )
            if layer.copy == "all":
                payload[source] = payload[source] | {"copy": recon[source]}
        return payload, recon, recon

    def tile_step(constants, payload, carry, after=lambda k, payload: payload):
        k = reconstruct(layer, codecs["k"], "k", constants, payload["k"], carry, None)
        own = after(k, payload["v"])
        return {"k": k, "v": reconstruct(layer, codecs["v"], "v", constants, own, carry, k)}

    def one_after_the_other(k, payload):  # XLA for TPUs would look up the codes of both in one operation, and spill
        return kept_apart((k, payload))[1]

    def decode(constants, payload, carry):
        if layer.copy == "all":
            recon = {source: payload[source]["copy"].astype(carry[source].dtype) for source in ("k", "v")}
            return recon, recon
        shape = carry["k"].shape
        tiles = {source: _tiles(codecs[source], payload[source], layer.unit) for source in ("k", "v")}
        below = {source: x.reshape(-1, layer.unit, width) for source, x in carry.items()}
        step = functools.partial(tile_step, constants)
        # On a GPU or a TPU a loop over tiles would take longer to start its operations than to run them.
        in_turn = jax.vmap(functools.partial(step, after=one_after_the_other))
        one_by_one = lambda *pair: jax.lax.map(lambda one: step(*one), pair)  # noqa: E731
        recon = jax.lax.platform_dependent(tiles, below, cuda=jax.vmap(step), tpu=in_turn, default=one_by_one)
        recon = {source: x.reshape(shape) for source, x in recon.items()}
        return recon, recon

    needs = {source: shape for source in ("k", "v") if (shape := layer.needs(source, width))}
    kinds = {name: DTYPES.get(name, "compute") for names in needs.values() for name in names}
    return Wiring(
        base.storage,
        base.maps._replace(encode=encode, decode=decode),
        chain=Chain({"k": width, "v": width}, layer.copy, read_in=None),
        fast=Fast(packed=layer.packed(config)),
        calibration=Calibration(needs, kinds, FIT),
        cost=Cost(operations=_operations(needs) if layer.copy != "all" else 0),
    )
