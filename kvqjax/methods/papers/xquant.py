"""XQuant (arXiv 2508.10395): cache the layer input, rematerialise keys and values at every read.

    MHA (section 3.1):  cache X,  K = X W_k + b_k,  V = X W_v + b_v
    GQA (section 3.3):  cache X U_k and X U_v, with W = U S B^T the economy SVD and F = S B^T fused offline;
                        K = (X U_k) F_k + b_k,  V = (X U_v) F_v + b_v;  S is not applied before quantisation

X [l, E] is the input of a layer after the attention norm, for l tokens. Bias, QK-norm and RoPE, in
this order, come after rematerialisation, so quantised vectors never depend on the position. X and X
U_v are quantised per token, X U_k per channel (section 3.3.1). Every head reads the same X.

Attention is linear in the values, and softmax weights p_t add up to 1. So a step of few new tokens
first sums the stored vectors x_t, and then multiplies the sum by W_v once, instead of every token's
vector (layer_cache.SharedValues):

    sum_t p_t (x_t W_v + b_v) = (sum_t p_t x_t) W_v + b_v

Constants of one layer for GQA are {"k": {"down": U_k [E,R], "up": F_k [R,KD]}, "v": likewise}, with
KD = kv_width and the rank R = min(E, KD). kvqjax.calibrate.xquant makes them from the weights
alone. MHA needs none.
"""

import dataclasses

from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.codecs import Codec, Exact, Fit, Uniform
from kvqjax.codecs.outlier_channel import OutlierChannels
from kvqjax.codecs.uniform import check_group, fitting_group
from kvqjax.methods.layer_cache import (
    Calibration,
    Clock,
    Cost,
    Fast,
    Maps,
    SharedValues,
    Storage,
    Wiring,
    codec_maps,
    shared_until,
    through_heads,
)
from kvqjax.methods.spec import Method, first_layers, method_factory, value_or
from kvqjax.model.config import KVShape
from kvqjax.model.decoder import Layer, heads, norm
from kvqjax.model.rope import Waves, rotate
from kvqjax.ops.finite import saturated
from kvqjax.ops.packing.base import PLANE
from kvqjax.ops.xla_workarounds import row_major

FIT = Fit("kvqjax.calibrate.xquant", source="weights")
UNIT = 128  # tokens that leave the window together


# ---- The method and its options ----


@method_factory
def xquant(
    *,
    bits: int = 4,
    value_bits: int | None = None,
    outliers: int = 0,
    group: int | None = None,
    window: int = 0,
    sinks: int = 0,
    protected: int = 0,
    high_bits: int = 4,
    latent: bool | None = None,
    scales: str = "bfloat16",
) -> Method:
    """XQuant (arXiv 2508.10395, sections 3.1 and 3.3): uniform codes of a layer's input, or with
    grouped queries of two smaller projections of it (the latents). Every read computes keys and
    values anew (kvqjax.methods.roofline).

    - `bits` of a code, 1 to 6 or 8, 16 for the identity. With latents `value_bits` overrides it for
      values, and the first `outliers` channels of the keys' latent stay at 16 bits. `latent` None
      chooses by size.
    - The first `protected` layers have `high_bits` (Table 4: 3 layers of 4 bits).
    - `group` channels (of keys' latents: tokens) share a scale of dtype `scales`. `group` tokens
      leave the window together, beyond the newest `window`; `sinks` first tokens stay exact. By
      default it is 128, and 64 or 32 channels where the width is no multiple of that.

    With the defaults, Llama-3.1-8B stores 4.25 bits per key or value channel. Raises UserError for
    values that are not listed here, and for value bits or outliers where there is no latent.
    """
    layer = LayerInput(
        bits=bits,
        value_bits=value_bits,
        outliers=outliers,
        group=group,
        window=window,
        latent=latent,
        scales=scales,
    )
    first = dataclasses.replace(layer, bits=high_bits, value_bits=None)
    overrides = tuple((i, first) for i in first_layers("protected", protected))
    return Method(name="xquant", layer=layer, sinks=sinks, overrides=overrides)


