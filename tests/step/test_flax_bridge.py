"""Models written in flax.nnx and flax.linen over our caches: the example with trained weights, and
small ones that are compared with plain calls of `attend_layer` and `append`."""

import re
import runpy
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method
from flax import nnx

import kvqjax as kvq
from kvqjax.flax_bridge import CacheModule, ForwardPass, linen_cache, read

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "own_model.py"
SHAPE = kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rope=kvq.Rope())
WIDTHS = {"q": 64, "k": 32, "v": 32, "o": 64}


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(SCRIPT))


@pytest.mark.nightly
@pytest.mark.parametrize("spec", ["exact", "kivi:bits=2,window=32"])
def test_the_example_writes_what_our_model_writes(example, spec):
    model, config = example["load"](example["FOLDER"])
    ours = kvq.load("demo")
    found = example["generate"](model, config, ours.encode(example["PROMPT"]), 48, spec)
    wanted = kvq.generate(ours, [example["PROMPT"]], kvq.parse(spec), max_new_tokens=48)
    assert ours.tokenizer.decode(found) == wanted.text[0]
    assert found == wanted.tokens[0]


def test_the_example_needs_few_lines_of_us():
    lines = SCRIPT.read_text().split('"""', 2)[2].splitlines()
    marked = [line for line in lines if line.endswith("# kvqjax")]
    ours = r"kvq|CacheModule|\bcache\.\w|\bcache\["
    assert [line for line in lines if re.search(ours, line.removesuffix("# kvqjax"))] == marked
    assert 5 < len(marked) <= 10
    assert "decoder" not in "".join(lines)


class Attention(nnx.Module):
    def __init__(self, layer: int, rngs: nnx.Rngs):
        self.layer = layer
        for name, width in WIDTHS.items():
            setattr(self, name, nnx.Linear(64, width, use_bias=False, rngs=rngs))

    def __call__(self, x, kv):
        q, k, v = (p(x).reshape(*x.shape[:2], -1, 16) for p in (self.q, self.k, self.v))
        return self.o(kv.attend(self.layer, q, k, v).reshape(x.shape))


class Tower(nnx.Module):
    """Attention layers that hold their cache themselves, as a Variable among the weights."""

    def __init__(self, cache: kvq.cache.Cache, rngs: nnx.Rngs):
        self.layers = nnx.List([Attention(layer, rngs) for layer in range(SHAPE.num_layers)])
        self.cache = nnx.Cache(cache)

    def __call__(self, x, counts, constants=None, within="chunk", accepted=None):
        kv = ForwardPass(self.cache, counts, constants=constants, within=within)
        for layer in self.layers:
            x = x + layer(x, kv)
        kv.append(accepted)
        return x


class LinenAttention(nn.Module):
    layer: int

    @nn.compact
    def __call__(self, x, kv):
        q, k, v = (
            nn.Dense(WIDTHS[name], use_bias=False, name=name)(x).reshape(*x.shape[:2], -1, 16)
            for name in "qkv"
        )
        return nn.Dense(64, use_bias=False, name="o")(
            kv[self.layer].attend(q, k, v).reshape(x.shape)
        )


class LinenTower(nn.Module):
    @nn.compact
    def __call__(self, x, counts):
        kv = ForwardPass(linen_cache(self), counts, store=True)
        for layer in range(SHAPE.num_layers):
            x = x + LinenAttention(layer, name=f"layers_{layer}")(x, kv)
        return x


@jax.jit
def plain(weights, cache, x, counts, constants=None, below=None):
    """One call of the tower by `attend_layer` and `append` alone."""
    new = []
    for layer, w in enumerate(weights):
        q, k, v = ((x @ w[name]).reshape(*x.shape[:2], -1, 16) for name in "qkv")
        out, below = kvq.attend_layer(
            cache, layer, q, k, v, counts, below=below, constants=constants
        )
        x = x + out.reshape(x.shape) @ w["o"]
        new.append(below)
    return x, kvq.append(cache, new, counts, constants=constants)


def kernels(tower: Tower) -> list[dict]:
    return [
        {name: getattr(layer, name).kernel.get_value() for name in WIDTHS} for layer in tower.layers
    ]


def inputs(seed: int, length: int):
    return 3 * jax.random.normal(jax.random.key(seed), (2, length, 64))


