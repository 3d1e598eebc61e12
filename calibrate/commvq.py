"""CommVQ's codebooks and value encoders from calibration text (arXiv 2506.18879), layer by layer.

Each layer sees the clean stream: its keys before RoPE go through EM (commvq_em.py), its values train an encoder
(commvq_values.py), then the exact layer is applied. Of all sequences one layer's hidden states and activations are
held. A layer's random numbers come from the seed and its number, so a calibration continued from its state on disk,
kept after every layer, ends with the same bytes.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.calibrate import commvq_values as values
from kvqjax.calibrate.activations import Captured
from kvqjax.calibrate.commvq_em import EMSettings, em_work, fit_keys
from kvqjax.calibrate.commvq_values import ValueSettings
from kvqjax.calibrate.layerwise import Activations, Layers, of_captured, of_model
from kvqjax.calibrate.parts import by_run
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method
from kvqjax.methods.papers.commvq import CommVQLayer
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model

__all__ = ["DEFAULT_LENGTH", "DEFAULT_SEQUENCES", "Layers", "Recipe", "calibrate", "fit", "fit_captured", "work"]

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 32, 512  # for small models; the paper takes 1024 documents of up to 8192 tokens
PARTS = 10  # reports of a value encoder's training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a layer is calibrated.

    Attributes:
        key_tokens: tokens that EM sees at most, evenly spread over the text. The value encoder sees all of it.
        keys: the settings of EM.
        values: those of the value encoder's training.
        seed: of all random numbers.
    """

    key_tokens: int = 8192
    keys: EMSettings = dataclasses.field(default_factory=EMSettings)
    values: ValueSettings = dataclasses.field(default_factory=ValueSettings)
    seed: int = 0


# --- One layer


def _fit_keys(key, k, spec, recipe: Recipe, sinks: int, tell):
    """Fit the codebook of one layer. Also give the error of each round, its mean over groups, and the most iterations
    that a group took."""
    k = k[:, sinks:].reshape(-1, k.shape[-1])
    chosen = np.linspace(0, len(k) - 1, min(recipe.key_tokens, len(k))).astype(int)
    rounds = []

    def report(index, fit):
        rounds.append((float(fit.error.mean()), int(fit.steps.max())))
        tell(f"keys, round {index + 1}: error {rounds[-1][0]:.4g} after {rounds[-1][1]} iterations")

    return fit_keys(key, k[chosen], spec, recipe.keys, report), rounds


def _fit_values(key, data: Activations, spec, settings: ValueSettings, tell, shape: KVShape):
    """Train one layer's value codec. Returns its constants, and (loss, plain error) averaged over each part of the
    training."""
    start_key, run_key = jax.random.split(key)
    state, losses = values.start(start_key, data.v, spec, settings), []
    for index in range(PARTS):
        count = settings.steps * (index + 1) // PARTS - settings.steps * index // PARTS
        state, means = values.train(
            run_key,
            state,
            data,
            settings,
            jnp.int32(count),
            values.Seen(shape.window, shape.softcap, shape.common_chunked),
        )
        losses.append(tuple(np.asarray(means, float).tolist()))
        tell(f"values, step {int(state.step)}: loss {losses[-1][0]:.4g}, error {losses[-1][1]:.4g}")
    return values.constants(state), losses


def _empty(data: Layers, layers) -> dict:
    constants, reports = [], []
    for layer in layers:
        shape = data.shape.layer(len(constants))
        codecs = layer.build(shape).storage.codecs.items() if isinstance(layer, CommVQLayer) else ()
        constants.append({s: {n: np.zeros(size, np.float32) for n, size in c.needs.items()} for s, c in codecs})
        rounds = layer.key(data.shape).rounds if codecs else 0
        reports.append({"keys": np.zeros((rounds, 2)), "values": np.zeros((PARTS if codecs else 0, 2))})
    return {"done": np.int64(0), "h": data.h, "constants": constants, "reports": reports}


