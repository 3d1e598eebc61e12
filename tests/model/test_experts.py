"""Mixtures of experts: routing and ties, every way of computing them, caches, calibrations, meshes,
coded weights."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import _constants, thinned, with_nightly
from greedy import reference
from jax.sharding import NamedSharding
from quick_commvq import METHOD, QUICK
from tiny import in_form, tiny, tokens

import kvqjax as kvq
from kvqjax.calibrate import needed
from kvqjax.calibrate.xquant import prepared
from kvqjax.eval import perplexity
from kvqjax.model import decoder, experts, weight_trees
from kvqjax.model.config import ExpertConfig
from kvqjax.model.weight_codes import code_weight
from kvqjax.model.weight_trees import Row, Rows

SPARSE = ExpertConfig(count=8, per_token=2, width=24, shared_width=16)
MIXED = dataclasses.replace(SPARSE, dense_layers=(1,), normalised=False)


def mixed() -> kvq.Model:
    """Three layers, the middle one dense; experts that matter, so that a wrong one is seen."""
    model = tiny(num_layers=3, experts=MIXED)
    louder = {
        n: jax.tree.map(lambda x: 3 * x, model.params["layers"][n])
        for n in ("experts_down", "router")
    }
    return model.replace(params=model.params | {"layers": model.params["layers"] | louder})


mix = jax.jit(experts.mix, static_argnums=2)
run = jax.jit(decoder.logits, static_argnums=2)


def by_hand(model: kvq.Model, layer: int, x: np.ndarray) -> np.ndarray:
    """One layer's experts in NumPy, float64, token after token."""
    held = jax.tree.map(
        lambda a: np.asarray(a, np.float64), weight_trees.unrolled(model.params)["layers"][layer]
    )
    about, out = model.config.experts, np.zeros(x.shape)

    def silu(a):
        return a / (1 + np.exp(-a))

    def one(t, g, u, d):
        return (silu(t @ g) * (t @ u)) @ d

    for n, t in enumerate(x.astype(np.float64)):
        scores = np.exp(t @ held["router"])
        scores /= scores.sum()
        best = sorted(range(about.count), key=lambda e: (-scores[e], e))[: about.per_token]
        total = scores[best].sum() if about.normalised else 1.0
        out[n] = sum(
            scores[e] / total * one(t, *(held[name][e] for name in experts.BY_EXPERT)) for e in best
        )
        shared = one(t, *(held[f"shared_{name}"] for name in ("gate", "up", "down")))
        out[n] += shared / (1 + np.exp(-t @ held["shared_router"][:, 0]))
    return out


@pytest.mark.parametrize("normalised", thinned([True, False], 3))
@pytest.mark.parametrize("count", with_nightly([1, 3, 70], [3]))
def test_experts_are_what_the_formula_says(count, normalised):
    model = mixed()
    config = dataclasses.replace(
        model.config, experts=dataclasses.replace(MIXED, normalised=normalised)
    )
    x = np.random.default_rng(0).normal(size=(count, 32)).astype(np.float32)
    wanted = by_hand(model.replace(config=config), 2, x)
    assert np.abs(wanted).mean() > 0.3
    for params in (model.params, weight_trees.unrolled(model.params)):
        got = mix(decoder.layer(params, 2), jnp.asarray(x), config)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("count", with_nightly([1, 4, 70, 600], [70]))
def test_ways_of_computing_agree(count):
    """The loop over tiles, that of CPUs and TPUs, and the products without a loop, that of GPUs."""
    weights = decoder.layer(mixed().params, 0)
    x = jax.random.normal(jax.random.key(0), (count, 32))
    chosen, _ = experts.route(x, weights["router"].read(), mixed().config)
    wanted = jax.jit(functools.partial(experts._in_turn, alone=True, expert=experts.mlp))(
        weights, x, chosen
    )
    np.testing.assert_allclose(
        jax.jit(functools.partial(experts._at_once, expert=experts.mlp))(weights, x, chosen),
        wanted,
        rtol=0,
        atol=1e-5,
    )
    elsewhere = jnp.where(chosen < 4, chosen, 8)  # of another device
    got = jax.jit(functools.partial(experts._in_turn, alone=False, expert=experts.mlp))(
        weights, x, elsewhere
    )
    np.testing.assert_allclose(got[chosen < 4], wanted[chosen < 4], rtol=0, atol=1e-5)


