"""In which tiles a chip's memory holds the matrices of a model.

XLA for a TPU v7x multiplies by 16-bit matrices in tiles of 16 x 128 numbers, but holds what it is given in tiles of
8 x 128: every call would lay all weights out anew and hold them twice. A jitted function takes its arguments in the
tiles in which they lie, so matrices are stored as they are multiplied. Rows of the embedding are read from the default
tiles, so it stays as it is, and a head that is tied to it is laid out anew. What has no 16-bit numbers stays, too.
"""

from collections.abc import Callable

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from kvqjax.model.weight_names import MATRICES

__all__ = ["as_multiplied", "tiles_of"]

CHIP = "TPU7x"  # how the names of the chips begin
TALL = ((16, 128), (2, 1))


def tiles_of(name: str, x, place: Sharding) -> Sharding | Format:
    """Say where the parameter `name` ("head", "layers/q") of the shape and dtype of `x` lies: `place` itself, or its
    devices and the tiles there, where these are not XLA's default."""
    chip = next(iter(place.device_set)).device_kind
    if not chip.startswith(CHIP) or name not in MATRICES or x.dtype.itemsize != 2:
        return place
    return Format(Layout(tuple(range(x.ndim)), tiling=TALL), place)


def as_multiplied(params: dict, put: Callable = jax.device_put) -> dict:
    """Lay weights, arrays or shapes with a sharding, in the tiles in which their chip multiplies by them. `put(x,
    place)` moves one that lies otherwise to where `tiles_of` says."""

    def lay(path, x):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        place = tiles_of("/".join(names), x, x.sharding)
        return x if place in (x.sharding, x.format) else put(x, place)

    return jax.tree_util.tree_map_with_path(lay, params)
