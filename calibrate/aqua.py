"""AQUA-KV's predictors from calibration text (arXiv 2501.19392, Algorithm 1), one layer after the
other.

A layer's predictors are fitted to reconstructions of the layer below, as the cache will hold them.
So they see the same quantisation errors in fitting and in reading. Hidden states are clean: no
layer's attention sees compressed keys.

The hidden states, keys and values of one layer are held on the host, for all sequences. Linear
predictors need only second moments. The state can be kept on disk after each layer.

If the backbone is transform coding (kvqjax.codecs.klt), a transform is fitted to the predictors'
errors. So second moments of the errors are taken after the layer's predictor is fitted.
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
from kvqjax.cache.layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.calibrate.activations import Captured, cached
from kvqjax.calibrate.aqua_fit import MEASURES, Recipe, cast, fit_layer
from kvqjax.calibrate.klt import costs_of, query_moments
from kvqjax.calibrate.parts import by_run
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.codecs.klt import Klt
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method, MethodLike, parse
from kvqjax.methods.papers.aqua import AquaLayer
from kvqjax.model import decoder
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model
from kvqjax.step.layers import ready_queries
from kvqjax.step.prompt import Path as PromptPath
from kvqjax.step.prompt import exact_layer

# The paper's recipe.
DEFAULT_SEQUENCES = 256
DEFAULT_LENGTH = 8192
# Tokens of a sequence that attend at a time: 256 are the fastest on CPUs, and scores [T, T] never
# exist as a whole.
CHUNK = 256


# --- The activations of one layer after the other


class Row(NamedTuple):
    """One layer on one sequence."""

    k: Float[Array, "T W"]  # as cached
    v: Float[Array, "T W"]
    # The queries' second moments. They have no heads where queries are not known or no transform
    # needs them.
    moments: Float[Array | np.ndarray, "K D D"]
    above: Float[Array, "1 T E"] | None  # the input of the layer above; None for the last layer


class Layers(NamedTuple):
    """N sequences of T tokens for a calibration that reads one layer after the other:

    read(index, number, h [1, T, E]) -> the `Row` of layer `index` on sequence `number`, whose input
    is h
    """

    layout: CacheLayout
    h: Float[np.ndarray, "N T E"]  # the input of the first layer
    read: Callable[[int, int, Any], Row]
    # outputs(index): a layer's output projection [H*D, E]; no rows if not known.
    outputs: Callable[[int], Any]
    fingerprint: str  # of the model
    parts: tuple[Any, ...]  # text and arrays that identify the data (`resume.identity`)


def _run_of(layout: CacheLayout, index: int) -> int:
    """Find the number of the run that layer `index` is in."""
    for number, run in enumerate(runs_of(layout)):
        if index < run.first + run.count:
            return number
    raise IndexError(index)


def _transformed(layout: CacheLayout, index: int) -> list[str]:
    """List the sources of layer `index` that are coded by a transform."""
    layer = layout.method.layers(layout.shape)[index]
    if not isinstance(layer, AquaLayer):
        return []
    return [source for source in ("k", "v") if isinstance(layer.codec(source), Klt)]


@functools.partial(jax.jit, static_argnames=("layout", "number", "last", "transformed"))
def _layer_pass(
    model: Model, layout: CacheLayout, number: int, index, h, last: bool, transformed: bool
) -> Row:
    """Run one clean layer on one sequence.

    Args:
        layout: of the cache.
        number: of the layer's run.
        h: its input, [1, T, E].
        last: whether no layer is above.
        transformed: whether a source is coded by a transform, which needs the queries' moments.

    Returns:
        The layer's activations.
    """
    length = h.shape[1]
    run = runs_of(layout)[number]
    h = decoder.up_to(model.params, index, h, model.config)
    moments = jnp.zeros((0, 1, 1))
    if transformed:
        positions = jnp.arange(length)[None]
        weights = decoder.layer(model.params, index)
        q = decoder.project(weights, h, positions, model.config, run.first).q
        moments = query_moments(q[0], model.config.kv_shape.layer(run.first))
    padded = jnp.pad(h, ((0, 0), (0, -length % CHUNK), (0, 0)))
    counts = jnp.full((1,), length, jnp.int32)
    path = PromptPath("off", CHUNK)

    def keep(*captured):
        return captured

    (new, finite), above = exact_layer(
        model, run, index - run.first, {}, padded, counts, path, keep
    )
    # A cache stores 0 for a number that is not finite. Here it becomes NaN, so that no constant
    # made of it looks sound.
    is_finite = finite[0, :length, None]

    def checked(x):
        return jnp.where(is_finite, x[0, :length].astype(jnp.float32), jnp.nan)

    k = checked(new["k"])
    v = checked(new["v"])
    return Row(k, v, moments, None if last else above[:, :length])


def _of_model(model: Model, method: Method, tokens: np.ndarray) -> Layers:
    """Read the layers of a model on N sequences of T tokens."""
    if tokens.ndim != 2:
        raise UserError(f"calibration tokens are {tokens.shape}; wanted [sequences, tokens]")
    config = model.config
    dtype = model.params["embed"].dtype
    layout = CacheLayout(shape=config.kv_shape, method=method, capacity=1, dtype=str(dtype))
    h = np.zeros((*tokens.shape, config.width), np.float32)
    for i in range(len(tokens)):
        h[i] = decoder.embed(model.params, jnp.asarray(tokens[i : i + 1], jnp.int32), config)[0]

    def read(index: int, number: int, h):
        run = _run_of(layout, index)
        last = index == config.num_layers - 1
        transformed = bool(_transformed(layout, index))
        return _layer_pass(
            model, layout, run, jnp.int32(index), jnp.asarray(h, dtype), last, transformed
        )

    def outputs(index: int):
        return decoder.layer(model.params, index)["o"]

    return Layers(layout, h, read, outputs, model.fingerprint, (repr(config), tokens))


def _of_captured(data: Captured, method: Method) -> Layers:
    """Read tensors that the layers of any model computed. All of them are known, so no hidden
    states are passed on."""
    layout = data.layout(method)

    def read(index: int, number: int, h):
        run = runs_of(layout)[_run_of(layout, index)]
        row = slice(number, number + 1)
        k, v = cached(run, data.keys[index][row], data.values[index][row])
        moments = np.zeros((0, 1, 1))
        if data.queries is not None:
            layer_shape = layout.shape.layer(index)
            positions = jnp.arange(data.size[1])[None]
            q = ready_queries(jnp.asarray(data.queries[index][row]), positions, layer_shape)
            moments = query_moments(q[0], layer_shape)
        return Row(k[0], v[0], moments, None)

    def outputs(index: int):
        return np.zeros((0, 1)) if data.outputs is None else data.outputs[index]

    h = np.zeros((*data.size, 0), np.float32)
    return Layers(layout, h, read, outputs, "", data.parts)


# --- Layer after layer


class _Task(NamedTuple):
    """One calibration: the data, and what is fitted to them."""

    data: Layers
    layers: tuple[AquaLayer, ...]
    recipe: Recipe
    span: slice  # the tokens of every sequence that are fitted and reconstructed

    @property
    def dtype(self):
        return jnp.dtype(self.data.layout.dtype)


def _prepare(data: Layers, recipe: Recipe) -> _Task:
    """Describe one calibration. Raises UserError for layers of other methods and for sequences that
    are too short."""
    method = data.layout.method
    shape = data.layout.shape
    size = data.h.shape[:2]
    layers = []
    for layer in method.layers(shape):
        if isinstance(layer, AquaLayer):
            layers.append(layer.sized(shape))
    if len(layers) != shape.num_layers:
        raise UserError(
            f"{method}: AQUA-KV's calibration needs AQUA-KV in every layer; keep layers exact by exact=3+7"
        )
    first = layers[0]
    # Sinks at the start and the window at the end of a sequence are never encoded. The rest is
    # encoded in whole units.
    start = method.sinks if recipe.body_only else 0
    spare = first.window if recipe.body_only else 0
    units = (size[1] - start - spare) // first.unit
    length = units * first.unit
    if length < 1:
        least = start + spare + first.unit
        raise UserError(
            f"calibration tokens are {size}; wanted [sequences, {least} tokens or more]"
        )
    return _Task(data, tuple(layers), recipe, slice(start, start + length))


def _fresh_state(task: _Task) -> dict:
    """Make the state before the first layer. Its arrays have their final shapes, as a state on disk
    needs."""
    shape = task.data.layout.shape
    h = task.data.h
    length = task.span.stop - task.span.start

    def pair(rows: int) -> dict[str, np.ndarray]:
        size = (rows, length, shape.kv_width)
        return {"k": np.zeros(size, np.float32), "v": np.zeros(size, np.float32)}

    def blank(layer: AquaLayer, source: str) -> dict[str, np.ndarray]:
        arrays = {}
        for name, size in layer.needs(source, shape.kv_width).items():
            arrays[name] = np.zeros(size, np.uint32 if name == "codes" else np.float32)
        return arrays

    below = pair(len(h))  # there is nothing below the first layer: zeros
    return {
        "done": np.int64(0),
        "h": h,
        # Reconstructions of the layer below.
        "recon": below,
        "constants": [{"k": blank(layer, "k"), "v": blank(layer, "v")} for layer in task.layers],
        "measures": np.zeros((shape.num_layers, 2, len(MEASURES))),
        # Exact keys and values of the layer below, for a clean fit.
        "exact": below if task.recipe.clean else pair(0),
    }


def _costs(
    data: Layers, index: int, moments: Float[np.ndarray, "K D D"]
) -> dict[str, Float[np.ndarray, "W W"]]:
    """Compute what errors cost, for the sources of a layer that are coded by a transform."""
    sources = _transformed(data.layout, index)
    if not sources:
        return {}
    shape = data.layout.shape.layer(index)
    costs = costs_of(moments, data.outputs(index), shape, data.h.shape[1])
    return {source: costs[source] for source in sources}


def _advance_layer(task: _Task, state: dict) -> dict:
    """Fit one more layer, and return the state after it."""
    index = int(state["done"])
    h = np.empty_like(state["h"])  # the input of the layer above
    exact = {name: np.empty_like(x) for name, x in state["recon"].items()}
    moments = []
    for i in range(len(h)):
        row = task.data.read(index, i, state["h"][i : i + 1])
        exact["k"][i] = row.k[task.span]
        exact["v"][i] = row.v[task.span]
        moments.append(np.asarray(row.moments, np.float64))
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
        costs=_costs(task.data, index, np.mean(moments, 0)),
    )
    measures = state["measures"].copy()
    for row, source in enumerate(("k", "v")):
        measures[index, row] = [report[source].get(name, np.nan) for name in MEASURES]
    learnt = [*state["constants"][:index], constants, *state["constants"][index + 1 :]]
    exact_below = exact if task.recipe.clean else state["exact"]
    return {"h": h, "recon": recon, "exact": exact_below, "constants": learnt, "measures": measures}


def _stacked(shape: KVShape, method: Method, constants: list[dict], dtype) -> tuple[dict, ...]:
    """Stack constants by runs of layers, in the dtypes of a model, without sources that need
    none."""
    of_layers = []
    for layer in constants:
        of_sources = {}
        for source, arrays in layer.items():
            if arrays:
                of_sources[source] = cast(arrays, dtype)
        of_layers.append(of_sources)
    return by_run(method, shape, of_layers)


def _report(measures: np.ndarray) -> list[dict]:
    """Make a row of measures for every layer and source: errors of the predictor alone, and of
    predictor and codes. A measure that a layer does not have is None."""
    rows = []
    for layer, sources in enumerate(measures):
        for source, values in zip(("k", "v"), sources, strict=True):
            row: dict[str, Any] = {"layer": layer, "source": source}
            for name, value in zip(MEASURES, values, strict=True):
                row[name] = None if np.isnan(value) else float(value)
            rows.append(row)
    return rows


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Count the floating point operations of `calibrate` on `count` sequences of `length` tokens:
    those of an exact pass, and for each layer those of the predictors' second moments and
    predictions."""
    rows, width = count * length, model.config.kv_width
    of_layer = 0
    for inputs in (width, 2 * width):  # of the predictors of keys and of values
        moments = 2 * (inputs + width) * inputs  # X^T X and X^T Y, per row
        prediction = 2 * inputs * width
        of_layer += rows * (moments + prediction)
    exact_passes = count * prompt_operations(model.config, 0, length)
    return exact_passes + model.config.num_layers * of_layer