def test_ties_go_to_the_expert_with_the_lower_number():
    model = mixed()
    router = decoder.layer(model.params, 0)["router"].read()
    # Experts 0, 2, 4, 6 score alike, and 1, 3, 5, 7.
    twins = jnp.concatenate([router[:, :2]] * 4, axis=1)
    chosen, shares = experts.route(
        jax.random.normal(jax.random.key(0), (50, 32)), twins, model.config
    )
    assert {tuple(row) for row in np.asarray(chosen).tolist()} == {(0, 2), (1, 3)}
    np.testing.assert_array_equal(shares[:, 0], shares[:, 1])
    for count in (1, 7):  # and it doesn't depend on how many are routed together
        again, _ = experts.route(
            jax.random.normal(jax.random.key(0), (50, 32))[:count], twins, model.config
        )
        np.testing.assert_array_equal(again, chosen[:count])


def test_a_token_that_is_not_finite_spoils_no_other():
    model = mixed()
    weights, x = decoder.layer(model.params, 0), jax.random.normal(jax.random.key(0), (20, 32))
    out = mix(weights, x.at[3].set(jnp.nan), model.config)
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(
        np.delete(out, 3, 0), np.delete(mix(weights, x, model.config), 3, 0)
    )


def test_stacks_name_their_layers():
    params = mixed().params
    held = {name: x.layers for name, x in params["layers"].items() if isinstance(x, Rows)}
    dense, sparse = (
        dict.fromkeys(("gate", "up", "down"), (1,)),
        dict.fromkeys(weight_trees.SPARSE, (0, 2)),
    )
    assert held == dense | sparse
    assert params["layers"]["experts_gate"].stack.shape == (2, 8, 32, 24)
    assert "gate" not in decoder.layer(params, 0)
    assert "router" not in decoder.layer(params, 1)
    traced = jax.eval_shape(lambda i: decoder.layer(params, i), 0)
    assert isinstance(traced["gate"], Row)
    apart = weight_trees.unrolled(params)
    assert ["router" in own for own in apart["layers"]] == [True, False, True]
    jax.tree.map(np.testing.assert_array_equal, weight_trees.stacked(apart), params)


@pytest.mark.nightly
def test_dense_layers_among_sparse_ones_in_both_forms():
    model = mixed()
    wanted = run(model.params, tokens(2, 20), model.config)
    apart = run(weight_trees.unrolled(model.params), tokens(2, 20), model.config)
    np.testing.assert_allclose(apart, wanted, rtol=0, atol=1e-4)
    other = model.params | {
        "layers": model.params["layers"]
        | {"gate": jax.tree.map(jnp.zeros_like, model.params["layers"]["gate"])}
    }
    # The dense layer is not passed over.
    assert np.abs(run(other, tokens(2, 20), model.config) - wanted).max() > 1e-2


SPECS = [
    "exact", "kivi:bits=8,window=32,value_group=16", "kvquant:bits=4,sinks=2",
    "commvq:bits=2,rounds=2,levels=8,hidden=16,window=32,unit=32",
    "aqua:bits=4,first_bits=16,backbone=token,group=32,buffer=32", "xquant:bits=8,group=32,latent=true",
    "xquant_cl:bits=8,group=32,base=0,protected=1,latent=true",
]  # fmt: skip


step = jax.jit(kvq.forward, donate_argnames="cache")


def ready(model: kvq.Model, spec: str) -> tuple[kvq.Model, kvq.Method]:
    method = kvq.parse(spec)
    made = (
        prepared(model, method)
        if spec.startswith("xquant")
        else model.replace(constants=_constants(model, method))
    )
    return made, method


