"""The shapes of a cache's arrays: which axis counts rows (`row_axes`), and the check of all public functions that take
a cache (`check_cache`).

Only shapes and dtypes are looked at, which are static. The check takes no device time, and takes tracers and abstract
arrays too."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvqjax._arguments import named
from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.state import Cache, Run, allocate_cache, check_alive

__all__ = ["check_cache", "row_axes"]


class _Promise(NamedTuple):
    """What one array of a cache must look like, as follows from its layout and the number of rows.

    Attributes:
        name: The path of the array in the cache, for messages.
        shape: The shape.
        dtype: The dtype.
        row_axis: Which axis counts rows."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    row_axis: int


def row_axes(cache: Cache) -> Cache:
    """Give the row axis of every array of a cache.

    Args:
        cache: Any cache, also a traced or an abstract one. Only its structure is read.

    Returns:
        A pytree of the same structure with an int in place of every array: 1 for arrays [layers, rows, ...], 0 for
        arrays [rows, ...]. Bodies in pages have no axis of rows: their 1 counts pages. It is what `jax.vmap` takes as
        `in_axes`, and what generic tree code must map along:
        `jax.tree.map(lambda x, axis: jnp.flip(x, axis), cache, kvqjax.row_axes(cache))`.

    Raises:
        UserError: for what is no cache.
    """
    _check_kind(cache)

    def axis_of_all(tree, axis: int):
        return jax.tree.map(lambda _: axis, tree)

    def run(state: Run) -> Run:
        stacked = {part: axis_of_all(getattr(state, part), 1) for part in ("body", "sinks", "window")}
        return Run(flushed=axis_of_all(state.flushed, 0), **stacked)

    runs = tuple(run(state) for state in cache.runs)
    states = axis_of_all(cache.states, 1)
    pages = axis_of_all(cache.pages, 0)
    return cache.replace(
        runs=runs, lengths=0, overflow=0, finite=0, kept=axis_of_all(cache.kept, 0), states=states, pages=pages
    )


@functools.lru_cache(maxsize=256)
def _promised(layout: CacheLayout, batch: int) -> tuple[_Promise, ...]:
    """List what the arrays of a cache of this layout look like, in the order of its leaves."""
    cache = jax.eval_shape(functools.partial(allocate_cache, layout, batch))
    leaves = jax.tree_util.tree_flatten_with_path(cache)[0]
    axes = jax.tree.leaves(row_axes(cache))
    return tuple(
        _Promise(jax.tree_util.keystr(path)[1:], leaf.shape, leaf.dtype, axis)
        for (path, leaf), axis in zip(leaves, axes, strict=True)
    )


def check_cache(*caches: Any) -> None:
    """Check values that should be caches.

    Inside a `shard_map` of the caller's own, arrays are parts of what the layout describes: there only their layers and
    rows are compared.

    Raises:
        UserError: A value is no cache, its arrays were donated, or they do not have the shapes and dtypes that its
            layout and its number of rows promise. The line says what probably happened, and what to call instead.
    """
    for cache in caches:
        _check_kind(cache)
        check_alive(cache)
        _check_arrays(cache)


def _check_kind(cache: Any) -> None:
    """Raise UserError for what is no Cache."""
    if not isinstance(cache, Cache):
        hint = "; forward and prefill return (logits, cache)" if isinstance(cache, tuple) else ""
        raise UserError(f"cache is {named(cache)}; wanted a Cache, such as init_cache gives{hint}")


def _check_arrays(cache: Cache) -> None:
    """Raise UserError unless all arrays of a Cache look as its layout promises."""
    lengths = getattr(cache.lengths, "shape", None)
    if lengths is None:
        raise UserError(f"the cache's lengths are a {type(cache.lengths).__name__}, not an array of its rows' lengths")
    if len(lengths) != 1 or not lengths[0]:
        raise UserError(
            f"the cache's lengths have shape {list(lengths)}, wanted [rows]: every array needs its row axis, "
            "which kvqjax.row_axes(cache) names"
        )
    leaves, promises = jax.tree.leaves(cache), _promised(cache.layout, lengths[0])
    if len(leaves) != len(promises):
        raise UserError(f"the cache has {len(leaves)} arrays, its layout promises {len(promises)}")
    inside_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
    for leaf, promise in zip(leaves, promises, strict=True):
        shape = getattr(leaf, "shape", None)
        fits = shape == promise.shape or (inside_shard_map and _is_part(shape, promise))
        if not (fits and leaf.dtype == promise.dtype):
            raise UserError(_broken(leaf, promise, cache.layout.capacity))


def _is_part(shape: tuple[int, ...] | None, promise: _Promise) -> bool:
    """Say whether a device's part of an array has all of its layers and rows."""
    rows = promise.row_axis + 1
    return shape is not None and len(shape) == len(promise.shape) and shape[:rows] == promise.shape[:rows]


def _broken(leaf: Any, promise: _Promise, capacity: int) -> str:
    """Say in one line what is wrong with an array, and what to call instead.

    Args:
        leaf: The array, or what stands in its place.
        promise: What it should look like.
        capacity: That of the cache.

    Returns:
        The line."""
    name, shape, axis = promise.name, promise.shape, promise.row_axis
    actual = getattr(leaf, "shape", None)
    if actual is None:
        return f"{name} of the cache is a {type(leaf).__name__}, not an array"
    head = f"{name} of the cache has shape {list(actual)}, wanted {list(shape)}: "
    if len(actual) != len(shape):
        return f"{head}an axis was added or removed; kvqjax.row_axes(cache) gives the row axis of every array"
    if axis and actual[0] != shape[0]:
        return (
            f"{head}its axis 0 counts layers, and tree code along axis 0 changed them; for rows use kvqjax.repeat, "
            "gather or insert, or the axes that kvqjax.row_axes(cache) gives"
        )
    if actual[axis] != shape[axis]:
        return (
            f"{head}its rows are not the {shape[axis]} of cache.lengths; for rows use kvqjax.repeat, gather or insert"
        )
    if actual != shape:
        return f"{head}the layout of a capacity of {capacity} promises that; kvqjax.resize makes another capacity"
    return f"{name} of the cache is of type {leaf.dtype}, wanted {jnp.dtype(promise.dtype)}: its bits have that meaning"
