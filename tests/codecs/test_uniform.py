"""The uniform codec: the published codes exactly, and no bias from rounding scales and minima."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned

from kvqjax.codecs import Exact, Uniform, bits_per_value
from kvqjax.codecs.uniform import round_toward

GOLDEN = Path(__file__).parents[1] / "data"
# The vectors' source, checked too where a copy of it lies beside the repository.
SOURCE = Path(__file__).resolve().parents[3] / "shared" / "golden" / "kivi_codec_fp32.npz"
FILES = [GOLDEN / "golden_kivi_codec.npz", *([SOURCE] if SOURCE.exists() else [])]


def rows(x):
    """[1, H, T, D] of the golden files to [T, H*D]."""
    return jnp.asarray(x[0].transpose(1, 0, 2).reshape(x.shape[2], -1))


@pytest.mark.smoke
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", thinned([32, 64], 2))
@pytest.mark.parametrize(("source", "along"), [("k", "tokens"), ("v", "channels")])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_codes_and_parameters_equal_the_published_ones(bits, group, source, along, file):
    golden = np.load(file)
    codec = Uniform(bits=bits, along=along, group=group, dtype="float32").build(128)
    x = rows(golden[source])
    tile = codec.encode({}, x)
    name = f"{source}_b{bits}_g{group}"
    np.testing.assert_array_equal(tile["codes"], rows(golden[f"{name}_codes"]))
    scale, low = golden[f"{name}_scale"][0], golden[f"{name}_min"][0]
    # [H,D,T/G] -> [T/G,H*D]; [H,T,D/G] -> [H*D/G,T]
    order = (2, 0, 1) if source == "k" else (0, 2, 1)
    shape = tile["scale"].shape
    # XLA divides by a constant by multiplying with its reciprocal: one unit in the last place, and
    # no code changes.
    np.testing.assert_allclose(tile["scale"], scale.transpose(order).reshape(shape), rtol=2**-22)
    np.testing.assert_array_equal(tile["low"], low.transpose(order).reshape(shape))
    reach = float(jnp.abs(tile["scale"]).max()) * (2**bits - 1)
    assert (
        float(jnp.abs(codec.decode({}, tile) - x).max())
        <= float(tile["scale"].max()) / 2 + 1e-6 * reach
    )


def test_half_way_codes_round_to_even_and_constant_groups_are_exact():
    golden = np.load(GOLDEN / "golden_kivi_rounding.npz")
    codec = Uniform(bits=2, along="tokens", group=32, dtype="float32").build(8)
    np.testing.assert_array_equal(
        codec.encode({}, rows(golden["round_x"]))["codes"], rows(golden["round_codes"])
    )
    tile = codec.encode({}, rows(golden["const_x"]))
    np.testing.assert_array_equal(
        codec.decode({}, tile)[:, [3, 5]], rows(golden["const_deq"])[:, [3, 5]]
    )


@pytest.mark.parametrize("along", thinned(["tokens", "channels"], 2))
def test_large_offset_costs_range_not_bias(along):
    """Keys at 200 +- 1 (the Qwen2.5 case): bf16 has steps of 1 there. Rounding minima after
    encoding cost 15 times the error; encoding against the stored minimum must stay below twice the
    error of float32 parameters."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(200 + rng.uniform(-1, 1, (128, 64)), jnp.float32)

    def error(dtype):
        codec = Uniform(bits=4, along=along, group=32, dtype=dtype).build(64)
        return float(((codec.decode({}, codec.encode({}, x)) - x) ** 2).mean())

    # The range grows by at most 1 below and is 2: (3/2)^2, and a little for rounding up.
    assert error("bfloat16") < 2.6 * error("float32")


@pytest.mark.parametrize("bits", thinned([1, 2, 3, 4, 5, 6, 8], 2))
@pytest.mark.parametrize("along", ["tokens", "channels"])
def test_error_is_at_most_half_a_stored_step(bits, along):
    rng = np.random.default_rng(bits)
    x = rng.normal(size=(64, 64)) + rng.normal(size=(1, 64)) * 5
    x[3, 7] = 80.0
    x[:, 9] = 0.0
    codec = Uniform(bits=bits, along=along, group=32).build(64)
    x = jnp.asarray(x, jnp.float32)
    tile = codec.encode({}, x)
    step = tile["scale"].astype(jnp.float32)
    step = jnp.repeat(step, 32, 0) if along == "tokens" else jnp.repeat(step.T, 32, 1)
    assert bool((jnp.abs(codec.decode({}, tile) - x) <= step * 0.5 * (1 + 2**-8) + 1e-6).all())


def test_rounding_is_directed():
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000) * 100, jnp.float32)
    down, up = (round_toward(x, "bfloat16", up=flag).astype(jnp.float32) for flag in (False, True))
    assert bool((down <= x).all())
    assert bool((up >= x).all())
    assert bool((up - down <= jnp.abs(x) * 2**-7).all())


def test_bits_count_codes_and_parameters():
    assert bits_per_value(Uniform(bits=2, along="tokens", group=32).build(128)) == 3.0
    assert bits_per_value(Uniform(bits=4, along="channels", group=128).build(256)) == 4.25
    assert bits_per_value(Exact().build(8)._replace(fields={})) == 0


def test_impossible_specs_are_refused():
    with pytest.raises(ValueError, match="bits=7"):
        Uniform(bits=7, along="tokens")
    with pytest.raises(ValueError, match="group=48"):
        Uniform(bits=2, along="tokens", group=48)
    with pytest.raises(ValueError, match="does not divide"):
        Uniform(bits=2, along="channels", group=32).build(48)


@pytest.mark.parametrize(("dtype", "exact"), [("bfloat16", True), ("float32", False)])
def test_the_form_for_tpus_gives_the_same_bits(dtype, exact, monkeypatch):
    """Products with scales that bfloat16 does not hold would round on a TPU: those have no form of
    their own."""
    codec = Uniform(bits=3, along="channels", group=32, dtype=dtype).build(96)
    tile = codec.encode(
        {}, jnp.asarray(np.random.default_rng(0).normal(size=(64, 96)), jnp.float32)
    )
    wanted, used = codec.decode({}, tile), []

    def of_tpus(*given, default, tpu=None, **_):
        used.append(tpu is not None)
        return (tpu or default)(*given)

    monkeypatch.setattr(jax.lax, "platform_dependent", of_tpus)
    np.testing.assert_array_equal(codec.decode({}, tile), wanted)
    assert used == [exact]
