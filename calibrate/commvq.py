"""CommVQ's codebooks and value encoders from calibration text (arXiv 2506.18879), layer by layer.

A layer's codebook is fitted by EM to its keys before RoPE (commvq_em.py), its value encoder is
trained on its values (commvq_values.py). Then the exact layer is applied, so that no layer sees
compressed keys or values of another. The hidden states and activations of one layer are held, for
all sequences.

A layer's random numbers come from the seed and the layer's number, and the state can be kept on
disk after every layer. So a calibration that continues from its state ends with the same bytes.
"""

import dataclasses
import itertools
import operator
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

# For small models; the paper takes 1024 documents of up to 8192 tokens.
DEFAULT_SEQUENCES = 32
DEFAULT_LENGTH = 512
REPORTS = 10  # reports of a value encoder's training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a layer is calibrated.

    Attributes:
        key_tokens: most tokens that EM sees, evenly spread over the text. The value encoder is
            trained on all tokens.
        keys: the settings of EM.
        values: the settings of the value encoder's training.
        seed: of all random numbers.
    """

    key_tokens: int = 8192
    keys: EMSettings = dataclasses.field(default_factory=EMSettings)
    values: ValueSettings = dataclasses.field(default_factory=ValueSettings)
    seed: int = 0


# --- One layer


def _fit_keys(key, k, spec, recipe: Recipe, sinks: int, tell):
    """Fit the codebook of one layer.

    Returns:
        The codebook, and for each round the error, a mean over groups, and the largest number of
        iterations of a group.
    """
    k = k[:, sinks:].reshape(-1, k.shape[-1])
    count = min(recipe.key_tokens, len(k))
    evenly_spaced = np.linspace(0, len(k) - 1, count).astype(int)
    rounds = []

    def report(index, fit):
        error = float(fit.error.mean())
        iterations = int(fit.steps.max())
        rounds.append((error, iterations))
        tell(f"keys, round {index + 1}: error {error:.4g} after {iterations} iterations")

    codebook = fit_keys(key, k[evenly_spaced], spec, recipe.keys, report)
    return codebook, rounds


def _fit_values(key, data: Activations, spec, settings: ValueSettings, tell, shape: KVShape):
    """Train one layer's value codec.

    Returns:
        Its constants, and (loss, plain error) averaged over each part of the training.
    """
    start_key, run_key = jax.random.split(key)
    state = values.start(start_key, data.v, spec, settings)
    attention = values.Seen(shape.window, shape.softcap, shape.common_chunked)
    losses = []
    for index in range(REPORTS):
        # Parts differ by one step where REPORTS does not divide the steps.
        first = settings.steps * index // REPORTS
        stop = settings.steps * (index + 1) // REPORTS
        count = jnp.int32(stop - first)
        state, means = values.train(run_key, state, data, settings, count, attention)
        loss, error = np.asarray(means, float).tolist()
        losses.append((loss, error))
        tell(f"values, step {int(state.step)}: loss {loss:.4g}, error {error:.4g}")
    return values.constants(state), losses


def _fresh_state(data: Layers, layers) -> dict:
    """Make the state before the first layer. Its arrays have their final shapes, as a state on disk
    needs."""
    constants = []
    reports = []
    for number, layer in enumerate(layers):
        if not isinstance(layer, CommVQLayer):
            constants.append({})
            reports.append({"keys": np.zeros((0, 2)), "values": np.zeros((0, 2))})
            continue
        blank = {}
        for source, codec in layer.build(data.shape.layer(number)).storage.codecs.items():
            sizes = codec.needs.items()
            blank[source] = {name: np.zeros(size, np.float32) for name, size in sizes}
        constants.append(blank)
        rounds = layer.key(data.shape).rounds
        reports.append({"keys": np.zeros((rounds, 2)), "values": np.zeros((REPORTS, 2))})
    return {"done": np.int64(0), "h": data.h, "constants": constants, "reports": reports}


def _advance_layer(data: Layers, method: Method, state: dict, recipe: Recipe, tell) -> dict:
    """Calibrate one more layer, and return the state after it."""
    index = int(state["done"])
    layer = method.layers(data.shape)[index]
    k, activations, h = data.read(index, state["h"])
    constants = list(state["constants"])
    reports = list(state["reports"])
    if isinstance(layer, CommVQLayer):
        layer_key = jax.random.fold_in(jax.random.key(recipe.seed), index)
        em_key, training_key = jax.random.split(layer_key)
        codebook, rounds = _fit_keys(em_key, k, layer.key(data.shape), recipe, method.sinks, tell)
        value_constants, losses = _fit_values(
            training_key, activations, layer.value(), recipe.values, tell, data.shape.layer(index)
        )
        learnt = {"k": {"codebook": codebook}, "v": value_constants}
        constants[index] = jax.tree.map(np.asarray, learnt)
        reports[index] = {"keys": np.asarray(rounds, float), "values": np.asarray(losses, float)}
    return {"h": np.asarray(h, np.float32), "constants": constants, "reports": reports}


# --- Calibrations of a model and of tensors


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Count the floating point operations that `calibrate` takes at least on `count` sequences of
    `length` tokens. They are an exact pass, and for each layer a training and EM whose rounds all
    end as early as they may."""
    recipe = Recipe()
    config = model.config
    layers = [layer for layer in method.layers(config) if isinstance(layer, CommVQLayer)]
    key_tokens = min(recipe.key_tokens, count * length)
    em = sum(em_work(layer.key(config), config, key_tokens, recipe.keys) for layer in layers)
    training = sum(values.work(layer.value(), config, length, recipe.values) for layer in layers)
    return count * prompt_operations(model.config, 0, length) + em + training


