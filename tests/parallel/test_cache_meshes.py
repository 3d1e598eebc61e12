"""A cache saved on one mesh and loaded for another is the cache that the other would have
filled."""

import itertools

import jax
import numpy as np
import pytest
from cases import _constants, with_nightly
from meshes import CAPACITY, LENGTHS, TOKENS, pending
from tiny import tiny

import kvqjax as kvq

MESHES = {"one": None, "seq": {"seq": 4}, "all": {"data": 2, "seq": 2, "model": 2}}
SPECS = {
    # Two runs, sliding windows (the body is a ring, of another length on every mesh), two clocks in
    # a layer.
    "kivi:bits=4,value_group=16,window=64,rule=published;0=exact": tiny(sliding_window=300),
    # `model` shares out tokens as well, and some fields lie along lanes.
    "kvquant:bits=4,sinks=2": tiny(),
}
append = jax.jit(kvq.commit)
attend = jax.jit(kvq.attend)


def on(model, method, sizes):
    return model if sizes is None else kvq.shard(model, method, **sizes)


def filled(model, method):
    cache = kvq.init_cache(model, method, len(LENGTHS), CAPACITY)
    return append(model, cache, pending(cache), np.asarray(LENGTHS, np.int32))


def read(model, cache):
    return np.asarray(
        attend(model, TOKENS, np.full(len(LENGTHS), TOKENS.shape[1], np.int32), cache)[0]
    )


@pytest.mark.parametrize(
    "names",
    [("one", "all"), pytest.param(tuple(MESHES), marks=pytest.mark.nightly)],
    ids=["two", "every"],
)
@pytest.mark.parametrize("spec", with_nightly(SPECS, ["kvquant:bits=4,sinks=2"]))
def test_from_any_mesh_to_any(spec, names, tmp_path):
    model, method = SPECS[spec], kvq.parse(spec)
    model = model.replace(constants=_constants(model, method))
    models = {name: on(model, method, MESHES[name]) for name in names}
    caches = {name: filled(m, method) for name, m in models.items()}
    wanted = {name: read(models[name], cache) for name, cache in caches.items()}
    for name, cache in caches.items():
        kvq.save_cache(tmp_path / name, cache, models[name])
    for source, target in itertools.product(names, names):
        back, fresh = kvq.load_cache(tmp_path / source, models[target]), caches[target]
        assert back.layout == fresh.layout
        for got, own in zip(jax.tree.leaves(back), jax.tree.leaves(fresh), strict=True):
            same = got.sharding.is_equivalent_to(own.sharding, own.ndim)
            assert same or not own.size, f"{source} to {target}"
            assert (got.shape, got.dtype) == (own.shape, own.dtype)
        # Equal words under another sharding: the very numbers that the target reads from what it
        # encoded itself.
        np.testing.assert_array_equal(
            read(models[target], back), wanted[target], f"{source} to {target}"
        )
