"""What libtpu says of time: the listings of a program's schedules."""

import math
import re

BUNDLE = re.compile(r"(?m)^ *(?:0x[0-9a-f]+|0) *([A-Z]*) *: *([> ]*)\{")


def turns(listing: str) -> list[int]:
    """How often every bundle of a listing runs in one grid step, 0 outside the grid: a loop as
    often as its exit test says, nested ones as the product."""
    matches, open_loops, trips, loops_of_bundle = list(BUNDLE.finditer(listing)), [], [], []
    for match, next_match in zip(matches, [*matches[1:], None], strict=True):
        depth = match[2].count(">")
        if not depth:  # outside the grid, or empty and without its mark
            loops_of_bundle.append(None)
            continue
        if (
            match[1] == "LB"
        ):  # a bundle of fewer marks may stand within a loop: only the next loop ends one
            open_loops = [loop for loop in open_loops if loop[0] < depth]
            open_loops.append((depth, len(trips)))
            trips.append(0)
        text = listing[match.end() : next_match.start() if next_match else None]
        for trip in re.findall(r"scmp\.ge[^;]*, (\d+) /\* loop exit test", text):
            waiting = [
                number for begun, number in open_loops if begun <= depth and not trips[number]
            ]
            if waiting:
                trips[waiting[-1]] = int(trip)
        loops_of_bundle.append([number for begun, number in open_loops if begun <= depth])
    return [
        0 if loops is None else math.prod(trips[number] for number in loops[1:])
        for loops in loops_of_bundle
    ]


def bundles(listing: str) -> int:
    """Bundles of one grid step."""
    return sum(turns(listing))


def busy(listing: str, utilization: str) -> dict[str, float]:
    """Unit -> the share of its slots that one grid step's bundles fill, by the compiler's table of
    a schedule."""
    head, table = utilization.split("UTILIZATION:")
    names, capacity = head.splitlines()[-3:-1]
    rows = [list(map(int, line.split())) for line in table.splitlines() if line.strip()]
    often = turns(listing)
    used = [
        sum(map(math.prod, zip(often, column, strict=True))) for column in zip(*rows, strict=True)
    ]
    slot_limits = [sum(often) * int(slots) for slots in capacity.split()]
    shares = zip(names.replace(" ", "").split(","), used, slot_limits, strict=True)
    return {name: round(filled / room, 3) for name, filled, room in shares if ":" not in name}
