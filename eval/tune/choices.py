"""A cache whose codecs are data: one compiled program measures every policy over a list of candidates.

The layer spec `Choice` holds every candidate. A layer's constants say by number which one its keys and which one its
values follow. The body stores what that candidate's decoder would give back, so tokens meet the same keys and values
as in the candidate's own cache, at the same time. Candidates that differ in their codecs alone share the vectors that
sinks, window and body hold. Layers of a chain are told what flows from the layer below when they encode; a reader finds
reconstructions and needs nothing of it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax.codecs import Exact
from kvqjax.methods.keys_values import PARTS, Pair, apart
from kvqjax.methods.layer_cache import Calibration, Chain, Clock, Maps, Storage, Wiring
from kvqjax.methods.spec import LayerSpec
from kvqjax.model.config import KVShape

__all__ = ["Choice", "chosen_constants"]

CHOSEN = "chosen"  # the group of constants that holds the numbers
# Fields of layer specs that say how vectors are encoded, not which vectors and when.
CODED = {"key", "value", "key_inputs", "value_inputs", "predictor", "rank", "copy", "start", "bits", "axis"} | {
    "accumulator", "latent", "scales"}  # fmt: skip


class Kind(NamedTuple):
    """Candidates that capture and expand alike: their numbers and wirings. `joint`: keys and values are one choice."""

    members: dict[int, Wiring]
    joint: bool

    @property
    def wiring(self) -> Wiring:
        return next(iter(self.members.values()))


def _likeness(number: int, spec: Any, wiring: Wiring):
    """What candidates of one kind have in common; one with calibrated constants is a kind of its own."""
    names = [field.name for field in dataclasses.fields(spec)]
    separable = apart(wiring) and {"key", "value"} <= set(names) and not wiring.wanted()
    if isinstance(spec, Pair) or not (separable or wiring.chain.carry):  # the windows of a pair are its parts' own
        return number
    return type(spec), *((name, getattr(spec, name)) for name in names if name not in CODED)


def _kinds(specs: tuple[LayerSpec, ...], shape: KVShape) -> list[Kind]:
    kinds: dict[Any, Kind] = {}
    for number, spec in enumerate(specs):
        wiring = spec.build(shape)
        kind = kinds.setdefault(_likeness(number, spec, wiring), Kind({}, not apart(wiring)))
        kind.members[number] = wiring
    return list(kinds.values())


def _table(numbers, count: int, default: int) -> np.ndarray:
    """Which branch candidate 0 .. count - 1 takes: its place in `numbers`, or `default`."""
    places = {number: place for place, number in enumerate(numbers)}
    return np.asarray([places.get(number, default) for number in range(count)], np.int32)


def _of_candidate(constants: dict, number: int) -> dict:
    """A candidate's own constants."""
    head = f"{number}."
    return {name.removeprefix(head): group for name, group in constants.items() if name.startswith(head)}


def _name(number: int, source: str) -> str:
    """Name a source of kind `number` in the mixed layer."""
    return f"{source}{number}"


