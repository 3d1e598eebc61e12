"""A million tokens in the flesh: a one-layer model whose cache is filled by appending, with facts
planted in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax import ledger
from kvqjax.model import decoder

TOKENS, CHUNK = 2**20, 2**13
ASKED = np.arange(10, 18)  # token ids that ask
FOUND = np.arange(30, 38)  # what each should bring up
DEPTHS = np.asarray([5, 4_097, 65_535, 200_000, 500_001, 777_777, 1_000_000, TOKENS - 200])


def transparent() -> kvq.Model:
    """One layer that asks with its input's own direction and adds what attention finds to it."""
    model = tiny(num_layers=1, num_heads=2)
    layers, eye = model.params["layers"], jnp.eye(32)[None]
    layers = layers | {"q": 2 * eye, "o": eye, "down": jnp.zeros_like(layers["down"])}
    return model.replace(params=model.params | {"layers": layers, "head": model.params["head"] * 4})


def facts(model: kvq.Model) -> tuple[jax.Array, jax.Array]:
    """Keys that each asking token's query meets (it stands at position TOKENS + i), and values that
    point at the answer."""
    positions = TOKENS + jnp.arange(len(ASKED))[None]
    h = decoder.embed(model.params, jnp.asarray(ASKED)[None])
    q = decoder.project(decoder.layer(model.params, 0), h, positions, model.config).q[0]
    return 2 * q.reshape(len(ASKED), -1), 2 * model.params["head"][:, FOUND].T


@functools.partial(jax.jit, donate_argnames="cache")
def fill(model, cache, start, keys, values):
    """Append CHUNK tokens of noise, with the facts whose places fall among them."""
    key, value = jax.random.split(jax.random.fold_in(jax.random.key(0), start))
    k, v = jax.random.normal(key, (CHUNK, 32)) / 2, jax.random.normal(value, (CHUNK, 32)) / 2
    place = jnp.where((start <= DEPTHS) & (start + CHUNK > DEPTHS), DEPTHS - start, CHUNK)
    sources = {"k": k.at[place].set(keys, mode="drop"), "v": v.at[place].set(values, mode="drop")}
    pending = ({name: x[None, None] for name, x in sources.items()},)
    return kvq.commit(model, cache, pending, jnp.full((1,), CHUNK, jnp.int32))


@pytest.mark.nightly
def test_planted_facts_are_found_among_a_million_tokens():
    model = transparent()
    cache = kvq.init_cache(
        model, kvq.kivi(bits=2, value_group=16, scales="float32"), 1, TOKENS + 32
    )
    assert ledger(cache).bits_stored < 5.1  # 2 bits, float32 scales and minima of 32 and 16 values
    keys, values = facts(model)
    for start in range(0, TOKENS, CHUNK):
        cache = fill(model, cache, jnp.int32(start), keys, values)
    assert int(cache.lengths[0]) == TOKENS
    logits, _ = kvq.attend(
        model, jnp.asarray(ASKED, jnp.int32)[None], jnp.full((1,), len(ASKED), jnp.int32), cache
    )
    np.testing.assert_array_equal(np.asarray(logits[0]).argmax(-1), FOUND)