# --- Calibrations of a model, of tensors, and from released predictors


def calibrate(model: Model, method: Method, tokens: Int[np.ndarray, "N T"], **options) -> Artifact:
    """Fit the predictors of `method` for `model` to N sequences of T tokens; `options` as in
    `fit`."""
    return fit(_of_model(model, method, np.asarray(tokens)), **options)


def fit_captured(
    data: Captured, method: Method, recipe: Recipe | None = None, **options
) -> Artifact:
    """Fit the predictors of `method` to tensors of any model; `options` as in `fit`."""
    return fit(_of_captured(data, method), recipe=recipe or Recipe(), **options)


def fit(
    data: Layers,
    *,
    recipe: Recipe = Recipe(),
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda steps, total: None,
) -> Artifact:
    """Fit the predictors of the layout's method to layers of any model.

    Args:
        data: the activations of the layers.
        state: a file that keeps the progress after every layer. A run that was killed continues
            from it.
        advance: advance(steps, total) is called after every layer.

    Returns:
        The method with its constants.

    Raises:
        UserError: for a method with layers other than AQUA-KV's, and for sequences that are too
            short.
    """
    task = _prepare(data, recipe)
    method = data.layout.method
    shape = data.layout.shape
    owner = identity(data.fingerprint, repr(method), repr(recipe), *data.parts)
    step = functools.partial(_advance_layer, task)
    progress = stepped(_fresh_state(task), shape.num_layers, step, state, owner, advance)
    constants = _stacked(shape, method, progress["constants"], task.dtype)
    about = {
        "sequences": data.h.shape[0],
        "tokens": data.h.shape[1],
        **dataclasses.asdict(recipe),
        "report": _report(progress["measures"]),
    }
    return Artifact(method, constants, data.fingerprint, about)


