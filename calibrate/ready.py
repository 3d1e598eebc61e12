"""A model for every method: with the constants of its artifact, or with those that follow from the weights alone."""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import load_artifact
from kvqjax.calibrate.xquant import prepared
from kvqjax.methods import Method
from kvqjax.methods.spec import calibrated_part
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import check_constants

__all__ = ["with_constants"]


def with_constants(model: Model, methods: Sequence[Method], folders: Sequence[Path]) -> list[tuple[Model, Method]]:
    """Pair every method with a model that holds its constants.

    An artifact serves every policy of the same codecs and layers, whatever its sinks, windows and kept tokens. What a
    method derives from the weights alone (xquant) is computed here when there is no artifact of it.

    Args:
        model: the model without constants.
        methods: the methods, each of which gives a pair.
        folders: artifacts, each of which must serve a method.

    Raises:
        UserError: an artifact that serves no method, or constants that no artifact brings.
    """
    part = functools.partial(calibrated_part, config=model.config)
    artifacts = {part(artifact.method): artifact for artifact in map(load_artifact, folders)}
    unused = set(artifacts) - {part(method) for method in methods}
    if unused:
        raise UserError(f"--artifact for {', '.join(sorted(map(str, unused)))}, which no --cache names")
    pairs = []
    for method in methods:
        artifact = artifacts.get(part(method))
        ready = prepared(model, method) if artifact is None else model.with_artifact(artifact)
        check_constants(ready, method)
        pairs.append((ready, method))
    if model.rules is None:
        return pairs
    place = model.rules.everywhere
    return [(m.replace(constants=jax.device_put(jax.tree.map(np.asarray, m.constants), place)), n) for m, n in pairs]
