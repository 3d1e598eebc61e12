"""Layers that cache keys and values themselves, each source with a codec of its own: most methods.

The keys of one such layer can be combined with the values of another. If the two layers are of one
method and differ in their codecs alone, the result is an ordinary layer of that method, which
kernels read as any other. Otherwise it is a `Pair`, which is read block by block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.codecs import CodecSpec, Fit, Uniform
from kvqjax.codecs.balanced import Balanced
from kvqjax.codecs.base import BetweenHeads, Codec, Linear, for_heads
from kvqjax.codecs.centring import BlockCentred, Centred
from kvqjax.codecs.clipped import Clipped
from kvqjax.codecs.higgs import Higgs
from kvqjax.codecs.scaled import Scaled
from kvqjax.methods.direct import FEW_QUERIES, direct_form
from kvqjax.methods.layer_cache import (
    Calibration,
    Clock,
    Fast,
    Maps,
    MixedKeys,
    SharedValues,
    Storage,
    Wiring,
    codec_maps,
)
from kvqjax.methods.rotation import Frame, check_rotation, frame, needs_of
from kvqjax.methods.spec import LayerSpec, Method
from kvqjax.model.config import KVShape
from kvqjax.model.decoder import Projected, heads, key_bias
from kvqjax.model.latents import key_parts, latent_key
from kvqjax.model.rope import Waves, rotate
from kvqjax.pallas_kernels.adapters import packed_form

FIT = Fit("kvqjax.calibrate.rotation", also=("kvqjax.calibrate.centre",))
KEYS_AND_VALUES = ("k", "v")  # sources
NAMES = {"k": "keys", "v": "values"}  # of sources, in messages
# Uniform codes per token of at most this many bits ruin a bundled model that has Qwen2's key bias
# (benchmarks/gate.py).
FEW_BITS = 4
# Tokens that are decoded at a time, where a codec's transform is linear. A block has 256 tokens:
# with so few, the fixed cost of starting an operation counts.
READING = 1024


# ---- One layer ----


def cached_keys(
    projected: Projected,
    positions: Int[Array, "B T"] | Waves,
    config: KVShape,
    rope: str,
    unbiased: bool,
) -> Float[Array, "B T K D"]:
    """Choose the keys [B, T, K, D] that a cache keeps: as attended or before RoPE, with their bias
    or without it."""
    keys = projected.k
    if unbiased and config.known_key_bias and projected.bare is not None:
        keys = projected.bare
    if rope == "post":
        keys = rotate(keys, positions, config)
    return keys


def _check(config: KVShape, rope: str, rotations: dict[str, str]) -> None:
    """Raise UserError for a frame that keys of this shape cannot have."""
    if rope not in ("pre", "post"):
        raise UserError(f"rope={rope!r}; known: pre, post")
    if rope == "pre" and config.rope is None:
        raise UserError(
            "it caches keys before RoPE; give the shape a rope, and queries and keys unrotated"
        )
    check_rotation(rotations.get("k", "none"), rope)
    check_rotation(rotations.get("v", "none"))


def keys_and_values(
    config: KVShape,
    codecs: dict[str, Codec],
    clocks: tuple[Clock, ...],
    rope: str,
    unbiased: bool = False,
    rotations: dict[str, str] = {},  # noqa: B006
) -> Wiring:
    """Wire a layer whose sources are keys and values over all KV heads, `[K*D]` each, each with its
    own codec.

    In a model with a latent, source "v" is the latent, which is also a part of every key, and
    source "k" is the other part of the key, which RoPE turns.

    Args:
        codecs: of keys ("k") and values ("v").
        clocks: when they leave the window.
        rope: "post" keeps keys as attended, "pre" keeps them before RoPE and rotates them at every
            read.
        unbiased: keeps keys without the model's bias b, in sinks, window and body. Reading adds the
            bias. Keys kept after RoPE get it as RoPE rotates it at every token's position, since R
            (x W + b) = R x W + R b.
        rotations: {source: rotation} of the body (kvqjax.methods.rotation).

    Returns:
        The layer's cache, without faster ways to read it.

    Raises:
        UserError: for a frame that keys of this shape cannot have.
    """
    _check(config, rope, rotations)
    body_frame = frame(rotations, config)
    encode_framed, decode = codec_maps(codecs)

    def capture(weights, constants, projected, positions):
        k = cached_keys(projected, positions, config, rope, unbiased)
        v = projected.v
        if config.latent is not None:
            k, v = key_parts(k, config.latent)
        # Heads side by side: [B, T, K*D].
        return {"k": k.reshape(*k.shape[:2], -1), "v": v.reshape(*k.shape[:2], -1)}

    def encode(constants, tile, carry):
        if body_frame is None:
            return encode_framed(constants, tile, carry)
        framed = {name: body_frame.turn(constants, name, x) for name, x in tile.items()}
        payload, recon, carry = encode_framed(constants, framed, carry)
        recon = {name: body_frame.turn(constants, name, x, back=True) for name, x in recon.items()}
        return payload, recon, carry

    def expand(weights, constants, sources, positions, turned=lambda constants, x: x):
        """Expand sources. `turned` brings the bias into the frame in which the keys are: the
        body's, or their own."""
        k = heads(sources["k"], config.num_kv_heads)
        v = heads(sources["v"], config.num_kv_heads)
        if config.latent is not None:
            k = v = latent_key(k, v)
        if unbiased and config.known_key_bias:
            bias = key_bias(weights, config).astype(k.dtype)  # [1, 1, K, D]
            if rope == "post":
                everywhere = (*positions.shape, *bias.shape[2:])
                bias = rotate(jnp.broadcast_to(bias, everywhere), positions, config)
            k = k + turned(constants, bias).astype(k.dtype)
        if rope == "pre":
            k = rotate(k, positions, config)
        return k, v

    expand_body = None
    if body_frame is not None:
        expand_body = functools.partial(expand, turned=_turn_keys(body_frame))
    needs = needs_of(rotations, config)
    maps = Maps(
        capture,
        encode,
        decode,
        expand,
        expand_body=expand_body,
        frame=body_frame,
        turned=("k",) if rope == "post" else (),
    )
    return Wiring(
        Storage(_widths(config), codecs, clocks),
        maps,
        fast=Fast(before_rope=rope == "pre"),
        calibration=Calibration(needs, fit=FIT if needs else None),
    )


