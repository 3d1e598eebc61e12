"""Optimised HLO text as computations and instructions, and where each instruction comes from in our sources."""

import math
import re
from typing import NamedTuple

BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^}]*\})?")
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
PASSED = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy", "while", "conditional")
WRAPPED = re.compile(r'\{\n("[^\n]*)\n\}')  # what a kernel's author says of it stands on lines of its own
# The part of a step that a source file belongs to; whatever is in no other file is "rest".
PARTS = {
    "segments.py": "attention",
    "attention.py": "attention",
    "large_tiles.py": "attention",
    "direct.py": "attention",
    "heads.py": "attention",
    "pallas_kernels": "attention",
    "decoder.py": "weights",
}


class Instruction(NamedTuple):
    """One line of a computation: `shape` as text, names of the operands, the text `inside` the parentheses and the one
    after them, `more`."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    inside: str
    more: str

    def attribute(self, pattern: str) -> str:
        """What follows `pattern` in the attributes: one name or number; "" where it isn't there."""
        found = re.search(pattern + r"%?([\w.\-]+)", self.more)
        return found[1] if found else ""


class Computation(NamedTuple):
    """Instructions by name, in order, and the last one's name."""

    instructions: dict[str, Instruction]
    root: str

    @property
    def parameters(self) -> list[Instruction]:
        found = [i for i in self.instructions.values() if i.op == "parameter"]
        return sorted(found, key=lambda i: int(i.inside))


class Program(NamedTuple):
    """A compiled program; `parts` says for each stack frame which part of a step it belongs to."""

    computations: dict[str, Computation]
    entry: str
    parts: dict[int, str]

    def part(self, instruction: Instruction, inside: Computation, default: str) -> str:
        """attention, weights or rest. What the compiler made without saying from what belongs where its largest operand
        comes from, or where its result goes; else `default`."""
        own = self._own(instruction)
        if own or instruction.op in PASSED:
            return own or default
        made = [inside.instructions[name] for name in instruction.operands if name in inside.instructions]
        used = [user for user in inside.instructions.values() if instruction.name in user.operands]
        near = sorted(made, key=lambda i: size(i.shape), reverse=True) + used
        parts = [self._own(other) for other in near if other.op not in PASSED]
        return next((part for part in parts if part), default)

    def _own(self, instruction: Instruction) -> str:
        return self.parts.get(int(instruction.attribute("stack_frame_id=") or 0), "")


def numbers(listed: str) -> tuple[int, ...]:
    return tuple(int(n) for n in listed.split(",") if n)


def _item_bits(name: str, digits: str | None) -> int:
    return BITS[name] if name in BITS else int(digits or 0)


def dimensions(shape: str) -> tuple[int, ...]:
    """Of an array's shape."""
    found = ARRAY.search(shape)
    return numbers(found[3]) if found else ()


def elements(shape: str) -> int:
    return math.prod(dimensions(shape))


def size(shape: str) -> float:
    """Bytes of an array or tuple; those narrower than a byte are packed, and what lies in the chip's own fast memory
    ("S(1)") costs none."""
    arrays = [found for found in ARRAY.finditer(shape) if "S(1)" not in found[0]]
    return sum(_item_bits(found[1], found[2]) * math.prod(numbers(found[3])) / 8 for found in arrays)


def _close(text: str) -> int:
    """Where the parenthesis that `text` begins with is closed."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if not depth:
            return place
    raise ValueError(f"no closing parenthesis: {text[:80]}")


def _instruction(name: str, rest: str) -> Instruction | None:
    end = _close(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, call = rest[:end], rest[end + 1 :]
    opcode = re.match(r"[\w\-]+(?=\()", call)
    if opcode is None:
        return None
    stop = len(opcode[0]) + _close(call[len(opcode[0]) :])
    inside = call[len(opcode[0]) + 1 : stop]
    operands = () if opcode[0] == "constant" else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, shape, opcode[0], operands, inside, call[stop + 1 :])


def parse(text: str) -> Program:
    """A program from `compiled.as_text()`."""
    found: dict[str, Computation] = {}
    entry, current, root, name = "", None, "", ""
    for line in WRAPPED.sub(r"{\1}", text).splitlines():
        head = HEAD.match(line)
        if head and not line.startswith(("HloModule", " ")):
            current, name = {}, head[2]
            entry = name if head[1] else entry
        elif line.startswith("}") and current is not None:
            found[name], current = Computation(current, root), None
        elif current is not None and (match := LINE.match(line)):
            made = _instruction(match[2], match[3])
            if made is not None:
                current[made.name] = made
                root = made.name if match[1] else root
    return Program(found, entry, _parts(text))


def _table(text: str, heading: str) -> list[str]:
    found = re.search(rf"(?m)^{heading}\n((?:\d+ .*\n)*)", text)
    return found[1].splitlines() if found else []


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}


def _parts(text: str) -> dict[int, str]:
    """Stack frame -> part, by the outermost source file that belongs to one, attention first."""
    files = {int(row.split()[0]): row for row in _table(text, "FileNames")}
    locations = {int(row.split()[0]): _fields(row) for row in _table(text, "FileLocations")}
    frames = {int(row.split()[0]): _fields(row) for row in _table(text, "StackFrames")}
    # XLA was seen to write each frame's parent one too high: a frame without one then names itself.
    shift = int(any(number == frame.get("parent_frame_id") for number, frame in frames.items()))
    parts: dict[int, str] = {}

    def own(number: int) -> str:
        file = files.get(locations.get(frames[number]["file_location_id"], {}).get("file_name_id", 0), "")
        names = file.strip('"').split("/")
        return next((part for name, part in PARTS.items() if name in names[-2:]), "rest")

    def part(number: int) -> str:
        if number not in parts:
            above = frames[number].get("parent_frame_id", shift) - shift
            outer, here = part(above) if above in frames else "rest", own(number)
            # A loop over layers is the decoder's; the attention that it calls is not.
            parts[number] = outer if outer != "rest" and here != "attention" else here
        return parts[number]

    for number in frames:
        part(number)
    return parts
