"""Counts the cost of a compiled decode step or prompt on a chip, and the least that it can cost."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.compiled_cost import tpu
from benchmarks.compiled_cost.hlo import (
    PARTS,
    Computation,
    Instruction,
    Program,
    dimensions,
    elements,
    numbers,
)
from benchmarks.compiled_cost.walk import Bytes, Visit, Walk, kernels, walk
from benchmarks.schedule import estimate
from kvqjax.cache import CacheLayout, allocate_cache, runs_of
from kvqjax.cache.accounting import array_bytes
from kvqjax.generation.loop import STRIDE
from kvqjax.hardware.devices import DEVICES
from kvqjax.hardware.planner import parameter_shapes
from kvqjax.model.config import ModelConfig

# Seconds of a kernel's launch on a GPU. By itself a launch takes about 3 us; but XLA records nearly
# a whole decode step into one command buffer (a CUDA graph), where it takes 1.0 us on an H100
# (docs/speed.md).
LAUNCH = 1e-6
SYNC = 22.5e-6  # seconds in which a GPU's host reads a number and decides, likewise
ASSUMPTIONS = {
    "gpu": (
        f"a kernel takes the longest of its launch ({LAUNCH * 1e6:.0f} us, in a command buffer), its bytes at the "
        "chip's bandwidth and its products at the dense 16-bit peak",
        f"a host synchronisation takes {SYNC * 1e6:.1f} us; nothing stays in the second-level cache",
        "what a kernel computes beside products takes no time: on an H100 steps took 1.15 to 1.5 times the estimate",
    ),
    "tpu": (
        "XLA's estimated cycles, one after the other, at "
        + ", ".join(f"{clock / 1e9} GHz ({chip})" for chip, clock in tpu.CLOCKS.items()),
        "a kernel's tile takes the longer of its bundles and its bytes at the chip's bandwidth",
    ),
}
# Cycles and bytes of one call of our own kernel on a TPU.
Price = Callable[[Visit], tuple[float, Bytes]]


class Costs(NamedTuple):
    """Launches, host synchronisations, and by part bytes and seconds; `unsure` is the walk's."""

    launches: float
    syncs: int
    bytes: dict[str, Bytes]
    seconds: dict[str, float]
    unsure: list[str]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def bandwidth(chip: str) -> float:
    """Return bytes a second of a chip's memory."""
    return DEVICES[chip].bandwidth * 1e9


def peak(chip: str) -> float:
    """Return the dense 16-bit operations a second of a chip."""
    return DEVICES[chip].tflops * 1e12


def operations(program: Program, instruction: Instruction, computation: Computation) -> float:
    """Return the operations of the matrix products in one kernel, two a multiply-accumulate."""
    if instruction.op == "fusion":
        fused = program.computations[instruction.called]
        return sum(operations(program, line, fused) for line in fused.instructions.values())
    library = (
        instruction.op == "custom-call" and 'custom_call_target="__cublas' in instruction.attributes
    )
    if not library and instruction.op != "dot":
        return 0.0
    pattern = (
        r'"lhs_contracting_dimensions":\[([\d",]*)\]'
        if library
        else r"lhs_contracting_dims=\{([\d,]*)\}"
    )
    contracted = re.search(pattern, instruction.attributes)
    if contracted is None:
        raise ValueError(f"{instruction.name}: which axes it sums over is not said")
    operand = dimensions(computation.shapes(instruction)[0])
    depth = math.prod(operand[axis] for axis in numbers(contracted[1].replace('"', "")))
    return 2.0 * elements(instruction.shape) * depth


