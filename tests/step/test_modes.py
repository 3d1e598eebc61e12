"""JAX's debugging and precision settings change nothing: the same tokens come out, and no error."""

import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GENERAL, model_and_method, thinned, with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.cache.runs import _runs_of, chains

METHOD = kvq.parse("kivi:bits=2,window=32,sinks=2")
PROMPTS = [[1, 2, 3] * 14, [4, 5]]  # the first one's oldest group is encoded


def tokens(rows: int, length: int):
    """The same under every setting: JAX's random numbers differ with 64 bits."""
    return jnp.asarray(np.random.default_rng(0).integers(0, 50, (rows, length)))


def caches() -> tuple:
    """Logits and lengths after a walk through every function of a cache."""
    cache = kvq.init_cache(tiny(), METHOD, 2, 512)
    _, cache = kvq.forward(tiny(), tokens(2, 40), jnp.asarray([40, 33]), cache)
    logits, pending = kvq.attend(tiny(), tokens(2, 5), jnp.asarray([5, 2]), cache, within="step")
    cache = kvq.commit(tiny(), cache, pending, jnp.asarray([4, 1]))
    cache = kvq.evict(kvq.crop(cache, jnp.asarray([20, 30])), jnp.asarray([True, False]))
    cache = kvq.fork(kvq.insert(kvq.gather(cache, jnp.asarray([1, 0])), 0, cache, 1))
    assert {x.dtype.itemsize for x in jax.tree.leaves(cache)} <= {1, 2, 4}
    return np.asarray(logits).tolist(), cache.lengths.tolist()


def sampled_by_chunks():
    options = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2}
    return kvq.generate(tiny(), PROMPTS, METHOD, max_new_tokens=4, chunk=16, **options).tokens


def speculated():
    return kvq.speculate(tiny(), PROMPTS, METHOD, max_new_tokens=5, draft=3).tokens


def beams():
    return kvq.beam_search(tiny(), PROMPTS, METHOD, max_new_tokens=4, beams=3).tokens


CALLS = (caches, sampled_by_chunks, speculated, beams)


@contextlib.contextmanager
def debugging():
    """Everything that looks for mistakes, at once."""
    with jax.debug_nans(True), jax.debug_infs(True), jax.checking_leaks():
        yield


SETTINGS = {"enable_x64": lambda: jax.enable_x64(True), "debugging": debugging}


# By day test_the_variable_of_the_environment sets 64 bits.
@pytest.mark.parametrize("setting", with_nightly(SETTINGS, ["debugging"]))
@pytest.mark.parametrize("call", with_nightly(CALLS, [beams]), ids=lambda call: call.__name__)
def test_the_same_under_every_setting(call, setting):
    wanted = call()
    with SETTINGS[setting]():
        assert call() == wanted


def filled(spec: str, count: int):
    model = tiny(num_layers=1)
    cache = kvq.init_cache(model, kvq.parse(spec), 1, 64)
    return kvq.prefill(model, tokens(1, count), jnp.asarray([count], jnp.int32), cache)[1]


def two_steps(cache):
    """The first one encodes what the second one reads."""
    for _ in range(2):
        logits, cache = kvq.forward(
            tiny(num_layers=1), tokens(1, 1), jnp.asarray([1], jnp.int32), cache
        )
    return logits


@pytest.mark.nightly
@pytest.mark.parametrize("spec", thinned(["kivi:bits=2,window=0", "uniform:bits=4,group=32"], 2))
def test_steps_without_jit(spec):
    """Loops of JAX are then Python's, operation by operation: equal up to the order of sums."""
    cache = filled(spec, 31)
    wanted = two_steps(cache)
    with jax.disable_jit():
        np.testing.assert_allclose(two_steps(cache), wanted, atol=1e-5)


@pytest.mark.nightly
def test_a_prompt_without_jit():
    spec = "kivi:bits=2,window=0"
    wanted = two_steps(filled(spec, 33))
    with jax.disable_jit():
        np.testing.assert_allclose(two_steps(filled(spec, 33)), wanted, atol=1e-5)


def test_the_variable_of_the_environment():
    """As a user sets it: everything of the library is then imported, and built, with 64 bits."""
    code = "import kvqjax as kvq; print(kvq.generate(kvq.load('recall'), [[1, 2, 3]], max_new_tokens=2).tokens)"
    command, given = [sys.executable, "-c", code], os.environ | {"JAX_ENABLE_X64": "1"}
    found = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    wanted = kvq.generate(kvq.load("recall"), [[1, 2, 3]], max_new_tokens=2).tokens
    assert found.stdout.split("\n")[0] == str(wanted)


@pytest.mark.parametrize("name", thinned(with_nightly(GENERAL), 2))
def test_a_plan_made_inside_a_trace_serves_outside(name):
    """What a plan's functions hold belongs to no trace."""
    model, method = model_and_method(name)
    layout = kvq.init_cache(model, method, 1, 512).layout
    for cached in (_runs_of, chains):
        cached.cache_clear()
    jax.eval_shape(lambda: (runs_of(layout), jnp.zeros(()))[1])
    for run, constants in zip(runs_of(layout), model.constants, strict=True):
        for source, codec in run.wiring.storage.codecs.items():
            own = {name: x[0] for name, x in constants.get(source, {}).items()}
            stored = jax.jit(codec.encode)(own, jnp.ones((max(codec.unit, 32), codec.width)))
            assert stored.keys() == codec.fields.keys()


def test_gradients_are_refused_in_one_line():
    cache, count = kvq.init_cache(tiny(), METHOD, 1, 64), jnp.asarray([4], jnp.int32)

    def loss(model, function):
        return function(model, tokens(1, 4), count, cache)[0].sum()

    for function in (kvq.forward, kvq.attend, kvq.prefill):
        for wrapped in (function, jax.jit(function)):
            with pytest.raises(
                kvq.UserError, match="a cache holds rounded numbers and has no gradient"
            ) as caught:
                jax.grad(loss, allow_int=True)(tiny(), wrapped)
            assert "\n" not in str(caught.value)


def test_a_donated_cache_is_named():
    model, count = tiny(), jnp.asarray([4, 4], jnp.int32)
    step = jax.jit(kvq.forward, donate_argnames="cache")
    cache = kvq.init_cache(model, METHOD, 2, 64)
    cropped = kvq.crop(cache, count)
    pending = kvq.attend(model, tokens(2, 4), count, cache)[1]
    step(model, tokens(2, 4), count, cache)
    rows = jnp.asarray([True, False])
    for gone in (cache, cropped):  # what `crop` returned shares the arrays
        for use in (
            lambda c=gone: kvq.forward(model, tokens(2, 4), count, c),
            lambda c=gone: kvq.attend(model, tokens(2, 4), count, c),
            lambda c=gone: kvq.prefill(model, tokens(2, 4), count, c),
            lambda c=gone: kvq.commit(model, c, pending, count),
            lambda c=gone: kvq.crop(c, count),
            lambda c=gone: kvq.evict(c, rows),
            lambda c=gone: kvq.gather(c, count),
            lambda c=gone: kvq.insert(c, 0, c, 1),
            lambda c=gone: kvq.fork(c),
            lambda c=gone: kvq.save_cache("never", c, model),
        ):
            with pytest.raises(kvq.UserError, match="this cache was donated"):
                use()


@pytest.mark.parametrize(
    "function", [kvq.generate, kvq.speculate, kvq.beam_search], ids=lambda f: f.__name__
)
def test_no_prompts(function):
    with pytest.raises(kvq.UserError, match="no prompts"):
        function(tiny(), [])
