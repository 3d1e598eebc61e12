"""Bodies stored head by head, the form of GPUs: the same codes as in planes of words, attention
without a loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method, thinned, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import layout as run_layout
from kvqjax.cache import runs, runs_of
from kvqjax.cache.readers import decoded
from kvqjax.cache.reshape import CANONICAL, convert
from kvqjax.ops.layout import Field

forward, prefill = jax.jit(kvq.forward, static_argnames="last"), jax.jit(kvq.prefill)
unpacked = jax.jit(lambda field, *args: field.packing.read(*args), static_argnums=(0, 4))
KIVI = ("kivi2", "kivi3-sinks", "kivi4-float32", "kivi8", "kivi-wide-groups", "kivi-published")
PER_TOKEN = ("uniform",)
ROTATED = ("kivi-rotated", "omniscale", "kvarn", "kvarn4", "oscar")
HEADS = ("exact", *KIVI, *ROTATED, *PER_TOKEN, "mixed", "sliding")
# One of every way to read a body directly: 4 and 8 bits, pairs in a nibble, two clocks, a frame,
# balanced rows.
COMPARED = (
    "kivi3-sinks",
    "kivi8",
    "kivi-wide-groups",
    "kivi-published",
    "omniscale",
    "kvarn",
    "oscar",
    *PER_TOKEN,
)
# Float32: a body's sums of at most 160 products in another order, as in
# tests/cache/test_cache_forward.py.
BOUND = 2e-4


@pytest.mark.parametrize("bits", thinned([1, 2, 3, 4, 5, 6, 8], 3))
@pytest.mark.parametrize("size", thinned([32, 64, 128], 3))
def test_codes_are_read_back_as_they_were_written(bits, size):
    random = np.random.default_rng(bits)
    codes = random.integers(0, 2**bits, (512, 24)).astype(np.uint32)
    field = Field(kind="codes", width=24, bits=bits, role="payload", form="heads", heads=3)
    packing = field.packing
    stored = packing.allocate((2, 2), 512)
    # What stood there before must not shine through.
    stored = jax.tree.map(lambda a: jnp.full_like(a, -1), stored)
    put = jax.jit(
        lambda stored, token, tile: packing.write(stored, (jnp.int32(1), jnp.int32(0)), token, tile)
    )
    for start in random.permutation(512 // size) * size:
        stored = put(stored, jnp.int32(start), jnp.asarray(codes[start : start + size]))
    np.testing.assert_array_equal(packing.read(stored, 1, 256, 256)[0], codes[256:])
    np.testing.assert_array_equal(packing.read(stored, 1, 0, 512)[0], codes)
    same = packing.write(
        stored,
        (jnp.int32(1), jnp.int32(0)),
        jnp.int32(0),
        jnp.zeros((size, 24), jnp.uint32),
        jnp.asarray(False),
    )
    np.testing.assert_array_equal(same[0], stored[0])
    width = {1: 2, 2: 2, 3: 4, 4: 4}.get(bits, 8)
    assert packing.token_bits == 24 * width
    assert stored[0].size * (4 if stored[0].dtype == jnp.int4 else 8) == 2 * 2 * 512 * 24 * width


def filled(model, method, form: str, layers: str, capacity: int = 512, run=(prefill, forward)):
    """Logits of a few tokens after a prefilled prompt, and the cache; its first row's next group
    falls due by them."""
    cache = kvq.init_cache(model, method, 2, capacity, form=form, layers=layers)
    text = tokens(2, 390)
    _, cache = run[0](model, text[:, :382], jnp.asarray([382, 161]), cache)
    few, cache = run[1](model, text[:, 382:], jnp.asarray([8, 7]), cache)
    return np.asarray(few)[:, :7], cache


def encoded(cache):
    """What every row's body holds of codes and vectors, by layer, source, field and row, in token
    order."""
    out = {}
    for run, state in zip(runs_of(cache.layout), cache.runs, strict=True):
        for clock, flushed in zip(run.wiring.storage.clocks, state.flushed, strict=True):
            fields = [
                (source, *item)
                for source in clock.sources
                for item in run.wiring.storage.codecs[source].fields.items()
            ]
            for source, name, field in fields if run.slots and not run.wraps else ():
                if field.kind in ("codes", "plain"):
                    for index in range(run.count):
                        found = np.asarray(
                            unpacked(field, state.body[source][name], index, 0, run.slots)
                        )
                        for row, units in enumerate(flushed):
                            out[run.first + index, source, name, row] = found[
                                row, : int(units) * clock.unit
                            ]
    return out


@pytest.mark.parametrize(
    ("name", "layers"),
    with_nightly(
        [*((name, "scan") for name in COMPARED), ("mixed", "unroll"), ("kvarn4", "unroll")],
        [("omniscale", "scan")],
    ),
)
def test_equal_codes_and_logits(name, layers):
    model, method = model_and_method(name)
    wanted, got = filled(model, method, "planes", "scan"), filled(model, method, "heads", layers)
    np.testing.assert_allclose(got[0], wanted[0], atol=BOUND * max(1.0, np.abs(wanted[0]).max()))
    here, there = encoded(got[1]), encoded(wanted[1])
    assert here.keys() == there.keys()
    for mine, other in ((here[name], there[name]) for name in there):
        if mine.dtype == np.uint32:  # another program's products may round to another code, rarely
            assert np.sum(mine != other) <= 1e-2 * mine.size
        else:
            np.testing.assert_allclose(mine, other, atol=1e-4)
    runs = runs_of(got[1].layout)
    assert all(run.wiring.fast.direct is not None for run in runs)


def as_on_gpus(model, method, monkeypatch):
    """`filled` by the forms of GPUs, in parts of one block; they need no GPU, but programs of their
    own."""
    monkeypatch.setattr(run_layout, "AT_ONCE", 1)
    monkeypatch.setattr(decoded, "SMALLEST_PART", 1)
    monkeypatch.setattr(decoded, "LARGEST_PART", 1)
    # Several turns, the last from within the one before it.
    monkeypatch.setitem(runs.CARRIED, "gpu", 2**15)
    runs._runs_of.cache_clear()

    def chosen(*x, default=None, cuda=None, **others):
        # A CPU has no products of bfloat16 numbers with float32 sums, which klt has for GPUs.
        return (default if method.name.startswith("klt") else cuda or default)(*x)

    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    run = [jax.jit(lambda *x, f=f: f(*x)) for f in (kvq.prefill, kvq.forward)]
    return filled(model, method, "heads", "scan", 1100, run)


DECODED = {
    "kvquant": "",
    "klt": "",
    "klt-own": "",
    "commvq": "",
    "aqua": "",
    "xquant-latents": "",
    "xquant-cl": "",
    "read-as-it-flows": "xquant_cl:bits=3,group=32,base=0,protected=1,latent=false,accumulator=float32",
    "summed": "higgs:bits=2,buffer=32,seed=1",
}


@pytest.mark.parametrize("name", with_nightly(DECODED, ["kvquant", "klt-own"]))
def test_bodies_that_are_decoded_without_a_loop_over_data(name, monkeypatch):
    """Part after part, or by a loop of as many turns as the capacity has blocks, as by a loop that
    ends with the longest row; or all of it after such a loop, where what flows is what is read.
    HIGGS's grid points and klt's coefficients are summed part after part, and the sums are
    transformed."""
    model, method = (tiny(), kvq.parse(DECODED[name])) if DECODED[name] else model_and_method(name)
    wanted = filled(model, method, "planes", "scan", 1100)
    got = as_on_gpus(model, method, monkeypatch)
    runs = runs_of(got[1].layout)
    assert got[1].runs[0].body
    assert runs[-1].slots >= 2 * runs[-1].block
    assert name != "read-as-it-flows" or runs[-1].wiring.chain.read_in is None
    assert not name.startswith("klt") or all(run.wiring.fast.coefficients for run in runs)
    assert name != "summed" or all(
        run.static_loops and run.wiring.fast.summed is not None for run in runs
    )
    np.testing.assert_allclose(
        got[0], wanted[0], atol=5 * BOUND * max(1.0, np.abs(wanted[0]).max())
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["kivi3-sinks", "kvquant"])
def test_sinks_and_window_fill_token_by_token_as_in_planes(name):
    """From an empty cache, one row at every step, the other at every second."""
    model, method = model_and_method(name)
    text, stored = tokens(2, 7), []
    for form in ("planes", "heads"):
        cache = kvq.init_cache(model, method, 2, 512, form=form, layers="unroll")
        for step in range(7):
            out, cache = forward(model, text[:, step : step + 1], jnp.asarray([1, step % 2]), cache)
        assert cache.lengths.tolist() == [7, 3]
        held = [(run.sinks, run.window, run.flushed) for run in cache.runs]
        stored.append((held, encoded(cache) if cache.runs[0].body else {}, out[0]))
    for a, b in zip(*map(jax.tree.leaves, stored), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=BOUND)


def test_the_target_decides_and_what_cannot_be_keeps_its_planes():
    model = tiny()
    assert kvq.init_cache(model, kvq.exact(), 1, 64, target="sm90").layout.form == "heads"
    assert kvq.init_cache(model, kvq.exact(), 1, 64, target="v6e").layout.form == "planes"
    cache = kvq.init_cache(model, kvq.parse("kivi:rope=pre"), 1, 512, form="heads")
    assert all(
        field.heads == 0
        for run in runs_of(cache.layout)
        for c in run.wiring.storage.codecs.values()
        for field in c.fields.values()
    )
    with pytest.raises(kvq.UserError, match="known: planes, heads"):
        kvq.init_cache(model, kvq.exact(), 1, 64, form="rows")


@pytest.mark.nightly
def test_rows_that_see_nothing_of_the_body():
    """A row without encoded tokens beside one with many: finite, and equal to the row beside an
    empty one."""
    model, method = model_and_method("kivi2")
    empty, text, logits = kvq.init_cache(model, method, 2, 512, form="heads"), tokens(2, 201), []
    for count in (200, 0):
        _, cache = prefill(model, text[:, :200], jnp.asarray([count, 5]), empty)
        logits.append(forward(model, text[:, 200:], jnp.asarray([1, 1]), cache)[0][1])
    assert np.isfinite(logits[0]).all()
    np.testing.assert_allclose(*logits, atol=BOUND)


@pytest.mark.parametrize(
    "spec", thinned(["exact", "kivi:bits=2,window=32", "kivi:bits=4,window=32"], 3)
)
def test_no_second_cache(spec):
    model = tiny()
    cache = jax.eval_shape(
        functools.partial(kvq.init_cache, model, kvq.parse(spec), 2, 65536, form="heads")
    )
    step = jax.jit(kvq.forward, donate_argnames="cache")
    one = jax.ShapeDtypeStruct((2, 1), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    memory = step.lower(model, *one, cache).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * kvq.ledger(cache).bytes


@pytest.mark.nightly
def test_cases_that_have_the_form():
    for name in CASES:
        model, method = model_and_method(name)
        runs = runs_of(
            dataclasses.replace(
                kvq.init_cache(model, method, 1, 64).layout, form="heads", capacity=1024
            )
        )
        assert all(run.wiring.fast.direct is not None for run in runs) == (
            name in (*HEADS, "sliding-mixed")
        ), name


@pytest.mark.nightly
@pytest.mark.parametrize("name", thinned(["kivi3-sinks", "mixed", "aqua"], 3))
def test_a_cache_moves_between_forms_and_back(name):
    model, method = model_and_method(name)
    _, cache = filled(model, method, "planes", "scan")
    there = convert(cache, layers="unroll", form="heads")
    assert (there.layout.layers, there.layout.form, len(there.runs)) == (
        "unroll",
        "heads",
        model.config.num_layers,
    )
    back = convert(there, **CANONICAL)
    assert jax.tree.structure(back) == jax.tree.structure(cache)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)
    one, text = jnp.asarray([1, 1]), tokens(2, 1)
    np.testing.assert_allclose(
        forward(model, text, one, there)[0],
        forward(model, text, one, cache)[0],
        atol=BOUND * 5,
        rtol=1e-4,
    )


@pytest.mark.nightly
def test_on_a_mesh():
    """Rows, blocks of the body and heads shared out over 8 devices: the logits of planes."""
    spec, text, found = "kivi:bits=2,value_group=16,window=32", tokens(2, 321), []
    model = kvq.shard(tiny(), spec, data=2, seq=2, model=2)
    for form in ("planes", "heads"):
        cache = kvq.init_cache(model, spec, 2, 1024, form=form)
        _, cache = kvq.forward(model, text[:, :320], jnp.asarray([320, 190]), cache)
        found.append(kvq.forward(model, text[:, 320:], jnp.asarray([1, 1]), cache)[0])
    np.testing.assert_allclose(found[1], found[0], atol=BOUND)


@pytest.mark.nightly
def test_a_sliding_window_s_ring_is_read_head_by_head():
    """Rows that have gone around the ring, and one that has not; blocks are then read as they
    lie."""
    model, text, logits = tiny(sliding_window=70), tokens(2, 1500), {}
    for form in ("planes", "heads"):
        cache = kvq.init_cache(model, "kivi:bits=4,value_group=16,window=0", 2, 4096, form=form)
        assert runs_of(cache.layout)[0].wraps
        cache = forward(model, text, jnp.asarray([1500, 300]), cache, last=True)[1]
        logits[form] = forward(model, text[:, :1], jnp.asarray([1, 1]), cache, last=True)[0]
    np.testing.assert_allclose(
        logits["heads"], logits["planes"], atol=BOUND * float(jnp.abs(logits["planes"]).max())
    )
