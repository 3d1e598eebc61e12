"""A cache as part of another model: `attend_layer` and `append` against our own path, a dense
oracle, and jit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method, thinned, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax import KVShape
from kvqjax.model import decoder
from kvqjax.model.rope import rotate

LENGTH, CHUNK = 160, 32
COUNTS = (160, 77)
BOUND = 1e-6  # of float32 logits of size about 1, computed by the same products in another order of layers


attend_layer = jax.jit(kvq.attend_layer, static_argnums=1, static_argnames=("within", "return_lse"))
append = jax.jit(kvq.append)


def other_model(model: kvq.Model, shape: KVShape, cache, text, counts, within):
    """A decoder of its own: (logits, new tokens of every layer). Its queries and keys come as
    `shape` wants them."""
    positions = cache.lengths[:, None] + jnp.arange(text.shape[1])[None]
    unrotated = dataclasses.replace(model.config, rope=None)
    h, below, new = decoder.embed(model.params, text), None, []
    for number in range(shape.num_layers):
        weights = decoder.layer(model.params, number)
        made = decoder.project(weights, h, positions, unrotated)
        q, k = made.q, made.k
        if shape.rope is None:
            q, k = rotate(q, positions, model.config), rotate(k, positions, model.config)
        out, below = kvq.attend_layer(
            cache,
            number,
            q,
            k,
            made.v,
            counts,
            below=below,
            constants=model.constants,
            within=within,
        )
        h = decoder.finish(weights, h, out, model.config)
        new.append(below)
    return decoder.unembed(model.params, h, model.config), new


def both(name: str, within: str, keep: str = ""):
    """Logits and caches of the other model and of ours, CHUNK tokens at a time, under jit."""
    model, method = model_and_method(name)
    method = kvq.parse(CASES[name][0] + keep) if keep else method
    shape = model.config.kv_shape
    theirs = kvq.init_cache(shape, method, 2, 256)
    ours = kvq.init_cache(model, method, 2, 256)
    step = jax.jit(functools.partial(other_model, model, shape, within=within))
    attend = jax.jit(functools.partial(kvq.attend, within=within))
    append, commit = jax.jit(kvq.append), jax.jit(kvq.commit)
    text, pairs = tokens(2, LENGTH), []
    for start in range(0, LENGTH, CHUNK):
        chunk, counts = (
            text[:, start : start + CHUNK],
            jnp.clip(jnp.asarray(COUNTS) - start, 0, CHUNK),
        )
        logits, new = step(theirs, chunk, counts)
        theirs = append(theirs, new, counts, constants=model.constants)
        wanted, pending = attend(model, chunk, counts, ours)
        ours = commit(model, ours, pending, counts)
        valid = (np.arange(CHUNK)[None] < np.asarray(counts)[:, None])[..., None]
        pairs.append((np.asarray(logits) * valid, np.asarray(wanted) * valid))
    return pairs, theirs, ours


@pytest.mark.parametrize(
    "name",
    [
        "exact",
        pytest.param("kivi-published", marks=pytest.mark.nightly),
        pytest.param("sliding-mixed", marks=pytest.mark.nightly),
        pytest.param("kvquant", marks=pytest.mark.nightly),
        pytest.param("commvq", marks=pytest.mark.nightly),
        pytest.param("aqua", marks=pytest.mark.nightly),
    ],
)
def test_another_model_gets_what_ours_gets(name):
    pairs, theirs, ours = both(name, "chunk")
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, atol=BOUND * max(1.0, np.abs(wanted).max()))
    assert jax.tree.structure(theirs.runs) == jax.tree.structure(ours.runs)
    np.testing.assert_array_equal(theirs.lengths, ours.lengths)
    for mine, other in zip(ours.runs, theirs.runs, strict=True):
        for a, b in zip(jax.tree.leaves(mine.body), jax.tree.leaves(other.body), strict=True):
            if a.dtype == jnp.uint32:  # words of codes; other fields are floats
                assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("name", thinned(["aqua", "sliding-mixed"], 2))
def test_drafts_are_verified_as_in_our_model(name):
    for got, wanted in both(name, "step")[0]:
        np.testing.assert_allclose(got, wanted, atol=BOUND * max(1.0, np.abs(wanted).max()))


def sources(seed: int, shape: KVShape, rows: int, length: int):
    """Signed queries, keys with an offset and outliers, and values of every layer."""
    random = np.random.default_rng(seed)
    lead = (shape.num_layers, rows, length)
    q = random.normal(size=(*lead, shape.num_heads, shape.head_dim))
    k, v = random.normal(size=(2, *lead, shape.num_kv_heads, shape.head_dim))
    k += 3 * random.normal(size=(shape.num_kv_heads, shape.head_dim)) + 9 * (
        random.random(k.shape) < 0.01
    )
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v))


def dense(shape: KVShape, layer: int, q, k, v, count: int):
    """Causal attention of one row in float64, from the textbook: (output, logarithm of the
    softmax's denominator)."""
    own, group = shape.layer(layer), shape.num_heads // shape.num_kv_heads
    if own.rope is not None:
        q, k = (np.asarray(rotate(x[None], jnp.arange(x.shape[0])[None], own))[0] for x in (q, k))
    q, k, v = (np.asarray(x, np.float64)[:count] for x in (q, k, v))
    scores = np.einsum("thd,shd->hts", q, np.repeat(k, group, 1)) * (
        own.scale or own.head_dim**-0.5
    )
    distance = np.arange(count)[:, None] - np.arange(count)[None]
    seen = (distance >= 0) & (distance < (own.sliding_window or count))
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(np.where(seen, scores - peak, -np.inf))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights / total, np.repeat(v, group, 1)), (
        np.log(total) + peak
    )[..., 0].T


