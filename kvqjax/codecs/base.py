"""A codec is a value made of pure functions over tiles of vectors (in optax's manner); it knows nothing of models.

    spec (frozen, hashable) --build--> Codec(fields, unit, encode, decode)

A tile is `[u, W]`: u tokens (a multiple of `unit`, the number of tokens the codec must see at once) of W channels.
`encode(constants, x)` gives one entry per field, shaped as its kind says (kvqjax/ops/layout.py); `decode(constants,
tile)` inverts it for any number of leading axes and any multiple of `unit` tokens. Constants are the calibrated arrays
of one layer (codebooks, scales); codecs without calibration ignore them. Encoding is deterministic.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jax import Array

from kvqjax.ops.layout import Field

__all__ = ["BetweenHeads", "Codec", "CodecSpec", "Fit", "Linear", "Open", "bits_per_value", "for_heads"]

Tile = dict  # field name -> array
Constants = dict  # constant name -> array of one layer


class Fit(NamedTuple):
    """What finds calibrated constants: a `module` by its full name, imported when it is asked for.

    From `source` "text" its `calibrate(model, method, tokens, state=, advance=)` gives an artifact
    (kvqjax.calibrate.centre is the shortest example); from "weights" its `constants(params, config, method)` computes
    them of the model alone. `also` names modules whose constants it finds beside its own."""

    module: str
    source: str = "text"
    also: tuple[str, ...] = ()


class Codec(NamedTuple):
    """What stores vectors of `width` channels: `fields`, and how `encode` and `decode` fill and read them, at least
    `unit` tokens at a time.

    `needs` maps each calibrated constant's name to its shape without the layer axis, empty for codecs without
    calibration; `fit` says what finds them. `apart`: every group is encoded by itself and without products of matrices,
    whose rounding depends on their shapes, so that many units at once give the same bits as one after the other."""

    width: int
    unit: int
    fields: dict[str, Field]
    encode: Callable[[Constants, Array], Tile]
    decode: Callable[[Constants, Tile], Array]
    needs: dict[str, tuple[int, ...]] = {}  # noqa: RUF012 - an immutable default by convention, never written to
    fit: Fit | None = None
    apart: bool = False


@runtime_checkable
class CodecSpec(Protocol):
    """Anything frozen and hashable that can build a codec for vectors of `width` channels."""

    def build(self, width: int) -> Codec: ...


@runtime_checkable
class Open(Protocol):
    """A spec that leaves sizes open, such as the channels of a group, until the model's heads are known."""

    def for_heads(self, heads: int, head_dim: int) -> CodecSpec:
        """Fill in what is open, for vectors of `heads` KV heads with `head_dim` channels each."""
        ...


@runtime_checkable
class Linear(Protocol):
    """A spec whose vectors are an affine map of numbers that codes stand for, so that the mean of tokens can be taken
    before the map."""

    def summed_form(self, width: int) -> tuple[int, Callable, Callable] | None:
        """Describe vectors of `width` channels as they are summed: (N, read, finish). read(tile) gives the numbers
        [..., n, N]; finish(constants, means [..., N]) maps their weighted mean to that of what `decode` gives,
        [..., width]. None where the map comes first."""
        ...


@runtime_checkable
class BetweenHeads(Protocol):
    """A spec whose decoding ends with a matrix between heads, the same for every channel of a head."""

    def mixed_form(self, heads: int, head_dim: int) -> tuple[np.ndarray, Callable] | None:
        """Describe keys of `heads` heads before that matrix: (matrix [heads, heads], read), read(tile) giving
        [..., n, heads * head_dim]. None where decoding has no such end."""
        ...


def for_heads(spec: CodecSpec, heads: int, head_dim: int) -> CodecSpec:
    """Fill in what a spec leaves open (`Open`). A spec that leaves nothing open is given back as it is."""
    return spec.for_heads(heads, head_dim) if isinstance(spec, Open) else spec


def bits_per_value(codec: Codec) -> float:
    """Count stored bits per channel and token: codes, scales, minima and outliers, without sinks, window, padding or
    codebooks."""
    return sum(field.packing.token_bits for field in codec.fields.values()) / codec.width
