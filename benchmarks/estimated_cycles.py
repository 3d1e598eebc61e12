"""XLA's own estimates for TPUs, read from compiled programs: cycles, loops counted with their trips."""

from typing import NamedTuple

from compiled_cost.hlo import Computation, parse
from schedule import estimate

from kvqjax.cache import at_layer
from kvqjax.cache.attention import attend_body
from kvqjax.cache.view import LayerView, NewTokens


class Part(NamedTuple):
    """Describe one computation of a compiled program: estimated cycles of its instructions, of its matrix fusions
    alone, and the loops in it with their trips."""

    cycles: list[int]
    products: list[int]
    loops: list[tuple[str, int]]


def _trips(condition: Computation) -> int:
    """How often a loop runs by its condition; 1 where that depends on data."""
    parts = condition.instructions.values()
    limits = [int(part.literal) for part in parts if part.op == "constant" and part.literal.isdigit()]
    return limits[0] if len(limits) == 1 and any("direction=LT" in part.attributes for part in parts) else 1


def _parts(text: str) -> dict[str, Part]:
    """Read the computations of a compiled program, by name."""
    program, parts = parse(text), {}
    for name, computation in program.computations.items():
        instructions = computation.instructions.values()
        loops = [(i.attribute("body="), i.attribute("condition=")) for i in instructions if i.op == "while"]
        parts[name] = Part(
            [estimate(i.attributes) for i in instructions],
            [estimate(i.attributes) for i in instructions if "kind=kOutput" in i.attributes],
            [(body, _trips(program.computations[condition])) for body, condition in loops],
        )
    return parts


def _cycles(parts: dict[str, Part], name: str) -> int:
    """Sum the cycles of a computation and of the loops in it, times their trips."""
    return sum(parts[name].cycles) + sum(trips * _cycles(parts, body) for body, trips in parts[name].loops)


def largest_body(compiled) -> tuple[int, int]:
    """Find the loop body with most cycles, which is what reads a block of a cache. Return its cycles, and those of the
    largest matrix fusion in it, 0 where there is none."""
    parts = _parts(compiled.as_text())
    body = max((body for part in parts.values() for body, _ in part.loops), key=lambda name: _cycles(parts, name))
    return _cycles(parts, body), max(parts[body].products, default=0)


def by_blocks(run, kv_heads: int):
    """Return attention to the body of one layer of a run of a cache for CPUs: the path that any chip can take."""

    def attend(q, state, weights, constants, new, layer, positions):
        view = LayerView(run, state, layer, weights, at_layer(constants, layer), new, 0)
        counts = positions[:, 0] * 0 + positions.shape[1]
        return attend_body(q, view, NewTokens(positions, counts, positions[:, 0]), {})[0]

    return attend
