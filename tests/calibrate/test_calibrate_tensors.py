"""Calibration from captured keys and values: the constants that the same numbers give inside our
own model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax.calibrate import aqua, centre, commvq, klt, kvquant, layerwise, needed
from kvqjax.calibrate.activations import activations
from kvqjax.calibrate.commvq_em import EMSettings
from kvqjax.calibrate.commvq_values import ValueSettings
from kvqjax.model.rope import rotate, unrotated

TOKENS = np.random.default_rng(0).integers(2, 50, (3, 72))
COMMVQ = "commvq:bits=1,rounds=2,levels=8,hidden=16,window=32,unit=32"
QUICK = commvq.Recipe(
    keys=EMSettings(steps=4, batch=64), values=ValueSettings(steps=20, warmup=2), key_tokens=128
)
CENTRED = "higgs:bits=2,rope=pre,group=head,buffer=32,sinks=0,centre=mean"
AQUA = "aqua:bits=2,backbone=token,group=32,buffer=32"
AQUA_KLT = "aqua:bits=2,backbone=klt,buffer=32"


@pytest.fixture(scope="module")
def captured():
    """Keys before RoPE, values and the slopes of the loss, [L, N, T, K, D], as an engineer's hooks
    would keep them."""
    model, parts = tiny(), []
    for row in TOKENS:
        parts.append(activations(model.params, jnp.asarray(row[None], jnp.int32), model.config))
    k, v, *fisher = (
        np.concatenate(x, 1).reshape(2, *TOKENS.shape, 2, 16) for x in zip(*parts, strict=True)
    )
    slopes = {"key_gradients": np.sqrt(fisher[0]), "value_gradients": np.sqrt(fisher[1])}
    return {"keys": k, "values": v}, slopes


def agree(artifact, wanted, **bound) -> None:
    assert artifact.method == wanted.method
    assert jax.tree.structure(artifact.constants) == jax.tree.structure(wanted.constants)
    for a, b in zip(
        jax.tree.leaves(artifact.constants), jax.tree.leaves(wanted.constants), strict=True
    ):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **bound)


@pytest.mark.parametrize(
    "spec", thinned(["kvquant:bits=2,sinks=2", "kvquant:bits=2;0=exact", "kvquant;0=exact"], 3)
)
@pytest.mark.parametrize("gradients", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_kvquant(captured, spec, gradients):
    tensors, slopes = captured
    model, method = tiny(), kvq.parse(spec)
    artifact = kvq.calibrate.from_tensors(
        method, model.config, **tensors, **(slopes if gradients else {})
    )
    objective = "fisher_s2" if gradients else "none"
    wanted = kvquant.calibrate(model, method, TOKENS, recipe=kvquant.Recipe(objective=objective))
    # Slopes come back from their squares: the last bit of the weights.
    agree(artifact, wanted, rtol=1e-4 if gradients else 0, atol=1e-5 if gradients else 0)


@pytest.mark.parametrize(
    "spec", ["higgs:rope=pre,group=head,buffer=32,centre=mean", "kivi:bits=2,window=32,centre=mean"]
)
def test_means_of_keys_as_they_are_cached(captured, spec):
    model, method = tiny(), kvq.parse(spec)
    artifact = kvq.calibrate.from_tensors(spec, model.config, **captured[0])
    # Keys after RoPE are rotated here by another program than in the model.
    agree(artifact, centre.calibrate(model, method, TOKENS), atol=0 if "pre" in spec else 1e-6)


def test_aqua(captured):
    model, method = tiny(), kvq.parse(AQUA)
    wanted = aqua.calibrate(model, method, TOKENS)
    artifact = kvq.calibrate.from_tensors(method, model.config, **captured[0])
    # The model's keys come from another program; the fit's ridge bounds what that does to the
    # predictors.
    agree(artifact, wanted, atol=1e-4, rtol=1e-3)
    report = zip(artifact.about["report"], wanted.about["report"], strict=True)
    assert all(
        a["reconstruction_mse"] == pytest.approx(b["reconstruction_mse"], rel=1e-2)
        for a, b in report
    )


@pytest.mark.nightly
def test_aqua_of_transforms(captured, monkeypatch):
    """The keys, values and queries that our calibration itself saw give the same transforms.
    Without queries and outputs all errors cost the same, which gives others."""
    model, method, seen = tiny(), kvq.parse(AQUA_KLT), []
    plain = aqua._layer_pass
    monkeypatch.setattr(aqua, "_layer_pass", lambda *given: seen.append(plain(*given)) or seen[-1])
    wanted = aqua.calibrate(model, method, TOKENS).constants
    layers = [seen[: len(TOKENS)], seen[len(TOKENS) :]]

    def by_layer(name):
        return [np.stack([getattr(row, name) for row in rows]) for rows in layers]

    keys, values = (
        [x.reshape(*TOKENS.shape, 2, 16) for x in by_layer(name)] for name in ("k", "v")
    )
    queries = _queries(model)
    for known in (True, False):
        costs = {"queries": queries, "outputs": model.params["layers"]["o"]} if known else {}
        artifact = kvq.calibrate.from_tensors(
            method, model.config, keys=keys, values=values, **costs
        )
        assert _same_keys(artifact.constants, wanted) == known


def _same_keys(constants, wanted) -> bool:
    """Whether the keys' constants are equal but for rounding. What keys leave of this model's values
    has directions without variance, which rounding turns."""
    pairs = zip(
        jax.tree.leaves([run["k"] for run in constants]),
        jax.tree.leaves([run["k"] for run in wanted]),
        strict=True,
    )
    return all(np.allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max() + 1e-5) for a, b in pairs)


@pytest.mark.nightly
@pytest.mark.parametrize("attention", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_commvq(captured, attention, monkeypatch):
    """The keys and values that our calibration itself saw; with queries, also the same loss on
    attention outputs."""
    model, method, seen = tiny(), kvq.parse(COMMVQ), []
    plain = layerwise._layer_pass
    monkeypatch.setattr(
        layerwise, "_layer_pass", lambda *given: seen.append(plain(*given)) or seen[-1]
    )
    settings = dataclasses.replace(QUICK.values, attention=float(attention))
    wanted = commvq.calibrate(
        model, method, TOKENS, recipe=dataclasses.replace(QUICK, values=settings)
    )
    keys = [np.asarray(k).reshape(*TOKENS.shape, 2, 16) for k, _, _ in seen]
    tensors = {
        "keys": keys,
        "values": [np.asarray(v).reshape(*TOKENS.shape, 2, 16) for _, (v, _, _), _ in seen],
    }
    if attention:
        # Turned back.
        positions = -jnp.broadcast_to(jnp.arange(TOKENS.shape[1])[None], TOKENS.shape)
        queries = [rotate(q, positions, model.config) for _, (_, q, _), _ in seen]
        tensors |= {"queries": queries, "outputs": model.params["layers"]["o"]}
    artifact = kvq.calibrate.from_tensors(method, model.config, **tensors, recipe=QUICK)
    if attention:
        np.testing.assert_array_equal(
            artifact.constants[0]["k"]["codebook"], wanted.constants[0]["k"]["codebook"]
        )
        for found, ours in zip(artifact.about["layers"], wanted.about["layers"], strict=True):
            np.testing.assert_allclose(found["values"], ours["values"], rtol=1e-3)
    else:
        agree(artifact, wanted, rtol=0)


def _queries(model: kvq.Model) -> list[jax.Array]:
    """The queries [N, T, H, D] of every layer of a model that reads `TOKENS`, before RoPE."""
    layers = layerwise.of_model(model, kvq.parse("klt:buffer=32"), TOKENS)
    queries, h = [], layers.h
    for number in range(layers.shape.num_layers):
        _, seen, h = layers.read(number, h)
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        queries.append(unrotated(seen.q, positions, layers.shape.layer(number)))
    return queries


@pytest.mark.parametrize("attention", [False, True])
def test_klt(captured, attention, monkeypatch):
    """The keys and values that our calibration itself saw, and with queries and outputs what errors
    cost."""
    model, method, seen = tiny(), kvq.parse("klt:bits=2,buffer=32"), []
    plain = layerwise._layer_pass
    monkeypatch.setattr(
        layerwise, "_layer_pass", lambda *given: seen.append(plain(*given)) or seen[-1]
    )
    wanted = klt.calibrate(model, method, TOKENS)
    keys = [np.asarray(k).reshape(*TOKENS.shape, 2, 16) for k, _, _ in seen]
    tensors = {
        "keys": keys,
        "values": [np.asarray(v).reshape(*TOKENS.shape, 2, 16) for _, (v, _, _), _ in seen],
    }
    if attention:
        tensors |= {
            "queries": _queries(model),
            "outputs": model.params["layers"]["o"],
        }
    artifact = kvq.calibrate.from_tensors(method, model.config, **tensors)
    # Without queries and outputs all errors cost the same, which gives other transforms.
    assert _same_keys(artifact.constants, wanted.constants) == attention
    if attention:
        predicted = [run["v"][name] for run in artifact.constants for name in ("from_keys", "mean")]
        own = [run["v"][name] for run in wanted.constants for name in ("from_keys", "mean")]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), predicted, own)


@jax.jit
def call(cache, keys, values, constants):
    """Outputs of every layer of an own model for new tokens, and the cache that holds them."""
    below, new, out, counts = None, [], [], jnp.full(len(TOKENS), keys.shape[2])
    for layer in range(2):
        q, k, v = jnp.repeat(keys[layer], 2, axis=2) / 4, keys[layer], values[layer]
        got, below = kvq.attend_layer(
            cache, layer, q, k, v, counts, below=below, constants=constants
        )
        new.append(below)
        out.append(got)
    return jnp.stack(out), kvq.append(cache, new, counts, constants=constants)


def attended(shape, spec: str, keys, values, constants) -> np.ndarray:
    """Outputs of two calls of 36 tokens each; the second one reads what the first one stored."""
    cache = kvq.init_cache(shape, spec, len(TOKENS), 128)
    _, cache = call(cache, keys[:, :, :36], values[:, :, :36], constants)
    return np.asarray(call(cache, keys[:, :, 36:], values[:, :, 36:], constants)[0])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spec",
    [
        "kvquant:bits=4",
        pytest.param(AQUA, marks=pytest.mark.nightly),
        pytest.param(COMMVQ.replace("window=32", "window=0"), marks=pytest.mark.nightly),
        pytest.param(CENTRED, marks=pytest.mark.nightly),
        pytest.param("klt:buffer=32", marks=pytest.mark.nightly),
        pytest.param(AQUA_KLT, marks=pytest.mark.nightly),
    ],
)
def test_attention_takes_the_constants(captured, spec):
    """Calibrated with no more of a model than a KVShape, attention is nearer to exact attention
    than with constants of other keys and values, the same with their channels moved."""
    shape = tiny().config.kv_shape
    keys, values = (
        np.float32(3 * captured[0][name] + 3 * np.sin(np.arange(16))) for name in ("keys", "values")
    )
    options, errors = {"recipe": QUICK} if "commvq" in spec else {}, []
    wanted = attended(shape, "exact", keys, values, None)
    for moved in (0, 5):
        others = {"keys": np.roll(keys, moved, -1), "values": np.roll(values, moved, -1)}
        found = kvq.calibrate.from_tensors(spec, shape, **others, **options)
        out = attended(shape, spec, keys, values, found.constants)
        errors.append(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
    assert errors[0] < min(0.5, errors[1])


@pytest.mark.parametrize(
    "spec", with_nightly(["kvquant:bits=2", AQUA, COMMVQ], ["kvquant:bits=2", COMMVQ])
)
def test_a_killed_calibration_goes_on(captured, tmp_path, spec):
    shape, options = tiny().config.kv_shape, {"recipe": QUICK} if "commvq" in spec else {}
    fit = functools.partial(kvq.calibrate.from_tensors, spec, shape, **options)
    steps = []

    def stop(done, total):
        steps.append((done, total))
        if done == total - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(**captured[0], state=tmp_path / "s.npz", advance=stop)
    stopped, total = steps[-1]
    seen = []
    again = fit(**captured[0], state=tmp_path / "s.npz", advance=lambda done, _: seen.append(done))
    # CommVQ tells the steps within a layer too, and keeps its state after every layer.
    assert seen == list(range(seen[0], total + 1))
    assert 1 < seen[0] <= stopped + 1
    wanted = fit(**captured[0])
    pairs = zip(jax.tree.leaves(again.constants), jax.tree.leaves(wanted.constants), strict=True)
    assert all(np.asarray(got).tobytes() == np.asarray(whole).tobytes() for got, whole in pairs)
    other = {name: x + 1 for name, x in captured[0].items()}
    with pytest.raises(kvq.UserError, match="state of another model"):
        fit(**other, state=tmp_path / "s.npz")


def test_what_does_not_fit_is_refused(captured):
    shape, tensors = tiny().config.kv_shape, captured[0]
    fit = kvq.calibrate.from_tensors
    bare = dataclasses.replace(shape, rope=None)
    assert [fit.module for fit in needed(kvq.parse("kvquant;0=exact"), shape)] == [
        "kvqjax.calibrate.kvquant"
    ]
    with pytest.raises(kvq.UserError, match="needs no calibration"):
        fit("kivi", shape, **tensors)
    with pytest.raises(kvq.UserError, match="use a kvqjax model"):
        fit("xquant", shape, **tensors)
    with pytest.raises(kvq.UserError, match="give the shape a rope"):
        fit(COMMVQ, bare, **tensors, recipe=QUICK)
    with pytest.raises(kvq.UserError, match="values of 1 layers given, the shape has 2"):
        fit("kvquant", shape, keys=tensors["keys"], values=tensors["values"][:1])
    with pytest.raises(
        kvq.UserError,
        match=r"values of layer 0 have shape \(3, 70, 2, 16\), wanted \(3, 72, 2, 16\)",
    ):
        fit("kvquant", shape, keys=tensors["keys"], values=tensors["values"][:, :, :70])
    with pytest.raises(kvq.UserError, match="queries and outputs go together"):
        fit(COMMVQ, shape, **tensors, queries=tensors["keys"])
    with pytest.raises(kvq.UserError, match="needs key_gradients"):
        fit("kvquant", shape, **tensors, recipe=kvquant.Recipe())
    with pytest.raises(kvq.UserError, match="NaN or infinite"):
        fit("kvquant", shape, keys=tensors["keys"] * np.nan, values=tensors["values"])


WIDE = np.zeros((2, 64, 32), np.float32)  # output projections of both layers


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"outputs": WIDE[:1]}, "outputs of 1 layers given, the shape has 2"),
        ({"outputs": WIDE[:, :32]}, r"outputs of layer 0 have shape \(32, 32\), wanted \(64, 32\)"),
        (
            {"outputs": WIDE.swapaxes(1, 2)},
            r"outputs of layer 0 have shape \(32, 64\), wanted \(64, 64\)",
        ),
        (
            {"outputs": [WIDE[0], WIDE[1, :, :8]]},
            r"outputs of layer 1 have shape \(64, 8\), wanted \(64, 32\)",
        ),
    ],
)
def test_tensors_of_another_shape(captured, wrong, message):
    """Output projections of other sizes gave constants of other numbers, without a word."""
    queries = np.zeros((2, *TOKENS.shape, 4, 16), np.float32)
    with pytest.raises(kvq.UserError, match=message):
        kvq.calibrate.from_tensors(
            "klt:bits=2,buffer=32",
            tiny().config,
            **(captured[0] | {"queries": queries, "outputs": WIDE} | wrong),
        )


def test_recipe_of_another_calibration(captured):
    with pytest.raises(
        kvq.UserError, match=r"recipe is a Recipe; wanted a kvqjax\.calibrate\.aqua\.Recipe"
    ):
        kvq.calibrate.from_tensors(AQUA, tiny().config, **captured[0], recipe=QUICK)


def test_state_is_any_path(captured, tmp_path):
    state = tmp_path / "state.npz"
    kvq.calibrate.from_tensors(CENTRED, tiny().config, **captured[0], state=str(state))
    assert state.exists()
