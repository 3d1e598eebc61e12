"""The gated delta rule against a loop in float64, and one recurrent layer over tokens of which not
all count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent import hybrid

from kvqjax.model import decoder
from kvqjax.model.recurrent import delta_rule, empty_states

RANDOM = np.random.default_rng(5)
rule = jax.jit(delta_rule, static_argnames="chunk")


def drawn(length: int, repeated: bool = False) -> tuple[np.ndarray, ...]:
    """Queries, keys, values, decay, beta and a state for 2 rows, 2 heads of keys and 4 of
    values."""
    q, k = (RANDOM.normal(size=(2, length, 2, 8)) for _ in range(2))
    k = np.broadcast_to(k[:, :1], k.shape) if repeated else k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, decay = RANDOM.normal(size=(2, length, 4, 6)), -RANDOM.gamma(0.3, 0.5, size=(2, length, 4))
    beta = RANDOM.uniform(0.9 if repeated else 0, 1, size=(2, length, 4))
    decay = decay * (0.01 if repeated else 1)
    return tuple(
        x.astype(np.float32) for x in (q, k, v, decay, beta, RANDOM.normal(size=(2, 4, 8, 6)))
    )


def loop(q, k, v, decay, beta, state):
    """Token by token in float64, as the rule is written."""
    q, k, v, decay, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, decay, beta, state))
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], 2) for x in (q, k))
    outs = []
    for t in range(v.shape[1]):
        state = state * np.exp(decay[:, t])[..., None, None]
        update = beta[:, t, :, None] * (v[:, t] - np.einsum("bnkv,bnk->bnv", state, k[:, t]))
        state = state + np.einsum("bnk,bnv->bnkv", k[:, t], update)
        outs.append(np.einsum("bnkv,bnk->bnv", state, q[:, t]))
    return np.stack(outs, 1), state


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 64), (4, 64), (5, 64), (64, 64), (150, 64), (33, 8)]
)
def test_steps_and_chunks_equal_a_loop_in_float64(length, chunk, repeated):
    """Repeated keys make a chunk's triangular system as far from the identity as it can be."""
    numbers = drawn(length, repeated)
    out, state = rule(*numbers, chunk=chunk)
    wanted, after = loop(*numbers)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    np.testing.assert_allclose(state, after, atol=2e-5)


def test_extreme_gates():
    """All forgotten, nothing forgotten, all written, nothing written: no exponential overflows."""
    q, k, v, decay, beta, state = drawn(70)
    decay, beta = np.where(np.arange(70)[None, :, None] % 3 == 0, -200, 0 * decay), np.round(beta)
    out, after = rule(q, k, v, decay, beta, state)
    np.testing.assert_allclose(out, loop(q, k, v, decay, beta, state)[0], atol=2e-5)
    assert np.isfinite(after).all()


@jax.jit
def layer(h, state, counts):
    model = hybrid()
    return decoder.recur(
        decoder.layer(model.params, 1, "recurrent"), h, state, counts, model.config
    )


def blank(rows: int) -> dict:
    return jax.tree.map(lambda x: x[0], empty_states(hybrid().config.recurrent, 1, rows))


@pytest.mark.nightly
def test_tokens_that_do_not_count_change_nothing():
    """A row with padding, one with none, an empty one: each as by itself, whatever stands in
    padding and neighbours."""
    h, counts = jnp.asarray(RANDOM.normal(size=(3, 20, 32)), jnp.float32), jnp.asarray([20, 7, 0])
    start = layer(h[:, ::-1], blank(3), jnp.full(3, 20)).state
    made = layer(h, start, counts)
    alone = layer(h[1:2, :7], jax.tree.map(lambda x: x[1:2], start), counts[1:2])
    np.testing.assert_allclose(made.h[1, :7], alone.h[0], atol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[1], b[0], atol=2e-5), made.state, alone.state
    )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[2], b[2]), made.state, start)
    foul = h.at[1, 7:].set(jnp.nan).at[0, 3].set(jnp.inf).at[2].set(jnp.nan)
    spoilt = layer(foul, start, counts)
    np.testing.assert_array_equal(spoilt.h[1, :7], made.h[1, :7])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1:], b[1:]), spoilt.state, made.state)
    assert np.isnan(spoilt.h[0, 3:]).all()
    np.testing.assert_array_equal(spoilt.h[0, :3], made.h[0, :3])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(spoilt.state))


def test_two_halves_are_the_whole():
    h = jnp.asarray(RANDOM.normal(size=(2, 30, 32)), jnp.float32)
    whole = layer(h, blank(2), jnp.full(2, 30))
    first = layer(h[:, :11], blank(2), jnp.full(2, 11))
    second = layer(h[:, 11:], first.state, jnp.full(2, 19))
    np.testing.assert_allclose(second.h, whole.h[:, 11:], atol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), second.state, whole.state
    )
