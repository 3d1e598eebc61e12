"""Values of the layer input and of its latents summed before they are rematerialised
(`SharedValues`): the same attention as rematerialising every token, to rounding; and only where
that is the cheaper order."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, with_nightly

from kvqjax import parse
from kvqjax.model.config import ModelConfig
from kvqjax.ops.attention import Partial, blockwise_attention, merge, segment_attention

CONFIG = ModelConfig(
    vocab_size=8,
    width=64,
    mlp_width=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qkv_bias=True,
)
SPECS = [
    "xquant:bits=4,group=32,latent=true",
    "xquant:bits=4,group=32,latent=false",
    "xquant_cl:bits=4,group=32,base=0,protected=1,latent=true,space=residual",
]
TOKENS = 64


def drawn(rng, shape, scale):
    return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)


def layer_of(spec):
    """The wiring of the second layer, and weights, constants, decoded sources and positions for it:
    signed, offset, with outlying channels."""
    rng = np.random.default_rng(0)
    wiring, width, kv = parse(spec).layer.build(CONFIG), CONFIG.width, CONFIG.kv_width
    weights = {name: drawn(rng, (width, kv), width**-0.5) for name in ("k", "v")}
    weights |= {name: drawn(rng, (kv,), 3.0) for name in ("k_bias", "v_bias")}
    weights["attn_norm"] = drawn(rng, (width,), 1.0)
    constants = {
        group: {n: drawn(rng, s, s[0] ** -0.5) for n, s in names.items()}
        for group, names in wiring.wanted().items()
    }
    sources = {
        name: drawn(rng, (2, TOKENS, n), 1.0).at[..., 3].add(8.0)
        for name, n in wiring.storage.sources.items()
    }
    return wiring, weights, constants, sources, jnp.tile(jnp.arange(TOKENS), (2, 1))


@pytest.mark.parametrize(
    "spec",
    thinned(
        with_nightly(
            SPECS,
            [
                "xquant:bits=4,group=32,latent=false",
                "xquant_cl:bits=4,group=32,base=0,protected=1,latent=true,space=residual",
            ],
        ),
        2,
    ),
)
def test_both_orders_agree(spec):
    """Each order rounds a product of N numbers and a sum of S; both bounded by (N + S) eps times
    the sum of absolute values, which needs no knowledge of the order of additions."""
    wiring, weights, constants, sources, positions = layer_of(spec)
    q = drawn(np.random.default_rng(1), (2, 3, CONFIG.num_heads, CONFIG.head_dim), 1.0)
    mask = jnp.broadcast_to(
        jnp.arange(TOKENS)[None, None] < jnp.array([TOKENS, 7])[:, None, None], (2, 3, TOKENS)
    )
    k, v = wiring.maps.expand(weights, constants, sources, positions)
    wanted = segment_attention(q, k, v, mask)
    shared = wiring.fast.shared
    stored = shared.read(weights, constants, {}, sources)

    def read(j, carry):
        return (k, stored[:, :, None], mask, carry)

    found, _ = blockwise_attention(
        q, CONFIG.num_kv_heads, read, jnp.int32(0), jnp.int32(1), None, shared.width
    )
    got = shared.finish(weights, constants, found.out)
    sizes = jnp.abs(stored).max((0, 1)) @ jnp.abs(constants.get("v", {}).get("up", weights["v"]))
    bound = (
        (shared.width + TOKENS) * 2.0**-24 * 2 * float((sizes + jnp.abs(weights["v_bias"])).max())
    )
    np.testing.assert_allclose(got, wanted.out, atol=bound, rtol=0)
    np.testing.assert_array_equal(found.lse, wanted.lse)
    assert float(jnp.abs(wanted.out).max()) > 1000 * bound


def test_a_bias_adds_nothing_for_rows_that_saw_nothing():
    wiring, weights, constants, _, _ = layer_of(SPECS[0])
    shape = (1, 1, CONFIG.num_heads)
    empty = wiring.fast.shared.finish(
        weights, constants, jnp.zeros((*shape, wiring.fast.shared.width))
    )
    assert float(jnp.abs(empty).max()) > 1
    body = Partial(empty, jnp.full(shape, -jnp.inf))
    exact = Partial(jnp.ones((*shape, CONFIG.head_dim)), jnp.zeros(shape))
    np.testing.assert_array_equal(merge(body, exact), exact.out)
    np.testing.assert_array_equal(merge(body, body), 0)


@pytest.mark.parametrize(
    ("spec", "kv_heads", "most"), [("xquant:latent=true", 8, 36), ("xquant:latent=false", 32, 132)]
)
def test_the_order_changes_where_it_costs_as_much(spec, kv_heads, most):
    """Llama-3.1-8B and Llama-2-7B: T H N < N KD + T H D."""
    config = dataclasses.replace(
        CONFIG, width=4096, num_heads=32, num_kv_heads=kv_heads, head_dim=128
    )
    shared = parse(spec).layer.build(config).fast.shared
    cost = lambda t: t * 32 * shared.width, lambda t: shared.width * config.kv_width + t * 32 * 128
    assert shared.most == most
    assert cost[0](most) < cost[1](most)
    assert cost[0](most + 1) >= cost[1](most + 1)
