"""Paged attention as vLLM's TPU engine calls it (kvqjax/adapters/tpu_inference.py), against dense
attention in float64 over what is stored: mixed calls of a small scheduler, whose sequences change
places, share blocks and lose them. Where tpu-inference is installed (`pip install --no-deps
tpu-inference`), against its own reference too."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly

import kvqjax as kvq
from kvqjax.adapters import tpu_inference as paged
from kvqjax.cache import runs_of
from kvqjax.kernel_checks.trial import made_up

SHAPE = kvq.KVShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
ROTATED = kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rope=kvq.Rope())
BLOCKS, LONGEST, CHUNK, SEQUENCES, TOKENS = 9, 700, 96, 4, 320
KIVI = "kivi:bits=4,window=0"


class Sequence(NamedTuple):
    """Queries, keys and values of a text, [N, heads, D], and the blocks that it has."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    blocks: list[int]


def text(seed: int, blocks: list[int], begin: Sequence | None = None, shared: int = 0) -> Sequence:
    """A text of its own, or one whose first `shared` tokens are those of `begin`."""
    random = np.random.default_rng(seed)
    q = random.normal(size=(LONGEST, SHAPE.num_heads, SHAPE.head_dim))
    k, v = random.normal(size=(2, LONGEST, SHAPE.num_kv_heads, SHAPE.head_dim))
    if begin is not None:
        q, k, v = (
            np.concatenate([old[:shared], new[shared:]])
            for old, new in zip(begin, (q, k, v), strict=False)
        )
    return Sequence(*(x.astype(np.float32) for x in (q, k, v)), blocks)


class New(NamedTuple):
    """New tokens of a sequence in a call: `count` behind the first `held`; `slot` names its tail,
    with slots=."""

    sequence: Sequence
    held: int
    count: int
    slot: int = 0


def flat(news: list[New], width: int, rubbish: int = 0):
    """Lay a call out as the engine does: (q, k, v, metadata). Tokens of no sequence are NaN, and
    tables go on with `rubbish`."""
    arrays = []
    for name in ("q", "k", "v"):
        rows = [getattr(new.sequence, name)[new.held : new.held + new.count] for new in news]
        heads = SHAPE.num_heads if name == "q" else SHAPE.num_kv_heads
        array = np.full((TOKENS, heads, SHAPE.head_dim), np.nan, np.float32)
        array[: sum(map(len, rows))] = np.concatenate([array[:0], *rows])
        arrays.append(jnp.asarray(array))
    table = np.full((SEQUENCES, width), rubbish, np.int32)
    lengths, slots, start = (np.zeros(n, np.int32) for n in (SEQUENCES, SEQUENCES, SEQUENCES + 1))
    for row, new in enumerate(news):
        table[row, : len(new.sequence.blocks)] = new.sequence.blocks
        lengths[row], slots[row] = new.held + new.count, new.slot
    start[1:] = np.cumsum([*(new.count for new in news), *[0] * (SEQUENCES - len(news))])
    ones = sum(new.count == 1 for new in news)
    numbers = table.ravel(), lengths, start, np.asarray([ones, ones, len(news)], np.int32), slots
    return *arrays, paged.Metadata(*map(jnp.asarray, numbers))


@functools.cache
def coding(layout, name: str):
    """What stands for one unit of a source, as a program."""
    codec = runs_of(layout)[0].wiring.storage.codecs[name]
    return jax.jit(lambda tile: codec.decode({}, codec.encode({}, tile)))


