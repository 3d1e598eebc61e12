"""Describes the machine and its limits: bandwidth, matrix products, launches, decisions of the
host."""

import os
import shutil
import subprocess
import sys
from importlib import metadata

import jax
import jax.numpy as jnp

from benchmarks.hardware.timing import slopes, spread, words_of

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy", "flax", "torch")
FIELDS = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


def on_gpu() -> bool:
    """Say whether JAX's first device is a GPU."""
    return jax.default_backend() == "gpu"


def environment(log, options) -> None:
    """Write down versions, card and device."""
    log.item("machine", _machine)
    log.item("card", _card)
    log.item("device", _device)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _machine() -> dict:
    versions = {name: _version(name) for name in PACKAGES}
    machine = {
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "ptxas": shutil.which("ptxas") or "none",
    }
    return (
        machine
        | versions
        | {"short": f"jax {versions['jax']}, python {machine['python']}, {machine['cores']} cores"}
    )


def _card() -> dict:
    if shutil.which("nvidia-smi") is None:
        return {"state": "skipped", "short": "no GPU"}
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    return dict(zip(FIELDS.split(","), text.split(", "), strict=False)) | {"short": text}


def _device() -> dict:
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    short = f"{device.device_kind}, {limit / 1e9:.1f} GB for JAX"
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "bytes_limit": limit,
        "short": short,
    }


def ceilings(log, options) -> None:
    """Measure what other blocks compare with."""
    size, order = (2**22, 256) if options.tiny else (2**31, 8192)
    log.item("copy GB/s", lambda: _copy(size))
    log.item("read GB/s", lambda: _read(size))
    log.item("product TFLOP/s", lambda: _product(order))
    log.item("kernel us", lambda: _launches({}))
    log.item(
        "kernel us, no command buffers", lambda: _launches(NO_COMMAND_BUFFERS if on_gpu() else {})
    )
    log.item("loop turn us, host decides", _turns)


def _chained(function, x):
    """Make `run(n)` for `slopes`: n calls, each fed by the one before, which may take its
    memory."""
    values = [x]

    def run(turns: int) -> None:
        for _ in range(turns):
            values[0] = function(values[0])
        jax.block_until_ready(values[0])

    return run


def _rate(seconds: list[float], work: float, unit: str) -> dict:
    rates = spread([work / s for s in seconds])
    return rates | {"unit": unit, "short": words_of(rates, unit)}


def _copy(size: int) -> dict:
    """Bytes read and written, both counted."""
    inner, flip = 8, jnp.uint32(0x5A5A5A5A)
    copies = jax.jit(
        lambda x: jax.lax.fori_loop(0, inner, lambda _, x: x ^ flip, x), donate_argnums=0
    )
    x = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    return _rate(slopes(_chained(copies, x), 1, 4), 2e-9 * size * inner, "GB/s")


def _read(size: int) -> dict:
    inner, x = 8, jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    reads = jax.jit(lambda s, x: jax.lax.fori_loop(0, inner, lambda _, s: jnp.max(x ^ s), s))
    return _rate(
        slopes(_chained(lambda s: reads(s, x), jnp.uint32(1)), 1, 4), 1e-9 * size * inner, "GB/s"
    )


def _product(order: int) -> dict:
    inner, keys = 8, jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (order, order), jnp.bfloat16) for key in keys)
    x = x * jnp.bfloat16(order**-0.5)
    # Two at a turn: each writes where the other reads, and nothing is copied.
    chain = jax.jit(
        lambda y, x: jax.lax.fori_loop(0, inner // 2, lambda _, y: y @ x @ x, y), donate_argnums=0
    )
    return _rate(
        slopes(_chained(lambda y: chain(y, x), y), 1, 4), 2e-12 * order**3 * inner, "TFLOP/s"
    )


def _per_turn(seconds: list[float], count: int) -> dict:
    times = spread(seconds, 1e6 / count)
    return times | {"unit": "us", "short": words_of(times, "us")}


def _launches(options: dict) -> dict:
    """A kernel of 1024 numbers that waits for the one before."""
    kernels = 256

    def chain(x):
        for number in range(kernels):
            x = jax.lax.optimization_barrier(x * 0.5 + number)
        return x

    x = jax.random.normal(jax.random.key(0), (1024,))
    program = jax.jit(chain).lower(x).compile(compiler_options=options)
    return _per_turn(slopes(_chained(program, x), 1, 9), kernels)


def _turns() -> dict:
    """A turn of a loop whose end is data."""
    turns = 256

    @jax.jit
    def loop(x, count):
        def step(loop):
            return (loop[0] - 1, loop[1] * 0.5 + 1)

        return jax.lax.while_loop(lambda loop: loop[0] > 0, step, (count, x))[1]

    x = jax.random.normal(jax.random.key(0), (1024,))
    return _per_turn(slopes(_chained(lambda x: loop(x, jnp.int32(turns)), x), 1, 9), turns)
