"""Empty caches for a model, or for the shape of one."""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvqjax._arguments import check_counts
from kvqjax._errors import UserError
from kvqjax._options import named_options
from kvqjax.cache.layout import CacheLayout, Pool, stored_form
from kvqjax.cache.runs import page_for
from kvqjax.cache.state import Cache, allocate_cache
from kvqjax.kernel_checks.choose import choose, over_devices
from kvqjax.methods import Method, MethodLike, parse
from kvqjax.methods.keys_values import bias_advice
from kvqjax.model import weight_trees
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model, compute_dtype, name_of
from kvqjax.model.rope import check_length
from kvqjax.pallas_kernels.chips import target_of
from kvqjax.pallas_kernels.forms import Kernels
from kvqjax.parallel.rules import Rules
from kvqjax.parallel.sharding import AxisNames, rules_on
from kvqjax.step.checks import check_model_or_shape, check_rules, run_constants, with_own_constants

ITS_OWN_PLACE = "mesh= and sharding= are for the cache of a KVShape; a model's lies as the model does: shard(model, ...)"  # noqa: E501


@named_options
def init_cache(
    model: Model | KVShape,
    method: MethodLike,
    batch: int,
    capacity: int,
    *,
    dtype: DTypeLike | None = None,
    layers: str | None = None,
    form: str | None = None,
    target: str | None = None,
    kernels: str | Kernels = "auto",
    sharding: Rules | None = None,
    mesh: Mesh | None = None,
    batch_axis: AxisNames = None,
    head_axis: AxisNames = None,
    sequence_axis: AxisNames = None,
    pages: int | None = None,
    page_tokens: int | None = None,
) -> Cache:
    """Make an empty cache for a model, or for a model's KVShape.

    Args:
        model: the model, or its shape. The cache of a model of ours lies on a mesh as the model
            does.
        method: what every layer stores, as text, dict or `Method`.
        batch: the number of rows.
        capacity: the most tokens of a row. It may be greater than what the model was trained for:
            room is not text.
        dtype: that of keys and values as they come ("bf16", "f16", "f32"); by default the model's
            compute dtype, for a shape that of `load`.
        layers: "scan" stores layers that cache alike as one stack, "unroll" each by itself (see
            kvqjax/model/decoder.py); by default as the model's weights are stored, for a shape as
            stacks.
        form: how bodies are stored: in "planes", by "heads" or in "stripes"
            (`kvqjax.cache.layout.CacheLayout`); by default as the target reads them best.
        target: the chip that programs on this cache are for; by default the one that holds the
            model's weights, or JAX's default device. For abstract or traced weights it is "cpu",
            whose path runs everywhere.
        kernels: "auto": those that this chip checked and found faster, and for a chip that is not
            here those that the table of kernels names. "off": none. "pallas", "splash" or "cudnn":
            these are forced.
        sharding: for a shape, the rules of a mesh: `cache.layout.rules` of another cache, or those
            that `rules_for` makes (kvqjax/parallel/sharding.py).
        mesh: for a shape, the mesh of the model, with axes of any names and of either kind (Auto,
            Explicit).
        batch_axis: the axis of the mesh that splits rows; or several.
        head_axis: the axis that splits KV heads; or several. Where the method mixes heads, or there
            are fewer heads than devices, it splits tokens as well.
        sequence_axis: the axis that splits the body's tokens; or several.
        pages: puts the bodies of all rows into one pool of so many pages. Rows then hold as many
            tokens as they are given pages for (kvqjax/cache/pages.py).
        page_tokens: the tokens of a page; by default as few as bodies allow.

    Returns:
        The cache. Warns where the model's key bias makes this method useless.

    Raises:
        UserError: for options that do not fit each other, the model or the method.
    """
    check_counts(batch=batch, capacity=capacity, pages=pages, page_tokens=page_tokens)
    if page_tokens is not None and pages is None:
        raise UserError("page_tokens= is the size of a page; pages= says how many there are")
    axes = {"batch_axis": batch_axis, "head_axis": head_axis, "sequence_axis": sequence_axis}
    sharding = _rules(model, method, sharding, mesh, axes)
    options = {
        "dtype": dtype,
        "layers": layers,
        "form": form,
        "target": target,
        "sharding": sharding,
    }
    pool = {"pages": pages, "page_tokens": page_tokens}
    layout = planned_layout(
        model, parse(method), batch, capacity, kernels=kernels, **options, **pool
    )
    return empty_cache(model, layout, batch)