class Mixed(NamedTuple):
    """The maps of a layer that follows one of `count` candidates, sorted into `kinds`."""

    kinds: list[Kind]
    count: int

    def capture(self, weights, constants, projected, positions):
        return {
            _name(n, source): x
            for n, kind in enumerate(self.kinds)
            for source, x in kind.wiring.maps.capture(
                weights, _of_candidate(constants, next(iter(kind.members))), projected, positions
            ).items()
        }

    def encode(self, constants, tile, carry):
        recon = {}
        for n, kind in enumerate(self.kinds):
            names = tuple(s for s in kind.wiring.storage.sources if _name(n, s) in tile)
            for sources in [names] if kind.joint and names else [(s,) for s in names]:
                inputs = {s: tile[_name(n, s)] for s in sources}
                outputs, carry = self._recoded(constants, kind, sources, inputs, carry)
                recon |= {_name(n, s): x for s, x in outputs.items()}
        return {source: {"x": x} for source, x in recon.items()}, recon, carry

    def _recoded(self, constants, kind: Kind, sources: tuple[str, ...], tile: dict, carry: dict):
        """Encode and decode a tile by the chosen candidate; return it with the carry for the layer above. Both stay as
        they are where a candidate of another kind is chosen."""

        def by(number):
            def recode(x, carry):
                _, outputs, above = kind.members[number].maps.encode(_of_candidate(constants, number), x, carry)
                return {s: outputs[s].astype(x[s].dtype) for s in sources}, above

            return recode

        index = constants[CHOSEN]["v" if sources == ("v",) else "k"]
        table = _table(kind.members, self.count, len(kind.members))
        branches = [*map(by, kind.members), lambda x, carry: (x, carry)]
        return jax.lax.switch(jnp.asarray(table)[index], branches, tile, carry)

    @staticmethod
    def decode(constants, payload, carry):
        return {source: stored["x"] for source, stored in payload.items()}, carry

    def expand(self, weights, constants, sources, positions):
        place = {number: n for n, kind in enumerate(self.kinds) for number in kind.members}
        table = jnp.asarray(np.asarray([place[number] for number in range(self.count)], np.int32))

        def expanded(part: int):
            def by(n, kind):
                stored = {s: sources[_name(n, s)] for s in kind.wiring.storage.sources}
                groups = _of_candidate(constants, next(iter(kind.members)))  # members of a kind expand alike
                return lambda: kind.wiring.maps.expand(weights, groups, stored, positions)[part]

            branches = [by(n, kind) for n, kind in enumerate(self.kinds)]
            return jax.lax.switch(table[constants[CHOSEN][PARTS[part]]], branches)

        return expanded(0), expanded(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A layer whose keys and values follow one of `specs` each."""

    specs: tuple[LayerSpec, ...]

    def build(self, config: KVShape) -> Wiring:
        kinds = _kinds(self.specs, config)
        storages = [kind.wiring.storage for kind in kinds]
        widths = {_name(n, s): width for n, storage in enumerate(storages) for s, width in storage.sources.items()}
        clocks: dict[tuple[int, int], list[str]] = {}
        for number, storage in enumerate(storages):
            for clock in storage.clocks:
                clocks.setdefault(clock[1:], []).extend(_name(number, source) for source in clock.sources)
        members = {number: wiring for kind in kinds for number, wiring in kind.members.items()}
        shapes = {f"{n}.{group}": names for n, w in members.items() for group, names in w.wanted().items()}
        kinds_of = {key: kind for wiring in members.values() for key, kind in wiring.calibration.kinds.items()}
        carried = {source: width for wiring in members.values() for source, width in wiring.chain.carry.items()}
        mixed = Mixed(kinds, len(self.specs))
        return Wiring(
            Storage(
                sources=widths,
                codecs={source: Exact().build(width) for source, width in widths.items()},
                clocks=tuple(Clock(tuple(sources), *times) for times, sources in clocks.items()),
            ),
            Maps(mixed.capture, mixed.encode, mixed.decode, mixed.expand),
            chain=Chain(carried, flows=False),  # what is read is stored as it is
            calibration=Calibration(shapes | {CHOSEN: {"k": (), "v": ()}}, kinds_of),
        )


def chosen_constants(policy: np.ndarray, fixed: dict[str, dict], runs) -> tuple[dict, ...]:
    """Constants of a model for `Choice`: the candidates' own, {"3.k": {name: [L, ...]}}, and `policy` [L, 2], which
    says by number what each layer's keys and values follow."""
    numbers = {"k": jnp.asarray(policy[:, 0], jnp.int32), "v": jnp.asarray(policy[:, 1], jnp.int32)}
    cut = lambda run: jax.tree.map(lambda x: x[run.first : run.first + run.count], fixed | {CHOSEN: numbers})  # noqa: E731
    return tuple(cut(run) for run in runs)
