"""What one layer's cache is, as a value: storage, maps, chain, fast paths, calibration, cost (docs/design.md, idea 4).

A layer spec (frozen, hashable) builds a `Wiring` for one kind of layer. The fields of its parts are plain data or pure
functions; their Protocols say what each takes and gives. All functions meet the same things:

    sources    the vectors of a token that sinks and window hold exactly and the body holds encoded, by name:
               {"k": [.., K*D], "v": [.., K*D]}, or {"x": [.., E]} for the layer's input
    constants  the layer's calibrated arrays {group: {name: array}}, already indexed by layer
    weights    the layer's decoder weights, already indexed by layer

and `carry`, what flows from layer to layer for the same tokens: {name: [.., W]}, empty for most methods.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from kvqjax.codecs.base import Codec, Fit
from kvqjax.codecs.kernel_form import Packed
from kvqjax.methods.direct import Direct
from kvqjax.methods.rotation import Frame

__all__ = [
    "Calibration",
    "Capture",
    "Chain",
    "Clock",
    "Cost",
    "Decode",
    "Encode",
    "Expand",
    "Fast",
    "Maps",
    "Packed",
    "Prepare",
    "SharedValues",
    "Storage",
    "Wiring",
]


Arrays = dict[str, Any]  # name -> array
Groups = dict[str, dict[str, Any]]  # group -> name -> array


class Capture(Protocol):
    def __call__(self, weights: Arrays, constants: Groups, projected: Any, positions: Array, /) -> Arrays:
        """Take the sources [B, T, W] of T new tokens from `projected`, what their layer computed for them
        (kvqjax.model.decoder.Projected), and their positions [B, T]."""
        ...


class Encode(Protocol):
    def __call__(self, constants: Groups, tile: Arrays, carry: Arrays, /) -> tuple[Groups, Arrays, Arrays]:
        """Encode one tile of one row: sources [u, W] that leave the window together, and the carry [u, W] of the layer
        below. Gives the payload {source: {field: array}}, the sources as `decode` reconstructs them, and this layer's
        carry."""
        ...


class Decode(Protocol):
    def __call__(self, constants: Groups, payload: Groups, carry: Arrays, /) -> tuple[Arrays, Arrays]:
        """Decode stored tokens of any batch and count: payload and carry [B, n, W] to sources [B, n, W] and this
        layer's carry. Encoder and decoder must compute the same reconstruction, bit for bit. Under a `frame` the
        sources stay in the body's frame."""
        ...


class Expand(Protocol):
    def __call__(
        self, weights: Arrays, constants: Groups, sources: Arrays, positions: Array, /
    ) -> tuple[Float[Array, "B n K D"], Float[Array, "B n K D"]]:
        """Make keys and values as attended, keys rotated by RoPE, from sources [B, n, W], exact or decoded, and their
        positions [B, n]."""
        ...


class Prepare(Protocol):
    def __call__(self, constants: Groups, /) -> Groups:
        """Add to a layer's constants what reading its body wants to have made of them once per step."""
        ...


def _as_they_are(constants: Groups, /) -> Groups:
    return constants


class Maps(NamedTuple):
    """The pure functions between a layer's input, its sources, their codes, and keys and values. `frame` is set where
    the body is rotated: then `encode` takes and reconstructs sources in their own frame, `decode` gives them in the
    body's (kvqjax.methods.rotation)."""

    capture: Capture
    encode: Encode
    decode: Decode
    expand: Expand
    prepare: Prepare = _as_they_are
    frame: Frame | None = None


class Clock(NamedTuple):
    """When the sources named here leave the window: while more than `window` + `unit` - 1 tokens of a row are not yet
    encoded, its oldest `unit` tokens are."""

    sources: tuple[str, ...]
    window: int
    unit: int


class Storage(NamedTuple):
    """What a layer stores of a token. `sources` gives each source's width, `codecs` the codec that stores its body, and
    `clocks` when it leaves the window; every source has one of each."""

    sources: dict[str, int]
    codecs: dict[str, Codec]
    clocks: tuple[Clock, ...]


