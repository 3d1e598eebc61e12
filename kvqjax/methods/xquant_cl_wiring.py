"""XQuant-CL (arXiv 2508.10395, sections 3.2, 3.3.2): cache each layer's input as its difference from the layers below.

    base layer b:   Xhat_b = Q(X_b)                                      (more bits, full width)
    MHA, i > b:     D_i = Q(X_i - Xhat_{i-1})            Xhat_i = Xhat_{i-1} + D_i
    GQA, i > b:     Z_i = Q((X_i - Xhat_{i-1}) U_i)      Xhat_i = Xhat_{i-1} + Z_i U_i^T,   [W_k|W_v]_i = U_i S_i B_i^T
    every layer:    [K|V]_i = Xhat_i [W_k|W_v]_i, then bias, QK-norm and RoPE

The loop is closed: the difference is taken from what the decoder will have, so layer i's error is that of its own
quantiser alone. For GQA, the part of X_i that U_i does not span stays stale in Xhat_i; [K|V]_i does not see it and is
exact when Q is the identity.

Constants of one layer for GQA: {"x": {"down": U_i [E, R]}}, R = min(E, 2*KD); with residual deltas U is that of
diag(gain) [W_k|W_v]. Made from the weights alone by kvqjax.calibrate.xquant. MHA needs none.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvqjax.codecs import Codec, Uniform
from kvqjax.codecs.uniform import check_group
from kvqjax.methods.spec import KeysAndValues, LayerSpec, Method, first_layers, method_factory
from kvqjax.methods.wiring import Clock, Wiring
from kvqjax.methods.xquant_wiring import (
    LayerInput,
    attended,
    input_width,
    prefers_latents,
    quantiser,
    summed_first,
    times,
)
from kvqjax.model.config import KVShape
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.layout import PLANE, Field

__all__ = ["ACCUMULATORS", "SPACES", "CrossLayer", "cross_layer", "stored_accumulator", "xquant_cl"]

ACCUMULATORS = ("float32", "bfloat16", "2", "3", "4", "5", "6", "8")
SPACES = ("norm", "residual")


def stored_accumulator(x: jax.Array, accumulator: str, group: int) -> jax.Array:
    """Xhat `[..., E]` as the next layer finds it, float32: as it is, rounded to bfloat16, or re-quantised per token."""
    if accumulator == "float32":
        return x
    if accumulator == "bfloat16":
        # Not astype: XLA may drop a conversion to bfloat16 and back, and then encoder and decoder would differ.
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    codec = Uniform(bits=int(accumulator), along="channels", group=group).build(x.shape[-1])
    return codec.decode({}, codec.encode({}, x.reshape(-1, x.shape[-1]))).reshape(x.shape)


def _scalar_codec() -> Codec:
    """One number per token in the compute dtype."""
    field = Field(kind="token", width=1, role="scales", dtype="compute")
    turn = lambda x: jnp.swapaxes(x, -1, -2)  # noqa: E731
    return Codec(1, 1, {"x": field}, lambda _, x: {"x": turn(x)}, lambda _, tile: turn(tile["x"]))


def _capture(config: KVShape, space: str):
    def capture(weights, constants, projected, positions):
        if space == "norm":
            return {"x": projected.x}
        wide = projected.h.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return {"x": projected.h, "inverse_rms": jax.lax.rsqrt(square + config.norm_eps)}

    return capture


def _normed(weights, sources, space: str):
    """The layer's input after the attention norm, from Xhat."""
    x, dtype = sources["x"], weights["k"].dtype
    if space == "norm":
        return x
    # The norm with the exact token's scale: Xhat's own would contain what is stale in it.
    x = (x.astype(jnp.float32) * sources["inverse_rms"].astype(jnp.float32)).astype(dtype)
    return x * weights["attn_norm"][None, None]


def _expand(config: KVShape, space: str):
    def expand(weights, constants, sources, positions):
        x = _normed(weights, sources, space)
        k, v = (times(x, weights[name], weights["k"].dtype) for name in ("k", "v"))
        return attended(k, v, weights, positions, config)

    return expand


def _shared(config: KVShape, space: str):
    def read(weights, constants, payload, sources):
        return _normed(weights, sources, space)

    return summed_first(input_width(config), config, read, lambda weights, constants: weights["v"])


