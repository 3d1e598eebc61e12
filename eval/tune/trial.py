"""A policy over the candidates as something that can be measured: a model with constants, and a method."""

import functools

import jax
import numpy as np

from kvqjax.cache.runs import runs_for
from kvqjax.eval.tune.candidates import Candidates
from kvqjax.eval.tune.choices import Choice, chosen_constants
from kvqjax.eval.tune.constants import Learnt
from kvqjax.eval.tune.measure import Subject
from kvqjax.methods import Method
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import stacked

__all__ = ["Trial", "choice_of"]


def choice_of(found: Candidates) -> Method:
    """The method whose layers follow any of the parts, as their constants say."""
    return Method(name="choice", layer=Choice(specs=tuple(m.layer for m in found.parts)), sinks=found.sinks)


class Trial:
    """The model and its candidates with what they have learnt."""

    def __init__(self, model: Model, found: Candidates, learnt: Learnt):
        self.model, self.found = model.replace(constants=(), params=stacked(model.params)), found
        self.fixed, self.ready = learnt
        self.method = choice_of(found)
        self.own = {f"{n}.{group}": names for n, groups in self.fixed.items() for group, names in groups.items()}
        dtype = str(model.params["embed"].dtype)
        self.runs = runs_for(self.method, model.config, dtype)

    def subject(self, policy: np.ndarray) -> Subject:
        name = " ".join(f"{a}.{b}" for a, b in policy)
        return name, functools.partial(self._with, policy), self.method

    def _with(self, policy: np.ndarray) -> Model:
        constants = chosen_constants(policy, self.own, self.runs)
        if self.model.rules is not None:
            constants = jax.device_put(constants, self.model.rules.everywhere)
        return self.model.replace(constants=constants)

    def others(self) -> list[Subject]:
        """The candidates for all layers, each through its own cache."""
        pairs = zip(self.ready, self.found.others, strict=True)
        return [(f"={method}", lambda ready=ready: ready, method) for ready, method in pairs]

    def alone(self) -> list[tuple[int, int, int, np.ndarray]]:
        """(layer, part, candidate, policy) of every candidate in one place and exact elsewhere; `part` 2 is both."""
        out, layers = [], self.model.config.num_layers
        for layer in range(layers):
            for candidate in range(1, len(self.found.parts)):
                for part in (2,) if self.found.whole[candidate] else (0, 1):
                    policy = np.zeros((layers, 2), np.int64)
                    policy[layer, slice(None) if part == 2 else part] = candidate
                    out.append((layer, part, candidate, policy))
        return out
