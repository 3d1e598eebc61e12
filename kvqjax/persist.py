"""Saving and loading a cache as it is, packed: an Orbax folder with a JSON description, refused by any other model."""

import dataclasses
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax.artifacts import flatten, read_arrays, read_description, write_folder
from kvqjax.cache import Cache, CacheLayout, allocate_cache
from kvqjax.config import KVShape
from kvqjax.errors import UserError
from kvqjax.methods import parse
from kvqjax.model import Model
from kvqjax.pallas_kernels.packed import target_of

__all__ = ["load_cache", "save_cache"]


def _digest(config: KVShape) -> str:
    return hashlib.sha256(repr(dataclasses.asdict(config)).encode()).hexdigest()[:16]


def _constants(constants) -> str:
    """Digest of the calibrated constants: words mean nothing without the very ones they were encoded with."""
    digest = hashlib.sha256()
    for name, leaf in sorted(flatten(constants or ()).items()):
        array = np.asarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def _about(model: Model | KVShape, constants) -> dict[str, str]:
    """What a cache was filled by. A KVShape stands for a model of which no fingerprint is known."""
    if isinstance(model, KVShape):
        return {"config": _digest(model.kv_shape), "constants": _constants(constants)}
    own = _constants(model.constants if constants is None else constants)
    return {"fingerprint": model.fingerprint, "config": _digest(model.config), "constants": own}


def _stored(cache: Cache) -> dict[str, Any]:
    """The cache's arrays by name, without those that hold nothing (no sinks): Orbax refuses them."""
    return {name: leaf for name, leaf in flatten((cache,)).items() if leaf.size}


def save_cache(path: str | os.PathLike, cache: Cache, model: Model | KVShape, *, constants=None) -> None:
    """Write the cache as a new folder, with what it needs to be understood: method, capacity, dtype, and which model
    and constants filled it. `constants` are an artifact's, by default those of the model; a KVShape has none. Raises
    UserError when `path` exists or cannot be written, the cache is dealt, or it is a cache of another KVShape."""
    layout = cache.layout
    if isinstance(model, KVShape) and layout.shape != model.kv_shape:
        raise UserError(f"{path}: this is a cache of another shape: {layout.shape}")
    if layout.dealt > 1:
        raise UserError(f"{path}: a cache whose blocks are dealt over {layout.dealt} devices cannot be saved")
    text = {"kind": "cache", "method": str(layout.method), "capacity": layout.capacity, "dtype": layout.dtype}
    write_folder(Path(path), text | {"batch": cache.batch} | _about(model, constants), _stored(cache))


def _layout(path: Path, text: dict, model: Model | KVShape) -> CacheLayout:
    alone = isinstance(model, KVShape)
    return CacheLayout(
        shape=(model if alone else model.config).kv_shape,
        method=parse(text["method"]),
        capacity=text["capacity"],
        dtype=text["dtype"],
        target=target_of(jnp.zeros(()) if alone else model.params["embed"]),
    )


def load_cache(path: str | os.PathLike, model: Model | KVShape, *, constants=None) -> Cache:
    """Read a cache that `model` filled, or a model of this KVShape. `constants` are an artifact's, by default those of
    the model; a KVShape has none. Raises UserError when the folder is missing or damaged, or was written for another
    model, other constants or another compute dtype, naming the field."""
    path = Path(path)
    text = read_description(path, "cache")
    wanted = _about(model, constants)
    if not isinstance(model, KVShape):
        wanted |= {"dtype": str(model.params["embed"].dtype)}
    elif text["dtype"] not in ("bfloat16", "float16", "float32"):
        raise UserError(f"{path}: dtype {text['dtype']!r} is unknown")
    for field, value in wanted.items():
        if text.get(field) != value:
            raise UserError(f"{path}: written for another {field}: {text.get(field)}, this model has {value}")
    shape = jax.eval_shape(functools.partial(allocate_cache, _layout(path, text, model), text["batch"]))
    arrays = read_arrays(path)
    for name, leaf in _stored(shape).items():
        got = arrays.get(name)
        if got is None or got.shape != leaf.shape or got.dtype != leaf.dtype:
            found = "nothing" if got is None else f"{got.dtype}{got.shape}"
            raise UserError(f"{path}: array {name} should be {leaf.dtype}{leaf.shape}, found {found}")
    leaves = [
        arrays[name] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in flatten((shape,)).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)
