"""Attention on CommVQ codes: scores of decoded keys and sums of bits equal what the released code
computes."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax import commvq
from kvqjax.codecs.commvq_keys import CommVQKeys
from kvqjax.model.config import ModelConfig, RopeConfig
from kvqjax.model.rope import inverse_frequencies, rotate

DATA = Path(__file__).parents[1] / "data"


def model(heads, kv_heads, head_dim, rope):
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    return ModelConfig(vocab_size=8, width=8, mlp_width=8, num_layers=1, rope=rope, **sizes)


def test_scores_of_decoded_keys_equal_the_published_ones():
    golden = dict(np.load(DATA / "golden_commvq_keys.npz"))
    theta = np.moveaxis(golden["theta"], 0, 1)
    book = jnp.asarray(np.concatenate([theta[:, :, 0::2], theta[:, :, 1::2]], -1))
    codes = golden["codes"].astype(int)  # [R, head, n]
    pairs = jnp.asarray(np.stack([codes // 64, codes % 64], 1).reshape(-1, 48).T, jnp.uint32)[None]
    q = golden["q"]  # [B, H, D]
    config = model(
        q.shape[1],
        2,
        q.shape[2],
        RopeConfig(theta=float(golden["rope_inv_freq"][1]) ** (-q.shape[2] / 2)),
    )
    assert np.allclose(inverse_frequencies(config), golden["rope_inv_freq"], rtol=1e-5)
    codec = CommVQKeys(head_dim=q.shape[2], rounds=book.shape[0], dtype="float32").build(
        config.kv_width
    )
    stored = {"codes": pairs, "prescale": jnp.asarray(golden["prescale"][..., 0])[:, None]}
    keys = codec.decode({"codebook": book}, stored).reshape(1, 48, 2, -1)
    keys = np.repeat(
        np.asarray(rotate(keys, jnp.arange(48)[None], config), np.float64), q.shape[1] // 2, axis=2
    )
    got = np.einsum("bhd,bnhd->bhn", q.astype(np.float64), keys) / q.shape[2] ** 0.5
    assert np.abs(got - golden["scores_fp64"]).max() <= 1e-5 * np.abs(golden["scores_fp64"]).max()


@pytest.mark.parametrize("bits", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_reordered_value_product_equals_the_published_output(bits):
    golden = dict(np.load(DATA / f"golden_commvq_values_{bits}bit.npz"))
    attn = jnp.asarray(golden["attn"])
    length = np.linalg.norm(golden["bits"].astype(np.float64) @ golden["codebook"], axis=-1)
    gain = (golden["prescale"][..., 0] + 1e-6) / (length + 1e-6)
    payload = {
        "v": {"bits": jnp.asarray(golden["bits"]), "gain": jnp.asarray(gain, jnp.float32)[:, None]}
    }
    constants = {"v": {"codebook": jnp.asarray(golden["codebook"] * (golden["scale"] + 1e-6))}}
    config = model(4, 2, golden["v"].shape[-1] // 2, RopeConfig())
    wiring = commvq(bits=bits, rounds=1, levels=8).layer.build(config)
    assert wiring.fast.shared.width == golden["bits"].shape[-1]
    mass = jnp.einsum(
        "bhn,bni->bhi",
        attn,
        wiring.fast.shared.read({}, constants, payload, {}),
        precision="highest",
    )
    late = wiring.fast.shared.finish({}, constants, mass[:, None])[:, 0]
    decoded = jnp.repeat(
        wiring.storage.codecs["v"].decode(constants["v"], payload["v"]).reshape(1, 40, 2, -1),
        2,
        axis=2,
    )
    early = jnp.einsum("bhn,bnhd->bhd", attn, decoded, precision="highest")
    for out in (late, early):
        assert (
            np.abs(out - golden["attn_out_fp64"]).max()
            <= 1e-5 * np.abs(golden["attn_out_fp64"]).max()
        )
