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

from kvqjax.artifacts import FORMAT, flatten, read_arrays, read_description, read_method, read_shapes, write_folder
from kvqjax.cache import Cache, CacheLayout, allocate_cache
from kvqjax.cache.redeal import dealt_anew
from kvqjax.cache.state import check_alive
from kvqjax.config import ModelConfig
from kvqjax.errors import UserError
from kvqjax.methods import spelled_out
from kvqjax.model import Model
from kvqjax.pallas_kernels.packed import target_of
from kvqjax.sharding import cache_layout

__all__ = ["load_cache", "save_cache"]


# What format 1 digested: every field of the config, in this order.
FIRST_FIELDS = (
    "vocab_size", "width", "mlp_width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope", "norm_eps",
    "qkv_bias", "qk_norm", "tied_embeddings", "windows", "max_position", "eos_ids", "bos_id", "architecture", "split",
    "gathered",
)  # fmt: skip


def _digest(config: ModelConfig, form: int = FORMAT) -> str:
    """Digest of what a cache must know of a model; in format 1, of all of its config."""
    fields = dataclasses.asdict(config.kv_shape)
    if form == 1:
        every = dataclasses.asdict(config) | {"windows": config.windows}
        fields = {name: every[name] for name in FIRST_FIELDS}
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]


def _constants(model: Model) -> str:
    """Digest of the calibrated constants: words mean nothing without the very ones they were encoded with."""
    digest = hashlib.sha256()
    for name, leaf in sorted(flatten(model.constants or ()).items()):
        array = np.asarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def _about(model: Model, form: int = FORMAT) -> dict[str, str]:
    return {"fingerprint": model.fingerprint, "config": _digest(model.config, form), "constants": _constants(model)}


def _stored(cache: Cache) -> dict[str, Any]:
    """The cache's arrays by name, without those that hold nothing (no sinks): Orbax refuses them."""
    return {name: leaf for name, leaf in flatten((cache,)).items() if leaf.size}


def save_cache(path: str | os.PathLike, cache: Cache, model: Model) -> None:
    """Write the cache as a new folder, with what it needs to be understood: method, capacity, dtype, and which model
    and constants filled it. Raises UserError when `path` exists or cannot be written, or the cache was donated or lies
    on several hosts."""
    check_alive(cache)
    layout = cache.layout
    if not cache.lengths.is_fully_addressable:
        raise UserError(f"{path}: a cache that lies on several hosts cannot be saved")
    text = {"kind": "cache", "method": spelled_out(layout.method), "capacity": layout.capacity, "dtype": layout.dtype}
    text |= {"batch": cache.batch, "dealt": layout.dealt}
    write_folder(Path(path), text | _about(model), _stored(cache))


def _layout(path: Path, text: dict, model: Model) -> CacheLayout:
    """What was stored: the layout of `model`, its blocks dealt as they were then."""
    dealt = text.get("dealt", 1)
    if type(dealt) is not int or dealt < 1:
        raise UserError(f"{path}: description.json has no usable 'dealt'")
    return CacheLayout(
        shape=model.config.kv_shape,
        method=read_method(text, model.config),
        capacity=text["capacity"],
        dtype=text["dtype"],
        target=target_of(model.params["embed"]),
        dealt=dealt,
    )


# Caches from before `finite` was stored held nothing else: it equals their lengths.
FINITE, LENGTHS = "0/.finite", "0/.lengths"


def _check(path: Path, shape: Cache) -> None:
    """Compare what the folder holds with what the layout wants."""
    arrays = read_shapes(path)
    arrays = arrays | {FINITE: arrays.get(FINITE, arrays.get(LENGTHS))}
    for name, leaf in _stored(shape).items():
        got = arrays.get(name)
        if got is None or got.shape != leaf.shape or got.dtype != leaf.dtype:
            found = "nothing" if got is None else f"{got.dtype}{got.shape}"
            raise UserError(f"{path}: array {name} should be {leaf.dtype}{leaf.shape}, found {found}")


def load_cache(path: str | os.PathLike, model: Model) -> Cache:
    """Read a cache that `model` filled, on whatever mesh it then was: it comes back as `init_cache` would lay it out
    for `model`, dealt over its devices. On as many devices along the sequence as before, every shard is read straight
    into its own. Raises UserError when the folder is missing or damaged, or was written for another model, other
    constants or another compute dtype, naming the field."""
    path = Path(path)
    text = read_description(path, "cache")
    wanted = _about(model, text["format"]) | {"dtype": str(model.params["embed"].dtype)}
    for field, value in wanted.items():
        if text.get(field) != value:
            raise UserError(f"{path}: written for another {field}: {text.get(field)}, this model has {value}")
    stored, rules = _layout(path, text, model), model.rules
    layout = cache_layout(rules, dataclasses.replace(stored, dealt=1), text["batch"])
    shape, target = (jax.eval_shape(functools.partial(allocate_cache, x, text["batch"])) for x in (stored, layout))
    _check(path, shape)
    places = None if rules is None else rules.places(target)
    arrays = read_arrays(path, flatten((places,)) if stored == layout and places is not None else None)
    if FINITE not in arrays:  # a copy, for two leaves may not share a buffer
        arrays[FINITE] = jnp.copy(arrays[LENGTHS])
    leaves = [
        arrays[name] if leaf.size else np.zeros(leaf.shape, leaf.dtype) for name, leaf in flatten((shape,)).items()
    ]
    cache = jax.tree.unflatten(jax.tree.structure(shape), leaves)
    if stored != layout:
        cache = dealt_anew(cache, layout)
    return jax.tree.map(jnp.asarray, cache) if places is None else jax.device_put(cache, places)
