"""A cache is an ordinary pytree: what saves and restores pytrees takes it as it is."""

import pickle

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import orbax.checkpoint as ocp
import pytest
from cases import CASES, HALF, model_and_method, thinned, with_nightly
from flax import serialization

import kvqjax as kvq

# Every method, and what has parts that others lack: evicted tokens, no body, int4 by heads, lines
# and stripes.
MORE = {
    "streaming": ("kivi2", "kivi:bits=2,window=32,keep=streaming:64", {}),
    "no-body": ("kivi2", "kivi:bits=2,window=128", {"capacity": 100}),
    "heads": ("kivi2", "kivi:bits=4,window=32,sinks=2", {"form": "heads"}),
    "stripes": ("kivi2", "kivi:bits=2,window=32", {"form": "stripes", "capacity": 4608}),
    "unrolled": ("mixed", None, {"layers": "unroll"}),
}
NAMES = [*CASES, *MORE]


@pytest.fixture(autouse=True, scope="module")
def _as_a_user_runs_it():
    """Without jaxtyping's check of types: Orbax puts a leaf of its own in the place of an empty
    dict."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def empty(name: str, capacity: int = 300):
    case, spec, options = MORE.get(name, (name, None, {}))
    model, method = model_and_method(case)
    method = kvq.parse(spec) if spec else method
    return kvq.init_cache(model, method, 2, **({"capacity": capacity} | options))


def numbered(cache):
    """The cache with other numbers in every array, so that what came back was really saved."""
    return jax.tree.map(lambda x: (jnp.arange(x.size) % 7).reshape(x.shape).astype(x.dtype), cache)


def same(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", thinned(NAMES, 3))
def test_no_array_is_empty(name):
    # Models are kept, so none is made inside the trace.
    model_and_method(MORE[name][0] if name in MORE else name)
    assert all(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: empty(name))))


@pytest.mark.parametrize("name", with_nightly(NAMES, [*HALF, *MORE]))
def test_a_cache_comes_back_from_what_saves_pytrees(name, tmp_path):
    cache = numbered(empty(name))
    leaves, form = jax.tree.flatten(cache)
    same(jax.tree.unflatten(form, leaves), cache)
    same(pickle.loads(pickle.dumps(cache)), cache)
    blank = jax.tree.map(jnp.zeros_like, cache)
    same(serialization.from_state_dict(blank, serialization.to_state_dict(cache)), cache)
    same(serialization.from_bytes(blank, serialization.to_bytes(cache)), cache)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "cache", cache)
        saver.wait_until_finished()
        same(saver.restore(tmp_path / "cache", jax.eval_shape(lambda: blank)), cache)
