"""A mask of the new tokens says which of them each one sees: prefixes and images that are seen in
both directions, documents side by side, and any other, against dense attention in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method, with_nightly
from flax import nnx

import kvqjax as kvq
from kvqjax.flax_bridge import CacheModule, ForwardPass, read

ROWS, LENGTH, CAPACITY, LAYERS = 2, 40, 256, 2
SHAPE = kvq.KVShape(
    num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=16, rope=kvq.Rope(theta=10000.0)
)
HELD = (100, 37)  # tokens of each row before the call
PLACE = np.arange(LENGTH)
VALID = np.stack([PLACE >= 5, PLACE < 33])
# Scores of size 20 are float32 sums of 16 products, so off by 2e-5 at most, and softmax weights by
# as much of themselves. Outputs have size 3.
BOUND = 1e-4


def inputs(seed: int, length: int = LENGTH, rows: int = ROWS, dim: int = 16):
    random = np.random.default_rng(seed)
    q, k, v = (random.normal(size=(LAYERS, rows, length, heads, dim)) for heads in (4, 2, 2))
    return [jnp.asarray(x, jnp.float32) for x in (q, k + 2 * random.normal(size=(2, dim)), v)]


def any_mask(length: int = LENGTH, rows: int = ROWS):
    """Any tokens see any others. Some see no new token at all."""
    mask = np.random.default_rng(9).random((rows, length, length)) < 0.4
    mask[:, 20] = False
    return jnp.asarray(mask)


def attended(cache, q, k, v, counts, constants=None, mask=None):
    """Every layer's output and logarithm, and the new tokens."""
    found, below = [], None
    for i in range(LAYERS):
        given = q[i], k[i], v[i], counts
        found.append(
            kvq.attend_layer(
                cache, i, *given, below=below, constants=constants, mask=mask, return_lse=True
            )
        )
        below = found[-1][-1]
    return [jnp.stack(x) for x in (list(zip(*found, strict=True))[:2])], [new for *_, new in found]


@jax.jit
def step(cache, q, k, v, counts, constants=None, mask=None):
    found, new = attended(cache, q, k, v, counts, constants, mask)
    return found, kvq.append(cache, new, counts, constants=constants)


def filled(shape, spec, constants=None):
    given = inputs(0, max(HELD), dim=shape.head_dim)
    return step(kvq.init_cache(shape, spec, ROWS, CAPACITY), *given, jnp.asarray(HELD), constants)[
        1
    ]


