"""The bound of a decode step, what its rows hold, and the bytes of a cache that a step must read.

The bound is what an ideal bf16 cache takes: weights once, and each row's keys and values once, at the chip's bandwidth.
An embedding table that is not the head is looked up, not read."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from kvqjax.cache import CacheLayout, allocate_cache, runs_of
from kvqjax.cache.accounting import array_bytes
from kvqjax.hardware.aot import layout_for
from kvqjax.hardware.planner import DEVICES, parameter_shapes
from kvqjax.methods import Method
from kvqjax.model.config import ModelConfig

NAMES = {"v7x": "tpu7x"}  # as this page calls a chip -> as the planner does
CLOCKS = {"v5e": 1.5e9, "v6e": 1.75e9, "tpu7x": 2.2e9}  # cycles a second that are assumed


class Bound(NamedTuple):
    """Bytes that a step reads at least."""

    weights: float
    attention: float

    @property
    def bytes(self) -> float:
        return self.weights + self.attention

    def seconds(self, chip: str) -> float:
        return self.bytes / bandwidth(chip)


def bandwidth(chip: str) -> float:
    """Bytes a second."""
    return DEVICES[NAMES.get(chip, chip)].bandwidth * 1e9


def make_layout(config: ModelConfig, method: Method, context: int, chip: str) -> CacheLayout:
    return layout_for(config, method, context, NAMES.get(chip, chip))


def cache_bytes(layout: CacheLayout, batch: int) -> float:
    """Of the whole cache."""
    return array_bytes(jax.eval_shape(functools.partial(allocate_cache, layout, batch)))


def token_bytes(layout: CacheLayout) -> float:
    """Of one encoded token of one row and layer, on average over the layers that have a body."""
    cache = jax.eval_shape(functools.partial(allocate_cache, layout, 1))
    runs = [(run, state) for run, state in zip(runs_of(layout), cache.runs, strict=True) if run.slots]
    each = [array_bytes(state.body) / run.slots for run, state in runs]
    return sum(each) / sum(run.count for run, _ in runs) if runs else 0.0


def row_lengths(context: int, batch: int, ragged: bool) -> list[int]:
    """Tokens of every row: all `context`, or evenly from a batch's part of it to all of it."""
    return [context * (row + 1) // batch if ragged else context for row in range(batch)]


def _clocks(layout: CacheLayout) -> list:
    """Clocks that fall due now and then, each once."""
    return list(
        {clock[1:]: clock for run in runs_of(layout) for clock in run.wiring.storage.clocks if clock.unit > 1}.values()
    )


def _units(layout: CacheLayout, clock, length: int) -> int:
    return max(0, (length - layout.method.sinks - clock.window) // clock.unit)


def resting(layout: CacheLayout, length: int) -> int:
    """The most tokens that a row holds, below `length`, before a step that encodes none of those units which fall due
    now and then."""
    held = length - 1
    while any(_units(layout, c, held + 1) > _units(layout, c, held) for c in _clocks(layout)):
        held -= 1
    return held


def encoding(layout: CacheLayout, length: int) -> list[tuple[int, int]]:
    """(tokens held, unit) before a step at which a clock falls due, for each such clock."""
    found = []
    for clock in _clocks(layout):
        units = _units(layout, clock, length)
        if units and any(run.slots for run in runs_of(layout)):
            found.append((units * clock.unit + clock.window + layout.method.sinks - 1, clock.unit))
    return found


def facts(layout: CacheLayout, held: list[int]) -> dict[str, np.ndarray]:
    """What is known of a decode loop's arguments, by their names in its program: rows hold `held` tokens, none is
    done."""
    rows = np.asarray(held, np.int32)
    known = {
        "state.cache.lengths": rows,
        "state.cache.overflow": np.zeros(rows.shape, bool),
        "state.done": np.zeros(rows.shape, bool),
        "state.owed": np.ones(rows.shape, bool),
        "state.made": np.ones(rows.shape, np.int32),
        "limit": np.int32(16),
    }
    for number, run in enumerate(runs_of(layout)):
        for index, clock in enumerate(run.wiring.storage.clocks):
            units = [_units(layout, clock, n) if run.slots else 0 for n in held]
            known[f"state.cache.runs[{number}].flushed[{index}]"] = np.asarray(units, np.int32)
    return {name: np.asarray(value) for name, value in known.items()}


def bound(config: ModelConfig, lengths: list[int]) -> Bound:
    """Of one step whose rows hold so many tokens; layers that slide read no more than their window."""
    shapes = parameter_shapes(config)
    weights = array_bytes(shapes)
    if not config.tied_embeddings:
        weights -= array_bytes(shapes["embed"])
    tokens = sum(min(length, window or length) for window in config.windows for length in lengths)
    return Bound(weights, tokens * 2 * config.kv_width * 2)