# ---- One layer ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInput:
    """One layer of XQuant."""

    bits: int = 4  # of X, or with latents of keys
    value_bits: int | None = None  # of values, with latents
    outliers: int = 0  # the first channels of X U_k, which stay at 16 bits
    group: int | None = None  # None: UNIT tokens, and the largest group of channels that fits
    window: int = 0
    latent: bool | None = None  # None chooses X or its latents by size (prefers_latents)
    scales: str = "bfloat16"

    def uses_latents(self, config: KVShape) -> bool:
        return prefers_latents(config) if self.latent is None else self.latent

    def build(self, config: KVShape) -> Wiring:
        unit = value_or(self.group, UNIT)
        clock = Clock(("x",), self.window, unit)
        full = input_width(config)
        # Of a stored vector.
        width = min(full, config.kv_width) if self.uses_latents(config) else full
        channels = value_or(self.group, fitting_group(width))
        per_token = {"along": "channels", "group": channels, "scales": self.scales, "width": width}
        if not self.uses_latents(config):
            if self.outliers or self.value_bits not in (None, self.bits):
                options = f"value_bits={self.value_bits}, outliers={self.outliers}"
                raise UserError(
                    f"xquant caches X itself here, of one width and without a first latent; got {options}"
                )
            return layer_input(config, quantiser(self.bits, **per_token).build(width), clock)
        key = quantiser(self.bits, along="tokens", group=unit, scales=self.scales, width=width)
        if self.outliers:
            # The SVD orders channels by size: the first channels of X U_k hold the outliers (Table
            # B.1).
            key = OutlierChannels(channels=tuple(range(self.outliers)), inner=key)
        value = quantiser(value_or(self.value_bits, self.bits), **per_token)
        codecs = {name: codec.build(width) for name, codec in (("k", key), ("v", value))}
        return latents(config, codecs, clock._replace(sources=("k", "v")))


def layer_input(config: KVShape, codec: Codec, clock: Clock) -> Wiring:
    """Wire XQuant for MHA: the source is X itself."""

    def capture(weights, constants, projected, positions):
        return {"x": projected.x}

    def expand(weights, constants, sources, positions):
        k, v = (times(sources["x"], weights[name], weights[name].dtype) for name in ("k", "v"))
        return attended(k, v, weights, positions, config)

    def read(weights, constants, payload, sources):
        return sources["x"]

    width, codecs = input_width(config), {"x": codec}
    shared = summed_first(width, config, read, lambda weights, constants: weights["v"])
    return Wiring(
        Storage({"x": width}, codecs, (clock,)),
        Maps(capture, *codec_maps(codecs), expand, turned=()),
        fast=Fast(shared=shared, before_rope=True),
        calibration=Calibration(fit=FIT),
        cost=Cost(
            operations=4 * width * config.kv_width
        ),  # two products, each multiply-accumulate two operations
    )


def latents(config: KVShape, codecs: dict[str, Codec], clock: Clock) -> Wiring:
    """Wire XQuant for GQA: the sources are the latents X U_k ("k") and X U_v ("v")."""
    width = input_width(config)
    rank = min(width, config.kv_width)
    needs = {"down": (width, rank), "up": (rank, config.kv_width)}
    codecs = {name: codec._replace(needs=codec.needs | needs) for name, codec in codecs.items()}

    def capture(weights, constants, projected, positions):
        return {
            name: times(projected.x, constants[name]["down"], projected.x.dtype)
            for name in ("k", "v")
        }

    def expand(weights, constants, sources, positions):
        k, v = (
            times(sources[name], constants[name]["up"], weights[name].dtype) for name in ("k", "v")
        )
        return attended(k, v, weights, positions, config)

    def read(weights, constants, payload, sources):
        return sources["v"]

    shared = summed_first(rank, config, read, lambda weights, constants: constants["v"]["up"])
    return Wiring(
        Storage({"k": rank, "v": rank}, codecs, (clock,)),
        Maps(capture, *codec_maps(codecs), expand, turned=()),
        fast=Fast(shared=shared, before_rope=True),
        # The constants stand for weights, and have their dtype.
        calibration=Calibration(kinds=dict.fromkeys(needs, "compute"), fit=FIT),
        # The latents of new tokens and of cached tokens are made with U and F, so a decode step
        # does not read W_k, W_v.
        cost=Cost(operations=4 * rank * config.kv_width, spared=2 * width * config.kv_width),
    )


