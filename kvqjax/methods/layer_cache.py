"""What one layer's cache is, as a value: storage, maps, chain, fast paths, calibration, cost (docs/design.md, idea 4).

A layer spec (frozen, hashable) builds a `Wiring` for one kind of layer. The fields of its parts are plain data or pure
functions. All functions meet the same things:

    sources    the vectors of a token that sinks and window hold exactly and the body holds encoded, by name:
               {"k": [.., K*D], "v": [.., K*D]}, or {"x": [.., E]} for the layer's input
    constants  the layer's calibrated arrays {group: {name: array}}, already indexed by layer
    weights    the layer's decoder weights, already indexed by layer
    carry      what flows from layer to layer for the same tokens: {name: [.., W]}, empty for most methods
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax.codecs.base import Codec, Fit
from kvqjax.methods.direct import Direct
from kvqjax.methods.rotation import Frame
from kvqjax.model.config import KVShape
from kvqjax.pallas_kernels.adapters import Packed

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
    "MixedKeys",
    "Prepare",
    "SharedValues",
    "Storage",
    "Wiring",
    "codec_maps",
    "shared_until",
    "through_heads",
]

Arrays = dict[str, Any]  # name -> array
Groups = dict[str, dict[str, Any]]  # group -> name -> array


# ---- What is stored of a token, and when it is encoded ----


class Clock(NamedTuple):
    """When the sources named here leave the window. While more than `window` + `unit` - 1 tokens of a row are not yet
    encoded, its oldest `unit` tokens are."""

    sources: tuple[str, ...]
    window: int
    unit: int


class Storage(NamedTuple):
    """What a layer stores of a token. Every source has a width, a codec that stores its body, and a clock that says
    when it leaves the window."""

    sources: dict[str, int]  # name -> width
    codecs: dict[str, Codec]  # name -> codec
    clocks: tuple[Clock, ...]


# ---- Pure functions between a layer's input, its sources, their codes, and keys and values ----


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
        positions [B, n], or what stands for them (`Fast.waves`)."""
        ...


class Prepare(Protocol):
    def __call__(self, constants: Groups, /) -> Groups:
        """Add to a layer's constants what reading its body needs to have computed of them once per step."""
        ...


def _nothing_prepared(constants: Groups, /) -> Groups:
    return constants


class Maps(NamedTuple):
    """The pure functions of a layer's cache. `frame` is set where the body is rotated. `encode` then takes and
    reconstructs sources in their own frame, and `decode` gives them in the body's (kvqjax.methods.rotation).
    `expand_body` expands those, where it is another function than `expand`."""

    capture: Capture
    encode: Encode
    decode: Decode
    expand: Expand
    prepare: Prepare = _nothing_prepared
    expand_body: Expand | None = None
    frame: Frame | None = None


def codec_maps(codecs: dict[str, Codec]) -> tuple[Callable, Callable]:
    """Make the functions of layers that stand alone and whose sources are encoded one by one.

    Args:
        codecs: by the name of their source.

    Returns:
        An `Encode` and a `Decode`.
    """

    def encode(constants, tile, carry):
        payload = {name: codecs[name].encode(constants.get(name, {}), x) for name, x in tile.items()}
        return payload, decode(constants, payload, {})[0], carry

    def decode(constants, payload, carry):
        return {name: codecs[name].decode(constants.get(name, {}), x) for name, x in payload.items()}, carry

    return encode, decode


# ---- What flows between layers, and ways to read a body faster ----


class Chain(NamedTuple):
    """What flows from layer to layer for the same tokens, such as AQUA-KV's reconstruction and XQuant-CL's accumulator.

    `carry` gives the width of each part by name. Layers that stand alone have none. A reader takes the carry of the
    layer below, for all body tokens, and gives its own layer's. Without `flows` only encoding needs it: bodies
    hold what they reconstruct.

    `read_in` names the dtypes in which the carry is, number by number, what its layer's keys and values are made of
    (None: all dtypes)."""

    carry: dict[str, int] = {}  # noqa: RUF012 - never written to
    flows: bool = True
    read_in: tuple[str, ...] | None = ()

    @property
    def read(self) -> dict[str, int]:
        """Give the widths of what a reader takes from the layer below: empty where only encoding needs the carry."""
        return self.carry if self.flows else {}


class SharedValues(NamedTuple):
    """Body values as vectors of `width` numbers that all heads share. They are mapped to head dimensions after the sum
    over tokens instead of before it, since attention is linear in the values:

        read(weights, constants, payload, sources) -> [B, n, N]       of one block, stored and decoded
        finish(weights, constants, [B, T, H, N]) -> [B, T, H, D]      of means: weights that add up to 1
    """

    width: int
    most: int  # new tokens at a time, up to which this order is the cheaper one
    read: Callable
    finish: Callable


class MixedKeys(NamedTuple):
    """Body keys whose transform mixes heads by a matrix, and then the channels of every head alike. Queries take the
    matrix once (`kvqjax.ops.attention`), so that it need not be applied to every cached key."""

    mix: np.ndarray  # [K, K]
    read: Callable  # the keys' payload -> [B, n, K*D], mixed within heads only


