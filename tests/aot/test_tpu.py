"""TPU kernels compiled ahead of time for real chips: no spills, no hidden copy of the cache, bundles as recorded.

Skipped where libtpu is not installed. Run with `python -m pytest tests/aot -m slow`.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
ALLOWANCE = 1.10
# Of those recorded; the rest would take ten minutes.
CASES = ("k2v2-g128", "k3v3-g128", "k4v4-g128", "k8v8-g128", "k2v2-g32", "k4v4-g128-d96-r2", "k2v2-g128-pre", "nuq2")
SLOW_CASES = {"v6e": ("nuq2-o12",)}  # outliers compile for a minute: on one chip
LATENT_CASES = ("8b-2", "8b-4", "higgs-8b-2", "commvq-8b-1", "exact-8b", "aqua-8b-2")
CACHE_BYTES = 4e6  # less than one field of the bodies compiled here; small arguments may be copied

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install libtpu"
    ),
]


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "v7x"])
def test_bundles_stay_as_recorded(chip):
    record = json.loads((FOLDER / "records" / "tpu_bundles.json").read_text())[chip]
    record = {name: known for name, known in record.items() if name in CASES + SLOW_CASES.get(chip, ())}
    command = [sys.executable, str(FOLDER / "tpu_bundles.py"), "--chips", chip, "--cases", ",".join(record)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(record)
    for found in map(json.loads, lines):
        known = record[found["case"]]
        assert found["total"] <= ALLOWANCE * known["total"], found
        assert found["spills"] <= known["spills"], found
        assert found["temp_bytes"] < CACHE_BYTES, found


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "v7x"])
def test_latent_kernels_stay_as_recorded(chip):
    """Beside the arguments there is room for one layer's up-projection in bfloat16, 2 MiB, and for ordering its
    columns; a field of the latents has 17 MB at least. CommVQ's codebook, 2.75 MiB in bfloat16, is turned and its axes
    ordered anew (that no field of its body is copied is seen in test_memory)."""
    record = json.loads((FOLDER / "records" / "latent_bundles.json").read_text())[chip]
    cases = ",".join(name for name in LATENT_CASES if name in record)
    command = [sys.executable, str(FOLDER / "latent_bundles.py"), "--kernel-only", "--chips", chip, "--cases", cases]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [found["case"] for found in lines] == cases.split(",")
    for found in lines:
        known = record[found["case"]]
        assert found["bundles"] <= ALLOWANCE * known["bundles"], found
        assert found["spills"] <= known["spills"], found
        assert found["temp_bytes"] < (3e7 if found["case"].startswith("commvq") else 8e6), found
