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

from kvqjax._errors import UserError
from kvqjax.codecs import Codec, Uniform
from kvqjax.codecs.kernel_form import BLOCK, Packed, rope_of
from kvqjax.codecs.outlier_channel import OutlierChannels
from kvqjax.codecs.uniform import uniform_body
from kvqjax.methods.maps import Maps
from kvqjax.methods.rematerialise import FIT, attended, input_width, prefers_latents, quantiser, summed_first, times
from kvqjax.methods.spec import Method, first_layers, method_factory
from kvqjax.methods.wiring import Calibration, Clock, Cost, Fast, Storage, Wiring
from kvqjax.model.config import KVShape
from kvqjax.pallas_kernels.latents import LatentBody, LatentSpec
from kvqjax.pallas_kernels.packed import PackedSpec

__all__ = ["LayerInput", "latents", "layer_input", "xquant"]


def _independent(
    sources: dict[str, int], codecs: dict[str, Codec], clock: Clock, capture, expand, fast: Fast, cost: Cost
) -> Wiring:
    """Wire sources that are encoded one by one, in layers that do not depend on each other."""

    def encode(constants, tile, carry):
        payload = {name: codecs[name].encode(constants.get(name, {}), x) for name, x in tile.items()}
        return payload, decode(constants, payload, {})[0], carry

    def decode(constants, payload, carry):
        return {name: codecs[name].decode(constants.get(name, {}), x) for name, x in payload.items()}, carry

    storage, maps = Storage(sources, codecs, (clock,)), Maps(capture, encode, decode, expand)
    return Wiring(storage, maps, fast=fast, calibration=Calibration(fit=FIT), cost=cost)


def layer_input(config: KVShape, codec: Codec, clock: Clock) -> Wiring:
    """Wire XQuant for MHA: the source is X itself."""

    def capture(weights, constants, projected, positions):
        return {"x": projected.x}

    def expand(weights, constants, sources, positions):
        k, v = (times(sources["x"], weights[name], weights[name].dtype) for name in ("k", "v"))
        return attended(k, v, weights, positions, config)

    def read(weights, constants, payload, sources):
        return sources["x"]

    width = input_width(config)
    shared = summed_first(width, config, read, lambda weights, constants: weights["v"])
    fast = Fast(shared=shared, before_rope=True)
    cost = Cost(operations=4 * width * config.kv_width)  # two products, each multiply-accumulate two operations
    return _independent({"x": width}, {"x": codec}, clock, capture, expand, fast, cost)


def latents(config: KVShape, codecs: dict[str, Codec], clock: Clock) -> Wiring:
    """Wire XQuant for GQA: the sources are the latents X U_k ("k") and X U_v ("v")."""
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
    fast = Fast(shared=shared, before_rope=True)
    # U takes the place of W_k and W_v.
    cost = Cost(operations=4 * rank * config.kv_width, spared=2 * width * config.kv_width)
    wiring = _independent({"k": rank, "v": rank}, codecs, clock, capture, expand, fast, cost)
    return wiring.having(calibration={"kinds": dict.fromkeys(needs, "compute")})  # they stand for weights


def _packed(key: object, value: object, rank: int, config: KVShape) -> Packed | None:
    """Say how kernels read two latents of `rank` numbers, uniform per channel and per token; None for others."""
    if not (isinstance(key, Uniform) and isinstance(value, Uniform)) or key.dtype != value.dtype:
        return None
    stored = PackedSpec(
        key_bits=key.bits,
        value_bits=value.bits,
        key_group=key.group,
        value_group=min(value.group, rank),
        kv_heads=1,
        head_dim=rank,
        scales=value.dtype,
        block=BLOCK,
    )
    heads = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "rope": rope_of(config)}
    epsilon = config.norm_eps if config.qk_norm else 0.0

    def body(weights, constants, stored, positions) -> LatentBody:
        arrays = uniform_body(weights, constants, stored, positions)
        up = constants["k"]["up"].astype(weights["k"].dtype)
        return LatentBody(arrays, positions, up, weights.get("k_bias"), weights.get("k_norm"))

    return Packed(LatentSpec(stored=stored, epsilon=epsilon, **heads), body)


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
                raise UserError(f"xquant caches X itself here, of one width and without a first latent; got {got}")
            return layer_input(config, quantiser(self.bits, **per_token).build(width), clock)
        key = quantiser(self.bits, **{**per_token, "along": "tokens"})
        if self.outliers:
            key = OutlierChannels(channels=tuple(range(self.outliers)), inner=key)
        value = quantiser(self.value_bits or self.bits, **per_token)
        codecs = {name: codec.build(width) for name, codec in (("k", key), ("v", value))}
        wiring = latents(config, codecs, clock._replace(sources=("k", "v")))
        return wiring.having(fast={"packed": _packed(key, value, width, config)})


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
    """XQuant (arXiv 2508.10395, sections 3.1 and 3.3): uniform codes of a layer's input, or with grouped queries of
    two smaller projections of it (the latents). Every read computes keys and values anew (kvqjax.methods.roofline).

    - `bits` of a code, 1 to 6 or 8, 16 for the identity. With latents `value_bits` overrides it for values, and the
      first `outliers` channels of the keys' latent stay at 16 bits. `latent` None chooses by size.
    - The first `protected` layers have `high_bits` (Table 4: 3 layers of 4 bits).
    - `group` channels (of keys' latents: tokens) share a scale of dtype `scales`. `group` tokens leave the window
      together, beyond the newest `window`; `sinks` first tokens stay exact.

    With the defaults, Llama-3.1-8B stores 4.25 bits per key or value channel. Raises UserError for values that are not
    listed here, and for value bits or outliers where there is no latent.
    """
    layer = LayerInput(
        bits=bits, value_bits=value_bits, outliers=outliers, group=group, window=window, latent=latent, scales=scales
    )
    first = dataclasses.replace(layer, bits=high_bits, value_bits=None)
    overrides = tuple((i, first) for i in first_layers(protected))
    return Method(name="xquant", layer=layer, sinks=sinks, overrides=overrides)
