"""Methods whose layers feed each other (AQUA-KV, XQuant-CL) as candidates: whole chains, with exceptions in layers.

One program measures a chain with any exceptions: `Choice` over the chain's own layers and the methods that it admits in
their place. A policy is an int array [L, 2] as everywhere; here keys and values agree, and OWN is the chain itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import chains, runs_of
from kvqjax.eval.tune.candidates import Candidates, bare, bytes_by_layer, stretches
from kvqjax.eval.tune.choices import Choice, chosen_constants
from kvqjax.eval.tune.constants import Bar
from kvqjax.eval.tune.measure import Meter, Subject
from kvqjax.methods import Method, policy
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import stacked

__all__ = ["OWN", "Chain", "chain_bytes", "chain_losses", "exceptions", "is_chain"]

OWN = 1  # after the exact cache


def _layout(method: Method, shape: KVShape, dtype: str = "float32") -> CacheLayout:
    return CacheLayout(shape=shape, method=method, capacity=1, dtype=dtype)


def is_chain(method: Method, shape: KVShape) -> bool:
    """Whether something flows from layer to layer."""
    return any(run.wiring.chain.carry for run in runs_of(_layout(method, shape)))


def exceptions(found: Candidates, own: Method, shape: KVShape) -> tuple[Method, ...]:
    """The candidates that may stand in single layers of the chain `own`, the exact cache first: those of its window and
    unit that need no calibration there, each once as the chain admits it."""
    taken: dict = {}
    for part in found.parts:
        changed = policy(own, {0: bare(part)})
        try:
            chains(_layout(changed, shape))
        except (UserError, ValueError):
            continue
        spec = changed.layers(shape)[0]
        if not spec.build(shape).wanted():
            taken.setdefault(spec, part)
    return tuple(taken.values())


class Chain:
    """A chain with its constants, and the candidates that may stand in its layers: `parts`, OWN being the chain."""

    def __init__(self, model: Model, found: Candidates, own: Method, ready: Model):
        shape, dtype = model.config.kv_shape, str(model.params["embed"].dtype)
        first, *others = exceptions(found, own, shape)
        self.model, self.own = model.replace(constants=(), params=stacked(model.params)), own
        self.parts = (first, own, *others)
        layers = [policy(own, {0: bare(part)}).layers(shape)[0] for part in (first, *others)]
        self.specs = list(dict.fromkeys(own.layers(shape)))  # the chain's own, then the exceptions'
        numbers = [self.specs.index(spec) for spec in own.layers(shape)]
        start, *rest = range(len(self.specs), len(self.specs) + len(layers))
        self.numbers = np.asarray([[start, number, *rest] for number in numbers])  # [L, parts]
        self.choice = Method(name="choice", layer=Choice(specs=(*self.specs, *layers)), sinks=found.sinks)
        self.runs = runs_of(_layout(self.choice, shape, dtype))
        self.fixed = self._whole(runs_of(_layout(own, shape, dtype)), ready.constants)

    def _whole(self, runs, constants) -> dict[str, dict]:
        """The chain's constants {"0.k": {name: [L, ...]}} by the number of their layers' spec, 0 in other layers."""
        out: dict[str, dict] = {}
        for run, groups in zip(runs, constants, strict=False):
            layers = slice(run.first, run.first + run.count)
            for group, names in groups.items():
                into = out.setdefault(f"{self.numbers[run.first, OWN]}.{group}", {})
                for name, x in names.items():
                    blank = jnp.zeros((len(self.numbers), *x.shape[1:]), x.dtype)
                    into[name] = into.get(name, blank).at[layers].set(jnp.asarray(x))
        return out

    def subject(self, chosen: np.ndarray) -> Subject:
        name = f"{self.own} with " + " ".join(map(str, chosen[:, 0]))
        return name, functools.partial(self._with, chosen), self.choice

    def _with(self, chosen: np.ndarray) -> Model:
        numbers = np.take_along_axis(self.numbers, chosen, 1)
        constants = chosen_constants(numbers, self.fixed, self.runs)
        if self.model.rules is not None:
            constants = jax.device_put(constants, self.model.rules.everywhere)
        return self.model.replace(constants=constants)

    def method(self, chosen: np.ndarray) -> Method:
        """The chain with its exceptions as a policy."""
        return policy(self.own, {at: bare(self.parts[part]) for at, (part, _) in stretches(chosen) if part != OWN})

    def artifact(self, chosen: np.ndarray) -> Artifact | None:
        """The constants of the layers that are the chain's own, fitted in the chain without exceptions."""
        method, shape = self.method(chosen), self.model.config.kv_shape
        specs, constants = method.layers(shape), []
        for run in runs_of(_layout(method, shape, str(self.model.params["embed"].dtype))):
            layers, wanted = slice(run.first, run.first + run.count), run.wiring.wanted()
            number = self.specs.index(specs[run.first]) if wanted else 0  # exceptions want nothing
            cut = lambda group, names, at=layers, n=number: {x: self.fixed[f"{n}.{group}"][x][at] for x in names}  # noqa: E731
            constants.append({group: cut(group, names) for group, names in wanted.items()})
        return Artifact(method, tuple(constants), self.model.fingerprint, {"tuned": True}) if any(constants) else None


def chain_bytes(chain: Chain, context: int) -> np.ndarray:
    """`Table.bytes`: keys and values of a layer are one choice."""
    layers, count = chain.numbers.shape[0], len(chain.parts)
    out = np.full((layers, count, count), np.inf)
    for part in range(count):
        out[:, part, part] = bytes_by_layer(chain.model, chain.method(np.full((layers, 2), part)), context)
    return out


def chain_losses(chain: Chain, meter: Meter, bar: Bar) -> np.ndarray:
    """`Table.loss`: a layer's is by how much its exception alone changes the chain's divergence, which is itself spread
    over the layers."""
    layers, count = chain.numbers.shape[0], len(chain.parts)
    places = [(layer, part) for layer in range(layers) for part in range(count) if part != OWN]
    changed = [np.full((layers, 2), OWN) for _ in range(1 + len(places))]
    for chosen, (layer, part) in zip(changed[1:], places, strict=True):
        chosen[layer] = part
    base, *found = meter([chain.subject(chosen) for chosen in changed], bar(f"exceptions in {chain.own}")).mean(1)
    loss = np.full((layers, 2, count), base / layers / 2)
    for (layer, part), value in zip(places, found, strict=True):
        loss[layer, :, part] += (value - base) / 2
    return loss
