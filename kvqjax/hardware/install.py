"""Find what can be wrong with an installation before any kernel is, by reading versions and files,
not by guessing.

Each finding is one line and says what to do. `findings` takes a description of the machine, so that
a test can provoke every finding without such a machine."""

import glob
import importlib.util
import os
import re
import subprocess
from importlib import metadata
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib

from kvqjax._timing import memory
from kvqjax._version import __version__
from kvqjax.pallas_kernels.chips import KINDS
from kvqjax.pallas_kernels.support import TABLE

# Major versions of the NVIDIA driver by that of CUDA (its release notes).
OLDEST_DRIVER = {
    "12": 525,
    "13": 580,
}
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


class Finding(NamedTuple):
    """One line for the user. A `bad` one makes `kvqjax doctor` end with exit code 1, others are
    remarks."""

    bad: bool
    text: str


class Machine(NamedTuple):
    """Describes the installation and its chips. `packages` has versions by name, without those that
    are absent; `driver` is the NVIDIA driver's version, "" where there is none; `holders` are the
    processes that hold a TPU's device files."""

    packages: dict[str, str]
    platform: str
    devices: tuple[str, ...]
    memory: int | None
    nvidia: bool
    tpu: bool
    driver: str
    x64: bool
    holders: tuple[int, ...] = ()


def _versions() -> dict[str, str]:
    """Return the versions of the packages that matter, by name."""
    versions = {"kvqjax": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    for name in (*PLUGINS, "libtpu"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _driver() -> str:
    """Return the version of the NVIDIA driver that the operating system has loaded."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            match = re.search(r"(?:Kernel Module|for \w+)\s+(\d+\.\d+[\d.]*)", file.read())
            return match[1] if match else ""
    except OSError:
        pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=10)
            .stdout.split("\n")[0]
            .strip()
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def _holders() -> tuple[int, ...]:
    """Return the other processes of this user that have a TPU's device file open."""
    processes = set()
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        process = int(link.split("/")[2])
        try:
            if process != os.getpid() and re.match(r"/dev/(accel\d|vfio/\d)", os.readlink(link)):
                processes.add(process)
        except OSError:
            continue
    return tuple(sorted(processes))


def this_machine() -> Machine:
    """Describe this machine by what JAX and the operating system say of it."""
    devices = jax.local_devices()
    tpu = bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))
    return Machine(
        packages=_versions(),
        platform=devices[0].platform,
        devices=tuple(device.device_kind for device in devices),
        memory=memory(),
        nvidia=bool(glob.glob("/dev/nvidia[0-9]*")),
        tpu=tpu,
        driver=_driver(),
        x64=jnp.zeros(()).dtype == jnp.float64,
        holders=_holders() if tpu else (),
    )


def _gpu_findings(machine: Machine) -> list[Finding]:
    """List what is wrong with the drivers and plugins of an NVIDIA GPU."""
    problems = []
    plugins = [name for name in PLUGINS if name in machine.packages]
    if machine.nvidia and not plugins:
        problems.append(
            Finding(True, "an NVIDIA GPU and no CUDA plugin: pip install 'jax[cuda13]'")
        )
    for name in plugins:
        if machine.packages[name] != machine.packages["jaxlib"]:
            versions = f"{name} {machine.packages[name]} and jaxlib {machine.packages['jaxlib']}"
            problems.append(
                Finding(
                    True, f"{versions} differ: pip install {name}=={machine.packages['jaxlib']}"
                )
            )
        cuda = name[len("jax-cuda") :].partition("-")[0]
        major = machine.driver.partition(".")[0]
        if major.isdecimal() and int(major) < OLDEST_DRIVER[cuda]:
            need = f"CUDA {cuda} wants {OLDEST_DRIVER[cuda]} or newer"
            problems.append(Finding(True, f"NVIDIA driver {machine.driver} is too old: {need}"))
    if machine.nvidia and plugins and machine.platform == "cpu":
        problems.append(
            Finding(
                True, "an NVIDIA GPU and its plugin, but JAX runs on the CPU: see JAX_PLATFORMS"
            )
        )
    return problems


def _tpu_findings(machine: Machine) -> list[Finding]:
    """List what keeps JAX from a TPU that is there."""
    if not machine.tpu or machine.platform == "tpu":
        return []
    if "libtpu" not in machine.packages and importlib.util.find_spec("libtpu") is None:
        return [Finding(True, "a TPU and no libtpu: pip install 'jax[tpu]'")]
    if machine.holders:
        numbers = ", ".join(map(str, machine.holders))
        return [
            Finding(
                True, f"the TPU is in use by process {numbers}: one process at a time can have it"
            )
        ]
    return [Finding(True, "a TPU and libtpu, but JAX runs elsewhere: see JAX_PLATFORMS")]


def findings(machine: Machine) -> list[Finding]:
    """List what is wrong with an installation, or worth a remark."""
    problems = [*_gpu_findings(machine), *_tpu_findings(machine)]
    if machine.packages["jax"] != machine.packages["jaxlib"]:
        versions = f"jax {machine.packages['jax']} and jaxlib {machine.packages['jaxlib']}"
        problems.append(
            Finding(False, f"{versions} differ; JAX allows it, its own tests do not cover it")
        )
    if machine.x64:
        text = "jax_enable_x64 is on: caches keep 32-bit numbers, but what you compute around them is slow on chips"
        problems.append(Finding(False, text))
    written_for = {target for chips in TABLE.values() for target in chips}
    target = next(
        (target for kind, target in KINDS.items() if machine.devices[0].startswith(kind)), None
    )
    has_kernels = machine.platform == "cpu" or target in written_for
    if not has_kernels:
        problems.append(
            Finding(
                False,
                f"{machine.devices[0]} is a chip no kernel was written for: the plain path serves",
            )
        )
    return problems
