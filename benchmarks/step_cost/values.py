"""How often a program's loops run and which branches it takes, computed from the small integers among its arguments.

A decode loop's bounds depend on what the cache holds. `Values` evaluates what such a bound is made of, and nothing
else, on numpy arrays; what depends on the model's numbers is `Unknown`."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.step_cost.hlo import Instruction, Program, dimensions, elements, numbers

MOST, TRIPS = 2**16, 2**16  # numbers in an array, and trips of a loop, that are worth computing
PLAIN = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "negate": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "shift-left": np.left_shift,
    "shift-right-arithmetic": np.right_shift,
    "shift-right-logical": lambda x, by: (x.view(f"u{x.itemsize}") >> by.view(f"u{x.itemsize}")).view(x.dtype),
    "divide": lambda a, b: (np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))).astype(a.dtype),
    "remainder": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)).astype(a.dtype),
    "select": lambda which, a, b: np.where(which, a, b),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}
COMPARE = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
LOGICAL = {"and": (False, np.bitwise_and), "or": (True, np.bitwise_or)}
REDUCE = {name: PLAIN[name] for name in ("add", "multiply", "maximum", "minimum")}
REDUCE |= {name: function for name, (_, function) in LOGICAL.items()}
TYPES = {"pred": "bool"} | {f"{k}{n}": f"{t}{n}" for k, t in (("s", "int"), ("u", "uint")) for n in (8, 16, 32, 64)}
SAME = ("copy", "bitcast", "reshape", "copy-done", "optimization-barrier", "opt-barrier")
Given = Callable[[], Any]  # a parameter's value once it is wanted


class Unknown(Exception):
    """A value that only the chip will know, or an operation that isn't evaluated here."""


def _type(shape: str) -> np.dtype:
    name = re.match(r"(\w+)\[", shape)
    if name is None or name[1] not in TYPES:
        raise Unknown(shape[:60])
    return np.dtype(TYPES[name[1]])


def _constant(instruction: Instruction) -> np.ndarray:
    text = instruction.inside
    if "..." in text:
        raise Unknown("a constant that the text leaves out")
    words = [
        word == "true" if word in ("true", "false") else int(word) for word in re.findall(r"true|false|-?\d+", text)
    ]
    return np.array(words).astype(_type(instruction.shape)).reshape(dimensions(instruction.shape))


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
            return _constant(instruction)
        with np.errstate(all="ignore"):
            return self._array(instruction)

    def _after_loop(self, instruction: Instruction) -> list[Given]:
        """What a loop hands on as it is."""
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
            raise Unknown(f"what {instruction.name} computes")

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

    def _array(self, instruction: Instruction) -> np.ndarray:
        op, shape = instruction.op, dimensions(instruction.shape)
        if op in LOGICAL:
            return self._logical(instruction)
        kind, listed = _type(instruction.shape), re.search(r"dimensions=\{([\d,]*)\}", instruction.more)
        axes = numbers(listed[1]) if listed else ()
        if op == "iota":
            axis = int(instruction.attribute("iota_dimension="))
            line = np.arange(shape[axis], dtype=kind).reshape([-1 if n == axis else 1 for n in range(len(shape))])
            return np.broadcast_to(line, shape)
        x, *more = (self.of(name) for name in instruction.operands)
        if op in PLAIN:
            return np.asarray(PLAIN[op](x, *more), dtype=kind)
        match op:
            case _ if op in SAME:
                return np.asarray(x, dtype=kind).reshape(shape)
            case "convert":
                return x.astype(kind)
            case "compare":
                return COMPARE[instruction.attribute("direction=")](x, *more)
            case "broadcast":
                ones = [n if axis in axes else 1 for axis, n in enumerate(shape)]
                return np.broadcast_to(x.reshape(ones), shape)
            case "slice":
                cut = re.search(r"slice=\{([^}]*)\}", instruction.more)[1]
                return x[tuple(slice(*map(int, part.split(":"))) for part in re.findall(r"\[([\d:]+)\]", cut))]
            case "dynamic-slice":
                first = [min(max(int(n), 0), old - new) for n, old, new in zip(more, x.shape, shape, strict=True)]
                return x[tuple(slice(n, n + count) for n, count in zip(first, shape, strict=True))]
            case "concatenate":
                return np.concatenate([x, *more], axes[0])
            case "transpose":
                return x.transpose(axes)
            case "reduce" if len(more) == 1:
                inner = self.program.computations[instruction.attribute("to_apply=")]
                function = REDUCE.get(inner.instructions[inner.root].op)
                if function is not None:
                    return np.asarray(function(function.reduce(x, axis=axes), more[0]), dtype=kind)
        raise Unknown(f"{instruction.name}: {op}")

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
