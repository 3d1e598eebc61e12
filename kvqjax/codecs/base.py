"""A codec is a value made of pure functions over tiles of vectors (in optax's manner); it knows
nothing of models.

    spec (frozen, hashable) --build--> Codec(fields, unit, encode, decode)

A tile is `[u, W]`: u tokens (a multiple of `unit`, the number of tokens the codec must see at once)
of W channels. `encode(constants, x)` gives one entry per field, shaped as its kind says
(kvqjax/ops/layout.py); `decode(constants, tile)` inverts it for any number of leading axes and any
multiple of `unit` tokens. Constants are the calibrated arrays of one layer (codebooks, scales);
codecs without calibration ignore them. Encoding is deterministic.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jax import Array

from kvqjax.ops.layout import Field

Tile = dict  # field name -> array
Constants = dict  # constant name -> array of one layer


class Fit(NamedTuple):
    """Names the module that finds the calibrated constants of a codec.

    Attributes:
        module: the full name of a module, which is imported when constants are asked for.
        source: what the constants come from. "text": the module's function
            `calibrate(model, method, tokens, state=, advance=)` gives an artifact
            (kvqjax.calibrate.centre is the shortest example). "weights": its function
            `constants(params, config, method)` computes them from the model alone.
        also: names of modules whose constants it finds beside its own.
    """

    module: str
    source: str = "text"
    also: tuple[str, ...] = ()


class Codec(NamedTuple):
    """A pair of functions between vectors and stored fields.

    Attributes:
        width: channels of a vector.
        unit: tokens are encoded in multiples of this number.
        fields: what is stored, by name.
        encode: encode(constants, x [u, W]) fills the fields.
        decode: decode(constants, tile) reads them.
        needs: the name of each calibrated constant -> its shape without the axis of layers; empty
            for codecs without calibration.
        fit: what finds the constants.
        apart: whether many units can be encoded at once with the same bits as one after the other.
            This holds where every group is encoded by itself, without matrix products, whose
            rounding depends on their shapes.
        lossless: whether the one field, "x", holds the vectors as they are.
    """

    width: int
    unit: int
    fields: dict[str, Field]
    encode: Callable[[Constants, Array], Tile]
    decode: Callable[[Constants, Tile], Array]
    needs: dict[str, tuple[int, ...]] = {}  # noqa: RUF012
    fit: Fit | None = None
    apart: bool = False
    lossless: bool = False


@runtime_checkable
class CodecSpec(Protocol):
    """Anything frozen and hashable that can build a codec for vectors of `width` channels."""

    def build(self, width: int) -> Codec: ...


@runtime_checkable
class Open(Protocol):
    """A spec that leaves sizes open, such as the channels of a group, until the model's heads are
    known."""

    def for_heads(self, heads: int, head_dim: int) -> CodecSpec:
        """Fill in the open options, for vectors of `heads` KV heads with `head_dim` channels
        each."""
        ...


@runtime_checkable
class Linear(Protocol):
    """A spec whose decoding ends with an affine map, so that the mean of tokens can be taken before
    the map."""

    def summed_form(self, width: int) -> tuple[int, Callable, Callable] | None:
        """Describe how vectors of `width` channels are summed.

        Returns:
            (N, read, finish). read(tile) gives n tokens' numbers [..., n, N] before the map.
            finish(constants, means [..., N]) maps their weighted means to the means of what
            `decode` gives, [..., width]. None where decoding does not end with the map.
        """
        ...


@runtime_checkable
class BetweenHeads(Protocol):
    """A spec whose decoding ends with a matrix between heads, the same for every channel of a
    head."""

    def mixed_form(self, heads: int, head_dim: int) -> tuple[np.ndarray, Callable] | None:
        """Describe keys of `heads` heads before that matrix.

        Returns:
            (matrix [heads, heads], read). read(tile) gives the keys [..., n, heads * head_dim].
            None where decoding does not end with such a matrix.
        """
        ...


def for_heads(spec: CodecSpec, heads: int, head_dim: int) -> CodecSpec:
    """Fill in the options that a spec leaves open (`Open`). A spec that leaves nothing open is
    given back as it is."""
    return spec.for_heads(heads, head_dim) if isinstance(spec, Open) else spec


def bits_per_value(codec: Codec) -> float:
    """Count stored bits per channel and token: codes, scales, minima and outliers, without sinks,
    window, padding or codebooks."""
    return sum(field.packing.token_bits for field in codec.fields.values()) / codec.width
