"""A decode step's account: a program's launches, synchronisations, bytes or cycles, beside the bound."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.schedule import estimate
from benchmarks.step_cost import tpu
from benchmarks.step_cost.bound import CLOCKS, NAMES, Bound, bandwidth, bound, encoding, facts, resting, token_bytes
from benchmarks.step_cost.gpu import Bytes, kernels
from benchmarks.step_cost.hlo import Program
from benchmarks.step_cost.walk import walk
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.generation.loop import STRIDE
from kvqjax.model.config import ModelConfig

LAUNCH, SYNC = 3e-6, 8e-6  # seconds
PARTS = ("attention", "weights", "rest")
ASSUMPTIONS = {
    "gpu": [
        f"a kernel takes the longer of its launch ({LAUNCH * 1e6:.0f} us) and its bytes at the chip's bandwidth",
        f"a host synchronisation takes {SYNC * 1e6:.0f} us",
        "no CUDA graphs; nothing stays in the second-level cache; no kernel is bound by arithmetic",
    ],
    "tpu": [
        "XLA's estimated cycles, one after the other, at "
        + ", ".join(f"{CLOCKS[NAMES.get(chip, chip)] / 1e9} GHz ({chip})" for chip in ("v5e", "v6e", "v7x")),
        "a kernel's tile takes the longer of its bundles and its bytes at the chip's bandwidth",
    ],
    "both": [
        f"what is done once a call counts for {STRIDE} steps; encoding is spread over the steps between two units",
        "rows hold as many tokens as fit; ragged: evenly from a batch's part of the context to all of it",
    ],
}


class Costs(NamedTuple):
    """Of one step, by part: `work` is bytes on a GPU and cycles on a TPU; `seconds` of the device alone."""

    launches: int
    syncs: int
    bytes: dict[str, Bytes]
    work: dict[str, float]
    seconds: float
    unsure: list[str]


class Target(NamedTuple):
    """The chip, its schedules' bundles by kernel, and the cache that is read."""

    chip: str
    counted: dict[str, int]
    config: ModelConfig
    layout: CacheLayout

    @property
    def is_tpu(self) -> bool:
        return NAMES.get(self.chip, self.chip) in CLOCKS


def target_of(chip: str, config: ModelConfig, layout: CacheLayout, folder: Path | None = None) -> Target:
    return Target(chip, tpu.listings(folder) if folder else {}, config, layout)


def step(program: Program, target: Target, held: list[int]) -> Costs:
    """One step of rows that hold so many tokens; what is outside the loop over steps counts for a stride of them."""
    known = facts(target.layout, held)
    found, chip = walk(program, known), target.chip
    reading = tpu.Reading(_encoded(target.layout, known), token_bytes(target.layout))
    moved, work = dict.fromkeys(PARTS, Bytes(0.0, 0.0)), dict.fromkeys(PARTS, 0.0)
    launches, seconds, unsure = 0.0, 0.0, list(found.unsure)
    for visit, each in kernels(found):
        times = visit.times / (STRIDE if visit.once else 1)
        cycles = estimate(visit.instruction.more)
        if tpu.is_kernel(visit.instruction):
            cycles, each = tpu.kernel_cost(visit.instruction, target.counted, reading, chip)
        taken = max(LAUNCH, each.both / bandwidth(chip))
        if target.is_tpu:
            taken = cycles / CLOCKS[NAMES.get(chip, chip)]
        launches, seconds = launches + times, seconds + times * taken
        old = moved[visit.part]
        moved[visit.part] = Bytes(old.read + times * each.read, old.written + times * each.written)
        work[visit.part] += times * (cycles if target.is_tpu else each.both)
    syncs = 0 if target.is_tpu else found.syncs
    return Costs(round(launches), syncs, moved, work, seconds + SYNC * syncs, unsure)


def _encoded(layout: CacheLayout, known: dict[str, np.ndarray]) -> list[int]:
    """Body tokens of every row, of the run that has most of them."""
    each = [
        known[f"state.cache.runs[{number}].flushed[{index}]"] * clock.unit
        for number, run in enumerate(runs_of(layout))
        for index, clock in enumerate(run.wiring.storage.clocks)
    ]
    return np.max(each, axis=0).tolist()


def encoding_seconds(program: Program, target: Target, lengths: list[int], resting_seconds: float) -> float:
    """What encoding adds to a step on average: one row's units at the steps at which they fall due, times the rows."""
    extra = 0.0
    for held, unit in encoding(target.layout, lengths[-1]):
        rows = [*(resting(target.layout, length) for length in lengths[:-1]), held]
        extra += max(0.0, step(program, target, rows).seconds - resting_seconds) / unit
    return extra * len(lengths)


def account(program: Program, target: Target, lengths: list[int]) -> dict:
    """The account of a step beside its bound, as JSON has it."""
    held = [resting(target.layout, length) for length in lengths]
    found, least = step(program, target, held), bound(target.config, lengths)
    extra = encoding_seconds(program, target, lengths, found.seconds)
    total = sum(each.both for each in found.bytes.values())
    record = {"launches": found.launches, "syncs": found.syncs}
    record |= {"bytes_over_bound": round(total / least.bytes, 4)}
    record |= _over(found, least, target)
    record |= {"estimated_ms": round(1e3 * (found.seconds + extra), 4), "encoding_ms": round(1e3 * extra, 4)}
    record |= {"bound_ms": round(1e3 * least.seconds(target.chip), 4)}
    record["time_over_bound"] = round((found.seconds + extra) / least.seconds(target.chip), 4)
    record["bytes"] = {part: {"read": round(b.read), "written": round(b.written)} for part, b in found.bytes.items()}
    if target.is_tpu:
        record["cycles"] = {part: round(cycles) for part, cycles in found.work.items()}
    record["bound_bytes"] = {"attention": round(least.attention), "weights": round(least.weights)}
    return record | {"unsure": found.unsure}


def _over(found: Costs, least: Bound, target: Target) -> dict[str, float]:
    """Each part over its own bound, the rest over the whole bound: bytes on GPUs, cycles on TPUs."""
    per_byte = CLOCKS[NAMES.get(target.chip, target.chip)] / bandwidth(target.chip) if target.is_tpu else 1.0
    bounds = {"attention": least.attention, "weights": least.weights, "rest": least.bytes}
    return {f"{part}_over_bound": round(found.work[part] / (per_byte * bounds[part]), 4) for part in PARTS}
