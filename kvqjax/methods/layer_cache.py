"""One layer's cache as a value: storage, maps, chain, fast paths, calibration, cost
(docs/design.md, idea 4).

A layer spec (frozen, hashable) builds a `Wiring` for one kind of layer. The fields of a wiring's
parts are plain data or pure functions. Arguments of the same name mean the same in all of these
functions:

    sources    the cached vectors of tokens by name: {"k": [.., K*D], "v": [.., K*D]}, or {"x": [.., E]} for the
               layer's input. Sinks and window hold them exactly, the body holds them encoded.
    constants  the layer's calibrated arrays {group: {name: array}}, already indexed by layer
    weights    the layer's decoder weights, already indexed by layer
    carry      the vectors that flow from layer to layer for the same tokens: {name: [.., W]}, empty for most methods
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

Arrays = dict[str, Any]  # name -> array
Groups = dict[str, dict[str, Any]]  # group -> name -> array


# ---- What is stored of a token, and when it is encoded ----


class Clock(NamedTuple):
    """When the sources named here leave the window. As long as a row has `window` + `unit` or more
    tokens that are not encoded, the oldest `unit` of these are encoded."""

    sources: tuple[str, ...]
    window: int
    unit: int


class Storage(NamedTuple):
    """The sources that a layer stores of a token. Every source has a width, a codec that encodes it
    for the body, and a clock that says when it leaves the window."""

    sources: dict[str, int]  # name -> width
    codecs: dict[str, Codec]  # name -> codec
    clocks: tuple[Clock, ...]


# ---- Pure functions between a layer's input, its sources, their codes, and keys and values ----


class Capture(Protocol):
    def __call__(
        self, weights: Arrays, constants: Groups, projected: Any, positions: Array, /
    ) -> Arrays:
        """Give the sources [B, T, W] of T new tokens. `projected` holds what the layer computed of
        these tokens (kvqjax.model.decoder.Projected); `positions` are [B, T]."""
        ...


class Encode(Protocol):
    def __call__(
        self, constants: Groups, tile: Arrays, carry: Arrays, /
    ) -> tuple[Groups, Arrays, Arrays]:
        """Encode one tile of one row: the sources [u, W] of u tokens that leave the window
        together.

        Args:
            constants: the layer's.
            tile: the sources.
            carry: of the layer below, [u, W].

        Returns:
            The payload {source: {field: array}}, the sources as `decode` reconstructs them, and
            this layer's carry.
        """
        ...


class Decode(Protocol):
    def __call__(
        self, constants: Groups, payload: Groups, carry: Arrays, /
    ) -> tuple[Arrays, Arrays]:
        """Decode n stored tokens of every row. Encoder and decoder must compute the same
        reconstruction, bit for bit.

        Args:
            constants: the layer's.
            payload: as `Encode` makes it, with a leading axis of rows.
            carry: of the layer below, [B, n, W].

        Returns:
            The sources [B, n, W], in the body's frame where it has one (`Maps.frame`), and this
            layer's carry.
        """
        ...


class Expand(Protocol):
    def __call__(
        self, weights: Arrays, constants: Groups, sources: Arrays, positions: Array, /
    ) -> tuple[Float[Array, "B n K D"], Float[Array, "B n K D"]]:
        """Make keys and values as attention takes them, keys rotated by RoPE, of exact or decoded
        sources [B, n, W]. `positions` are [B, n], or the waves that replace them (`Fast.waves`)."""
        ...


class Prepare(Protocol):
    def __call__(self, constants: Groups, /) -> Groups:
        """Add arrays to a layer's constants that are computed from them once per step, for reading
        the body."""
        ...


def _nothing_prepared(constants: Groups, /) -> Groups:
    return constants


class Maps(NamedTuple):
    """The pure functions of a layer's cache.

    `frame` is set where the body is rotated (kvqjax.methods.rotation). `encode` then takes and
    reconstructs sources in their own frame, and `decode` gives them in the body's frame.
    `expand_body`, if given, replaces `expand` for sources in the body's frame.

    `turned` names the sources whose vectors RoPE has turned to their tokens' positions, over KV
    heads. It is empty where `expand` does all that depends on a position, and None where nobody
    says: tokens of such a layer never move (kvqjax/cache/moves.py)."""

    capture: Capture
    encode: Encode
    decode: Decode
    expand: Expand
    prepare: Prepare = _nothing_prepared
    expand_body: Expand | None = None
    frame: Frame | None = None
    turned: tuple[str, ...] | None = None


def codec_maps(codecs: dict[str, Codec]) -> tuple[Callable, Callable]:
    """Make the functions of layers without a carry, whose sources are encoded one by one.

    Args:
        codecs: by the name of their source.

    Returns:
        An `Encode` and a `Decode`.
    """

    def encode(constants, tile, carry):
        payload = {
            name: codecs[name].encode(constants.get(name, {}), x) for name, x in tile.items()
        }
        return payload, decode(constants, payload, {})[0], carry

    def decode(constants, payload, carry):
        return {
            name: codecs[name].decode(constants.get(name, {}), x) for name, x in payload.items()
        }, carry

    return encode, decode


# ---- What flows between layers, and ways to read a body faster ----


class Chain(NamedTuple):
    """Vectors that flow from layer to layer for the same tokens, such as AQUA-KV's reconstruction
    and XQuant-CL's accumulator.

    `carry` gives the width of each part by name. It is empty for layers that need no other layer. A
    reader takes the carry of the layer below, for all body tokens, and gives its own layer's carry.
    With `flows` false only encoding needs the carry, and a body is decoded without it.

    A layer's keys and values may be made of its carry as it is stored. `read_in` names the dtypes
    of the carry for which this holds, number by number (None: all dtypes)."""

    carry: dict[str, int] = {}  # noqa: RUF012
    flows: bool = True
    read_in: tuple[str, ...] | None = ()

    @property
    def read(self) -> dict[str, int]:
        """The widths of the carry that a reader takes from the layer below: empty where only
        encoding needs it."""
        return self.carry if self.flows else {}


class SharedValues(NamedTuple):
    """Body values as vectors of `width` numbers that all heads share. They are mapped to head
    dimensions after the sum over tokens instead of before it, since attention is linear in the
    values:

        read(weights, constants, payload, sources) -> [B, n, N]       of one block, stored and decoded
        finish(weights, constants, [B, T, H, N]) -> [B, T, H, D]      of means: weights that add up to 1
    """

    width: int
    most: int  # new tokens of a row up to which this order is the cheaper one
    read: Callable
    finish: Callable


class Coefficients(NamedTuple):
    """A body of coefficients in groups of neighbouring KV heads, as few queries on a CPU or GPU
    read it (kvqjax/cache/readers/coefficients.py).

    Keys are coefficients times a matrix, plus a mean. Attention sums the coefficients of keys "k"
    and of values "v", and the sums, side by side, are mapped to values once a query."""

    groups: int  # G
    width: int  # N, the coefficients that are summed of a token and group
    # Of CPUs, whose stripes have tokens on the last axis: codes of all sources {source: {field:
    # [B, W, S]}} -> coefficients {source: [B, G, R, S]}, times their scales.
    read_last: Callable
    # Of GPUs: (source, its codes {field: [B, S, W]}) -> coefficients [B, S, G, R], times their
    # scales.
    read: Callable
    # constants -> the matrices [G, R, W/G] and the mean [G, W/G] that make keys before RoPE
    keys: Callable
    # (constants, means [B, T, H, N] of each query head's own group) -> values [B, T, H, D]
    finish: Callable


class MixedKeys(NamedTuple):
    """Body keys whose transform mixes the channels of every head alike, and mixes heads by a
    matrix. Queries are multiplied by the matrix once (`kvqjax.ops.attention`), so that cached keys
    need not be."""

    mix: np.ndarray  # [K, K]
    read: Callable  # the keys' payload -> [B, n, K*D], mixed within heads only


class Fast(NamedTuple):
    """Faster ways to attend to a body than decoding it block by block; each is None where a body
    has none."""

    packed: Packed | None = None  # a kernel reads the body as it is stored
    # XLA reads all of it at once, stored head by head (kvqjax.methods.direct).
    direct: Direct | None = None
    shared: SharedValues | None = None  # values are summed before they are mapped to heads
    # As `shared`, but used only where no kernel reads the body: on a GPU, or with few queries on a
    # CPU.
    summed: SharedValues | None = None
    mixed: MixedKeys | None = None  # keys whose heads the queries mix, on a CPU or GPU
    coefficients: Coefficients | None = None  # few queries on a CPU read coefficients, tokens last
    # Tokens that are decoded at a time, where the body's block is smaller and divides them.
    reading: int = 1
    before_rope: bool = False  # `expand` rotates keys by RoPE
    # waves(n) makes a function of n consecutive positions. `expand` takes the function's result in
    # place of the positions (kvqjax.model.rope.following). Set on CPUs, for keys that are kept
    # before RoPE.
    waves: Callable | None = None


# ---- What must be calibrated, and what reading costs ----


class Calibration(NamedTuple):
    """The calibrated constants of a layer, beyond those that its codecs declare.

    `needs` gives their shapes {group: {name: shape without the layer axis}}. The group of a codec's
    constants is its source's name. `kinds` gives the dtypes, by name, of constants that are not
    float32; "compute" is the model's dtype. `fit` finds the constants (kvqjax.codecs.base)."""

    needs: dict[str, dict[str, tuple[int, ...]]] = {}  # noqa: RUF012
    kinds: dict[str, str] = {}  # noqa: RUF012
    fit: Fit | None = None


