"""GPU kernels compiled ahead of time for sm_90: no spills, no hidden copy of the cache, registers
as recorded.

Skipped where the CUDA plugin or ptxas is missing. `make aot` runs it in an environment of its own,
since with the plugin JAX looks for a GPU at every import.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PLUGIN = "jax_plugins.xla_cuda13"
FORMS = [f"{form}-{bits}" for form in ("kivi", "kivi_star", "kvquant") for bits in (2, 3, 4)]
FORMS += [f"kivi-{bits}-{kind}" for bits in (2, 4) for kind in ("short", "64", "64-short")]
FORMS += [name.replace("kivi", "omniscale") for name in FORMS if name.startswith("kivi-")]
for method in ("oscar", "turboquant", "kvarn"):
    FORMS += [f"{method}-{bits}" for bits in (2, 3, 4)]
    FORMS += [f"{method}-{bits}-64" for bits in (2, 4)]
FORMS += ["kivi-2-256", "kivi-4-256"]
# Coefficients by KV head, two programs up to 2.5 bits
FORMS += [f"klt-{bits}" for bits in (2.0, 2.25, 2.375, 2.5)]
# Programs of 128 threads that a multiprocessor must hold: 65536 registers and 228 KiB, of which a
# program costs 1 more
RESIDENT = dict.fromkeys(FORMS, 2)
for bits in (2, 4):
    for method in ("kivi", "omniscale", "oscar"):
        RESIDENT |= {f"{method}-{bits}": 3, f"{method}-{bits}-64": 3}
    RESIDENT[f"kvarn-{bits}-64"] = 3
RESIDENT["klt-3.0"] = 1
RESIDENT |= {f"exact-{dim}-r{rows}": n for dim in (64, 128, 256) for rows, n in ((8, 3), (32, 2))}


def _has_plugin() -> bool:
    return (
        importlib.util.find_spec("jax_plugins") is not None
        and importlib.util.find_spec(PLUGIN) is not None
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not _has_plugin(), reason="no CUDA plugin: pip install jax-cuda13-plugin jax-cuda13-pjrt"
    ),
    pytest.mark.skipif(
        shutil.which("ptxas") is None,
        reason="ptxas is not on the path: it is part of the CUDA toolkit",
    ),
]


def test_compiles_for_hopper_without_spills_or_copies():
    record = json.loads((FOLDER / "records" / "gpu_registers.json").read_text())
    assert set(record) == set(RESIDENT)
    command = [sys.executable, str(FOLDER / "gpu_registers.py"), "--cases", ",".join(record)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {row.pop("case"): row for row in map(json.loads, output.splitlines())}
    assert set(found) == set(record)
    for name, row in found.items():
        assert row["target"] == "sm_90a", name
        assert row["wgmma"] > 0, name
        assert row["spill_bytes"] == 0, name
        registers = -(-row["registers"] // 8) * 8  # allocated in steps of 8
        assert registers * 128 * RESIDENT[name] <= 65536, name
        assert (row["shared_bytes"] + 1024) * RESIDENT[name] <= 228 * 1024, name
        # The results of all splits before they are merged; one field of a body's layer is 8 MB and
        # more.
        # A body of coefficients has 16 MB and more; its scales are copied as float32, 2 MB, and a
        # head has 256 sums instead of 128 channels.
        # An exact body's layer has 67 MB and more; 32 query rows have four times the results.
        # Heads of 256 channels have twice the results of 128.
        usual = 4e6 if name.endswith("-256") else 2e6
        most = {"klt": 5e6, "exact": 1e7}.get(name.split("-")[0], usual)
        assert row["temp_bytes"] < most, name
        assert row["argument_bytes"] == record[name]["argument_bytes"], name
