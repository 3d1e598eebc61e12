"""Cycles of a decode step of a compiled TPU program: XLA's own estimates, and bundles of our kernels' schedules."""

import math
import os
import re
from pathlib import Path
from typing import NamedTuple

from benchmarks.schedule import bundles
from benchmarks.step_cost.bound import CLOCKS, NAMES, bandwidth
from benchmarks.step_cost.gpu import Bytes
from benchmarks.step_cost.hlo import ARRAY, Instruction, dimensions, size


class Reading(NamedTuple):
    """What a kernel reads in one call: encoded tokens of every row, and bytes of one of them in one layer."""

    tokens: list[int]
    token_bytes: float


def prepare(folder: str) -> None:
    """Have libtpu write its last schedules into a folder: must be called before it is loaded."""
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
    )


def is_kernel(instruction: Instruction) -> bool:
    return instruction.op == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.more


def listings(folder: Path) -> dict[str, int]:
    """Kernel -> bundles of one grid step, from a folder of schedules."""
    found = {}
    for file in folder.glob("*-final_bundles.txt"):
        name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", file.name)
        if name and not name[1].endswith("schedule-analysis"):
            found[name[1]] = file
    return {name: bundles(file.read_text()) for name, file in found.items() if "attention" in name}


def kernel_cost(instruction: Instruction, counted: dict[str, int], reading: Reading, chip: str) -> tuple[float, Bytes]:
    """Cycles of one call of an attention kernel, and its bytes. Its name ends with the tokens of a tile, which is what
    a grid step fetches while it works off the one before: the slower of the two counts, for every tile of a row."""
    name = re.search(r"_(\d+)(?:\.\d+)*$", instruction.name)
    tile = int(name[1]) if name else 0
    if not tile or instruction.name not in counted:
        raise ValueError(f"{instruction.name}: its name ends with no tile, or its schedule was not written")
    tiles = sum(-(-tokens // tile) for tokens in reading.tokens)
    written = tile * _replaced(instruction)
    fetched = tile * reading.token_bytes + written
    cycles = max(counted[instruction.name], (fetched + written) / bandwidth(chip) * CLOCKS[NAMES.get(chip, chip)])
    return tiles * cycles, Bytes(tiles * fetched, tiles * written)


def _replaced(instruction: Instruction) -> float:
    """Bytes of a token of the arrays [B, S, W] that a kernel replaces, which it reads as well: results that are written
    where an operand lies."""
    numbers = re.findall(r"\{(\d+)\}: \(\d+, \{\}\)", instruction.more)  # output_to_operand_aliasing
    arrays = [array[0] for array in ARRAY.finditer(instruction.shape)]
    return sum(size(arrays[int(n)]) / math.prod(dimensions(arrays[int(n)])[:2]) for n in numbers)