SHAPES = {
    "rotated outside": KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16),
    "rope, scale and window by layer": KVShape(
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        rope=(kvq.Rope(theta=1e4), kvq.Rope(theta=1e6), None),
        sliding_window=(24, None, None),
        scale=(0.2, None, 0.5),
    ),
}


@pytest.mark.parametrize("name", with_nightly(SHAPES, ["rotated outside"]))
def test_exact_cache_equals_dense_attention(name):
    shape, counts, rows = SHAPES[name], (70, 45), 2
    cache = kvq.init_cache(shape, kvq.exact(sinks=2), rows, 128)
    q, k, v = sources(0, shape, rows, 70)
    for start in range(0, 70, 35):
        here = jnp.clip(jnp.asarray(counts) - start, 0, 35)
        part = [x[:, :, start : start + 35] for x in (q, k, v)]
        attend = functools.partial(attend_layer, cache, return_lse=True)
        found = [attend(i, *(x[i] for x in part), here) for i in range(shape.num_layers)]
        cache = append(cache, [new for *_, new in found], here)
        for row, layer in np.ndindex(rows, shape.num_layers):
            size = int(here[row])
            wanted = dense(shape, layer, q[layer, row], k[layer, row], v[layer, row], counts[row])
            for got, want in zip(found[layer], wanted, strict=False):
                # Sums of at most 70 float32 products of size 10 and their softmax.
                np.testing.assert_allclose(
                    got[row, :size], want[start : start + size], atol=1e-5, rtol=1e-5
                )


