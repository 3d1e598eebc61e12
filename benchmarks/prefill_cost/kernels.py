"""What calls of splash attention cost: bundles of its schedule, block by block, and bytes of the blocks it fetches."""

import re
from pathlib import Path

import jax.numpy as jnp

from benchmarks.prefill_cost.account import KernelCost
from benchmarks.schedule import BUNDLE
from benchmarks.step_cost.bound import CLOCKS, NAMES, bandwidth
from benchmarks.step_cost.gpu import Bytes
from benchmarks.step_cost.hlo import ARRAY, Instruction, dimensions, size
from benchmarks.step_cost.walk import Visit
from kvqjax.pallas_kernels.splash import block_sizes, seen_blocks

ANALYSIS = "schedule-analysis_final_bundles.txt"  # says which call a schedule is of
KERNEL = re.compile(r'operand_layout_constraints=({.*?}}).*?"body":"([^"]*)"', re.DOTALL)


def bundles(listing: str) -> tuple[int, int]:
    """(of a block that is seen, of one that is not): the longest region that a block may skip is its products."""
    found = [match for match in BUNDLE.finditer(listing) if match[2]]
    regions = [number for number, match in enumerate(found) if match[1] == "PF"]
    longest = max((b - a for a, b in zip(regions, [*regions[1:], len(found)], strict=True)), default=0)
    return len(found), len(found) - longest


def _kernel(text: str) -> tuple[str, str]:
    """Return the operands' types and the program of a call of a kernel, whose text is the compiler's."""
    found = KERNEL.search(text)
    if found is None:
        raise ValueError("a call of a kernel without its program")
    return found[1], found[2]


def _listing(folder: Path, instruction: Instruction) -> str:
    """Read the schedule of a call. libtpu writes one for calls of one kernel, with the text of the first: another call
    has the schedule of those whose kernel is its own. Where those differ, by the memory that operands lie in, it is
    taken for the longest."""
    found = {}
    for said in sorted(folder.glob(f"*-{instruction.name.partition('.')[0]}*-00-{ANALYSIS}")):
        if _kernel(said.read_text()) == _kernel(instruction.more):
            stem = said.name.removesuffix(f"-00-{ANALYSIS}")
            found[stem.partition("-")[2]] = (folder / f"{stem}-01-final_bundles.txt").read_text()
    if instruction.name in found:
        return found[instruction.name]
    if not found:
        raise ValueError(f"{instruction.name}: no schedule of its kernel was written")
    return max(found.values(), key=bundles)


def seen(queries: int, keys: int, whole: int, sliding: int | None) -> tuple[float, int]:
    """(blocks that are seen, all blocks) of a call, on average: of a whole prompt of `whole` tokens, or of a block of
    the body, of which all are (0)."""
    blocks = block_sizes(queries, keys)
    every = queries // blocks.queries * (keys // blocks.keys)
    if not whole:
        return float(every), every
    counts = []
    for start in range(0, whole, queries):
        first, last = seen_blocks(jnp.arange(start, start + queries), keys, blocks, sliding)
        counts.append(int((last - first).sum()))
    return sum(counts) / len(counts), every


def kernel_cost(folder: Path, chip: str, chunk: int, sliding: int | None) -> KernelCost:
    """Prices calls in a program of a whole prompt (`chunk` 0) or of one chunk."""
    clock = CLOCKS[NAMES.get(chip, chip)]

    def cost(visit: Visit) -> tuple[float, Bytes]:
        shapes = [visit.inside.instructions[name].shape for name in visit.instruction.operands]
        (heads, queries, _), keys = dimensions(shapes[2]), max(dimensions(shapes[3])[1:])
        active, idle = bundles(_listing(folder, visit.instruction))
        used, every = seen(queries, keys, keys if not chunk or keys == queries else 0, sliding)
        block = block_sizes(queries, keys).keys
        fetched = 2 * block * size(shapes[3]) / keys / dimensions(shapes[3])[0]
        slowest = max(active, fetched / bandwidth(chip) * clock)
        written = [match[0] for match in ARRAY.finditer(visit.instruction.shape)]
        moved = Bytes(heads * used * fetched + size(shapes[2]), sum(map(size, written)))
        return heads * (used * slowest + (every - used) * idle), moved

    return cost
