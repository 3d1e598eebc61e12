"""The key bias is known from the weights: codes before RoPE are of keys without it, reads are of
keys with it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from biased import TOKENS, biased, filled, logits
from cases import _constants, thinned, with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import Cache, runs_of
from kvqjax.calibrate.aqua import calibrate, released
from kvqjax.codecs import Uniform
from kvqjax.codecs.nuq import Nuq

HIGGS = "higgs:bits=3,group=head,buffer=32"
AQUA = "aqua:bits=3,first_bits=3,group=32,buffer=32"


def logits_with(model: kvq.Model, text: str) -> np.ndarray:
    """What two more tokens get from a cache of TOKENS, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits(model, filled(model, kvq.parse(text)))


def body(cache: Cache) -> list[np.ndarray]:
    return [np.asarray(x) for run in cache.runs for x in jax.tree.leaves(run.body)]


@pytest.mark.nightly
@pytest.mark.parametrize("text", thinned([HIGGS, AQUA], 2))
def test_one_layer_stores_what_it_would_without_a_bias(text):
    """Sinks, window and words: of a model's first layer only its own bias enters the keys."""
    model, method = biased(num_layers=1), kvq.parse(text)
    layers = model.params["layers"]
    plain = model.replace(
        params=model.params | {"layers": layers | {"k_bias": jnp.zeros_like(layers["k_bias"])}}
    )
    jax.tree.map(
        np.testing.assert_array_equal, filled(model, method).runs, filled(plain, method).runs
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = filled(model, kvq.parse(text + ",centre=none"))
    assert any((a != b).any() for a, b in zip(body(filled(model, method)), body(kept), strict=True))


@pytest.mark.nightly
def test_what_is_not_encoded_is_read_exactly():
    """Bit for bit as the exact cache, though the window holds keys without their bias."""
    model = biased()
    wanted = logits(model, filled(model, kvq.parse("exact:window=128")))
    np.testing.assert_array_equal(
        logits(model, filled(model, kvq.parse("higgs:bits=3,group=head,window=128"))), wanted
    )


@pytest.mark.nightly
def test_the_bias_costs_nothing():
    """Against the exact cache; with the bias in the codes the error is of the logits' own size."""
    model = biased()
    wanted = logits(model, filled(model, kvq.exact()))
    found = {c: logits_with(model, f"{HIGGS},centre={c}") for c in ("auto", "none")}
    errors = {c: np.abs(x - wanted).mean() / np.abs(wanted).mean() for c, x in found.items()}
    assert 1.5 * errors["auto"] < errors["none"]


@pytest.mark.nightly
@pytest.mark.parametrize("text", thinned([HIGGS, AQUA], 2))
def test_a_model_without_bias_has_the_same_bits(text):
    model, methods = tiny(), [kvq.parse(f"{text},centre={c}") for c in ("auto", "none")]
    assert str(methods[0]) == text
    ready = model.replace(constants=_constants(model, methods[0]))
    auto, none = (filled(ready, method) for method in methods)
    jax.tree.map(np.testing.assert_array_equal, auto.runs, none.runs)
    np.testing.assert_array_equal(logits(ready, auto), logits(ready, none))


AFTER_ROPE = (
    "turboquant:bits=3",
    "uniform:bits=4,group=32",
    "kvarn:bits=3,group=32,sinks=3",
    "omniscale:bits=3,group=32,value_group=16,window=32",
    "oscar:bits=3,rotate=hadamard,window=32,sinks=4",
    "higgs:bits=3,rope=post,group=head,buffer=32",
)


@pytest.mark.parametrize("text", with_nightly(AFTER_ROPE, ["turboquant:bits=3"]))
def test_after_rope_the_bias_is_taken_off_too(text):
    """RoPE turns it at every token's position; a rotated body gets it rotated. The first layer's
    words are those of a model without a bias, and what is read errs less than with the bias in the
    codes."""
    model = biased(num_layers=1)
    layers = model.params["layers"]
    plain = model.replace(
        params=model.params | {"layers": layers | {"k_bias": jnp.zeros_like(layers["k_bias"])}}
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        filled(model, kvq.parse(text)).runs,
        filled(plain, kvq.parse(text)).runs,
    )
    wanted = logits(model, filled(model, kvq.exact()))
    found = {c: logits_with(model, f"{text},centre={c}") for c in ("auto", "none")}
    errors = {c: np.abs(x - wanted).mean() / np.abs(wanted).mean() for c, x in found.items()}
    assert 1.2 * errors["auto"] < errors["none"]


def test_predictors_after_rope_see_the_bias():
    assert kvq.parse("aqua:rope=post") == kvq.parse("aqua:rope=post,centre=none")


@pytest.mark.nightly
@pytest.mark.parametrize(("group", "parts"), thinned([("head", 2), ("width", 4)], 2))
def test_a_mesh_reads_the_bias_too(group, parts):
    """KV heads on devices of their own, or gathered from a projection that is split finer than the
    cache."""
    model, method = biased(num_layers=1), kvq.parse(f"higgs:bits=4,group={group},buffer=32")
    spread = kvq.shard(model, method, model=parts)

    @jax.jit
    def found(model, cache):
        cache = kvq.forward(
            model, jnp.asarray(TOKENS), jnp.asarray([TOKENS.size], jnp.int32), cache
        )[1]
        return kvq.forward(
            model, jnp.asarray([[3, 14]], jnp.int32), jnp.asarray([2], jnp.int32), cache
        )[0]

    wanted, got = (np.asarray(found(m, kvq.init_cache(m, method, 1, 128))) for m in (model, spread))
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())


