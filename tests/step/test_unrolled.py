"""Layers as a list, or with matrices that a loop chooses, instead of stacks: the same codes and
logits, for weights and caches in any form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import model_and_method
from tiny import in_form, tiny, tokens

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.model.decoder import layer, logits
from kvqjax.model.weight_trees import (
    FORMS,
    LayerMatrices,
    is_unrolled,
    stacked,
    stored_layers,
    switched,
    unrolled,
)

forward, prefill = jax.jit(kvq.forward), jax.jit(kvq.prefill)
COUNTS = (96, 61)


def filled(model, method, form: str):
    """Logits of a prefilled prompt and of a chunk after it, and the cache."""
    cache = kvq.init_cache(model, method, 2, 192, layers=form)
    text = tokens(2, 128)
    first, cache = prefill(model, text[:, :96], jnp.asarray(COUNTS), cache)
    second, cache = forward(model, text[:, 96:], jnp.asarray([32, 30]), cache)
    return np.asarray(first), np.asarray(second)[:, :30], cache


def layer_by_layer(cache):
    """The arrays of every layer of a cache, in order."""
    for run, state in zip(runs_of(cache.layout), cache.runs, strict=True):
        for index in range(run.count):
            yield [a[index] for a in jax.tree.leaves((state.body, state.sinks, state.window))]


@pytest.mark.parametrize(
    "name",
    [
        "exact",
        pytest.param("kivi-published", marks=pytest.mark.nightly),
        pytest.param("mixed", marks=pytest.mark.nightly),
        pytest.param("commvq", marks=pytest.mark.nightly),
        pytest.param("aqua", marks=pytest.mark.nightly),
        pytest.param("xquant-cl", marks=pytest.mark.nightly),
    ],
)
def test_a_list_of_layers_caches_what_a_stack_does(name):
    model, method = model_and_method(name)
    apart, chosen = (model.replace(params=make(model.params)) for make in (unrolled, switched))
    wanted = filled(model, method, "scan")
    more = [(model, "unroll"), (apart, "scan"), (chosen, "unroll")] if name == "mixed" else []
    for other, form in ((apart, "unroll"), (chosen, "scan"), *more):
        got = filled(other, method, form)
        for a, b in zip(got[:2], wanted[:2], strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))
        for mine, theirs in zip(layer_by_layer(got[2]), layer_by_layer(wanted[2]), strict=True):
            for a, b in zip(mine, theirs, strict=True):
                if (
                    a.dtype == jnp.uint32
                ):  # words of codes: products of another program may round to another code
                    assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-2


def test_the_model_decides_how_its_cache_is_stored():
    model = tiny()
    apart = model.replace(params=unrolled(model.params))
    assert not is_unrolled(model.params)
    assert is_unrolled(apart.params)
    assert kvq.init_cache(model, kvq.exact(), 1, 64).layout.layers == "scan"
    assert kvq.init_cache(apart, kvq.exact(), 1, 64).layout.layers == "unroll"
    assert len(kvq.init_cache(apart, kvq.exact(), 1, 64).runs) == model.config.num_layers
    np.testing.assert_allclose(
        logits(apart.params, tokens(1, 9), model.config),
        logits(model.params, tokens(1, 9), model.config),
        atol=1e-5,
    )
    with pytest.raises(kvq.UserError, match="known: scan, unroll"):
        kvq.init_cache(model, kvq.exact(), 1, 64, layers="list")


def test_a_loop_reads_chosen_matrices_in_place():
    """Out of a stack XLA for CPUs copies each first: the largest matrix is what a step then needs
    besides."""
    model = tiny(num_layers=4, width=128, mlp_width=512)
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def besides(params) -> int:
        changed = model.replace(params=params)
        cache = jax.eval_shape(functools.partial(kvq.init_cache, changed, kvq.exact(), 1, 64))
        return (
            jax.jit(kvq.forward)
            .lower(changed, *token, cache)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    assert besides(model.params) > 128 * 512 * 4 > besides(switched(model.params))


def test_every_form_is_made_of_every_other():
    forms = {form: in_form(tiny().params, form) for form in FORMS}
    for params in forms.values():
        for form, wanted in forms.items():
            jax.tree.map(np.testing.assert_array_equal, in_form(params, form), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spec", ["exact", pytest.param("kivi:bits=2,window=32", marks=pytest.mark.nightly)]
)
def test_no_second_cache_and_no_second_weights(spec):
    model = tiny(num_layers=4)
    apart = model.replace(params=unrolled(model.params))
    cache = jax.eval_shape(functools.partial(kvq.init_cache, apart, kvq.parse(spec), 1, 65536))
    step = jax.jit(kvq.forward, donate_argnames="cache")
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    memory = (
        step.lower(apart, *token, cache)
        .compile({"xla_backend_optimization_level": 2})
        .memory_analysis()
    )
    assert memory.alias_size_in_bytes >= 0.99 * kvq.ledger(cache).bytes
    # A block's K and V, and its scores.
    assert memory.temp_size_in_bytes < 4 * (2 * 1024 * model.config.kv_width * 4)


@pytest.mark.nightly
def test_a_loaded_model_has_the_form_that_is_asked_for(tmp_path):
    scan, *others = (kvq.load("recall", layers=form) for form in ("scan", "unroll", "switch"))
    assert [is_unrolled(model.params) for model in (scan, *others)] == [False, True, False]
    assert isinstance(others[1].params["layers"]["q"], LayerMatrices)
    method = kvq.parse("kivi:bits=4,window=32")
    wanted = kvq.generate(scan, ["ab12,cd34,?cd"], method, max_new_tokens=12).tokens
    for model in others:
        jax.tree.map(np.testing.assert_array_equal, stacked(model.params), scan.params)
        assert kvq.generate(model, ["ab12,cd34,?cd"], method, max_new_tokens=12).tokens == wanted
    with pytest.raises(kvq.UserError, match="known: scan, switch, unroll"):
        kvq.load("recall", layers="list")


@pytest.mark.parametrize(
    ("platform", "sizes", "form"),
    [
        ("gpu", {}, "unroll"),
        ("tpu", {"width": 4096, "mlp_width": 8192}, "scan"),
        ("cpu", {}, "scan"),
        ("cpu", {"width": 512, "mlp_width": 1024}, "switch"),
    ],
)
def test_how_layers_are_stored_follows_from_chip_and_size(platform, sizes, form):
    config = dataclasses.replace(tiny().config, **sizes)
    assert stored_layers(platform, config, "float32") == form


def test_artifacts_hold_stacks_whatever_the_model():
    """Constants of a run of layers serve every layer by itself."""
    model, method = model_and_method("aqua")
    apart = model.replace(params=unrolled(model.params))
    assert len(kvq.init_cache(apart, method, 1, 64).runs) > len(model.constants) - 1
    with pytest.raises(kvq.UserError, match="layers='scan'"):
        jax.jit(lambda params, index: layer(params, index))(apart.params, 0)
