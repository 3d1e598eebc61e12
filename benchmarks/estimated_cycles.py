"""XLA's own estimates for TPUs, read from compiled programs: cycles, loops counted with their trips; and the rows that
gathers fetch one after the other, for which XLA has no estimate."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from kvqjax.cache import pick
from kvqjax.segments import LayerView, NewTokens, attend_body

NONE = 2**40  # what has no estimate says so with a huge number
GATHER = re.compile(r" = \w+\[([\d,]*)\]\S* gather\(.*slice_sizes=\{([\d,]*)\}")


class Computation(NamedTuple):
    """One computation of a compiled program: estimated cycles of its instructions, the loops in it with their trips,
    the computations its instructions call, rows its gathers fetch; and of the cycles those of matrix fusions."""

    cycles: list[int]
    loops: list[tuple[str, int]]
    calls: list[str]
    rows: int
    products: list[int]


def _trips(condition: str) -> int:
    """How often a loop runs by its condition; 1 where that depends on data."""
    limits = re.findall(r"constant\((\d+)\)", condition)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in condition else 1


def _size(dimensions: str) -> int:
    return math.prod(int(n) for n in dimensions.split(",") if n)


def _estimates(before: str, part: str) -> list[int]:
    """The estimated cycles of instructions that have `before`, a pattern, before them."""
    return [int(n) for n in re.findall(before + r'"estimated_cycles":"(\d+)"', part) if int(n) < NONE]


def computations(text: str) -> dict[str, Computation]:
    """The computations of a compiled program by name."""
    parts = {}
    for part in re.split(r"\n(?=ENTRY |%)", text):
        name = re.match(r"(?:ENTRY )?%?([^ ]+) ", part)
        if name is not None:
            parts[name[1]] = part
    found = {}
    for name, part in parts.items():
        loops = re.findall(r"\bwhile\(.*condition=%?([^,\s]+), body=%?([^,\s]+)", part)
        found[name] = Computation(
            _estimates("", part),
            [(body, _trips(parts[condition])) for condition, body in loops],
            re.findall(r"calls=%?([^,\s]+)", part),
            sum(_size(shape) // _size(slices) for shape, slices in GATHER.findall(part)),
            _estimates("kind=kOutput.*", part),
        )
    return found


def _summed(found: dict[str, Computation], name: str, own: Callable[[Computation], int], calls: bool = False) -> int:
    """What `own` says of a computation and of the loops in it, times their trips; with `calls`, also of what it calls
    (a fusion's estimate is the caller's)."""
    part = found[name]
    inside = sum(trips * _summed(found, body, own, calls) for body, trips in part.loops)
    called = sum(_summed(found, call, own, calls) for call in part.calls) if calls else 0
    return own(part) + inside + called


def _cycles(part: Computation) -> int:
    return sum(part.cycles)


def total(compiled) -> int:
    """Estimated cycles of a compiled program."""
    text = compiled.as_text()
    return _summed(computations(text), re.findall(r"\nENTRY %?([^ ]+) ", text)[0], _cycles)


def _largest(found: dict[str, Computation]) -> str:
    """The loop body with most cycles, which is what reads a block of a cache."""
    return max((body for part in found.values() for body, _ in part.loops), key=lambda n: _summed(found, n, _cycles))


def largest_body(compiled) -> tuple[list[int], int]:
    """Of the loop body with most cycles: estimated cycles of its instructions and of the loops in it, and the rows that
    are gathered there."""
    found = computations(compiled.as_text())
    body = _largest(found)
    loops = [trips * _summed(found, inner, _cycles) for inner, trips in found[body].loops]
    return found[body].cycles + loops, _summed(found, body, lambda part: part.rows, calls=True)


def largest_product(compiled) -> int:
    """Estimated cycles of the largest matrix fusion of the loop body with most cycles, whatever else is in it; 0 where
    there is none."""
    found = computations(compiled.as_text())
    return max(found[_largest(found)].products, default=0)


def by_blocks(run, kv_heads: int):
    """Attention to the body of one layer of a run of a cache for CPUs: the path that any chip can take."""

    def attend(q, state, weights, constants, new, layer, positions):
        view = LayerView(run, state, layer, weights, pick(constants, layer), new, 0)
        counts = positions[:, 0] * 0 + positions.shape[1]
        return attend_body(q, kv_heads, view, NewTokens(positions, counts, positions[:, 0]), {})[0]

    return attend
