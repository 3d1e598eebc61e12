"""Codes in lines and stripes, the form of CPUs, are the same as in planes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_constants, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.cache.reshape import CANONICAL, convert

forward = jax.jit(kvq.forward)
CAPACITY = 4096
SPECS = (
    "kivi:bits=2,group=128",
    "kivi:bits=4,value_group=16,sinks=4",
    "kivi:bits=3,group=64",
    "kivi:bits=8,sinks=4",
    "klt:bits=2.5,heads=own,buffer=32",
    "klt:bits=1.3,buffer=32",
)
BOTH = {"lines", "stripes"}  # of keys and of values
# Float32: sums of 16 products in another order.
BOUND = 1e-4


def filled(model, spec, form, steps=3):
    """The logits behind a prompt of 700 and 161 tokens that goes in as chunks, and the cache."""
    cache, text = kvq.init_cache(model, spec, 2, CAPACITY, form=form), tokens(2, 700 + steps)
    for start, counts in ((0, [350, 161]), (350, [350, 0])):
        _, cache = forward(model, text[:, start : start + 350], jnp.asarray(counts), cache)
    out = []
    for step in range(steps):
        logits, cache = forward(model, text[:, 700 + step :][:, :1], jnp.asarray([1, 1]), cache)
        out.append(np.asarray(logits))
    return np.stack(out), cache


def held(cache):
    """The forms of all codes of a cache."""
    codecs = [run.wiring.storage.codecs[source] for run in runs_of(cache.layout) for source in "kv"]
    fields = [field for codec in codecs for field in codec.fields.values()]
    return {field.form for field in fields if field.packed}


@pytest.mark.parametrize("spec", with_nightly(SPECS, ["kivi:bits=8,sinks=4"]))
def test_the_same_codes_and_logits_as_in_planes(spec):
    model = with_constants(tiny(head_dim=32), kvq.parse(spec))
    (wanted, planes), (found, stripes) = (
        filled(model, spec, form) for form in ("planes", "stripes")
    )
    in_stripes = {"stripes"} if spec.startswith("klt") else BOTH
    assert (held(planes), held(stripes)) == ({"planes"}, in_stripes)
    np.testing.assert_allclose(found, wanted, atol=BOUND * np.abs(wanted).max())
    back = convert(stripes, **CANONICAL)
    assert jax.tree.structure(back) == jax.tree.structure(planes)
    for a, b in zip(
        jax.tree.leaves(back.runs[0].body), jax.tree.leaves(planes.runs[0].body), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    there = convert(back, layers="scan", form="stripes")
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(stripes), strict=True):
        np.testing.assert_array_equal(a, b)


def test_long_bodies_of_uniform_codes_and_coefficients_on_cpus_have_them_and_no_others():
    model = tiny()

    def kind(spec, capacity=4096, model=model, **more):
        return held(kvq.init_cache(model, spec, 1, capacity, **more))

    assert kind("kivi:bits=2") == BOTH
    assert kind("kivi:bits=2", 4095) == {"planes"}, "their sums take long to compile"
    assert kind("kivi:bits=2", model=tiny(sliding_window=70)) == {"planes"}, "a ring is short"
    assert kind("kivi:bits=2,keep=streaming:256") == {"planes"}, (
        "evicted bodies are not read as they lie"
    )
    assert kind("kivi:bits=2", target="v5e") == {"planes"}
    assert kind("kivi:bits=2,rope=pre") == {"planes"}, "nothing reads stripes there"
    assert kind("kivi:bits=3", model=tiny(head_dim=16)) == {"planes"}, (
        "32 codes of a head fill a word"
    )
    assert kind("kvquant:bits=3") == {"planes"}
    assert kind("klt:heads=own") == {"stripes"}
    assert kind("klt:heads=own", 4095) == kind("klt", target="v5e") == {"planes"}
    assert kind("klt:values=alone") == {"planes"}, "values are decoded there"


def test_no_kernel_reads_them():
    """A TPU's kernel would read words of planes."""
    model = tiny()
    cache = kvq.init_cache(model, "kivi:bits=2", 1, 4096, target="v5e", form="stripes")
    assert runs_of(cache.layout)[0].wiring.fast.packed.spec.target == "cpu"


@pytest.mark.nightly
def test_saved_caches_are_read_on_either_side(tmp_path):
    """Files hold planes."""
    model, spec = tiny(), "kivi:bits=2,group=128"
    _, cache = filled(model, spec, None, steps=1)
    kvq.save_cache(tmp_path / "cache", cache, model)
    again = kvq.load_cache(tmp_path / "cache", model)
    assert held(again) == BOTH
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)
