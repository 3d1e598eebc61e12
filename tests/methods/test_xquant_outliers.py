"""The first latent collects the outliers of inputs that lie along W_k's top singular vector (arXiv
2508.10395, B)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.calibrate.xquant import latent_maps, signed_svd
from kvqjax.codecs import Uniform
from kvqjax.codecs.outlier_channel import OutlierChannels

WIDTH, KV, TOKENS = 256, 64, 512


@pytest.fixture(scope="module")
def aligned():
    """Inputs with a common direction, and a key weight whose top singular vector is that
    direction."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal(WIDTH)
    common /= np.linalg.norm(common)
    x = (
        0.5 * rng.standard_normal((TOKENS, WIDTH))
        + (5.6 + 2.0 * rng.standard_normal((TOKENS, 1))) * common
    )
    towards = rng.standard_normal(KV)
    towards[11] = -5.0
    weight = 0.4 * rng.standard_normal((WIDTH, KV)) / np.sqrt(WIDTH) + 1.5 * np.outer(
        common, towards
    ) / np.sqrt(KV)
    return x.astype(np.float32), weight.astype(np.float32)


def error(spec, latents, up):
    codec = spec.build(latents.shape[1])
    kept = codec.decode({}, codec.encode({}, jnp.asarray(latents)))
    return float(np.linalg.norm((kept - latents) @ up) / np.linalg.norm(latents @ up))


def test_first_latent_is_the_outlier_and_wants_its_own_scale(aligned):
    x, weight = aligned
    maps = latent_maps(weight)
    latents = x @ maps["down"]
    size = np.abs(latents).mean(0)
    assert size[0] > 10 * size[1:].max()
    per_channel, per_token = (
        Uniform(bits=2, along=along, group=64) for along in ("tokens", "channels")
    )
    channel, token = (error(spec, latents, maps["up"]) for spec in (per_channel, per_token))
    first = error(OutlierChannels(channels=(0,), inner=per_channel), latents, maps["up"])
    assert channel < 0.8 * token
    assert first < 0.5 * channel  # Table B.1's direction: at 2 bits the exact first channel helps
    rotated = error(OutlierChannels(channels=(5,), inner=per_channel), latents, maps["up"])
    assert rotated > 0.9 * channel  # another channel does not


@pytest.mark.parametrize("bits", [2, 4])
def test_gain_shrinks_with_more_bits(aligned, bits):
    """Table B.1: nothing to gain at 4 bits."""
    x, weight = aligned
    maps = latent_maps(weight)
    latents = x @ maps["down"]
    inner = Uniform(bits=bits, along="tokens", group=64)
    gain = error(inner, latents, maps["up"]) - error(
        OutlierChannels(channels=(0,), inner=inner), latents, maps["up"]
    )
    assert gain > 0.05 if bits == 2 else gain < 0.05


def test_svd_is_economy_float64_and_signed():
    weight = np.random.default_rng(2).standard_normal((96, 24)).astype(np.float32)
    u, s, bt = signed_svd(weight)
    assert (u.dtype, u.shape, bt.shape) == (np.float64, (96, 24), (24, 24))
    np.testing.assert_allclose((u * s) @ bt, weight, atol=1e-12)
    np.testing.assert_allclose(u.T @ u, np.eye(24), atol=1e-12)
    assert (u[np.abs(u).argmax(0), np.arange(24)] > 0).all()
    flipped = signed_svd(-weight)  # the sign goes to B, never to the latents
    np.testing.assert_allclose(flipped[0], u, atol=1e-9)
    np.testing.assert_allclose(flipped[2], -bt, atol=1e-9)


def test_sign_flips_of_singular_vectors_leave_keys_unchanged():
    """A flipped latent is negated; per-channel codes mirror, and scale and zero with them."""
    rng = np.random.default_rng(3)
    latents = jnp.asarray(rng.standard_normal((64, 8)) + 2.0, jnp.float32)
    up = rng.standard_normal((8, 8)).astype(np.float32)
    signs = np.array([1, -1, 1, 1, -1, 1, -1, 1], np.float32)
    codec = Uniform(bits=4, along="tokens", group=64, dtype="float32").build(8)
    decoded = [
        codec.decode({}, codec.encode({}, latents * s[None])) @ (up * s[:, None])
        for s in (signs**2, signs)
    ]
    np.testing.assert_allclose(*decoded, atol=1e-5)


def test_kept_channels_are_exact_and_do_not_widen_groups():
    x = jax.random.normal(jax.random.key(0), (64, 16)).at[:, 3].mul(1000.0)
    for along, group in (("channels", 8), ("tokens", 32)):
        inner = Uniform(bits=4, along=along, group=group)
        spec = OutlierChannels(channels=(3,), inner=inner, dtype="float32")
        codec = spec.build(16)
        out = codec.decode({}, codec.encode({}, x))
        np.testing.assert_array_equal(out[:, 3], x[:, 3])
        others = jnp.delete(jnp.abs(out - x), 3, axis=1)
        assert float(others.max()) < 6.0 / 15  # half a step of a group's range of at most 12
        batched = jax.tree.map(lambda a: jnp.stack([a, a]), codec.encode({}, x))
        np.testing.assert_array_equal(codec.decode({}, batched)[1], out)
    for channels in ((), (16,), tuple(range(16))):
        with pytest.raises(ValueError, match="channels="):
            OutlierChannels(channels=channels, inner=inner).build(16)
