"""Serving: continuous batching gives every request the tokens that `generate` gives it; prompts are
shared."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, PAGE = (
    ROOT / "examples" / "continuous_batching.py",
    ROOT / "docs" / "howto" / "shared-prefix.md",
)
PROMPTS = [[1, 2, 3], [4] * 40, [5, 6], [7, 8, 9, 10], [11, 12] * 16]
NEW = 40


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("continuous_batching", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method", [pytest.param("exact", marks=pytest.mark.nightly), "kivi:bits=2,window=32"]
)
def test_requests_come_and_go_as_generate_answers_them(example, method):
    """Rows end at different steps, so that requests join rows that others left."""
    model = tiny()
    first = kvq.generate(model, PROMPTS, method, max_new_tokens=NEW, eos_ids=[]).tokens
    ends = (first[1][5], first[3][9])
    wanted = kvq.generate(model, PROMPTS, method, max_new_tokens=NEW, eos_ids=ends).tokens
    assert len({len(tokens) for tokens in wanted}) > 1
    stopping = model.replace(config=dataclasses.replace(model.config, eos_ids=ends))
    assert example.serve(stopping, PROMPTS, method, rows=2, new=NEW, capacity=256) == wanted


@pytest.mark.nightly
def test_the_page_on_shared_prefixes_runs():
    """Its blocks of Python, one after the other: the joined batch goes on as the one that was
    cut."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        names["before"] = names.get("batch")
        exec(compile(block, str(PAGE), "exec"), names)
    before, batch = names["before"], names["batch"]
    assert batch.lengths.tolist() == before.lengths.tolist()
    assert names["tails"].start > 150
    model, newest = names["model"], jnp.full((3, 1), 7)
    one = jnp.ones(3, jnp.int32)
    np.testing.assert_array_equal(
        *(kvq.forward(model, newest, one, cache)[0] for cache in (before, batch))
    )