class Fast(NamedTuple):
    """Faster ways to attend to a body than decoding it block by block; each is None where a body has none."""

    packed: Packed | None = None  # a kernel reads the body as it is stored
    direct: Direct | None = None  # XLA reads all of it at once, stored head by head (kvqjax.methods.direct)
    shared: SharedValues | None = None  # values are summed before they are mapped to heads
    # The same where no kernel reads the body: on a GPU, or by few queries on a CPU.
    summed: SharedValues | None = None
    mixed: MixedKeys | None = None  # keys whose heads the queries mix, on a CPU or GPU
    reading: int = 1  # tokens that are decoded at a time, where the body's block is smaller and divides them
    before_rope: bool = False  # `expand` rotates keys by RoPE
    # waves(n) makes the function from n consecutive positions to what `expand` then takes in their place
    # (kvqjax.model.rope.following). A CPU has it for keys that are kept before RoPE.
    waves: Callable | None = None


# ---- What must be calibrated, and what reading costs ----


class Calibration(NamedTuple):
    """The calibrated constants of a layer, beyond those that its codecs declare.

    `needs` gives their shapes {group: {name: shape without the layer axis}}. A codec's constants stand under its
    source's name. `kinds` gives the dtypes of constants, by name, that a model does not hold as float32; "compute" is
    the model's dtype. `fit` finds the constants (kvqjax.codecs.base)."""

    needs: dict[str, dict[str, tuple[int, ...]]] = {}  # noqa: RUF012 - never written to
    kinds: dict[str, str] = {}  # noqa: RUF012 - never written to
    fit: Fit | None = None


class Cost(NamedTuple):
    """What reading one stored token costs a layer beside its stored bits (kvqjax.methods.roofline)."""

    # To make keys and values from what is stored. A multiply-accumulate counts as two. 0 where keys and values
    # themselves are stored.
    operations: int = 0
    bits: int = 0  # moved beside the token's codes
    spared: int = 0  # numbers of the layer's weights that a decode step leaves unread, as constants stand for them


# ---- The layer's cache, made of these parts ----


class Wiring(NamedTuple):
    """One layer's cache as a value. `storage` and `maps` make a cache. The defaults of the others describe a layer that
    stands alone, is decoded block by block, and needs no calibration but what its codecs ask for."""

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
        of_codecs = {source: dict(codec.needs) for source, codec in self.storage.codecs.items() if codec.needs}
        of_layer = self.calibration.needs
        groups = [*of_codecs, *of_layer]
        return {group: of_codecs.get(group, {}) | dict(of_layer.get(group, {})) for group in groups}

    def fits(self) -> tuple[Fit, ...]:
        """List what finds the constants that `wanted` lists: the layer's own fit, then its codecs'."""
        codecs = (codec.fit for codec in self.storage.codecs.values() if codec.needs)
        return tuple(dict.fromkeys(fit for fit in (self.calibration.fit, *codecs) if fit is not None))

    def constants(self, count: int, dtype: str) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Describe what `wanted` lists as arrays of `count` layers, for a model of compute dtype `dtype`."""

        def array(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            kind = self.calibration.kinds.get(name, "float32")
            return jax.ShapeDtypeStruct((count, *shape), jnp.dtype(dtype if kind == "compute" else kind))

        groups = self.wanted().items()
        return {group: {name: array(name, shape) for name, shape in names.items()} for group, names in groups}


# ---- Values that are summed before they are mapped to heads (`SharedValues`) ----


def shared_until(width: int, decoding: int, config: KVShape) -> int:
    """Find the most new tokens at which summing first is cheaper.

    Args:
        width: N, the numbers of a stored value that all heads share.
        decoding: the multiply-accumulates that map one cached token's value to head dimensions.
        config: the model's shape.

    Returns:
        The largest T at which T H N multiply-accumulates per cached token are fewer than `decoding` + T H D.
    """
    saved = config.num_heads * (width - config.head_dim)
    return (decoding - 1) // saved if saved > 0 else 2**31


def through_heads(
    means: Float[Array, "B T H N"], matrix: Float[Array, "N KD"], config: KVShape, precision: str | None = None
) -> Float[Array, "B T H D"]:
    """Multiply every query head's vector by the columns of its KV head.

    Args:
        means: weighted means of stored values, for every query head.
        matrix: maps a stored value to the channels of all KV heads.
        config: the model's shape.
        precision: of the product (jax.lax.Precision's names).

    Returns:
        Values by query head. The product is taken in the matrix's dtype, with float32 sums.
    """
    grouped = means.astype(matrix.dtype).reshape(*means.shape[:2], config.num_kv_heads, -1, means.shape[-1])
    columns = matrix.reshape(-1, config.num_kv_heads, config.head_dim)
    out = jnp.einsum("btkgn,nkd->btkgd", grouped, columns, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(*means.shape[:3], config.head_dim)
