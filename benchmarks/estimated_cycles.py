"""XLA's own estimates for TPUs, read from compiled programs: cycles, loops counted with their trips."""

import re

from kvqjax.cache import pick
from kvqjax.segments import LayerView, NewTokens, attend_body

NONE = 2**40  # what has no estimate says so with a huge number


def computations(text: str) -> dict[str, tuple[list[int], list[tuple[str, int]]]]:
    """Estimated cycles of the instructions of every computation of a compiled program, and the loops in it with their
    trips; a loop whose trips depend on data counts once."""
    found: dict[str, tuple[list[int], list[tuple[str, int]]]] = {}
    for part in re.split(r"\n(?=ENTRY |%)", text):
        name = re.match(r"(?:ENTRY )?%?([^ ]+) ", part)
        if name is None:
            continue
        cycles = [int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', part)]
        loops = []
        for line in re.findall(r".*\bwhile\(.*", part):
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            loops.append((re.findall(r"body=%?([^, ]+)", line)[0], int(trips[1]) if trips else 1))
        found[name[1]] = [n for n in cycles if n < NONE], loops
    return found


def total(compiled) -> int:
    """Estimated cycles of a compiled program."""
    text = compiled.as_text()
    found = computations(text)

    def cycles(name: str) -> int:
        own, loops = found[name]
        return sum(own) + sum(trips * cycles(body) for body, trips in loops)

    return cycles(re.findall(r"\nENTRY %?([^ ]+) ", text)[0])


def largest_body(compiled) -> list[int]:
    """Estimated cycles of the instructions of the loop body that has most: what reads a block of a cache."""
    found = computations(compiled.as_text())
    return max((found[body][0] for _, loops in found.values() for body, _ in loops), key=sum)


def by_blocks(run, kv_heads: int):
    """Attention to the body of one layer of a run of a cache for CPUs: the path that any chip can take."""

    def attend(q, state, weights, constants, new, layer, positions):
        view = LayerView(run, state, layer, weights, pick(constants, layer), new, 0)
        counts = positions[:, 0] * 0 + positions.shape[1]
        return attend_body(q, kv_heads, view, NewTokens(positions, counts, positions[:, 0]), {})[0]

    return attend
