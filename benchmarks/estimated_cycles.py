"""XLA's own estimates for TPUs, read from compiled programs: cycles, loops counted with their trips; and the rows that
gathers fetch one after the other, for which XLA has no estimate."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from schedule import estimate
from step_cost.hlo import Computation, dimensions, numbers, parse

from kvqjax.cache import at_layer
from kvqjax.cache.segments import attend_body
from kvqjax.cache.view import LayerView, NewTokens


class Part(NamedTuple):
    """One computation of a compiled program: estimated cycles of its instructions, the loops in it with their trips,
    the computations its instructions call, rows its gathers fetch; and of the cycles those of matrix fusions."""

    cycles: list[int]
    loops: list[tuple[str, int]]
    calls: list[str]
    rows: int
    products: list[int]


def _trips(condition: Computation) -> int:
    """How often a loop runs by its condition; 1 where that depends on data."""
    parts = condition.instructions.values()
    limits = [int(part.inside) for part in parts if part.op == "constant" and part.inside.isdigit()]
    return limits[0] if len(limits) == 1 and any("direction=LT" in part.more for part in parts) else 1


def _rows(shape: str, more: str) -> int:
    """How many rows a gather fetches."""
    slices = re.search(r"slice_sizes=\{([\d,]*)\}", more)
    return math.prod(dimensions(shape)) // math.prod(numbers(slices[1]))


def computations(text: str) -> tuple[dict[str, Part], str]:
    """The computations of a compiled program by name, and the name of the one it begins with."""
    program, found = parse(text), {}
    for name, computation in program.computations.items():
        inside = computation.instructions.values()
        loops = [(i.attribute("body="), i.attribute("condition=")) for i in inside if i.op == "while"]
        found[name] = Part(
            [estimate(i.more) for i in inside],
            [(body, _trips(program.computations[condition])) for body, condition in loops],
            [i.attribute("calls=") for i in inside if "calls=" in i.more],
            sum(_rows(i.shape, i.more) for i in inside if i.op == "gather"),
            [estimate(i.more) for i in inside if "kind=kOutput" in i.more],
        )
    return found, program.entry


def _summed(found: dict[str, Part], name: str, own: Callable[[Part], int], calls: bool = False) -> int:
    """What `own` says of a computation and of the loops in it, times their trips; with `calls`, also of what it calls
    (a fusion's estimate is the caller's)."""
    part = found[name]
    inside = sum(trips * _summed(found, body, own, calls) for body, trips in part.loops)
    called = sum(_summed(found, call, own, calls) for call in part.calls) if calls else 0
    return own(part) + inside + called


def _cycles(part: Part) -> int:
    return sum(part.cycles)


def total(compiled) -> int:
    """Estimated cycles of a compiled program."""
    return _summed(*computations(compiled.as_text()), _cycles)


def _largest(found: dict[str, Part]) -> str:
    """The loop body with most cycles, which is what reads a block of a cache."""
    return max((body for part in found.values() for body, _ in part.loops), key=lambda n: _summed(found, n, _cycles))


def largest_body(compiled) -> tuple[list[int], int]:
    """Of the loop body with most cycles: estimated cycles of its instructions and of the loops in it, and the rows that
    are gathered there."""
    found, _ = computations(compiled.as_text())
    body = _largest(found)
    loops = [trips * _summed(found, inner, _cycles) for inner, trips in found[body].loops]
    return found[body].cycles + loops, _summed(found, body, lambda part: part.rows, calls=True)


def largest_product(compiled) -> int:
    """Estimated cycles of the largest matrix fusion of the loop body with most cycles, whatever else is in it; 0 where
    there is none."""
    found, _ = computations(compiled.as_text())
    return max(found[_largest(found)].products, default=0)


def by_blocks(run, kv_heads: int):
    """Attention to the body of one layer of a run of a cache for CPUs: the path that any chip can take."""

    def attend(q, state, weights, constants, new, layer, positions):
        view = LayerView(run, state, layer, weights, at_layer(constants, layer), new, 0)
        counts = positions[:, 0] * 0 + positions.shape[1]
        return attend_body(q, kv_heads, view, NewTokens(positions, counts, positions[:, 0]), {})[0]

    return attend