def _widths(config: KVShape) -> dict[str, int]:
    """Return the width of each source over all heads."""
    widths = {}
    for source, (count, channels) in config.cached_heads.items():
        widths[source] = count * channels
    return widths


def _turn_keys(frame: Frame) -> Callable:
    """Make the function that turns keys by head [B, n, K, D] into the body's frame."""

    def turned(constants, keys):
        side_by_side = keys.reshape(*keys.shape[:2], -1)
        return frame.turn(constants, "k", side_by_side).reshape(keys.shape)

    return turned


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeysAndValues:
    """Keys and values over all KV heads, each with its own codec. A codec may leave sizes open
    until the model is known (kvqjax.codecs.base.Open).

    By default keys and values leave the window together. Once the window holds `window + unit`
    tokens, its oldest `unit` are encoded, so that at least the newest `window` tokens are exact.
    `clocks`, if given, replaces this rule.
    """

    key: CodecSpec
    value: CodecSpec
    rope: str = "post"  # keys are cached before ("pre") or after ("post") RoPE
    window: int = 0
    unit: int = 32
    clocks: tuple[Clock, ...] = ()
    # Keys are kept without the model's key bias; no kernel reads such bodies yet.
    unbiased: bool = False
    key_rotation: str = "none"  # of the body (kvqjax.methods.rotation)
    value_rotation: str = "none"

    def build(self, config: KVShape) -> Wiring:
        """Wire the layer for a model, with all faster ways to read it that its codecs allow."""
        key = for_heads(self.key, *config.cached_heads["k"])
        value = for_heads(self.value, *config.cached_heads["v"])
        widths = _widths(config)
        codecs = {"k": key.build(widths["k"]), "v": value.build(widths["v"])}
        clocks = self.clocks or (Clock(("k", "v"), self.window, self.unit),)
        rotations = {"k": self.key_rotation, "v": self.value_rotation}
        wiring = keys_and_values(config, codecs, clocks, self.rope, self.unbiased, rotations)
        if config.latent is not None:
            return _without_constants(wiring)
        wiring = wiring.having(fast=_linear_forms(key, value, config))
        if self.unbiased and config.known_key_bias:
            return wiring
        direct = direct_form(key, value, self.rope, config)
        packed = packed_form(key, value, self.rope, config)
        mixed = _mixed_keys(key, config)
        return wiring.having(fast={"packed": packed, "direct": direct, "mixed": mixed})


