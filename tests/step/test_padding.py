"""Prompts padded on the left or on both sides: a mask in place of counts gives the cache of
right-padded prompts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method, with_nightly
from flax import nnx
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.flax_bridge import ForwardPass, read
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.sharding import rules_for

ROWS, LENGTH, CAPACITY = 3, 80, 512  # as in test_dense.py: both run the same programs
# The valid places of each row, call by call: left padding, both sides, a full row, an empty one;
# then one more token, in calls as wide as before, so that they run the programs of the prompts.
RUNS = (((5, 80), (40, 73), (0, 80)), ((0, 80), (79, 80), (0, 0)), ((79, 80), (30, 31), (0, 0)))
step, prefill, commit = (jax.jit(door) for door in (kvq.forward, kvq.prefill, kvq.commit))
attend = jax.jit(kvq.attend, static_argnames="last")
SHAPE = kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rope=kvq.Rope())


def masks() -> list[np.ndarray]:
    spans, place = [np.asarray(runs)[:, :, None] for runs in RUNS], np.arange(LENGTH)[None]
    return [(place >= span[:, 0]) & (place < span[:, 1]) for span in spans]


def counted(mask):
    return jnp.asarray(mask.sum(1), jnp.int32)


def on_the_right(x, mask):
    """The valid tokens of every row at its beginning, then zeros."""
    x, done = np.asarray(x), np.zeros_like(x)
    for row, marks in enumerate(mask):
        done[row, : marks.sum()] = x[row, marks]
    return jnp.asarray(done)


def chunks() -> list:
    return [(tokens(ROWS, LENGTH, seed), mask) for seed, mask in enumerate(masks())]


def assert_same(cache, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, cache, other)


@pytest.mark.parametrize("name", with_nightly(CASES, ["kivi2"]))
def test_forward_of_a_mask_is_forward_of_counts(name):
    """Codes, windows and flags to the bit; logits where the caller's tokens stand. Two chunks, then
    a decode step."""
    model, method = model_and_method(name)
    left = right = kvq.init_cache(model, method, ROWS, CAPACITY)
    for text, mask in chunks():
        got, left = step(model, text, jnp.asarray(mask), left)
        wanted, right = step(model, on_the_right(text, mask), counted(mask), right)
        got, wanted = np.asarray(got), np.asarray(wanted)
        for row, marks in enumerate(mask):
            np.testing.assert_allclose(
                got[row, marks], wanted[row, : marks.sum()], atol=1e-6, rtol=1e-6
            )
        assert_same(left, right)
    assert left.lengths.tolist() == [156, 35, 80]
    assert not left.overflow.any()


@pytest.mark.parametrize("name", ["kivi2"])
def test_prefill_attend_and_commit_take_a_mask(name):
    model, method = model_and_method(name)
    blank = kvq.init_cache(model, method, ROWS, CAPACITY)
    (text, mask), (more, wider) = chunks()[:2]
    got, left = prefill(model, text, jnp.asarray(mask), blank)
    wanted, right = prefill(model, on_the_right(text, mask), counted(mask), blank)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert_same(left, right)
    got, pending = attend(model, more, jnp.asarray(wider), left, last=True)
    wanted, same = attend(model, on_the_right(more, wider), counted(wider), right, last=True)
    np.testing.assert_allclose(got[:2], wanted[:2], atol=1e-6)
    after = commit(model, right, same, counted(wider))
    assert_same(commit(model, left, pending, jnp.asarray(wider)), after)
    accepted = counted(wider) // 2  # of a draft
    assert_same(commit(model, left, pending, accepted), commit(model, right, same, accepted))


@pytest.mark.nightly
def test_a_decode_step_takes_the_mask_of_active_rows():
    model, method = model_and_method("kivi2")
    cache = step(
        model, *(jnp.asarray(x) for x in chunks()[0]), kvq.init_cache(model, method, ROWS, CAPACITY)
    )[1]
    active = jnp.asarray([[True], [False], [True]])
    got, left = step(model, tokens(ROWS, 1), active, cache)
    wanted, right = step(model, tokens(ROWS, 1), jnp.asarray([1, 0, 1]), cache)
    np.testing.assert_array_equal(got, wanted)
    assert_same(left, right)
    assert left.lengths.tolist() == [76, 33, 81]


def layer_inputs(seed: int, mask):
    random = np.random.default_rng(seed)
    return [
        jnp.asarray(random.normal(size=(2, *mask.shape, heads, 16)), jnp.float32)
        for heads in (4, 2, 2)
    ]


def layers(cache, q, k, v, counts, constants):
    """Both layers of another model: outputs and the cache afterwards."""
    out, below, new = [], None, []
    for layer in range(2):
        given = q[layer], k[layer], v[layer], counts
        made, below = kvq.attend_layer(cache, layer, *given, below=below, constants=constants)
        out.append(made)
        new.append(below)
    return jnp.stack(out), kvq.append(cache, new, counts, constants=constants)


# Without those that need weights, and those that differ in the layers' shapes alone.
LAYERED = ("kivi2", "exact", "kvquant", "commvq", "aqua")


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(LAYERED, ["kivi2"]))
def test_attend_layer_of_a_mask_is_that_of_counts(name):
    spec = CASES[name][0]
    constants = model_and_method(name)[0].constants
    left = right = kvq.init_cache(SHAPE, spec, ROWS, CAPACITY)
    run = jax.jit(layers)
    for seed, mask in enumerate(masks()):
        given = layer_inputs(seed, mask)
        straight = [jnp.stack([on_the_right(layer, mask) for layer in x]) for x in given]
        got, left = run(left, *given, jnp.asarray(mask), constants)
        wanted, right = run(right, *straight, counted(mask), constants)
        got, wanted = np.asarray(got), np.asarray(wanted)
        for row, marks in enumerate(mask):
            np.testing.assert_allclose(
                got[:, row, marks], wanted[:, row, : marks.sum()], atol=1e-6, rtol=1e-6
            )
        assert_same(left, right)


@pytest.mark.nightly
def test_a_forward_pass_of_flax_takes_a_mask():
    mask = masks()[0]
    q, k, v = layer_inputs(0, mask)
    variable = nnx.Cache(kvq.init_cache(SHAPE, "kivi:bits=2,window=32", ROWS, CAPACITY))
    kv = ForwardPass(variable, jnp.asarray(mask))
    positions = np.asarray(kv.positions(LENGTH))
    out = [kv.attend(layer, q[layer], k[layer], v[layer]) for layer in range(2)]
    kv.append()
    cache = kvq.init_cache(SHAPE, "kivi:bits=2,window=32", ROWS, CAPACITY)
    wanted, cache = layers(cache, q, k, v, jnp.asarray(mask), None)
    np.testing.assert_array_equal(np.stack(out)[:, mask], np.asarray(wanted)[:, mask])
    assert_same(read(variable), cache)
    for row, marks in enumerate(mask):
        np.testing.assert_array_equal(positions[row, marks], np.arange(marks.sum()))


@pytest.mark.nightly
def test_attention_mass_follows_a_mask():
    model, method = tiny(), kvq.parse("kivi:bits=2,window=32,keep=streaming:64")
    left = right = kvq.init_cache(model, method, ROWS, CAPACITY)
    for text, mask in chunks()[:2]:
        left = step(model, text, jnp.asarray(mask), left)[1]
        right = step(model, on_the_right(text, mask), counted(mask), right)[1]
    assert_same(left, right)


TORN = jnp.asarray([[1, 1, 0, 1], [0, 1, 1, 1]], bool)
LEFT = TORN[jnp.asarray([1, 1])]


def test_a_known_mask_of_several_runs_is_refused():
    model = tiny()
    cache = kvq.init_cache(model, kvq.exact(), 2, 64)
    with pytest.raises(
        kvq.UserError, match="row 0 of the mask has valid tokens in 2 runs, from places 0, 3 on"
    ):
        kvq.forward(model, tokens(2, 4), TORN, cache)
    with pytest.raises(kvq.UserError, match="66 tokens; the cache was made for 64"):
        kvq.forward(model, tokens(2, 4), LEFT, cache.replace(lengths=jnp.asarray([63, 0])))
    with pytest.raises(kvq.UserError, match=r"tokens=\[\[0, 99"):
        kvq.forward(model, jnp.asarray([[0, 99, 1, 1]] * 2), LEFT, cache)
    ids = jnp.asarray([[99, 0, 1, 1]] * 2)  # at a place that is not valid
    assert kvq.forward(model, ids, LEFT, cache)[1].lengths.tolist() == [3, 3]


@pytest.mark.parametrize(
    "door", with_nightly(["forward", "prefill", "commit", "append"], ["commit", "append"])
)
def test_a_traced_mask_of_several_runs_raises_the_flag(door):
    """Of several runs the first is stored."""
    model, text = tiny(), tokens(2, 4)
    cache = kvq.init_cache(model, kvq.exact(), 2, 64)
    calls = {
        "forward": lambda mask: kvq.forward(model, text, mask, cache)[1],
        "prefill": lambda mask: kvq.prefill(model, text, mask, cache)[1],
        "commit": lambda mask: kvq.commit(
            model, cache, kvq.attend(model, text, mask, cache)[1], mask
        ),
        "append": functools.partial(appended, cache),
    }
    after = jax.jit(calls[door])(TORN)
    assert after.overflow.tolist() == [True, False]
    assert after.lengths.tolist() == [2, 3]


def appended(cache, mask):
    q, k, v = (jnp.ones((2, *mask.shape, heads, 16)) for heads in (4, 2, 2))
    return layers(cache, q, k, v, mask, None)[1]


@pytest.mark.nightly
def test_a_mask_on_a_mesh():
    """Each device rolls its own rows."""
    method = kvq.parse("kivi:bits=2,window=32,sinks=2")
    mask, text = masks()[0][:2], tokens(2, LENGTH)
    sharded = kvq.shard(tiny(), method, data=2, seq=2)
    after = step(sharded, text, jnp.asarray(mask), kvq.init_cache(sharded, method, 2, CAPACITY))
    wanted = step(
        sharded,
        on_the_right(text, mask),
        counted(mask),
        kvq.init_cache(sharded, method, 2, CAPACITY),
    )
    assert_same(after[1], wanted[1])
    for row, marks in enumerate(mask):
        np.testing.assert_allclose(after[0][row, marks], wanted[0][row, : marks.sum()], atol=1e-6)
    rules = rules_for(SHAPE, method, MeshSize(data=2))
    blank = kvq.init_cache(SHAPE, method, 2, CAPACITY, sharding=rules)
    given = layer_inputs(0, mask)
    straight = [jnp.stack([on_the_right(layer, mask) for layer in x]) for x in given]
    left = layers(blank, *given, jnp.asarray(mask), None)[1]
    assert_same(left, layers(blank, *straight, counted(mask), None)[1])
