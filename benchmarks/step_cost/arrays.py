"""Operations of a program on small arrays of integers and truth values, on numpy."""

import re

import numpy as np

from benchmarks.step_cost.hlo import Instruction, Program, dimensions, numbers

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


class Unknown(Exception):
    """A value that only the chip will know, or an operation that isn't evaluated here."""


def _type(shape: str) -> np.dtype:
    name = re.match(r"(\w+)\[", shape)
    if name is None or name[1] not in TYPES:
        raise Unknown(shape[:60])
    return np.dtype(TYPES[name[1]])


def constant(instruction: Instruction) -> np.ndarray:
    """A constant's numbers."""
    text = instruction.inside
    if "..." in text:
        raise Unknown("a constant that the text leaves out")
    words = [
        word == "true" if word in ("true", "false") else int(word) for word in re.findall(r"true|false|-?\d+", text)
    ]
    return np.array(words).astype(_type(instruction.shape)).reshape(dimensions(instruction.shape))


def evaluate(program: Program, instruction: Instruction, operands: list[np.ndarray]) -> np.ndarray:
    """What an operation makes of arrays of integers or truth values."""
    op, shape = instruction.op, dimensions(instruction.shape)
    kind, listed = _type(instruction.shape), re.search(r"dimensions=\{([\d,]*)\}", instruction.more)
    axes = numbers(listed[1]) if listed else ()
    if op == "iota":
        axis = int(instruction.attribute("iota_dimension="))
        line = np.arange(shape[axis], dtype=kind).reshape([-1 if n == axis else 1 for n in range(len(shape))])
        return np.broadcast_to(line, shape)
    if not operands:
        raise Unknown(f"{instruction.name}: {op}")
    x, *more = operands
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
        case "dynamic-update-slice":
            part, *at = more
            first = [min(max(int(n), 0), old - new) for n, old, new in zip(at, x.shape, part.shape, strict=True)]
            made = np.array(x)
            made[tuple(slice(n, n + count) for n, count in zip(first, part.shape, strict=True))] = part
            return made
        case "bitcast-convert":
            return x.view(kind)
        case "concatenate":
            return np.concatenate([x, *more], axes[0])
        case "transpose":
            return x.transpose(axes)
        case "reduce" if len(more) == 1:
            inner = program.computations[instruction.attribute("to_apply=")]
            function = REDUCE.get(inner.instructions[inner.root].op)
            if function is not None:
                return np.asarray(function(function.reduce(x, axis=axes), more[0]), dtype=kind)
    raise Unknown(f"{instruction.name}: {op}")
