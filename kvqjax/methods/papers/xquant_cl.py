"""XQuant-CL (arXiv 2508.10395, sections 3.2, 3.3.2): cache each layer's input as its difference
from the layers below.

    base layer b:   Xhat_b = Q(X_b)                                      (more bits, full width)
    MHA, i > b:     D_i = Q(X_i - Xhat_{i-1})            Xhat_i = Xhat_{i-1} + D_i
    GQA, i > b:     Z_i = Q((X_i - Xhat_{i-1}) U_i)      Xhat_i = Xhat_{i-1} + Z_i U_i^T,   [W_k|W_v]_i = U_i S_i B_i^T
    every layer:    [K|V]_i = Xhat_i [W_k|W_v]_i, then bias, QK-norm and RoPE

X_i is the input of layer i after the attention norm. Xhat_i is the accumulator, which flows from
layer to layer.

The loop is closed: the encoder subtracts the decoder's Xhat_{i-1}, not X_{i-1}. So the error of
layer i is that of its own quantiser alone. For GQA, Xhat_i keeps stale values in the directions
that U_i does not span. W_k and W_v of layer i ignore these directions, so [K|V]_i is exact when Q
is the identity.

Constants of one layer for GQA are {"x": {"down": U_i [E, R]}}, with R = min(E, 2*KD).
kvqjax.calibrate.xquant makes them from the weights alone; with differences of the residual stream
from diag(gain) [W_k|W_v]_i. MHA needs none.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.codecs import Codec, Uniform
from kvqjax.codecs.uniform import check_group, fitting_group
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.layer_cache import Calibration, Chain, Clock, Cost, Fast, Maps, Storage, Wiring
from kvqjax.methods.papers.xquant import (
    FIT,
    UNIT,
    LayerInput,
    attended,
    input_width,
    prefers_latents,
    quantiser,
    summed_first,
    times,
)
from kvqjax.methods.spec import LayerSpec, Method, first_layers, method_factory, value_or
from kvqjax.model.config import KVShape
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.layout import Field
from kvqjax.ops.packing.base import PLANE
from kvqjax.ops.xla_workarounds import kept_apart, rounded

# How the sum of differences is stored between layers: a dtype, or the bits of uniform codes.
ACCUMULATORS = ("float32", "bfloat16", "2", "3", "4", "5", "6", "8")
# Differences of inputs after the attention norm, or of the residual stream.
SPACES = (
    "norm",
    "residual",
)


# ---- The method and its options ----


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
    group: int | None = None,
    window: int = 0,
    sinks: int = 0,
    latent: bool | None = None,
    scales: str = "bfloat16",
) -> Method:
    """XQuant-CL (arXiv 2508.10395, sections 3.2, 3.3.2 and 4.3): a layer stores by how much its
    input differs from the sum of the differences that the layers below have stored. Layer `base`
    begins the sum; layers below it are stored as in `xquant`.

    - `bits` of a code, 1 to 6 or 8, 16 for the identity; the first `protected` layers have
      `high_bits` (section 4.3: the third layer is the base).
    - `group`, `window`, `sinks`, `latent` and `scales` as in `xquant`.
    - Three options decide what the paper leaves open. `axis`: a scale of the differences belongs to
      a "token" or to a "channel". `accumulator`: the sum is stored between layers as "bfloat16", as
      "float32" (the default for the identity) or in a number of bits. `space`: differences are
      taken of inputs after the norm ("norm") or of the residual stream ("residual").

    With the defaults, Llama-3.1-8B stores 2.57 bits per key or value channel. Raises UserError for
    values that are not listed here.
    """
    store = value_or(accumulator, "float32" if bits == 16 else "bfloat16")
    shared = {"group": group, "window": window, "latent": latent, "scales": scales}

    def bits_of(number: int) -> int:
        return high_bits if number < protected else bits

    loop = {"axis": axis, "accumulator": store, "space": space, **shared}
    overrides: list[tuple[int, LayerSpec]] = []
    for number in first_layers("base", base):
        overrides.append((number, LayerInput(bits=bits_of(number), **shared)))
    overrides.append((base, CrossLayer(start=True, bits=bits_of(base), **loop)))
    for number in first_layers("protected", protected)[base + 1 :]:
        overrides.append((number, CrossLayer(start=False, bits=high_bits, **loop)))
    layer = CrossLayer(start=False, bits=bits, **loop)
    return Method(name="xquant_cl", layer=layer, sinks=sinks, overrides=tuple(overrides))


# ---- Differences, and the accumulator that flows upwards ----


class Difference(NamedTuple):
    """How a layer's input is stored: the base layer's as it is, others as differences from the
    layer below."""

    start: bool  # the base layer
    latent: bool  # as coordinates in U instead of at full width
    accumulator: str  # how the sum of differences is stored between layers
    space: str
    group: int  # channels that share a scale in an accumulator of codes

    @property
    def read_in(self) -> tuple[str, ...] | None:
        """Name the dtypes in which keys and values are made of the accumulator as it is stored
        (`Chain.read_in`)."""
        if self.accumulator == "float32":
            return None
        return (self.accumulator,)

    def add(
        self, constants: dict, step: Float[Array, "u R"], below: Float[Array, "u E"]
    ) -> tuple[Float[Array, "u E"], Float[Array, "u E"]]:
        """Add one tile's decoded difference to the accumulator of the layer below.

        Encoder and decoder both call this with one unit of tokens, as a matrix product of another
        shape would round differently.

        Args:
            constants: {"down": U}, where differences are latents.
            step: the decoded difference; R is E without latents.
            below: the accumulator of the layer below; the base layer needs its dtype alone.

        Returns:
            Xhat in float32, and Xhat as it is stored for the layer above.
        """
        if self.latent:
            step = jnp.einsum("tr,er->te", step, constants["down"].astype(jnp.float32))
        x = step if self.start else below.astype(jnp.float32) + step
        stored = _stored_accumulator(x, self.accumulator, self.group)
        return x, saturated(stored, below.dtype)

    def take(
        self, constants: dict, x: Float[Array, "u E"], below: Float[Array, "u E"]
    ) -> Float[Array, "u R"]:
        """Subtract the accumulator of the layer below from one tile of inputs: the float32
        difference to encode. The arguments are those of `add`."""
        delta = wide(x) if self.start else wide(x) - below.astype(jnp.float32)
        if self.latent:
            delta = jnp.einsum("te,er->tr", delta, constants["down"].astype(jnp.float32))
        return delta

    def cost(self, width: int, kv_width: int) -> Cost:
        """Count the operations of reading one token, and the bits of the accumulator that are
        loaded for it.

        Args:
            width: E, of the layer's input.
            kv_width: KD, of keys and of values.

        Returns:
            The cost. A multiply-accumulate counts as two operations (section 3.4,
            kvqjax.methods.roofline).
        """
        products = 4 * width * kv_width  # Xhat [W_k|W_v]
        if self.start:
            return Cost(operations=products)
        bits = {"float32": 32, "bfloat16": 16}.get(self.accumulator) or int(self.accumulator)
        # Z U^T and Xhat [W_k|W_v] have the same number of multiply-accumulates. Without latents
        # there is only a sum.
        operations = 2 * products if self.latent else products + 2 * width
        return Cost(operations=operations, bits=bits * width)


def _stored_accumulator(
    x: Float[Array, "u E"], accumulator: str, group: int
) -> Float[Array, "u E"]:
    """Round Xhat to what the layer above will read: not at all, to bfloat16, or to uniform codes
    per token. The result is float32."""
    if accumulator == "float32":
        return x
    if accumulator == "bfloat16":
        return rounded(x, jnp.bfloat16)
    codec = Uniform(bits=int(accumulator), along="channels", group=group).build(x.shape[-1])
    codes = codec.encode({}, x.reshape(-1, x.shape[-1]))
    return codec.decode({}, codes).reshape(x.shape)


# ---- One layer ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossLayer:
    """One layer of XQuant-CL: the base layer (`start`) or a difference."""

    start: bool
    bits: int
    axis: str = "token"  # a scale belongs to a token, or to a channel of `group` tokens
    accumulator: str = "bfloat16"
    space: str = "norm"
    group: int | None = None  # as in LayerInput
    window: int = 0
    latent: bool | None = None
    scales: str = "bfloat16"

    def __post_init__(self):
        choices = {"axis": ("token", "channel"), "accumulator": ACCUMULATORS, "space": SPACES}
        for name, values in choices.items():
            value = getattr(self, name)
            if value not in values:
                raise UserError(f"{name}={value!r}; known: {', '.join(values)}")

    def admit(self, other: LayerSpec) -> LayerSpec:
        """Take a layer of keys and values among those of the loop, with their window and unit. The
        accumulator passes that layer by: the layer above stores its difference from the layer
        below."""
        if not isinstance(other, KeysAndValues):
            return other
        unit = value_or(self.group, UNIT)
        return dataclasses.replace(other, window=self.window, unit=unit, clocks=())

    def uses_latents(self, config: KVShape) -> bool:
        """Say whether differences are stored as coordinates in U. The base layer's input never
        is."""
        if self.start:
            return False
        if self.latent is None:
            return prefers_latents(config)
        return self.latent

    def build(self, config: KVShape) -> Wiring:
        """Wire the layer. Raises UserError for shapes and groups that do not fit."""
        latent = self.uses_latents(config)
        along = "tokens" if self.axis == "channel" and not self.start else "channels"
        if config.window is not None:
            # A layer that skips what it no longer sees would leave a gap in the accumulator of the
            # layers above.
            raise UserError(
                f"xquant_cl needs full attention in every layer; its window is {config.window}"
            )
        full = input_width(config)
        accumulator_group = value_or(self.group, fitting_group(full))
        if self.accumulator.isdecimal():
            check_group(accumulator_group, full, least=PLANE)
        width = min(full, 2 * config.kv_width) if latent else full
        unit = value_or(self.group, UNIT)
        group = unit if along == "tokens" else value_or(self.group, fitting_group(width))
        codec = quantiser(self.bits, along, group, self.scales, width).build(width)
        if latent:
            codec = codec._replace(needs={"down": (full, width)})
        clock = Clock(("x",), self.window, unit)
        difference = Difference(self.start, latent, self.accumulator, self.space, accumulator_group)
        return _wired(config, codec, clock, difference)


def _wired(config: KVShape, codec: Codec, clock: Clock, difference: Difference) -> Wiring:
    """Wire one layer of the loop, whose difference `codec` stores. The carry "x" is the
    accumulator.

    With differences of the residual stream, a second source holds 1 / RMS of every token for the
    norm at reading."""
    width = input_width(config)
    codecs = {"x": codec}
    sources = {"x": width}
    if difference.space == "residual":
        codecs["inverse_rms"] = _scalar_codec()
        sources["inverse_rms"] = 1

    def encode(constants, tile, carry):
        basis = constants.get("x", {})
        delta = difference.take(basis, tile["x"], carry["x"])
        payload = {name: codecs[name].encode({}, x) for name, x in (tile | {"x": delta}).items()}
        recon = {name: codecs[name].decode({}, x) for name, x in payload.items()}
        x, carried = difference.add(basis, recon["x"], carry["x"])
        return payload, recon | {"x": x}, {"x": carried}

    def decode(constants, payload, carry):
        basis = constants.get("x", {})
        recon = {name: codecs[name].decode({}, x) for name, x in payload.items()}

        def tiles(a):
            """Reshape [B, n, W] to [B * n / unit, unit, W]: as the tokens were encoded."""
            return a.reshape(-1, clock.unit, a.shape[-1])

        steps = tiles(recon["x"])
        below = tiles(carry["x"])

        # A loop also where there is no matrix product. XLA would compute a plain sum once more
        # inside the users of Xhat, from the accumulator that it is about to overwrite, and would
        # copy the whole accumulator for that at every block.
        def tile_by_tile(steps, below):
            return jax.lax.map(lambda tile: difference.add(basis, *tile), (steps, below))

        def at_once(steps, below):
            # On a GPU or a TPU the operations of a loop would take longer to start than to run.
            x, carried = jax.vmap(functools.partial(difference.add, basis))(steps, below)
            if difference.accumulator == carried.dtype.name:
                # Xhat is read in this dtype, so one array is enough.
                carried = kept_apart(carried)
                return carried.astype(jnp.float32), carried
            return kept_apart((x, carried))

        x, carried = jax.lax.platform_dependent(
            steps, below, cuda=at_once, tpu=at_once, default=tile_by_tile
        )
        shape = carry["x"].shape
        return recon | {"x": x.reshape(shape)}, {"x": carried.reshape(shape)}

    capture = _capture(config, difference.space)
    expand = _expand(config, difference.space)
    return Wiring(
        Storage(sources, codecs, (clock._replace(sources=tuple(sources)),)),
        Maps(capture, encode, decode, expand, turned=()),
        chain=Chain({"x": width}, read_in=difference.read_in),
        fast=Fast(shared=_shared(config, difference.space)),
        calibration=Calibration(fit=FIT),
        cost=difference.cost(width, config.kv_width),
    )


# ---- From inputs to sources, and back to keys and values ----


def _capture(config: KVShape, space: str):
    """Make the function that takes a layer's sources from what it computed."""

    def capture(weights, constants, projected, positions):
        if space == "norm":
            return {"x": projected.x}
        stream = projected.h.astype(jnp.float32)
        square = jnp.mean(stream * stream, axis=-1, keepdims=True)
        return {"x": projected.h, "inverse_rms": jax.lax.rsqrt(square + config.norm_eps)}

    return capture


