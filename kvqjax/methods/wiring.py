"""A method is wiring: which vectors it caches, how codecs store them, how keys and values come back (docs/design.md,
idea 4).

A wiring is a value made of pure functions, built from a frozen spec for one kind of layer. Its *sources* are the
vectors of one token that sinks and window hold exactly and the body holds encoded, e.g. {"k": K*D, "v": K*D} or {"x":
E}.

    capture(weights, constants, projected, positions) -> {source: [B,T,W]}      new tokens' sources
    encode(constants, tile, carry)  -> (payload, recon, carry)                  one tile of one row, [u,W] each
    decode(constants, payload, carry) -> (sources, carry)                       any batch and token count, [B,n,W]
    expand(weights, constants, sources, positions) -> (k, v) [B,n,K,D]          exact or decoded, keys rotated

With a `frame` (kvqjax.methods.rotation) what `decode` gives is in the body's frame; `encode` takes and reconstructs
sources in their own.

`weights` are the layer's decoder weights, `constants` its calibrated arrays; both already indexed by layer. `carry` is
what flows from layer to layer for the same tokens (AQUA-KV's reconstructed K and V, XQuant-CL's accumulator): a dict of
[..., W] arrays named in `carry`, empty for the other methods. Encoder and decoder must compute the same reconstruction.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.codecs.base import Codec
from kvqjax.methods.direct import Direct
from kvqjax.methods.rotation import Frame, check_rotation, frame, needs_of
from kvqjax.model.config import KVShape
from kvqjax.model.decoder import Projected, key_bias
from kvqjax.model.rope import rotate
from kvqjax.pallas_kernels.commvq import CommVQSpec
from kvqjax.pallas_kernels.higgs import HiggsSpec
from kvqjax.pallas_kernels.latents import LatentSpec
from kvqjax.pallas_kernels.packed import PackedSpec

__all__ = [
    "Clock",
    "Packed",
    "SharedValues",
    "Wiring",
    "cached_keys",
    "keys_and_values",
    "shared_until",
    "through_heads",
]


class Clock(NamedTuple):
    """When the sources named here leave the window: while more than `window` + `unit` - 1 tokens of a row are not yet
    encoded, its oldest `unit` tokens are."""

    sources: tuple[str, ...]
    window: int
    unit: int


class SharedValues(NamedTuple):
    """Body values as vectors of `width` numbers that all heads share, mapped to head dimensions after the sum over
    tokens instead of before it (attention is linear in the values):

        read(weights, constants, payload, sources) -> [B, n, N]       of one block, stored and decoded
        finish(weights, constants, [B, T, H, N]) -> [B, T, H, D]      of means: weights that add up to 1

    Up to `most` new tokens at a time make that the cheaper order."""

    width: int
    most: int
    read: Callable
    finish: Callable


def shared_until(width: int, decoding: int, config: KVShape) -> int:
    """The most new tokens T at which summing first is cheaper, in multiply-accumulates per cached token: T H N, N =
    `width`, against `decoding` and then T H D."""
    saved = config.num_heads * (width - config.head_dim)
    return (decoding - 1) // saved if saved > 0 else 2**31


def through_heads(
    means: Float[Array, "B T H N"], matrix: Float[Array, "N KD"], config: KVShape, precision: str | None = None
) -> Float[Array, "B T H D"]:
    """Every query head's vector times the columns of its KV head, in the matrix's dtype with float32 sums."""
    grouped = means.astype(matrix.dtype).reshape(*means.shape[:2], config.num_kv_heads, -1, means.shape[-1])
    columns = matrix.reshape(-1, config.num_kv_heads, config.head_dim)
    out = jnp.einsum("btkgn,nkd->btkgd", grouped, columns, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(*means.shape[:3], config.head_dim)


class Packed(NamedTuple):
    """A body that can be attended to without decoding it: what is static about it, and its arrays as kernels take them,

        body(weights, constants, stored, positions) -> PackedBody, LatentBody, HiggsBody or CommVQBody

    from `stored` {source: {field: arrays}} and where each stretch of its tokens begins in the sequence [n]. `trusted`:
    the chip itself checked the kernel, or the user forces it, so that the table of kernels is not asked."""

    spec: PackedSpec | LatentSpec | HiggsSpec | CommVQSpec
    body: Callable
    trusted: bool = False


class Wiring(NamedTuple):
    """`codecs` says how each source's body is stored; `carry` the widths of what flows between layers; `needs` the
    shapes of calibrated constants, {group: {name: shape without the layer axis}}, beyond those that the codecs need
    under their source's name. `copy` says how a reader has the carry: "layer", one layer's for all body tokens flows
    from layer to layer; "none", it is computed anew for every block from the first layer on; "all", it is not needed,
    because every layer stores what it reconstructs. `packed` is set where a body can be attended to without decoding
    it (KIVI's and KVQuant's codecs); `shared` where attention may sum the stored values before decoding them, `summed`
    where it does so on a GPU only, without a kernel.
    `direct` is set where a body stored head by head can be attended to at once (kvqjax.methods.direct).
    `kinds` names the constants that a model holds other than as float32: their dtype, "compute" being the model's.
    `prepare(constants)` adds to a layer's constants what reading its body wants made of them once.
    `reading` tokens are read at a time where the body's block is smaller and divides them. `frame` is set where the
    body is rotated."""

    sources: dict[str, int]
    codecs: dict[str, Codec]
    clocks: tuple[Clock, ...]
    capture: Callable
    encode: Callable
    decode: Callable
    expand: Callable
    carry: dict[str, int] = {}  # noqa: RUF012 - never written to
    needs: dict[str, dict[str, tuple[int, ...]]] = {}  # noqa: RUF012 - never written to
    packed: Packed | None = None
    shared: SharedValues | None = None
    summed: SharedValues | None = None
    copy: str = "layer"
    direct: Direct | None = None
    kinds: dict[str, str] = {}  # noqa: RUF012 - never written to
    prepare: Callable = dict
    reading: int = 1
    frame: Frame | None = None

    def wanted(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Every calibrated constant of a layer: {group: {name: shape}}, a codec's under its source's name."""
        own = {source: dict(codec.needs) for source, codec in self.codecs.items() if codec.needs}
        return {group: own.get(group, {}) | dict(self.needs.get(group, {})) for group in [*own, *self.needs]}

    def constants(self, count: int, dtype: str) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """What `wanted` says as arrays of `count` layers of a model of compute dtype `dtype`."""

        def array(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            kind = self.kinds.get(name, "float32")
            return jax.ShapeDtypeStruct((count, *shape), jnp.dtype(dtype if kind == "compute" else kind))

        wanted = self.wanted().items()
        return {group: {name: array(name, shape) for name, shape in names.items()} for group, names in wanted}


def _heads(x, config: KVShape):
    return x.reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)