def costs(steps: Walk, chip: str, price: Price, stride: int = 1) -> Costs:
    """Add up what a walk launches.

    Args:
        steps: The walk.
        chip: The chip.
        price: Prices our own kernels on a TPU.
        stride: Steps over which what is done once a call is spread.
    """
    clock = tpu.CLOCKS.get(chip)
    launches, moved, seconds = 0.0, dict.fromkeys(PARTS, Bytes(0.0, 0.0)), dict.fromkeys(PARTS, 0.0)
    for visit, traffic in kernels(steps):
        times, part = visit.times / (stride if visit.once else 1), visit.part
        if clock is None:
            products = operations(steps.program, visit.instruction, visit.computation) / peak(chip)
            duration = max(LAUNCH, traffic.moved / bandwidth(chip), products)
        elif tpu.is_kernel(visit.instruction):
            (cycles, traffic), part = price(visit), "attention"
            duration = cycles / clock
        else:
            duration = estimate(visit.instruction.attributes) / clock
        launches += times
        seconds[part] += times * duration
        moved[part] = Bytes(
            *(total + times * new for total, new in zip(moved[part], traffic, strict=True))
        )
    syncs = 0 if clock else steps.syncs
    seconds["rest"] += SYNC * syncs
    return Costs(launches, syncs, moved, seconds, steps.unsure)


def as_record(result: Costs) -> dict:
    """Return costs as JSON has them."""
    moved = {
        part: {"read": round(traffic.read), "written": round(traffic.written)}
        for part, traffic in result.bytes.items()
    }
    record = {"launches": round(result.launches), "syncs": result.syncs, "bytes": moved}
    return record | {"seconds": result.seconds, "unsure": result.unsure}


# What a cache holds.


def _clocks(layout: CacheLayout) -> list:
    """Return the clocks by which several tokens at a time are encoded, each once."""
    clocks = (
        clock for run in runs_of(layout) for clock in run.wiring.storage.clocks if clock.unit > 1
    )
    return [*{clock[1:]: clock for clock in clocks}.values()]


