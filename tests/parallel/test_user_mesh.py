"""A cache on another model's own mesh, with axes of that model's names: what one device gives,
under `jax.set_mesh`, with axes of both kinds. The model's arrays come as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import _constants, with_nightly
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import tiny

import kvqjax as kvq

SHAPE = tiny().config.alone
ROWS, LENGTH, CAPACITY = 4, 80, 512
VALID = jnp.arange(LENGTH)[None] >= jnp.asarray([[0], [5], [60], [79]])  # left padding
# Of the new tokens that each one sees.
MASK = jax.random.bernoulli(jax.random.key(2), 0.5, (ROWS, LENGTH, LENGTH))


def made(x, weights):
    """Queries, keys and values of one layer, of the types that the model's own weights give
    them."""
    return [jnp.einsum("btw,whd->bthd", x, part) for part in jnp.split(weights, (4, 6), axis=1)]


def by_layers(cache, x, weights, valid, constants, mask):
    out, below, new = [], None, []
    for layer in range(2):
        qkv = made(x, weights[layer])
        got, below = kvq.attend_layer(
            cache, layer, *qkv, valid, below=below, constants=constants, mask=mask
        )
        out.append(got)
        new.append(below)
    return jnp.stack(out), kvq.append(cache, new, valid, constants=constants)


def by_views(cache, x, weights, valid, constants, mask):
    views, out = kvq.layers(cache, valid=valid, constants=constants), []
    for layer in range(2):
        view = views[layer].above(views[layer - 1]) if layer else views[0]
        got, views[layer] = view.attend(*made(x, weights[layer]), mask=mask)
        out.append(got)
    return jnp.stack(out), kvq.commit_layers(views)


def by_scan(cache, x, weights, valid, constants, mask):
    def step(view, weights):
        out, view = view.attend(*made(x, weights), mask=mask)
        return view, out

    view = kvq.layers(cache, valid=valid, constants=constants, stack=x.shape[1])
    view, out = jax.lax.scan(step, view, weights)
    return out, kvq.commit_layers(view)


def inputs(mesh=None):
    x, weights = (
        jax.random.normal(jax.random.key(0), (ROWS, LENGTH, 64)),
        jax.random.normal(jax.random.key(1), (2, 64, 8, 16)),
    )
    if mesh is None:
        return x, weights / 8
    return jax.device_put(x, NamedSharding(mesh, P("fsdp"))), jax.device_put(
        weights / 8, NamedSharding(mesh, P())
    )


def steps(run, cache, x, weights, constants, mask):
    """A prompt, then a token more on each row, by the same program: outputs of valid tokens, and
    the cache."""
    step, outs = jax.jit(run), []
    for valid in (VALID, jnp.broadcast_to(jnp.arange(LENGTH) == 7, VALID.shape)):
        out, cache = step(cache, x, weights, valid, constants, mask)
        outs.append((out, np.asarray(out)[:, np.asarray(valid)]))
    return outs, cache


KIVI = "kivi:bits=4,value_group=16,window=32"
CASES = {  # spec, how layers attend, the kind of axes, the mesh, whether KV heads lie on different devices
    "views": (KIVI, by_views, AxisType.Explicit, (4, 2), True),
    "layers": (KIVI, by_layers, AxisType.Auto, (4, 2), True),
    "scan": (KIVI, by_scan, AxisType.Explicit, (4, 2), True),
    "scan-auto": (KIVI, by_scan, AxisType.Auto, (4, 2), True),
    "more devices than KV heads": (KIVI, by_views, AxisType.Explicit, (2, 4), False),
    "mixed heads": ("kvquant:bits=3,sinks=2", by_scan, AxisType.Auto, (4, 2), False),
    "views with a mask": (KIVI, by_views, AxisType.Explicit, (4, 2), True),
    "scan with a mask": (KIVI, by_scan, AxisType.Auto, (4, 2), True),
    "dependent layers": ("aqua:bits=4,buffer=32", by_views, AxisType.Explicit, (4, 2), False),
}


@pytest.mark.parametrize("name", with_nightly(CASES, ["scan with a mask"]))
def test_a_user_s_mesh_gives_what_one_device_gives(name):
    spec, run, kind, sizes, split = CASES[name]
    constants = _constants(tiny(), kvq.parse(spec))
    mask = MASK if "mask" in name else None
    wanted, alone = steps(
        by_layers, kvq.init_cache(SHAPE, spec, ROWS, CAPACITY), *inputs(), constants, mask
    )
    mesh = jax.make_mesh(sizes, ("fsdp", "tp"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        cache = kvq.init_cache(
            SHAPE, spec, ROWS, CAPACITY, mesh=mesh, batch_axis="fsdp", head_axis="tp"
        )
        assert cache.layout.rules.kv_heads == (("tp",) if split else ())
        assert len(jax.tree.leaves(cache.runs[0].body)[0].sharding.device_set) == 8
        got, cache = steps(run, cache, *inputs(mesh), constants, mask)
    for (out, ours), (_, theirs) in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
        if kind == AxisType.Explicit:
            # As the queries, whose heads are everywhere.
            assert jax.typeof(out).sharding.spec[:2] == (
                None,
                "fsdp",
            )
    np.testing.assert_array_equal(cache.lengths, alone.lengths)
    if split:  # the body is not dealt, so that its arrays are those of one device
        for a, b in zip(jax.tree.leaves(cache.runs), jax.tree.leaves(alone.runs), strict=True):
            if a.dtype == jnp.float32:
                np.testing.assert_allclose(a, b, atol=1e-5)
            else:  # the model's own products differ in the last bit, and codes at ties by a step
                assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.nightly)], ids=str
)
def test_rows_move_on_a_user_s_mesh(kind):
    """Requests that are prefilled apart, on all devices, join a batch whose rows are split."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind, kind))
    tokens = {
        name: jax.random.normal(jax.random.key(i), (ROWS, 40, 32)) for i, name in enumerate("kv")
    }
    counts = jnp.asarray([40, 33, 8, 1])
    with jax.set_mesh(mesh):
        axes = {"mesh": mesh, "head_axis": "tp"}
        cache, single = (
            kvq.init_cache(SHAPE, KIVI, rows, 128, batch_axis=axis, **axes)
            for rows, axis in ((ROWS, "fsdp"), (1, None))
        )
        cache = kvq.append(cache, [tokens, tokens], counts)
        row = {name: x[:1] for name, x in tokens.items()}
        single = kvq.append(single, [row, row], jnp.asarray([17]))
        moved = {
            "insert": kvq.insert(cache, 2, single),
            "gather": kvq.gather(cache, jnp.asarray([3, 2, 1, 0])),
            "repeat": kvq.repeat(cache, 2),
            "crop": kvq.crop(cache, jnp.asarray([39, 3, 3, 3])),
            "evict": kvq.evict(cache, jnp.asarray([True, False, False, False])),
            "resize": kvq.resize(cache, 256),
            "fork": kvq.fork(cache),
        }
        lengths = {name: x.lengths.tolist() for name, x in moved.items()}
        assert lengths == {
            "insert": [40, 33, 17, 1],
            "gather": [1, 8, 33, 40],
            "repeat": [40, 40, 33, 33, 8, 8, 1, 1],
            "crop": [39, 3, 3, 1],
            "evict": [0, 33, 8, 1],
            "resize": [40, 33, 8, 1],
            "fork": [40, 33, 8, 1],
        }
        places = cache.layout.rules.places(cache)
        for name in ("insert", "gather", "crop", "evict", "fork"):
            same = jax.tree.map(
                lambda x, place: x.sharding.is_equivalent_to(place, x.ndim), moved[name], places
            )
            assert kind == AxisType.Auto or all(jax.tree.leaves(same)), name
        if kind == AxisType.Explicit:
            with pytest.raises(kvq.UserError, match="3 rows cannot be split over 4 devices"):
                kvq.gather(cache, jnp.asarray([0, 1, 2]))
    there, row = (np.asarray(x.runs[0].window["k"]) for x in (moved["insert"], single))
    np.testing.assert_array_equal(there[:, 2], row[:, 0])


