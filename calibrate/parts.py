"""Assigns the layers of a method to the modules that calibrate them, and joins their results into
one artifact.

A layer or a codec names the module that finds its constants (`Fit` of kvqjax.codecs.base). If all
layers name one module, it calibrates the method as it is. Otherwise each module gets a method of
its own, in which the layers of other modules are exact. Its constants then go to the layers that
named it.

A module of a calibration has these names:

    DEFAULT_SEQUENCES, DEFAULT_LENGTH, work, calibrate    for a model that reads a text
    fit_captured                                          for tensors of any model
    NEEDS_MODEL                                           why there is no `fit_captured`
    constants                                             instead of all others, for constants made of the weights
"""

import dataclasses
import importlib
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.layout import RunLayout
from kvqjax.cache.runs import runs_for
from kvqjax.calibrate.resume import part_state
from kvqjax.codecs import Exact
from kvqjax.codecs.base import Fit
from kvqjax.methods import KeysAndValues, Method
from kvqjax.methods.keys_values import Pair
from kvqjax.methods.spec import LayerSpec
from kvqjax.model.config import KVShape

EXACT = KeysAndValues(key=Exact(), value=Exact())
Fits = dict[str, Fit]  # source, or "" for a whole layer -> the fit of its constants


class Part(NamedTuple):
    """The share of one module."""

    fit: Fit
    method: Method  # with exact layers in place of other modules' layers
    # Layer number -> the group of constants that the layer takes: "k", "v", or "" for all.
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
    """Find the function of the fit's module that calibrates from captured tensors,
    `fit_captured(data, method, recipe, state=, advance=)`. Raises UserError for fits that need a
    model."""
    if fit.source == "weights":
        raise UserError(
            f"{method}: its constants are factors of a model's weights; use a kvqjax model"
        )
    module = fitter(fit)
    if not hasattr(module, "fit_captured"):
        reason = getattr(module, "NEEDS_MODEL", f"{fit.module} calibrates from a kvqjax model")
        raise UserError(f"{method}: {reason}; use kvqjax.calibrate.run")
    return module.fit_captured


def _uncovered(fits: Sequence[Fit]) -> tuple[Fit, ...]:
    """Drop repeated fits, and fits whose constants another one of `fits` finds as well."""
    covered = {module for fit in fits for module in fit.also}
    return tuple(fit for fit in dict.fromkeys(fits) if fit.module not in covered)


def _fits_of(method: Method, run: RunLayout, spec: LayerSpec) -> Fits:
    """Find the fits of one run of layers. Raises UserError where a layer that is no `Pair` needs
    more than one."""
    if isinstance(spec, Pair):
        # Keys and values of a `Pair` are coded independently, so each has a fit of its own.
        by_source = {}
        for source, codec in run.wiring.storage.codecs.items():
            if codec.needs and codec.fit is not None:
                by_source[source] = codec.fit
        return by_source
    fits = _uncovered(run.wiring.fits())
    if len(fits) > 1:
        names = " and ".join(fit.module for fit in fits)
        raise UserError(
            f"{method}: layer {run.first} would be calibrated by {names} at once; give it one of them"
        )
    return {"": fits[0]} if fits else {}


def _by_layer(method: Method, shape: KVShape) -> list[Fits]:
    """List the fits of every layer. If one fit of the method finds another one's constants as well,
    it replaces it."""
    specs = method.layers(shape)
    by_layer = []
    for run in runs_for(method, shape):
        by_layer += [_fits_of(method, run, specs[run.first])] * run.count
    replacement: dict[str, Fit] = {}  # by the module that it replaces
    for layer in by_layer:
        for fit in layer.values():
            for module in fit.also:
                replacement.setdefault(module, fit)
    replaced = []
    for layer in by_layer:
        replaced.append({part: replacement.get(fit.module, fit) for part, fit in layer.items()})
    return replaced


def needed(method: Method, shape: KVShape) -> tuple[Fit, ...]:
    """List the fits of a method, each once and in the order of layers. Methods without constants
    have ()."""
    fits: dict[Fit, None] = {}
    for layer in _by_layer(method, shape):
        fits |= dict.fromkeys(layer.values())
    return tuple(fits)


