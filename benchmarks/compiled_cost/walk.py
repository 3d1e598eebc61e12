"""Walk a compiled program: every kernel it launches, how often, and the bytes it moves.

Bytes are those of a kernel's operands and results in device memory: of an operand only what slices
and gathers take of it, of an update in place only what is written. What the second-level cache
keeps is not subtracted.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.compiled_cost.hlo import ARRAY, Computation, Instruction, Program, elements, size
from benchmarks.compiled_cost.values import Later, Unknown, Values, branches

MOST_FOLLOWED = 64  # turns of a loop that are walked one by one, where they may differ
FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all")
FREE += ("partition-id", "replica-id", "opt-barrier", "optimization-barrier")
SLICES = ("slice", "dynamic-slice", "gather")
MOVES = ("bitcast", "reshape")  # the same bytes under another shape
ELEMENTWISE = (*MOVES, "convert", "copy", "transpose", "negate")


class Visit(NamedTuple):
    """An instruction that runs `times` in a step, or, outside the loop over steps, in a call of it
    (`once`)."""

    instruction: Instruction
    computation: Computation
    part: str
    times: int
    once: bool


@dataclasses.dataclass
class Walk:
    """The work that a program runs.

    Attributes:
        visits: Its instructions, loops and branches followed.
        syncs: Decisions that a GPU's host takes: turns of loops whose bound is data, and branches.
        unsure: Loops whose trips could not be computed, walked once, and branches, taken at their
            costliest.
    """

    program: Program
    visits: list[Visit] = dataclasses.field(default_factory=list)
    syncs: int = 0
    unsure: list[str] = dataclasses.field(default_factory=list)

    def computation(self, name: str, values: Values, times: int, part: str, once: bool) -> None:
        """Walk one computation."""
        computation = self.program.computations[name]
        for instruction in computation.instructions.values():
            instruction_part = self.program.part(instruction, computation, part)
            match instruction.op:
                case "while":
                    self._loop(instruction, values, times, instruction_part, once)
                case "conditional":
                    self._conditional(instruction, values, times, instruction_part, once)
                case "call" | "async-start":
                    called = values.inner(instruction.called, instruction.operands)
                    self.computation(instruction.called, called, times, instruction_part, once)
                case _:
                    self.visits.append(
                        Visit(instruction, computation, instruction_part, times, once)
                    )

    def _loop(
        self, instruction: Instruction, values: Values, times: int, part: str, once: bool
    ) -> None:
        condition, body = instruction.attribute("condition="), instruction.attribute("body=")
        first = values.inner(body, instruction.operands)
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.attributes)
        varies = self._varies(body)
        over_steps = once and len(re.findall(r"\bwhile\b", instruction.source)) == 1
        if over_steps:
            turns = [first]
        elif trips and not (varies and int(trips[1]) <= MOST_FOLLOWED):
            turns = [first] * int(trips[1])
        else:
            try:
                turns = list(values.turns(instruction))
            except Unknown as reason:
                turns = [first] * (int(trips[1]) if trips else 1)
                if not trips:
                    self.unsure.append(f"{instruction.name}: {reason}")
        if not trips:
            tests = len(turns) + (not over_steps)  # the last answer ends the loop
            self.syncs += times * tests
            test_values = values.inner(condition, instruction.operands)
            self.computation(condition, test_values, times * tests, part, once and not over_steps)
        once = once and not over_steps
        if varies and len(turns) <= MOST_FOLLOWED:
            for turn in turns:
                self.computation(body, turn, times, part, once)
        elif turns:
            self.computation(body, turns[0], times * len(turns), part, once)

    def _varies(self, name: str) -> bool:
        """Say whether a loop's turns may run different instructions."""
        lines = self.program.computations[name].instructions.values()
        return any(
            line.op == "conditional"
            or (line.op == "while" and "known_trip_count" not in line.attributes)
            for line in lines
        )

    def _conditional(
        self, instruction: Instruction, values: Values, times: int, part: str, once: bool
    ) -> None:
        self.syncs += times
        try:
            name, operands = values.branch(instruction)
            self.computation(name, values.inner(name, operands), times, part, once)
        except Unknown as reason:
            self.unsure.append(f"{instruction.name}: {reason}")
            walks = []
            for name, operand in zip(branches(instruction), instruction.operands[1:], strict=True):
                walks.append(Walk(self.program))
                walks[-1].computation(name, values.inner(name, (operand,)), times, part, once)
            costliest = max(
                walks,
                key=lambda walk: sum(v.times * size(v.instruction.shape) for v in walk.visits),
            )
            self.visits += costliest.visits
            self.syncs += costliest.syncs
            self.unsure += costliest.unsure


