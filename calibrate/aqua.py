"""AQUA-KV's predictors from calibration text (arXiv 2501.19392, Algorithm 1): layer by layer, each fitted on what the
cache will have reconstructed of the layer below, so that fitting meets the errors that reading meets.

Of all sequences one layer's hidden states, keys and values are held, on the host. Hidden states are clean: no layer
sees compressed keys. Linear predictors need only second moments. The state can be kept on disk after each layer.

Where what the predictors miss is coded by a transform (kvqjax.codecs.klt), it is the transform of that: its second
moments are taken once the layer's predictor is fitted.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.calibrate.activations import Captured, cached
from kvqjax.calibrate.aqua_fit import MEASURES, Recipe, cast, fit_layer
from kvqjax.calibrate.klt import costs_of, energy_of
from kvqjax.calibrate.parts import by_run
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.codecs.klt import Klt
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method, MethodLike, parse
from kvqjax.methods.papers.aqua import AquaLayer
from kvqjax.model import decoder
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model
from kvqjax.step.prompt import Path as PromptPath
from kvqjax.step.prompt import exact_layer

__all__ = ["DEFAULT_LENGTH", "DEFAULT_SEQUENCES", "Recipe", "calibrate", "fit", "fit_captured", "released", "work"]

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 256, 8192  # the paper's recipe
CHUNK = 256  # tokens of a sequence that attend at once: the fastest on CPUs, and no [T, T] scores exist


# --- What is read: keys and values of one layer after the other


class Row(NamedTuple):
    """One layer on one sequence: keys and values as cached, the mean squares of its query channels (without rows where
    no transform asks, or they are not known), and the next layer's h (None where nothing is above)."""

    k: Float[Array, "T W"]
    v: Float[Array, "T W"]
    energy: Float[Array | np.ndarray, "H D"]
    above: Float[Array, "1 T E"] | None


class Layers(NamedTuple):
    """N sequences of T tokens for a calibration that reads one layer after the other. Layer `index` of sequence
    `number` is

        read(index, number, h [1, T, E]) -> a `Row`

    `h` is the first layer's, of all sequences; `outputs(index)` gives a layer's output projection [H*D, E], without
    rows where it is not known; `parts` are what `identity` takes of them."""

    layout: CacheLayout
    h: Float[np.ndarray, "N T E"]
    read: Callable[[int, int, Any], Row]
    outputs: Callable[[int], Any]
    fingerprint: str
    parts: tuple[Any, ...]


def _run_of(layout: CacheLayout, index: int) -> int:
    """Find the number of the run that layer `index` is in."""
    return next(number for number, run in enumerate(runs_of(layout)) if index < run.first + run.count)


def _transformed(layout: CacheLayout, index: int) -> list[str]:
    """List the sources of layer `index` that are coded by a transform."""
    layer = layout.method.layers(layout.shape)[index]
    return [source for source in ("k", "v") if isinstance(layer, AquaLayer) and isinstance(layer.codec(source), Klt)]


@functools.partial(jax.jit, static_argnames=("layout", "number", "last", "transformed"))
def _layer_pass(model: Model, layout: CacheLayout, number: int, index, h, last: bool, transformed: bool) -> Row:
    """One clean layer, of run `number`, on one sequence [1, T, E]; no layer is above the last one."""
    length, run = h.shape[1], runs_of(layout)[number]
    h, energy = decoder.up_to(model.params, index, h, model.config), jnp.zeros((0, model.config.head_dim))
    if transformed:
        positions, weights = jnp.arange(length)[None], decoder.layer(model.params, index)
        q = decoder.project(weights, h, positions, model.config, run.first).q
        energy = jnp.square(q[0].astype(jnp.float32)).mean(0)
    padded = jnp.pad(h, ((0, 0), (0, -length % CHUNK), (0, 0)))
    counts, path = jnp.full((1,), length, jnp.int32), PromptPath("off", CHUNK)
    keep = lambda *captured: captured  # noqa: E731
    (new, finite), above, _ = exact_layer(model, run, index - run.first, {}, padded, counts, path, keep=keep)
    seen = finite[0, :length, None]  # the cache would be given 0; constants made of it must not look sound
    k, v = (jnp.where(seen, new[name][0, :length].astype(jnp.float32), jnp.nan) for name in ("k", "v"))
    return Row(k, v, energy, None if last else above[:, :length])