def _scalar_codec() -> Codec:
    """Build the codec of one number per token in the compute dtype."""
    field = Field(kind="token", width=1, role="scales", dtype="compute")

    # Fields of one row per token have their tokens on the last axis: [.., n, 1] is stored as [..,
    # 1, n].
    def encode(_, x):
        return {"x": jnp.swapaxes(x, -1, -2)}

    def decode(_, tile):
        return jnp.swapaxes(tile["x"], -1, -2)

    return Codec(1, 1, {"x": field}, encode, decode)


def _normed(weights, sources, config: KVShape, space: str):
    """Give the layer's input after the attention norm, from Xhat [B, n, E]."""
    x = sources["x"]
    dtype = weights["k"].dtype
    if space == "norm":
        return x
    # The norm divides by the RMS of the exact token. The RMS of Xhat would contain Xhat's stale
    # directions.
    x = (x.astype(jnp.float32) * sources["inverse_rms"].astype(jnp.float32)).astype(dtype)
    gain = weights["attn_norm"][None, None]
    if config.norm_offset:
        wide_x = x.astype(jnp.float32)
        wide_gain = gain.astype(jnp.float32) + config.norm_offset
        return (wide_x * wide_gain).astype(dtype)
    return x * gain


def _expand(config: KVShape, space: str):
    """Make the function that computes keys and values from sources."""

    def expand(weights, constants, sources, positions):
        x = _normed(weights, sources, config, space)
        dtype = weights["k"].dtype
        k = times(x, weights["k"], dtype)
        v = times(x, weights["v"], dtype)
        return attended(k, v, weights, positions, config)

    return expand


def _shared(config: KVShape, space: str):
    """Make the reader that sums inputs before they are multiplied by the matrix of values."""

    def read(weights, constants, payload, sources):
        return _normed(weights, sources, config, space)

    return summed_first(input_width(config), config, read, lambda weights, constants: weights["v"])