def same(cache, other) -> None:
    """Equal numbers but for the order of sums; codes that fell on a tie are few."""
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        a, b = (np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x) for x in (a, b))
        if a.dtype == np.float32:
            assert np.sum(~np.isclose(a, b, atol=1e-4, rtol=1e-2)) <= 1e-3 * a.size
        else:
            assert np.sum(a != b) <= 1e-3 * a.size


# New tokens of a call, valid ones of each row.
CHUNKS = (
    (40, (40, 33)),
    (40, (30, 40)),
    (1, (1, 0)),
    (40, (40, 40)),
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("exact", marks=pytest.mark.nightly),
        "kivi2",
        pytest.param("aqua", marks=pytest.mark.nightly),
    ],
)
def test_nnx_equals_plain_calls(name):
    spec, constants = CASES[name][0], model_and_method(name)[0].constants
    cache = kvq.init_cache(SHAPE, spec, 2, 256)
    tower = Tower(cache, nnx.Rngs(0))
    step = nnx.jit(lambda tower, x, counts: tower(x, counts, constants))
    for seed, (length, valid) in enumerate(CHUNKS):
        x, counts = inputs(seed, length), jnp.asarray(valid)
        wanted, cache = plain(kernels(tower), cache, x, counts, constants)
        np.testing.assert_allclose(step(tower, x, counts), wanted, atol=1e-4)  # of numbers up to 20
    same(tower.cache.get_value(), cache)
    assert tower.cache.get_value().lengths.tolist() == [111, 113]
    assert len(jax.tree.leaves(nnx.state(tower, nnx.Cache))) == len(jax.tree.leaves(cache))


class SelfStoringTower(nnx.Module):
    """Attention layers over a cache that stores their tokens by itself; with `remat` each layer is
    computed again."""

    def __init__(self, cache: CacheModule, rngs: nnx.Rngs, remat: bool):
        self.layers = nnx.List([SelfStoring(layer, rngs) for layer in range(SHAPE.num_layers)])
        self.cache, self.call = (
            cache,
            nnx.remat(SelfStoring.__call__) if remat else SelfStoring.__call__,
        )

    def __call__(self, x):
        for layer in self.layers:
            x = x + self.call(layer, x, self.cache)
        return x


class SelfStoring(Attention):
    def __call__(self, x, cache):
        q, k, v = (p(x).reshape(*x.shape[:2], -1, 16) for p in (self.q, self.k, self.v))
        return self.o(cache[self.layer].attend(q, k, v).reshape(x.shape))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "remat"), [pytest.param("aqua", False, marks=pytest.mark.nightly), ("kivi2", True)]
)
def test_a_module_that_stores_by_itself_equals_plain_calls(name, remat):
    """Masks of valid tokens, then a step without one, in which all are."""
    constants = model_and_method(name)[0].constants or None
    cache = kvq.init_cache(SHAPE, CASES[name][0], 2, 256)
    tower = SelfStoringTower(CacheModule(kvq.fork(cache), constants=constants), nnx.Rngs(0), remat)
    structure = jax.tree.structure(nnx.state(tower))

    @nnx.jit(donate_argnames="tower")
    def step(tower, x, valid):
        if valid is not None:
            tower.cache.start(valid=valid)
        return tower(x)

    place, spans = np.arange(40)[None], (((0, 40), (7, 40)), ((10, 40), (0, 40)))
    for seed, span in enumerate(spans):
        x = inputs(seed, 40)
        valid = jnp.stack(
            [jnp.asarray((place[0] >= first) & (place[0] < last)) for first, last in span]
        )
        wanted, cache = plain(kernels(tower), cache, x, valid, constants)
        np.testing.assert_allclose(
            np.where(valid[..., None], step(tower, x, valid) - wanted, 0), 0, atol=1e-4
        )
    x = inputs(3, 1)
    wanted, cache = plain(kernels(tower), cache, x, jnp.ones(2, jnp.int32), constants)
    np.testing.assert_allclose(step(tower, x, None), wanted, atol=1e-4)
    same(read(tower.cache.kv), cache)
    assert read(tower.cache.kv).lengths.tolist() == [71, 74]
    assert jax.tree.structure(nnx.state(tower)) == structure