def _rules(
    model, method: MethodLike, sharding: Rules | None, mesh: Mesh | None, axes: dict
) -> Rules | None:
    """Make the rules by which a shape's cache lies on a mesh: the given ones, or those of `mesh`
    and its named axes. None stands for one device."""
    splits = [name for name, axis in axes.items() if axis is not None]
    if mesh is None:
        if splits:
            raise UserError(
                f"{splits[0]}={axes[splits[0]]!r} names an axis of a mesh; give mesh= too"
            )
        check_rules(sharding)
        return sharding
    if sharding is not None:
        raise UserError(
            "init_cache takes either mesh= and its axes, or sharding=, the rules of a mesh"
        )
    if not isinstance(model, KVShape):
        raise UserError(ITS_OWN_PLACE)
    return rules_on(mesh, model, method, **axes)


def planned_layout(
    model: Model | KVShape,
    method: Method,
    batch: int,
    capacity: int,
    *,
    kernels: str | Kernels = "auto",
    **options,
) -> CacheLayout:
    """Plan the layout of the cache that `init_cache` makes of these options, which has them as
    `options`.

    Outside jit this may check kernels, which runs them. A caller may plan outside jit, and make the
    cache by `empty_cache` inside."""
    layout, array, rules = _plain_layout(model, method, batch, capacity, **options)
    shared = {} if rules is None else over_devices(rules, layout)
    return choose(layout, kernels, array, form=options.get("form"), **shared)


def empty_cache(model: Model | KVShape, layout: CacheLayout, batch: int) -> Cache:
    """Allocate an empty cache of this layout on the model's devices. Raises UserError where memory
    lacks."""
    rules = layout.rules if isinstance(model, KVShape) else model.rules
    try:
        return (
            allocate_cache(layout, batch) if rules is None else _allocator(layout, batch, rules)()
        )
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = next(iter(str(error).splitlines()), "")
        rows = f"{batch} row{'s' * (batch > 1)} of {layout.capacity} tokens"
        raise UserError(
            f"{layout.method}: not enough memory for a cache of {rows} ({reason})"
        ) from error


def _plain_layout(
    model: Model | KVShape,
    method: Method,
    batch: int,
    capacity: int,
    *,
    dtype=None,
    layers=None,
    form=None,
    target=None,
    sharding=None,
    pages=None,
    page_tokens=None,
) -> tuple[CacheLayout, Any, Rules | None]:
    """Plan the layout before kernels are chosen: (the layout, an array that lies where the model
    does, the mesh's rules)."""
    check_model_or_shape(model)
    if isinstance(model, KVShape):
        if model.latent is not None:
            raise UserError(
                "latents are cached for kvqjax models, which absorb up-projections; give the model"
            )
        array = jnp.zeros((), compute_dtype(dtype))
        shape, rules, stored = model.alone, sharding, "scan"
    else:
        if sharding is not None:
            raise UserError(ITS_OWN_PLACE)
        if advice := bias_advice(method, model.config):
            warnings.warn(advice, stacklevel=2)  # from one place, so that Python says it once
        array, shape, rules = model.params["embed"], model.config.kv_shape, model.rules
        stored = "unroll" if weight_trees.is_unrolled(model.params) else "scan"
        if dtype is not None and compute_dtype(dtype) != array.dtype:
            raise UserError(
                f"dtype {dtype!r} is not the model's, {array.dtype}; load the model with it"
            )
    check_length(shape, capacity)
    target = target or target_of(array)
    layout = CacheLayout(
        shape=shape,
        method=method,
        capacity=capacity,
        dtype=str(array.dtype),
        layers=layers or stored,
        form=form or stored_form(target),
        target=target,
        rules=sharding,
    )
    if pages is not None:
        layout = dataclasses.replace(layout, pool=Pool(pages, page_tokens or page_for(layout)))
    return layout if rules is None else rules.cache_layout(layout, batch), array, rules


@functools.lru_cache(maxsize=64)
def _allocator(layout: CacheLayout, batch: int, rules: Rules):
    """Compile a program that makes an empty cache in place on a mesh. It is kept, because a new
    function would be compiled again."""
    allocate = functools.partial(allocate_cache, layout, batch)
    return jax.jit(allocate, out_shardings=rules.places(jax.eval_shape(allocate)))


def check_constants(model: Model, method: Method) -> None:
    """Raise UserError where the model lacks a calibrated constant of `method`, or has one of
    another shape."""
    dtype = str(model.params["embed"].dtype)
    layout = CacheLayout(shape=model.config.kv_shape, method=method, capacity=1, dtype=dtype)
    run_constants(with_own_constants(model, method).constants, layout, name_of(model))
