"""Cycles of our kernels on a TPU, from the schedules that libtpu writes: XLA has no estimate for
them."""

import glob
import math
import os
import re
from pathlib import Path

import jax.numpy as jnp

from benchmarks.compiled_cost.hlo import ARRAY, Instruction, dimensions, size
from benchmarks.compiled_cost.walk import Bytes, Visit
from benchmarks.schedule import BUNDLE, bundles
from kvqjax.hardware.devices import DEVICES
from kvqjax.pallas_kernels.splash import block_sizes, seen_blocks

# Cycles a second; assumed, no chip here confirmed them.
CLOCKS = {
    "v5e": 1.5e9,
    "v6e": 1.75e9,
    "v7x": 2.2e9,
}
SCHEDULE, ANALYSIS = "-01-final_bundles.txt", "-00-schedule-analysis_final_bundles.txt"
KERNEL = re.compile(r'operand_layout_constraints=({.*?}}).*?"body":"([^"]*)"', re.DOTALL)


def write_schedules(folder: str) -> None:
    """Have libtpu write its last schedules into a folder. It must not be loaded yet."""
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
    )


def is_kernel(instruction: Instruction) -> bool:
    return (
        instruction.op == "custom-call"
        and 'custom_call_target="tpu_custom_call"' in instruction.attributes
    )


def cycles_of(moved: float, chip: str) -> float:
    """Return the cycles in which the chip's memory delivers so many bytes."""
    return moved / (DEVICES[chip].bandwidth * 1e9) * CLOCKS[chip]


def schedule(folder: Path, instruction: Instruction) -> str:
    """Read the schedule of a call of a kernel.

    libtpu writes one schedule for several calls of one kernel, under the name of one of them. Where
    the calls' operands lie in different memory there are several: another call is taken to have the
    longest.

    Raises:
        ValueError: No schedule of the kernel was written.
    """
    if listings := [*folder.glob(f"[0-9]*-{glob.escape(instruction.name)}{SCHEDULE}")]:
        return listings[0].read_text()
    kernel, listings = KERNEL.search(instruction.attributes), []
    for analysis in folder.glob(f"[0-9]*-{instruction.name.partition('.')[0]}*{ANALYSIS}"):
        call = KERNEL.search(analysis.read_text())  # the text of the call that the schedule is of
        if kernel and call and call.groups() == kernel.groups():
            listings.append(
                analysis.with_name(analysis.name.replace(ANALYSIS, SCHEDULE)).read_text()
            )
    if not listings:
        raise ValueError(f"{instruction.name}: no schedule of its kernel was written")
    return max(listings, key=block_bundles)


def packed_cost(
    visit: Visit, folder: Path, chip: str, tokens: list[int], token_bytes: float
) -> tuple[float, Bytes]:
    """Return the cycles and bytes of one call of a kernel that reads encoded tokens.

    A grid step fetches one tile while it works off the one before. Each tile of a row takes the
    longer of the two.

    Args:
        visit: The call. The name of the kernel ends with the tokens of a tile.
        folder: Where libtpu wrote its schedules.
        chip: The chip.
        tokens: Encoded tokens of each row.
        token_bytes: Bytes of one encoded token in one layer.
    """
    # output_to_operand_aliasing.
    name, aliases = (
        visit.instruction.name,
        r"\{(\d+)\}: \(\d+, \{\}\)",
    )
    tile = re.search(r"_(\d+)(?:\.\d+)*$", name)
    if tile is None:
        raise ValueError(f"{name}: its name ends with no tile")
    # Arrays [rows, tokens, channels] that the kernel writes in place are read as well.
    arrays = [array[0] for array in ARRAY.finditer(visit.instruction.shape)]
    replaced = [arrays[int(number)] for number in re.findall(aliases, visit.instruction.attributes)]
    written = int(tile[1]) * sum(
        size(array) / math.prod(dimensions(array)[:2]) for array in replaced
    )
    fetched = int(tile[1]) * token_bytes + written
    tiles = sum(-(-count // int(tile[1])) for count in tokens)
    cycles = max(bundles(schedule(folder, visit.instruction)), cycles_of(fetched + written, chip))
    return tiles * cycles, Bytes(tiles * fetched, tiles * written)


def block_bundles(listing: str) -> tuple[int, int]:
    """Return the bundles of a block of splash attention that queries see, and of one that they do
    not.

    A block that is not seen skips its products, the longest region between marks of a schedule.
    """
    bundled = [match for match in BUNDLE.finditer(listing) if match[2]]
    marks = [number for number, match in enumerate(bundled) if match[1] == "PF"]
    skipped = max(
        (end - begin for begin, end in zip(marks, [*marks[1:], len(bundled)], strict=True)),
        default=0,
    )
    return len(bundled), len(bundled) - skipped


def seen(queries: int, keys: int, prompt: int, sliding: int | None) -> tuple[float, int]:
    """Return how many blocks of a call of splash attention are seen, on average, and how many there
    are.

    Args:
        queries: Queries of a call.
        keys: Keys of a call.
        prompt: Tokens of the prompt; 0 for a call that reads the body of a cache, all of which is
            seen.
        sliding: The sliding window, if any.
    """
    blocks = block_sizes(queries, keys)
    total = queries // blocks.queries * (keys // blocks.keys)
    if not prompt:
        return float(total), total
    counts = []
    for start in range(0, prompt, queries):
        first, last = seen_blocks(jnp.arange(start, start + queries), keys, blocks, sliding)
        counts.append(int((last - first).sum()))
    return sum(counts) / len(counts), total


def splash_cost(
    visit: Visit, folder: Path, chip: str, chunk: int, sliding: int | None
) -> tuple[float, Bytes]:
    """Return the cycles and bytes of one call of splash attention in a prompt (`chunk` 0) or a
    chunk of one."""
    _, _, query, key, *_ = visit.computation.shapes(visit.instruction)
    (heads, queries, _), keys = dimensions(query), max(dimensions(key)[1:])
    active, idle = block_bundles(schedule(folder, visit.instruction))
    used, total = seen(queries, keys, keys if not chunk or keys == queries else 0, sliding)
    # Keys and values.
    fetched = 2 * block_sizes(queries, keys).keys * size(key) / keys / dimensions(key)[0]
    busy = max(active, cycles_of(fetched, chip))
    moved = Bytes(heads * used * fetched + size(query), size(visit.instruction.shape))
    return heads * (used * busy + (total - used) * idle), moved
