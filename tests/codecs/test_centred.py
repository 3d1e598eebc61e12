"""Keys without their mean: a calibrated one, which costs no bit, or that of a block of tokens; and
what it is for."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from tiny import tiny

import kvqjax as kvq
from kvqjax.calibrate import centre, needed
from kvqjax.calibrate.activations import activations
from kvqjax.codecs import BlockCentred, Centred, Uniform, bits_per_value
from kvqjax.codecs.higgs import Higgs

TOKENS = np.random.default_rng(0).integers(2, 50, (3, 200))
RNG = np.random.default_rng(1)
# Four channels as Qwen2's bias makes them.
OFFSET = np.where(np.arange(64) % 16 == 0, 200.0, 0.0).astype(np.float32)
KEYS = jnp.asarray(RNG.normal(size=(128, 64)) + OFFSET, jnp.float32)


def error(codec, constants) -> float:
    return float(((codec.decode(constants, codec.encode(constants, KEYS)) - KEYS) ** 2).mean())


@pytest.mark.parametrize(
    "inner",
    thinned(
        [
            Uniform(bits=3, along="channels", group=32),
            Uniform(bits=3, along="tokens"),
            pytest.param(Higgs(bits=3, group=64), marks=pytest.mark.nightly),
        ],
        2,
    ),
    ids=["per token", "per channel", "higgs"],
)
def test_equals_the_inner_codec_on_centred_keys_at_the_same_bits(inner):
    codec, plain = Centred(inner=inner).build(64), inner.build(64)
    assert codec.needs == {"mean": (64,)}
    assert bits_per_value(codec) == bits_per_value(plain)
    constants = {"mean": jnp.asarray(OFFSET)}
    tile, wanted = codec.encode(constants, KEYS), plain.encode({}, KEYS - OFFSET[None])
    jax.tree.map(np.testing.assert_array_equal, tile, wanted)
    np.testing.assert_array_equal(
        codec.decode(constants, tile), plain.decode({}, wanted) + OFFSET[None]
    )


@pytest.mark.parametrize(
    "inner", thinned([Uniform(bits=3, along="channels", group=32), Higgs(bits=3, group=64)], 2)
)
def test_offsets_of_200_no_longer_cost_anything(inner):
    """Per token the offset is the range: without the mean the error is that of a range of 200, with
    it that of the spread. The bound is the plain codec's on keys without offsets, with 5 % for the
    bits of float32 that 200 takes."""
    flat = inner.build(64)
    spread = float(
        (
            (flat.decode({}, flat.encode({}, KEYS - OFFSET[None])) - (KEYS - OFFSET[None])) ** 2
        ).mean()
    )
    codec = Centred(inner=inner).build(64)
    assert error(codec, {"mean": jnp.asarray(OFFSET)}) <= 1.05 * spread
    assert error(flat, {}) > 20 * spread
    assert error(codec, {"mean": jnp.zeros(64)}) == error(flat, {})


def test_a_block_is_coded_as_what_its_stored_mean_leaves():
    """Two blocks with means of their own, decoded together and one by one; 16 bits for a block's
    128 numbers."""
    inner = Higgs(bits=3, group=64).build(64)
    codec = BlockCentred(inner=Higgs(bits=3, group=64)).build(64)
    keys = jnp.concatenate([KEYS, KEYS[::-1] - 300])
    tile = codec.encode({}, keys)
    mean = np.asarray(keys).reshape(2, 128, 64).mean(1).astype(jnp.bfloat16)
    np.testing.assert_allclose(tile["mean"].astype(np.float32), mean.astype(np.float32), rtol=2**-7)
    taken = jnp.repeat(tile["mean"].astype(jnp.float32), 128, 0)
    wanted = inner.encode({}, keys - taken)
    for name, x in wanted.items():
        np.testing.assert_array_equal(tile[name], x)
    np.testing.assert_array_equal(codec.decode({}, tile), inner.decode({}, wanted) + taken)
    second = {name: codec.encode({}, keys[128:])[name] for name in tile}
    np.testing.assert_array_equal(codec.decode({}, second), codec.decode({}, tile)[128:])
    assert bits_per_value(codec) == bits_per_value(inner) + 16 / 128


def test_a_block_of_offset_keys_costs_what_the_spread_does():
    """The mean is as good as a calibrated one but for its rounding, 2^-9 of 200 at most, which the
    codes take in."""
    flat, codec = (
        Higgs(bits=3, group=64).build(64),
        BlockCentred(inner=Higgs(bits=3, group=64)).build(64),
    )
    spread = float(
        (
            (flat.decode({}, flat.encode({}, KEYS - OFFSET[None])) - (KEYS - OFFSET[None])) ** 2
        ).mean()
    )
    assert error(codec, {}) <= 1.1 * spread
    assert error(flat, {}) > 20 * spread


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("higgs:centre=block,rope=post", "wanted rope=pre"),
        ("kivi:centre=block", "known: auto, none, mean"),
        ("higgs:centre=block,buffer=32", "128"),
    ],
)
def test_means_of_blocks_are_refused_where_there_are_none(text, line):
    with pytest.raises(kvq.UserError, match=line):
        kvq.init_cache(tiny(), kvq.parse(text), 1, 256)


@pytest.mark.parametrize("rope", ["pre", "post"])
def test_calibrated_mean_is_that_of_the_keys_as_cached(rope):
    model, method = tiny(), kvq.parse(f"higgs:rope={rope},group=head,buffer=32,centre=mean")
    artifact = centre.calibrate(model, method, TOKENS)
    keys = activations(
        model.params, jnp.asarray(TOKENS, jnp.int32), model.config, rope=rope, gradients=False
    ).k
    wanted = np.asarray(keys, np.float64)[:, :, 4:].mean((1, 2))
    np.testing.assert_allclose(artifact.constants[0]["k"]["mean"], wanted, atol=1e-5)


@pytest.mark.parametrize(
    "text", ["kivi:bits=2,window=32,centre=mean", "uniform:bits=3,group=32,centre=mean"]
)
def test_spec_strings_read_back_and_constants_are_asked_for(text):
    method = kvq.parse(text)
    assert str(method) == text
    assert kvq.parse(str(method)) == method
    with pytest.raises(kvq.UserError, match=r"needs the calibrated constant k\.mean"):
        kvq.forward(
            tiny(),
            jnp.zeros((1, 4), jnp.int32),
            jnp.asarray([4]),
            kvq.init_cache(tiny(), method, 1, 64),
        )


def test_an_unknown_centre_is_refused():
    with pytest.raises(kvq.UserError, match="centre='median'; known: auto, none, mean, block"):
        kvq.parse("higgs:centre=median")


def test_calibrate_finds_what_is_asked_for(tmp_path):
    """The dispatcher takes means from methods that need no more; a stopped calibration goes on to
    the same means."""
    model, method = tiny(), kvq.parse("kivi:bits=2,window=32,sinks=2,centre=mean;0=exact")

    def modules(text):
        return [fit.module for fit in needed(kvq.parse(text), model.config)]

    assert modules(str(method)) == ["kvqjax.calibrate.centre"]
    assert modules("kivi:bits=2") == []
    assert modules("aqua:centre=mean,group=32") == ["kvqjax.calibrate.aqua"]
    whole = centre.calibrate(model, method, TOKENS)
    assert [set(c) for c in whole.constants] == [set(), {"k"}]

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        centre.calibrate(model, method, TOKENS, state=tmp_path / "s.npz", advance=stop)
    again = centre.calibrate(model, method, TOKENS, state=tmp_path / "s.npz")
    jax.tree.map(np.testing.assert_array_equal, again.constants, whole.constants)


def test_the_dispatcher_calibrates_means_from_text():
    model, method = kvq.load("recall"), kvq.parse("uniform:bits=3,centre=mean")
    artifact = kvq.calibrate.run(model, method, "qx47,rt05,ab31," * 20, count=2, length=64)
    assert artifact.constants[0]["k"]["mean"].shape == (2, 128)
    assert artifact.about["sequences"] == 2
    with pytest.raises(kvq.UserError, match="needs no calibration"):
        kvq.calibrate.run(model, kvq.kivi(), "text")


@pytest.mark.nightly
def test_aqua_takes_the_mean_off_its_first_layer():
    """Keys of the Qwen2 shape, whose bias is dozens of times their spread, through AQUA-KV's first
    layer."""
    from kvqjax.calibrate.aqua import calibrate

    model = kvq.load(Path(__file__).parents[1] / "assets_models" / "qwen2")
    tokens = np.random.default_rng(2).integers(2, 64, (2, 132))
    errors = {}
    for name in ("none", "mean"):
        artifact = calibrate(model, kvq.parse(f"aqua:centre={name}"), tokens)
        errors[name] = [
            row["reconstruction_mse"] for row in artifact.about["report"] if row["source"] == "k"
        ]
        groups = [set(run.get("k", {})) for run in artifact.constants]
        assert groups == [{"mean"} if name == "mean" else set(), {"weight", "bias"}]
    assert errors["mean"][0] < errors["none"][0] / 20
    assert dataclasses.replace(artifact, method=kvq.parse("aqua:centre=mean")) == artifact