def test_attention_merges_with_attention_to_tokens_that_lie_elsewhere():
    """The first 40 tokens are in no cache: another program attends to them, and its logarithm says
    what they weigh."""
    shape, total = SHAPES["rotated outside"], 70
    (q, k, v), sinks = (
        (x[0] for x in sources(0, shape, 1, total)),
        jnp.asarray([1.0, -1.0, 0.0, 2.0]),
    )
    cache = kvq.init_cache(shape, "exact", 1, 128)
    _, new = kvq.attend_layer(cache, 0, q[:, 40:-1], k[:, 40:-1], v[:, 40:-1], jnp.asarray([29]))
    cache = kvq.append(cache, [new] * shape.num_layers, jnp.asarray([29]))
    last = tuple(x[:, -1:] for x in (q, k, v))
    out, lse, _ = kvq.attend_layer(cache, 0, *last, jnp.asarray([1]), sinks=sinks, return_lse=True)
    group = shape.num_heads // shape.num_kv_heads
    before, values = (np.repeat(np.asarray(x[0, :40], np.float64), group, 1) for x in (k, v))
    scores = (
        np.einsum("hd,shd->hs", np.asarray(q[0, -1], np.float64), before) * shape.head_dim**-0.5
    )
    weights, rest = np.exp(scores), np.exp(np.asarray(lse[0, 0], np.float64))
    merged = np.einsum("hs,shd->hd", weights, values) + rest[:, None] * np.asarray(out[0, 0])
    merged = merged / (weights.sum(-1) + rest)[:, None]
    whole, all_lse = dense(shape, 0, q[0], k[0], v[0], total)
    # Sinks take the rest.
    share = np.exp(all_lse[-1]) / (np.exp(all_lse[-1]) + np.exp(np.asarray(sinks)))
    np.testing.assert_allclose(merged, whole[-1] * share[:, None], atol=1e-5, rtol=1e-5)


@pytest.mark.nightly
def test_a_scan_over_the_layers_of_a_stack():
    shape, counts = SHAPES["rotated outside"], jnp.asarray([40, 33])
    cache = kvq.init_cache(shape, kvq.parse("kivi:bits=4,window=0"), 2, 128)
    q, k, v = sources(1, shape, 2, 40)

    @jax.jit
    def scanned(cache):
        def step(_, x):
            layer, q, k, v = x
            return None, kvq.attend_layer(cache, layer, q, k, v, counts)

        out, new = jax.lax.scan(step, None, (jnp.arange(shape.num_layers), q, k, v))[1]
        return out, kvq.append(cache, new, counts)

    out, after = scanned(cache)
    found = [attend_layer(cache, i, q[i], k[i], v[i], counts) for i in range(shape.num_layers)]
    alone = append(cache, [new for _, new in found], counts)
    for layer, (wanted, _) in enumerate(found):
        np.testing.assert_allclose(out[layer], wanted, atol=1e-6)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "spec", thinned(["exact", "kivi:bits=2,window=32", "kivi:bits=2;0=exact"], 3)
)
def test_no_second_cache_under_jit_with_donation(spec):
    shape = dataclasses.replace(tiny().config.kv_shape, rope=None)
    cache = jax.eval_shape(lambda: kvq.init_cache(shape, kvq.parse(spec), 1, 65536))
    q, k, v = (jax.ShapeDtypeStruct((2, 1, 1, heads, 16), jnp.float32) for heads in (4, 2, 2))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, q, k, v):
        counts = jnp.ones((1,), jnp.int32)
        found = [kvq.attend_layer(cache, i, q[i], k[i], v[i], counts) for i in range(2)]
        return kvq.append(cache, [new for _, new in found], counts), [out for out, _ in found]

    memory = (
        step.lower(cache, q, k, v).compile({"xla_backend_optimization_level": 2}).memory_analysis()
    )
    size = kvq.ledger(cache).bytes
    assert memory.alias_size_in_bytes >= 0.99 * size
    # K and V of one block in float32, and as much again for the scores.
    block = 2 * 1024 * 2 * 16 * 4
    assert memory.temp_size_in_bytes < 4 * block