@pytest.mark.nightly
def test_a_module_s_layers_attend_in_order():
    cache = CacheModule(kvq.init_cache(SHAPE, "exact", 1, 64))
    q, k, v = (jnp.zeros((1, 3, heads, 16)) for heads in (4, 2, 2))
    with pytest.raises(kvq.UserError, match="layer 1 attends after 0 layers"):
        cache[1].attend(q, k, v)
    np.testing.assert_array_equal(cache.positions(3), [[0, 1, 2]])
    cache[0].attend(q, k, v)
    cache.start(jnp.asarray([2]))  # drops what the call above left
    for layer in range(2):
        cache[layer].attend(q, k, v, softcap=20.0)
    assert read(cache.kv).lengths.tolist() == [2]
    with pytest.raises(kvq.UserError, match="either counts= or valid="):
        cache.start(jnp.asarray([2]), valid=jnp.ones((1, 3), bool))


def test_a_donated_nnx_cache_is_updated_in_place():
    cache = kvq.init_cache(SHAPE, "kivi:bits=4,window=0", 1, 1024)
    rows = {name: jnp.zeros((1, 1, heads, 16)) for name, heads in (("q", 4), ("k", 2), ("v", 2))}

    @nnx.jit(donate_argnames="variable")
    def step(variable, rows):
        kv = ForwardPass(variable, jnp.ones(1, jnp.int32))
        out = [kv.attend(layer, **rows) for layer in range(SHAPE.num_layers)]
        kv.append()
        return out

    variable = nnx.Cache(cache)
    before = variable.get_value().runs[0].body["k"]["codes"][0]
    place = before.unsafe_buffer_pointer()
    step(variable, rows)
    assert before.is_deleted()
    assert variable.get_value().runs[0].body["k"]["codes"][0].unsafe_buffer_pointer() == place


@pytest.mark.nightly
def test_linen_equals_nnx():
    cache = kvq.init_cache(SHAPE, "kivi:bits=2,window=0", 2, 256)
    tower, linen = Tower(cache, nnx.Rngs(0)), LinenTower()
    params = {
        f"layers_{number}": {name: {"kernel": kernel} for name, kernel in layer.items()}
        for number, layer in enumerate(kernels(tower))
    }
    apply = jax.jit(lambda *given: linen.apply(*given, mutable=["cache"]))
    state = {"cache": {"kv": cache}}
    for seed, (length, valid) in enumerate(CHUNKS):
        x, counts = inputs(seed, length), jnp.asarray(valid)
        out, state = apply({"params": params, **state}, x, counts)
        np.testing.assert_allclose(out, nnx.jit(Tower.__call__)(tower, x, counts), atol=1e-4)
    same(state["cache"]["kv"], tower.cache.get_value())
    with pytest.raises(kvq.UserError, match="no cache given"):
        linen.apply({"params": params}, x, counts, mutable=["cache"])


@pytest.mark.nightly
def test_a_draft_is_verified_and_its_accepted_part_stored():
    """Five new tokens in one call see what they see one at a time; three are kept."""
    towers = [
        Tower(kvq.init_cache(SHAPE, "kivi:bits=2,window=0", 2, 128), nnx.Rngs(0)) for _ in "ab"
    ]
    full, start, draft = jnp.asarray([62, 61]), inputs(0, 62), inputs(1, 5)
    for tower in towers:
        tower(start, full)
    accepted = jnp.full(2, 3)
    verified = nnx.jit(Tower.__call__, static_argnames="within")(
        towers[0], draft, jnp.full(2, 5), within="step", accepted=accepted
    )
    step = nnx.jit(Tower.__call__)
    for t in range(3):
        out = step(towers[1], draft[:, t : t + 1], jnp.ones(2, jnp.int32))
        np.testing.assert_allclose(verified[:, t], out[:, 0], atol=1e-4)
    assert towers[0].cache.get_value().lengths.tolist() == [65, 64]
    same(towers[0].cache.get_value(), towers[1].cache.get_value())


def test_layers_out_of_order_are_refused():
    kv = ForwardPass(nnx.Cache(kvq.init_cache(SHAPE, "exact", 1, 64)), jnp.ones(1, jnp.int32))
    q, k, v = (jnp.zeros((1, 1, heads, 16)) for heads in (4, 2, 2))
    kv.attend(0, q, k, v)
    with pytest.raises(kvq.UserError, match="layer 0 attends after 1 layers"):
        kv.attend(0, q, k, v)
    with pytest.raises(kvq.UserError, match="1 layers given, the cache has 2"):
        kv.append()
    np.testing.assert_array_equal(kv.positions(3), [[0, 1, 2]])
