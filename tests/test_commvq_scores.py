"""Attention on CommVQ codes: two orders of the same sum, equal to decoding, rotating and multiplying."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.codecs.commvq_keys import CommVQKeys
from kvqjax.config import ModelConfig, RopeConfig
from kvqjax.methods import commvq
from kvqjax.pallas_kernels.commvq_scores import commuted_scores, fused_scores, score_operations
from kvqjax.rope import inverse_frequencies, rotate

DATA = Path(__file__).parent / "data"


def model(heads, kv_heads, head_dim, rope):
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    return ModelConfig(vocab_size=8, width=8, mlp_width=8, num_layers=1, rope=rope, **sizes)


@pytest.mark.parametrize("scores", [commuted_scores, fused_scores])
def test_scores_equal_the_published_ones(scores):
    golden = dict(np.load(DATA / "golden_commvq_keys.npz"))
    theta = np.moveaxis(golden["theta"], 0, 1)
    book = jnp.asarray(np.concatenate([theta[:, :, 0::2], theta[:, :, 1::2]], -1))
    codes = golden["codes"].astype(int)  # [R, head, n]
    codes = jnp.asarray(np.stack([codes // 64, codes % 64], 1).reshape(-1, 48).T)[None]
    tables = (codes, jnp.asarray(golden["prescale"][..., 0]), jnp.arange(48)[None])
    frequencies = jnp.asarray(golden["rope_inv_freq"], jnp.float32)
    got = jax.jit(functools.partial(scores, kv_heads=2))(jnp.asarray(golden["q"]), book, *tables, frequencies)
    assert np.abs(got - golden["scores_fp64"]).max() <= 1e-5 * np.abs(golden["scores_fp64"]).max()


@pytest.mark.parametrize(("heads", "kv_heads", "group"), [(2, 2, 8), (8, 2, 8), (8, 1, 4)], ids=["MHA", "GQA4", "GQA8"])
def test_commuted_and_fused_scores_equal_decode_rope_dot(heads, kv_heads, group):
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.2)
    config = model(heads, kv_heads, 16, yarn)
    codec = CommVQKeys(head_dim=16, rounds=3, levels=8, group=group).build(config.kv_width)
    rng = np.random.default_rng(heads)
    book = jnp.asarray(rng.normal(size=codec.needs["codebook"]) / 4, jnp.float32)
    k = jnp.asarray(rng.normal(size=(2, 24, config.kv_width)) * 9 + 2, jnp.float32)
    q = jnp.asarray(rng.normal(size=(2, heads, 16)), jnp.float32)
    positions = jnp.asarray(np.stack([np.arange(24), np.arange(24) + 1000]))
    options = {"kv_heads": kv_heads, "factor": config.rope.attention_factor}

    @jax.jit
    def run(book, k, q, positions):
        tiles = jax.vmap(lambda x: codec.encode({"codebook": book}, x))(k)
        decoded = codec.decode({"codebook": book}, tiles).reshape(2, 24, kv_heads, 16)
        tables = (book, tiles["codes"], tiles["prescale"][:, 0].astype(jnp.float32), positions)
        frequencies = jnp.asarray(inverse_frequencies(config))
        found = [scores(q, *tables, frequencies, **options) for scores in (commuted_scores, fused_scores)]
        return found, rotate(decoded, positions, config)

    found, keys = run(book, k, q, positions)
    rotated = np.repeat(np.asarray(keys, np.float64), heads // kv_heads, axis=2)
    exact = np.einsum("bhd,bnhd->bhn", np.asarray(q, np.float64), rotated) / 4
    for got in found:
        # Relative to the largest score: float32 sums of 3 rounds and 16 channels.
        assert np.abs(got - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("bits", [1, 2])
def test_the_reordered_value_product_equals_the_published_output(bits):
    golden = dict(np.load(DATA / f"golden_commvq_values_{bits}bit.npz"))
    attn = jnp.asarray(golden["attn"])
    length = np.linalg.norm(golden["bits"].astype(np.float64) @ golden["codebook"], axis=-1)
    gain = (golden["prescale"][..., 0] + 1e-6) / (length + 1e-6)
    payload = {"v": {"bits": jnp.asarray(golden["bits"]), "gain": jnp.asarray(gain, jnp.float32)[:, None]}}
    constants = {"v": {"codebook": jnp.asarray(golden["codebook"] * (golden["scale"] + 1e-6))}}
    config = model(4, 2, golden["v"].shape[-1] // 2, RopeConfig())
    wiring = commvq(bits=bits, rounds=1, levels=8).layer.build(config)
    assert wiring.shared.width == golden["bits"].shape[-1]
    mass = jnp.einsum("bhn,bni->bhi", attn, wiring.shared.read({}, constants, payload, {}), precision="highest")
    late = wiring.shared.finish({}, constants, mass[:, None])[:, 0]
    decoded = jnp.repeat(wiring.codecs["v"].decode(constants["v"], payload["v"]).reshape(1, 40, 2, -1), 2, axis=2)
    early = jnp.einsum("bhn,bnhd->bhd", attn, decoded, precision="highest")
    for out in (late, early):
        assert np.abs(out - golden["attn_out_fp64"]).max() <= 1e-5 * np.abs(golden["attn_out_fp64"]).max()


def test_grouped_queries_make_the_commuted_form_gather_more():
    """One KV head's gathers serve all its query heads in the fused form; the commuted form pays them per query head."""
    for heads, ratio in ((8, 1), (32, 4), (64, 8)):
        counts = score_operations(heads=heads, kv_heads=8, head_dim=128, rounds=11, levels=64)
        assert counts["commuted"]["gathers"] == ratio * counts["fused"]["gathers"]
    # The fact sheet's table cost at 32 heads and 11 rounds: 1.4 M complex products, 4 real ones each.
    counts = score_operations(heads=32, kv_heads=8, head_dim=128, rounds=11, levels=64)
    assert counts["commuted"]["per_step"] == 32 * 64 * 11 * 64 * 6