def test_surgery_ledger_and_saving_know_no_model(tmp_path):
    shape, counts = SHAPES["rotated outside"], jnp.asarray([70, 69])
    cache = kvq.init_cache(shape, kvq.parse("kivi:bits=4,window=0"), 2, 128)
    q, k, v = sources(2, shape, 2, 70)
    new = [attend_layer(cache, i, q[i], k[i], v[i], counts)[1] for i in range(2)]
    full = append(cache, new, counts)
    assert kvq.crop(full, jnp.asarray([66, 68])).lengths.tolist() == [66, 68]
    assert kvq.gather(full, jnp.asarray([1])).lengths.tolist() == [69]
    assert kvq.evict(full, jnp.asarray([True, False])).lengths.tolist() == [0, 69]
    assert kvq.insert(cache, 0, full, 1).lengths.tolist() == [69, 0]
    assert kvq.ledger(full).bytes == sum(x.nbytes for x in jax.tree.leaves(full))
    kvq.save_cache(tmp_path / "cache", full, shape)
    for same in (kvq.fork(full), kvq.load_cache(tmp_path / "cache", shape)):
        assert same.layout == full.layout
        jax.tree.map(np.testing.assert_array_equal, same, full)


PADDED = {  # spec -> the largest error of decoded values, as a share of them: 4-bit codes of normal numbers
    "exact": 1e-6,
    "kivi:bits=4,window=0,value_group=16": 0.08,
    "turboquant:bits=4": 0.1,
    "uniform:bits=4,group=16": 0.08,
    "kvarn:bits=4,group=32,sinks=0": 0.1,
    "omniscale:bits=4,group=32,value_group=16,window=0": 0.1,
}


@pytest.mark.parametrize("spec", with_nightly(PADDED, ["kvarn:bits=4,group=32,sinks=0"]))
def test_values_narrower_than_keys_go_with_zeros(spec):
    """As wide as the keys they are stored as well as any others, and the output's first channels
    are theirs."""
    shape, total = dataclasses.replace(SHAPES["rotated outside"], head_dim=24), 161
    cache, counts = kvq.init_cache(shape, spec, 1, 256), jnp.asarray([total - 1])
    q, k, v = sources(4, shape, 1, total)
    v = v.at[..., 16:].set(0)
    new = [
        attend_layer(cache, i, q[i, :, :-1], k[i, :, :-1], v[i, :, :-1], counts)[1]
        for i in range(2)
    ]
    cache = append(cache, new, counts)
    out = attend_layer(cache, 0, q[0, :, -1:], k[0, :, -1:], v[0, :, -1:], jnp.asarray([1]))[0]
    keys, values = (x[0, : total - 1] for x in kvq.dense(cache, 0)[:2])
    wrong = np.asarray(values - v[0, 0, :-1])[..., :16]
    assert np.square(wrong).sum() <= PADDED[spec] ** 2 * np.square(v[0, 0, :-1]).sum()
    keys, values = jnp.concatenate([keys, k[0, 0, -1:]]), jnp.concatenate([values, v[0, 0, -1:]])
    wanted = dense(shape, 0, q[0, 0], keys, values[..., :16], total)[0]
    np.testing.assert_allclose(out[0, 0, :, :16], wanted[-1], atol=1e-4)


