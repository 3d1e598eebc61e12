"""Models with a method's constants, by recipes small enough for the bundled models, and windows of symbols."""

import time

import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.calibrate import commvq, learns, xquant
from kvqjax.calibrate.commvq_values import ValueSettings
from kvqjax.calibrate.parts import Part, fitter
from kvqjax.calibrate.parts import calibrated as by_parts
from kvqjax.eval.synthetic import key_value_recall, repeated_spans
from kvqjax.methods import Method
from kvqjax.model.loading import Model

__all__ = ["COMMVQ", "calibrated", "pair_rows", "span_rows"]

COMMVQ = commvq.Recipe(key_tokens=2048, values=ValueSettings(steps=200))  # a quarter and a third of the defaults


def calibrated(model: Model, method: Method, tokens: np.ndarray, recipe=None) -> tuple[Model, float]:
    """The model with what `method` needs, learnt from `tokens` [N, T] by its own `recipe` if one is given, and the
    seconds that took."""
    begun = time.perf_counter()
    if not learns(method, model.config):
        ready = xquant.prepared(model, method)
        return ready, time.perf_counter() - begun if ready.constants else 0.0

    def one(part: Part, state, advance) -> Artifact:
        module = fitter(part.fit)
        chosen = recipe or (COMMVQ if module is commvq else None)
        return module.calibrate(model, part.method, tokens, **({"recipe": chosen} if chosen else {}))

    artifact = by_parts(method, model.config, one, None, lambda done, total: None)
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