def test_kernels_are_asked_for_bodies_that_they_read():
    """Bodies of keys without their bias go the general way; a channel's own range holds the bias,
    and keeps kernels."""

    def form(model, text):
        return runs_of(kvq.init_cache(model, kvq.parse(text), 1, 1024).layout)[0].wiring.fast.packed

    assert form(tiny(), HIGGS) is not None
    assert form(biased(), HIGGS) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert form(biased(), f"{HIGGS},centre=none") is not None
    for text in ("kivi_star:protected=0", "kvquant:bits=3"):
        assert form(biased(), text) is not None


@pytest.mark.parametrize(
    "codec", [Uniform(bits=3, along="tokens"), Nuq(bits=3, per="channel", datatype="int")]
)
def test_per_channel_codes_do_not_depend_on_a_bias(codec):
    """Which is why KIVI's and KVQuant's keep it. Integers, so that sums round nowhere."""
    rng = np.random.default_rng(0)
    x, b = (
        rng.integers(-8, 8, (64, 16)).astype(np.float32),
        16.0 * rng.integers(-4, 5, 16).astype(np.float32),
    )
    limits = {"upper": jnp.full(16, 8.0), "lower": jnp.full(16, -8.0)}
    moved = {name: limit + b for name, limit in limits.items()}
    built = codec.build(16)
    codes = [
        built.encode(c, jnp.asarray(y))["codes"] for c, y in ((limits, x), (moved, x + b[None]))
    ]
    np.testing.assert_array_equal(*codes)
    assert len(np.unique(codes[0])) > 4


SUFFER = (
    "uniform:bits=4,group=32,centre=none",
    "higgs:rope=post,group=head,centre=none",
    "kivi;0=uniform:group=32,centre=none",
    "kvarn:group=32,centre=none",
    "turboquant:centre=none",
    "omniscale:value_group=16,centre=none",
    "oscar:rotate=hadamard,centre=none",
)
FINE = (
    *AFTER_ROPE,
    "kivi:rotate=hadamard,value_group=16",
    "uniform:bits=8,group=32,centre=none",
    "uniform:bits=4,group=32,centre=mean",
    "kivi:bits=2",
    HIGGS,
    AQUA,
    "kvquant:bits=3",
)


@pytest.mark.parametrize("text", SUFFER)
def test_codes_after_rope_that_would_suffer_say_so(text):
    with pytest.warns(UserWarning, match=r"keys have a bias.*centre=auto.*centre=mean") as caught:
        kvq.init_cache(biased(), kvq.parse(text), 1, 64)
    lines = [str(each.message) for each in caught if "bias" in str(each.message)]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    kvq.init_cache(tiny(), kvq.parse(text), 1, 64)


@pytest.mark.parametrize("text", FINE)
def test_others_do_not(text):
    kvq.init_cache(biased(), kvq.parse(text), 1, 64)


def test_aqua_predicts_keys_without_their_bias():
    """Calibrated and read on the same footing: keys come back as well as they do of the model
    without a bias."""
    tokens = np.random.default_rng(2).integers(2, 50, (2, 132))
    errors = {}
    for size in (0.0, 20.0):
        artifact = calibrate(biased(size), kvq.parse("aqua:bits=3,first_bits=3,group=32"), tokens)
        errors[size] = [
            row["reconstruction_mse"] for row in artifact.about["report"] if row["source"] == "k"
        ]
    # The first layer's keys are the same; those of the second are not, but predicted none the worse
    # than HIGGS alone codes keys without a bias, 0.03 of their energy at 3 bits.
    assert errors[20.0][0] == pytest.approx(errors[0.0][0], rel=1e-3)
    assert max(errors[20.0]) < 0.03


def test_released_predictors_are_of_keys_with_their_bias():
    with pytest.raises(kvq.UserError, match="centre=none"):
        released({}, biased(), kvq.parse(AQUA))