SHAPE = SHAPES["rotated outside"]
ROPED = dataclasses.replace(SHAPE, rope=kvq.Rope())
REFUSED = {
    "a method of unrotated keys without a rope": (SHAPE, "higgs", "give the shape a rope"),
    "a method of the layer's input": (ROPED, "xquant", "use a kvqjax model"),
    "its cross-layer form": (ROPED, "xquant_cl:base=0,protected=0", "use a kvqjax model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_do_not_fit_are_refused(name):
    shape, spec, words = REFUSED[name]
    with pytest.raises(kvq.UserError, match=words):
        kvq.init_cache(shape, kvq.parse(spec), 1, 64)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("width", "words"),
    [
        (12, "; pad values with zeros to 16 channels, and cut the output to 12"),
        (
            24,
            r"; pad queries and keys with zeros to 24 channels, for .* KVShape\(head_dim=24, scale=16\*\*-0.5\)",
        ),
    ],
)
def test_values_of_another_width_are_told_what_to_do(width, words):
    cache, (q, k, _) = (
        kvq.init_cache(SHAPE, "exact", 2, 64),
        (x[0] for x in sources(3, SHAPE, 2, 4)),
    )
    with pytest.raises(kvq.UserError, match=words):
        kvq.attend_layer(cache, 0, q, k, jnp.ones((2, 4, 2, width)), jnp.asarray([4, 3]))


def test_a_scale_is_not_rounded_to_the_dtype_of_queries():
    """In bfloat16 this factor of queries would be 1.1016: all scores would be wrong by 0.3
    percent."""
    shape = kvq.KVShape(
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=128, scale=1.10526 / 128**0.5
    )
    q = jax.random.normal(jax.random.key(0), (8, 1, 1, 128), jnp.bfloat16)
    cache, counts = kvq.init_cache(shape, "exact", 8, 8, dtype="bf16"), jnp.ones(8, int)
    lse = kvq.attend_layer(cache, 0, q, q, q, counts, return_lse=True)[1]  # of one token: its score
    np.testing.assert_allclose(
        lse[:, 0, 0], shape.scale * np.square(np.asarray(q, np.float64)).sum((1, 2, 3)), rtol=1.5e-3
    )


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_array_of_floats_is_refused_in_one_line():
    cache, counts = kvq.init_cache(SHAPE, kvq.exact(), 2, 64), jnp.asarray([4, 3])
    q, k, v = (x[0] for x in sources(3, SHAPE, 2, 4))
    with pytest.raises(
        kvq.UserError, match=r"sinks is a list; wanted an array \[4\], a logit for each query head"
    ):
        kvq.attend_layer(cache, 0, q, k, v, counts, sinks=[0.0] * 4)
    with pytest.raises(kvq.UserError, match="q, k and v have no new tokens"):
        kvq.attend_layer(cache, 0, q[:, :0], k[:, :0], v[:, :0], jnp.zeros(2, int))
    for name in "qkv":
        tensors = {"q": q, "k": k, "v": v}
        tensors[name] = tensors[name].astype(int)
        with pytest.raises(
            kvq.UserError, match=f"{name} is of type int32; wanted floating point numbers"
        ):
            kvq.attend_layer(cache, 0, **tensors, counts=counts)
    integers = [{name: jnp.ones((2, 4, 32), int) for name in "kv"}] * 2
    with pytest.raises(
        kvq.UserError, match="new tokens 'k' of layer 0 are of type int32; wanted floating"
    ):
        kvq.append(cache, integers, counts)


def test_bad_calls_are_refused_in_one_line():
    cache, counts = kvq.init_cache(SHAPE, kvq.exact(), 2, 64), jnp.asarray([4, 3])
    q, k, v = (x[0] for x in sources(3, SHAPE, 2, 4))
    with pytest.raises(kvq.UserError, match=r"q has shape \(2, 4, 3, 16\), wanted \(2, 4, 4, 16\)"):
        kvq.attend_layer(cache, 0, q[:, :, :3], k, v, counts)
    with pytest.raises(
        kvq.UserError, match="layer=2; it must be a whole number from 0 to 1: there are 2 layers"
    ):
        kvq.attend_layer(cache, 2, q, k, v, counts)
    with pytest.raises(kvq.UserError, match="known: chunk, step"):
        kvq.attend_layer(cache, 0, q, k, v, counts, within="draft")
    with pytest.raises(kvq.UserError, match="68 tokens; the cache was made for 64"):
        kvq.attend_layer(cache.replace(lengths=jnp.asarray([64, 0])), 0, q, k, v, counts)
    new = kvq.attend_layer(cache, 0, q, k, v, counts)[1]
    with pytest.raises(kvq.UserError, match="1 layers given, the cache has 2"):
        kvq.append(cache, [new], counts)
    mixed = kvq.init_cache(SHAPE, kvq.parse("kivi;0=exact"), 2, 64)
    with pytest.raises(kvq.UserError, match="2 stacks"):
        jax.jit(lambda layer: kvq.attend_layer(mixed, layer, q, k, v, counts)[0])(0)
    with pytest.raises(kvq.UserError, match="dtype 'f8'"):
        kvq.init_cache(SHAPE, kvq.exact(), 1, 64, dtype="f8")