def test_axes_that_cannot_be_are_refused():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def make(shape=SHAPE, spec=KIVI, rows=4, **axes):
        return kvq.init_cache(shape, spec, rows, 64, **axes)

    refused = {
        "no axis 'data'; it has 'fsdp', 'tp'": lambda: make(mesh=mesh, batch_axis="data"),
        "'tp' is named twice": lambda: make(mesh=mesh, head_axis="tp", sequence_axis="tp"),
        "head_axis='tp' names an axis of a mesh; give mesh= too": lambda: make(head_axis="tp"),
        "3 rows cannot be split over 4 devices": lambda: make(rows=3, mesh=mesh, batch_axis="fsdp"),
        "evicted on one device only": lambda: make(spec="kivi:keep=streaming:64", mesh=mesh),
        "a model's lies as the model does": lambda: make(shape=tiny(), mesh=mesh),
        "either mesh= and its axes, or sharding=": lambda: make(
            mesh=mesh, sharding=make(mesh=mesh, batch_axis="fsdp").layout.rules
        ),
    }
    for words, call in refused.items():
        with pytest.raises(kvq.UserError, match=words):
            call()


def test_a_cache_from_outside_is_refused_where_jax_could_not_write_it():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    tokens = [{name: jnp.ones((2, 3, 32)) for name in "kv"}] * 2
    outside, model = kvq.init_cache(SHAPE, KIVI, 2, 64), tiny()
    of_model = kvq.init_cache(model, KIVI, 2, 64)
    with jax.set_mesh(mesh):
        ids, counts = jnp.ones((2, 3), int), jnp.full((2,), 3)
        for write in (
            lambda: kvq.append(outside, tokens, counts),
            lambda: kvq.insert(outside, 0, kvq.init_cache(SHAPE, KIVI, 1, 64)),
            lambda: kvq.forward(model, ids, counts, of_model),
            lambda: kvq.prefill(model, ids, counts, of_model),
        ):
            with pytest.raises(kvq.UserError, match="this cache was made outside"):
                write()
        inside = kvq.append(kvq.init_cache(SHAPE, KIVI, 2, 64), tokens, counts)
        inside = kvq.insert(inside, 0, kvq.fork(outside), 0)
        assert inside.lengths.tolist() == [0, 3]
        assert kvq.forward(model, ids, counts, kvq.init_cache(model, KIVI, 2, 64))[
            1
        ].lengths.tolist() == [3, 3]