def _without_constants(wiring: Wiring) -> Wiring:
    """Return the wiring of a layer of latents, which the general loop over blocks reads. Raises
    UserError where constants are to be calibrated: calibrations read keys and values by head."""
    if wiring.wanted():
        raise UserError(
            "it is calibrated on keys and values by head; this model caches a latent that all heads share"
        )
    return wiring


# ---- Codecs whose transform is linear ----


def _linear_forms(key: CodecSpec, value: CodecSpec, config: KVShape) -> dict[str, Any]:
    """Return the fields of `Fast` for codecs whose transform is linear; none for other codecs.

    More tokens are decoded at a time. Values are summed before they are transformed, so that one
    sum of each query head is transformed instead of every token."""
    if isinstance(key, Centred | BlockCentred):
        key = key.inner
    forms: dict[str, Any] = {}
    if isinstance(key, Linear):
        forms["reading"] = READING
    form = value.summed_form(config.kv_width) if isinstance(value, Linear) else None
    if form is None:
        return forms
    width, numbers, transformed = form

    def read(weights, constants, payload, sources):
        return numbers(payload["v"])

    def finish(weights, constants, means):
        # The transform mixes channels of all KV heads, so every query head's sum gives the channels
        # of all of them: [B, T, H, K*D] -> [B, T, K, G, K, D]. Those of the query head's own KV
        # head are kept.
        count = config.num_kv_heads
        values = transformed(constants.get("v", {}), means).reshape(
            *means.shape[:2], count, -1, count, config.head_dim
        )
        same_head = jnp.eye(count, dtype=bool)[None, None, :, None, :, None]
        return jnp.where(same_head, values, 0).sum(4).reshape(*means.shape[:3], config.head_dim)

    forms["summed"] = SharedValues(width, FEW_QUERIES, read, finish)
    return forms


def _mixed_keys(key: CodecSpec, config: KVShape) -> MixedKeys | None:
    """Apply the last step of decoding a key, a matrix between heads (as HIGGS has it), to queries
    instead of keys. None for other codecs."""
    if not isinstance(key, BetweenHeads):
        return None
    form = key.mixed_form(config.num_kv_heads, config.head_dim)
    return None if form is None else MixedKeys(*form)


# ---- Keys of one layer beside values of another ----


def apart(wiring: Wiring) -> bool:
    """Say whether the keys or the values of a layer can be taken alone: it caches keys and values
    themselves, has no carry, and has no constants but those of its two codecs.

    Latents cannot be taken alone, because their constants replace weights for keys and values
    together."""
    has_both = set(wiring.storage.sources) == set(KEYS_AND_VALUES)
    return has_both and not wiring.chain.carry and not any(wiring.calibration)


