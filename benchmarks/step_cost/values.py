"""How often a program's loops run and which branches it takes, computed from the small integers among its arguments.

A decode loop's bounds depend on what the cache holds. `Values` evaluates what such a bound is made of, and nothing
else, on numpy arrays; what depends on the model's numbers is `Unknown`."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.step_cost.arrays import LOGICAL, Unknown, constant, evaluate
from benchmarks.step_cost.hlo import Instruction, Program, elements

MOST, TRIPS = 2**16, 2**16  # numbers in an array, and trips of a loop, that are worth computing
SHORT = 32  # turns of a loop whose result is computed
Given = Callable[[], Any]  # a parameter's value once it is wanted


class Values:
    """The values of one computation whose parameters are `given`."""

    def __init__(self, program: Program, name: str, given: list[Given]):
        self.program, self.computation, self.given = program, program.computations[name], given
        self.known: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """An array, or a list of functions for a tuple. Raises Unknown."""
        if name not in self.known:
            try:
                self.known[name] = self._evaluate(self.computation.instructions[name])
            except Unknown as reason:
                self.known[name] = reason
        if isinstance(self.known[name], Unknown):
            raise self.known[name]
        return self.known[name]

    def later(self, name: str) -> Given:
        return functools.partial(self.of, name)

    def arguments(self, instruction: Instruction) -> list[Given]:
        return [self.later(name) for name in instruction.operands]

    def inner(self, name: str, given: list[Given]) -> "Values":
        return Values(self.program, name, given)

    @property
    def result(self) -> Any:
        return self.of(self.computation.root)

    def _evaluate(self, instruction: Instruction) -> Any:
        op = instruction.op
        match op:
            case "parameter":
                return self.given[int(instruction.inside)]()
            case "tuple":
                return self.arguments(instruction)
            case "copy-start":
                return self.of(instruction.operands[0])
            case "get-tuple-element":
                return self.of(instruction.operands[0])[int(instruction.attribute("index="))]()
            case "fusion" | "call":
                name = instruction.attribute("calls=" if op == "fusion" else "to_apply=")
                return self.inner(name, self.arguments(instruction)).result
            case "while":
                return self._after_loop(instruction)
            case "conditional":
                name, given = self.branch(instruction)
                return self.inner(name, given).result
        if elements(instruction.shape) > MOST:
            raise Unknown(f"{instruction.name}: {instruction.shape[:40]}")
        if op == "constant":
            return constant(instruction)
        if op in LOGICAL:
            return self._logical(instruction)
        with np.errstate(all="ignore"):
            return evaluate(self.program, instruction, [self.of(name) for name in instruction.operands])

    def _after_loop(self, instruction: Instruction) -> list[Given]:
        """What a loop hands on as it is; of what it computes, what a short one does."""
        body = self.program.computations[instruction.attribute("body=")]
        root, start = body.instructions[body.root], self.of(instruction.operands[0])

        def result(index: int) -> Any:
            last = body.instructions[root.operands[index]]
            while last.op == "copy":
                last = body.instructions[last.operands[0]]
            source = body.instructions.get(last.operands[0] if last.operands else "")
            passed = last.op == "get-tuple-element" and source.op == "parameter"
            if passed and int(last.attribute("index=")) == index:
                return start[index]()
            turns = list(itertools.islice(self.turns(instruction), SHORT + 1))
            if len(turns) > SHORT:
                raise Unknown(f"what {instruction.name} computes")
            return turns[-1].result[index]() if turns else start[index]()

        return [functools.partial(result, index) for index in range(len(root.operands))]

    def _logical(self, instruction: Instruction) -> np.ndarray:
        """`and`, `or`: one known side may decide."""
        decisive, function = LOGICAL[instruction.op]
        sides, reason = [], None
        for name in instruction.operands:
            try:
                sides.append(self.of(name))
            except Unknown as why:
                reason = why
        for side in sides:
            if side.dtype == bool and (side == decisive).all():
                return side
        if reason is not None:
            raise reason
        return function(*sides)

    def branch(self, instruction: Instruction) -> tuple[str, list[Given]]:
        """The computation that a conditional takes, and what it is given."""
        which = int(self.of(instruction.operands[0]))
        names = branches(instruction)
        if "true_computation" in instruction.more:
            which = 1 - which  # the first one is taken when the condition holds
        which = which if 0 <= which < len(names) else len(names) - 1
        return names[which], [self.later(instruction.operands[1 + which])]

    def turns(self, instruction: Instruction) -> Iterator["Values"]:
        """The values of every turn of a loop."""
        condition, body = (instruction.attribute(name) for name in ("condition=", "body="))
        state = self.later(instruction.operands[0])
        for _ in range(TRIPS):
            if not self.inner(condition, [state]).result:
                return
            turn = self.inner(body, [state])
            yield turn
            state = turn.later(turn.computation.root)
        raise Unknown(f"{instruction.name} runs more than {TRIPS} times")


def branches(instruction: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.more)
    if listed:
        return re.findall(r"[\w.\-]+", listed[1].replace("%", ""))
    return [instruction.attribute(f"{name}_computation=") for name in ("true", "false")]