def turned(x, positions):
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(8) / 8)
    (a, b), cos, sin = np.split(x, 2, -1), np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def softmax_of(q, k, seen):
    """Softmax weights [H, T, S] in float64, of one row, and the logarithm of their denominators [T,
    H]."""
    scores = (
        np.einsum("thd,shd->hts", q, np.repeat(k, q.shape[1] // k.shape[1], 1))
        * q.shape[-1] ** -0.5
    )
    scores = np.where(seen, scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    return np.exp(scores - lse[..., None]), lse.T


def by_hand(cache, layer: int, row: int, q, k, v, mask, constants):
    """One layer's attention of a row's valid tokens, by what `dense` reads of the cache: weights,
    output, logarithm."""
    old_k, old_v, stored = (
        np.asarray(x[row]) for x in kvq.dense(cache, layer, constants=constants)
    )
    places, window = np.flatnonzero(VALID[row]), cache.layout.shape.layer(layer).window or 10**6
    positions = HELD[row] + np.arange(len(places))
    q, k, v = (np.asarray(x[layer, row], np.float64)[places] for x in (q, k, v))
    q, k = (turned(x, positions) for x in (q, k))
    every = np.concatenate([np.arange(len(stored)), positions])
    seen = np.concatenate(
        [np.broadcast_to(stored, (len(q), len(stored))), np.asarray(mask[row])[places][:, places]],
        1,
    )
    seen &= np.abs(positions[:, None] - every[None]) < window
    weights, lse = softmax_of(q, np.concatenate([old_k, k]), seen)
    values = np.repeat(np.concatenate([old_v, v]), q.shape[1] // v.shape[1], 1)
    return weights, np.einsum("hts,shd->thd", weights, values), lse


METHODS = (
    "exact",
    "kivi3-sinks",
    "sliding-mixed",
    "aqua",
    "turboquant",
    "kvquant",
    "mixed",
    "commvq",
    "kvarn",
    "klt",
)


@pytest.mark.parametrize("name", with_nightly(METHODS, ["kivi3-sinks"]))
def test_a_query_sees_the_cache_and_the_new_tokens_of_its_mask(name):
    """Rows padded on the left and on the right. What was encoded is read as `dense` reads it."""
    spec, constants = CASES[name][0], model_and_method(name)[0].constants
    shape = dataclasses.replace(SHAPE, sliding_window=(24, None)) if "sliding" in name else SHAPE
    cache, given, mask = filled(shape, spec, constants), inputs(1), any_mask()
    (out, lse), after = step(cache, *given, jnp.asarray(VALID), constants, mask)
    out, lse = np.asarray(out), np.asarray(lse)
    for layer, row in np.ndindex(LAYERS, ROWS):
        _, *wanted = by_hand(cache, layer, row, *given, mask, constants)
        for got, want in zip((out, lse), wanted, strict=True):
            np.testing.assert_allclose(got[layer, row, VALID[row]], want, atol=BOUND)
    unmasked = step(cache, *given, jnp.asarray(VALID), constants)[1]
    # A mask changes nothing that is stored.
    jax.tree.map(np.testing.assert_array_equal, after, unmasked)


def test_documents_side_by_side_are_what_each_is_alone():
    """Attention knows positions by their differences, so that a document may begin anywhere, under
    a window too."""
    shape = dataclasses.replace(SHAPE, sliding_window=(8, None))
    ends, given = (13, 14, 40), inputs(2, rows=1)
    document = np.searchsorted(ends, PLACE, side="right")
    mask = jnp.asarray((document[:, None] == document) & (PLACE[:, None] >= PLACE))[None]
    empty = kvq.init_cache(shape, "kivi:bits=2", 1, CAPACITY)
    out, lse = step(empty, *given, jnp.asarray([LENGTH]), None, mask)[0]
    for start, stop in zip((0, *ends), ends, strict=False):
        count = stop - start
        alone = step(empty, *(x[:, :, start : start + 26] for x in given), jnp.asarray([count]))[0]
        for got, want in zip((out, lse), (x[:, :, :count] for x in alone), strict=True):
            # Scores here have size 5.
            np.testing.assert_allclose(got[:, :, start:stop], want, atol=1e-5)


def by_views(cache, q, k, v, mask):
    views, out = kvq.layers(cache, valid=jnp.asarray(VALID)), []
    for i in range(LAYERS):
        *got, views[i] = views[i].attend(q[i], k[i], v[i], mask=mask, return_lse=True)
        out.append(got)
    return [jnp.stack(x) for x in zip(*out, strict=True)], kvq.commit_layers(views)


def by_scan(cache, q, k, v, mask):
    def layer(view, x):
        *got, view = view.attend(*x, mask=mask, return_lse=True)
        return view, got

    view, out = jax.lax.scan(
        layer, kvq.layers(cache, valid=jnp.asarray(VALID), stack=LENGTH), (q, k, v)
    )
    return out, kvq.commit_layers(view)


def by_module(cache, q, k, v, mask):
    kv = CacheModule(kvq.fork(cache))

    @nnx.jit
    def model(kv, q, k, v, mask):
        kv.start(valid=jnp.asarray(VALID))
        out = [kv[i].attend(q[i], k[i], v[i], mask=mask, return_lse=True) for i in range(LAYERS)]
        return [jnp.stack(x) for x in zip(*out, strict=True)]

    return model(kv, q, k, v, mask), read(kv.kv)


def by_forward_pass(cache, q, k, v, mask):
    variable = nnx.Cache(cache)
    kv = ForwardPass(variable, jnp.asarray(VALID))
    out = [kv.attend(i, q[i], k[i], v[i], mask=mask, return_lse=True) for i in range(LAYERS)]
    kv.append()
    return [jnp.stack(x) for x in zip(*out, strict=True)], read(variable)


DOORS = (by_views, by_scan, by_module, by_forward_pass)


@pytest.mark.parametrize("run", with_nightly(DOORS, [by_scan, by_forward_pass]))
def test_every_door_takes_a_mask(run):
    cache, given, mask = filled(SHAPE, "kivi:bits=2,window=32"), inputs(1), any_mask()
    wanted, after = step(cache, *given, jnp.asarray(VALID), None, mask)
    got, cache = run(cache, *given, mask)
    for mine, theirs in zip(got, wanted, strict=True):
        mine, theirs = np.asarray(mine)[:, VALID], np.asarray(theirs)[:, VALID]
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, cache, after)


def test_many_new_tokens_in_a_program_for_a_tpu():
    """Splash attention wants consecutive keys. A mask has others, so that these tokens attend
    without it."""
    shape = dataclasses.replace(SHAPE, head_dim=64, rope=None)
    given, mask, counts = inputs(3, 128, dim=64), any_mask(128), jnp.full(ROWS, 128)
    forms = ({"target": "v6e", "kernels": "splash"}, {"kernels": "off"})
    caches = [kvq.init_cache(shape, "exact", ROWS, 1024, **form) for form in forms]
    found, wanted = (attended(cache, *given, counts, None, mask)[0][0] for cache in caches)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_one_that_is_not_finite_spoils_all_that_may_see_it():
    """A token before it may see it by the mask. Other rows stay as they are."""
    (q, k, v), mask, counts = inputs(1), any_mask(), jnp.full(ROWS, LENGTH)
    cache = kvq.init_cache(SHAPE, "exact", ROWS, CAPACITY)
    spoilt = k.at[:, 0, 30].set(jnp.inf)
    out, wanted = (step(cache, q, keys, v, counts, None, mask)[0][0] for keys in (spoilt, k))
    assert np.isnan(out[:, 0]).all()
    np.testing.assert_array_equal(out[:, 1], wanted[:, 1])


@pytest.mark.usefixtures("unchecked")
def test_masks_that_cannot_be_are_refused():
    q, k, v = (x[0] for x in inputs(1, 4))
    chunked = dataclasses.replace(SHAPE, sliding_window=(16, None), chunked=(True, False))
    caches = [kvq.init_cache(shape, "exact", ROWS, 64) for shape in (SHAPE, chunked)]
    attend = functools.partial(kvq.attend_layer, q=q, k=k, v=v, counts=jnp.full(ROWS, 4))
    mask = jnp.ones((ROWS, 4, 4), bool)
    with pytest.raises(kvq.UserError, match=r"mask is bool\[2, 4, 3\]; wanted bool\[2, 4, 4\]"):
        attend(caches[0], 0, mask=mask[:, :, :3])
    with pytest.raises(kvq.UserError, match="mask is float32"):
        attend(caches[0], 0, mask=mask.astype(jnp.float32))
    with pytest.raises(kvq.UserError, match='give the mask with within="chunk"'):
        attend(caches[0], 0, mask=mask, within="step")
    with pytest.raises(kvq.UserError, match="layer 0 attends in chunks"):
        attend(caches[1], 0, mask=mask)
    attend(caches[1], 1, mask=mask)
