"""What public functions do around their work: check their arguments, in one line for each mistake, find the calibrated
constants that a cache takes, and run outside jit as one kept program.

Shapes and dtypes are static, so tracers are checked too; numbers in `counts` only where they are known."""

import dataclasses
import functools
import operator
import re
import shlex
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.shapes import check_cache
from kvqjax.cache.state import Cache
from kvqjax.methods import Method
from kvqjax.methods.spec import calibrated_part
from kvqjax.model.loading import Model
from kvqjax.parallel.sharding import over_mesh
from kvqjax.step.layer_step import is_known

__all__ = [
    "check_counts",
    "check_model",
    "check_new_tokens",
    "check_pending",
    "kept_program",
    "run_constants",
    "run_step",
    "with_own_constants",
]


def _named(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return text if len(text) < 80 else f"a {type(value).__name__}"


def check_model(model: Any) -> None:
    """Raise UserError for what is no Model."""
    if not isinstance(model, Model):
        raise UserError(f"model is {_named(model)}; wanted a Model, such as kvqjax.load('demo')")


def check_counts(**counts: Any) -> None:
    """Raise UserError for a named number that is not whole or below 1; None stands for a default and passes."""
    for name, count in counts.items():
        try:
            fine = count is None or (not isinstance(count, bool) and operator.index(count) >= 1)
        except TypeError:
            fine = False
        if not fine:
            raise UserError(f"{name}={_named(count)}; it must be a whole number of at least 1")


def _check_cache(model: Any, cache: Any) -> None:
    check_model(model)
    if not isinstance(cache, Cache):
        hint = "; forward and prefill return (logits, cache)" if isinstance(cache, tuple) else ""
        raise UserError(f"cache is {_named(cache)}; wanted a Cache, such as init_cache gives{hint}")
    check_cache(cache)
    if cache.layout.shape != model.config.kv_shape:
        raise UserError("the cache was made for a model of another config")
    if cache.layout.dtype != str(model.params["embed"].dtype):
        raise UserError(f"the cache is kept in {cache.layout.dtype}, the model is {model.params['embed'].dtype}")


def _check_integers(name: str, value: Any, shape: tuple, why: str) -> None:
    """Raise UserError unless `value` is an array of integers of this shape, in which a letter stands for any length of
    at least 1."""
    wanted = "[" + ", ".join(map(str, shape)) + "]"
    if not isinstance(value, jax.Array | np.ndarray):
        raise UserError(f"{name} is {_named(value)}; wanted an array of integers {wanted}: {why}")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise UserError(f"{name} is of type {value.dtype}; wanted integers {wanted}")
    same = [got == size or (isinstance(size, str) and got >= 1) for got, size in zip(value.shape, shape, strict=False)]
    if value.ndim != len(shape) or not all(same):
        raise UserError(f"{name} has shape {list(value.shape)}; wanted {wanted}: {why}")


def check_new_tokens(model: Any, tokens: Any, counts: Any, cache: Any) -> None:
    """Raise UserError unless these are T new tokens for every row of a cache of this model, and their counts."""
    _check_cache(model, cache)
    _check_integers("tokens", tokens, (cache.batch, "T"), f"T new tokens for each of the cache's {cache.batch} rows")
    _check_numbers(counts, cache.batch, tokens.shape[1])


def _check_numbers(counts: Any, batch: int, length: int) -> None:
    _check_integers("counts", counts, (batch,), "how many of the new tokens of each row are valid")
    if is_known(counts) and not 0 <= int(counts.min()) <= int(counts.max()) <= length:
        raise UserError(f"counts={np.asarray(counts).tolist()}; each must lie from 0 to the {length} new tokens given")


def check_pending(model: Any, cache: Any, pending: Any, counts: Any) -> None:
    """Raise UserError unless `pending` has the sources of every run of the cache's layers, [L_run, B, T, W]."""
    _check_cache(model, cache)
    runs = runs_of(cache.layout)
    if not isinstance(pending, tuple) or len(pending) < len(runs):
        raise UserError(f"pending is {_named(pending)}; wanted a tuple of {len(runs)}, a dict of sources for every run")
    length = None
    for number, (run, sources) in enumerate(zip(runs, pending, strict=False)):
        for name, width in run.wiring.storage.sources.items():
            got = getattr(sources.get(name), "shape", None) if isinstance(sources, dict) else None
            length = got[2] if length is None and got is not None and len(got) == 4 else length
            wanted = (run.count, cache.batch, length, width)
            if got != wanted:
                found = "nothing" if got is None else f"shape {list(got)}"
                sizes = f"[{run.count}, {cache.batch}, T, {width}]"
                raise UserError(f"pending[{number}][{name!r}]: {found} given, wanted {sizes} with one T for all")
    _check_numbers(counts, cache.batch, length or 0)


def _calibration(method: Method, model: str) -> str:
    """How to make the artifact of a method. model: what --model takes for it; "" where that is not known."""
    made = re.sub(r"[^a-z0-9]+", "-", str(method).lower()).strip("-")
    source = shlex.quote(model) if model else "MODEL"
    command = f"kvqjax calibrate --model {source} --cache {shlex.quote(str(method))} --out {made}"
    return f"`{command}` makes it; `--artifact {made}` or model.with_artifact(load_artifact({made!r})) takes it"


def run_constants(given, layout: CacheLayout, model: str = "") -> tuple[dict, ...]:
    """Give every run its calibrated constants, from those of the runs or of the stacks that an artifact holds. Raises
    UserError, at trace time, for missing or misshapen ones. model: what --model takes for it."""
    runs = runs_of(layout)
    given = given or tuple({} for _ in runs)
    stacks = runs if len(given) == len(runs) else runs_of(dataclasses.replace(layout, layers="scan"))
    if len(given) == len(stacks) != len(runs):
        given = tuple(
            jax.tree.map(lambda a, i=index: a[i : i + 1], constants)
            for stack, constants in zip(stacks, given, strict=True)
            for index in range(stack.count)
        )
    if len(given) != len(runs):
        raise UserError(f"constants for {len(given)} runs of layers given, the method has {len(runs)}")
    for run, constants in zip(runs, given, strict=True):
        for group, names in run.wiring.wanted().items():
            for name, shape in names.items():
                array = constants.get(group, {}).get(name)
                if array is None:
                    missing = f"layer {run.first} needs the calibrated constant {group}.{name}"
                    raise UserError(f"{missing}: {_calibration(layout.method, model)}")
                if array.shape != (run.count, *shape):
                    raise UserError(f"constant {group}.{name} has shape {array.shape}, wanted {(run.count, *shape)}")
    return given


def with_own_constants(model: Model, method: Method) -> Model:
    """Reduce a model that holds several artifacts to the constants for caches of `method`: of its own artifact, else of
    the newest that was calibrated for the same codecs and layers."""
    if not model.others:
        return model
    held = list(zip(model.calibrated, (model.constants, *model.others), strict=True))
    part = functools.partial(calibrated_part, config=model.config)
    alike = [constants for other, constants in held if part(other) == part(method)]
    own = [constants for other, constants in held if other == method]
    return model.replace(constants=[*own, *alike, ()][0], others=(), calibrated=())


@jax.custom_jvp
def _for_inference(tree):
    """Give back `tree`, which cannot be differentiated: what is stored is rounded."""
    return tree


@_for_inference.defjvp
def _no_gradient(primals, tangents):
    raise UserError(
        "forward, attend, commit, prefill, attend_layer and append are for inference: a cache holds rounded numbers "
        "and has no gradient; train on kvqjax.model.decoder.logits"
    )


def kept_program(
    function: Callable, static_argnums: tuple[int, ...] = (), static_argnames: tuple[str, ...] = ()
) -> Callable:
    """Wrap a function of arrays and trees so that it is compiled once for its shapes and static arguments; inside a
    trace it is called as it is. Raises UserError where a gradient is asked for."""

    @functools.wraps(function)
    @jax.enable_x64(False)  # tokens, counts and codes are 32-bit numbers whatever jax_enable_x64 says
    def plain(*arguments, **options):
        fixed = [x if i in static_argnums else _for_inference(x) for i, x in enumerate(arguments)]
        return function(*fixed, **options)

    compiled = jax.jit(plain, static_argnums=static_argnums, static_argnames=static_argnames)

    @functools.wraps(function)
    def call(*arguments, **options):
        inside = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((arguments, options)))
        return (plain if inside else compiled)(*arguments, **options)

    return call


def _placed(step, model: Model, cache: Cache, *arguments, out: tuple[str, ...], **options):
    """Call `step(model, cache, *arguments, **options)` on one device, or on every device's part of the model's mesh."""
    model = with_own_constants(model, cache.layout.method)
    arguments = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.int32), arguments)
    step = functools.partial(step, **options)
    if model.rules is None:
        return step(model, cache, *arguments)
    return over_mesh(step, model, cache, *arguments, out=out)


run_step = kept_program(_placed, static_argnums=(0,), static_argnames=("out", "within", "last", "reach"))
