"""Methods whose layers, or keys and values, are calibrated in different ways: each part as if it
were alone."""

import functools

import jax
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.calibrate import forget, needed
from kvqjax.calibrate.parts import calibrated, divided, fitter

TOKENS = np.random.default_rng(0).integers(2, 50, (3, 72))
TABLES, MEANS = "kvquant:bits=2,sinks=1", "kivi:bits=2,window=32,sinks=1,centre=mean"
AQUA = "aqua:bits=2,backbone=token,group=32,buffer=32"


def learnt(text: str, state=None, advance=lambda done, total: None) -> kvq.Model:
    """The tiny model with what the method needs, calibrated part by part."""
    model = tiny()

    def one(part, state, advance):
        return fitter(part.fit).calibrate(model, part.method, TOKENS, state=state, advance=advance)

    return model.with_artifact(calibrated(kvq.parse(text), model.config, one, state, advance))


@functools.cache
def alone(text: str) -> kvq.Model:
    """A model that learnt one of the parts by itself."""
    return learnt(text)


def of_layer(model: kvq.Model, text: str, layer: int) -> dict:
    runs = runs_of(kvq.init_cache(model, text, 1, 64).layout)
    place = next(n for n, run in enumerate(runs) if layer < run.first + run.count)
    return jax.tree.map(lambda x: np.asarray(x)[layer - runs[place].first], model.constants[place])


def same(ours: dict, wanted: dict) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, wanted)


@pytest.mark.nightly
def test_layers_of_two_calibrations():
    text = f"{TABLES};1={MEANS.replace(',sinks=1', '')}"
    mixed, tables, means = learnt(text), alone(TABLES), alone(MEANS)
    same(of_layer(mixed, text, 0), of_layer(tables, TABLES, 0))
    same(of_layer(mixed, text, 1), of_layer(means, MEANS, 1))
    tokens = kvq.generate(mixed, [[5, 6, 7]], text, max_new_tokens=40).tokens[0]
    assert len(tokens) == 40


def test_keys_and_values_of_two_calibrations():
    text = f"k={MEANS};v={TABLES}"
    mixed, tables, means = learnt(text), alone(TABLES), alone(MEANS)
    for layer in (0, 1):
        own = of_layer(mixed, text, layer)
        same(own["k"], of_layer(means, MEANS, layer)["k"])
        same(own["v"], of_layer(tables, TABLES, layer)["v"])
    assert len(kvq.generate(mixed, [[5, 6, 7]], text, max_new_tokens=40).tokens[0]) == 40


def test_what_cannot_be_divided_is_refused_in_one_line():
    """AQUA-KV's layers reconstruct what the layer above predicts from, so their codecs cannot be
    calibrated apart."""
    with pytest.raises(
        kvq.UserError, match=r"kvqjax.calibrate.aqua and kvqjax.calibrate.kvquant at once"
    ) as error:
        kvq.calibrate.run(tiny(), f"{AQUA};1=kvquant:bits=3", "text")
    assert "\n" not in str(error.value)


@pytest.mark.nightly
def test_a_transformed_layer_joins_the_chain():
    """AQUA-KV's calibration finds the transforms of a layer of klt too, which the layer above
    predicts from."""
    text = f"{AQUA};1=klt:bits=2.5,values=alone"
    ready = learnt(text)
    assert set(of_layer(ready, text, 1)["k"]) == {"mean", "into", "back"}
    assert len(kvq.generate(ready, [[5, 6, 7]], text, max_new_tokens=40).tokens[0]) == 40


def test_fits_that_cover_others_take_their_layers():
    config = tiny().config

    def modules(text):
        return [fit.module.rpartition(".")[2] for fit in needed(kvq.parse(text), config)]

    assert modules("oscar:centre=mean;1=kivi:centre=mean") == ["rotation"]
    assert modules("xquant:latent=true;1=kvquant:bits=2") == ["xquant", "kvquant"]
    (part,) = divided(kvq.parse(TABLES), config)
    assert part.method == kvq.parse(TABLES)


def test_a_stopped_calibration_of_parts_goes_on(tmp_path):
    text, state, told = (
        f"{TABLES};1=kivi:bits=2,window=32,centre=mean",
        tmp_path / "a.state.npz",
        [],
    )

    def stop(done, total):
        told.append((done, total))
        if done > total * 3 // 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learnt(text, state, stop)
    stopped, told = len(told), []
    again = learnt(text, state, lambda done, total: told.append((done, total)))
    assert len(told) < stopped
    assert told[-1] == (2000, 2000)
    jax.tree.map(np.testing.assert_array_equal, again.constants, learnt(text).constants)
    assert len(list(tmp_path.iterdir())) == 2
    forget(state)
    assert not list(tmp_path.iterdir())
