"""What one decode step runs: every instruction with how often it runs, loops and branches followed."""

import dataclasses
import re
from typing import NamedTuple

import numpy as np

from benchmarks.step_cost.arrays import Unknown
from benchmarks.step_cost.hlo import Computation, Instruction, Program, size
from benchmarks.step_cost.values import Given, Values, branches

FOLLOWED = 64  # turns of a loop that are followed one by one where loops inside it may differ


class Visit(NamedTuple):
    """An instruction that runs `times` in a step, or, outside the step's loop, in a call of it (`once`)."""

    instruction: Instruction
    inside: Computation
    part: str
    times: int
    once: bool


@dataclasses.dataclass
class Walk:
    """`syncs` are decisions taken by the host on a GPU: turns of loops whose bound is data, and branches. `unsure`
    names loops whose trips could not be computed, counted once, and branches, counted at their costliest."""

    program: Program
    visits: list[Visit]
    syncs: int
    unsure: list[str]

    def step(self, name: str, values: Values, times: int, part: str, once: bool) -> None:
        inside = self.program.computations[name]
        for instruction in inside.instructions.values():
            here = self.program.part(instruction, inside, part)
            match instruction.op:
                case "while":
                    self._loop(instruction, values, times, here, once)
                case "conditional":
                    self._branch(instruction, values, times, here, once)
                case "call" | "async-start":
                    called = instruction.attribute("to_apply=") or instruction.attribute("calls=")
                    self.step(called, values.inner(called, values.arguments(instruction)), times, here, once)
                case _:
                    self.visits.append(Visit(instruction, inside, here, times, once))

    def _loop(self, instruction: Instruction, values: Values, times: int, part: str, once: bool) -> None:
        condition, body = (instruction.attribute(name) for name in ("condition=", "body="))
        start = values.later(instruction.operands[0])
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.more)
        the_step = once and len(re.findall(r"\bwhile\b", source_name(instruction))) == 1
        turns = [values.inner(body, [start])] if the_step else None
        if turns is None and known and not (self._varies(body) and int(known[1]) <= FOLLOWED):
            turns = [values.inner(body, [start])] * int(known[1])
        if turns is None:
            try:
                turns = list(values.turns(instruction))
            except Unknown as reason:
                count = int(known[1]) if known else 1
                turns = [values.inner(body, [start])] * count
                if not known:
                    self.unsure.append(f"{instruction.name}: {reason}")
        if not known:
            asked = len(turns) + (0 if the_step else 1)
            self.syncs += times * asked
            self.step(condition, values.inner(condition, [start]), times * asked, part, once and not the_step)
        once = once and not the_step
        if len(turns) <= FOLLOWED and self._varies(body):
            for turn in turns:
                self.step(body, turn, times, part, once)
        elif turns:
            self.step(body, turns[0], times * len(turns), part, once)

    def _varies(self, name: str) -> bool:
        """Whether turns of a loop may run different things."""
        inside = self.program.computations[name].instructions.values()
        return any(i.op == "conditional" or (i.op == "while" and "known_trip_count" not in i.more) for i in inside)

    def _branch(self, instruction: Instruction, values: Values, times: int, part: str, once: bool) -> None:
        self.syncs += times
        try:
            name, given = values.branch(instruction)
            self.step(name, values.inner(name, given), times, part, once)
        except Unknown as reason:
            self.unsure.append(f"{instruction.name}: {reason}")
            tried = []
            for name, operand in zip(branches(instruction), instruction.operands[1:], strict=True):
                one = Walk(self.program, [], 0, [])
                one.step(name, values.inner(name, [values.later(operand)]), times, part, once)
                tried.append(one)
            most = max(tried, key=lambda one: sum(visit.times * size(visit.instruction.shape) for visit in one.visits))
            self.visits += most.visits
            self.syncs += most.syncs
            self.unsure += most.unsure


def source_name(instruction: Instruction) -> str:
    """What the program was traced from: the name of an argument, or the path of the scopes of an operation."""
    name = re.search(r'op_name="([^"]*)"', instruction.more)
    return name[1].replace("\\'", "'") if name else ""


def given(parameter: Instruction, facts: dict[str, np.ndarray]) -> Given:
    """The value of an argument by its name in the program, such as "state.cache.lengths"."""

    def value() -> np.ndarray:
        if source_name(parameter) not in facts:
            raise Unknown(source_name(parameter) or parameter.name)
        return facts[source_name(parameter)]

    return value


def walk(program: Program, facts: dict[str, np.ndarray]) -> Walk:
    """One turn of the program's outermost loop, a decode step, with arguments of which `facts` are known."""
    entry = program.computations[program.entry]
    known = [given(parameter, facts) for parameter in entry.parameters]
    found = Walk(program, [], 0, [])
    found.step(program.entry, Values(program, program.entry, known), 1, "rest", True)
    return found
