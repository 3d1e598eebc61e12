"""Calibrated constants: which of a model's artifacts a cache takes, and whether they are what its method wants."""

import dataclasses
import functools

import jax

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.methods import Method
from kvqjax.methods.spec import calibrated_part
from kvqjax.model.loading import Model

__all__ = ["run_constants", "with_own_constants"]


def run_constants(given, layout: CacheLayout) -> tuple[dict, ...]:
    """Calibrated constants of every run, given for the runs or for the stacks that an artifact holds. Raises UserError,
    at trace time, for missing or misshapen ones."""
    runs, stacks = runs_of(layout), runs_of(dataclasses.replace(layout, layers="scan"))
    given = given or tuple({} for _ in runs)
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
                    hint = "run `kvqjax calibrate` and load the artifact"
                    raise UserError(f"layer {run.first} needs the calibrated constant {group}.{name}; {hint}")
                if array.shape != (run.count, *shape):
                    raise UserError(f"constant {group}.{name} has shape {array.shape}, wanted {(run.count, *shape)}")
    return given


def with_own_constants(model: Model, method: Method) -> Model:
    """The model with the constants for caches of `method` alone: of its own artifact where there are several, else of
    the newest that was calibrated for the same codecs and layers."""
    if not model.others:
        return model
    held = list(zip(model.calibrated, (model.constants, *model.others), strict=True))
    part = functools.partial(calibrated_part, config=model.config)
    alike = [constants for other, constants in held if part(other) == part(method)]
    own = [constants for other, constants in held if other == method]
    return model.replace(constants=[*own, *alike, ()][0], others=(), calibrated=())
