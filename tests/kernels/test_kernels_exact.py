"""Exact bodies on TPUs: the kernel, interpreted, against attention to what was stored, and the plain path that a TPU
takes without it, run here, against a CPU's.

Bound of the kernel: softmax weights are rounded to bfloat16 (2^-8 relative, half of it on average) and sums of them are
not; values have a spread of 1. Log-sum-exps are float32."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cache import for_chip
from kernel_cases import check_second_row_sees_nothing
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import runs, runs_of
from kvqjax.ops.attention import segment_attention
from kvqjax.ops.layout import to_bits
from kvqjax.pallas_kernels import dispatch, support
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec
from kvqjax.pallas_kernels.forms import KernelForm
from kvqjax.pallas_kernels.tpu import exact

forward = jax.jit(kvq.forward)
TPUS = "v5e", "v5p", "v6e", "v7x"


@pytest.mark.parametrize(
    ("length", "heads", "dim", "slots", "tile"),
    [(1, 2, 128, 512, 256), (3, 4, 64, 768, 768), (2, 1, 128, 1280, 256)],
    ids=["tiles", "two heads a lane group", "one head"],
)
def test_the_kernel_attends_to_what_is_stored(length, heads, dim, slots, tile, monkeypatch):
    """Layer 1 of 2; a row between limits that lie in tiles, and one that sees nothing."""
    monkeypatch.setattr(exact, "MOST_BYTES", 4 * heads * dim * tile)
    random = np.random.default_rng(0)
    k, v = (jnp.asarray(random.normal(size=(2, 2, slots, heads * dim)), jnp.bfloat16) for _ in range(2))
    q = jnp.asarray(random.normal(size=(2, length, 3 * heads, dim)), jnp.bfloat16).astype(jnp.float32)
    start = jnp.asarray([[100 + t for t in range(length)], [0] * length], jnp.int32)
    stop = jnp.asarray([[slots - 60 + t for t in range(length)], [0] * length], jnp.int32)
    spec = ExactSpec(kv_heads=heads, head_dim=dim, dtype="bfloat16", target="v6e")
    assert exact.tile_of(spec, slots) == tile
    got = exact.packed_attention(q, ExactBody(to_bits(k), to_bits(v)), 1, start, stop, spec, interpret=True)
    place = jnp.arange(slots)[None, None]
    mask = (place >= start[..., None]) & (place < stop[..., None])
    k, v = (x[1].astype(jnp.float32).reshape(2, slots, heads, dim) for x in (k, v))
    want = segment_attention(q, k, v, mask)
    np.testing.assert_allclose(got.out, want.out, atol=2e-3)
    np.testing.assert_allclose(got.lse[0], want.lse[0], atol=1e-5)
    check_second_row_sees_nothing(got)


@pytest.fixture
def fresh_runs():
    """Plans of layouts made with the constants that a test sets, and forgotten after it."""
    runs_of.cache_clear()
    yield
    runs_of.cache_clear()


@pytest.mark.usefixtures("fresh_runs")
@pytest.mark.parametrize("spec", ["exact:sinks=3", "exact:window=32,keep=streaming:64", "kivi:bits=4,value_group=16"])
@pytest.mark.parametrize("sliding", [None, 70])
def test_a_few_queries_take_all_heads_at_once(spec, sliding, monkeypatch):
    """In float32, without a kernel, on a TPU and on a CPU with few heads: ragged rows, large blocks of which the last
    begins within the one before it, a window's ring, and what eviction leaves; a step and a chunk of two tokens."""
    for name in ("TPU_LANES", "CPU_LANES"):
        monkeypatch.setattr(runs, name, 512)
    monkeypatch.setattr(runs, "MOST_HEADS", 0)
    model, text, found = tiny(sliding_window=sliding), tokens(2, 700), []
    cache = kvq.init_cache(model, kvq.parse(spec), 2, 800)
    if "keep" in spec and sliding:
        pytest.skip("a window evicts by itself")
    _, cache = forward(model, text, jnp.asarray([690, 203]), cache)
    for target, heads in (("cpu", 0), ("cpu", 4), ("v6e", 0)):
        monkeypatch.setattr(runs, "MOST_HEADS", heads)
        runs_of.cache_clear()
        one, decoded = for_chip(cache, target), jax.jit(lambda *given: kvq.forward(*given))
        assert bool(runs_of(one.layout)[0].lanes) == (heads > 0 or target == "v6e")
        step, one = decoded(model, text[:, :1], jnp.asarray([1, 1]), one)
        found.append((step, decoded(model, text[:, 1:3], jnp.asarray([2, 1]), one)[0][:, :1]))
    for by_head, *others in zip(*found, strict=True):
        for other in others:
            np.testing.assert_allclose(by_head, other, atol=2e-4 * float(jnp.abs(by_head).max()))


def test_who_reaches_the_kernel():
    """Bodies in bfloat16 of heads that were compiled."""
    for dim, dtype in ((128, "bfloat16"), (64, "bfloat16"), (128, "float32"), (96, "bfloat16")):
        shape = tiny(head_dim=dim, num_layers=1).config.kv_shape
        cache = kvq.init_cache(shape, kvq.exact(), 1, 1024, dtype=dtype)
        for target in TPUS:
            spec = runs_of(for_chip(cache, target).layout)[0].wiring.fast.packed.spec
            wanted = "tpu" if dtype == "bfloat16" and dim != 96 else "reference"
            assert dispatch.path(spec, 2, 1024) == wanted


def test_the_table_follows_from_the_record():
    """No spills, with the most query rows either; and a tile takes fewer bundles than its keys and values take a v5e's
    or v6e's memory, and a tenth more than a v7x's."""
    record = json.loads((Path(__file__).parents[2] / "benchmarks" / "records" / "latent_bundles.json").read_text())
    arriving = {"v5e": 3841, "v6e": 2238, "v7x": 1250}  # cycles for 512 tokens of 8 KV heads of 128 channels
    for dim, case in ((128, "exact-8b"), (64, "exact-1b")):
        for target in TPUS:
            known = support.lookup(KernelForm("exact", head_dim=dim), target)
            assert known is not None
            assert known.most_rows == 8
            assert record[target][case]["spills"] == record[target][f"{case}-draft"]["spills"] == 0
            assert record[target][case]["bundles"] <= 1.1 * dim / 128 * arriving.get(target, 2**20), (target, case)
