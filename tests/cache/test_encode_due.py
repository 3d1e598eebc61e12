"""A chunk's units are encoded as one tile where that gives the very bits that one after the other
does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import _constants
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import append as encoding
from kvqjax.cache import runs_of

LENGTHS, CHUNK, FEW = (1100, 1041), 512, 100
AT_ONCE = [
    pytest.param(
        "kivi:bits=2,value_group=16,window=32,sinks=3", "planes", marks=pytest.mark.nightly
    ),
    pytest.param(
        "kivi:key_bits=3,value_bits=1,value_group=16,window=0", "planes", marks=pytest.mark.nightly
    ),
    pytest.param(
        "kivi:bits=2,value_group=16,window=32,sinks=3", "heads", marks=pytest.mark.nightly
    ),
    pytest.param(
        "kivi:bits=4,value_group=16,window=64,rule=published", "planes", marks=pytest.mark.nightly
    ),
    pytest.param(
        "kivi:bits=4,value_group=16,window=32;0=exact", "heads", marks=pytest.mark.nightly
    ),
    # A window as large as a tile, which begins anywhere in it.
    ("kivi:bits=4,value_group=16,window=480", "planes"),
    ("xquant:bits=4,group=32,window=32", "planes"),
    # Single tokens: many planes at once.
    pytest.param("kvquant:bits=3,window=40,sinks=3", "planes", marks=pytest.mark.nightly),
]


def filled(model, spec: str, form: str, chunk: int):
    """A cache of ragged rows, its sources appended `chunk` tokens at a time."""
    cache = kvq.init_cache(model, spec, 2, 1280, form=form)
    rng, start = np.random.default_rng(0), 0
    shapes = [
        {n: (run.count, 2, max(LENGTHS), w) for n, w in run.wiring.storage.sources.items()}
        for run in runs_of(cache.layout)
    ]
    sources = [{n: rng.normal(size=s).astype(np.float32) for n, s in own.items()} for own in shapes]
    commit = jax.jit(kvq.commit)
    for start in range(0, max(LENGTHS), chunk):
        piece = tuple(
            {n: jnp.asarray(x[:, :, start : start + chunk]) for n, x in own.items()}
            for own in sources
        )
        length = min(chunk, max(LENGTHS) - start)
        cache = commit(model, cache, piece, jnp.clip(jnp.asarray(LENGTHS) - start, 0, length))
    return cache


@pytest.mark.parametrize(("spec", "form"), AT_ONCE)
def test_a_chunk_s_units_at_once_are_the_same_words(spec, form):
    model = tiny().replace(constants=_constants(tiny(), kvq.parse(spec)))
    many, few = filled(model, spec, form, CHUNK), filled(model, spec, form, FEW)
    run = runs_of(many.layout)[-1]
    assert encoding.units_at_once([run], run.wiring.storage.clocks[0], CHUNK) > 1
    assert encoding.units_at_once([run], run.wiring.storage.clocks[0], FEW) == 1
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(few), strict=True):
        if a.dtype == jnp.int4:
            a, b = a.astype(jnp.int8), b.astype(jnp.int8)
        np.testing.assert_array_equal(a, b)


def test_what_is_encoded_unit_by_unit():
    """Products of matrices, what flows between layers, rings and dealt bodies."""
    for spec, changes in (
        ("higgs:bits=4,group=head", {}),
        ("aqua", {}),
        ("kivi:rotate=signs", {}),
        ("kivi", {"sliding_window": 70}),
    ):
        run = runs_of(kvq.init_cache(tiny(**changes), spec, 1, 4096).layout)[-1]
        assert encoding.units_at_once([run], run.wiring.storage.clocks[0], 2048) == 1, spec
    short = runs_of(kvq.init_cache(tiny(), "kivi:bits=4,window=32", 1, 300).layout)
    # A bucket is longer.
    assert (
        encoding.units_at_once(short, short[0].wiring.storage.clocks[0], 2048) * 32
        <= short[0].slots
    )
    layout = kvq.init_cache(tiny(), "kivi", 1, 4096).layout
    assert (
        encoding.units_at_once(runs_of(layout), runs_of(layout)[0].wiring.storage.clocks[0], 2048)
        == 64
    )
    dealt = runs_of(dataclasses.replace(layout, dealt=2))
    assert encoding.units_at_once(dealt, dealt[0].wiring.storage.clocks[0], 2048) == 1