def _of_model(model: Model, method: Method, tokens: np.ndarray) -> Layers:
    """Read the layers of a model on N sequences of T tokens."""
    if tokens.ndim != 2:
        raise UserError(f"calibration tokens are {tokens.shape}; wanted [sequences, tokens]")
    config, dtype = model.config, model.params["embed"].dtype
    layout = CacheLayout(shape=config.kv_shape, method=method, capacity=1, dtype=str(dtype))
    h = np.zeros((*tokens.shape, config.width), np.float32)
    for i in range(len(tokens)):
        h[i] = decoder.embed(model.params, jnp.asarray(tokens[i : i + 1], jnp.int32), config)[0]

    def read(index: int, number: int, h):
        run, last = _run_of(layout, index), index == config.num_layers - 1
        transformed = bool(_transformed(layout, index))
        return _layer_pass(model, layout, run, jnp.int32(index), jnp.asarray(h, dtype), last, transformed)

    outputs = lambda index: decoder.layer(model.params, index)["o"]  # noqa: E731
    return Layers(layout, h, read, outputs, model.fingerprint, (repr(config), tokens))


def _of_captured(data: Captured, method: Method) -> Layers:
    """Read the layers of tensors that any model computed. Nothing flows from layer to layer: they are known."""
    layout = data.layout(method)

    def read(index: int, number: int, h):
        run, rows = runs_of(layout)[_run_of(layout, index)], slice(number, number + 1)
        k, v = cached(run, data.keys[index][rows], data.values[index][rows])
        # RoPE turns queries and leaves the energy of a pair as it is, which is all that counts (`key_costs`).
        energy = np.zeros((0, 1)) if data.queries is None else energy_of(jnp.asarray(data.queries[index][rows]))
        return Row(k[0], v[0], energy, None)

    outputs = lambda index: np.zeros((0, 1)) if data.outputs is None else data.outputs[index]  # noqa: E731
    return Layers(layout, np.zeros((*data.size, 0), np.float32), read, outputs, "", data.parts)


# --- Layer after layer


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
    layers = tuple(layer.sized(shape) for layer in method.layers(shape) if isinstance(layer, AquaLayer))
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


def _costs(data: Layers, index: int, energy: Float[np.ndarray, "H D"]) -> dict[str, Float[np.ndarray, "W W"]]:
    """What errors cost of those sources of a layer that are coded by a transform."""
    sources = _transformed(data.layout, index)
    return {source: costs_of(source, energy, data.outputs(index), data.layout.shape) for source in sources}


def _advance_layer(task: _Task, state: dict) -> dict:
    """The state with one more layer fitted."""
    index, h = int(state["done"]), np.empty_like(state["h"])
    exact = {name: np.empty_like(x) for name, x in state["recon"].items()}
    energies = []
    for i in range(len(h)):
        row = task.data.read(index, i, state["h"][i : i + 1])
        exact["k"][i], exact["v"][i] = row.k[task.span], row.v[task.span]
        energies.append(np.asarray(row.energy, np.float64))
        if row.above is not None:
            h[i] = row.above[0]
    constants, recon, report = fit_layer(
        task.layers[index],
        exact,
        state["recon"],
        task.recipe,
        task.dtype,
        exact_below=state["exact"],
        seed=index,
        costs=_costs(task.data, index, np.mean(energies, 0)),
    )
    measures = state["measures"].copy()
    for row, source in enumerate(("k", "v")):
        values = [report[source].get(name) for name in MEASURES]
        measures[index, row] = [np.nan if x is None else x for x in values]
    learnt = [*state["constants"][:index], constants, *state["constants"][index + 1 :]]
    exact_below = exact if task.recipe.clean else state["exact"]
    return {"h": h, "recon": recon, "exact": exact_below, "constants": learnt, "measures": measures}


def _stacked(shape: KVShape, method: Method, constants: list[dict], dtype) -> tuple[dict, ...]:
    """Constants by run of layers in a model's dtype, without sources that need none."""
    return by_run(method, shape, [{s: cast(c, dtype) for s, c in layer.items() if c} for layer in constants])


