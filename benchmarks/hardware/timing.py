"""Clocks of `benchmarks.hardware`: slopes between two numbers of chained calls, and the profiler's
kernels."""

import collections
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_KERNELS = 500  # names of a profile that are kept


def slopes(
    run: Callable[[int], None], short_turns: int, long_turns: int, repeats: int = 7
) -> list[float]:
    """Measure the seconds of one turn, repeatedly: the time of `long_turns` turns less that of
    `short_turns`, over the difference of the two numbers. `run(n)` does n turns, each fed by the
    one before, and waits for the last. The first call of each warms up."""
    spent: tuple[list[float], list[float]] = [], []
    for _ in range(repeats + 1):
        for times, turns in zip(spent, (short_turns, long_turns), strict=True):
            begun = time.perf_counter()
            run(turns)
            times.append(time.perf_counter() - begun)
    return [
        (long - short) / (long_turns - short_turns)
        for short, long in zip(spent[0][1:], spent[1][1:], strict=True)
    ]


def spread(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """Return min, median and max of measured values."""
    return {
        name: scale * f(values)
        for name, f in (("min", min), ("median", statistics.median), ("max", max))
    }


def words_of(figures: dict[str, float], unit: str) -> str:
    """Say a spread in a few words."""
    return f"{figures['median']:.4g} {unit} ({figures['min']:.4g}..{figures['max']:.4g})"


def relative(got, want) -> float:
    """Return ||got - want|| / ||want|| in float64; infinite where anything is not finite."""
    import numpy as np

    got, want = (np.asarray(x, np.float64) for x in (got, want))
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return error if np.isfinite(error) else float("inf")


def _kernels(folder: Path) -> dict[str, Any]:
    """Read what JAX's profiler wrote: milliseconds and number of every kernel on the device's
    streams."""
    import jax

    data = jax.profiler.ProfileData.from_file(str(next(folder.rglob("*.xplane.pb"))))
    planes = [plane for plane in data.planes if "GPU" in plane.name]
    events = [
        e for plane in planes for line in plane.lines if "Stream" in line.name for e in line.events
    ]
    spent, count = collections.Counter(), collections.Counter()
    busy, end = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.start_ns):
        spent[event.name] += event.duration_ns
        count[event.name] += 1
        busy += max(0.0, event.start_ns + event.duration_ns - max(event.start_ns, end))
        end = max(end, event.start_ns + event.duration_ns)
    top = [[name, round(ns * 1e-6, 4), count[name]] for name, ns in spent.most_common(MOST_KERNELS)]
    return {"busy_ms": busy * 1e-6, "events": len(events), "kernels": top}


def profiled(out: Path, name: str, run: Callable[[], Any]) -> str:
    """Append the kernels of `run()` to profiles.jsonl, and say a few words about them. A failure
    costs no figure."""
    import jax

    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                run()
            profile = _kernels(Path(folder))
    except Exception as error:
        profile = {"error": repr(error)[:300]}
    with (out / "profiles.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name} | profile) + "\n")
    return profile.get("error") or f"{profile['events']} kernels, busy {profile['busy_ms']:.2f} ms"
