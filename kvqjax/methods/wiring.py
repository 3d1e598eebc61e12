"""What one layer's cache is, as a value: storage, maps, chain, fast paths, calibration, cost (docs/design.md, idea 4).

A layer spec (frozen, hashable) builds a `Wiring` for one kind of layer. The fields of its parts are plain data or pure
functions; kvqjax.methods.maps says what the functions take and give."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax.codecs.base import Codec, Fit
from kvqjax.codecs.kernel_form import Packed
from kvqjax.methods.direct import Direct
from kvqjax.methods.maps import Maps

__all__ = ["Calibration", "Chain", "Clock", "Cost", "Fast", "MixedKeys", "SharedValues", "Storage", "Wiring"]


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
    reconstructs. `read_in` names the dtypes in which a carry is, number by number, what its layer's keys and values are
    made of (None: all)."""

    carry: dict[str, int] = {}  # noqa: RUF012 - never written to
    copy: str = "layer"
    read_in: tuple[str, ...] | None = ()

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


class MixedKeys(NamedTuple):
    """Body keys whose transform mixes heads by a matrix `mix` [K, K] and then each head's channels in the same way:
    read(tile) -> [B, n, K*D] from the keys' payload, mixed within heads only. Queries of all heads' channels take the
    matrix once (`kvqjax.ops.attention`)."""

    mix: np.ndarray
    read: Callable


class Fast(NamedTuple):
    """Faster ways to attend to a body than decoding it block by block; each is None where a body has none.

    `packed`: a kernel reads it as it is stored. `direct`: XLA reads all of it at once, stored head by head
    (kvqjax.methods.direct). `shared`: values are summed before they are mapped to heads. `summed`: the same where no
    kernel reads the body, on a GPU or by a few queries on a CPU. `mixed`: keys whose heads these queries mix, on a CPU.
    `reading`: tokens that are decoded at a time, where the body's block is smaller and divides them. `before_rope`:
    `expand` rotates its keys last of all, and leaves them where it gets no positions. `waves`: waves(n) makes the
    function from n consecutive positions to what `expand` then takes in their place (kvqjax.model.rope.following); a
    CPU has it of such keys."""

    packed: Packed | None = None
    direct: Direct | None = None
    shared: SharedValues | None = None
    summed: SharedValues | None = None
    mixed: MixedKeys | None = None
    reading: int = 1
    before_rope: bool = False
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