def stored(layer: paged.PagedLayer, name: str, x: np.ndarray, count: int) -> np.ndarray:
    """The numbers that stand for the tokens once `count` of them were there and whole units
    encoded; float64."""
    code, unit = coding(layer.layout, name), layer.run.ring
    wide = x.reshape(len(x), -1)
    parts = [code(wide[at : at + unit]) for at in range(0, count // unit * unit, unit)]
    return np.concatenate([*map(np.asarray, parts), wide[count // unit * unit :]]).astype(
        np.float64
    )


def dense(
    layer: paged.PagedLayer,
    new: New,
    scale: float = SHAPE.head_dim**-0.5,
    softcap: float | None = None,
):
    """Attention of the new tokens in float64. Those of a chunk see each other exactly, and earlier
    ones as stored."""
    out, end = [], new.held + new.count
    for begin in range(new.held, end, CHUNK if new.count > 1 else 1):
        stop = min(begin + CHUNK, end)
        kv = [stored(layer, name, getattr(new.sequence, name)[:stop], begin) for name in ("k", "v")]
        k, v = (np.repeat(x.reshape(stop, SHAPE.num_kv_heads, -1), 2, 1) for x in kv)
        scores = np.einsum("thd,shd->hts", new.sequence.q[begin:stop].astype(np.float64), k) * scale
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        seen = np.arange(stop)[None] <= np.arange(begin, stop)[:, None]
        weights = np.exp(np.where(seen, scores - scores.max(-1, keepdims=True), -np.inf))
        out.append(np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v))
    return np.concatenate(out)


step = jax.jit(
    paged.attention,
    donate_argnames="kv_cache",
    static_argnames=("sm_scale", "attn_logits_soft_cap"),
)


def caches(spec: str = KIVI, **options) -> paged.PagedLayer:
    given = {"block_size": 256, "chunk": CHUNK, "dtype": "f32", **options}
    return paged.create_kv_caches(SHAPE, spec, BLOCKS, LONGEST, **given)[0]


def call(layer: paged.PagedLayer, news: list[New], rubbish: int = 0, **options) -> paged.PagedLayer:
    """Run a call, and compare every sequence with the dense form. Its sums are float32: some 1e-6
    of values near 1."""
    layer, out = step(layer, *flat(news, -(-LONGEST // layer.block_size), rubbish), **options)
    first = 0
    named = {"sm_scale": "scale", "attn_logits_soft_cap": "softcap"}
    for new in news:
        wanted = dense(layer, new, **{named[name]: value for name, value in options.items()})
        np.testing.assert_allclose(out[first : first + new.count], wanted, rtol=0, atol=2e-5)
        first += new.count
    np.testing.assert_array_equal(out[first:], 0)
    return layer


def scenario(run) -> None:
    """Calls of a scheduler. `run(news)` takes each."""
    a, b = text(1, [5, 2, 7]), text(2, [0, 8])
    run([New(a, 0, 200, 1)])  # part of a prompt
    # A prompt of one token; the rest of a prompt, into the next block.
    run([New(b, 0, 1, 2), New(a, 200, 100, 1)])
    run([New(a, 300, 1, 1), New(b, 1, 250, 2)])  # they change places
    run([New(b, 251, 1, 2), New(a, 301, 1, 1)])
    for held in range(252, 258):  # a step at which the block fills up, and on
        run([New(a, held + 50, 1, 1), New(b, held, 1, 2)])
    # Another prompt begins with the tokens of a's first block: it has that block, and computes the
    # others alone.
    c = text(3, [5, 1], a, 256)
    run([New(a, 308, 1, 1), New(c, 256, 60, 3), New(b, 258, 31, 2)])
    run([New(c, 316, 1, 3), New(a, 309, 1, 1)])
    # a loses its blocks to another sequence and is computed anew elsewhere, without the block that
    # c still has.
    d, again = text(4, [2, 7, 0]), Sequence(*a[:3], [5, 3])
    run([New(c, 317, 1, 3), New(d, 0, 310, 2)])
    run([New(again, 256, 60, 1), New(d, 310, 90, 2)])
    run([New(d, 400, 1, 2), New(again, 316, 1, 1), New(c, 318, 1, 3)])


SPECS = [
    "exact",
    KIVI,
    "kivi:bits=2,window=0",
    "higgs:bits=2,group=16,rope=post,sinks=0,window=0,buffer=64",
]


@pytest.mark.parametrize("spec", with_nightly(SPECS, [KIVI]))
def test_calls_of_a_scheduler(spec):
    layer = caches(spec, **{"block_size": 512} if spec == SPECS[2] else {})

    def run(news: list[New]) -> None:
        nonlocal layer
        layer = call(layer, news)

    if layer.block_size == 256:
        scenario(run)
        return
    a, b = text(1, [5, 2]), text(2, [0])  # blocks of 512 tokens
    run([New(a, 0, 320)])
    run([New(b, 0, 100), New(a, 320, 190)])
    for held in range(510, 515):
        run([New(b, held - 410, 1), New(a, held, 1)])
    run([New(text(3, [5, 7], a, 512), 512, 100), New(a, 515, 1)])


@pytest.mark.nightly
def test_tails_by_slot():
    """As many tails as sequences, which the metadata name."""
    layer = caches(slots=4)
    assert layer.ends.shape == (4,)
    tail = sum(x.nbytes for x in jax.tree.leaves((layer.tails, layer.ends))) // 4
    assert caches().block_bytes - layer.block_bytes == tail
    assert caches().block_bytes * BLOCKS == sum(x.nbytes for x in jax.tree.leaves(caches()))

    def run(news: list[New]) -> None:
        nonlocal layer
        layer = call(layer, news)

    scenario(run)


@pytest.mark.nightly
def test_scores_as_the_engine_asks():
    layer, a = caches("exact"), text(1, [4, 3])
    layer = call(layer, [New(a, 0, 130)], sm_scale=0.4, attn_logits_soft_cap=3.0)
    call(layer, [New(a, 130, 1)], sm_scale=0.4, attn_logits_soft_cap=3.0)


CALIBRATED = "kvquant:bits=3,sinks=0;0=higgs:bits=2,group=16,rope=pre,sinks=0,window=0,buffer=32"


@pytest.mark.nightly
def test_keys_before_rope_and_constants_of_a_layer():
    """Methods that rotate keys themselves, one of them calibrated: each layer as a cache of one row
    without pages."""
    random, cache = (
        np.random.default_rng(0),
        kvq.init_cache(ROTATED, CALIBRATED, 1, LONGEST, dtype="f32"),
    )
    constants = tuple(
        {
            group: {
                name: jnp.asarray(made_up(name, (run.count, *size), random), jnp.float32)
                for name, size in names.items()
            }
            for group, names in run.wiring.wanted().items()
        }
        for run in runs_of(cache.layout)
    )
    caches = paged.create_kv_caches(ROTATED, CALIBRATED, BLOCKS, LONGEST, chunk=CHUNK, dtype="f32")
    a = text(1, [4, 6, 2, 0])
    for held, count in ((0, 90), (90, 1), (91, 70)):
        width = -(-LONGEST // caches[0].block_size)
        q, k, v, md = flat([New(a._replace(blocks=a.blocks[:width]), held, count)], width)
        views = kvq.layers(cache, jnp.asarray([count]), constants=constants)
        for number, view in enumerate(views):
            wanted, views[number] = view.attend(q[None, :CHUNK], k[None, :CHUNK], v[None, :CHUNK])
            own = paged.layer_constants(ROTATED, CALIBRATED, constants, number)
            caches[number], out = step(caches[number], q, k, v, md, constants=own)
            np.testing.assert_allclose(out[:count], wanted[0, :count], rtol=0, atol=2e-5)
        cache = kvq.commit_layers(views)


# ---- What is not written, and what cannot be ----


def test_a_call_writes_its_own_blocks_alone():
    """Padding, in tokens, in sequences and in tables, writes nothing; and no sequences change
    nothing."""
    layer, a, b = caches(), text(1, [5, 2]), text(2, [0, 8])
    layer = call(layer, [New(a, 0, 290), New(b, 0, 20)], rubbish=-1)
    before = jax.tree.map(np.asarray, layer)
    layer = call(layer, [New(b, 20, 60)], rubbish=BLOCKS + 3)
    others = np.asarray([1, 2, 3, 4, 5, 6, 7, 8])
    for old, new in zip(jax.tree.leaves(before.body), jax.tree.leaves(layer.body), strict=True):
        np.testing.assert_array_equal(old[:, others], new[:, others])
        assert (old[:, 0] != new[:, 0]).any()
    for old, new in zip(jax.tree.leaves(before.tails), jax.tree.leaves(layer.tails), strict=True):
        np.testing.assert_array_equal(old[:, others], new[:, others])
    before = jax.tree.map(np.asarray, layer)
    after = jax.tree.map(np.asarray, call(layer, []))
    jax.tree.map(np.testing.assert_array_equal, before, after)


B_MORE = New(text(2, [0, 8]), 40, 5)
WRONG = {
    "a block that is not there": New(text(1, [BLOCKS]), 0, 50),
    "a table with a gap": New(text(1, [5, -1]), 250, 20),
    "fewer tokens than new ones": New(text(1, [5]), -4, 20),
    "a tail that another sequence has": New(text(1, [3]), 40, 1),
    "tokens taken back beyond a unit": New(text(1, [5]), 95, 1),
    "more tokens than a sequence may have": New(text(1, [5, 6, 7]), LONGEST - 2, 20),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_cannot_be_is_nan_for_its_sequence_alone(why):
    layer = call(caches(), [New(text(1, [5]), 0, 100), New(text(2, [0, 8]), 0, 40)])
    before = jax.tree.map(np.asarray, layer)
    wrong = WRONG[why]
    shown = wrong._replace(held=abs(wrong.held) if wrong.held < 600 else 0)  # some tokens
    q, k, v, md = flat([shown, B_MORE], 3, rubbish=1)
    lengths = md.seq_lens.at[0].set(wrong.held + wrong.count)
    layer, out = step(layer, q, k, v, md._replace(seq_lens=lengths))
    assert np.isnan(out[: wrong.count]).all()
    np.testing.assert_allclose(
        out[wrong.count : wrong.count + 5], dense(layer, B_MORE), rtol=0, atol=2e-5
    )
    np.testing.assert_array_equal(out[wrong.count + 5 :], 0)
    for old, new in zip(jax.tree.leaves(before.body), jax.tree.leaves(layer.body), strict=True):
        np.testing.assert_array_equal(old[:, 1:], new[:, 1:])


def test_tokens_taken_back_within_a_unit():
    """Drafts that were refused: 3 of the 100 tokens, whose unit is still in the tail."""
    a = text(1, [5])
    layer = call(caches(), [New(text(9, [5], a, 97), 0, 100)])
    call(layer, [New(a, 97, 1)])


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_token_that_is_not_finite_counts_in_its_call(number):
    layer, a, b = caches(), text(1, [5]), text(2, [0])
    q, k, v, md = flat([New(a, 0, 40), New(b, 0, 20)], 3)
    layer, out = step(layer, q, k.at[25, 1, 3].set(number), v, md)
    assert np.isfinite(out[:25]).all()
    assert np.isnan(out[25:40]).all()
    np.testing.assert_allclose(out[40:60], dense(layer, New(b, 0, 20)), rtol=0, atol=2e-5)
    keys = a.k.copy()
    keys[25, 1, 3] = 0
    call(layer, [New(b, 20, 1), New(a._replace(k=keys), 40, 1)])


@pytest.mark.nightly
def test_blocks_change_in_place():
    """No second cache beside the one that is given away."""
    layer = jax.eval_shape(lambda: paged.create_kv_caches(SHAPE, KIVI, 4096, 65536, dtype="f32")[0])
    arrays = jax.eval_shape(lambda: flat([], 65536 // layer.block_size))
    memory = step.lower(layer, *arrays).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer))
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert memory.temp_size_in_bytes < 0.1 * size


GIVEN = {"shape": SHAPE, "method": KIVI, "num_blocks": 4, "max_model_len": 256}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "kivi:bits=4"}, "window=0, sinks=0 and no keep"),
        ({"method": "higgs:bits=2,rope=post,window=0"}, "window=0, sinks=0 and no keep"),
        ({"method": "kivi:bits=4,window=0,keep=streaming:64"}, "window=0, sinks=0 and no keep"),
        ({"method": "aqua:bits=2,sinks=0", "shape": ROTATED}, "each by itself"),
        ({"shape": kvq.KVShape(**vars(SHAPE) | {"sliding_window": 64})}, "a sliding window of 64"),
        ({"max_model_len": 20}, "max_model_len=20 is less than 32"),
        ({"block_size": 48}, "pages of 48 tokens"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"slots": 0}, "slots=0"),
        ({"mesh": jax.make_mesh((2,), ("x",))}, "one device"),
    ],
)
def test_caches_that_cannot_be_are_one_line(change, message):
    with pytest.raises(kvq.UserError, match=message):
        paged.create_kv_caches(**GIVEN | change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_kv_cache": False}, "has no update_kv_cache=False; left out, or True"),
        ({"attention_chunk_size": 128}, "has no attention_chunk_size=128"),
        ({"k_scale": 0.5}, "has no k_scale=0.5"),
        ({"decode_query_size": 3}, "has no decode_query_size=3"),
        ({"rotation": 1}, "which is no argument"),
        ({"mesh": jax.make_mesh((2,), ("x",))}, "a mesh of 2 devices"),
        ({"q": jnp.zeros((TOKENS, 8, 16))}, r"q has shape \[320, 8, 16\]"),
        ({"kv_cache": jnp.zeros((4, 256))}, "wanted one of create_kv_caches"),
        ({"block_tables": jnp.zeros(SEQUENCES, jnp.int32)}, "at least 3, the blocks of 700 tokens"),
        ({"query_start_loc": jnp.zeros(SEQUENCES, jnp.int32)}, "query_start_loc has shape"),
        ({"request_distribution": None}, "request_distribution is None"),
        ({"use_causal_mask": False}, "has no use_causal_mask=False"),
    ],
)
def test_calls_that_cannot_be_are_one_line(options, message):
    q, k, v, md = flat([], 3)
    md = md._replace(
        **{name: options.pop(name) for name in paged.Metadata._fields if name in options}
    )
    with pytest.raises(kvq.UserError, match=message):
        paged.attention(
            **{"kv_cache": caches(), "q": q, "k": k, "v": v, "attention_metadata": md} | options
        )


@pytest.mark.nightly
def test_the_example_of_the_page_runs():
    page = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "clients.md").read_text(
        encoding="utf-8"
    )
    names = {}
    exec(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[-1], names)
    out = np.asarray(names["out"], np.float32)
    assert np.isfinite(out).all()
    assert out[:41].any((1, 2)).all()
    assert not out[41:].any()


def test_metadata_without_slots_are_refused_where_tails_have_them():
    q, k, v, md = flat([], 3)
    with pytest.raises(kvq.UserError, match="mamba_state_indices is None"):
        paged.attention(caches(slots=2), q, k, v, md._replace(mamba_state_indices=None))


# ---- tpu-inference itself ----

THEIRS = [  # arguments of `attention` in tpu_inference/layers/common/attention_interface.py, and what they ask for
    ("sm_scale", None),
    ("attention_chunk_size", None),
    ("q_scale", None),
    ("k_scale", None),
    ("v_scale", None),
    ("sinks", None),
    ("update_kv_cache", True),
    ("use_causal_mask", None),
    ("shared_attention_metadata", None),
    ("attn_logits_soft_cap", None),
    ("decode_query_size", 1),
    ("attention_backend", None),
]


FIRST = ["kv_cache", "q", "k", "v", "attention_metadata", "mesh", "head_dim_original"]


def test_attention_takes_what_the_engine_gives_it():
    """Its models name the later ones, and add channels of zeros to heads."""
    assert list(inspect.signature(paged.attention).parameters)[: len(FIRST)] == FIRST
    new = New(text(1, [5]), 0, 8)
    *qkv, md = flat([new], 3)
    given = types.SimpleNamespace(
        **md._asdict(), input_positions=None, pcp=None, use_causal_mask=True
    )
    wide = [jnp.pad(x, ((0, 0), (0, 0), (0, 112))) for x in qkv]
    mesh = jax.make_mesh((1,), ("model",))
    layer, out = paged.attention(caches(), *wide, given, mesh, SHAPE.head_dim, **dict(THEIRS))
    np.testing.assert_allclose(out[:8, :, :16], dense(layer, new), rtol=0, atol=2e-5)
    np.testing.assert_array_equal(out[:, :, 16:], 0)


@pytest.fixture
def installed(monkeypatch) -> Path:
    """The folder of tpu-inference. Its modules are imported without its __init__, which wants
    vLLM."""
    spec = importlib.util.find_spec("tpu_inference")
    if spec is None:
        pytest.skip("tpu-inference is not installed")
    folder = Path(spec.origin).parent
    monkeypatch.setitem(sys.modules, "tpu_inference", package := types.ModuleType("tpu_inference"))
    package.__path__ = [str(folder)]
    return folder


def test_names_are_those_of_the_package(installed):
    tree = ast.parse((installed / "layers/common/attention_interface.py").read_text())
    arguments = next(
        x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "attention"
    ).args
    assert [x.arg for x in arguments.args] == [*FIRST, *(name for name, _ in THEIRS)]
    theirs = importlib.import_module(
        "tpu_inference.layers.common.attention_metadata"
    ).AttentionMetadata
    assert set(paged.Metadata._fields) <= set(theirs.__dataclass_fields__)
    md = flat([New(text(1, [5]), 0, 8)], 3)
    layer, out = step(
        caches(), *md[:3], theirs(input_positions=jnp.arange(TOKENS), **md[3]._asdict())
    )
    np.testing.assert_allclose(out[:8], dense(layer, New(text(1, [5]), 0, 8)), rtol=0, atol=2e-5)


# Codes of 8 bits are off by up to 1/510 of a group's range, which is about 5 for 32 standard normal
# numbers: by 0.01. Scores, 16 products of these with such numbers over 4, move by 0.01, and outputs
# by about as much.
@pytest.mark.parametrize(("spec", "tolerance"), [("exact", 2e-5), ("kivi:bits=8,window=0", 0.02)])
def test_the_package_s_reference_agrees(installed, spec, tolerance):
    rpa = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
    layer = caches(spec)
    size = BLOCKS, layer.block_size, SHAPE.num_kv_heads, SHAPE.head_dim
    pool = jnp.zeros(rpa.get_kv_cache_shape(*size, jnp.float32))

    def run(news: list[New]) -> None:
        nonlocal layer, pool
        q, k, v, md = flat(news, 3)
        layer, out = step(layer, q, k, v, md)
        given = md.seq_lens, md.block_tables, md.query_start_loc, md.request_distribution
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            scale = SHAPE.head_dim**-0.5
            wanted, pool = rpa.ref_ragged_paged_attention(q, k, v, pool, *given, sm_scale=scale)
        np.testing.assert_allclose(out[: len(wanted)], wanted, rtol=0, atol=tolerance)

    scenario(run)
