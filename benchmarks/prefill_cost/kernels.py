"""What calls of splash attention cost: bundles of its schedule, block by block, and bytes of the blocks it fetches."""

from pathlib import Path

import jax.numpy as jnp

from benchmarks.prefill_cost.account import KernelCost
from benchmarks.schedule import BUNDLE
from benchmarks.step_cost.bound import CLOCKS, NAMES, bandwidth
from benchmarks.step_cost.gpu import Bytes
from benchmarks.step_cost.hlo import ARRAY, dimensions, size
from benchmarks.step_cost.walk import Visit
from kvqjax.pallas_kernels.splash import block_sizes, seen_blocks


def bundles(listing: str) -> tuple[int, int]:
    """(of a block that is seen, of one that is not): the longest region that a block may skip is its products."""
    found = [match for match in BUNDLE.finditer(listing) if match[2]]
    regions = [number for number, match in enumerate(found) if match[1] == "PF"]
    longest = max((b - a for a, b in zip(regions, [*regions[1:], len(found)], strict=True)), default=0)
    return len(found), len(found) - longest


def _listing(folder: Path, name: str) -> str:
    """Read the schedule of a call. XLA may copy a call after its schedule was written: then the one that all calls of
    this kernel have, if they have the same."""

    def texts(start: str) -> list[str]:
        files = sorted(folder.glob(f"*-{start}-final_bundles.txt"))
        return [file.read_text() for file in files if "schedule-analysis" not in file.name]

    found, alike = texts(f"{name}-*"), texts(f"{name.rpartition('.')[0]}*")
    if not found and len({bundles(text) for text in alike}) == 1:
        found = alike
    if not found:
        raise ValueError(f"{name}: its schedule was not written")
    return found[-1]


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
        active, idle = bundles(_listing(folder, visit.instruction.name))
        used, every = seen(queries, keys, keys if not chunk or keys == queries else 0, sliding)
        block = block_sizes(queries, keys).keys
        fetched = 2 * block * size(shapes[3]) / keys / dimensions(shapes[3])[0]
        slowest = max(active, fetched / bandwidth(chip) * clock)
        written = [match[0] for match in ARRAY.finditer(visit.instruction.shape)]
        moved = Bytes(heads * used * fetched + size(shapes[2]), sum(map(size, written)))
        return heads * (used * slowest + (every - used) * idle), moved

    return cost
