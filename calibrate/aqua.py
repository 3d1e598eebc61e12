"""AQUA-KV's predictors from calibration text (arXiv 2501.19392, Algorithm 1): layer by layer, each fitted on what the
cache will have reconstructed of the layer below, so that fitting meets the errors that reading meets.

Of all sequences one layer's hidden states, keys and values are held, on the host. Hidden states are clean: no layer
sees compressed keys. Linear predictors need only second moments. The state can be kept on disk after each layer.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.runs import runs_for
from kvqjax.calibrate.aqua_fit import MEASURES, Recipe, cast, fit_layer
from kvqjax.calibrate.aqua_layers import Layers, layers_of
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method
from kvqjax.methods.papers.aqua import AquaLayer
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model

__all__ = ["DEFAULT_LENGTH", "DEFAULT_SEQUENCES", "Recipe", "calibrate", "fit", "released", "work"]

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 256, 8192  # the paper's recipe


class _Task(NamedTuple):
    data: Layers
    layers: tuple[AquaLayer, ...]
    recipe: Recipe
    span: slice  # the tokens of every sequence that are fitted and reconstructed

    @property
    def dtype(self):
        return jnp.dtype(self.data.layout.dtype)


def _prepare(data: Layers, recipe: Recipe) -> _Task:
    method, shape, size = data.layout.method, data.layout.shape, data.h.shape[:2]
    layers = tuple(layer for layer in method.layers(shape) if isinstance(layer, AquaLayer))
    if len(layers) != shape.num_layers:
        raise UserError(f"{method}: AQUA-KV's calibration needs AQUA-KV in every layer; keep layers exact by exact=3+7")
    first = layers[0]
    start, spare = (method.sinks, first.window) if recipe.body_only else (0, 0)
    length = (size[1] - start - spare) // first.unit * first.unit
    if length < 1:
        least = start + spare + first.unit
        raise UserError(f"calibration tokens are {size}; wanted [sequences, {least} tokens or more]")
    return _Task(data, layers, recipe, slice(start, start + length))


def _fresh_state(task: _Task) -> dict:
    shape, h = task.data.layout.shape, task.data.h
    count, length = len(h), task.span.stop - task.span.start
    pair, none = (
        {name: np.zeros((rows, length, shape.kv_width), np.float32) for name in ("k", "v")} for rows in (count, 0)
    )
    empty = []
    for layer in task.layers:
        needs = {source: layer.needs(source, shape.kv_width) for source in ("k", "v")}
        blank = lambda n, shape: np.zeros(shape, np.uint32 if n == "codes" else np.float32)  # noqa: E731
        empty.append({s: {n: blank(n, shape) for n, shape in needs[s].items()} for s in needs})
    measures = np.zeros((shape.num_layers, 2, len(MEASURES)))
    return {"done": np.int64(0), "h": h, "recon": pair, "constants": empty, "measures": measures} | {
        "exact": pair if task.recipe.clean else none  # what a clean fit sees of the layer below
    }


def _advance_layer(task: _Task, state: dict) -> dict:
    """The state with one more layer fitted."""
    index, h = int(state["done"]), np.empty_like(state["h"])
    exact = {name: np.empty_like(x) for name, x in state["recon"].items()}
    for i in range(len(h)):
        k, v, above = task.data.read(index, i, state["h"][i : i + 1])
        exact["k"][i], exact["v"][i] = k[task.span], v[task.span]
        if above is not None:
            h[i] = above[0]
    constants, recon, report = fit_layer(
        task.layers[index], exact, state["recon"], task.recipe, task.dtype, exact_below=state["exact"], seed=index
    )
    measures = state["measures"].copy()
    for row, source in enumerate(("k", "v")):
        found = [report[source].get(name) for name in MEASURES]
        measures[index, row] = [np.nan if x is None else x for x in found]
    learnt = [*state["constants"][:index], constants, *state["constants"][index + 1 :]]
    kept = exact if task.recipe.clean else state["exact"]
    return {"h": h, "recon": recon, "exact": kept, "constants": learnt, "measures": measures}


def _stack(config: KVShape, method: Method, constants: list[dict], dtype) -> tuple[dict, ...]:
    """Constants by run of layers, [L_run, ...], as `Model.constants` takes them; {} where nothing is needed."""
    stacks = []
    for run in runs_for(method, config):
        ready = [{s: cast(c, dtype) for s, c in constants[run.first + i].items() if c} for i in range(run.count)]
        stacks.append(jax.tree.map(lambda *arrays: jnp.stack(arrays), *ready))
    return tuple(stacks)


def _report(measures: np.ndarray) -> list[dict]:
    """One row per layer and source: what the predictor explains of it, alone and with the codes of the rest."""
    rows = []
    for layer, found in enumerate(measures):
        for source, values in zip(("k", "v"), found, strict=True):
            plain = {n: None if np.isnan(x) else float(x) for n, x in zip(MEASURES, values, strict=True)}
            rows.append({"layer": layer, "source": source} | plain)
    return rows


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Floating point operations of `calibrate` on `count` sequences of `length` tokens: an exact pass, and per layer
    the second moments of keys and values with what predicts them, and predictions."""
    rows, width = count * length, model.config.kv_width
    products = rows * sum(2 * (inputs + width) * inputs + 2 * inputs * width for inputs in (width, 2 * width))
    return count * prompt_operations(model.config, 0, length) + model.config.num_layers * products