def _units(layout: CacheLayout, clock, length: int) -> int:
    return max(0, (length - layout.method.sinks - clock.window) // clock.unit)


def resting(layout: CacheLayout, length: int) -> int:
    """Return the most tokens, below `length`, of a row whose next step encodes no unit of several
    tokens."""
    tokens = length - 1
    while any(
        _units(layout, clock, tokens + 1) > _units(layout, clock, tokens)
        for clock in _clocks(layout)
    ):
        tokens -= 1
    return tokens


def encoding(layout: CacheLayout, length: int) -> list[tuple[int, int]]:
    """Return for every clock the most tokens, below `length`, before a step that encodes a unit,
    and the unit's."""
    flushes = []
    for clock in _clocks(layout):
        units = _units(layout, clock, length)
        if units and any(run.slots for run in runs_of(layout)):
            flushes.append(
                (units * clock.unit + clock.window + layout.method.sinks - 1, clock.unit)
            )
    return flushes


def known_arguments(
    layout: CacheLayout, rows: list[int], new: int | None = None
) -> dict[str, np.ndarray]:
    """Return what is known of a program's arguments, by their names in it.

    Args:
        layout: The cache's layout.
        rows: Tokens that every row holds.
        new: Tokens that a prompt or chunk adds to every row; None for a decode loop, none of whose
            rows is done.
    """
    lengths, fill = np.asarray(rows, np.int32), functools.partial(np.full, len(rows))
    if new is None:
        arguments = {
            "state.done": fill(False),
            "state.owed": fill(True),
            "state.made": fill(1, np.int32),
        }
        arguments["limit"], prefix = np.asarray(16, np.int32), "state.cache."
    else:
        arguments, prefix = {"counts": fill(new, np.int32), "cache.finite": lengths}, "cache."
    arguments |= {prefix + "lengths": lengths, prefix + "overflow": fill(False)}
    for number, run in enumerate(runs_of(layout)):
        for index, clock in enumerate(run.wiring.storage.clocks):
            units = [_units(layout, clock, tokens) if run.slots else 0 for tokens in rows]
            arguments[f"{prefix}runs[{number}].flushed[{index}]"] = np.asarray(units, np.int32)
    return arguments


def _encoded(layout: CacheLayout, rows: list[int]) -> list[int]:
    """Return the encoded tokens of every row, of the layers that have most of them."""
    clocks = [clock for run in runs_of(layout) if run.slots for clock in run.wiring.storage.clocks]
    return [
        max((_units(layout, clock, tokens) * clock.unit for clock in clocks), default=0)
        for tokens in rows
    ]


def _token_bytes(layout: CacheLayout) -> float:
    """Return the bytes of one encoded token in one layer, on average over the layers that have a
    body."""
    cache = jax.eval_shape(functools.partial(allocate_cache, layout, 1))
    runs = [
        (run, state) for run, state in zip(runs_of(layout), cache.runs, strict=True) if run.slots
    ]
    total = sum(array_bytes(state.body) / run.slots for run, state in runs)
    return total / sum(run.count for run, _ in runs) if runs else 0.0


# A decode step.


class Bound(NamedTuple):
    """Bytes that a step reads at least: of weights, and of keys and values of 16 bits."""

    weights: float
    attention: float

    @property
    def total(self) -> float:
        return self.weights + self.attention


def bound(config: ModelConfig, lengths: list[int]) -> Bound:
    """Return the bound of a step whose rows hold `lengths` tokens; sliding layers read their window
    at most."""
    shapes = parameter_shapes(config)
    weights = array_bytes(shapes)
    if not config.tied_embeddings:
        weights -= array_bytes(shapes["embed"])  # looked up, not read
    tokens = sum(min(length, window or length) for window in config.windows for length in lengths)
    return Bound(weights, tokens * 2 * config.kv_width * 2)


def step_costs(
    program: Program, chip: str, layout: CacheLayout, rows: list[int], folder: Path
) -> Costs:
    """Return the costs of one step whose rows hold `rows` tokens."""
    tokens, token_bytes = _encoded(layout, rows), _token_bytes(layout)

    def price(visit):
        return tpu.packed_cost(visit, folder, chip, tokens, token_bytes)

    return costs(walk(program, known_arguments(layout, rows)), chip, price, STRIDE)


def step_record(
    program: Program, chip: str, layout: CacheLayout, lengths: list[int], folder: Path
) -> dict:
    """Return the costs of one step of rows of one length, and what encoding adds to it on average.

    A unit of several tokens falls due in one step of many, at another step in every row.
    """
    rows = [resting(layout, length) for length in lengths]
    result, added = step_costs(program, chip, layout, rows, folder), 0.0
    for tokens, unit in encoding(layout, lengths[-1]):
        flush = step_costs(program, chip, layout, [*rows[1:], tokens], folder)
        added += max(0.0, flush.total - result.total) / unit * len(rows)
    return as_record(result) | {"encoding_seconds": added}


def step_summary(record: dict, chip: str, config: ModelConfig, lengths: list[int]) -> dict:
    """Return a step's costs over its bound: of parts, bytes on a GPU and time on a TPU."""
    least, moved = (
        bound(config, lengths),
        {part: sum(traffic.values()) for part, traffic in record["bytes"].items()},
    )
    if chip in tpu.CLOCKS:
        work = {part: seconds * bandwidth(chip) for part, seconds in record["seconds"].items()}
    else:
        work = moved
    summary = {"bytes_over_bound": sum(moved.values()) / least.total}
    summary |= {
        f"{part}_over_bound": work[part] / getattr(least, part) for part in ("attention", "weights")
    }
    estimated = 1e3 * (sum(record["seconds"].values()) + record["encoding_seconds"])
    bound_ms = 1e3 * least.total / bandwidth(chip)
    summary |= {
        "estimated_ms": estimated,
        "bound_ms": bound_ms,
        "time_over_bound": estimated / bound_ms,
    }
    return summary | {
        "bound_bytes": {"attention": round(least.attention), "weights": round(least.weights)}
    }


# A prompt, or a chunk of one.


def prompt_record(
    program: Program,
    chip: str,
    config: ModelConfig,
    layout: CacheLayout,
    tokens: int,
    new: int,
    folder: Path,
) -> dict:
    """Return the costs of `new` tokens of one row that holds `tokens`."""

    def price(visit):
        return tpu.splash_cost(visit, folder, chip, tokens and new, config.windows[0])

    arguments = known_arguments(layout, [tokens], new)
    return as_record(costs(walk(program, arguments, per_step=False), chip, price))