def _clock(wiring: Wiring, part: str) -> Clock:
    """Return the clock of one part alone."""
    for clock in wiring.storage.clocks:
        if part in clock.sources:
            return clock._replace(sources=(part,))
    raise KeyError(part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A layer that caches keys as `key` does and values as `value` does, each in its own window."""

    key: LayerSpec
    value: LayerSpec

    def build(self, config: KVShape) -> Wiring:
        wirings = {"k": self.key.build(config), "v": self.value.build(config)}
        for part, wiring in wirings.items():
            if not apart(wiring):
                raise UserError(
                    f"its {NAMES[part]} cannot be taken alone, since it caches keys and values together"
                )
        clocks = tuple(_clock(wiring, part) for part, wiring in wirings.items())
        joint_clocks = {clock._replace(sources=KEYS_AND_VALUES) for clock in clocks}
        if len(joint_clocks) == 1:
            # One clock, so that they leave the window together.
            clocks = tuple(joint_clocks)

        def capture(*arguments):
            return {part: wiring.maps.capture(*arguments)[part] for part, wiring in wirings.items()}

        def encode(constants, tile, carry):
            payload = {}
            recon = {}
            for part, x in tile.items():
                part_payload, part_recon, _ = wirings[part].maps.encode(constants, {part: x}, {})
                payload[part] = part_payload[part]
                recon[part] = part_recon[part]
            return payload, recon, carry

        def decode(constants, payload, carry):
            sources = {}
            for part, x in payload.items():
                part_sources, _ = wirings[part].maps.decode(constants, {part: x}, {})
                sources[part] = part_sources[part]
            return sources, carry

        def expanded(body: bool):
            """Make the `Expand` of tokens in the body's frame (`body`) or in their own."""

            def of(maps: Maps) -> Callable:
                if body and maps.expand_body is not None:
                    return maps.expand_body
                return maps.expand

            expand_keys = of(wirings["k"].maps)
            expand_values = of(wirings["v"].maps)

            def expand(*arguments):
                keys, _ = expand_keys(*arguments)
                _, values = expand_values(*arguments)
                return keys, values

            return expand

        # Each part's own `encode` rotates its source. Queries and outputs need one frame that has
        # both rotations.
        rotations = {}
        for part, wiring in wirings.items():
            if wiring.maps.frame is not None:
                rotations[part] = wiring.maps.frame.rotations.get(part, "none")
        body_frame = frame(rotations, config)
        return Wiring(
            Storage(
                sources={part: wiring.storage.sources[part] for part, wiring in wirings.items()},
                codecs={part: wiring.storage.codecs[part] for part, wiring in wirings.items()},
                clocks=clocks,
            ),
            Maps(
                capture,
                encode,
                decode,
                expanded(False),
                expand_body=None if body_frame is None else expanded(True),
                frame=body_frame,
                turned=wirings["k"].maps.turned,
            ),
            fast=Fast(reading=max(wiring.fast.reading for wiring in wirings.values())),
        )


def _of_one_method(key: Any, value: Any) -> LayerSpec | None:
    """Make the layer with `key`'s key codec and `value`'s value codec. None where the layers differ
    in more than these two codecs."""
    if type(key) is not type(value) or isinstance(key, Pair):
        return None
    fields = {field.name for field in dataclasses.fields(key)}
    if not {"key", "value"} <= fields:
        return None
    if dataclasses.replace(key, key=value.key, value=value.value) != value:
        return None
    return dataclasses.replace(key, value=value.value)


def joined(key: LayerSpec, value: LayerSpec) -> LayerSpec:
    """Make one layer's spec with keys as in `key` and values as in `value`."""
    if isinstance(key, Pair):
        key = key.key
    if isinstance(value, Pair):
        value = value.value
    return _of_one_method(key, value) or Pair(key=key, value=value)


# ---- What a key bias costs ----


def _shares_scales(spec: LayerSpec) -> bool:
    """Say whether channels of keys share a scale and no mean or bias is subtracted from them first.

    KIVI does not count: each of its channels has a minimum of its own, which takes up a bias,
    rotated or not."""
    layer = spec.key if isinstance(spec, Pair) else spec
    if not isinstance(layer, KeysAndValues) or layer.unbiased:
        return False
    codec = layer.key
    if isinstance(codec, Uniform):
        return codec.along == "channels" and codec.bits <= FEW_BITS
    return isinstance(codec, Higgs | Balanced | Scaled | Clipped)


def bias_advice(method: Method, config: KVShape) -> str:
    """Warn where the model's key bias will cost most of the precision of this method's keys.

    Args:
        method: how the keys are stored.

    Returns:
        The warning in one line. Empty where there is nothing to warn of.
    """
    if not config.known_key_bias or not any(map(_shares_scales, method.layers(config))):
        return ""
    return (
        f"{method} will lose precision on this model: its keys have a bias, so a few channels are large, and this "
        "method gives them one scale with small channels; centre=auto takes off the bias, which is known from the "
        "weights; centre=mean a calibrated mean"
    )
