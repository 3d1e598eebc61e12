"""A layer of a cache as a value: what `attend` and `commit_layers` of views give is what
`attend_layer` and `append` give, through jit, remat and scan."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, CORE, model_and_method, with_nightly

import kvqjax as kvq

ROWS, LENGTH, CAPACITY, LAYERS = 2, 80, 256, 2
SHAPE = kvq.KVShape(num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=16, rope=kvq.Rope())
SPANS = (((5, 80), (40, 73)), ((0, 80), (79, 80)))  # the valid places of each row, call by call


def shape_of(name: str) -> kvq.KVShape:
    return dataclasses.replace(SHAPE, **CASES[name][1])


def masks() -> list:
    place = jnp.arange(LENGTH)[None]
    return [(place >= span[:, :1]) & (place < span[:, 1:]) for span in map(jnp.asarray, SPANS)]


def inputs(seed: int, length: int = LENGTH):
    random = np.random.default_rng(seed)
    q, k, v = (random.normal(size=(LAYERS, ROWS, length, heads, 16)) for heads in (4, 2, 2))
    k += 3 * random.normal(size=(2, 16))
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v)]


attend_layer = jax.jit(
    kvq.attend_layer, static_argnums=1, static_argnames=("within", "softcap", "return_lse")
)
append = jax.jit(kvq.append)


@jax.jit
def plain(cache, q, k, v, counts, constants=None):
    out, below, new = [], None, []
    for i in range(LAYERS):
        made, below = kvq.attend_layer(
            cache, i, q[i], k[i], v[i], counts, below=below, constants=constants
        )
        out.append(made)
        new.append(below)
    return jnp.stack(out), kvq.append(cache, new, counts, constants=constants)


def by_views(cache, q, k, v, valid, constants=None, wrap=lambda layer: layer):
    """Both layers, each a function of its view that `wrap` may transform."""
    layer = wrap(lambda view, q, k, v: view.attend(q, k, v))
    views, out = kvq.layers(cache, valid=valid, constants=constants), []
    for i in range(LAYERS):
        view = views[i].above(views[i - 1]) if i else views[i]
        made, views[i] = layer(view, q[i], k[i], v[i])
        out.append(made)
    return jnp.stack(out), kvq.commit_layers(views)


def assert_same(cache, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, cache, other)


def assert_steps_equal(left, right, run, wanted_run, constants=None) -> None:
    for seed, mask in enumerate(masks()):
        given = inputs(seed)
        got, left = run(left, *given, mask, constants)
        wanted, right = wanted_run(right, *given, mask, constants)
        valid = np.asarray(mask)
        got, wanted = np.asarray(got)[:, valid], np.asarray(wanted)[:, valid]
        np.testing.assert_allclose(got, wanted, atol=1e-6, rtol=1e-6)
        assert_same(left, right)


METHODS = [name for name in CORE if name != "xquant-cl"]  # its caches are of our models alone


@pytest.mark.parametrize("name", with_nightly(METHODS, ["kivi2"]))
def test_views_give_what_attend_layer_and_append_give(name):
    cache = kvq.init_cache(shape_of(name), CASES[name][0], ROWS, CAPACITY)
    assert_steps_equal(cache, cache, jax.jit(by_views), plain, model_and_method(name)[0].constants)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "wrap"),
    [("aqua", jax.jit), ("kivi2", jax.checkpoint)],
    ids=["jit", "remat"],
)
def test_a_view_crosses(name, wrap):
    """Each layer is a program of its own, called outside jit; or all are one program that computes
    layers again."""
    cache, constants = (
        kvq.init_cache(SHAPE, CASES[name][0], ROWS, CAPACITY),
        model_and_method(name)[0].constants,
    )
    run = functools.partial(by_views, wrap=wrap)
    assert_steps_equal(cache, cache, run if wrap is jax.jit else jax.jit(run), plain, constants)


@pytest.mark.nightly
def test_views_cross_jit_all_together():
    cache, mask, (q, k, v) = (
        kvq.init_cache(SHAPE, "kivi:bits=2", ROWS, CAPACITY),
        masks()[0],
        inputs(0),
    )

    @jax.jit
    def attend(views, q, k, v):
        return [view.attend(q[i], k[i], v[i])[1] for i, view in enumerate(views)]

    after = kvq.commit_layers(attend(kvq.layers(cache, valid=mask), q, k, v))
    assert_same(after, plain(cache, q, k, v, mask)[1])


def test_a_view_holds_its_own_layer_alone():
    """Arrays of other layers do not travel with it."""
    cache = kvq.init_cache(SHAPE, "kivi:bits=2", ROWS, 2048, layers="unroll")
    sizes = [
        kvq.ledger(cache).bytes,
        *(
            sum(x.nbytes for x in jax.tree.leaves(v))
            for v in kvq.layers(cache, jnp.ones(ROWS, jnp.int32))
        ),
    ]
    assert max(sizes[1:]) < 0.52 * sizes[0]


def scanned(cache, q, k, v, valid, constants=None):
    view = kvq.layers(cache, valid=valid, constants=constants, stack=q.shape[2])

    def layer(view, x):
        out, view = view.attend(*x)
        return view, out

    view, out = jax.lax.scan(layer, view, (q, k, v))
    return out, kvq.commit_layers(view)


@pytest.mark.parametrize(
    "spec",
    [
        "kivi:bits=2,window=32",
        pytest.param("kivi:bits=4,window=0,keep=streaming:64", marks=pytest.mark.nightly),
    ],
)
def test_a_view_is_the_carry_of_a_scan(spec):
    cache = kvq.init_cache(SHAPE, spec, ROWS, CAPACITY)
    assert_steps_equal(cache, cache, jax.jit(scanned), plain)


@pytest.mark.nightly
def test_a_stack_s_view_goes_through_an_ordinary_loop():
    cache, mask, (q, k, v) = (
        kvq.init_cache(SHAPE, "kivi:bits=2", ROWS, CAPACITY),
        masks()[0],
        inputs(0),
    )
    view = kvq.layers(cache, valid=mask, stack=LENGTH)
    with pytest.raises(kvq.UserError, match="gone through 0 layers, the cache has 2"):
        kvq.commit_layers(view)
    for i in range(LAYERS):
        view = view.attend(q[i], k[i], v[i])[1]
    assert_same(kvq.commit_layers(view), plain(cache, q, k, v, mask)[1])


def test_blocks_of_unequal_layers_are_scanned_with_a_cache_for_every_place():
    """A local layer and a global one, twice: what one cache of all four layers gives."""
    shapes = [dataclasses.replace(SHAPE, sliding_window=window) for window in (24, None)]
    caches = [kvq.init_cache(shape, "kivi:bits=2,window=32", ROWS, CAPACITY) for shape in shapes]
    every = dataclasses.replace(SHAPE, num_layers=4, sliding_window=(24, None) * 2)
    whole = kvq.init_cache(every, "kivi:bits=2,window=32", ROWS, CAPACITY)

    @jax.jit
    def step(caches, q, k, v, valid):
        def block(views, x):
            found = [view.attend(*(part[place] for part in x)) for place, view in enumerate(views)]
            return [view for _, view in found], jnp.stack([out for out, _ in found])

        views = [kvq.layers(cache, valid=valid, stack=LENGTH) for cache in caches]
        views, out = jax.lax.scan(block, views, (q, k, v))
        return out, [kvq.commit_layers(view) for view in views]

    for seed, mask in enumerate(masks()):
        # [blocks, places, ...]
        blocks = [jnp.stack(x) for x in zip(inputs(seed), inputs(seed + 9), strict=True)]
        out, caches = step(caches, *blocks, mask)
        layers = [x.reshape(4, *x.shape[2:]) for x in blocks]
        found = [attend_layer(whole, i, *(x[i] for x in layers), mask) for i in range(4)]
        whole = append(whole, [new for _, new in found], mask)
        wanted = jnp.stack([x for x, _ in found]).reshape(out.shape)
        np.testing.assert_allclose(out[:, :, mask], wanted[:, :, mask], atol=1e-6)
    for number, run in enumerate(whole.runs):
        alike = jax.tree.map(lambda x, i=number // 2: x[i : i + 1], caches[number % 2].runs[0].body)
        jax.tree.map(np.testing.assert_array_equal, alike, run.body)


@pytest.mark.parametrize(
    "run", [scanned, pytest.param(by_views, marks=pytest.mark.nightly)], ids=["scan", "list"]
)
def test_no_second_cache_through_views(run):
    cache = jax.eval_shape(lambda: kvq.init_cache(SHAPE, "kivi:bits=2,window=32", 1, 65536))
    given = [jax.ShapeDtypeStruct((LAYERS, 1, 1, heads, 16), jnp.float32) for heads in (4, 2, 2)]
    mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    step = jax.jit(run, donate_argnums=0).lower(cache, *given, mask)
    memory = step.compile({"xla_backend_optimization_level": 2}).memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * kvq.ledger(cache).bytes
    # K and V of one block in float32, and as much again for the scores.
    block = 2 * 1024 * 2 * 16 * 4
    assert memory.temp_size_in_bytes < 4 * block


def test_the_accepted_part_of_a_draft_is_stored():
    cache, (q, k, v) = kvq.init_cache(SHAPE, "kivi:bits=2,window=0", ROWS, CAPACITY), inputs(0, 4)
    counts, accepted = jnp.full(ROWS, 4), jnp.asarray([3, 1])
    views = kvq.layers(cache, counts, within="step")
    after = kvq.commit_layers(
        [view.attend(q[i], k[i], v[i])[1] for i, view in enumerate(views)], accepted
    )
    new = [
        attend_layer(cache, i, q[i], k[i], v[i], counts, within="step")[1] for i in range(LAYERS)
    ]
    assert_same(after, append(cache, new, accepted))


def test_no_more_tokens_are_stored_than_were_valid():
    """Of a row padded on the left the others are its padding. Inside jit they are left out, and the
    row is flagged."""
    valid = jnp.arange(4)[None] >= jnp.asarray([[2], [0]])
    views = attended(kvq.init_cache(SHAPE, "exact", ROWS, 64), valid)
    more = jnp.asarray([3, 2])
    with pytest.raises(
        kvq.UserError, match="counts: 3 tokens of row 0 would be stored; 2 were valid"
    ):
        kvq.commit_layers(views, more)
    clipped = jax.jit(kvq.commit_layers)(views, more)
    assert clipped.overflow.tolist() == [True, False]
    assert_same(
        clipped.replace(overflow=jnp.zeros(ROWS, bool)),
        kvq.commit_layers(views, jnp.asarray([2, 2])),
    )


def test_a_layer_that_shares_another_s_keys_and_values():
    """Its queries meet what the other layer holds and the other's new tokens; nothing is stored of
    it."""
    cache, mask, (q, k, v) = (
        kvq.init_cache(SHAPE, "kivi:bits=2", ROWS, CAPACITY),
        masks()[0],
        inputs(0),
    )
    view = kvq.layers(cache, valid=mask)[0]
    shared = view.attend(q[1], k[0], v[0])[0]
    np.testing.assert_array_equal(shared, kvq.attend_layer(cache, 0, q[1], k[0], v[0], mask)[0])


def test_options_of_the_scores_and_positions():
    cache, mask, (q, k, v) = (
        kvq.init_cache(SHAPE, "kivi:bits=2", ROWS, CAPACITY),
        masks()[0],
        inputs(0),
    )
    view, sinks = kvq.layers(cache, valid=mask)[0], jnp.asarray([1.0, -1.0, 0.0, 2.0])
    got = view.attend(q[0], k[0], v[0], softcap=3.0, sinks=sinks)[0]
    wanted = attend_layer(cache, 0, q[0], k[0], v[0], mask, softcap=3.0, sinks=sinks)[0]
    np.testing.assert_array_equal(got, wanted)
    out, lse, _ = view.attend(q[0], k[0], v[0], softcap=3.0, sinks=sinks, return_lse=True)
    np.testing.assert_array_equal(out, wanted)
    wanted = attend_layer(
        cache, 0, q[0], k[0], v[0], mask, softcap=3.0, sinks=sinks, return_lse=True
    )[1]
    np.testing.assert_array_equal(lse, wanted)
    for row, (first, stop) in enumerate(SPANS[0]):  # rolled, as q is where its tokens stand
        alone = attend_layer(
            kvq.init_cache(SHAPE, "kivi:bits=2", 1, CAPACITY), 0, *(x[0, row : row + 1, first:stop] for x in (q, k, v)),
            jnp.asarray([stop - first]), softcap=3.0, sinks=sinks, return_lse=True,
        )  # fmt: skip
        np.testing.assert_allclose(lse[row, first:stop], alone[1][0], atol=1e-5)
    positions = np.asarray(view.positions(LENGTH))
    for row, marks in enumerate(np.asarray(mask)):
        np.testing.assert_array_equal(positions[row, marks], np.arange(marks.sum()))
    assert repr(view) == "CacheView(layer 0 of 2, kivi:bits=2, to attend)"


def attended(cache, mask=None):
    q, k, v = inputs(0, 4)
    views = kvq.layers(cache, valid=jnp.ones((ROWS, 4), bool) if mask is None else mask)
    return [view.attend(q[i], k[i], v[i])[1] for i, view in enumerate(views)]


def test_wrong_use_is_one_line():
    cache, (q, k, v) = kvq.init_cache(SHAPE, "exact", ROWS, 64), inputs(0, 4)
    counts, views = jnp.full(ROWS, 4), attended(kvq.init_cache(SHAPE, "exact", ROWS, 64))
    fresh = kvq.layers(cache, counts)
    mixed = kvq.init_cache(SHAPE, "kivi;0=exact", ROWS, 64)
    later = kvq.layers(kvq.commit_layers(views), counts)
    refused = {
        "either counts=": lambda: kvq.layers(cache),
        r"mask of shape \[3, 4\]; wanted \[2, 4\]": lambda: kvq.layers(
            cache, valid=jnp.ones((3, 4), bool)
        ),
        r"counts=\[65, 4\]; each must lie from 0 to 64": lambda: kvq.layers(
            cache, jnp.asarray([65, 4])
        ),
        "66 tokens; the cache was made for 64": lambda: kvq.layers(
            kvq.commit_layers(views), jnp.asarray([62, 4])
        ),
        r"counts=\[4, 4\]; each must lie from 0 to the 3": lambda: fresh[0].attend(
            q[0, :, :3], k[0, :, :3], v[0, :, :3]
        ),
        "the view of layer 0 has attended": lambda: views[0].attend(q[0], k[0], v[0]),
        "the view of layer 1 stands above that of layer 0, not that of layer 1": lambda: fresh[
            1
        ].above(fresh[1]),
        "the view of layer 0 has not attended": lambda: fresh[1].above(fresh[0]),
        "layer 1 has not attended": lambda: kvq.commit_layers([views[0], fresh[1]]),
        "view 0 is that of layer 1": lambda: kvq.commit_layers(views[::-1]),
        "views of 1 layers given, the cache has 2": lambda: kvq.commit_layers(views[:1]),
        "views of 0 layers given": lambda: kvq.commit_layers([]),
        "layer 1 is of another cache": lambda: kvq.commit_layers(
            [views[0], later[1].attend(q[1], k[1], v[1])[1]]
        ),
        "stored as 2 stacks": lambda: kvq.layers(mixed, counts, stack=4),
        "4 new tokens, the view was made with stack=5": lambda: kvq.layers(
            cache, counts, stack=5
        ).attend(q[0], k[0], v[0]),
        "stack, the number of new tokens=True": lambda: kvq.layers(cache, counts, stack=True),
    }
    for words, call in refused.items():
        with pytest.raises(kvq.UserError, match=words):
            call()


def test_a_scan_that_leaves_layers_out_raises_the_flags():
    cache, mask, given = (
        kvq.init_cache(SHAPE, "exact", ROWS, 64),
        jnp.ones((ROWS, 4), bool),
        inputs(0, 4),
    )
    assert not jax.jit(scanned)(cache, *given, mask)[1].overflow.any()
    assert jax.jit(scanned)(cache, *(x[:1] for x in given), mask)[1].overflow.all()
