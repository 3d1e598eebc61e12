"""The table beside llama.cpp is what its record says, and a run that was cut off goes on."""

import importlib
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    "kind": "step",
    "tokens": 8192,
    "cache": "exact",
    "ms": 16.0,
    "exact": 16.0,
    "bytes": 10**8,
    "read": 5.0,
}
PEERS = {"f16": 12.0, "q8_0": 24.0, "q4_0": 32.0}


@pytest.fixture
def module(monkeypatch):
    """The benchmark's modules; llama.cpp itself is not needed for what is tested here."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    peer = types.SimpleNamespace(TYPES=PEERS, Peer=None, write_model=None)
    monkeypatch.setitem(sys.modules, "benchmarks.llamacpp.peer", peer)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_a_row_says_what_was_measured_in_its_rounds(module):
    prompt = {
        "kind": "prompt",
        "tokens": 8192,
        "cache": "exact",
        "ms": 9000.0,
        "exact": 9000.0,
        "peers": {"f16": 18e3},
    }
    record = {"machine": "here", "llama-cpp-python": "1.0", "weights": 10**8}
    record["rows"] = [ROW | {"peers": PEERS, "ms": 8.0}, prompt]
    lines = module("figures.peers").llamacpp(record).splitlines()
    # 12 / 8, 32 / 8, 16 / 8, and 8 ms over 2e8 bytes, of which 1e8 take 5 ms
    assert (
        lines[-2]
        == "| step | 8192 | `exact` | 8.0 | 12.0 | 24.0 | 32.0 | 1.50 | 4.00 | 2.00 | 0.80 |"
    )
    assert lines[-1] == "| prompt | 8192 | `exact` | 9000.0 | 18000.0 |  |  | 2.00 |  | 1.00 |  |"


def test_rows_are_replaced_and_only_missing_ones_are_measured(module):
    main = module("llamacpp.__main__")
    kivi = main.CACHES[1]
    record = main.merged({"rows": []}, ROW | {"cache": kivi})
    record = main.merged(main.merged(record, ROW), ROW | {"ms": 15.0})
    assert [(row["cache"], row["ms"]) for row in record["rows"]] == [("exact", 15.0), (kivi, 16.0)]
    assert main.missing(record, "step", 8192, main.CACHES, None) == list(main.CACHES[2:])
    assert main.missing(record, "step", 32768, main.CACHES, None) == list(main.CACHES)
    assert main.missing(record, "step", 8192, main.CACHES, [kivi]) == [kivi]


@pytest.mark.nightly
def test_a_filled_cache_decodes(module):
    """All that it says it holds is attended to: the logits are finite, and change with the number
    of tokens."""
    model, found = tiny(), []
    for tokens in (700, 900):
        cache = module("llamacpp.filled").filled(model, "kivi:bits=4,sinks=3", tokens, 8)
        logits, after = jax.jit(kvq.forward)(
            model, jnp.ones((1, 1), jnp.int32), jnp.ones((1,), jnp.int32), cache
        )
        assert int(after.lengths[0]) == tokens + 1
        found.append(np.asarray(logits))
    assert np.isfinite(found[0]).all()
    assert not np.allclose(*found)
