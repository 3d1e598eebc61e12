"""A cache whose codecs are chosen by data: one compiled program measures every policy over a list
of candidates.

The layer spec `Choice` holds all candidates. A layer's constants have the number of the candidate
that its keys follow, and of the one that its values follow. The body stores reconstructions: the
vectors that this candidate would decode. So queries see the same keys and values, at the same
steps, as in the candidate's own cache.

Candidates that differ in their codecs alone are of one kind, and share the vectors in sinks, window
and body. In a chain only encoding takes the carry of the layer below; a reader finds
reconstructions and does not need it.
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

CHOSEN = "chosen"  # the group of constants with the numbers of candidates: {"k": [], "v": []}
# Fields of layer specs that say how vectors are encoded. The other fields say which vectors are
# encoded, and when.
CODED = {"key", "value", "key_inputs", "value_inputs", "predictor", "rank", "copy", "start", "bits", "axis"} | {
    "accumulator", "latent", "scales"}  # fmt: skip


class Kind(NamedTuple):
    """Candidates that capture and expand alike."""

    members: dict[int, Wiring]  # number of a candidate -> its wiring
    joint: bool  # keys and values of a layer follow the same candidate

    @property
    def wiring(self) -> Wiring:
        """The wiring of any member: its `capture` and `expand` are those of all."""
        return next(iter(self.members.values()))


def _likeness(number: int, spec: Any, wiring: Wiring):
    """Give a value that is equal for candidates of one kind. A candidate with calibrated constants,
    unless it is of a chain, is a kind of its own; so is a `Pair`, whose parts have windows of their
    own."""
    names = [field.name for field in dataclasses.fields(spec)]
    separable = apart(wiring) and {"key", "value"} <= set(names) and not wiring.wanted()
    if isinstance(spec, Pair) or not (separable or wiring.chain.carry):
        return number
    return type(spec), *((name, getattr(spec, name)) for name in names if name not in CODED)


def _kinds(specs: tuple[LayerSpec, ...], shape: KVShape) -> list[Kind]:
    """Sort candidates into kinds."""
    kinds: dict[Any, Kind] = {}
    for number, spec in enumerate(specs):
        wiring = spec.build(shape)
        kind = kinds.setdefault(_likeness(number, spec, wiring), Kind({}, not apart(wiring)))
        kind.members[number] = wiring
    return list(kinds.values())


def _table(numbers, count: int, default: int) -> np.ndarray:
    """Make the table of the branch that each of `count` candidates takes: its place in `numbers`,
    or `default`."""
    places = {number: place for place, number in enumerate(numbers)}
    return np.asarray([places.get(number, default) for number in range(count)], np.int32)


def _of_candidate(constants: dict, number: int) -> dict:
    """Give a candidate's own constants: candidate 3 has the groups "3.k", "3.v" and so on."""
    prefix = f"{number}."
    return {
        name.removeprefix(prefix): group
        for name, group in constants.items()
        if name.startswith(prefix)
    }


def _name(number: int, source: str) -> str:
    """Name a source of kind `number` in the mixed layer."""
    return f"{source}{number}"