def _advance_layer(data: Layers, method: Method, state: dict, recipe: Recipe, tell) -> dict:
    """Calibrate one more layer. Returns the state after it."""
    index = int(state["done"])
    layer = method.layers(data.shape)[index]
    k, activations, h = data.read(index, state["h"])
    constants, reports = list(state["constants"]), list(state["reports"])
    if isinstance(layer, CommVQLayer):
        key, value = jax.random.split(jax.random.fold_in(jax.random.key(recipe.seed), index))
        book, rounds = _fit_keys(key, k, layer.key(data.shape), recipe, method.sinks, tell)
        learnt, losses = _fit_values(value, activations, layer.value(), recipe.values, tell, data.shape.layer(index))
        constants[index] = jax.tree.map(np.asarray, {"k": {"codebook": book}, "v": learnt})
        reports[index] = {"keys": np.asarray(rounds, float), "values": np.asarray(losses, float)}
    return {"h": np.asarray(h, np.float32), "constants": constants, "reports": reports}


# --- The doors


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Count the floating point operations of `calibrate` on `count` sequences of `length` tokens, at least: those of an
    exact pass, and for each layer of EM without improvement and of a training."""
    recipe, config = Recipe(), model.config
    layers = [layer for layer in method.layers(config) if isinstance(layer, CommVQLayer)]
    em = sum(
        em_work(layer.key(config), config, min(recipe.key_tokens, count * length), recipe.keys) for layer in layers
    )
    training = sum(values.work(layer.value(), config, length, recipe.values) for layer in layers)
    return count * prompt_operations(model.config, 0, length) + em + training


def calibrate(model: Model, method: Method, tokens: Int[np.ndarray, "N T"], **options) -> Artifact:
    """Fit codebooks and encoders of `method` for `model` from N sequences of T tokens; `options` as in `fit`."""
    return fit(of_model(model, method, np.asarray(tokens)), method, **options)


def fit_captured(data: Captured, method: Method, recipe: Recipe | None = None, **options) -> Artifact:
    """Fit codebooks and encoders of `method` from tensors of any model; `options` as in `fit`. Without queries the
    value encoders learn from errors of the values alone."""
    recipe = recipe or Recipe()
    if data.queries is None:
        recipe = dataclasses.replace(recipe, values=dataclasses.replace(recipe.values, attention=0.0))
    return fit(of_captured(data, method), method, recipe=recipe, **options)


def fit(
    data: Layers,
    method: Method,
    *,
    recipe: Recipe = Recipe(),
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda number, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> Artifact:
    """Fit codebooks and encoders of `method` from layers of any model.

    Args:
        data: what the layers compute.
        method: which layers are CommVQ's, and how many rounds and bits they have.
        recipe: the settings.
        state: a file that keeps the progress after every layer: a run that was killed continues there.
        advance: `advance(number, total)` is told each round of EM and each part of a training.
        note: is told their errors and losses, a line each.

    Returns:
        The method with its constants.

    Raises:
        UserError: no layer is CommVQ's, or there are fewer tokens than EM weighs at a time.
    """
    layers, (count, length) = method.layers(data.shape), data.h.shape[:2]
    steps = [layer.key(data.shape).rounds + PARTS if isinstance(layer, CommVQLayer) else 0 for layer in layers]
    if not sum(steps):
        raise UserError(f"{method}: has no layer of CommVQ to calibrate")
    if count * (length - method.sinks) < recipe.keys.batch:
        raise UserError(
            f"calibration tokens are {(count, length)}; wanted [N, T] with {recipe.keys.batch} tokens or more"
        )
    owner = identity(data.fingerprint, repr(method), repr(recipe), *data.parts)

    def step(progress):
        index = int(progress["done"])
        numbers = iter(range(sum(steps[:index]) + 1, sum(steps) + 1))

        def tell(text):
            note(f"layer {index}: {text}")
            advance(next(numbers), sum(steps))

        return _advance_layer(data, method, progress, recipe, tell)

    progress = stepped(_empty(data, layers), len(layers), step, state, owner)
    about = {"sequences": count, "tokens": length, **dataclasses.asdict(recipe)}
    about["layers"] = [{name: rows.tolist() for name, rows in report.items()} for report in progress["reports"]]
    return Artifact(method, by_run(method, data.shape, progress["constants"]), data.fingerprint, about)
