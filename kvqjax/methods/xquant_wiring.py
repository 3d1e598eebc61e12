"""XQuant (arXiv 2508.10395): cache the layer input, rematerialise keys and values at every read.

    MHA (section 3.1):  cache X,  K = X W_k + b_k,  V = X W_v + b_v
    GQA (section 3.3):  cache X U_k and X U_v, with W = U S B^T the economy SVD and F = S B^T fused offline;
                        K = (X U_k) F_k + b_k,  V = (X U_v) F_v + b_v;  S is not applied before quantisation

X [l, E] is the layer input after the attention norm. Bias, QK-norm and RoPE, in this order, come after
rematerialisation, so quantised vectors never depend on the position. X and X U_v are quantised per token, X U_k per
channel (section 3.3.1). Every head reads the same X.

Attention is linear in the values, so few new tokens sum what is stored and rematerialise the sum instead of every
token: sum_t p_t (x_t W_v + b_v) = (sum_t p_t x_t) W_v + b_v (wiring.SharedValues).

Constants of one layer for GQA: {"k": {"down": U_k [E,R], "up": F_k [R,KD]}, "v": likewise}, KD = kv_width and the rank
R = min(E, KD); made from the weights alone by kvqjax.calibrate.xquant. MHA needs none.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.codecs import Codec, Exact, Uniform
from kvqjax.codecs.outlier_channel import OutlierChannels
from kvqjax.codecs.uniform import check_group
from kvqjax.methods.packing import latent_form
from kvqjax.methods.spec import Method, first_layers, method_factory
from kvqjax.methods.wiring import Clock, SharedValues, Wiring, shared_until, through_heads
from kvqjax.model.config import KVShape
from kvqjax.model.decoder import heads, norm
from kvqjax.model.rope import rotate
from kvqjax.model.weight_trees import Layer
from kvqjax.ops.finite import saturated
from kvqjax.ops.layout import PLANE
from kvqjax.ops.xla import row_major

__all__ = [
    "LayerInput",
    "attended",
    "input_width",
    "latents",
    "layer_input",
    "prefers_latents",
    "quantiser",
    "summed_first",
    "times",
    "xquant",
]


def input_width(shape: KVShape) -> int:
    """Width of the layer input that is cached. Raises ValueError for a shape that does not know it."""
    if shape.width is None:
        raise ValueError("its keys and values are computed from a layer's input and weights; use a kvqjax model")
    return shape.width


def prefers_latents(config: KVShape) -> bool:
    """Whether two latents of kv_width numbers take no more room than X: true from two query heads per KV head on, in
    the usual models. Decided by widths, not by head counts: Qwen3-0.6B has GQA, and still 2*kv_width > E."""
    return 2 * config.kv_width <= input_width(config)


def attended(
    k: Float[Array, "B n KD"],
    v: Float[Array, "B n KD"],
    weights: Layer,
    positions: Int[Array, "B n"],
    config: KVShape,
) -> tuple[Float[Array, "B n K D"], Float[Array, "B n K D"]]:
    """Keys and values as attended from rematerialised products: bias, QK-norm, RoPE. Numbers that
    overflowed saturate before a norm or a rotation makes NaN of them."""
    if config.qkv_bias:
        k, v = k + weights["k_bias"][None, None], v + weights["v_bias"][None, None]
    k, v = (heads(saturated(x, x.dtype), config.num_kv_heads) for x in (k, v))
    if config.qk_norm:
        k = norm(k, weights["k_norm"], config.norm_eps)
    return rotate(k, positions, config), v


def times(x: Float[Array, "B n W"], matrix: Float[Array, "W N"], dtype) -> Float[Array, "B n N"]:
    """x @ matrix in the compute dtype. In row-major order: for what is made of it XLA would rather have its transpose,
    and turns the matrices of all layers for that."""
    return row_major(jnp.einsum("bne,ef->bnf", x.astype(dtype), matrix.astype(dtype)))


def summed_first(width: int, config: KVShape, read, up) -> SharedValues:
    """Values summed as `read` (see SharedValues) gives them, vectors of `width`, and then multiplied by the matrix
    `up(weights, constants)` [width, KD]; a mean of values has their bias once."""

    def finish(weights, constants, means):
        out = through_heads(means, up(weights, constants).astype(weights["v"].dtype), config)
        if not config.qkv_bias:
            return out
        bias = weights["v_bias"].astype(jnp.float32).reshape(config.num_kv_heads, 1, config.head_dim)
        group = config.num_heads // config.num_kv_heads
        return out + jnp.repeat(bias, group, 0).reshape(1, 1, *out.shape[2:])

    return SharedValues(width, shared_until(width, width * config.kv_width, config), read, finish)


def _independent(sources: dict[str, int], codecs: dict[str, Codec], clock: Clock, capture, expand, shared) -> Wiring:
    """A wiring whose sources are encoded one by one, and whose layers do not depend on each other."""

    def encode(constants, tile, carry):
        payload = {name: codecs[name].encode(constants.get(name, {}), x) for name, x in tile.items()}
        return payload, decode(constants, payload, {})[0], carry

    def decode(constants, payload, carry):
        return {name: codecs[name].decode(constants.get(name, {}), x) for name, x in payload.items()}, carry

    return Wiring(sources, codecs, (clock,), capture, encode, decode, expand, shared=shared)


def layer_input(config: KVShape, codec: Codec, clock: Clock) -> Wiring:
    """XQuant for MHA: the source is X itself."""

    def capture(weights, constants, projected, positions):
        return {"x": projected.x}

    def expand(weights, constants, sources, positions):
        k, v = (times(sources["x"], weights[name], weights[name].dtype) for name in ("k", "v"))
        return attended(k, v, weights, positions, config)

    def read(weights, constants, payload, sources):
        return sources["x"]

    width = input_width(config)
    shared = summed_first(width, config, read, lambda weights, constants: weights["v"])
    return _independent({"x": width}, {"x": codec}, clock, capture, expand, shared)


def latents(config: KVShape, codecs: dict[str, Codec], clock: Clock) -> Wiring:
    """XQuant for GQA: the sources are the latents X U_k ("k") and X U_v ("v")."""
    width = input_width(config)
    rank = min(width, config.kv_width)
    needs = {"down": (width, rank), "up": (rank, config.kv_width)}
    codecs = {name: codec._replace(needs=codec.needs | needs) for name, codec in codecs.items()}

    def capture(weights, constants, projected, positions):
        return {name: times(projected.x, constants[name]["down"], projected.x.dtype) for name in ("k", "v")}

    def expand(weights, constants, sources, positions):
        k, v = (times(sources[name], constants[name]["up"], weights[name].dtype) for name in ("k", "v"))
        return attended(k, v, weights, positions, config)

    def read(weights, constants, payload, sources):
        return sources["v"]

    shared = summed_first(rank, config, read, lambda weights, constants: constants["v"]["up"])
    wiring = _independent({"k": rank, "v": rank}, codecs, clock, capture, expand, shared)
    return wiring._replace(kinds=dict.fromkeys(needs, "compute"))  # they stand for weights


def quantiser(bits: int, along: str, group: int, scales: str, width: int) -> Exact | Uniform:
    """The uniform codec of section 4 for `width` channels; 16 bits mean the compute dtype itself (the identity)."""
    if bits == 16:
        return Exact()
    if along == "channels":
        check_group(group, width, least=PLANE)  # as many tokens leave the window at a time
    return Uniform(bits=bits, along=along, group=group, dtype=scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInput:
    """One layer of XQuant. `latent=None` chooses X or its latents by size (prefers_latents). With latents `bits` is for
    keys, `value_bits` for values, and the first `outliers` channels of X U_k stay at 16 bits."""

    bits: int = 4
    value_bits: int | None = None
    outliers: int = 0
    group: int = 128
    window: int = 0
    latent: bool | None = None
    scales: str = "bfloat16"

    def uses_latents(self, config: KVShape) -> bool:
        return prefers_latents(config) if self.latent is None else self.latent

    def build(self, config: KVShape) -> Wiring:
        clock = Clock(("x",), self.window, self.group)
        full = input_width(config)
        width = min(full, config.kv_width) if self.uses_latents(config) else full
        per_token = {"along": "channels", "group": self.group, "scales": self.scales, "width": width}
        if not self.uses_latents(config):
            if self.outliers or self.value_bits not in (None, self.bits):
                got = f"value_bits={self.value_bits}, outliers={self.outliers}"
                raise ValueError(f"xquant caches X itself here, of one width and without a first latent; got {got}")
            return layer_input(config, quantiser(self.bits, **per_token).build(width), clock)
        key = quantiser(self.bits, **{**per_token, "along": "tokens"})
        if self.outliers:
            key = OutlierChannels(channels=tuple(range(self.outliers)), inner=key)
        value = quantiser(self.value_bits or self.bits, **per_token)
        codecs = {name: codec.build(width) for name, codec in (("k", key), ("v", value))}
        wiring = latents(config, codecs, clock._replace(sources=("k", "v")))
        return wiring._replace(packed=latent_form(key, value, width, config))


@method_factory
def xquant(
    *,
    bits: int = 4,
    value_bits: int | None = None,
    outliers: int = 0,
    group: int = 128,
    window: int = 0,
    sinks: int = 0,
    protected: int = 0,
    high_bits: int = 4,
    latent: bool | None = None,
    scales: str = "bfloat16",
) -> Method:
    """The layer input (MHA) or its two latents (GQA) at 8, 4, 3 or 2 bits, 16 for the identity; keys and values are
    computed anew at every read, which costs compute (kvqjax.methods.roofline).

    The newest tokens stay exact until `group` of them are complete, and `window` more. The first `protected` layers
    have `high_bits` (Table 4: 3 layers of 4 bits).
    """
    layer = LayerInput(
        bits=bits, value_bits=value_bits, outliers=outliers, group=group, window=window, latent=latent, scales=scales
    )
    first = dataclasses.replace(layer, bits=high_bits, value_bits=None)
    overrides = tuple((i, first) for i in first_layers(protected))
    return Method(name="xquant", layer=layer, sinks=sinks, overrides=overrides)
