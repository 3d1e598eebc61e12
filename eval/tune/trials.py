"""Policies as something that can be measured: a model with constants, a method whose layers follow
them, and the artifact of what a policy needs in its own cache.

A policy is an int array [L, 2]. `Trial` mixes the candidates that may stand in any layer. `Chain`
is a method whose layers feed each other (AQUA-KV, XQuant-CL), with exceptions in single layers:
there keys and values agree, and OWN is the chain itself. One program measures all policies of
either: `Choice` holds every method, constants say by number which one a layer follows.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.layout import CacheLayout
from kvqjax.cache.runs import chains, runs_for
from kvqjax.eval.stamp import Bar
from kvqjax.eval.tune.candidates import Candidates, Learnt, bare, bytes_by_layer, stretches
from kvqjax.eval.tune.choices import Choice, chosen_constants
from kvqjax.eval.tune.measure import Meter, Subject
from kvqjax.methods import Method, policy
from kvqjax.methods.spec import LayerSpec
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import stacked

OWN = 1  # the chain itself among a chain's parts, after the exact cache


class _Numbered:
    """A model whose layers follow methods by number. `fixed` are the methods' constants, {"3.k":
    {name: [L, ...]}}."""

    def __init__(
        self, model: Model, specs: Sequence[LayerSpec], sinks: int, fixed: dict[str, dict]
    ):
        self.model = model.replace(constants=(), params=stacked(model.params))
        self.dtype = str(model.params["embed"].dtype)
        self.choice = Method(name="choice", layer=Choice(specs=tuple(specs)), sinks=sinks)
        self.runs = runs_for(self.choice, model.config, self.dtype)
        self.fixed = fixed

    def _following(self, numbers: np.ndarray) -> Model:
        """The model whose layers follow the methods `numbers` [L, 2]."""
        constants = chosen_constants(numbers, self.fixed, self.runs)
        if self.model.rules is not None:
            constants = jax.device_put(constants, self.model.rules.everywhere)
        return self.model.replace(constants=constants)

    def _artifact(self, method: Method, numbers: np.ndarray) -> Artifact | None:
        """The constants of `method`, whose layers are those that `numbers` [L, 2] name; None where
        it needs none."""
        constants = []
        for run in runs_for(method, self.model.config, self.dtype):
            layers, (key, value) = (
                slice(run.first, run.first + run.count),
                map(int, numbers[run.first]),
            )
            groups = {}
            for group, names in run.wiring.wanted().items():
                # Constants of values are the values' method's, all others the keys'.
                arrays = self.fixed[f"{value if group == 'v' else key}.{group}"]
                groups[group] = {name: arrays[name][layers] for name in names}
            constants.append(groups)
        return (
            Artifact(method, tuple(constants), self.model.fingerprint, {"tuned": True})
            if any(constants)
            else None
        )


# --- Candidates that may stand in any layer


def choice_of(candidates: Candidates) -> Method:
    """The method whose layers follow any of the parts, as their constants say."""
    specs = tuple(method.layer for method in candidates.parts)
    return Method(name="choice", layer=Choice(specs=specs), sinks=candidates.sinks)


class Trial(_Numbered):
    """The model and its candidates with what they have learnt. A policy has the numbers of the
    parts."""

    def __init__(self, model: Model, candidates: Candidates, learnt: Learnt):
        fixed = {
            f"{n}.{group}": names
            for n, groups in learnt.fixed.items()
            for group, names in groups.items()
        }
        super().__init__(
            model, [method.layer for method in candidates.parts], candidates.sinks, fixed
        )
        self.candidates, self.ready = candidates, learnt.ready

    def subject(self, chosen: np.ndarray) -> Subject:
        """A policy to be measured."""
        name = " ".join(f"{a}.{b}" for a, b in chosen)
        return name, functools.partial(self._following, chosen), self.choice

    def method(self, chosen: np.ndarray) -> Method:
        """The policy as a method with a cache of its own."""
        return self.candidates.method(chosen)

    def artifact(self, chosen: np.ndarray) -> Artifact | None:
        """The constants that the policy's layers need, each from its candidate's; None where none
        does."""
        return self._artifact(self.method(chosen), chosen)

    def others(self) -> list[Subject]:
        """The candidates for all layers, each through its own cache."""
        pairs = zip(self.ready, self.candidates.others, strict=True)
        return [
            (f"={method}", lambda ready_model=ready_model: ready_model, method)
            for ready_model, method in pairs
        ]

    def losses(self, meter: Meter, bar: Bar) -> Float[np.ndarray, "L 2 C"]:
        """`Table.loss`: the divergence of every candidate in one place, all else exact."""
        layers, parts = self.model.config.num_layers, self.candidates.parts
        loss, places, policies = np.zeros((layers, 2, len(parts))), [], []
        for layer, candidate in np.ndindex(layers, len(parts)):
            if candidate == 0:  # the exact cache
                continue
            for part in (slice(None),) if self.candidates.joint[candidate] else (0, 1):
                chosen = np.zeros((layers, 2), np.int64)
                chosen[layer, part] = candidate
                places.append((layer, part, candidate))
                policies.append(chosen)
        means = meter([self.subject(chosen) for chosen in policies], bar("each part alone")).mean(1)
        for place, value in zip(places, means, strict=True):
            loss[place] = value / 2 if isinstance(place[1], slice) else value
        return loss


# --- Methods whose layers feed each other, with exceptions


def is_chain(method: Method, shape: KVShape) -> bool:
    """Say whether something flows from layer to layer."""
    return any(run.wiring.chain.carry for run in runs_for(method, shape))


def exceptions(candidates: Candidates, chain: Method, shape: KVShape) -> tuple[Method, ...]:
    """The candidates that may stand in single layers of `chain`, the exact cache first: those of
    its window and unit that need no calibration there, each once as the chain admits it."""
    by_spec: dict = {}
    for part in candidates.parts:
        changed = policy(chain, {0: bare(part)})
        try:
            chains(CacheLayout(shape=shape, method=changed, capacity=1, dtype="float32"))
        except (UserError, ValueError):
            continue
        spec = changed.layers(shape)[0]
        if not spec.build(shape).wanted():
            by_spec.setdefault(spec, part)
    return tuple(by_spec.values())


class Chain(_Numbered):
    """A chain with its constants, and the candidates that may stand in its layers: `parts`, OWN
    being the chain. A policy has numbers of `parts`; `numbers` [L, parts] says which of the chosen
    methods each is in a layer, since a chain's own layers may differ."""

    def __init__(self, model: Model, candidates: Candidates, chain: Method, ready_model: Model):
        shape = model.config.kv_shape
        exact, *members = exceptions(candidates, chain, shape)
        self.own, self.parts = chain, (exact, chain, *members)
        foreign = [policy(chain, {0: bare(part)}).layers(shape)[0] for part in (exact, *members)]
        layers = chain.layers(shape)
        specs = list(dict.fromkeys(layers))  # the chain's own, then the exceptions'
        start, *tail = range(len(specs), len(specs) + len(foreign))
        self.numbers = np.asarray([[start, specs.index(spec), *tail] for spec in layers])
        super().__init__(model, [*specs, *foreign], candidates.sinks, {})
        self.fixed = self._own_constants(ready_model)

    def _own_constants(self, ready_model: Model) -> dict[str, dict]:
        """The chain's constants by the number of their layers' spec, 0 in other layers."""
        out: dict[str, dict] = {}
        runs = runs_for(self.own, self.model.config, self.dtype)
        for run, groups in zip(runs, ready_model.constants, strict=False):
            layers = slice(run.first, run.first + run.count)
            for group, names in groups.items():
                arrays = out.setdefault(f"{self.numbers[run.first, OWN]}.{group}", {})
                for name, x in names.items():
                    blank = jnp.zeros((len(self.numbers), *x.shape[1:]), x.dtype)
                    arrays[name] = arrays.get(name, blank).at[layers].set(jnp.asarray(x))
        return out

    def _chosen_numbers(self, chosen: np.ndarray) -> np.ndarray:
        return np.take_along_axis(self.numbers, chosen, 1)

    def subject(self, chosen: np.ndarray) -> Subject:
        """A policy to be measured."""
        name = f"{self.own} with " + " ".join(map(str, chosen[:, 0]))
        return name, functools.partial(self._following, self._chosen_numbers(chosen)), self.choice

    def method(self, chosen: np.ndarray) -> Method:
        """The chain with its exceptions as a policy."""
        return policy(
            self.own,
            {at: bare(self.parts[part]) for at, (part, _) in stretches(chosen) if part != OWN},
        )

    def artifact(self, chosen: np.ndarray) -> Artifact | None:
        """The constants of the layers that are the chain's own, fitted in the chain without
        exceptions."""
        return self._artifact(self.method(chosen), self._chosen_numbers(chosen))

    def bytes(self, context: int) -> Float[np.ndarray, "L C C"]:
        """`Table.bytes`: keys and values of a layer are one choice."""
        layers, count = len(self.numbers), len(self.parts)
        out = np.full((layers, count, count), np.inf)
        for part in range(count):
            out[:, part, part] = bytes_by_layer(
                self.model, self.method(np.full((layers, 2), part)), context
            )
        return out

    def losses(self, meter: Meter, bar: Bar) -> Float[np.ndarray, "L 2 C"]:
        """`Table.loss`: a layer's is by how much its exception alone changes the chain's
        divergence, which is itself spread over the layers."""
        layers, count = len(self.numbers), len(self.parts)
        places = [(layer, part) for layer in range(layers) for part in range(count) if part != OWN]
        changed = [np.full((layers, 2), OWN) for _ in range(1 + len(places))]
        for chosen, (layer, part) in zip(changed[1:], places, strict=True):
            chosen[layer] = part
        base, *means = meter(
            [self.subject(chosen) for chosen in changed], bar(f"exceptions in {self.own}")
        ).mean(1)
        loss = np.full((layers, 2, count), base / layers / 2)
        for (layer, part), value in zip(places, means, strict=True):
            loss[layer, :, part] += (value - base) / 2
        return loss
