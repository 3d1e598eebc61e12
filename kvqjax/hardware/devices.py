"""Chips by name: what a program gets of their memory, how fast they are by data sheet and by
measurement, and the names that people give them."""

import functools
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from kvqjax._arguments import whole_number
from kvqjax._errors import UserError, suggest
from kvqjax.parallel.mesh_size import MOST_DEVICES

GIB = 2**30
# Of a GPU's memory JAX takes so much, unless its environment variable says otherwise.
GPU_SHARE = 0.75
# The newer name first.
SHARE_VARIABLES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)


class Device(NamedTuple):
    """One chip. `memory`: GiB that programs can have in all, less than its data sheet says.
    `bandwidth` of that memory in GB/s, and dense 16-bit matrix TFLOP/s, as the vendor states them.
    `torus`, where the chip can be compiled for ahead of time: the compiler's name for it and the
    axes of its slices. `sold`: GB by which the chip is named and sold. A v7x chip is two devices to
    JAX; these are the figures of one. A T4 has no bfloat16; its peak and its bytes are those of
    float16."""

    memory: float
    bandwidth: int
    tflops: int
    torus: tuple[str, int] = ("", 0)
    sold: int = 0


class Gpu(NamedTuple):
    """Properties of a GPU that XLA asks for: compute capability, multiprocessors, float32 units and
    resident threads of each, bytes of shared memory each has and one block may take, bytes of
    second-level cache, clock in GHz; and our kernels' target.
    """

    capability: tuple[int, int]
    cores: int
    units: int
    threads: int
    shared: int
    most_shared: int
    cache: int
    clock: float
    target: str


# Memory of TPUs is what libtpu 0.0.52 names as available where it refuses a program that is
# compiled for the chip ("exceeds available HBM (15.75G)"). A v4 has twice what it names for one of
# the chip's two cores. Memory of GPUs is the total that a process sees. For T4, L4, A10G and H100
# it is by nvidia-smi (15360, 23034, 23028 and 81559 MiB). For the others it is by CUDA's
# cudaMemGetInfo, as PyTorch prints it in its messages ("total capacity of"), which is up to 0.6 GiB
# less. Drivers differ by a tenth or two of a GiB, and error correction takes a sixteenth of some
# cards. Bandwidth and TFLOP/s of TPUs: Google's pages on their architecture
# (cloud.google.com/tpu/docs/v4 and its neighbours). Of GPUs: NVIDIA's data sheets, without
# sparsity, of which they print the double; the A10G is AWS's A10, the B200 that of HGX B200.
DEVICES = {
    "v4": Device(30.5, 1200, 275, ("v4", 3), 32),
    "v5e": Device(15.75, 820, 197, ("v5e", 2), 16),
    "v5p": Device(95.73, 2765, 459, ("v5p", 3), 95),
    "v6e": Device(31.24, 1640, 918, ("v6e", 2), 32),
    "v7x": Device(94.74, 3685, 1153, ("tpu7x", 3), 96),
    "t4": Device(15.0, 320, 65, sold=16),
    "l4": Device(22.5, 300, 121, sold=24),
    "a10g": Device(22.5, 600, 70, sold=24),
    "l40s": Device(44.5, 864, 362, sold=48),
    "a100-40": Device(39.5, 1555, 312, sold=40),
    "a100-80": Device(79.3, 2039, 312, sold=80),
    "h100": Device(79.6, 3350, 989, sold=80),
    "h200": Device(139.8, 4800, 989, sold=141),
    "b200": Device(178.4, 8000, 2250, sold=180),
    "rtx3090": Device(23.6, 936, 71, sold=24),
    "rtx4090": Device(23.6, 1008, 165, sold=24),
}

# NVIDIA's figures, which XLA wants of a GPU that is not there.
_A100 = Gpu((8, 0), 108, 64, 2048, 167936, 166912, 41943040, 1.41, "sm80")
_HOPPER = Gpu((9, 0), 132, 128, 2048, 233472, 232448, 52428800, 1.98, "sm90")
GPUS = {
    "t4": Gpu((7, 5), 40, 64, 1024, 65536, 65536, 4194304, 1.59, "sm75"),
    "a10g": Gpu((8, 6), 80, 128, 1536, 102400, 101376, 6291456, 1.71, "sm86"),
    "l4": Gpu((8, 9), 58, 128, 1536, 102400, 101376, 50331648, 2.04, "sm89"),
    "l40s": Gpu((8, 9), 142, 128, 1536, 102400, 101376, 100663296, 2.52, "sm89"),
    "a100-40": _A100,
    "a100-80": _A100,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": Gpu((10, 0), 148, 128, 2048, 233472, 232448, 132120576, 1.97, "sm100"),
    "rtx3090": Gpu((8, 6), 82, 128, 1536, 102400, 101376, 6291456, 1.695, "sm86"),
    "rtx4090": Gpu((8, 9), 128, 128, 1536, 102400, 101376, 75497472, 2.52, "sm89"),
}

# What else the chips are called, without separators: by clouds, drivers and JAX (`device_kind`).
ALIASES = {
    "v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e", "trillium": "v6e", "tpu7x": "v7x", "7x": "v7x",
    "ironwood": "v7x", "v5": "v5p", "3090": "rtx3090", "4090": "rtx4090", "a100": "a100-40",
}  # fmt: skip
FILLERS = "nvidia|tesla|geforce|google|cloud|tpu|gpu|pcie|sxm|hbm|gb|accelerator|slice|podslice"
COUNT = r"\d{1,9}"  # of devices
MEMORY = r"\d{1,9}gi?b?"
# The number in the name of their slices counts cores, of which a chip has two.
CORES = (
    "v4",
    "v5p",
)


