"""The account of a compiled prompt: launches, bytes or cycles, and its share of the matrix unit's peak."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.schedule import estimate
from benchmarks.step_cost import tpu
from benchmarks.step_cost.account import LAUNCH, PARTS, SYNC
from benchmarks.step_cost.bound import CLOCKS, NAMES, bandwidth
from benchmarks.step_cost.gpu import Bytes, kernels
from benchmarks.step_cost.hlo import Computation, Instruction, Program, dimensions, elements, numbers
from benchmarks.step_cost.values import Values
from benchmarks.step_cost.walk import Visit, Walk, given, source_name
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.hardware.planner import DEVICES
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.model.config import ModelConfig

ASSUMPTIONS = {
    "gpu": [
        f"a kernel takes the longest of its launch ({LAUNCH * 1e6:.0f} us), its bytes at the chip's bandwidth and its "
        "products at the dense 16-bit peak",
        f"a host synchronisation takes {SYNC * 1e6:.0f} us; nothing stays in the second-level cache",
    ],
    "tpu": [
        "XLA's estimated cycles, one after the other, at "
        + ", ".join(f"{CLOCKS[NAMES.get(chip, chip)] / 1e9} GHz ({chip})" for chip in ("v5e", "v6e", "v7x")),
        "a kernel's block takes the longer of its bundles and its bytes at the chip's bandwidth; a block that no query "
        "sees takes the bundles of an empty one",
    ],
}
FLASH = 128  # queries of a block of flash attention
KernelCost = Callable[[Visit], tuple[float, Bytes]]  # cycles of one call, and its bytes


class Costs(NamedTuple):
    """Of one program, by part: `work` is bytes on a GPU and cycles on a TPU, `operations` are those of its products.
    `products` are those of a GPU by the sum that they are: operations, and seconds of the kernels they are in."""

    launches: int
    syncs: int
    bytes: dict[str, Bytes]
    work: dict[str, float]
    operations: dict[str, float]
    seconds: dict[str, float]
    products: dict[str, tuple[float, float]]
    unsure: list[str]


def peak(chip: str) -> float:
    """Operations a second."""
    return DEVICES[NAMES.get(chip, chip)].tflops * 1e12


def facts(layout: CacheLayout, held: int, new: int, batch: int) -> dict[str, np.ndarray]:
    """What is known of the program's arguments, by their names in it: every row holds `held` tokens and gets `new`."""
    rows = np.full(batch, held, np.int32)
    known = {"cache.lengths": rows, "cache.finite": rows, "counts": np.full(batch, new, np.int32)}
    known["cache.overflow"] = np.zeros(batch, bool)
    for number, run in enumerate(runs_of(layout)):
        for index, clock in enumerate(run.wiring.storage.clocks):
            units = max(0, (held - layout.method.sinks - clock.window) // clock.unit) if run.slots else 0
            known[f"cache.runs[{number}].flushed[{index}]"] = np.full(batch, units, np.int32)
    return known


def operations(program: Program, instruction: Instruction, inside: Computation) -> float:
    """Of the products in one kernel, two a multiply-accumulate."""
    if instruction.op == "fusion":
        called = program.computations[instruction.attribute("calls=")]
        return sum(operations(program, each, called) for each in called.instructions.values())
    library = instruction.op == "custom-call" and 'custom_call_target="__cublas' in instruction.more
    if not library and instruction.op != "dot":
        return 0.0
    pattern = r'"lhs_contracting_dimensions":\[([\d",]*)\]' if library else r"lhs_contracting_dims=\{([\d,]*)\}"
    contracted = re.search(pattern, instruction.more)
    if contracted is None:
        raise ValueError(f"{instruction.name}: which axes it sums over is not said")
    left = dimensions(inside.instructions[instruction.operands[0]].shape)
    depth = math.prod(left[axis] for axis in numbers(contracted[1].replace('"', "")))
    return 2.0 * elements(instruction.shape) * depth


def _sum_of(instruction: Instruction) -> str:
    """A product as `jnp.einsum` was told it."""
    found = re.search(r"([\w.,]+->[\w.]*)/dot_general", source_name(instruction))
    return found[1] if found else "other"


def walked(program: Program, known: dict[str, np.ndarray]) -> Walk:
    """All that one call of a program runs."""
    entry = program.computations[program.entry]
    found = Walk(program, [], 0, [])
    found.step(
        program.entry, Values(program, program.entry, [given(p, known) for p in entry.parameters]), 1, "rest", False
    )
    return found


def costs(program: Program, chip: str, known: dict[str, np.ndarray], kernel_cost: KernelCost | None = None) -> Costs:
    """What one call takes on a chip whose arguments are `known`; `kernel_cost` prices kernels that XLA has not made."""
    found, clock = walked(program, known), CLOCKS.get(NAMES.get(chip, chip))
    moved, totals = dict.fromkeys(PARTS, Bytes(0.0, 0.0)), [dict.fromkeys(PARTS, 0.0) for _ in range(3)]
    work, made, seconds = totals
    launches, sums = 0, {}
    for visit, each in kernels(found):
        cycles = estimate(visit.instruction.more)
        products = 0.0 if clock else operations(program, visit.instruction, visit.inside)
        part = visit.part
        if kernel_cost is not None and tpu.is_kernel(visit.instruction):
            (cycles, each), part = kernel_cost(visit), "attention"
        taken = cycles / clock if clock else max(LAUNCH, each.both / bandwidth(chip), products / peak(chip))
        launches += visit.times
        moved[part] = Bytes(*(a + visit.times * b for a, b in zip(moved[part], each, strict=True)))
        work[part] += visit.times * (cycles if clock else each.both)
        made[part] += visit.times * products
        seconds[part] += visit.times * taken
        if products:
            name = _sum_of(visit.instruction)
            made_before, taken_before = sums.get(name, (0.0, 0.0))
            sums[name] = made_before + visit.times * products, taken_before + visit.times * taken
    syncs = 0 if clock else found.syncs
    seconds["rest"] += SYNC * syncs
    return Costs(launches, syncs, moved, work, made, seconds, sums, found.unsure)


def shared(product: dict, chip: str) -> str:
    """What a product of a record makes of the peak while it runs."""
    share = product["tera_operations"] * 1e12 / peak(chip) / product["seconds"]
    taken = f"{product['tera_operations']:.1f} * 10^12 operations in {1e3 * product['seconds']:.1f} ms"
    return f"{taken}: {share:.0%} of peak"


def flash_bytes(config: ModelConfig, held: int, new: int, batch: int) -> float:
    """What flash attention moves for `new` tokens after `held` ones: every block of FLASH queries of a head reads the
    keys and values that it sees, once; queries and outputs move once. Numbers of two bytes."""
    total = 0.0
    for window in config.windows:
        ends = (held + min(start + FLASH, new) for start in range(0, new, FLASH))
        keys = sum(end if window is None else min(end, window + FLASH) for end in ends)
        total += batch * config.num_heads * config.head_dim * 2 * (2 * keys + 2 * new)
    return total


def record(found: Costs, config: ModelConfig, chip: str, held: int, new: int, batch: int) -> dict:
    """The account as JSON has it."""
    least = batch * prompt_operations(config, held, new)
    total = sum(found.seconds.values())
    return {
        "launches": found.launches,
        "syncs": found.syncs,
        "gigabytes": {part: each.both / 1e9 for part, each in found.bytes.items()},
        "work": dict(found.work),
        "flash_gigabytes": flash_bytes(config, held, new, batch) / 1e9,
        "tera_operations": sum(found.operations.values()) / 1e12,
        "least_tera_operations": least / 1e12,
        "seconds": dict(found.seconds),
        "products": {
            name: {"tera_operations": made / 1e12, "seconds": taken} for name, (made, taken) in found.products.items()
        },
        "estimated_s": total,
        "bound_s": least / peak(chip),
    }
