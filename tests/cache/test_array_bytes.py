"""Bytes of arrays, said by one function: two int4 numbers share a byte."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kvqjax as kvq
from kvqjax.cache.accounting import array_bytes
from kvqjax.cli.bench import decoding
from kvqjax.cli.common import require_room
from kvqjax.testing import small_model

ROOT = Path(__file__).resolve().parents[2]


def test_numbers_narrower_than_a_byte_are_packed():
    tree = {"a": jnp.zeros((3, 4), jnp.int4), "b": (jnp.zeros(5, bool), jnp.zeros(2, jnp.bfloat16))}
    assert array_bytes(tree) == 6 + 5 + 4
    assert array_bytes(jax.eval_shape(lambda: tree)) == 15
    assert array_bytes(jnp.zeros(3, jnp.int4)) == 2
    assert array_bytes({}) == 0


@pytest.fixture(scope="module")
def by_heads():
    model = small_model()
    return model, kvq.init_cache(model, "kivi:bits=4", 1, 1024, form="heads")


def test_a_cache_of_int4_is_counted_as_its_ledger_counts(by_heads):
    _, cache = by_heads
    assert any(leaf.dtype == jnp.int4 for leaf in jax.tree.leaves(cache))
    assert (
        array_bytes(cache)
        == kvq.ledger(cache).bytes
        < sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    )
    assert f"{array_bytes(cache):,} bytes" in repr(cache)


def test_bench_and_the_check_of_memory_count_likewise(by_heads, monkeypatch):
    """As on a GPU, whose caches have int4 numbers."""
    from kvqjax.cli import bench, common

    model, cache = by_heads
    for module in (bench, common):
        monkeypatch.setattr(module, "init_cache", lambda *_, **__: cache)
    monkeypatch.setattr(bench, "_fill", lambda model, cache, key: cache)
    assert decoding(model, kvq.parse("kivi:bits=4"), 1024, 1, 1, 1)[0] == array_bytes(cache)
    monkeypatch.setattr(common, "memory", lambda: array_bytes(cache))
    require_room(model, kvq.parse("kivi:bits=4"), 1, 1024)
    monkeypatch.setattr(common, "memory", lambda: array_bytes(cache) - 1)
    with pytest.raises(kvq.UserError, match="a cache of 1 row of 1024 tokens takes"):
        require_room(model, kvq.parse("kivi:bits=4"), 1, 1024)


def test_no_other_count_of_a_caches_bytes_exists():
    pattern = re.compile(r"(leaf|x|a|array|kv)\.nbytes|\.size \* .*itemsize")
    folders = [
        ROOT / name for name in ("kvqjax", "eval", "calibrate", "pallas_kernels", "benchmarks")
    ]
    found = {
        file.relative_to(ROOT).as_posix()
        for folder in folders
        for file in folder.rglob("*.py")
        if pattern.search(file.read_text(encoding="utf-8"))
    }
    assert found == set()
