"""Calibration: a method's constants for one model, from text, from its keys and values, or from the weights alone."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvqjax._arguments import check_counts
from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact, flatten
from kvqjax.cache.runs import runs_for
from kvqjax.calibrate import xquant
from kvqjax.calibrate.parts import Part, calibrated, divided, fitter, forget, needed
from kvqjax.data.tokens import TextLike, document_ids
from kvqjax.methods import METHODS, MethodLike, parse
from kvqjax.methods.spec import Method
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model, compute_dtype
from kvqjax.model.weight_trees import stacked
from kvqjax.step.doors import check_model

__all__ = ["forget", "from_tensors", "learns", "needed", "run", "sequences", "xquant"]


def __dir__() -> list[str]:
    return __all__


def sequences(model: Model, texts: TextLike, count: int, length: int) -> Int[np.ndarray, "N T"]:
    """Token ids [at most count, length] of texts, of documents by a path, or of ids (`kvqjax.data.data_or_ids`). Each
    document is encoded by itself, and their ids are joined; short models and texts give fewer and shorter rows."""
    check_counts(count=count, length=length)
    length = min(length, model.config.max_position)
    ids = document_ids(model, texts, count * length)
    rows = len(ids) // length
    if rows == 0:
        raise UserError(f"the calibration text has {len(ids)} tokens, fewer than one sequence of {length}")
    return ids[: rows * length].reshape(rows, length)


def _known(shape: KVShape) -> list[str]:
    """List methods with constants of their own; rotations and means belong to options."""
    found, options = [], ("kvqjax.calibrate.rotation", "kvqjax.calibrate.centre")
    for name in METHODS:
        with contextlib.suppress(UserError, ValueError):
            if any(fit.module not in options for fit in needed(METHODS[name](), shape)):
                found.append(name)
    return sorted(found)


def _check_needed(method: Method, shape: KVShape) -> None:
    if not needed(method, shape):
        if any(run.wiring.wanted() for run in runs_for(method, shape)):
            raise UserError(f"{method} has constants, and no `fit` of its codecs or layers says what finds them")
        known = ", ".join(_known(shape))
        raise UserError(f"{method} needs no calibration; calibrated: {known}, rotate=fitted, and keys with centre=mean")


def learns(method: Method, shape: KVShape) -> bool:
    """Say whether `method` has constants that are learnt from data."""
    return any(fit.source == "text" for fit in needed(method, shape))


def _finite(artifact: Artifact) -> Artifact:
    for name, array in flatten(artifact.constants).items():
        if not bool(jnp.isfinite(array).all()):
            raise UserError(f"constant {name} came out NaN or infinite; check the weights, or try dtype='f32'")
    return artifact


def run(
    model: Model,
    method: MethodLike,
    texts: TextLike = (),
    *,
    count: int | None = None,
    length: int | None = None,
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
    announce: Callable[[str, float], None] = lambda text, work: None,
) -> Artifact:
    """Calibrate `method` for `model`. texts: what the model reads: a text, a list of them, the path of a file or a
    folder, data of `kvqjax.data.read`, or token ids (not needed by xquant, whose constants come from the weights).
    count, length: sequences and their tokens; by default the method's published recipe, cut to the model's
    context. state: a file that keeps the progress, so that a killed run continues and gives the same constants.
    `announce(text, work)` is told what will be read and how many floating point operations it takes at least,
    `advance(done, total)` each step. Where layers, or keys and values, follow methods that are calibrated in different
    ways, each is calibrated by itself with its own recipe. Raises UserError for methods that need no calibration."""
    check_model(model)
    check_counts(count=count, length=length)
    method = parse(method)
    model = model.replace(params=stacked(model.params))  # calibrations loop over layers by number
    _check_needed(method, model.config)

    def one(part: Part, state: Path | None, advance) -> Artifact:
        module, own = fitter(part.fit), part.method
        if part.fit.source == "weights":
            return Artifact(own, module.constants(model.params, model.config, own), model.fingerprint)
        tokens = sequences(model, texts, count or module.DEFAULT_SEQUENCES, length or module.DEFAULT_LENGTH)
        announce(f"{tokens.shape[0]} sequences of {tokens.shape[1]} tokens", module.work(model, own, *tokens.shape))
        return _finite(module.calibrate(model, own, tokens, state=state, advance=advance))

    return calibrated(method, model.config, one, state, advance)


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
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Artifact:
    """Calibrate `method` for any model from what its attention layers computed for N sequences of T tokens. The
    artifact's `constants` go to `kvq.attend_layer` and `kvq.append`.

    keys, values: one array [N, T, K, D] a layer (a list, or one array with the layers in front, on the host or not), as
    `attend_layer` takes them: before RoPE where the shape has a rope. These alone calibrate AQUA-KV and centre=mean.
    key_gradients, value_gradients: for KVQuant, likewise, of each sequence's mean loss. Their squares are the Fisher
    weights of its k-means; without them every entry weighs the same.
    queries [N, T, H, D] and outputs [H*D, E] (the output projection), one array a layer: for CommVQ, whose value
    encoder then also learns from errors of the attention output; without them from errors of the values alone.
    dtype: the cache's, as for `kvq.init_cache`. recipe: the method's own settings, such as
    `kvqjax.calibrate.aqua.Recipe()`. state, advance: as for `run`. Raises UserError for tensors that do not fit the
    shape, and for methods that need no calibration or a model's weights."""
    from kvqjax.calibrate.captured import Captured, fit_of

    method = parse(method)
    _check_needed(method, shape)
    optional = {"queries": queries, "outputs": outputs}
    optional |= {"key_gradients": key_gradients, "value_gradients": value_gradients}
    own = shape.alone
    for fit in needed(method, shape):
        fit_of(fit, method)
    data = Captured(shape=own, keys=keys, values=values, dtype=str(compute_dtype(dtype)), **optional)

    if recipe is not None and len(divided(method, shape)) > 1:
        raise UserError(
            f"{method}: a recipe is one calibration's; parts of this method are calibrated in different ways"
        )

    def one(part: Part, state: Path | None, advance) -> Artifact:
        found = fit_of(part.fit, method)(data, part.method, recipe, state=state, advance=advance)
        return _finite(found)

    return calibrated(method, shape, one, state, advance)