class Named(NamedTuple):
    """A chip of `DEVICES` by its name there, how many devices of it were named, and what was taken
    for granted."""

    name: str
    count: int
    note: str


def _chip(words: list[str], sold: int | None) -> str | None:
    """The name in `DEVICES` of a chip that is called by these words and sold with `sold` GB."""
    short = "".join(words)
    matches = [name for name in DEVICES if short in (name.replace("-", ""), name.partition("-")[0])]
    fitting = [
        name
        for name in matches or filter(None, [ALIASES.get(short)])
        if sold in (None, DEVICES[name].sold)
    ]
    return fitting[0] if fitting else None


def _single_device(text: str) -> Named | None:
    """`find_device` without a multiplier; None where no chip is called so."""
    words = [
        word
        for word in re.split(r"[\s_\-/,()]+", text)
        if not re.fullmatch(rf"(({FILLERS})\d?e?)?", word)
    ]
    gigabytes = [int(word.rstrip("gib")) for word in words if re.fullmatch(MEMORY, word)]
    words = [word for word in words if not re.fullmatch(MEMORY, word)]
    *head, last = words or [""]
    if name := _chip(words, gigabytes[0] if gigabytes else None):
        guessed = name == "a100-40" and words == ["a100"] and not gigabytes
        return Named(
            name,
            1,
            "an A100 is taken for the one with 40 GB; the other is a100-80" if guessed else "",
        )
    number = whole_number(last)
    if not head or number is None:
        return None
    name = _chip(head, None)
    if name is None or not DEVICES[name].torus[0]:  # "h100-80": the number says gigabytes
        name = _chip(head, number)
        return Named(name, 1, "") if name else None
    count = number // 2 if name in CORES else number
    note = f"{text} has {count} chips: the number in its name counts cores" if name in CORES else ""
    return Named(name, count, note)


def find_device(text: str) -> Named:
    """A chip by the names that it has in clouds, drivers and shops, with a number of devices where
    one is said: "H100", "NVIDIA A100-SXM4-80GB", "8xH100", "v5e-16", "v5litepod-8", "RTX 4090".
    Raises UserError with the nearest name."""
    plain = text.strip().lower()
    named = _single_device(plain)
    for pattern in (
        rf"(?P<count>{COUNT})\s*[x*\u00d7]\s*(?P<name>.+)",
        rf"(?P<name>.+?)\s*[x*:\u00d7]\s*(?P<count>{COUNT})",
    ):
        multiple = None if named else re.fullmatch(pattern, plain)
        if multiple and (inner := _single_device(multiple["name"])):
            named = inner._replace(count=inner.count * int(multiple["count"]))
    if named is None or not 1 <= named.count <= MOST_DEVICES:
        hint = suggest(plain, [*DEVICES])
        raise UserError(
            f"device {text!r} is not known{hint}; v5e-16 and 8xh100 are several; memory=GIB plans for any other"
        )
    return named


def target_name(chip: str) -> str:
    """Give the name by which kernels and forms of storage know a chip of `DEVICES`. "cpu" stands
    for the forms that run everywhere."""
    return GPUS[chip].target if chip in GPUS else {"v4": "cpu"}.get(chip, chip)


def program_share(name: str | None, fraction: float | int | None = None) -> float:
    """The share of a device's memory that a JAX program gets: `fraction` where it is given, else on
    GPUs what the environment says or JAX's own three quarters. The limits of TPUs in `DEVICES` are
    those of a program already."""
    if fraction is not None:
        if not 0 < fraction <= 1:
            raise UserError(f"memory_fraction={fraction}; wanted more than 0 and at most 1")
        return fraction
    if name is None or DEVICES[name].torus[0]:
        return 1.0
    for variable in SHARE_VARIABLES:
        if value := os.environ.get(variable, ""):
            try:
                return program_share(name, float(value))
            except ValueError as error:
                raise UserError(f"{variable}={value}; wanted a number of at most 1") from error
    return GPU_SHARE


@functools.cache
def _measured() -> dict[str, dict[str, float]]:
    """Read how long attention takes, {chip: {method: times}} (`python -m benchmarks.hardware`,
    docs/speed.md).

    A number stands for one layer of Llama-3.1-8B and one new token in each of 8 rows of 32768, by
    the path that `kernels="auto"` takes. It counts in times of what reading bfloat16 keys and
    values takes at the chip's bandwidth. Those of the H100 are of jax 0.11.2
    (benchmarks/records/hardware.jsonl, blocks "attention" and "kernels"). JAX's attention by cuDNN
    takes 1.08 there."""
    return json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))


def measured_text() -> str:
    """Say for every chip how long attention takes with each method that was measured there, a line
    a chip."""
    lines = []
    for chip, factors in _measured().items():
        fastest_first = sorted(factors.items(), key=lambda pair: pair[1])
        times = ", ".join(f"{method} {factor:g}" for method, factor in fastest_first)
        lines.append(
            f"Attention of a decode step on an {chip}, in times of 16-bit keys and values "
            f"(measured): {times}."
        )
    return "\n".join(lines)


def attention_over_16_bits(method: str, chip: str) -> float | None:
    """Return how long a method's attention takes on a chip, in times of 16-bit keys and values;
    None where it was not measured."""
    return _measured().get(chip, {}).get(method)