@pytest.mark.nightly
@pytest.mark.parametrize("spec", thinned(SPECS, len(SPECS)))
def test_every_kind_of_cache(spec):
    """What is cached comes before the experts, so that all methods work, stacked or layer by layer:
    exact logits of the exact cache, and near them where most bits are stored."""
    model, method = ready(mixed(), spec)
    layers = "unroll" if SPECS.index(spec) % 2 else "scan"
    if layers == "unroll":
        model = model.replace(params=weight_trees.unrolled(model.params))
    text = tokens(1, 150)
    wanted = run(model.params, text, model.config)
    cache, out = kvq.init_cache(model, method, 1, 256), []
    assert cache.layout.layers == layers
    for start in range(0, 150, 50):
        logits, cache = step(
            model, text[:, start : start + 50], jnp.full((1,), 50, jnp.int32), cache
        )
        out.append(logits)
    got = np.concatenate(out, 1)
    assert np.isfinite(got).all()
    assert (np.abs(got - wanted).max() < 1e-4) == (spec == "exact")
    if ":bits=8" in spec:  # XQuant-CL adds up rounded differences, on a dense model as on this one
        typical = np.median(np.abs(got - wanted)[0, 100:].max(-1))
        assert 1e-4 < typical < (0.6 if "_cl" in spec else 0.1) * np.std(wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("bits", thinned([8, 4], 3))
@pytest.mark.parametrize(
    "form",
    [
        pytest.param("scan", marks=pytest.mark.nightly),
        "switch",
        pytest.param("unroll", marks=pytest.mark.nightly),
    ],
)
def test_coded_experts(bits, form):
    model, names = mixed(), {"q", "k", "v", "o", "gate", "up", "down", *experts.BY_EXPERT}
    names |= {"shared_gate", "shared_up", "shared_down"}
    held = model.params["layers"]

    def code(x):
        return code_weight(x, bits)

    def mean(x):
        return code(x).decoded()

    def each(change):
        layers = {
            n: x
            if n not in names
            else Rows(change(x.stack), x.layers)
            if isinstance(x, Rows)
            else change(x)
            for n, x in held.items()
        }
        params = model.params | {"layers": layers}
        return in_form(params, form)

    got, meant = (run(each(change), tokens(1, 24), model.config) for change in (code, mean))
    np.testing.assert_allclose(got, meant, rtol=0, atol=2e-4)
    assert np.abs(got - run(model.params, tokens(1, 24), model.config)).max() > 1e-3


@pytest.mark.nightly
def test_text_on_a_mesh_is_that_of_one_device():
    """By day, test_families.py attends on a mesh with gpt-oss' experts."""
    prompts = [list(range(40)), [7, 3, 9]]
    model = mixed()
    spread = kvq.shard(model, kvq.exact(), data=2, model=4)
    made = kvq.generate(spread, prompts, max_new_tokens=8, capacity=600).tokens
    assert made == kvq.generate(model, prompts, max_new_tokens=8, capacity=600).tokens
    for prompt, got in zip(prompts, made, strict=True):
        want, margin = reference(model, prompt, 8)
        assert margin > 1e-4
        assert got == want


@pytest.mark.nightly
def test_a_mesh_shares_out_the_experts():
    model = mixed()
    spread = kvq.shard(model, kvq.exact(), data=2, model=4)
    held = spread.params["layers"]["experts_gate"].stack
    assert held.addressable_data(0).shape == (2, 2, 32, 24)
    with pytest.raises(
        kvq.UserError,
        match="mesh model=3 must divide 4 heads and MLP width 64 and 8 experts and shared",
    ):
        kvq.shard(model, kvq.exact(), model=3)
    six = tiny(experts=dataclasses.replace(SPARSE, count=6))
    with pytest.raises(
        kvq.UserError,
        match="mesh model=4 must divide 4 heads and 6 experts and shared MLP width 16",
    ):
        kvq.shard(six, kvq.exact(), model=4)
    assert isinstance(spread.rules.placement("layers/experts_down"), NamedSharding)


AQUA = "aqua:bits=4,first_bits=16,backbone=token,group=32,buffer=32"
RECIPES = {"kvquant:bits=4,sinks=1": {}, AQUA: {}, str(METHOD): {"recipe": QUICK}}


@pytest.mark.nightly
@pytest.mark.parametrize("spec", thinned(RECIPES, 3))
def test_calibrations_and_evaluation(spec):
    """KVQuant's needs gradients through the routed experts; all run a layer at a time by number."""
    model, method = mixed().replace(fingerprint="weights=0"), kvq.parse(spec)
    text = np.asarray(tokens(6, 96, seed=3))
    module = importlib.import_module(needed(method, model.config)[0].module)
    fitted = model.with_artifact(module.calibrate(model, method, text, **RECIPES[spec]))
    made_up = model.replace(constants=_constants(model, method))
    about = {"window": 192, "tokens": 384, "batch": 2, "chunk": 32}
    rows = [perplexity(m, text.reshape(-1), method, **about) for m in (fitted, made_up)]
    assert 1e-6 < rows[0]["kld"] < 0.5 * rows[1]["kld"]


@pytest.mark.nightly
def test_gradients_pass_the_experts():
    """Against finite differences along one direction, stacked and as a list. All experts are
    chosen: where a choice changes, the function jumps."""
    model = mixed()
    model = model.replace(
        config=dataclasses.replace(model.config, experts=dataclasses.replace(MIXED, per_token=8))
    )
    text = tokens(2, 12)

    def loss(scale, params):
        held = jax.tree.map(lambda x: x * scale, params["layers"])
        return jax.nn.logsumexp(
            decoder.logits(params | {"layers": held}, text, model.config), axis=-1
        ).mean()

    for params in (model.params, weight_trees.unrolled(model.params)):
        value = jax.jit(functools.partial(loss, params=params))
        slope = (value(1.002) - value(0.998)) / 0.004
        assert abs(slope) > 0.05
        np.testing.assert_allclose(jax.jit(jax.grad(value))(1.0), slope, rtol=0.05)
