"""Models with a method's constants, by recipes small enough for the bundled models, and windows of
symbols."""

import time
from pathlib import Path

import numpy as np

from kvqjax.cache.artifacts import Artifact
from kvqjax.calibrate import commvq, learns, xquant
from kvqjax.calibrate.parts import Part, fitter
from kvqjax.calibrate.parts import calibrated as by_parts
from kvqjax.eval.synthetic import repeated_spans
from kvqjax.methods import Method
from kvqjax.model.loading import Model

COMMVQ = commvq.Recipe(key_tokens=4096)  # half of the default


def learnt(
    model: Model, method: Method, tokens: np.ndarray, recipe=None, state: Path | None = None
) -> Artifact:
    """Calibrate `method` on `tokens` [N, T], by `recipe` if one is given. `state` names a file that
    keeps the progress, so that a run which was stopped goes on."""

    def fit_part(part: Part, state: Path | None, advance) -> Artifact:
        module = fitter(part.fit)
        chosen = recipe or (COMMVQ if module is commvq else None)
        return module.calibrate(
            model, part.method, tokens, state=state, **({"recipe": chosen} if chosen else {})
        )

    return by_parts(method, model.config, fit_part, state, lambda done, total: None)


def calibrated(
    model: Model, method: Method, tokens: np.ndarray, recipe=None
) -> tuple[Model, float]:
    """The model with the constants that `method` needs, and the seconds to learn them from `tokens`
    [N, T], by `recipe` if one is given."""
    begun = time.perf_counter()
    if not learns(method, model.config):
        prepared_model = xquant.prepared(model, method)
        return prepared_model, time.perf_counter() - begun if prepared_model.constants else 0.0
    artifact = learnt(model, method, tokens, recipe)
    return model.with_artifact(artifact), time.perf_counter() - begun


def _encode(model: Model, text: str) -> list[int]:
    return model.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def span_rows(model: Model, rows: int, length: int, seed: int, span: int = 0) -> np.ndarray:
    """[rows, length] ids: after the first token a span of random symbols, then the same again;
    several such problems of `span` tokens each where it is given."""
    rng, span = np.random.default_rng((1, seed)), span or length - 1

    def size(text):
        return len(_encode(model, text))

    out = np.zeros((rows, length), np.int32)
    for row in out:
        ids = [model.config.bos_id]
        while len(ids) < length:
            problem = repeated_spans(rng, span, size)
            ids += _encode(model, problem.prompt + problem.answer)
        row[:] = ids[:length]
    return out
