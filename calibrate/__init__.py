"""Calibration: a method's constants for one model, from text, from its keys and values, or from the
weights alone."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvqjax._arguments import check_counts, named
from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact, flatten, load_artifact
from kvqjax.cache.runs import runs_for
from kvqjax.calibrate import xquant
from kvqjax.calibrate.activations import Captured
from kvqjax.calibrate.parts import Part, calibrated, captured_fitter, divided, fitter, needed
from kvqjax.calibrate.resume import forget
from kvqjax.codecs.base import Fit
from kvqjax.data.tokens import TextLike, document_ids
from kvqjax.methods import METHODS, MethodLike, parse
from kvqjax.methods.spec import Method, calibrated_part
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model, compute_dtype
from kvqjax.model.rope import in_halves
from kvqjax.model.weight_trees import stacked
from kvqjax.step.checks import check_model
from kvqjax.step.new_cache import check_constants

__all__ = ["forget", "from_tensors", "learns", "needed", "run", "sequences", "xquant"]


def __dir__() -> list[str]:
    return __all__


def sequences(model: Model, texts: TextLike, count: int, length: int) -> Int[np.ndarray, "N T"]:
    """Encode texts, documents by a path, or ids (`kvqjax.data.data_or_ids`) to sequences of tokens.

    Each document is encoded by itself, and the ids of all documents are joined.

    Args:
        model: whose tokenizer encodes.
        texts: what is encoded.
        count: sequences at most; a short text gives fewer.
        length: tokens of a sequence, at most the model's context.

    Returns:
        Token ids.

    Raises:
        UserError: for a text that is shorter than one sequence.
    """
    check_counts(count=count, length=length)
    length = min(length, model.config.max_position)
    ids = document_ids(model, texts, count * length)
    rows = len(ids) // length
    if rows == 0:
        raise UserError(
            f"the calibration text has {len(ids)} tokens, fewer than one sequence of {length}"
        )
    return ids[: rows * length].reshape(rows, length)


def _calibrated_methods(shape: KVShape) -> list[str]:
    """List the methods that always have constants. Rotations and means do not count, because
    options ask for them."""
    of_options = ("kvqjax.calibrate.rotation", "kvqjax.calibrate.centre")
    names = []
    for name in METHODS:
        with contextlib.suppress(UserError, ValueError):  # methods that do not fit the shape
            if any(fit.module not in of_options for fit in needed(METHODS[name](), shape)):
                names.append(name)
    return sorted(names)


def _check_needed(method: Method, shape: KVShape) -> None:
    """Raise UserError for a method that needs no calibration, or whose constants no module
    finds."""
    if not needed(method, shape):
        if any(run.wiring.wanted() for run in runs_for(method, shape)):
            raise UserError(
                f"{method} has constants, and no `fit` of its codecs or layers says what finds them"
            )
        names = ", ".join(_calibrated_methods(shape))
        choices = f"calibrated: {names}, rotate=fitted, and keys with centre=mean"
        raise UserError(
            f"{method} needs no calibration; {choices if names else 'nothing is calibrated on this model'}"
        )


def learns(method: Method, shape: KVShape) -> bool:
    """Say whether `method` has constants that are learnt from data."""
    return any(fit.source == "text" for fit in needed(method, shape))


def _check_recipe(method: Method, fit: Fit, recipe) -> None:
    """Raise UserError for a recipe of another calibration than that of `fit`."""
    kind = getattr(fitter(fit), "Recipe", None)
    if recipe is not None and kind is not None and not isinstance(recipe, kind):
        raise UserError(f"{method}: recipe is {named(recipe)}; wanted a {fit.module}.Recipe")


def _finite(artifact: Artifact) -> Artifact:
    """Give an artifact back. Raises UserError for constants that are not finite."""
    for name, array in flatten(artifact.constants).items():
        if not bool(jnp.isfinite(array).all()):
            raise UserError(
                f"constant {name} came out NaN or infinite",
                "check the weights, or try {dtype}",
                dtype="f32",
            )
    return artifact


def run(
    model: Model,
    method: MethodLike,
    texts: TextLike = (),
    *,
    count: int | None = None,
    length: int | None = None,
    state: str | os.PathLike | None = None,
    advance: Callable[[int, int], None] = lambda steps, total: None,
    announce: Callable[[str, float], None] = lambda text, work: None,
) -> Artifact:
    """Calibrate `method` for `model`. If parts of a method (layers, or keys and values) are
    calibrated in different ways, each part is calibrated by itself with the recipe of its way.

    Args:
        model: the model.
        method: what is calibrated.
        texts: what the model reads: a text, a list of them, the path of a file or a folder, data of
            `kvqjax.data.read`, or token ids. Not needed by xquant, whose constants come from the
            weights.
        count: sequences; None: those of the method's published recipe.
        length: tokens of a sequence; None: the recipe's, cut to the model's context.
        state: a file that keeps the progress, so that a killed run continues and gives the same
            constants.
        advance: `advance(steps, total)` is told each step.
        announce: `announce(text, work)` is told what will be read and how many floating point
            operations it takes at least.

    Returns:
        The method with its constants.

    Raises:
        UserError: a method that needs no calibration, and texts that cannot be read or are too
            short.
    """
    check_model(model)
    check_counts(count=count, length=length)
    method, state = parse(method), None if state is None else Path(state)
    model = model.replace(params=stacked(model.params))  # calibrations loop over layers by number
    _check_needed(method, model.config)

    def fit_part(part: Part, state: Path | None, advance) -> Artifact:
        module, part_method = fitter(part.fit), part.method
        if part.fit.source == "weights":
            return Artifact(
                part_method,
                module.constants(model.params, model.config, part_method),
                model.fingerprint,
            )
        tokens = sequences(
            model, texts, count or module.DEFAULT_SEQUENCES, length or module.DEFAULT_LENGTH
        )
        work = module.work(model, part_method, *tokens.shape)
        announce(f"{tokens.shape[0]} sequences of {tokens.shape[1]} tokens", work)
        return _finite(module.calibrate(model, part_method, tokens, state=state, advance=advance))

    return calibrated(method, model.config, fit_part, state, advance)


def from_tensors(
    method: MethodLike,
    shape: KVShape,
    *,
    keys,
    values,
    queries=None,
    outputs=None,
    key_gradients=None,
    value_gradients=None,
    dtype: str | None = None,
    recipe=None,
    state: str | os.PathLike | None = None,
    advance: Callable[[int, int], None] = lambda steps, total: None,
) -> Artifact:
    """Calibrate `method` for any model from what its attention layers computed for N sequences of T
    tokens. The artifact's `constants` go to `kvq.attend_layer` and `kvq.append`.

    Args:
        method: what is calibrated.
        shape: the model's keys and values.
        keys: one array [N, T, K, D] a layer (a list, or one array with the layers in front, on the
            host or not), as `attend_layer` takes them: before RoPE where the shape has a rope.
        values: likewise. Keys and values alone calibrate AQUA-KV and centre=mean.
        queries: [N, T, H, D], one array a layer: for CommVQ, whose value encoder then also learns
            from errors of the attention output; without them from errors of the values alone.
        outputs: the output projections [H*D, E], one array a layer; they go with `queries`.
        key_gradients: for KVQuant, like `keys`, of each sequence's mean loss. Their squares are the
            Fisher weights of its k-means; without them every entry weighs the same.
        value_gradients: likewise; they go with `key_gradients`.
        dtype: the cache's, as for `kvq.init_cache`.
        recipe: the method's own settings, such as `kvqjax.calibrate.aqua.Recipe()`.
        state: as for `run`.
        advance: as for `run`.

    Returns:
        The method with its constants.

    Raises:
        UserError: what is no KVShape, tensors that do not fit the shape, a recipe of another
            method, and methods that need no calibration or a model's weights.
    """
    method, state = parse(method), None if state is None else Path(state)
    if not isinstance(shape, KVShape):
        raise UserError(f"shape is {named(shape)}; wanted a KVShape, such as model.config")
    _check_needed(method, shape)
    tensors: dict[str, Any] = {
        "keys": keys,
        "values": values,
        "queries": queries,
        "outputs": outputs,
    }
    tensors |= {"key_gradients": key_gradients, "value_gradients": value_gradients}
    for name, arrays in tensors.items():
        is_left_out = arrays is None and name not in ("keys", "values")
        if not (is_left_out or hasattr(arrays, "__len__")):
            raise UserError(f"{name} is {named(arrays)}; wanted an array for every layer")
    for fit in needed(method, shape):
        # Raises an error for parts that need a model, before any part is calibrated.
        captured_fitter(fit, method)
    data = Captured(shape=shape.alone, dtype=str(compute_dtype(dtype)), **tensors)
    if shape.pairs != "halves":
        # The library's rotary pairs are channels i and i + D/2. Tensors with other pairs get their
        # channels reordered.
        reordered: dict[str, Any] = {}
        for name in ("keys", "queries", "key_gradients"):
            if tensors[name] is not None:
                reordered[name] = [in_halves(jnp.asarray(x), shape) for x in tensors[name]]
        data = dataclasses.replace(data, **reordered)
    if recipe is not None and len(divided(method, shape)) > 1:
        raise UserError(
            f"{method}: a recipe is one calibration's; parts of this method are calibrated in different ways"
        )

    def fit_part(part: Part, state: Path | None, advance) -> Artifact:
        _check_recipe(method, part.fit, recipe)
        fit_tensors = captured_fitter(part.fit, method)
        return _finite(fit_tensors(data, part.method, recipe, state=state, advance=advance))

    return calibrated(method, shape, fit_part, state, advance)


def with_constants(
    model: Model, methods: Sequence[Method], folders: Sequence[Path]
) -> list[tuple[Model, Method]]:
    """Pair every method with a model that holds its constants.

    An artifact serves every policy of the same codecs and layers, whatever its sinks, windows and
    kept tokens. Constants that are made of the weights alone (xquant) are computed here if no
    artifact has them.

    Args:
        model: the model without constants.
        folders: folders of artifacts. Each artifact must serve a method.

    Returns:
        A pair for each method, in their order.

    Raises:
        UserError: an artifact that serves no method, or a method whose constants no artifact has.
    """
    part = functools.partial(calibrated_part, config=model.config)
    artifacts = {part(artifact.method): artifact for artifact in map(load_artifact, folders)}
    unused = set(artifacts) - {part(method) for method in methods}
    if unused:
        raise UserError(
            f"an artifact is for {', '.join(sorted(map(str, unused)))}, which is none of these caches"
        )
    pairs = []
    for method in methods:
        artifact = artifacts.get(part(method))
        result = (
            xquant.prepared(model, method) if artifact is None else model.with_artifact(artifact)
        )
        check_constants(result, method)
        pairs.append((result, method))
    if model.rules is None:
        return pairs
    # On a mesh every device holds all constants.
    everywhere = model.rules.everywhere
    placed = []
    for result, method in pairs:
        constants = jax.device_put(jax.tree.map(np.asarray, result.constants), everywhere)
        placed.append((result.replace(constants=constants), method))
    return placed
