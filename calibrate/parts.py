"""Which module calibrates which layers of a method, and one artifact of what several of them found.

A layer or a codec names the module that finds its constants (`Fit` of kvqjax.codecs.base). Where all layers name one
module, it calibrates the method as it is. Otherwise each module is given a method of its own, in which the layers of
other modules are exact, and what it finds goes back to the layers that asked for it.

All that is known of a calibration stands in its module:

    DEFAULT_SEQUENCES, DEFAULT_LENGTH, work, calibrate    for a model that reads a text
    fit_captured                                          for tensors of any model
    NEEDS_MODEL                                           why there is no `fit_captured`
    constants                                             alone, where the constants follow from the weights
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_for
from kvqjax.calibrate.resume import part_state
from kvqjax.codecs import Exact
from kvqjax.codecs.base import Fit
from kvqjax.methods import KeysAndValues, Method
from kvqjax.methods.keys_values import Pair
from kvqjax.methods.spec import LayerSpec
from kvqjax.model.config import KVShape

__all__ = ["Part", "by_run", "calibrated", "captured_fitter", "divided", "fitter", "needed"]

EXACT = KeysAndValues(key=Exact(), value=Exact())
Asked = dict[str, Fit]  # source, or "" for a whole layer -> what fits its constants


class Part(NamedTuple):
    """One module's share: a `method` that it can calibrate, and per layer number which group of constants goes back
    ("k", "v", or "" for all of them)."""

    fit: Fit
    method: Method
    groups: dict[int, str]


def fitter(fit: Fit) -> ModuleType:
    """Import the module that a fit names. Raises UserError where that fails."""
    try:
        return importlib.import_module(fit.module)
    except ImportError as error:
        raise UserError(
            f"{fit.module}, which a method names for its calibration, cannot be imported: {error}"
        ) from error


def captured_fitter(fit: Fit, method: Method) -> Callable[..., Artifact]:
    """Find what fits on captured tensors: `fit_captured(data, method, recipe, state=, advance=)` of the fit's module.
    Raises UserError for fits that need a model."""
    if fit.source == "weights":
        raise UserError(f"{method}: its constants are factors of a model's weights; use a kvqjax model")
    module = fitter(fit)
    if not hasattr(module, "fit_captured"):
        reason = getattr(module, "NEEDS_MODEL", f"{fit.module} calibrates from a kvqjax model")
        raise UserError(f"{method}: {reason}; use kvqjax.calibrate.run")
    return module.fit_captured


def _uncovered(fits: Sequence[Fit]) -> tuple[Fit, ...]:
    """Leave out fits whose constants another one finds as well."""
    return tuple(fit for fit in dict.fromkeys(fits) if not any(fit.module in candidate.also for candidate in fits))


def _fits_of(method: Method, run: RunLayout, spec: LayerSpec) -> Asked:
    if isinstance(spec, Pair):
        codecs = run.wiring.storage.codecs.items()
        return {source: codec.fit for source, codec in codecs if codec.needs and codec.fit is not None}
    fits = _uncovered(run.wiring.fits())
    if len(fits) > 1:
        names = " and ".join(fit.module for fit in fits)
        raise UserError(f"{method}: layer {run.first} would be calibrated by {names} at once; give it one of them")
    return {"": fits[0]} if fits else {}


def _by_layer(method: Method, shape: KVShape) -> list[Asked]:
    """List what every layer asks for; a fit that covers another one takes its layers too."""
    specs, fits = method.layers(shape), []
    for run in runs_for(method, shape):
        fits += [_fits_of(method, run, specs[run.first])] * run.count
    everywhere = [fit for layer in fits for fit in layer.values()]

    def cover(fit: Fit) -> Fit:
        return next((candidate for candidate in everywhere if fit.module in candidate.also), fit)

    return [{part: cover(fit) for part, fit in layer.items()} for layer in fits]


def needed(method: Method, shape: KVShape) -> tuple[Fit, ...]:
    """List what calibrates a method, each fit once and in the order of layers; () for methods without constants."""
    return tuple(dict.fromkeys(fit for layer in _by_layer(method, shape) for fit in layer.values()))


def divided(method: Method, shape: KVShape) -> list[Part]:
    """Divide a method among what calibrates it."""
    by_layer, specs = _by_layer(method, shape), method.layers(shape)
    shares = dict.fromkeys((fit, part) for layer in by_layer for part, fit in layer.items())
    if [part for _, part in shares] == [""]:
        ((fit, _),) = shares
        return [Part(fit, method, dict.fromkeys(range(len(specs)), ""))]

    def share(fit: Fit, part: str) -> Part:
        numbers = [number for number, layer in enumerate(by_layer) if layer.get(part) == fit]
        layers = [_part_of(specs[number], part) if number in numbers else EXACT for number in range(len(specs))]
        partial = dataclasses.replace(method, layer=EXACT, overrides=tuple(enumerate(layers)), keep=None, boundary=0)
        return Part(fit, partial, dict.fromkeys(numbers, part))

    return [share(fit, part) for fit, part in shares]


def _part_of(spec: LayerSpec, part: str) -> LayerSpec:
    return getattr(spec, {"k": "key", "v": "value"}[part]) if part else spec


def calibrated(
    method: Method,
    shape: KVShape,
    fit_part: Callable[[Part, Path | None, Callable[[int, int], None]], Artifact],
    state: Path | None,
    advance: Callable[[int, int], None],
) -> Artifact:
    """Let `fit_part(part, state, advance)` calibrate every part of a method, and give one artifact. Each part keeps its
    progress in a file of its own beside `state` (`kvqjax.calibrate.resume.forget` deletes them)."""
    parts = divided(method, shape)
    if len(parts) == 1 and parts[0].method is method:
        return fit_part(parts[0], state, advance)
    artifacts = []
    for number, part in enumerate(parts):
        tell = lambda steps, total, n=number: advance(n * 1000 + 1000 * steps // total, 1000 * len(parts))  # noqa: E731
        artifacts.append(fit_part(part, None if state is None else part_state(state, number), tell))
    constants = tuple(_merged(run, parts, artifacts, shape) for run in runs_for(method, shape))
    reports = [{"by": part.fit.module, **artifact.about} for part, artifact in zip(parts, artifacts, strict=True)]
    return Artifact(method, constants, artifacts[0].fingerprint, {"parts": reports})


def _merged(run: RunLayout, parts: list[Part], artifacts: list[Artifact], shape: KVShape) -> dict:
    """Collect one run's constants from the parts that calibrated its layers."""
    constants: dict = {}
    for part, artifact in zip(parts, artifacts, strict=True):
        if run.first not in part.groups:
            continue
        group, runs = part.groups[run.first], runs_for(part.method, shape)
        place = next(n for n, part_run in enumerate(runs) if run.first < part_run.first + part_run.count)
        start = run.first - runs[place].first
        groups = jax.tree.map(lambda x: x[start : start + run.count], artifact.constants[place])  # noqa: B023
        constants |= {name: arrays for name, arrays in groups.items() if group in ("", name)}
    return constants


def by_run(method: Method, shape: KVShape, layers: list[dict]) -> tuple[dict, ...]:
    """Stack the constants of every layer by runs of layers, [L_run, ...], as `Model.constants` takes them; {} where
    nothing is needed."""
    runs = (layers[run.first : run.first + run.count] for run in runs_for(method, shape))
    return tuple(jax.tree.map(lambda *arrays: jnp.stack(arrays), *run) for run in runs)
