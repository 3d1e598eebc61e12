"""Saving and loading a cache as it is, packed.

A saved cache is a folder: arrays written by Orbax, and description.json, which says what they are
and which model and constants filled the cache (`owner_of`). Another model refuses to read it.

Arrays are saved in one form (`CANONICAL`), whatever the chip. `load_cache` deals their blocks over
the reader's devices and turns them into the form that its chip reads best."""

import dataclasses
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache import Cache, CacheLayout, allocate_cache
from kvqjax.cache.artifacts import (
    flatten,
    read_arrays,
    read_description,
    write_folder,
)
from kvqjax.cache.layout import stored_form
from kvqjax.cache.pages import require_own_bodies
from kvqjax.cache.reshape import CANONICAL, convert, dealt_anew
from kvqjax.cache.state import check_cache
from kvqjax.kernel_checks.choose import choose, over_devices
from kvqjax.methods import Method, parse, spelled_out
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import is_unrolled
from kvqjax.pallas_kernels.chips import target_of
from kvqjax.pallas_kernels.forms import BY_TABLE, Kernels
from kvqjax.parallel.rules import Rules
from kvqjax.parallel.sharding import on_parts
from kvqjax.step.checks import (
    check_both,
    check_entries,
    check_model_or_shape,
    check_rules,
    with_own_constants,
)
from kvqjax.step.new_cache import ITS_OWN_PLACE


def _digest(shape: KVShape) -> str:
    """Digest what a cache must know of a model."""
    fields = dataclasses.asdict(shape)
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]


def _constants(constants) -> str:
    """Digest the calibrated constants: words mean nothing without the very ones they were encoded
    with."""
    digest = hashlib.sha256()
    for name, leaf in sorted(flatten(constants or ()).items()):
        array = np.asarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def owner_of(model: Model | KVShape, constants, method: Method) -> dict[str, str]:
    """Describe the model and the constants that filled a cache.

    Args:
        model: the model, or its shape, which has no fingerprint.
        constants: an artifact's. None: those that the model has for `method`.

    Returns:
        Fields of a folder's description.

    Raises:
        UserError: for what are no constants.
    """
    check_entries(constants)
    if isinstance(model, KVShape):
        return {"config": _digest(model.alone), "constants": _constants(constants)}
    digest = _constants(
        with_own_constants(model, method).constants if constants is None else constants
    )
    return {
        "fingerprint": model.fingerprint,
        "config": _digest(model.config.kv_shape),
        "constants": digest,
    }


def _held_as(cache: Cache, rules: Rules | None, *, layers: str, form: str) -> Cache:
    """Call `convert`, on a mesh for each device's own part.

    Args:
        cache: any cache.
        rules: those of the mesh that it lies on; None: no mesh.
        layers: as `CacheLayout.layers`.
        form: as `CacheLayout.form`.

    Returns:
        The cache in this form.
    """
    changed = functools.partial(convert, layers=layers, form=form)
    if rules is None or form == cache.layout.form:
        return changed(cache)
    layout = dataclasses.replace(cache.layout, layers=layers, form=form)
    out = rules.cache(jax.eval_shape(functools.partial(allocate_cache, layout, cache.batch)))
    # What comes from a mesh carries the layout that went there.
    out = out.replace(layout=cache.layout)
    parts = jax.jit(lambda cache: on_parts(changed, rules, cache, specs=(), out=out))
    return parts(cache).replace(layout=layout)


def save_cache(
    path: str | os.PathLike, cache: Cache, model: Model | KVShape, *, constants=None
) -> None:
    """Write a cache as a new folder, with method, capacity, dtype, and which model and constants
    filled it. All saved caches have one form, whatever the chip.

    Args:
        path: the folder.
        cache: any cache whose bodies are its rows' own.
        model: the model that filled it, or its shape.
        constants: an artifact's; by default those of the model. A KVShape has none.

    Raises:
        UserError: when `path` exists or cannot be written, for a cache of another model or KVShape,
            and for one that was donated or lies on several hosts.
    """
    check_cache(cache)
    check_model_or_shape(model)
    require_own_bodies(cache, "save_cache")
    layout = cache.layout
    if not isinstance(model, KVShape):
        check_both(model, cache)
    elif layout.shape != model.alone:
        raise UserError(f"{path}: this is a cache of another shape: {layout.shape}")
    rules = layout.rules if isinstance(model, KVShape) else model.rules
    if not cache.lengths.is_fully_addressable:
        raise UserError(f"{path}: a cache that lies on several hosts cannot be saved")
    text = {
        "kind": "cache",
        "method": spelled_out(layout.method),
        "capacity": layout.capacity,
        "dtype": layout.dtype,
    }
    text |= {"batch": cache.batch, "dealt": layout.dealt}
    text |= owner_of(model, constants, layout.method)
    write_folder(Path(path), text, flatten((_held_as(cache, rules, **CANONICAL),)))


