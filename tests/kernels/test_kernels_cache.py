"""Caches whose bodies kernels read: what a model computes with the TPU kernel, interpreted, in the
place of the general path, and that a program for a TPU is the general path where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, with_nightly
from kernel_cache import CAPACITY, LENGTH, filled, for_chip, logits
from kernel_cases import check_outputs
from kernel_forms import rope
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache.readers import kernel as kernel_reader
from kvqjax.pallas_kernels import dispatch
from kvqjax.pallas_kernels.exact import ExactSpec
from kvqjax.pallas_kernels.tpu import exact
from kvqjax.pallas_kernels.tpu import packed as tpu

METHODS = ["kivi_star:protected=0,sinks=3", "kvquant:bits=2,outliers=0.01,sinks=3"]
ROTATED = ["omniscale:bits=4,window=0,sinks=3", "kvarn:bits=2,sinks=3"]
ROTATED += ["oscar:bits=2,rotate=hadamard,window=0,sinks=3"]


@pytest.mark.parametrize("method", with_nightly(METHODS + ROTATED, ROTATED[:1]))
def test_the_kernel_reads_what_the_cache_stores(method, monkeypatch):
    model, cache = filled(method)
    plain, calls = logits(model, cache), []

    def kernel(q, body, layer, start, stop, spec, general, trusted, recent=None):
        assert (spec.rope is None) == (method in ROTATED)
        if spec.rope is not None:
            np.testing.assert_allclose(
                spec.rope.frequencies, rope(10000.0, 128).frequencies, rtol=1e-6
            )
        calls.append(spec)
        return tpu.packed_attention(q, body, layer, start, stop, spec, interpret=True)

    monkeypatch.setattr(kernel_reader, "packed_attention", kernel)
    found = logits(model, for_chip(cache, "v6e"))
    assert calls
    check_outputs(found, plain)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method",
    [METHODS[0], pytest.param("kvquant:bits=2,outliers=0,sinks=3", marks=pytest.mark.nightly)],
)
def test_elsewhere_the_general_path(method):
    """Traced for a TPU, run on a CPU."""
    model, cache = filled(method)
    for_tpu = for_chip(cache, "v6e")
    wiring = kvq.cache.runs_of(for_tpu.layout)[0].wiring
    assert dispatch.path(wiring.fast.packed.spec, 2, 512) == "tpu"
    here = logits(model, cache)
    # All heads at once.
    np.testing.assert_allclose(logits(model, for_tpu), here, atol=1e-5 * np.abs(here).max())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method", with_nightly(["kivi:bits=2,group=128,sinks=3", METHODS[0]], METHODS[:1])
)
def test_kernels_read_pages_where_they_lie(method, monkeypatch):
    """As a chip's program does it, interpreted; and where such a program runs on a CPU, without the
    kernel."""
    model, cache = filled(method)
    plain, tables = logits(model, cache), []
    paged = kvq.init_cache(model, kvq.parse(method), 2, CAPACITY, target="v6e", pages=5)
    assert paged.layout.pool.tokens == 1024
    paged = kvq.with_pages(paged, np.asarray([[3], [1]]))
    _, paged = jax.jit(kvq.prefill)(
        model, tokens(2, LENGTH), jnp.asarray([LENGTH, LENGTH - 200]), paged
    )
    np.testing.assert_allclose(logits(model, paged), plain, atol=1e-5 * np.abs(plain).max())

    def kernel(q, body, layer, start, stop, spec, general, trusted, pages, **recent):
        tables.append(pages)
        module = exact if isinstance(spec, ExactSpec) else tpu
        return module.packed_attention(
            q, body, layer, start, stop, spec, pages=pages, interpret=True, **recent
        )

    monkeypatch.setattr(kernel_reader, "packed_attention", kernel)
    found = logits(model, paged)
    assert [table.shape for table in tables] == [(2, 1)]
    check_outputs(found, plain)


REACHING = [
    "kivi:bits=2",
    "kivi:bits=4",
    "kivi:bits=2,group=128",
    "omniscale:bits=2",
    "omniscale:bits=4,group=128",
]
REACHING += [
    "kvarn:bits=2",
    "kvarn:bits=4",
    "kvarn:bits=4,value_bits=2",
    "oscar:bits=2",
    "uniform:bits=4",
]


@pytest.mark.parametrize("method", thinned(REACHING, 3))
def test_bodies_of_kivis_shape_reach_the_kernel(method):
    """As users name them, with their default groups, on every TPU that has the row."""
    model = tiny(head_dim=128, num_layers=1)
    cache = kvq.init_cache(model, kvq.parse(method), 1, 1024)
    targets = {"omniscale": ("v6e", "v7x"), "kvarn": ("v7x",)}
    for target in targets.get(method.partition(":")[0], ("v5e", "v5p", "v6e", "v7x")):
        form = kvq.cache.runs_of(for_chip(cache, target).layout)[0].wiring.fast.packed
        assert dispatch.path(form.spec, 4, 1024) == "tpu", target