# ---- Keys and values made anew from a layer's input (XQuant-CL does so too) ----


def input_width(shape: KVShape) -> int:
    """Give E, the width of the layer input. Raises UserError for a shape that does not know it."""
    if shape.width is None:
        raise UserError(
            "its keys and values are computed from a layer's input and weights; use a kvqjax model"
        )
    return shape.width


def prefers_latents(config: KVShape) -> bool:
    """Say whether two latents of kv_width numbers take no more room than X."""
    # So it is in the usual models from two query heads per KV head on. Widths decide, not head
    # counts: Qwen3-0.6B has GQA, and still 2*kv_width > E.
    return 2 * config.kv_width <= input_width(config)


def quantiser(bits: int, along: str, group: int, scales: str, width: int) -> Exact | Uniform:
    """Choose the uniform codec of section 4.

    Args:
        bits: of a code; 16 for the compute dtype itself (the identity).
        along: whether a scale belongs to "channels" of one token, or to "tokens" of one channel.
        group: how many channels or tokens share a scale.
        scales: the dtype of scales and minima.
        width: channels of a token.

    Raises:
        UserError: for groups of channels that do not fit `width`.
    """
    if bits == 16:
        return Exact()
    if along == "channels":
        # `group` is also the number of tokens that leave the window together, at least those of one
        # PLANE of words.
        check_group(group, width, least=PLANE)
    return Uniform(bits=bits, along=along, group=group, dtype=scales)


def times(x: Float[Array, "B n W"], matrix: Float[Array, "W N"], dtype) -> Float[Array, "B n N"]:
    """Multiply x by a matrix in the compute dtype `dtype`."""
    # Without `row_major` XLA would compute the transposed product, which suits the operations after
    # it, and would transpose the matrices of all layers for that.
    return row_major(jnp.einsum("bne,ef->bnf", x.astype(dtype), matrix.astype(dtype)))


def attended(
    k: Float[Array, "B n KD"],
    v: Float[Array, "B n KD"],
    weights: Layer,
    positions: Int[Array, "B n"] | Waves,
    config: KVShape,
) -> tuple[Float[Array, "B n K D"], Float[Array, "B n K D"]]:
    """Make keys and values as attended of rematerialised products: bias, QK-norm, RoPE.

    Args:
        k: the layer's input times W_k.
        v: the layer's input times W_v.
        positions: of the tokens, or the waves that replace them (`Fast.waves`).

    Returns:
        Keys and values by KV head.
    """
    if config.qkv_bias:
        k = k + weights["k_bias"][None, None]
        v = v + weights["v_bias"][None, None]
    # Infinite numbers are made finite here, because a norm or a rotation would turn them into NaN.
    k = heads(saturated(k, k.dtype), config.num_kv_heads)
    v = heads(saturated(v, v.dtype), config.num_kv_heads)
    if config.qk_norm:
        k = norm(k, weights.get("k_norm"), config.norm_eps, config.norm_offset)
    return rotate(k, positions, config), v


def summed_first(width: int, config: KVShape, read, up) -> SharedValues:
    """Sum stored values first, then multiply the sum by a matrix.

    Args:
        width: of a stored value.
        read: gives a block's stored values (`SharedValues.read`).
        up: up(weights, constants) gives the matrix [width, KD].

    Returns:
        Both steps, and the number of new tokens up to which this order is the cheaper one.
    """

    def finish(weights, constants, means):
        out = through_heads(means, up(weights, constants).astype(weights["v"].dtype), config)
        if not config.qkv_bias:
            return out
        # Softmax weights add up to 1, so the bias is added to a mean once.
        bias = (
            weights["v_bias"].astype(jnp.float32).reshape(config.num_kv_heads, 1, config.head_dim)
        )
        queries_per_head = config.num_heads // config.num_kv_heads
        # Out: [B, T, H, D]
        return out + jnp.repeat(bias, queries_per_head, 0).reshape(1, 1, *out.shape[2:])

    return SharedValues(width, shared_until(width, width * config.kv_width, config), read, finish)