def walk(program: Program, values: Mapping[str, np.ndarray], per_step: bool = True) -> Walk:
    """Walk a program.

    Args:
        program: The program.
        values: The values of arguments, as far as they are known, by their names in the program,
            such as "state.cache.lengths".
        per_step: Walk one turn of the outermost loop, a decode step; otherwise all that one call
            runs.
    """
    result = Walk(program)
    arguments = [
        _argument(parameter, values) for parameter in program.computations[program.entry].parameters
    ]
    result.computation(
        program.entry, Values(program, program.entry, arguments), 1, "rest", per_step
    )
    return result


def _argument(parameter: Instruction, values: Mapping[str, np.ndarray]) -> Later:
    def value() -> np.ndarray:
        if parameter.source not in values:
            raise Unknown(parameter.source or parameter.name)
        return values[parameter.source]

    return value


class Bytes(NamedTuple):
    read: float
    written: float

    @property
    def moved(self) -> float:
        return self.read + self.written


def kernels(steps: Walk) -> list[tuple[Visit, Bytes]]:
    """Return every kernel that a walk launches, with the bytes that one launch moves."""
    traffic_of: dict[tuple[int, str], Bytes] = {}
    launched = []
    for visit in steps.visits:
        op = visit.instruction.op
        if op in FREE or op.endswith(("-done", "-update")):
            continue
        key = id(visit.computation), visit.instruction.name
        if key not in traffic_of:
            traffic_of[key] = _traffic(steps.program, visit.instruction, visit.computation)
        launched.append((visit, traffic_of[key]))
    return launched


def _traffic(program: Program, instruction: Instruction, computation: Computation) -> Bytes:
    """Return the bytes that one kernel moves."""
    operands, result = (
        [size(shape) for shape in computation.shapes(instruction)],
        size(instruction.shape),
    )
    match instruction.op:
        case "fusion":
            fused = program.computations[instruction.called]
            return Bytes(
                sum(_read(program, fused, parameter) for parameter in fused.parameters),
                _written(fused, fused.root),
            )
        case "copy" | "slice" | "dynamic-slice":
            return Bytes(result, result)
        case "copy-start":  # its result is source, target and 4 bytes of context
            return Bytes(operands[0], max(0.0, result - operands[0] - 4))
        case "slice-start":  # its target comes before the context
            target = list(ARRAY.finditer(instruction.shape))[-2][0]
            return Bytes(size(target.replace("S(1)", "")), size(target))
        case "dynamic-update-slice":
            return Bytes(operands[1], operands[1])
        case "scatter":
            return Bytes(operands[-1], operands[-1])
        case "gather":
            return Bytes(result + operands[1], result)
        case "custom-call" if 'custom_call_target="__cublas' in instruction.attributes:
            workspace = re.search(r"s8\[\d+\]\S*\)$", instruction.shape)  # which it need not touch
            return Bytes(sum(operands), result - (size(workspace[0]) if workspace else 0))
    return Bytes(sum(operands), result)


def _read(program: Program, fused: Computation, parameter: Instruction) -> float:
    """Return how many bytes of a parameter a fusion reads."""
    return (
        size(parameter.shape) * _used(program, fused, parameter) / max(1, elements(parameter.shape))
    )


def _used(program: Program, fused: Computation, parameter: Instruction) -> float:
    """Return how many elements of a parameter a fusion reads."""
    length = elements(parameter.shape)

    def used(name: str, in_place: bool) -> float:
        total = 0.0
        for user in fused.instructions.values():
            if name not in user.operands:
                continue
            sole = user.operands[0] == name and user.operands.count(name) == 1
            if user.op in ELEMENTWISE:
                total += used(user.name, in_place and user.op in MOVES)
            elif user.op in SLICES and sole:
                total += elements(user.shape)
            elif user.op in ("dynamic-update-slice", "scatter") and sole and in_place:
                continue
            elif user.op in ("fusion", "call"):
                called = program.computations[user.called]
                if {line.op for line in called.instructions.values()} <= {
                    "parameter",
                    *ELEMENTWISE,
                }:
                    total += used(user.name, False)
                    continue
                places = [place for place, operand in enumerate(user.operands) if operand == name]
                total += sum(_used(program, called, called.parameters[place]) for place in places)
            else:
                return length
        # A root that only moves its operand reads all of it.
        return length if name == fused.root and name != parameter.name else total

    return min(length, used(parameter.name, True))


def _written(fused: Computation, name: str) -> float:
    """Return the bytes that a result of a fusion puts into memory."""
    result = fused.instructions[name]
    while result.op in MOVES:
        result = fused.instructions[result.operands[0]]
    match result.op:
        case "tuple":
            return sum(_written(fused, operand) for operand in result.operands)
        case "dynamic-update-slice":
            return size(fused.instructions[result.operands[1]].shape)
        case "scatter":
            return size(fused.instructions[result.operands[-1]].shape)
        case "parameter":
            return 0.0
    return size(fused.instructions[name].shape)
