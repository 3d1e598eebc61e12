"""Calibration: a method's constants for one model, from text or from the weights alone."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np

from kvqjax.artifacts import Artifact, flatten
from kvqjax.calibrate import centre, xquant
from kvqjax.decoder import stacked
from kvqjax.doors import check_model
from kvqjax.errors import UserError
from kvqjax.methods import MethodLike, parse
from kvqjax.model import Model

__all__ = ["CALIBRATIONS", "module_of", "run", "sequences"]

# Method name -> module with `calibrate(model, method, tokens, state=, advance=) -> Artifact` and the recipe's size.
CALIBRATIONS = {
    "aqua": "kvqjax.calibrate.aqua",
    "commvq": "kvqjax.calibrate.commvq",
    "kvquant": "kvqjax.calibrate.kvquant",
}
FROM_WEIGHTS = ("xquant", "xquant_cl")  # constants are factors of the model's own weights


def module_of(method: MethodLike, model: Model) -> ModuleType | None:
    """What learns the method's constants from text; None where there is nothing to learn."""
    if centre.needs_only_means(method, model.config):
        return centre
    name = method.name.partition(":")[0]
    return importlib.import_module(CALIBRATIONS[name]) if name in CALIBRATIONS else None


def sequences(model: Model, texts: Sequence[str], count: int, length: int) -> np.ndarray:
    """Token ids [at most count, length] of the texts, joined; shorter models and texts give fewer and shorter rows."""
    length = min(length, model.config.max_position)
    ids = np.asarray([t for text in texts for t in model.encode(text)], np.int32)
    rows = min(count, len(ids) // length)
    if rows == 0:
        raise UserError(f"the calibration text has {len(ids)} tokens, fewer than one sequence of {length}")
    return ids[: rows * length].reshape(rows, length)


def run(
    model: Model,
    method: MethodLike,
    texts: str | Sequence[str] = (),
    *,
    count: int | None = None,
    length: int | None = None,
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
    announce: Callable[[str], None] = lambda text: None,
) -> Artifact:
    """Calibrate `method` for `model`. texts: what the model reads (not needed by xquant, whose constants come from the
    weights). count, length: sequences and their tokens; by default the method's published recipe, cut to the model's
    context. state: a file that keeps the progress, so that a killed run continues and gives the same constants.
    `announce(text)` is told what will be read, `advance(done, total)` each step. Raises UserError for methods that need
    no calibration."""
    check_model(model)
    method = parse(method)
    model = model.replace(params=stacked(model.params))  # calibrations loop over layers by number
    if method.name.partition(":")[0] in FROM_WEIGHTS:
        return Artifact(method, xquant.constants(model.params, model.config, method), model.fingerprint)
    module = module_of(method, model)
    if module is None:
        known = ", ".join([*CALIBRATIONS, *FROM_WEIGHTS])
        raise UserError(f"{method} needs no calibration; calibrated: {known}, and keys with centre=mean")
    for option, value in {"count": count, "length": length}.items():
        if value is not None and value < 1:
            raise UserError(f"{option}={value}; at least 1 is wanted")
    texts = [texts] if isinstance(texts, str) else texts
    tokens = sequences(model, texts, count or module.DEFAULT_SEQUENCES, length or module.DEFAULT_LENGTH)
    announce(f"{tokens.shape[0]} sequences of {tokens.shape[1]} tokens")
    artifact = module.calibrate(model, method, tokens, state=state, advance=advance)
    for name, array in flatten(artifact.constants).items():
        if not bool(jnp.isfinite(array).all()):
            raise UserError(f"constant {name} came out NaN or infinite; check the weights, or try dtype='f32'")
    return artifact