class Mixed(NamedTuple):
    """The maps of a layer that follows one of `count` candidates, sorted into `kinds`."""

    kinds: list[Kind]
    count: int

    def capture(self, weights, constants, projected, positions):
        captured = {}
        for n, kind in enumerate(self.kinds):
            # Members of a kind capture alike.
            groups = _of_candidate(constants, next(iter(kind.members)))
            sources = kind.wiring.maps.capture(weights, groups, projected, positions)
            captured |= {_name(n, source): x for source, x in sources.items()}
        return captured

    def encode(self, constants, tile, carry):
        recon = {}
        for n, kind in enumerate(self.kinds):
            # The sources of this kind that leave the window now: together where they are one
            # choice, else one by one.
            names = tuple(s for s in kind.wiring.storage.sources if _name(n, s) in tile)
            for sources in [names] if kind.joint and names else [(s,) for s in names]:
                inputs = {s: tile[_name(n, s)] for s in sources}
                outputs, carry = self._recoded(constants, kind, sources, inputs, carry)
                recon |= {_name(n, s): x for s, x in outputs.items()}
        return {source: {"x": x} for source, x in recon.items()}, recon, carry

    def _recoded(self, constants, kind: Kind, sources: tuple[str, ...], tile: dict, carry: dict):
        """Encode and decode a tile by the chosen candidate.

        Args:
            constants: the layer's.
            kind: of the candidates that these sources belong to.
            sources: that are encoded together.
            tile: the sources' vectors.
            carry: of the layer below.

        Returns:
            The reconstructions and the carry for the layer above. Both are unchanged where a
            candidate of another kind is chosen.
        """

        def recode_by(number):
            def recode(x, carry):
                _, outputs, above = kind.members[number].maps.encode(
                    _of_candidate(constants, number), x, carry
                )
                return {s: outputs[s].astype(x[s].dtype) for s in sources}, above

            return recode

        # Sources that are one choice, "x" of XQuant among them, go by the number of keys.
        chosen = constants[CHOSEN]["v" if sources == ("v",) else "k"]
        unchanged = len(kind.members)  # the last branch
        table = _table(kind.members, self.count, unchanged)
        branches = [*map(recode_by, kind.members), lambda x, carry: (x, carry)]
        return jax.lax.switch(jnp.asarray(table)[chosen], branches, tile, carry)

    @staticmethod
    def decode(constants, payload, carry):
        return {source: stored["x"] for source, stored in payload.items()}, carry

    def expand(self, weights, constants, sources, positions):
        kind_of = {number: n for n, kind in enumerate(self.kinds) for number in kind.members}
        table = jnp.asarray(np.asarray([kind_of[number] for number in range(self.count)], np.int32))

        def expanded(part: int):
            """Expand keys (0) or values (1) by the kind of the candidate that they follow."""

            def expand_by(n, kind):
                stored = {s: sources[_name(n, s)] for s in kind.wiring.storage.sources}
                # Members of a kind expand alike.
                groups = _of_candidate(constants, next(iter(kind.members)))
                return lambda: kind.wiring.maps.expand(weights, groups, stored, positions)[part]

            branches = [expand_by(n, kind) for n, kind in enumerate(self.kinds)]
            return jax.lax.switch(table[constants[CHOSEN][PARTS[part]]], branches)

        return expanded(0), expanded(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A layer whose keys follow one of `specs`, and whose values follow one of them."""

    specs: tuple[LayerSpec, ...]

    def build(self, config: KVShape) -> Wiring:
        kinds = _kinds(self.specs, config)
        storages = [kind.wiring.storage for kind in kinds]
        widths = {
            _name(n, s): width
            for n, storage in enumerate(storages)
            for s, width in storage.sources.items()
        }
        clocks: dict[
            tuple[int, int], list[str]
        ] = {}  # (window, unit) -> sources that leave the window so
        for n, storage in enumerate(storages):
            for clock in storage.clocks:
                times = (clock.window, clock.unit)
                clocks.setdefault(times, []).extend(_name(n, source) for source in clock.sources)
        members = {number: wiring for kind in kinds for number, wiring in kind.members.items()}
        shapes = {
            f"{number}.{group}": names
            for number, wiring in members.items()
            for group, names in wiring.wanted().items()
        }
        kinds_of = {
            key: kind
            for wiring in members.values()
            for key, kind in wiring.calibration.kinds.items()
        }
        carried = {
            source: width
            for wiring in members.values()
            for source, width in wiring.chain.carry.items()
        }
        mixed = Mixed(kinds, len(self.specs))
        return Wiring(
            Storage(
                sources=widths,
                codecs={source: Exact().build(width) for source, width in widths.items()},
                clocks=tuple(Clock(tuple(sources), *times) for times, sources in clocks.items()),
            ),
            Maps(mixed.capture, mixed.encode, mixed.decode, mixed.expand),
            chain=Chain(
                carried, flows=False
            ),  # reconstructions are stored, so that a reader needs no carry
            calibration=Calibration(shapes | {CHOSEN: {"k": (), "v": ()}}, kinds_of),
        )


def chosen_constants(policy: np.ndarray, fixed: dict[str, dict], runs) -> tuple[dict, ...]:
    """Make the constants of a model whose layers are `Choice`.

    Args:
        policy: [L, 2], the numbers of the candidates that keys and values of each layer follow.
        fixed: the candidates' own constants, {"3.k": {name: [L, ...]}}.
        runs: of layers.

    Returns:
        The constants of each run.
    """
    numbers = {"k": jnp.asarray(policy[:, 0], jnp.int32), "v": jnp.asarray(policy[:, 1], jnp.int32)}
    of_model = fixed | {CHOSEN: numbers}

    def of_run(run):
        return jax.tree.map(lambda x: x[run.first : run.first + run.count], of_model)

    return tuple(of_run(run) for run in runs)