def cross_layer(
    config: KVShape,
    codec: Codec,
    clock: Clock,
    *,
    start: bool,
    latent: bool,
    accumulator: str,
    space: str,
    group: int,
) -> Wiring:
    """One layer of the loop: the base layer (`start`), or a difference from the layer below, stored by `codec` at full
    width or, with `latent`, as its coordinates in U. The carry "x" is the accumulator."""
    residual, width = space == "residual", input_width(config)
    codecs = {"x": codec} | ({"inverse_rms": _scalar_codec()} if residual else {})
    sources = {"x": width} | ({"inverse_rms": 1} if residual else {})

    def update(constants, step, reference):
        """Xhat of one tile. Encoder and decoder both come here with `clock.unit` tokens where there is a matmul: one of
        another shape would round differently."""
        if latent:
            step = jnp.einsum("tr,er->te", step, constants["down"].astype(jnp.float32))
        x = step if start else reference.astype(jnp.float32) + step
        return x, saturated(stored_accumulator(x, accumulator, group), reference.dtype)

    def encode(constants, tile, carry):
        own = constants.get("x", {})
        delta = wide(tile["x"])
        delta = delta if start else delta - carry["x"].astype(jnp.float32)
        if latent:
            delta = jnp.einsum("te,er->tr", delta, own["down"].astype(jnp.float32))
        payload = {name: codecs[name].encode({}, x) for name, x in (tile | {"x": delta}).items()}
        recon = {name: codecs[name].decode({}, x) for name, x in payload.items()}
        x, carried = update(own, recon["x"], carry["x"])
        return payload, recon | {"x": x}, {"x": carried}

    def decode(constants, payload, carry):
        own = constants.get("x", {})
        recon = {name: codecs[name].decode({}, x) for name, x in payload.items()}
        # A loop also where there is no matmul: XLA computes a plain sum once more inside the users of Xhat, from the
        # accumulator it is about to overwrite, and copies all of it for every block to be able to.
        pairs = [a.reshape(-1, clock.unit, a.shape[-1]) for a in (recon["x"], carry["x"])]

        def tile_by_tile(*pairs):
            return jax.lax.map(lambda pair: update(own, *pair), pairs)

        def at_once(*pairs):  # on a GPU a loop would take longer to launch than to run
            return jax.lax.optimization_barrier(jax.vmap(functools.partial(update, own))(*pairs))

        x, carried = jax.lax.platform_dependent(*pairs, cuda=at_once, default=tile_by_tile)
        shape = carry["x"].shape
        return recon | {"x": x.reshape(shape)}, {"x": carried.reshape(shape)}

    clock = clock._replace(sources=tuple(sources))
    capture, expand = _capture(config, space), _expand(config, space)
    shared, carry = _shared(config, space), {"x": width}
    return Wiring(sources, codecs, (clock,), capture, encode, decode, expand, carry, shared=shared)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossLayer:
    """One layer of XQuant-CL: the base layer (`start`) or a difference. `axis` says whether a scale belongs to a token
    or to a channel of `group` tokens."""

    start: bool
    bits: int
    axis: str = "token"
    accumulator: str = "bfloat16"
    space: str = "norm"
    group: int = 128
    window: int = 0
    latent: bool | None = None
    scales: str = "bfloat16"

    def __post_init__(self):
        for name, known in (("axis", ("token", "channel")), ("accumulator", ACCUMULATORS), ("space", SPACES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; known: {', '.join(known)}")

    def admit(self, other: LayerSpec) -> LayerSpec:
        """A layer of keys and values among these, in their window and unit: the accumulator passes it by, so the layer
        above stores its difference from the layer below."""
        if not isinstance(other, KeysAndValues):
            return other
        return dataclasses.replace(other, window=self.window, unit=self.group, clocks=())

    def uses_latents(self, config: KVShape) -> bool:
        return not self.start and (prefers_latents(config) if self.latent is None else self.latent)

    def build(self, config: KVShape) -> Wiring:
        latent = self.uses_latents(config)
        along = "tokens" if self.axis == "channel" and not self.start else "channels"
        if config.window is not None:
            # A layer that skips what it no longer sees would leave a gap in the accumulator of the layers above.
            raise ValueError(f"xquant_cl needs full attention in every layer; its window is {config.window}")
        full = input_width(config)
        if self.accumulator.isdigit():
            check_group(self.group, full, least=PLANE)
        width = min(full, 2 * config.kv_width) if latent else full
        codec = quantiser(self.bits, along, self.group, self.scales, width).build(width)
        return cross_layer(
            config,
            codec._replace(needs={"down": (full, width)}) if latent else codec,
            Clock(("x",), self.window, self.group),
            start=self.start,
            latent=latent,
            accumulator=self.accumulator,
            space=self.space,
            group=self.group,
        )


@method_factory
def xquant_cl(
    *,
    bits: int = 2,
    base: int = 2,
    protected: int = 3,
    high_bits: int = 4,
    axis: str = "token",
    accumulator: str | None = None,
    space: str = "norm",
    group: int = 128,
    window: int = 0,
    sinks: int = 0,
    latent: bool | None = None,
    scales: str = "bfloat16",
) -> Method:
    """Layers below `base` as in xquant, layer `base` at full width, every later layer as its difference from the
    accumulator; the first `protected` layers at `high_bits` (section 4.3: the third layer is the base).

    The paper leaves open, and these options decide: `axis` of the differences' scales ("token" or "channel"), what the
    `accumulator` is stored as between layers ("bfloat16"; "float32" by default for the identity, bits=16; or a number
    of bits), and whether differences are taken after the norm or of the residual stream (`space`).
    """
    store = accumulator or ("float32" if bits == 16 else "bfloat16")
    shared = {"group": group, "window": window, "latent": latent, "scales": scales}
    width = lambda i: high_bits if i < protected else bits  # noqa: E731
    loop = {"axis": axis, "accumulator": store, "space": space, **shared}
    plain = [(i, LayerInput(bits=width(i), **shared)) for i in first_layers(base)]
    start = [(base, CrossLayer(start=True, bits=width(base), **loop))]
    more = [(i, CrossLayer(start=False, bits=high_bits, **loop)) for i in first_layers(protected)[base + 1 :]]
    layer = CrossLayer(start=False, bits=bits, **loop)
    return Method(name="xquant_cl", layer=layer, sinks=sinks, overrides=tuple(plain + start + more))
