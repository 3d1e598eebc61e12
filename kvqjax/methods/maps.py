"""The pure functions of a layer's cache (`Wiring.maps`). All meet the same things:

    sources    the vectors of a token that sinks and window hold exactly and the body holds encoded, by name:
               {"k": [.., K*D], "v": [.., K*D]}, or {"x": [.., E]} for the layer's input
    constants  the layer's calibrated arrays {group: {name: array}}, already indexed by layer
    weights    the layer's decoder weights, already indexed by layer

and `carry`, what flows from layer to layer for the same tokens: {name: [.., W]}, empty for most methods."""

from typing import Any, NamedTuple, Protocol

from jax import Array
from jaxtyping import Float

from kvqjax.methods.rotation import Frame

__all__ = ["Capture", "Decode", "Encode", "Expand", "Maps", "Prepare"]

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
        self, weights: Arrays, constants: Groups, sources: Arrays, positions: Array | None, /
    ) -> tuple[Float[Array, "B n K D"], Float[Array, "B n K D"]]:
        """Make keys and values as attended, keys rotated by RoPE, from sources [B, n, W], exact or decoded, and their
        positions [B, n]. Without positions (see `Fast.before_rope`) keys are not rotated."""
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