def divided(method: Method, shape: KVShape) -> list[Part]:
    """Divide a method among the modules that calibrate it."""
    by_layer = _by_layer(method, shape)
    specs = method.layers(shape)
    shares: dict[tuple[Fit, str], list[int]] = {}  # fit and part -> the layers that have them
    for number, layer in enumerate(by_layer):
        for part, fit in layer.items():
            shares.setdefault((fit, part), []).append(number)
    if [part for _, part in shares] == [""]:
        # One module for whole layers takes the method as it is.
        ((fit, _),) = shares
        return [Part(fit, method, dict.fromkeys(range(len(specs)), ""))]
    parts = []
    for (fit, part), numbers in shares.items():
        layers: list[LayerSpec] = [EXACT] * len(specs)
        for number in numbers:
            layers[number] = _part_of(specs[number], part)
        # `overrides` name every layer, boundary layers included.
        part_method = dataclasses.replace(
            method, layer=EXACT, overrides=tuple(enumerate(layers)), keep=None, boundary=0
        )
        parts.append(Part(fit, part_method, dict.fromkeys(numbers, part)))
    return parts


def _part_of(spec: LayerSpec, part: str) -> LayerSpec:
    """Return the layer of a `Pair`'s keys ("k") or values ("v"); for "" the layer itself."""
    if not part:
        return spec
    return getattr(spec, {"k": "key", "v": "value"}[part])


def calibrated(
    method: Method,
    shape: KVShape,
    fit_part: Callable[[Part, Path | None, Callable[[int, int], None]], Artifact],
    state: Path | None,
    advance: Callable[[int, int], None],
) -> Artifact:
    """Let `fit_part(part, state, advance)` calibrate every part of a method, and return one
    artifact. Each part keeps its progress in a file of its own beside `state`
    (`kvqjax.calibrate.resume.forget` deletes them)."""
    parts = divided(method, shape)
    if len(parts) == 1 and parts[0].method is method:
        return fit_part(parts[0], state, advance)
    artifacts = []
    for number, part in enumerate(parts):

        def advance_part(steps: int, total: int, number: int = number) -> None:
            # Parts have different numbers of steps; to the caller each of them is 1000 steps.
            advance(number * 1000 + 1000 * steps // total, 1000 * len(parts))

        part_path = None if state is None else part_state(state, number)
        artifacts.append(fit_part(part, part_path, advance_part))
    constants = tuple(_merged(run, parts, artifacts, shape) for run in runs_for(method, shape))
    reports = []
    for part, artifact in zip(parts, artifacts, strict=True):
        reports.append({"by": part.fit.module, **artifact.about})
    return Artifact(method, constants, artifacts[0].fingerprint, {"parts": reports})


def _merged(run: RunLayout, parts: list[Part], artifacts: list[Artifact], shape: KVShape) -> dict:
    """Collect one run's constants from the parts that calibrated its layers."""
    constants: dict = {}
    for part, artifact in zip(parts, artifacts, strict=True):
        if run.first not in part.groups:
            continue
        group = part.groups[run.first]
        # In the part's method these layers may belong to a longer run. They are cut out of it.
        part_runs = runs_for(part.method, shape)
        place = 0
        while run.first >= part_runs[place].first + part_runs[place].count:
            place += 1
        start = run.first - part_runs[place].first
        layers = operator.itemgetter(slice(start, start + run.count))
        by_group = jax.tree.map(layers, artifact.constants[place])
        for name, arrays in by_group.items():
            if group in ("", name):
                constants[name] = arrays
    return constants


def by_run(method: Method, shape: KVShape, layers: list[dict]) -> tuple[dict, ...]:
    """Stack the constants of layers by runs, [L_run, ...], as `Model.constants` takes them. Runs
    without constants have {}."""
    stacks = []
    for run in runs_for(method, shape):
        of_run = layers[run.first : run.first + run.count]
        stacks.append(jax.tree.map(lambda *arrays: jnp.stack(arrays), *of_run))
    return tuple(stacks)
