"""Parse a compiled program: optimised HLO text as computations and instructions, with sizes and
source files."""

import math
import re
from typing import NamedTuple

BITS = {"pred": 8, "token": 0, "opaque": 0}  # of types whose name does not end with their bits
ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^}]*\})?")
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
WRAPPED = re.compile(r'\{\n("[^\n]*)\n\}')  # a kernel's cost estimate stands on lines of its own
FRAME = re.compile(r"(?m)^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}")

PARTS = ("attention", "weights", "rest")  # of a step's work
# The part of which a source file, or a folder of them, is the work. All other files are "rest".
SOURCES = {
    "readers": "attention",
    "attention.py": "attention",
    "large_tiles.py": "attention",
    "direct.py": "attention",
    "heads.py": "attention",
    "pallas_kernels": "attention",
    "decoder.py": "weights",
}
# These say where a value lies, not what computes it.
CARRIERS = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "copy",
    "while",
    "conditional",
)


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
        shape: The result's type as text, "bf16[8,128]{1,0}" or a tuple of such.
        operands: Names of other instructions.
        literal: The text between the parentheses.
        attributes: The text after them.
    """

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    def attribute(self, key: str) -> str:
        """Return the name or number that follows `key`, or "" where it is absent."""
        match = re.search(key + r"%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""

    @property
    def source(self) -> str:
        """An argument's name, or the scopes in which an operation was traced."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def called(self) -> str:
        """The computation that a fusion or a call runs."""
        return self.attribute("calls=") or self.attribute("to_apply=")


class Computation(NamedTuple):
    """Instructions by name, in order, and the name of the result."""

    instructions: dict[str, Instruction]
    root: str

    @property
    def parameters(self) -> list[Instruction]:
        parameters = [line for line in self.instructions.values() if line.op == "parameter"]
        return sorted(parameters, key=lambda parameter: int(parameter.literal))

    def shapes(self, instruction: Instruction) -> list[str]:
        """Return the types of an instruction's operands."""
        return [
            self.instructions[name].shape
            for name in instruction.operands
            if name in self.instructions
        ]


class Program(NamedTuple):
    """Computations by name; `parts` says for each stack frame to which part of a step it
    belongs."""

    computations: dict[str, Computation]
    entry: str
    parts: dict[str, str]

    def part(self, instruction: Instruction, computation: Computation, default: str) -> str:
        """Return "attention", "weights" or "rest".

        An instruction that the compiler added names no source. It belongs where its largest operand
        comes from, or where its result goes, else to `default`.
        """
        part = self.parts.get(instruction.attribute("stack_frame_id="), "")
        if part or instruction.op in CARRIERS:
            return part or default
        lines = computation.instructions
        operands = [lines[name] for name in instruction.operands if name in lines]
        users = [line for line in lines.values() if instruction.name in line.operands]
        neighbours = sorted(operands, key=lambda operand: size(operand.shape), reverse=True) + users
        parts = [
            self.parts.get(line.attribute("stack_frame_id="), "")
            for line in neighbours
            if line.op not in CARRIERS
        ]
        return next(filter(None, parts), default)


def numbers(listed: str) -> tuple[int, ...]:
    """Return the numbers of "1,2,3"."""
    return tuple(int(number) for number in listed.split(",") if number)


def dimensions(shape: str) -> tuple[int, ...]:
    """Return the axes of an array's type, or of the first of a tuple."""
    match = ARRAY.search(shape)
    return numbers(match[3]) if match else ()


def elements(shape: str) -> int:
    return math.prod(dimensions(shape))


def size(shape: str) -> float:
    """Return the bytes of an array or tuple. Types below a byte are packed. "S(1)" is a TPU's fast
    memory and free."""
    total = 0.0
    for array in ARRAY.finditer(shape):
        kind, bits, axes = array.groups()
        if "S(1)" not in array[0]:
            total += BITS.get(kind, int(bits or 0)) * math.prod(numbers(axes)) / 8
    return total


def _closing(text: str) -> int:
    """Find the parenthesis that closes the one at the start."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if not depth:
            return place
    raise ValueError(f"no closing parenthesis: {text[:80]}")


def _instruction(name: str, text: str) -> Instruction | None:
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    shape, call = text[:end], text[end + 1 :]
    opcode = re.match(r"[\w\-]+(?=\()", call)
    if opcode is None:
        return None
    begin = opcode.end()
    stop = begin + _closing(call[begin:])
    literal = call[begin + 1 : stop]
    operands = () if opcode[0] == "constant" else tuple(re.findall(r"%([\w.\-]+)", literal))
    return Instruction(name, shape, opcode[0], operands, literal, call[stop + 1 :])


def parse(text: str) -> Program:
    """Return the program of `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, lines, root, name = "", None, "", ""
    for line in WRAPPED.sub(r"{\1}", text).splitlines():
        head = HEAD.match(line)
        if head and not line.startswith(("HloModule", " ")):
            lines, name = {}, head[2]
            entry = name if head[1] else entry
        elif line.startswith("}") and lines is not None:
            computations[name], lines = Computation(lines, root), None
        elif lines is not None and (match := LINE.match(line)):
            instruction = _instruction(match[2], match[3])
            if instruction is not None:
                lines[instruction.name] = instruction
                root = instruction.name if match[1] else root
    return Program(computations, entry, _parts(text))


def _parts(text: str) -> dict[str, str]:
    """Return the part of every stack frame: that of its outermost file, but attention wherever it
    is called."""
    files = dict(re.findall(r'(?m)^(\d+) "(.*)"$', text.partition("\nFunctionNames")[0]))
    locations = dict(re.findall(r"(?m)^(\d+) \{file_name_id=(\d+)", text))
    frames = {frame: (location, parent) for frame, location, parent in FRAME.findall(text)}
    # XLA was seen to write each parent's number one too high: an outermost frame then names itself.
    shift = int(any(frame == parent for frame, (_, parent) in frames.items()))
    parts: dict[str, str] = {}

    def part(frame: str) -> str:
        if frame not in parts:
            location, parent = frames[frame]
            above = str(int(parent or shift) - shift)
            path = files.get(locations.get(location, ""), "").split("/")[-2:]
            inner = next((part for name, part in SOURCES.items() if name in path), "rest")
            outer = part(above) if above in frames else "rest"
            # The decoder's loop over layers calls attention.
            parts[frame] = outer if outer != "rest" and inner != "attention" else inner
        return parts[frame]

    for frame in frames:
        part(frame)
    return parts
