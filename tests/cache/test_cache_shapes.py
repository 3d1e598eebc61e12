"""Generic tree code on caches: the row axis of every array, and one line at every door for arrays
of another shape."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import check_row, empty, extend
from cases import FEW, GENERAL, model_and_method, with_nightly
from jax.sharding import PartitionSpec
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax import KVShape

METHOD = "kivi:bits=2,window=32,sinks=2"
ROWS = [list(range(200)), list(range(50, 90))]
LAYERS = (
    "its axis 0 counts layers, and tree code along axis 0 changed them; for rows use kvqjax.repeat"
)


@pytest.mark.parametrize("name", with_nightly(GENERAL, ["xquant-cl"]))
def test_tree_code_along_the_row_axes_is_repeat(name):
    cache = empty(name, 2)
    axes = kvq.row_axes(cache)
    assert jax.tree.structure(axes) == jax.tree.structure(cache)
    assert all(
        x.shape[axis] == 2
        for axis, x in zip(jax.tree.leaves(axes), jax.tree.leaves(cache), strict=True)
    )
    assert kvq.row_axes(jax.eval_shape(lambda: cache)) == axes
    by_hand = jax.tree.map(lambda x, axis: jnp.repeat(x, 3, axis=axis), cache, axes)
    assert jax.tree.map(jnp.shape, by_hand) == jax.tree.map(jnp.shape, kvq.repeat(cache, 3))
    rows = extend(name, by_hand, [ROWS[0][:20], [], ROWS[1], [], [], ROWS[0][:70]])
    check_row(name, rows, 2, ROWS[1])
    check_row(name, rows, 5, ROWS[0][:70])


def test_row_axes_are_in_axes():
    """Mapping over rows, each as a cache of one row."""
    cache = extend("kivi2", empty("kivi2", 2), ROWS)
    axes = kvq.row_axes(cache)

    def one(row):
        row = jax.tree.map(jnp.expand_dims, row, axes)
        return jax.tree.map(jnp.squeeze, kvq.crop(row, jnp.asarray([40])).lengths, 0)

    assert jax.vmap(one, in_axes=(axes,))(cache).tolist() == [32, 40]


def doors() -> dict:
    """Every public function that takes a cache of the model's, and of a shape's."""
    model, text, counts = tiny(), tokens(2, 4), jnp.asarray([4, 4])
    cache = kvq.init_cache(model, METHOD, 2, 256)
    pending = kvq.attend(model, text, counts, cache)[1]
    q, k = jnp.ones((2, 4, 4, 16)), jnp.ones((2, 4, 2, 16))
    new = [kvq.attend_layer(shaped(), layer, q, k, k, counts)[1] for layer in range(2)]
    piece = kvq.cut(kvq.commit(model, cache, pending, counts), 2)[1]
    return {
        "forward": lambda cache: kvq.forward(model, text, counts, cache),
        "attend": lambda cache: kvq.attend(model, text, counts, cache),
        "commit": lambda cache: kvq.commit(model, cache, pending, counts),
        "prefill": lambda cache: kvq.prefill(model, text, counts, cache),
        "attend_layer": lambda cache: kvq.attend_layer(cache, 0, q, k, k, counts),
        "append": lambda cache: kvq.append(cache, new, counts),
        "below_first": lambda cache: kvq.below_first(cache, counts, 4),
        "crop": lambda cache: kvq.crop(cache, counts),
        "fork": kvq.fork,
        "gather": lambda cache: kvq.gather(cache, jnp.asarray([0])),
        "repeat": lambda cache: kvq.repeat(cache, 2),
        "insert": lambda cache: kvq.insert(cache, 0, kvq.init_cache(model, METHOD, 1, 256), 0),
        "insert from": lambda cache: kvq.insert(kvq.init_cache(model, METHOD, 2, 256), 0, cache, 0),
        "evict": lambda cache: kvq.evict(cache, jnp.asarray([True, False])),
        "resize": lambda cache: kvq.resize(cache, 300),
        "cut": lambda cache: kvq.cut(cache, 2),
        "join": lambda cache: kvq.join(cache, piece),
        "join behind": lambda cache: kvq.join(
            kvq.init_cache(model, METHOD, 2, 256), piece.replace(cache=cache)
        ),
        "ledger": kvq.ledger,
        "save_cache": lambda cache: kvq.save_cache("never", cache, model),
    }


def shaped():
    return kvq.init_cache(
        KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16), METHOD, 2, 256
    )


def test_every_door_names_what_a_tree_map_did():
    cache = kvq.init_cache(tiny(), METHOD, 2, 256)
    broken = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), cache)
    for name, door in doors().items():
        for call in (door, lambda cache, door=door: jax.eval_shape(door, cache)):
            with pytest.raises(kvq.UserError, match=LAYERS) as caught:
                call(broken)
            assert "\n" not in str(caught.value), name


@pytest.mark.parametrize("name", with_nightly(FEW, ["kivi2", "mixed"]))
def test_every_kind_of_fault_has_its_line(name):
    cache = empty(name, 3)
    run = cache.runs[0]

    def first(change):
        return cache.replace(
            runs=(run.replace(window=jax.tree.map(change, run.window)), *cache.runs[1:])
        )

    for broken, line in (
        (
            jax.tree.map(lambda x: x[:1], cache),
            r"runs\[0\].* wanted \[\d+, 1, .*for rows use kvqjax.repeat",
        ),
        (jax.tree.map(lambda x: jnp.concatenate([x, x]), cache), LAYERS),
        (jax.tree.map(lambda x: x[None], cache), r"lengths have shape \[1, 3\], wanted \[rows\]"),
        (jax.tree.map(lambda x: x[0], cache), r"lengths have shape \[\], wanted \[rows\]"),
        (first(lambda x: x[:, :2]), r"runs\[0\].window.* its rows are not the 3 of cache.lengths"),
        (first(lambda x: x[0]), r"window.* an axis was added or removed"),
        (
            first(lambda x: x[:, :, :-1]),
            r"window.* the layout of a capacity of 512 promises that; kvqjax.resize",
        ),
        (first(lambda x: x.astype(jnp.bfloat16)), r"window.* is of type bfloat16, wanted float32"),
        (first(lambda x: None), r"the cache has \d+ arrays, its layout promises \d+"),
        (first(lambda x: "x"), r"window.* is a str, not an array"),
        (cache.replace(layout=dataclasses.replace(cache.layout, capacity=2048)), "wanted|promises"),
    ):
        with pytest.raises(kvq.UserError, match=line):
            kvq.fork(broken)


@pytest.mark.nightly
def test_parts_of_a_mesh_pass():
    """In a `shard_map` of one's own, where a device has its share of the rows or of anything else,
    and in a vmap."""
    model, method = model_and_method("kivi2")
    cache = extend("kivi2", empty("kivi2", 2), ROWS)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.tree.map(lambda axis: PartitionSpec(*[None] * axis, "data"), kvq.row_axes(cache))
    step = jax.jit(jax.shard_map(
        lambda text, cache: kvq.forward(model, text, jnp.asarray([1]), cache),
        mesh=mesh, in_specs=(PartitionSpec("data"), specs), out_specs=(PartitionSpec("data"), specs), check_vma=False,
    ))  # fmt: skip
    text = tokens(2, 1)
    logits, after = step(text, cache)
    np.testing.assert_allclose(
        logits, kvq.forward(model, text, jnp.asarray([1, 1]), cache)[0], atol=1e-4
    )
    assert after.lengths.tolist() == [201, 41]
    spread = kvq.init_cache(kvq.shard(model, method, data=2, model=2), method, 2, 512)
    dealt = kvq.init_cache(kvq.shard(model, method, seq=2), method, 2, 512)
    for cache in (spread, dealt, jax.eval_shape(lambda: dealt)):
        assert kvq.ledger(cache).bytes == sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)
        )
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), empty("kivi2", 2))
    assert jax.vmap(lambda cache: kvq.crop(cache, jnp.asarray([1, 1])).lengths)(stacked).shape == (
        2,
        2,
    )
