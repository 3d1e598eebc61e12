"""Samples of docs/speed.md and docs/prefill.md recomputed: what a step and a chunk cost stays within a tenth of its
record.

Skipped where the chip's compiler is missing.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWANCE = 1.10
# -P or PYTHONSAFEPATH keep the working directory off the path, lest the source tree shadow the installed package.
RUN = f"import runpy, sys; sys.path.append({str(ROOT)!r}); runpy.run_module('benchmarks.{{}}', run_name='__main__')"
BOUNDED = ("launches", "syncs", "bytes_over_bound", "attention_over_bound", "weights_over_bound", "estimated_ms")

pytestmark = pytest.mark.slow


def _missing(chip: str) -> str:
    """Why a chip cannot be compiled for here; "" if it can."""
    if chip != "h100":
        return "" if importlib.util.find_spec("libtpu") else "libtpu is not installed: pip install libtpu"
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "no CUDA plugin: pip install jax-cuda13-plugin jax-cuda13-pjrt"
    return "" if shutil.which("ptxas") else "ptxas is not on the path: it is part of the CUDA toolkit"


def _counted(benchmark: str, *options: str) -> dict:
    """What `python -m benchmarks.<benchmark>` finds."""
    command = [sys.executable, "-Pc", RUN.format(benchmark), *options, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def recomputed(benchmark: str, name: str, fields: tuple[str, ...]) -> tuple[dict, dict]:
    """A benchmark's record, and the same row computed now, from models of as many layers as the record's: numbers
    extrapolated from two depths differ from those of all layers."""
    known = json.loads((ROOT / "benchmarks" / "records" / benchmark / f"{name}.json").read_text())
    if reason := _missing(known["chip"]):
        pytest.skip(reason)
    depths = [f"--layers={','.join(map(str, known['layers']))}"] if "layers" in known else []
    return known, _counted(benchmark, *(f"--{field}={known[field]}" for field in fields), *depths)


@pytest.mark.parametrize(
    "name",
    [
        "h100-llama-3.1-8b-kivi-bits-2-group-128-32768-1",
        "v6e-llama-3.1-8b-kivi-bits-2-group-128-32768-8",
        "v6e-llama-3.1-8b-aqua-bits-2-32768-1",
    ],
    ids=["h100", "v6e", "v6e-chain"],
)
def test_step_costs_what_the_page_says(name):
    known, found = recomputed("step_cost", name, ("chip", "model", "cache", "context", "batch"))
    assert found["unsure"] == []
    assert known["full"]["time_over_bound"] <= (3 if known["cache"].startswith("aqua") else 2)
    for rows in {"full", "ragged"} & known.keys():
        for field in BOUNDED:
            assert found[rows][field] <= ALLOWANCE * known[rows][field], (rows, field)


PROMPT = ("chip", "model", "cache", "context", "chunk")


@pytest.mark.parametrize(
    ("chunk", "launches", "syncs"), [(2048, 32 * 60 + 160, 6), (0, 32 * 60 * 16, 32 * 18)], ids=["chunk", "whole"]
)
def test_a_prompt_on_an_h100_costs_what_the_page_says(chunk, launches, syncs):
    """Without cuDNN 2048 queries take 60 launches a layer, and a chunk 160 for all layers. Only what stores new keys
    and values asks the host, 2048 tokens at a time."""
    known, found = recomputed("prefill_cost", f"h100-llama-3.1-8b-exact-32768-{chunk}", PROMPT)
    assert found["unsure"] == []
    for field in ("launches", "syncs", "estimated_s", "temp_gb"):
        assert found[field] <= ALLOWANCE * known[field], field
    assert found["launches"] <= launches
    assert found["syncs"] <= syncs
    assert found["gigabytes"]["attention"] <= 3 * found["flash_gigabytes"]


@pytest.mark.parametrize(("chip", "share"), [("v6e", 0.28), ("v5e", 0.55), ("v7x", 0.25)])
def test_a_prompt_on_a_tpu_costs_what_the_page_says(chip, share):
    """Beside the hidden states: a layer's keys and values and 0.3 GiB."""
    known, found = recomputed("prefill_cost", f"{chip}-llama-3.1-8b-exact-32768-0", PROMPT)
    assert found["estimated_s"] <= ALLOWANCE * known["estimated_s"]
    assert found["share_of_peak"] >= share
    assert found["peak_gb"] * 1e9 <= 2 * 32768 * (4096 + 2 * 1024) + 0.3 * 2**30


def test_a_step_on_an_h100_costs_what_the_longest_row_holds():
    """8K tokens in a cache of 128K on a GPU: half of the attention's bytes are values copied
    (kvqjax/cache/reach.py)."""
    if reason := _missing("h100"):
        pytest.skip(reason)
    found = _counted("step_cost", "--chip=h100", "--cache=exact", "--context=131072", "--held=8192")
    assert found["syncs"] <= 2
    assert found["launches"] <= 1200
    assert found["attention_over_bound"] <= 2.3
    assert found["bytes_over_bound"] <= 1.2
    assert found["temp_gb"] <= 0.1