def _report(measures: np.ndarray) -> list[dict]:
    """One row per layer and source: what the predictor explains of it, alone and with the codes of the rest."""
    rows = []
    for layer, sources in enumerate(measures):
        for source, values in zip(("k", "v"), sources, strict=True):
            plain = {n: None if np.isnan(x) else float(x) for n, x in zip(MEASURES, values, strict=True)}
            rows.append({"layer": layer, "source": source} | plain)
    return rows


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Floating point operations of `calibrate` on `count` sequences of `length` tokens: an exact pass, and per layer
    the second moments of keys and values with what predicts them, and predictions."""
    rows, width = count * length, model.config.kv_width
    products = rows * sum(2 * (inputs + width) * inputs + 2 * inputs * width for inputs in (width, 2 * width))
    return count * prompt_operations(model.config, 0, length) + model.config.num_layers * products


# --- The doors


def calibrate(model: Model, method: Method, tokens: Int[np.ndarray, "N T"], **options) -> Artifact:
    """Predictors of `method` for `model` from N sequences of T tokens; `options` as in `fit`."""
    return fit(_of_model(model, method, np.asarray(tokens)), **options)


def fit_captured(data: Captured, method: Method, recipe: Recipe | None = None, **options) -> Artifact:
    """Predictors of `method` from tensors of any model; `options` as in `fit`."""
    return fit(_of_captured(data, method), recipe=recipe or Recipe(), **options)


def fit(
    data: Layers,
    *,
    recipe: Recipe = Recipe(),
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda steps, total: None,
) -> Artifact:
    """Predictors of the layout's method from layers of any model. `state` names a file that keeps the progress after
    every layer: a run that was killed continues there. `advance(steps, total)` is told each layer."""
    task, method, shape = _prepare(data, recipe), data.layout.method, data.layout.shape
    owner = identity(data.fingerprint, repr(method), repr(recipe), *data.parts)
    progress = stepped(
        _fresh_state(task), shape.num_layers, functools.partial(_advance_layer, task), state, owner, advance
    )
    about = {"sequences": data.h.shape[0], "tokens": data.h.shape[1], **dataclasses.asdict(recipe)}
    about |= {"report": _report(progress["measures"])}
    return Artifact(method, _stacked(shape, method, progress["constants"], task.dtype), data.fingerprint, about)


def released(arrays: dict[str, np.ndarray], model: Model, method: MethodLike) -> Artifact:
    """Predictors in the released format as plain arrays: "key_predictors.3.weight" [O, I] and ".bias",
    "value_predictors" likewise, for layers 1 and up; `safetensors.numpy.load_file` gives them so, and nothing is
    unpickled. Raises UserError when one is missing or of the wrong shape, and for a method of other layers."""
    method, constants = parse(method), []
    layers: tuple[Any, ...] = method.layers(model.config)
    if not all(isinstance(layer, AquaLayer) for layer in layers):
        raise UserError(f"{method}: predictors were released for AQUA-KV; wanted it in every layer")
    if model.config.known_key_bias and any(layer.unbiased for layer in layers):
        raise UserError(f"{method}: released predictors see keys with the model's bias; say centre=none or centre=mean")
    for index, layer in enumerate(layers):
        constants.append({"k": {}, "v": {}})
        for source in ("k", "v"):
            for name, shape in layer.needs(source, model.config.kv_width).items():
                key = f"{'key' if source == 'k' else 'value'}_predictors.{index}.{name}"
                if name not in ("weight", "bias"):
                    raise UserError(f"{method}: only linear predictors were released; {key} has no counterpart")
                array = np.asarray(arrays[key], np.float32).T if key in arrays else None
                if array is None or array.shape != shape:
                    shape_text = "nothing" if array is None else f"{array.shape[::-1]}"
                    raise UserError(f"{key}: wanted an array {shape[::-1]}, got {shape_text}")
                constants[index][source][name] = array
    stacked = _stacked(model.config, method, constants, model.params["embed"].dtype)
    return Artifact(method, stacked, model.fingerprint, {"source": "released predictors"})