class Cost(NamedTuple):
    """The cost of reading one stored token in a layer, beyond its stored bits
    (kvqjax.methods.roofline)."""

    # Operations that make keys and values of the stored token. A multiply-accumulate counts as two.
    # 0 where keys and values themselves are stored.
    operations: int = 0
    bits: int = 0  # bits that are moved for a token in addition to its codes
    # Numbers of the layer's weights that a decode step does not read, because constants replace
    # them
    spared: int = 0


# ---- The layer's cache, made of these parts ----


class Wiring(NamedTuple):
    """One layer's cache as a value. `storage` and `maps` suffice for a cache. The defaults of the
    other parts describe a layer without a carry that is decoded block by block and has no
    calibrated constants but those of its codecs."""

    storage: Storage
    maps: Maps
    chain: Chain = Chain()
    fast: Fast = Fast()
    calibration: Calibration = Calibration()
    cost: Cost = Cost()

    def having(self, **parts: dict[str, Any]) -> "Wiring":
        """Exchange fields of parts:
        `wiring.having(storage={"codecs": ...}, fast={"packed": None})`."""
        return self._replace(
            **{part: getattr(self, part)._replace(**fields) for part, fields in parts.items()}
        )

    def wanted(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Collect every calibrated constant of a layer, {group: {name: shape}}, a codec's under its
        source's name."""
        constants = {
            source: dict(codec.needs)
            for source, codec in self.storage.codecs.items()
            if codec.needs
        }
        for group, shapes in self.calibration.needs.items():
            constants[group] = constants.get(group, {}) | dict(shapes)
        return constants

    def fits(self) -> tuple[Fit, ...]:
        """List the fits that find the constants of `wanted`, each once: the layer's own, then those
        of its codecs."""
        of_codecs = [codec.fit for codec in self.storage.codecs.values() if codec.needs]
        fits = [fit for fit in (self.calibration.fit, *of_codecs) if fit is not None]
        return tuple(dict.fromkeys(fits))

    def constants(self, count: int, dtype: str) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Describe what `wanted` lists as arrays of `count` layers, for a model of compute dtype
        `dtype`."""

        def array(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            kind = self.calibration.kinds.get(name, "float32")
            return jax.ShapeDtypeStruct(
                (count, *shape), jnp.dtype(dtype if kind == "compute" else kind)
            )

        groups = self.wanted().items()
        return {
            group: {name: array(name, shape) for name, shape in names.items()}
            for group, names in groups
        }


# ---- Values that are summed before they are mapped to heads (`SharedValues`) ----


def shared_until(width: int, decoding: int, config: KVShape) -> int:
    """Find the most new tokens at which summing first is cheaper.

    Args:
        width: N, the numbers of a stored value that all heads share.
        decoding: the multiply-accumulates that map one cached token's value to head dimensions.
        config: the model's shape.

    Returns:
        The largest T at which T H N multiply-accumulates per cached token are fewer than `decoding`
        + T H D.
    """
    # T H N < decoding + T H D, solved for T. Where N <= D, it holds for every T.
    excess = config.num_heads * (width - config.head_dim)
    return (decoding - 1) // excess if excess > 0 else 2**31


def through_heads(
    means: Float[Array, "B T H N"],
    matrix: Float[Array, "N KD"],
    config: KVShape,
    precision: str | None = None,
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
    grouped = means.astype(matrix.dtype).reshape(
        *means.shape[:2], config.num_kv_heads, -1, means.shape[-1]
    )
    columns = matrix.reshape(-1, config.num_kv_heads, config.head_dim)
    out = jnp.einsum(
        "btkgn,nkd->btkgd",
        grouped,
        columns,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(*means.shape[:3], config.head_dim)
