"""Costs of decode steps and prompts on absent chips: programs compiled ahead of time and counted.

Eight cases stand for the forms that programs take: two of GPUs' bodies (read where they are stored,
decoded first), a batch, layers that feed each other, three TPUs and prompts. The numbers beside a
case were counted by jax 0.10.2, its CUDA plugin 0.10.2 and libtpu 0.0.42.1. Each may be exceeded by
a tenth. Cases are skipped where the chip's compiler is missing.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWANCE = 1.10  # another release of a compiler may fuse a little otherwise
# -P or PYTHONSAFEPATH keep the working directory off the path, lest the source tree shadow the
# installed package.
RUN = f"import runpy, sys; sys.path.append({str(ROOT)!r}); runpy.run_module('benchmarks.step_cost', run_name='__main__')"  # noqa: E501

pytestmark = pytest.mark.slow

KIVI = "kivi:bits=2,group=128"
STEPS = {
    "h100-stored": (
        {"chip": "h100", "cache": KIVI, "context": 32768, "layers": "2,4"},
        {"launches": 1484, "syncs": 2, "bytes_over_bound": 0.89, "temp_gb": 0.01},
    ),
    "h100-batch": (
        {"chip": "h100", "cache": "exact", "context": 32768, "batch": 8, "layers": "2,4"},
        {"launches": 1017, "syncs": 2, "bytes_over_bound": 1.11, "temp_gb": 0.052},
    ),
    "h100-decoded": (
        {"chip": "h100", "cache": "higgs:bits=2", "context": 131072, "layers": "2,4"},
        {"launches": 1573, "syncs": 2, "bytes_over_bound": 2.9, "temp_gb": 0.61},
    ),
    "h100-chain": (
        {"chip": "h100", "cache": "aqua:bits=2", "context": 131072, "layers": "4,6"},
        {"launches": 2404, "syncs": 2, "bytes_over_bound": 9.98, "temp_gb": 1.5},
    ),
    "v6e-kernel": (
        {"chip": "v6e", "cache": KIVI, "context": 32768, "batch": 8},
        {"bytes_over_bound": 0.41, "time_over_bound": 0.79, "temp_gb": 0.01},
    ),
    "v7x-kernel": (
        {"chip": "v7x", "cache": KIVI, "context": 8192, "layers": "2,4"},
        {"bytes_over_bound": 0.95, "time_over_bound": 1.76, "temp_gb": 0.01},
    ),
}
PROMPTS = {
    "h100-chunk": (
        {"chip": "h100", "cache": "exact", "context": 32768, "chunk": 2048, "layers": "2,4"},
        {"launches": 1982, "syncs": 5, "estimated_s": 0.2417, "temp_gb": 3.46},
    ),
    "v5e-whole": (
        {"chip": "v5e", "cache": "exact", "context": 8192, "chunk": 0, "layers": "2,4"},
        {"estimated_s": 0.8941, "peak_gb": 0.1433},
    ),
}


def _skip_without_compiler(chip: str) -> None:
    if chip != "h100":
        if importlib.util.find_spec("libtpu") is None:
            pytest.skip("libtpu is not installed: pip install libtpu")
        return
    if (
        importlib.util.find_spec("jax_plugins") is None
        or importlib.util.find_spec("jax_plugins.xla_cuda13") is None
    ):
        pytest.skip("no CUDA plugin: pip install jax-cuda13-plugin jax-cuda13-pjrt")
    if not shutil.which("ptxas"):
        pytest.skip("ptxas is not on the path: it is part of the CUDA toolkit")


def counted(options: dict) -> dict:
    """Return what `python -m benchmarks.step_cost` prints as JSON."""
    _skip_without_compiler(options["chip"])
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-Pc", RUN, *flags, "--json"]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )


def _within(record: dict, limits: dict) -> None:
    assert record["unsure"] == []
    over = {
        name: (record[name], limit)
        for name, limit in limits.items()
        if record[name] > ALLOWANCE * limit
    }
    assert not over, over


@pytest.mark.parametrize(("options", "limits"), STEPS.values(), ids=STEPS)
def test_a_decode_step_costs_no_more_than_it_did(options, limits):
    """Temporaries far below a layer's keys and values say that no second cache and no weights are
    copied."""
    _within(counted(options), limits)


@pytest.mark.parametrize(("options", "limits"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_costs_no_more_than_it_did(options, limits):
    _within(counted(options), limits)
