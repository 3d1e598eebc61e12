"""Caches behind the interface of tunix's sampler (kvqjax/adapters). Tokens over them are those of
test_clients.py; here is what the interface asks for besides, with one of our models."""

import ast
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly

import kvqjax as kvq
from kvqjax.adapters import tunix

CLIENTS = Path(__file__).resolve().parents[2] / "examples" / "clients"
SHAPE = kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rope=kvq.Rope())
SPEC = "kivi:bits=4,window=0"
CAPACITY = 64


def rows_first(spec: str, batch: int = 3):
    return tunix.init_cache(SHAPE, spec, batch, CAPACITY, jnp.float32)


def mask(valid):
    causal = jnp.arange(CAPACITY)[None] <= jnp.arange(valid.shape[1])[:, None]
    return jnp.pad(valid, ((0, 0), (0, CAPACITY - valid.shape[1])))[:, None] & causal[None]


@pytest.mark.parametrize("spec", with_nightly(["exact", SPEC], [SPEC]))
def test_a_sampler_s_cache_has_rows_in_front_and_picks_them(spec):
    """Rows that are repeated and picked along the first axis of every array are those that `repeat`
    and `gather` give, and left padding is what a mask of valid tokens says."""
    q, k, v = (
        jax.random.normal(jax.random.key(i), (3, 40, n, 16)) for i, n in enumerate((4, 2, 2))
    )
    valid = jnp.arange(40)[None] >= jnp.asarray([[0], [7], [30]])

    @jax.jit
    def filled(cache):
        views = tunix.layers(cache, mask(valid))
        for name in views:
            views[name] = views[name].attend(q, k, v)[1]
        return tunix.commit_layers(views)

    cache = filled(rows_first(spec))
    assert all(x.shape[0] == 3 for x in jax.tree.leaves(cache))
    assert cache.cache.lengths.tolist() == [40, 33, 10]
    picked = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0)[jnp.asarray([5, 0, 3])], cache)
    wanted = kvq.gather(kvq.repeat(cache.cache, 2), jnp.asarray([5, 0, 3]))
    jax.tree.map(np.testing.assert_array_equal, picked.cache, wanted)
    jax.tree.map(np.testing.assert_array_equal, tunix.SamplerCache.of(cache.cache), cache)


def test_wrong_use_of_a_sampler_s_cache_is_one_line():
    cache, seen = rows_first("exact"), mask(jnp.ones((3, 4), bool))
    with pytest.raises(kvq.UserError, match="is no cache for tunix's sampler"):
        tunix.layers(cache.cache, seen)
    with pytest.raises(kvq.UserError, match="attention_mask is"):
        tunix.layers(cache, seen[:, 0])
    with pytest.raises(kvq.UserError, match="no view of layer_1"):
        tunix.commit_layers({"layer_0": 1, "layer_2": 2})
    with pytest.raises(kvq.UserError, match="has not attended"):
        tunix.commit_layers(tunix.layers(cache, seen))


@pytest.mark.filterwarnings(
    "ignore"
)  # tunix and what it imports warn; the sampler donates what beams cannot use
@pytest.mark.parametrize("beams", [None, 3], ids=["greedy", "beams"])
def test_tunix_s_own_sampler(beams, monkeypatch):
    """The sampler of google-tunix, where it is installed, over the model of examples/clients."""
    sampler = pytest.importorskip("tunix.generate.sampler", reason="google-tunix is not installed")
    monkeypatch.syspath_prepend(CLIENTS)
    import parts
    import tunix_sampler as client

    class Tokenizer:
        encode = staticmethod(lambda text, **_: [int(word) for word in text.split()])
        decode = staticmethod(lambda ids, **_: " ".join(map(str, ids)))
        bos_id = staticmethod(lambda: None)
        eos_id = staticmethod(lambda: parts.END)
        pad_id = staticmethod(lambda: parts.PAD)

    config = sampler.CacheConfig(
        cache_size=parts.CAPACITY, num_layers=2, num_kv_heads=2, head_dim=16
    )
    texts, made = [" ".join(map(str, row)) for row in parts.prompts()], {}
    for spec in (None, "exact", SPEC):
        run = sampler.Sampler(client.make(spec), Tokenizer(), config)
        out = run(
            texts, max_generation_steps=8, max_prompt_length=132, beam_size=beams, eos_tokens=[99]
        )
        made[spec] = [list(map(int, row)) for row in out.tokens]
    assert made["exact"] == made[None]
    assert len(made[SPEC]) == len(texts)


def test_the_adapter_imports_nothing_of_the_other_library():
    nodes = [*ast.walk(ast.parse(inspect.getsource(tunix)))]
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert "jax" in names
    assert "tunix" not in {name.partition(".")[0] for name in names}
