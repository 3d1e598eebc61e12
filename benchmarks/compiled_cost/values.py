"""Compute how often a program's loops run and which branches it takes, from the small integers
among its arguments.

A decode loop's bounds depend on how many tokens the cache holds. `Values` evaluates, on numpy
arrays, what such a bound is made of and nothing else. What depends on the model's numbers is
`Unknown`.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.compiled_cost.hlo import Instruction, Program, dimensions, elements, numbers

MOST_ELEMENTS = 2**16  # of an array; a bound is made of few numbers, a cache of many
MOST_TURNS = 2**16  # of a loop whose trips are counted
SHORT_LOOP = 32  # turns; the result of a longer loop is not computed

ELEMENTWISE = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "negate": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "shift-left": np.left_shift,
    "shift-right-arithmetic": np.right_shift,
    "shift-right-logical": lambda x, by: x.view(f"u{x.itemsize}") >> by.view(f"u{x.itemsize}"),
    "divide": lambda x, by: (
        np.sign(x) * np.sign(by) * (np.abs(x) // np.maximum(np.abs(by), 1))
    ),  # towards zero
    "remainder": lambda x, by: np.fmod(x, np.where(by == 0, 1, by)),
    "select": np.where,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
RESHAPING = ("copy", "bitcast", "reshape", "copy-done", "optimization-barrier", "opt-barrier")
DECISIVE = {"and": False, "or": True}  # the side that decides alone
TYPES = {
    f"{short}{bits}": f"{long}{bits}"
    for short, long in (("s", "int"), ("u", "uint"))
    for bits in (8, 16, 32, 64)
}
TYPES["pred"] = "bool"

Later = Callable[[], Any]  # computes a value when it is wanted


class Unknown(Exception):
    """A value that only the chip will know, or an operation that is not evaluated here."""


def _dtype(shape: str) -> np.dtype:
    kind = shape.partition("[")[0]
    if kind not in TYPES:
        raise Unknown(shape[:60])
    return np.dtype(TYPES[kind])


def _constant(instruction: Instruction) -> np.ndarray:
    if "..." in instruction.literal:
        raise Unknown("a constant that the text leaves out")
    words = re.findall(r"true|false|-?\d+", instruction.literal)
    values = [word == "true" if word in ("true", "false") else int(word) for word in words]
    return np.array(values).astype(_dtype(instruction.shape)).reshape(dimensions(instruction.shape))


def _evaluate(program: Program, instruction: Instruction, operands: list[np.ndarray]) -> np.ndarray:
    """Return what one operation makes of arrays of integers or truth values."""
    op, shape, dtype = instruction.op, dimensions(instruction.shape), _dtype(instruction.shape)
    listed = re.search(r"dimensions=\{([\d,]*)\}", instruction.attributes)
    axes = numbers(listed[1]) if listed else ()
    name = instruction.attribute("direction=") if op == "compare" else op
    if operands and name in ELEMENTWISE:
        result = np.asarray(ELEMENTWISE[name](*operands))
        # A logical shift leaves the bits as unsigned numbers.
        return result.view(dtype) if name == "shift-right-logical" else result.astype(dtype)
    match op, operands:
        case "iota", _:
            axis = int(instruction.attribute("iota_dimension="))
            steps = np.arange(shape[axis], dtype=dtype)
            return np.broadcast_to(
                steps.reshape([-1 if n == axis else 1 for n in range(len(shape))]), shape
            )
        case "convert", [x]:
            return x.astype(dtype)
        case _, [x] if op in RESHAPING:
            return x.astype(dtype).reshape(shape)
        case "broadcast", [x]:
            return np.broadcast_to(
                x.reshape([n if axis in axes else 1 for axis, n in enumerate(shape)]), shape
            )
        case "slice", [x]:
            bounds = re.findall(
                r"\[([\d:]+)\]", re.search(r"slice=\{([^}]*)\}", instruction.attributes)[1]
            )
            return x[tuple(slice(*map(int, bound.split(":"))) for bound in bounds)]
        case "dynamic-slice", [x, *starts]:
            begin = [
                min(max(int(n), 0), old - new)
                for n, old, new in zip(starts, x.shape, shape, strict=True)
            ]
            return x[tuple(slice(n, n + count) for n, count in zip(begin, shape, strict=True))]
        case "concatenate", _:
            return np.concatenate(operands, axes[0])
        case "reduce", [x, start]:
            inner = program.computations[instruction.called]
            function = ELEMENTWISE.get(inner.instructions[inner.root].op)
            if isinstance(function, np.ufunc) and function.nin == 2:
                return np.asarray(function(function.reduce(x, axis=axes), start), dtype=dtype)
    raise Unknown(f"{instruction.name}: {op}")


class Values:
    """The values of one computation, each computed once it is wanted.

    Args:
        program: The program.
        name: The computation.
        arguments: The values of its parameters.
    """

    def __init__(self, program: Program, name: str, arguments: list[Later]):
        self.program, self.computation, self.arguments = (
            program,
            program.computations[name],
            arguments,
        )
        self.known: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """Return an array, or for a tuple a list of functions that return its parts.

        Raises:
            Unknown: The value depends on what is not known.
        """
        if name not in self.known:
            try:
                self.known[name] = self._compute(self.computation.instructions[name])
            except Unknown as reason:
                self.known[name] = reason
        if isinstance(self.known[name], Unknown):
            raise self.known[name]
        return self.known[name]

    def later(self, name: str) -> Later:
        return functools.partial(self.of, name)

    @property
    def result(self) -> Any:
        return self.of(self.computation.root)

    def inner(self, name: str, operands: tuple[str, ...]) -> "Values":
        """Return the values of a computation that is called with these operands."""
        return Values(self.program, name, [self.later(operand) for operand in operands])

    def _compute(self, instruction: Instruction) -> Any:
        op, operands = instruction.op, instruction.operands
        match op:
            case "parameter":
                return self.arguments[int(instruction.literal)]()
            case "tuple":
                return [self.later(operand) for operand in operands]
            case "copy-start":
                return self.of(operands[0])
            case "get-tuple-element":
                return self.of(operands[0])[int(instruction.attribute("index="))]()
            case "fusion" | "call":
                return self.inner(instruction.called, operands).result
            case "while":
                return self._after_loop(instruction)
            case "conditional":
                return self.inner(*self.branch(instruction)).result
        if elements(instruction.shape) > MOST_ELEMENTS:
            raise Unknown(f"{instruction.name}: {instruction.shape[:40]}")
        if op == "constant":
            return _constant(instruction)
        if op in DECISIVE and (side := self._decisive(instruction)) is not None:
            return side
        with np.errstate(all="ignore"):
            return _evaluate(self.program, instruction, [self.of(operand) for operand in operands])

    def _decisive(self, instruction: Instruction) -> np.ndarray | None:
        """Return the side of an `and` or `or` that decides, whatever the other one is."""
        for operand in instruction.operands:
            try:
                side = self.of(operand)
            except Unknown:
                continue
            if side.dtype == bool and (side == DECISIVE[instruction.op]).all():
                return side
        return None

    def _after_loop(self, instruction: Instruction) -> list[Later]:
        """Return what a loop hands on unchanged, and what a short loop computes."""
        body = self.program.computations[instruction.attribute("body=")]
        start, outputs = self.of(instruction.operands[0]), body.instructions[body.root].operands

        def result(index: int) -> Any:
            output = body.instructions[outputs[index]]
            while output.op == "copy":
                output = body.instructions[output.operands[0]]
            source = body.instructions.get(output.operands[0] if output.operands else "")
            unchanged = output.op == "get-tuple-element" and source.op == "parameter"
            if unchanged and int(output.attribute("index=")) == index:
                return start[index]()
            turns = list(itertools.islice(self.turns(instruction), SHORT_LOOP + 1))
            if len(turns) > SHORT_LOOP:
                raise Unknown(f"what {instruction.name} computes")
            return turns[-1].result[index]() if turns else start[index]()

        return [functools.partial(result, index) for index in range(len(outputs))]

    def branch(self, instruction: Instruction) -> tuple[str, tuple[str, ...]]:
        """Return the computation that a conditional takes, and its operand."""
        index, names = int(self.of(instruction.operands[0])), branches(instruction)
        if "true_computation" in instruction.attributes:
            index = 1 - index
        index = index if 0 <= index < len(names) else len(names) - 1
        return names[index], (instruction.operands[1 + index],)

    def turns(self, instruction: Instruction) -> Iterator["Values"]:
        """Yield the values of every turn of a loop."""
        condition, body = instruction.attribute("condition="), instruction.attribute("body=")
        state = self.later(instruction.operands[0])
        for _ in range(MOST_TURNS):
            if not Values(self.program, condition, [state]).result:
                return
            turn = Values(self.program, body, [state])
            yield turn
            state = turn.later(turn.computation.root)
        raise Unknown(f"{instruction.name} runs more than {MOST_TURNS} times")


def branches(instruction: Instruction) -> list[str]:
    """Return the computations of a conditional; of a truth value, first that of true."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if listed:
        return re.findall(r"[\w.\-]+", listed[1].replace("%", ""))
    return [instruction.attribute(f"{name}_computation=") for name in ("true", "false")]
