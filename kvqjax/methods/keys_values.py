"""Layers that cache keys and values themselves, each source with a codec of its own: most methods."""

import dataclasses

from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.codecs import CodecSpec, Fit
from kvqjax.codecs.base import Codec
from kvqjax.codecs.kernel_form import packed_form
from kvqjax.methods.direct_forms import direct_form
from kvqjax.methods.maps import Maps
from kvqjax.methods.rotation import check_rotation, frame, needs_of
from kvqjax.methods.wiring import Calibration, Clock, Fast, Storage, Wiring
from kvqjax.model.config import KVShape
from kvqjax.model.decoder import Projected, key_bias
from kvqjax.model.rope import rotate

__all__ = ["KeysAndValues", "cached_keys", "keys_and_values"]

FIT = Fit("kvqjax.calibrate.rotation", also=("kvqjax.calibrate.centre",))


def _heads(x, config: KVShape):
    return x.reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)


def cached_keys(
    projected: Projected, positions: Int[Array, "B T"], config: KVShape, rope: str, unbiased: bool
) -> Float[Array, "B T K D"]:
    """Choose the keys [B, T, K, D] that a cache keeps: as attended, before RoPE, or before RoPE and without their
    bias."""
    if rope == "post":
        return rotate(projected.k, positions, config)
    bare = projected.bare if unbiased and config.known_key_bias else None
    return projected.k if bare is None else bare


def _check(config: KVShape, rope: str, unbiased: bool, rotations: dict[str, str]) -> None:
    """Raise UserError for a frame that keys of this shape cannot have."""
    if rope not in ("pre", "post"):
        raise UserError(f"rope={rope!r}; known: pre, post")
    if rope == "pre" and config.rope is None:
        raise UserError("it caches keys before RoPE; give the shape a rope, and queries and keys unrotated")
    if unbiased and rope == "post":
        raise UserError("the bias of keys can only be taken off before RoPE")
    if unbiased and config.known_key_bias and rotations.get("k", "none") != "none":
        raise UserError("keys without the model's bias cannot be rotated; say centre=none")
    check_rotation(rotations.get("k", "none"), rope)
    check_rotation(rotations.get("v", "none"))


def keys_and_values(
    config: KVShape,
    codecs: dict[str, Codec],
    clocks: tuple[Clock, ...],
    rope: str,
    unbiased: bool = False,
    rotations: dict[str, str] = {},  # noqa: B006 - never written to
) -> Wiring:
    """Wire a layer whose sources are keys and values over all KV heads, `[K*D]` each, each with its own codec.

    Keys are kept as attended (`rope="post"`) or before RoPE (`rope="pre"`: they are rotated at every read). `unbiased`
    keys before RoPE are kept without the model's bias in sinks, window and body; reading adds it. `rotations` {source:
    rotation} turn the body (kvqjax.methods.rotation)."""
    _check(config, rope, unbiased, rotations)
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

    needs, widths = needs_of(rotations, config), {"k": config.kv_width, "v": config.kv_width}
    return Wiring(
        Storage(widths, codecs, clocks),
        Maps(capture, encode, decode, expand, frame=turning),
        fast=Fast(before_rope=rope == "pre"),
        calibration=Calibration(needs, fit=FIT if needs else None),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeysAndValues:
    """Keys and values over all KV heads, each with its own codec; `rope` says whether keys are cached before ("pre")
    or after ("post") rotation. The default clock moves both together: once the window holds `window + unit` tokens its
    oldest `unit` are encoded, so at least the newest `window` tokens are exact. `clocks` overrides it. `unbiased` keys
    before rotation are kept without the model's key bias, if it has one; no kernel reads such bodies yet. The body of
    keys and of values is rotated as `key_rotation` and `value_rotation` say (kvqjax.methods.rotation)."""

    key: CodecSpec
    value: CodecSpec
    rope: str = "post"
    window: int = 0
    unit: int = 32
    clocks: tuple[Clock, ...] = ()
    unbiased: bool = False
    key_rotation: str = "none"
    value_rotation: str = "none"

    def build(self, config: KVShape) -> Wiring:
        codecs = {"k": self.key.build(config.kv_width), "v": self.value.build(config.kv_width)}
        clocks = self.clocks or (Clock(("k", "v"), self.window, self.unit),)
        rotations = {"k": self.key_rotation, "v": self.value_rotation}
        wiring = keys_and_values(config, codecs, clocks, self.rope, self.unbiased, rotations)
        if self.unbiased and config.known_key_bias:
            return wiring
        direct = direct_form(self.key, self.value, self.rope, config)
        packed = packed_form(self.key, self.value, self.rope, config)
        return wiring.having(fast={"packed": packed, "direct": direct})
