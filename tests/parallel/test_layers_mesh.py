"""A cache of another model's shape on a mesh of eight devices: what `attend_layer` and `append`
give on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import _constants, with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.sharding import rules_for
from kvqjax.step import persist

CAPACITY, LENGTHS, NEW = 1024, (700, 300), 3
SHAPE = tiny().config.alone
SPLIT = {  # method -> whether KV heads lie on different devices; the last one's layers depend on each other
    "kivi:bits=4,value_group=16,window=32,sinks=3": True,
    "aqua:bits=4,buffer=32": False,
}


def drawn(seed: int, length: int, heads: int):
    return jax.random.normal(
        jax.random.key(seed), (SHAPE.num_layers, 2, length, heads, SHAPE.head_dim)
    )


@functools.partial(jax.jit, static_argnames="length")
def call(cache, counts, constants, length: int):
    """Outputs of all layers for `length` new tokens, and the cache that holds them."""
    q = drawn(1, length, SHAPE.num_heads)
    k, v = (drawn(seed, length, SHAPE.num_kv_heads) for seed in (2, 3))
    outs, new = [], []
    for layer in range(SHAPE.num_layers):
        below = new[-1] if new else kvq.below_first(cache, counts, length)
        out, own = kvq.attend_layer(
            cache, layer, q[layer], k[layer], v[layer], counts, below=below, constants=constants
        )
        outs.append(out)
        new.append(own)
    return jnp.stack(outs), kvq.append(cache, new, counts, constants=constants)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spec", with_nightly(SPLIT, ["kivi:bits=4,value_group=16,window=32,sinks=3"])
)
def test_a_shape_s_cache_on_a_mesh(spec):
    method = kvq.parse(spec)
    rules = rules_for(SHAPE, method, MeshSize(data=2, seq=2, model=2))
    assert bool(rules.kv_heads) == SPLIT[spec]
    constants = _constants(tiny(), method)
    alone = kvq.init_cache(SHAPE, method, 2, CAPACITY)
    spread = kvq.init_cache(SHAPE, method, 2, CAPACITY, sharding=rules)
    body = jax.tree.leaves(spread.runs[0].body)[0]
    assert len(body.sharding.device_set) == 8
    # Rows and blocks; heads where they may be split.
    assert body.addressable_shards[0].data.size <= body.size // 4
    for counts, length in ((LENGTHS, max(LENGTHS)), ((NEW, 1), NEW)):
        counts = jnp.asarray(counts)
        wanted, alone = call(alone, counts, constants, length)
        got, spread = call(spread, counts, constants, length)
        valid = (jnp.arange(length)[None] < counts[:, None])[None, :, :, None, None]
        np.testing.assert_allclose(np.where(valid, got, 0), np.where(valid, wanted, 0), atol=2e-5)
    np.testing.assert_array_equal(spread.lengths, alone.lengths)
    assert spread.layout.rules == rules
    for run, other in zip(spread.runs, alone.runs, strict=True):
        for name, x in run.window.items():
            # Keys are rotated in another program.
            np.testing.assert_allclose(x, other.window[name], atol=1e-6)


@pytest.mark.nightly
def test_logarithms_of_denominators_on_a_mesh():
    method = kvq.parse("kivi:bits=4,value_group=16,window=32")
    rules = rules_for(SHAPE, method, MeshSize(data=2, seq=2, model=2))
    found = []
    for sharding in (None, rules):
        cache = kvq.init_cache(
            SHAPE, method, 2, 512, **({} if sharding is None else {"sharding": sharding})
        )
        _, cache = call(cache, jnp.asarray([200, 90]), (), 200)
        q, k, v = (
            drawn(4, 1, SHAPE.num_heads)[0],
            *(drawn(seed, 1, SHAPE.num_kv_heads)[0] for seed in (5, 6)),
        )
        found.append(kvq.attend_layer(cache, 0, q, k, v, jnp.asarray([1, 1]), return_lse=True))
    for got, wanted in zip(found[1][:2], found[0][:2], strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.nightly
def test_what_a_mesh_s_cache_goes_through(tmp_path, monkeypatch):
    """Surgery knows no mesh; a cache saved from GPUs' form comes back on one device or on another
    mesh, there in the same form, each device its part, and attends as before."""
    method = kvq.parse("kivi:bits=4,value_group=16,window=32")
    rules = rules_for(SHAPE, method, MeshSize(data=1, seq=2, model=2))
    spread = kvq.init_cache(SHAPE, method, 2, 512, sharding=rules, form="heads")
    _, spread = call(spread, jnp.asarray([200, 90]), (), 200)
    spread = kvq.crop(kvq.gather(spread, jnp.asarray([1, 0])), jnp.asarray([90, 190]))
    kvq.save_cache(tmp_path / "cache", spread, SHAPE)
    back = kvq.load_cache(tmp_path / "cache", SHAPE)
    one = jnp.asarray([1, 1])
    wanted = call(back, one, (), 1)[0]
    np.testing.assert_allclose(call(spread, one, (), 1)[0], wanted, atol=2e-5)
    monkeypatch.setattr(persist, "stored_form", lambda target: "heads")
    rules = rules_for(SHAPE, method, MeshSize(data=2, seq=2, model=2))
    there = kvq.load_cache(tmp_path / "cache", SHAPE, sharding=rules)
    fresh = kvq.init_cache(SHAPE, method, 2, 512, sharding=rules, form="heads")
    assert there.layout == fresh.layout
    for got, own in zip(jax.tree.leaves(there), jax.tree.leaves(fresh), strict=True):
        assert got.sharding.is_equivalent_to(own.sharding, own.ndim) or not own.size
    for x in jax.tree.leaves([run.body for run in there.runs]):
        assert x.size == x.addressable_shards[0].data.size * 8
    np.testing.assert_allclose(call(there, one, (), 1)[0], wanted, atol=2e-5)


def test_a_model_says_itself_where_its_caches_lie():
    rules = rules_for(SHAPE, "exact", MeshSize())
    with pytest.raises(kvq.UserError, match="shard"):
        kvq.init_cache(tiny(), "exact", 1, 64, sharding=rules)
    with pytest.raises(kvq.UserError, match="shard"):
        kvq.load_cache("no folder", tiny(), sharding=rules)
