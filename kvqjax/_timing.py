"""Timing of jitted calls on any backend, the description of a machine that a figure carries, and the
bar by which long work shows progress."""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# bar(label) before a step gives what is told its progress, 0 to 1.
Bar = Callable[[str], Callable[[float], None]]


def silent(label: str) -> Callable[[float], None]:
    """A bar that shows nothing."""
    return lambda fraction: None


def alternating_seconds(calls: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Wall-clock seconds until what each call returns is ready, `repeats` rounds of all calls in
    turn, so that what slows the machine for a while slows them all; after a round that compiles and
    warms up."""
    spent: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, times in zip(calls, spent, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
    return [times[1:] for times in spent]


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median wall-clock seconds until what `call()` returns is ready, after one call that compiles
    and warms up."""
    return statistics.median(alternating_seconds([call], repeats)[0])


def product_rate(
    size: int = 1024, repeats: int = 3, inner: int = 4, dtype: str = "float32"
) -> float:
    """Floating point operations per second of a chain of `inner` matrix products [size, size]."""

    @jax.jit
    def chain(x):
        return jax.lax.fori_loop(0, inner, lambda _, y: y @ x, x)

    x = jnp.ones((size, size), dtype) / size
    return 2 * size**3 * inner / median_seconds(lambda: chain(x), repeats)


def memory() -> int | None:
    """Bytes that the first device can hold; the machine's if that is a CPU; None if it is
    unknown."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return stats.get("bytes_limit")
    return (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    )


def machine() -> dict[str, Any]:
    """Device, processor, versions and date."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
