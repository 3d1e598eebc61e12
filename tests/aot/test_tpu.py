"""TPU kernels compiled ahead of time for real chips: no spills, no hidden copy of the cache,
bundles as recorded.

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
CASES = (
    "k2v2-g128",
    "k3v3-g128",
    "k4v4-g128",
    "k8v8-g128",
    "k2v2-g32",
    "k4v4-g128-d96-r2",
    "k2v2-g128-pre",
    "nuq2",
)
SLOW_CASES = {"v6e": ("nuq2-o12",)}  # outliers compile for a minute: on one chip
CACHE_BYTES = 4e6  # less than one field of the bodies compiled here; small arguments may be copied

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: pip install libtpu",
    ),
]


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "v7x"])
def test_bundles_stay_as_recorded(chip):
    record = json.loads((FOLDER / "records" / "tpu_bundles.json").read_text())[chip]
    record = {
        name: known for name, known in record.items() if name in CASES + SLOW_CASES.get(chip, ())
    }
    command = [
        sys.executable,
        str(FOLDER / "tpu_bundles.py"),
        "--chips",
        chip,
        "--cases",
        ",".join(record),
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(record)
    for found in map(json.loads, lines):
        known = record[found["case"]]
        assert found["total"] <= ALLOWANCE * known["total"], found
        assert found["spills"] <= known["spills"], found
        assert found["temp_bytes"] < CACHE_BYTES, found