def calibrate(model: Model, method: Method, tokens: Int[np.ndarray, "N T"], **options) -> Artifact:
    """Fit codebooks and encoders of `method` for `model` from N sequences of T tokens; `options` as
    in `fit`."""
    return fit(of_model(model, method, np.asarray(tokens)), method, **options)


def fit_captured(
    data: Captured, method: Method, recipe: Recipe | None = None, **options
) -> Artifact:
    """Fit codebooks and encoders of `method` from tensors of any model; `options` as in `fit`.
    Without queries the value encoders learn from errors of the values alone."""
    recipe = recipe or Recipe()
    if data.queries is None:
        plain = dataclasses.replace(recipe.values, attention=0.0)
        recipe = dataclasses.replace(recipe, values=plain)
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
        data: the activations of the layers.
        method: says which layers are CommVQ's, and how many rounds and bits they have.
        state: a file that keeps the progress after every layer. A run that was killed continues
            from it.
        advance: advance(number, total) is called after each round of EM and each part of a
            training.
        note: note(text) is called with a line of errors and losses for each of these.

    Returns:
        The method with its constants.

    Raises:
        UserError: no layer is CommVQ's, or there are fewer tokens than a minibatch of EM has.
    """
    layers = method.layers(data.shape)
    count, length = data.h.shape[:2]
    steps = []  # how often `advance` is called for every layer
    for layer in layers:
        is_fitted = isinstance(layer, CommVQLayer)
        steps.append(layer.key(data.shape).rounds + REPORTS if is_fitted else 0)
    if not sum(steps):
        raise UserError(f"{method}: has no layer of CommVQ to calibrate")
    if count * (length - method.sinks) < recipe.keys.batch:
        raise UserError(
            f"calibration tokens are {(count, length)}; wanted [N, T] with {recipe.keys.batch} tokens or more"
        )
    owner = identity(data.fingerprint, repr(method), repr(recipe), *data.parts)

    def step(progress):
        index = int(progress["done"])
        # A calibration that continues counts the layers before it.
        next_numbers = itertools.count(sum(steps[:index]) + 1)

        def tell(text):
            note(f"layer {index}: {text}")
            advance(next(next_numbers), sum(steps))

        return _advance_layer(data, method, progress, recipe, tell)

    progress = stepped(_fresh_state(data, layers), len(layers), step, state, owner)
    constants = by_run(method, data.shape, progress["constants"])
    about = {"sequences": count, "tokens": length, **dataclasses.asdict(recipe)}
    about["layers"] = jax.tree.map(operator.methodcaller("tolist"), progress["reports"])
    return Artifact(method, constants, data.fingerprint, about)