@pytest.mark.parametrize(("cache", "most"), [("exact", 1.15), ("kivi:bits=2,group=128", 0.75)])
def test_eight_full_rows_on_an_h100_cost_their_bytes(cache, most):
    """Rows of 32K tokens, whose new tokens are written by a kernel for all of them. Temporaries are one layer's: XLA
    lays out nothing of a layer before its turn."""
    if reason := _missing("h100"):
        pytest.skip(reason)
    found = _counted("step_cost", "--chip=h100", f"--cache={cache}", "--context=32768", "--batch=8", "--layers=1,2")
    assert found["bytes_over_bound"] <= most
    assert found["syncs"] <= 2
    assert found["launches"] <= 48 * 32
    assert found["temp_gb"] <= 0.08


def test_an_a100_s_programs_are_an_h100_s():
    """The page takes an A100's rows from an H100's programs (benchmarks/step_cost/tables.py)."""
    if reason := _missing("h100"):
        pytest.skip(reason)
    options = "--cache=kivi:bits=2,group=128", "--context=32768", "--layers=1,2"
    here, there = (_counted("step_cost", f"--chip={chip}", *options) for chip in ("a100-80", "h100"))
    for field, share in (("launches", 0.125), ("bytes_over_bound", 0.05), ("attention_over_bound", 0.05)):
        assert here[field] == pytest.approx(there[field], rel=share), field


@pytest.mark.parametrize(
    ("cache", "depths", "most"),
    [
        ("higgs:bits=2", "2,3", 0.55),  # two such at once
        ("kvquant:bits=3", "2,3", 0.4),
        ("xquant:bits=2", "3,4", 0.56),
        ("commvq:bits=1", "2,3", 0.4),
        ("kivi:bits=4,group=128,rope=pre", "2,3", 0.4),  # XLA cuts words of 4 bits from the body before it reads them
    ],
)
def test_an_h100_writes_what_it_decodes_once_and_narrow(cache, depths, most):
    """128K tokens on a GPU: decisions by the host only about what is encoded, few kernels, no float32 bodies, one
    layer's at a time. A layer's keys or values are 0.27 GB in 16 bits."""
    if reason := _missing("h100"):
        pytest.skip(reason)
    found = _counted("step_cost", "--chip=h100", f"--cache={cache}", "--context=131072", f"--layers={depths}")
    assert found["bytes_over_bound"] <= 4
    assert found["launches"] <= 100 * 32
    assert found["syncs"] <= 2
    assert found["temp_gb"] <= most


@pytest.mark.parametrize("cache", ["higgs:bits=2", "xquant:bits=2"])
def test_eight_ragged_rows_on_an_h100_cost_what_they_hold(cache):
    """Rows of 4K to 32K tokens, nine sixteenths of a full batch: decoded in spans of what they hold, in vain at most a
    span of each row and a sixteenth of the batch."""
    if reason := _missing("h100"):
        pytest.skip(reason)
    found = _counted("step_cost", "--chip=h100", f"--cache={cache}", "--context=32768", "--batch=8", "--layers=1,2")
    assert found["ragged"]["attention_over_bound"] <= 1.25 * found["full"]["attention_over_bound"]
    assert max(found[rows]["bytes_over_bound"] for rows in ("full", "ragged")) <= 4
    assert found["syncs"] <= 2
    assert found["temp_gb"] <= 1


@pytest.mark.parametrize(("cache", "most"), [("higgs:bits=2", 1.6), ("kvquant:bits=3", 0.9)])
def test_eight_rows_of_128k_on_an_h100_start_few_kernels(cache, most):
    """Two parts of what ragged rows hold, and three of what full ones do. A token of each row is written by one kernel
    for all. Temporaries are one layer's, however many layers there are."""
    if reason := _missing("h100"):
        pytest.skip(reason)
    found = _counted("step_cost", "--chip=h100", f"--cache={cache}", "--context=131072", "--batch=8", "--layers=2,3")
    assert found["ragged"]["launches"] <= 100 * 32
    assert found["full"]["launches"] <= 105 * 32
    assert found["temp_gb"] <= most


@pytest.mark.parametrize(("cache", "most"), [("aqua:bits=2", 1.5), ("xquant_cl:bits=2", 2.0)])
def test_an_h100_starts_few_kernels_where_layers_feed_each_other(cache, most):
    """128K tokens of AQUA-KV and XQuant-CL, whose blocks pass through every layer: as few kernels a layer as other
    methods have. Temporaries are what flows, 0.5 and 1.1 GB, and a block's numbers in float32."""
    if reason := _missing("h100"):
        pytest.skip(reason)
    found = _counted("step_cost", "--chip=h100", f"--cache={cache}", "--context=131072", "--layers=4,5")
    assert found["launches"] <= 100 * 32
    assert found["syncs"] <= 2
    assert found["temp_gb"] <= most
