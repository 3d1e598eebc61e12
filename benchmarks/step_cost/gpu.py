"""Kernels launched, host synchronisations and bytes read and written by a decode step of a compiled GPU program.

Bytes are those of every kernel's operands and results in device memory: of an operand only what slices and gathers take
of it, of an update in place only what is written. What the second-level cache keeps is not taken off."""

import re
from collections import defaultdict
from typing import NamedTuple

from benchmarks.step_cost.hlo import ARRAY, Computation, Instruction, Program, elements, size
from benchmarks.step_cost.walk import Visit, Walk

FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "optimization-barrier",
}
SLICES = ("slice", "dynamic-slice", "gather")
MOVED = ("bitcast", "reshape")  # the same bytes under another shape
ELEMENTWISE = (*MOVED, "convert", "copy", "transpose", "negate")


class Bytes(NamedTuple):
    read: float
    written: float

    @property
    def both(self) -> float:
        return self.read + self.written


def _users(inside: Computation) -> dict[str, list[Instruction]]:
    users = defaultdict(list)
    for instruction in inside.instructions.values():
        for name in dict.fromkeys(instruction.operands):
            users[name].append(instruction)
    return users


def _used(program: Program, inside: Computation, parameter: Instruction) -> float:
    """How many elements of a fusion's parameter are read."""
    users, full = _users(inside), elements(parameter.shape)

    def of(name: str, moved: bool) -> float:
        total = 0.0
        for user in users[name]:
            first = user.operands[0] == name and user.operands.count(name) == 1
            if user.op in ELEMENTWISE:
                total += of(user.name, moved and user.op in MOVED)
            elif user.op in SLICES and first:
                total += elements(user.shape)
            elif user.op in ("dynamic-update-slice", "scatter") and first and moved:
                continue
            elif user.op in ("fusion", "call"):
                called = program.computations[user.attribute("calls=") or user.attribute("to_apply=")]
                if {i.op for i in called.instructions.values()} <= {"parameter", *ELEMENTWISE}:
                    total += of(user.name, False)
                    continue
                places = [n for n, operand in enumerate(user.operands) if operand == name]
                total += sum(_used(program, called, called.parameters[n]) for n in places)
            else:
                return full
        # A root that only moves its operand reads all of it.
        return full if name == inside.root and name != parameter.name else total

    return min(full, of(parameter.name, True))


def _through(inside: Computation, name: str) -> Instruction:
    found = inside.instructions[name]
    while found.op in MOVED:
        found = inside.instructions[found.operands[0]]
    return found


def _written(inside: Computation, name: str) -> float:
    """Bytes that a result of a fusion puts into memory."""
    result = _through(inside, name)
    match result.op:
        case "tuple":
            return sum(_written(inside, operand) for operand in result.operands)
        case "dynamic-update-slice":
            return size(inside.instructions[result.operands[1]].shape)
        case "scatter":
            return size(inside.instructions[result.operands[-1]].shape)
        case "parameter":
            return 0.0
    return size(inside.instructions[name].shape)


def _fusion(program: Program, name: str) -> Bytes:
    inside = program.computations[name]
    read = sum(
        size(parameter.shape) * _used(program, inside, parameter) / max(1, elements(parameter.shape))
        for parameter in inside.parameters
    )
    return Bytes(read, _written(inside, inside.root))


def cost(program: Program, instruction: Instruction, inside: Computation) -> Bytes:
    """Bytes that one kernel moves."""
    shapes = [inside.instructions[name].shape for name in instruction.operands if name in inside.instructions]
    whole = size(instruction.shape)
    match instruction.op:
        case "fusion":
            return _fusion(program, instruction.attribute("calls="))
        case "copy" | "slice" | "dynamic-slice":
            return Bytes(whole, whole)
        case "copy-start":
            return Bytes(size(shapes[0]), max(0.0, whole - size(shapes[0]) - 4))  # source, target, 4 bytes of context
        case "slice-start":  # its target comes before the context
            target = list(ARRAY.finditer(instruction.shape))[-2][0]
            return Bytes(size(target.replace("S(1)", "")), size(target))
        case "dynamic-update-slice":
            return Bytes(size(shapes[1]), size(shapes[1]))
        case "scatter":
            return Bytes(size(shapes[-1]), size(shapes[-1]))
        case "custom-call" if 'custom_call_target="__cublas' in instruction.more:
            workspace = re.search(r"s8\[\d+\]\S*\)$", instruction.shape)  # which it need not touch
            return Bytes(sum(map(size, shapes)), whole - (size(workspace[0]) if workspace else 0))
        case "gather":
            return Bytes(whole + size(shapes[1]), whole)
    return Bytes(sum(map(size, shapes)), whole)


class Kernel(NamedTuple):
    """A kernel of a step: its bytes, and how often it is launched."""

    visit: Visit
    bytes: Bytes


def kernels(found: Walk) -> list[Kernel]:
    """Every kernel that a step launches, those of a call around the steps (`visit.once`) included."""
    known: dict[tuple[int, str], Bytes] = {}
    made = []
    for visit in found.visits:
        if visit.instruction.op in FREE or visit.instruction.op.endswith(("-done", "-update")):
            continue
        key = id(visit.inside), visit.instruction.name
        if key not in known:
            known[key] = cost(found.program, visit.instruction, visit.inside)
        made.append(Kernel(visit, known[key]))
    return made
