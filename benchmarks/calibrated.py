"""Models with a method's constants, by recipes small enough for the bundled models, and windows of symbols."""

import importlib
import time

import numpy as np

from kvqjax._errors import UserError
from kvqjax.calibrate import CALIBRATIONS, centre, commvq, learns, rotation, xquant
from kvqjax.calibrate.commvq_values import ValueSettings
from kvqjax.eval.synthetic import key_value_recall, repeated_spans
from kvqjax.methods import Method
from kvqjax.model.loading import Model

__all__ = ["COMMVQ", "calibrated", "pair_rows", "span_rows"]

COMMVQ = commvq.Recipe(key_tokens=2048, values=ValueSettings(steps=200))  # a quarter and a third of the defaults


def calibrated(model: Model, method: Method, tokens: np.ndarray, recipe=None) -> tuple[Model, float]:
    """The model with what `method` needs, learnt from `tokens` [N, T] by its own `recipe` if one is given, and the
    seconds that took."""
    begun, name = time.perf_counter(), method.name.partition(":")[0]
    if centre.needs_only_means(method, model.config):
        artifact = centre.calibrate(model, method, tokens)
    elif rotation.needs_rotations(method, model.config):
        artifact = rotation.calibrate(model, method, tokens)
    elif name in CALIBRATIONS and learns(method, model.config):
        recipe = recipe or (COMMVQ if name == "commvq" else None)
        module, options = importlib.import_module(CALIBRATIONS[name]), {"recipe": recipe} if recipe else {}
        artifact = module.calibrate(model, method, tokens, **options)
    else:
        ready = xquant.prepared(model, method)
        return ready, time.perf_counter() - begun if ready.constants else 0.0
    return model.with_artifact(artifact), time.perf_counter() - begun


def _encode(model: Model, text: str) -> list[int]:
    return model.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def span_rows(model: Model, rows: int, length: int, seed: int, span: int = 0) -> np.ndarray:
    """[rows, length] ids: after the first token a span of random symbols, then the same again; several such problems of
    `span` tokens each where it is given."""
    rng, span = np.random.default_rng((1, seed)), span or length - 1
    size = lambda text: len(_encode(model, text))  # noqa: E731
    out = np.zeros((rows, length), np.int32)
    for row in out:
        ids = [model.config.bos_id]
        while len(ids) < length:
            problem = repeated_spans(rng, span, size)
            ids += _encode(model, problem.prompt + problem.answer)
        row[:] = ids[:length]
    return out


def pair_rows(model: Model, rows: int, length: int, seed: int, task=key_value_recall) -> tuple[np.ndarray, np.ndarray]:
    """[rows, length] ids of stored pairs and one question each with its answer, and which of tokens 1 to length-1 the
    answer is. Depths are spread from the first pair to the last; rows end in padding that no answer sees."""
    rng, ids = np.random.default_rng((2, seed)), np.full((rows, length), model.config.bos_id, np.int32)
    asked = np.zeros((rows, length - 1), bool)
    size = lambda text: len(_encode(model, text))  # noqa: E731
    for number in range(rows):
        # A few tokens less than there is room for: parts counted one by one can be longer together.
        problem = task(rng, length - 8, size, number / max(rows - 1, 1))
        prompt, whole = _encode(model, problem.prompt), _encode(model, problem.prompt + problem.answer)
        if whole[: len(prompt)] != prompt:
            raise UserError("this tokenizer merges prompt and answer")
        ids[number, 1 : 1 + len(whole)] = whole
        asked[number, len(prompt) : len(whole)] = True
    return ids, asked
