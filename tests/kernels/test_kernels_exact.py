"""Exact bodies on TPUs: the kernel, interpreted, against attention to what was stored, and the
plain path that a TPU takes without it, run here, against a CPU's.

Bound of the kernel: softmax weights are rounded to bfloat16 (2^-8 relative, half of it on average)
and sums of them are not; values have a spread of 1. Log-sum-exps are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, with_nightly
from kernel_cache import for_chip
from kernel_cases import check_equal, check_second_row_sees_nothing, in_pages
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import runs, runs_of
from kvqjax.cache.readers import kernel as kernel_reader
from kvqjax.ops.attention import segment_attention
from kvqjax.ops.packing.base import to_bits
from kvqjax.pallas_kernels import dispatch
from kvqjax.pallas_kernels.chips import TPUS
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec, Recent, room
from kvqjax.pallas_kernels.tpu import exact, exact_plan

forward = jax.jit(kvq.forward)


def _case(length: int, heads: int, dim: int, slots: int):
    """Queries, stored keys and values of 2 layers and 2 rows, and limits: a row between two that
    lie in tiles, and one that sees nothing of the body."""
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.bfloat16)

    k, v = draw(2, 2, slots, heads * dim), draw(2, 2, slots, heads * dim)
    start = jnp.asarray([[100 + t for t in range(length)], [0] * length], jnp.int32)
    stop = jnp.asarray([[slots - 60 + t for t in range(length)], [0] * length], jnp.int32)
    return draw, draw(2, length, 3 * heads, dim).astype(jnp.float32), k, v, start, stop


CASES = {
    "argnames": ("length", "heads", "dim", "slots", "tile"),
    "argvalues": [
        pytest.param(1, 2, 128, 512, 256, marks=pytest.mark.nightly),
        (3, 4, 64, 768, 768),
        pytest.param(2, 1, 128, 1280, 256, marks=pytest.mark.nightly),
    ],
    "ids": ["tiles", "two heads a lane group", "one head"],
}


@pytest.mark.parametrize(**CASES)
@pytest.mark.parametrize(
    "sinks",
    [pytest.param(None, marks=pytest.mark.nightly), pytest.param(0, marks=pytest.mark.nightly), 5],
    ids=["body", "recent", "recent and sinks"],
)
def test_the_kernel_attends_to_what_is_stored(length, heads, dim, slots, tile, sinks, monkeypatch):
    """Layer 1 of 2, the body alone, or with a window, sinks and new tokens, of which the second row
    sees none."""
    monkeypatch.setitem(TPUS, "v6e", TPUS["v6e"]._replace(exact_tile_bytes=4 * heads * dim * tile))
    draw, q, k, v, start, stop = _case(length, heads, dim, slots)
    spec = ExactSpec(kv_heads=heads, head_dim=dim, dtype="bfloat16", target="v6e")
    assert exact_plan.tile_of(spec, slots) == tile
    recent, place = None, jnp.arange(slots)[None, None]
    mask = (place >= start[..., None]) & (place < stop[..., None])
    keys, values = k[1], v[1]
    if sinks is not None:
        sizes = [n for n in (sinks, 32) if n]
        held = tuple((draw(2, 2, n, heads * dim), draw(2, 2, n, heads * dim)) for n in sizes)
        new = draw(2, length, heads * dim), draw(2, length, heads * dim)
        parts = [np.random.default_rng(1).random((2, length, n)) < 0.7 for n in (*sizes, length)]
        parts = [part * np.asarray([1, 0])[:, None, None] for part in parts]
        padded = [
            np.pad(part, ((0, 0), (0, 0), (0, room(part.shape[2]) - part.shape[2])))
            for part in parts
        ]
        recent = Recent(held, new, jnp.asarray(np.concatenate(padded, 2), jnp.int32))
        mask = jnp.concatenate([mask, jnp.asarray(np.concatenate(parts, 2), bool)], 2)
        beside = [[x[which][1] for x in held] + [new[which]] for which in (0, 1)]
        keys, values = (
            jnp.concatenate([x, *more], 1) for x, more in zip((keys, values), beside, strict=True)
        )
    got = exact.packed_attention(
        q, ExactBody(to_bits(k), to_bits(v)), 1, start, stop, spec, recent, interpret=True
    )
    k, v = (x.astype(jnp.float32).reshape(2, -1, heads, dim) for x in (keys, values))
    want = segment_attention(q, k, v, mask)
    np.testing.assert_allclose(got.out, want.out, atol=2e-3)
    np.testing.assert_allclose(got.lse[0], want.lse[0], atol=1e-5)
    check_second_row_sees_nothing(got)


def test_pages_are_read_where_they_lie(monkeypatch):
    """Tile by tile the same numbers, so that not a bit differs."""
    monkeypatch.setitem(TPUS, "v6e", TPUS["v6e"]._replace(exact_tile_bytes=4 * 256 * 256))
    _, q, k, v, start, stop = _case(2, 2, 128, 1024)
    start, stop = start.at[1].set(300), jnp.stack([stop[0] - 512, stop[0]])
    body, spec = (
        ExactBody(to_bits(k), to_bits(v)),
        ExactSpec(kv_heads=2, head_dim=128, dtype="bfloat16", target="v6e"),
    )
    paged, pages = in_pages(body, 512, (), int(stop[0].max()))
    got = exact.packed_attention(q, paged, 1, start, stop, spec, pages=pages, interpret=True)
    check_equal(got, exact.packed_attention(q, body, 1, start, stop, spec, interpret=True))


def _whole(cache, length: int, within: str, mask=None):
    """One layer's attention to all tokens, in bfloat16, of rows with tokens in the body, with few,
    and with none."""
    shape, random = cache.layout.shape, np.random.default_rng(2)
    heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads

    def draw(n, many):
        return jnp.asarray(random.normal(size=(3, n, many, shape.head_dim)), jnp.bfloat16)

    held, counts = jnp.asarray([700, 333, 0]), jnp.asarray([length, max(1, length - 1), length])
    _, new = kvq.attend_layer(cache, 0, *(draw(700, many) for many in heads), held)
    cache = kvq.append(cache, [new], held)
    out, _ = jax.jit(kvq.attend_layer, static_argnums=1, static_argnames="within")(
        cache, 0, *(draw(length, many) for many in heads), counts, within=within, mask=mask
    )
    return np.asarray(
        jnp.where(jnp.arange(length)[None, :, None, None] < counts[:, None, None, None], out, 0)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("method", thinned(["exact", "exact:window=32,sinks=3"], 2))
@pytest.mark.parametrize(
    ("length", "within", "sliding", "masked", "paged"),
    [
        pytest.param(1, "chunk", None, False, False, marks=pytest.mark.nightly),
        pytest.param(3, "step", None, False, False, marks=pytest.mark.nightly),
        pytest.param(3, "chunk", 500, False, False, marks=pytest.mark.nightly),
        pytest.param(3, "chunk", 500, True, False, marks=pytest.mark.nightly),
        (3, "chunk", None, False, True),
    ],
)
def test_one_call_takes_all_tokens(method, length, within, sliding, masked, paged, monkeypatch):
    """The kernel in the place of parts and their merge: sinks, window, ragged rows, a row without a
    body, drafts, a body in pages. Where a mask says which new tokens see each other, it takes the
    body alone."""
    shape = tiny(head_dim=128, num_layers=1, sliding_window=sliding).config.kv_shape
    pages = {"pages": 5, "page_tokens": 1024} if paged else {}
    cache = kvq.init_cache(shape, method, 3, 1024, dtype="bfloat16", **pages)
    if paged:
        cache = kvq.with_pages(cache, np.asarray([[2], [0], [4]]))
    mask = (
        jnp.broadcast_to(jnp.eye(length, dtype=bool)[::-1], (3, length, length)) if masked else None
    )
    want, calls = _whole(cache, length, within, mask), []

    def kernel(q, body, layer, start, stop, spec, general, trusted, recent=None, **table):
        if dispatch.path(spec, 2, body.slots, q.shape[1], trusted) == "reference":
            return general()
        calls.append(recent is None)
        assert bool(table) == paged
        return exact.packed_attention(
            q, body, layer, start, stop, spec, recent, interpret=True, **table
        )

    monkeypatch.setattr(kernel_reader, "packed_attention", kernel)
    found = _whole(for_chip(cache, "v6e"), length, within, mask)
    assert calls == [masked]
    np.testing.assert_allclose(found, want, atol=4e-3, rtol=2**-7)  # both round to bfloat16


@pytest.fixture
def fresh_runs():
    """Plans of layouts made with the constants that a test sets, and forgotten after it."""
    runs._runs_of.cache_clear()
    yield
    runs._runs_of.cache_clear()


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_runs")
@pytest.mark.parametrize(
    "spec",
    with_nightly(
        [
            "exact:sinks=3",
            "exact:window=32,keep=streaming:64",
            "kivi:bits=4,value_group=16",
            "higgs:bits=2",
        ],
        ["exact:sinks=3"],
    ),
)
@pytest.mark.parametrize("sliding", thinned([None, 70], 2))
def test_a_few_queries_take_all_heads_at_once(spec, sliding, monkeypatch):
    """In float32, without a kernel, on a TPU and on a CPU with few heads: ragged rows, large blocks
    of which the last begins within the one before it, a window's ring, and what eviction leaves; a
    step and a chunk of two tokens."""
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
        runs._runs_of.cache_clear()
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