class Chain(NamedTuple):
    """What flows from layer to layer for the same tokens (AQUA-KV's reconstruction, XQuant-CL's accumulator): the
    widths of `carry` by name, none for layers that stand alone.

    `copy` says how a reader has the carry. "layer": one layer's, for all body tokens, flows upwards. "none": it is
    computed anew for every block, from the first layer on. "all": nobody needs it, because every layer stores what it
    reconstructs."""

    carry: dict[str, int] = {}  # noqa: RUF012 - never written to
    copy: str = "layer"

    @property
    def held(self) -> bool:
        """Say whether one layer's carry of all body tokens flows upwards."""
        return self.copy == "layer"

    @property
    def rebuilt(self) -> bool:
        """Say whether every block's carry is computed anew from the first layer on: blocks must then be common to all
        layers."""
        return self.copy == "none"

    def tokens(self, slots: int, block: int) -> int:
        """Count the body tokens of a row whose carry is there at a time."""
        return slots if self.held else block if self.rebuilt else 0


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


class Fast(NamedTuple):
    """Faster ways to attend to a body than decoding it block by block; each is None where a body has none.

    `packed`: a kernel reads it as it is stored. `direct`: XLA reads all of it at once, stored head by head
    (kvqjax.methods.direct). `shared`: values are summed before they are mapped to heads. `summed`: the same on a GPU
    only, where no kernel reads the body. `reading`: tokens that are decoded at a time, where the body's block is
    smaller and divides them. `waves`: waves(n) makes the function from n consecutive positions to what `expand` then
    takes in their place on a CPU (kvqjax.model.rope.following)."""

    packed: Packed | None = None
    direct: Direct | None = None
    shared: SharedValues | None = None
    summed: SharedValues | None = None
    reading: int = 1
    waves: Callable | None = None


class Calibration(NamedTuple):
    """The calibrated constants of a layer, beyond those that its codecs declare.

    `needs`: their shapes {group: {name: shape without the layer axis}}; a codec's stand under its source's name.
    `kinds`: the dtypes of constants, by name, that a model holds otherwise than as float32; "compute" is the
    model's. `fit`: what finds them (kvqjax.codecs.base)."""

    needs: dict[str, dict[str, tuple[int, ...]]] = {}  # noqa: RUF012 - never written to
    kinds: dict[str, str] = {}  # noqa: RUF012 - never written to
    fit: Fit | None = None


class Cost(NamedTuple):
    """What reading one stored token costs a layer beside its stored bits (kvqjax.methods.roofline).

    `operations`: to make keys and values from what is stored, a multiply-accumulate counting as two; 0 where keys and
    values themselves are stored. `bits`: moved beside the token's codes. `spared`: numbers of the layer's weights that
    a decode step leaves unread, because constants stand for them."""

    operations: int = 0
    bits: int = 0
    spared: int = 0


class Wiring(NamedTuple):
    """One layer's cache as a value. `storage` and `maps` make a cache; the others have defaults: a layer that stands
    alone, is decoded block by block, and needs no calibration but what its codecs ask for."""

    storage: Storage
    maps: Maps
    chain: Chain = Chain()
    fast: Fast = Fast()
    calibration: Calibration = Calibration()
    cost: Cost = Cost()

    def having(self, **parts: dict[str, Any]) -> "Wiring":
        """Exchange fields of parts: `wiring.having(storage={"codecs": ...}, fast={"packed": None})`."""
        return self._replace(**{part: getattr(self, part)._replace(**fields) for part, fields in parts.items()})

    def wanted(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Collect every calibrated constant of a layer, {group: {name: shape}}, a codec's under its source's name."""
        own = {source: dict(codec.needs) for source, codec in self.storage.codecs.items() if codec.needs}
        more = self.calibration.needs
        return {group: own.get(group, {}) | dict(more.get(group, {})) for group in [*own, *more]}

    def fits(self) -> tuple[Fit, ...]:
        """List what finds the constants that `wanted` lists: the layer's own fit, then its codecs'."""
        codecs = (codec.fit for codec in self.storage.codecs.values() if codec.needs)
        return tuple(dict.fromkeys(fit for fit in (self.calibration.fit, *codecs) if fit is not None))

    def constants(self, count: int, dtype: str) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Describe what `wanted` lists as arrays of `count` layers, for a model of compute dtype `dtype`."""

        def array(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            kind = self.calibration.kinds.get(name, "float32")
            return jax.ShapeDtypeStruct((count, *shape), jnp.dtype(dtype if kind == "compute" else kind))

        wanted = self.wanted().items()
        return {group: {name: array(name, shape) for name, shape in names.items()} for group, names in wanted}