def cached_keys(
    projected: Projected, positions: Int[Array, "B T"], config: KVShape, rope: str, unbiased: bool
) -> Float[Array, "B T K D"]:
    """The keys [B, T, K, D] that a cache keeps: as attended, before RoPE, or before RoPE and without their bias."""
    if rope == "post":
        return rotate(projected.k, positions, config)
    bare = projected.bare if unbiased and config.known_key_bias else None
    return projected.k if bare is None else bare


def keys_and_values(
    config: KVShape,
    codecs: dict[str, Codec],
    clocks: tuple[Clock, ...],
    rope: str,
    unbiased: bool = False,
    rotations: dict[str, str] = {},  # noqa: B006 - never written to
) -> Wiring:
    """Sources are keys and values over all KV heads, `[K*D]` each; keys as attended (`rope="post"`) or before RoPE
    (`rope="pre"`: the rotation happens at every read and is never undone). Each source has a codec of its own.
    `unbiased` keys before RoPE are kept without the model's bias, in sinks, window and body, and read with it.
    `rotations` {source: rotation} turn the body (kvqjax.methods.rotation)."""
    if rope not in ("pre", "post"):
        raise ValueError(f"rope={rope!r}; known: pre, post")
    if rope == "pre" and config.rope is None:
        raise ValueError("it caches keys before RoPE; give the shape a rope, and queries and keys unrotated")
    if unbiased and rope == "post":
        raise ValueError("the bias of keys can only be taken off before RoPE")
    if unbiased and config.known_key_bias and rotations.get("k", "none") != "none":
        raise ValueError("keys without the model's bias cannot be rotated; say centre=none")
    check_rotation(rotations.get("k", "none"), rope)
    check_rotation(rotations.get("v", "none"))
    turning = frame(rotations, config)
    turn = (lambda constants, source, x, back=False: x) if turning is None else turning.turn

    def capture(weights, constants, projected, positions):
        k = cached_keys(projected, positions, config, rope, unbiased)
        return {"k": k.reshape(*k.shape[:2], -1), "v": projected.v.reshape(*k.shape[:2], -1)}

    def encode(constants, tile, carry):
        own = {name: turn(constants, name, x) for name, x in tile.items()}
        payload = {name: codecs[name].encode(constants.get(name, {}), x) for name, x in own.items()}
        recon = decode(constants, payload, {})[0]
        return payload, {name: turn(constants, name, x, back=True) for name, x in recon.items()}, carry

    def decode(constants, payload, carry):
        return {name: codecs[name].decode(constants.get(name, {}), x) for name, x in payload.items()}, carry

    def expand(weights, constants, sources, positions):
        k, v = _heads(sources["k"], config), _heads(sources["v"], config)
        if unbiased and config.known_key_bias:
            k = k + key_bias(weights, config).astype(k.dtype)
        return (rotate(k, positions, config) if rope == "pre" else k), v

    widths = {"k": config.kv_width, "v": config.kv_width}
    needs = needs_of(rotations, config)
    return Wiring(widths, codecs, clocks, capture, encode, decode, expand, needs=needs, frame=turning)