def _layout(path: Path, text: dict, model: Model | KVShape) -> CacheLayout:
    """Give the layout of the stored arrays: that of a cache of `model`, in the form of saved
    caches, with blocks dealt over as many devices as when it was saved. `text` is the folder's
    description."""
    dealt = text.get("dealt", 1)
    if type(dealt) is not int or dealt < 1:
        raise UserError(f"{path}: description.json has no usable 'dealt'")
    is_shape = isinstance(model, KVShape)
    shape = model.alone if is_shape else model.config.kv_shape
    return CacheLayout(
        shape=shape,
        method=parse(text["method"]),
        capacity=text["capacity"],
        dtype=text["dtype"],
        target=target_of(jnp.zeros(()) if is_shape else model.params["embed"]),
        dealt=dealt,
        **CANONICAL,
    )


def _home(model: Model | KVShape, sharding: Rules | None) -> tuple[jax.Array, Rules | None, str]:
    """Find where a cache of this model goes: an array that lies there, the mesh's rules, and how
    its layers are stored."""
    if isinstance(model, KVShape):
        return jnp.zeros(()), sharding, "scan"
    if sharding is not None:
        raise UserError(ITS_OWN_PLACE)
    return model.params["embed"], model.rules, "unroll" if is_unrolled(model.params) else "scan"


def require_owner(path: Path, text: dict, model: Model | KVShape, owner: dict[str, Any]) -> None:
    """Raise UserError, naming the field, where a folder's description differs from its reader's.

    Args:
        path: the folder, for messages.
        text: its description.
        model: the reader's model, or its shape.
        owner: what `owner_of` gives for the reader.
    """
    if not isinstance(model, KVShape):
        owner = owner | {"dtype": str(model.params["embed"].dtype)}
    elif text["dtype"] not in ("bfloat16", "float16", "float32"):
        raise UserError(f"{path}: dtype {text['dtype']!r} is unknown")
    for field, value in owner.items():
        if text.get(field) != value:
            raise UserError(
                f"{path}: written for another {field}: {text.get(field)}, this model has {value}"
            )


def load_cache(
    path: str | os.PathLike,
    model: Model | KVShape,
    *,
    constants=None,
    kernels: str | Kernels = "auto",
    sharding: Rules | None = None,
) -> Cache:
    """Read a cache that was saved by `save_cache`, on whatever chip or mesh. It comes back as
    `init_cache` would lay it out for `model`, dealt over its devices.

    On as many devices along the sequence as before, every shard is read straight into its own.

    Args:
        path: the folder.
        model: the model that filled the cache, or its shape.
        constants: an artifact's; by default those of the model. A KVShape has none.
        kernels: as in `init_cache`. What another chip found when the cache was made does not count.
        sharding: for a shape, the rules of the cache's mesh, as in `init_cache`.

    Returns:
        The cache.

    Raises:
        UserError: when the folder is missing or damaged, or was written for another model, other
            constants or another compute dtype. The message names the field.
    """
    check_model_or_shape(model)
    check_rules(sharding)
    path, (array, rules, layers) = Path(path), _home(model, sharding)
    text = read_description(path, "cache")
    stored = _layout(path, text, model)
    require_owner(path, text, model, owner_of(model, constants, stored.method))
    layout = dataclasses.replace(stored, dealt=1)
    if rules is not None:
        layout = rules.cache_layout(layout, text["batch"])
    # The cache as it was saved, and as it is to lie here, without arrays.
    saved, target = (
        jax.eval_shape(functools.partial(allocate_cache, x, text["batch"]))
        for x in (stored, layout)
    )
    places = None if rules is None else rules.places(target)
    part_places = flatten((places,)) if stored == layout and places is not None else None
    arrays = read_arrays(path, text, wanted=flatten((saved,)), places=part_places)
    leaves = [arrays[name] for name in flatten((saved,))]
    cache = jax.tree.unflatten(jax.tree.structure(saved), leaves)
    if stored != layout:
        cache = dealt_anew(cache, layout)
    cache = jax.tree.map(jnp.asarray, cache) if places is None else jax.device_put(cache, places)
    home_layout = dataclasses.replace(
        layout, layers=layers, form=stored_form(layout.target), kernels=BY_TABLE, rules=sharding
    )
    shared = {} if rules is None else over_devices(rules, home_layout)
    home_layout = choose(home_layout, kernels, array, **shared)
    return _held_as(cache, rules, layers=home_layout.layers, form=home_layout.form).replace(
        layout=home_layout
    )
