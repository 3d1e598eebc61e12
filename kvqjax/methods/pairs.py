"""Keys of one method beside values of another in one layer.

Methods whose sources are keys and values, each with a codec of its own, can be taken apart. Two layers of one method
that differ in their codecs alone make an ordinary layer of that method, which kernels then read as any other; all else
is a `Pair`, read block by block.
"""

import dataclasses
from typing import Any

from kvqjax._errors import UserError
from kvqjax.methods.maps import Maps
from kvqjax.methods.spec import LayerSpec
from kvqjax.methods.wiring import Clock, Fast, Storage, Wiring
from kvqjax.model.config import KVShape

__all__ = ["Pair", "apart", "joined"]

PARTS = ("k", "v")
NAMES = {"k": "keys", "v": "values"}


def apart(wiring: Wiring) -> bool:
    """Say whether a layer caches keys and values themselves, each with a codec whose constants are all there are.
    Latents do not count: their constants stand for weights, which a layer's other part would lack."""
    return set(wiring.storage.sources) == set(PARTS) and not (wiring.chain.carry or any(wiring.calibration))


def _clock(wiring: Wiring, part: str) -> Clock:
    """Give the clock of one part alone."""
    (found,) = (clock for clock in wiring.storage.clocks if part in clock.sources)
    return found._replace(sources=(part,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A layer that caches keys as `key` does and values as `value` does, each in its own window."""

    key: LayerSpec
    value: LayerSpec

    def build(self, config: KVShape) -> Wiring:
        own = {"k": self.key.build(config), "v": self.value.build(config)}
        for part, wiring in own.items():
            if not apart(wiring):
                raise UserError(f"its {NAMES[part]} cannot be taken alone, since it caches keys and values together")
        clocks = tuple(_clock(wiring, part) for part, wiring in own.items())
        if clocks[0][1:] == clocks[1][1:]:
            clocks = (clocks[0]._replace(sources=PARTS),)

        def capture(*arguments):
            return {part: wiring.maps.capture(*arguments)[part] for part, wiring in own.items()}

        def encode(constants, tile, carry):
            made = {part: own[part].maps.encode(constants, {part: x}, {}) for part, x in tile.items()}
            return {p: found[0][p] for p, found in made.items()}, {p: found[1][p] for p, found in made.items()}, carry

        def decode(constants, payload, carry):
            return {
                part: own[part].maps.decode(constants, {part: x}, {})[0][part] for part, x in payload.items()
            }, carry

        def expand(*arguments):
            return own["k"].maps.expand(*arguments)[0], own["v"].maps.expand(*arguments)[1]

        return Wiring(
            Storage(
                sources={part: wiring.storage.sources[part] for part, wiring in own.items()},
                codecs={part: wiring.storage.codecs[part] for part, wiring in own.items()},
                clocks=clocks,
            ),
            Maps(capture, encode, decode, expand),
            fast=Fast(reading=max(wiring.fast.reading for wiring in own.values())),
        )


def _of_one_method(key: Any, value: Any) -> LayerSpec | None:
    """Make the layer with `key`'s key codec and `value`'s value codec where all else of both is the same; else None."""
    fields = {field.name for field in dataclasses.fields(key)}
    if type(key) is not type(value) or not {"key", "value"} <= fields or isinstance(key, Pair):
        return None
    if dataclasses.replace(key, key=value.key, value=value.value) != value:
        return None
    return dataclasses.replace(key, value=value.value)


def joined(key: LayerSpec, value: LayerSpec) -> LayerSpec:
    """Make one layer's spec with keys as in `key` and values as in `value`."""
    key = key.key if isinstance(key, Pair) else key
    value = value.value if isinstance(value, Pair) else value
    return _of_one_method(key, value) or Pair(key=key, value=value)