def released(arrays: dict[str, np.ndarray], model: Model, method: MethodLike) -> Artifact:
    """Take the released predictors as the constants of a method.

    Args:
        arrays: "key_predictors.3.weight" [O, I] and "key_predictors.3.bias" [O], and
            "value_predictors" in the same way, for layers 1 and up. `safetensors.numpy.load_file`
            gives them so; nothing is unpickled.
        model: the model that they were fitted to.
        method: AQUA-KV with linear predictors.

    Returns:
        The method with its constants.

    Raises:
        UserError: for an array that is missing or of the wrong shape, and for a method with other
            layers.
    """
    method = parse(method)
    config = model.config
    layers: tuple[Any, ...] = method.layers(config)
    if not all(isinstance(layer, AquaLayer) for layer in layers):
        raise UserError(f"{method}: predictors were released for AQUA-KV; wanted it in every layer")
    if config.known_key_bias and any(layer.unbiased for layer in layers):
        raise UserError(
            f"{method}: released predictors see keys with the model's bias; say centre=none or centre=mean"
        )
    constants = []
    for index, layer in enumerate(layers):
        constants.append({"k": {}, "v": {}})
        for source, prefix in (("k", "key_predictors"), ("v", "value_predictors")):
            for name, shape in layer.needs(source, config.kv_width).items():
                if name not in ("weight", "bias"):
                    raise UserError(
                        f"{method}: only linear predictors were released; {prefix}.{index}.{name} "
                        "has no counterpart"
                    )
                key = f"{prefix}.{index}.{name}"
                # PyTorch's weight is [O, I], ours [I, O].
                stored_shape = shape[::-1]
                if key not in arrays:
                    raise UserError(f"{key}: wanted an array {stored_shape}, got nothing")
                array = np.asarray(arrays[key], np.float32)
                if array.shape != stored_shape:
                    raise UserError(f"{key}: wanted an array {stored_shape}, got {array.shape}")
                constants[index][source][name] = array.T
    stacked = _stacked(config, method, constants, model.params["embed"].dtype)
    return Artifact(method, stacked, model.fingerprint, {"source": "released predictors"})
