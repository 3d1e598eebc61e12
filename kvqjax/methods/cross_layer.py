"""One layer of XQuant-CL's loop: differences of layer inputs, and the accumulator that flows upwards (formulas:
kvqjax.methods.xquant_cl_wiring)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvqjax.codecs import Codec, Uniform
from kvqjax.methods.maps import Maps
from kvqjax.methods.rematerialise import FIT, attended, input_width, summed_first, times
from kvqjax.methods.wiring import Calibration, Chain, Clock, Cost, Fast, Storage, Wiring
from kvqjax.model.config import KVShape
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.layout import Field
from kvqjax.ops.xla_workarounds import kept_apart, rounded

__all__ = ["ACCUMULATORS", "SPACES", "Difference", "cross_layer", "stored_accumulator"]

ACCUMULATORS = ("float32", "bfloat16", "2", "3", "4", "5", "6", "8")
SPACES = ("norm", "residual")


def stored_accumulator(x: jax.Array, accumulator: str, group: int) -> jax.Array:
    """Store Xhat `[..., E]` as the next layer finds it, float32: as it is, rounded to bfloat16, or re-quantised per
    token."""
    if accumulator == "float32":
        return x
    if accumulator == "bfloat16":
        return rounded(x, jnp.bfloat16)
    codec = Uniform(bits=int(accumulator), along="channels", group=group).build(x.shape[-1])
    return codec.decode({}, codec.encode({}, x.reshape(-1, x.shape[-1]))).reshape(x.shape)


def _scalar_codec() -> Codec:
    """Build the codec of one number per token in the compute dtype."""
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
    """Give the layer's input after the attention norm, from Xhat."""
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


class Difference(NamedTuple):
    """How a layer's input is stored: the base layer's (`start`) as it is, others as differences from the layer below,
    in `space` "norm" or "residual", at full width or, with `latent`, as coordinates in U. `accumulator` and `group` say
    how the sum of differences is stored between layers."""

    start: bool
    latent: bool
    accumulator: str
    space: str
    group: int

    @property
    def read_in(self) -> tuple[str, ...] | None:
        """Name the dtypes in which the accumulator, as it is stored, is what is read (`Chain`)."""
        return None if self.accumulator == "float32" else (self.accumulator,)

    def updated(self, constants, step, reference) -> tuple[jax.Array, jax.Array]:
        """Add one tile's decoded difference to the accumulator below: Xhat, and the accumulator as it is stored.
        Encoder and decoder both come here with one unit of tokens: a matmul of another shape would round
        differently."""
        if self.latent:
            step = jnp.einsum("tr,er->te", step, constants["down"].astype(jnp.float32))
        x = step if self.start else reference.astype(jnp.float32) + step
        return x, saturated(stored_accumulator(x, self.accumulator, self.group), reference.dtype)

    def taken(self, constants, x, reference) -> jax.Array:
        """Take what is stored of one tile of inputs, given the accumulator below."""
        delta = wide(x) if self.start else wide(x) - reference.astype(jnp.float32)
        return jnp.einsum("te,er->tr", delta, constants["down"].astype(jnp.float32)) if self.latent else delta

    def cost(self, width: int, kv_width: int) -> Cost:
        """Count the operations of one read, W_k and W_v included, and the bits of the accumulator."""
        full = 4 * width * kv_width
        if self.start:
            return Cost(operations=full)
        bits = {"float32": 32, "bfloat16": 16}.get(self.accumulator) or int(self.accumulator)
        return Cost(operations=2 * full if self.latent else full + 2 * width, bits=bits * width)


def cross_layer(config: KVShape, codec: Codec, clock: Clock, difference: Difference) -> Wiring:
    """Wire one layer of the loop, whose difference `codec` stores. The carry "x" is the accumulator."""
    residual, width = difference.space == "residual", input_width(config)
    codecs = {"x": codec} | ({"inverse_rms": _scalar_codec()} if residual else {})
    sources = {"x": width} | ({"inverse_rms": 1} if residual else {})

    def encode(constants, tile, carry):
        own = constants.get("x", {})
        delta = difference.taken(own, tile["x"], carry["x"])
        payload = {name: codecs[name].encode({}, x) for name, x in (tile | {"x": delta}).items()}
        recon = {name: codecs[name].decode({}, x) for name, x in payload.items()}
        x, carried = difference.updated(own, recon["x"], carry["x"])
        return payload, recon | {"x": x}, {"x": carried}

    def decode(constants, payload, carry):
        own = constants.get("x", {})
        recon = {name: codecs[name].decode({}, x) for name, x in payload.items()}
        # A loop also where there is no matmul: XLA computes a plain sum once more inside the users of Xhat, from the
        # accumulator it is about to overwrite, and copies all of it for every block to be able to.
        pairs = [a.reshape(-1, clock.unit, a.shape[-1]) for a in (recon["x"], carry["x"])]

        def tile_by_tile(*pairs):
            return jax.lax.map(lambda pair: difference.updated(own, *pair), pairs)

        def at_once(*pairs):  # on a GPU or a TPU its operations would take longer to start than to run
            x, carried = jax.vmap(functools.partial(difference.updated, own))(*pairs)
            if difference.accumulator == carried.dtype.name:  # Xhat is read in this type: one array is enough
                carried = kept_apart(carried)
                return carried.astype(jnp.float32), carried
            return kept_apart((x, carried))

        x, carried = jax.lax.platform_dependent(*pairs, cuda=at_once, tpu=at_once, default=tile_by_tile)
        shape = carry["x"].shape
        return recon | {"x": x.reshape(shape)}, {"x": carried.reshape(shape)}

    return Wiring(
        Storage(sources, codecs, (clock._replace(sources=tuple(sources)),)),
        Maps(_capture(config, difference.space), encode, decode, _expand(config, difference.space)),
        chain=Chain({"x": width}, read_in=difference.read_in),
        fast=Fast(shared=_shared(config, difference.space)),
        calibration=Calibration(fit=FIT),
        cost=difference.cost(width, config.kv_width),
    )