def calibrate(model: Model, method: Method, tokens: Int[np.ndarray, "N T"], **options) -> Artifact:
    """Predictors of `method` for `model` from N sequences of T tokens; `options` as in `fit`."""
    return fit(layers_of(model, method, np.asarray(tokens)), **options)


def fit(
    data: Layers,
    *,
    recipe: Recipe = Recipe(),
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Artifact:
    """Predictors of the layout's method from layers of any model. `state` names a file that keeps the progress after
    every layer: a run that was killed continues there. `advance(done, total)` is told each layer."""
    task, method, shape = _prepare(data, recipe), data.layout.method, data.layout.shape
    owner = identity(data.fingerprint, repr(method), repr(recipe), *data.parts)
    now = stepped(_fresh_state(task), shape.num_layers, functools.partial(_advance_layer, task), state, owner, advance)
    about = {"sequences": data.h.shape[0], "tokens": data.h.shape[1], **dataclasses.asdict(recipe)}
    about |= {"report": _report(now["measures"])}
    return Artifact(method, _stack(shape, method, now["constants"], task.dtype), data.fingerprint, about)


def released(arrays: dict[str, np.ndarray], model: Model, method: Method) -> Artifact:
    """Predictors in the released format as plain arrays: "key_predictors.3.weight" [O, I] and ".bias",
    "value_predictors" likewise, for layers 1 and up; `safetensors.numpy.load_file` gives them so, and nothing is
    unpickled. Raises UserError when one is missing or of the wrong shape."""
    constants: list[dict] = []
    layers: tuple[Any, ...] = method.layers(model.config)
    if model.config.known_key_bias and any(layer.unbiased for layer in layers):
        raise UserError(f"{method}: released predictors see keys with the model's bias; say centre=none or centre=mean")
    for index, layer in enumerate(layers):
        constants.append({"k": {}, "v": {}})
        for source in ("k", "v"):
            for name, shape in layer.needs(source, model.config.kv_width).items():
                key = f"{'key' if source == 'k' else 'value'}_predictors.{index}.{name}"
                if name not in ("weight", "bias"):
                    raise UserError(f"{method}: only linear predictors were released; {key} has no counterpart")
                found = np.asarray(arrays[key], np.float32).T if key in arrays else None
                if found is None or found.shape != shape:
                    got = "nothing" if found is None else f"{found.shape[::-1]}"
                    raise UserError(f"{key}: wanted an array {shape[::-1]}, got {got}")
                constants[index][source][name] = found
    stacked = _stack(model.config, method, constants, model.params["embed"].dtype)
    return Artifact(method, stacked, model.fingerprint, {"source": "released predictors"})
