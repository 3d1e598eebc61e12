"""AQUA-KV in the cache: the decoder gives what the encoder believes, at every depth; calibration to
artifact."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax import Model, UserError, aqua, exact, forward, init_cache, ledger, load_artifact, parse
from kvqjax.cache import CacheLayout, allocate_cache, at_layer, commit, runs_of
from kvqjax.cache.runs import chains
from kvqjax.cache.state import due
from kvqjax.calibrate.aqua import calibrate, released
from kvqjax.codecs import bits_per_value
from kvqjax.methods import Clock
from kvqjax.model.config import ModelConfig
from kvqjax.model.weight_trees import init_params

CONFIG = ModelConfig(
    vocab_size=50,
    width=48,
    mlp_width=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tied_embeddings=True,
)
LENGTHS = (285, 150)  # two units and one unit after four sinks
DATA = Path(__file__).parents[1] / "data"


def sources(runs, dtype):
    """Keys and values of every layer, [L_run, B, T, W] per run, each layer like the one below."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(2, max(LENGTHS), CONFIG.kv_width)) + 3
    base[..., 5] *= 20
    out = []
    for run in runs:
        layers = [
            {s: base + 0.4 * rng.normal(size=base.shape) for s in ("k", "v")}
            for _ in range(run.count)
        ]
        out.append(jax.tree.map(lambda *a: jnp.asarray(np.stack(a), dtype), *layers))
    return tuple(out)


def predictors(runs, dtype):
    """Random predictors near the identity, of the shapes each run asks for."""
    rng = np.random.default_rng(1)

    def fill(name, shape):
        if name == "codes":
            return jnp.asarray(rng.integers(0, 2**32, shape), jnp.uint32)
        return jnp.asarray(
            0.2 * rng.normal(size=shape) + 0.5 * (np.eye(*shape[-2:]) if len(shape) > 2 else 0),
            dtype,
        )

    return tuple(
        {
            g: {n: fill(n, (run.count, *shape)) for n, shape in names.items()}
            for g, names in run.wiring.wanted().items()
        }
        for run in runs
    )


def filled(method, dtype, steps):
    """A cache that was given LENGTHS tokens in chunks of `steps`."""
    layout = CacheLayout(shape=CONFIG.kv_shape, method=method, capacity=300, dtype=dtype)
    runs = runs_of(layout)
    given, constants = sources(runs, dtype), predictors(runs, dtype)
    cache, append = allocate_cache(layout, 2), jax.jit(commit)
    for start in range(0, max(LENGTHS), steps):
        counts = jnp.clip(jnp.asarray(LENGTHS) - start, 0, steps)
        piece = jax.tree.map(lambda a, start=start: a[:, :, start : start + steps], given)
        cache = append(cache, piece, counts, constants)
    return cache, runs, given, constants


def decoded(cache, runs, constants):
    """Every layer's body as the decoder gives it, [B, 256, W] per source (runs with longer blocks
    hold more slots)."""
    carry = {
        name: jnp.zeros((2, max(run.slots for run in runs), CONFIG.kv_width), cache.layout.dtype)
        for name in "kv"
    }
    out = []

    def layer(run, body, fixed, index, carry):
        payload = {
            source: {
                name: f.packing.read(body[source][name], index, jnp.int32(0), run.slots)
                for name, f in codec.fields.items()
            }
            for source, codec in run.wiring.storage.codecs.items()
        }
        recon, part = run.wiring.maps.decode(
            at_layer(fixed, index), payload, {n: c[:, : run.slots] for n, c in carry.items()}
        )
        return recon, {n: c.at[:, : run.slots].set(part[n]) for n, c in carry.items()}

    for run, state, fixed in zip(runs, cache.runs, constants, strict=True):
        step = jax.jit(lambda *a, run=run: layer(run, *a))
        for index in range(run.count):
            recon, carry = step(state.body, fixed, jnp.int32(index), carry)
            out.append(recon)
    return out


def encoded(runs, given, constants, dtype):
    """Every layer's reconstruction as the encoder makes it, tile by tile: {(row, unit): [per
    layer]}."""
    out, steps = {}, [jax.jit(run.wiring.maps.encode) for run in runs]
    for row, unit in ((0, 0), (0, 1), (1, 0)):
        carry = {name: jnp.zeros((128, CONFIG.kv_width), dtype) for name in ("k", "v")}
        out[row, unit] = []
        for run, step, tiles, fixed in zip(runs, steps, given, constants, strict=True):
            for index in range(run.count):
                start = 4 + 128 * unit
                tile = {name: x[index, row, start : start + 128] for name, x in tiles.items()}
                _, recon, carry = step(at_layer(fixed, jnp.int32(index)), tile, carry)
                out[row, unit].append(recon)
    return out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param({}, "float32", marks=pytest.mark.nightly),
        pytest.param(
            {"exact": "2", "predictor": "int4", "seed": 3}, "bfloat16", marks=pytest.mark.nightly
        ),
        ({"backbone": "channel", "bits": 3}, "bfloat16"),
        pytest.param(
            {"backbone": "token", "group": 16, "first_bits": 16},
            "float32",
            marks=pytest.mark.nightly,
        ),
        pytest.param({"backbone": "klt", "bits": 2.5}, "bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_decoder_gives_what_the_encoder_reconstructed_at_every_depth(options, dtype):
    cache, runs, given, constants = filled(aqua(**options), dtype, 300)
    assert [f.tolist() for f in cache.runs[0].flushed] == [[2, 1]]
    below = decoded(cache, runs, constants)
    for (row, unit), layers in encoded(runs, given, constants, dtype).items():
        for index, recon in enumerate(layers):
            for name in ("k", "v"):
                ours = np.asarray(
                    below[index][name][row, 128 * unit : 128 * unit + 128], np.float32
                )
                np.testing.assert_array_equal(
                    ours, np.asarray(recon[name], np.float32), err_msg=f"layer {index} {name}"
                )
                if index == 2 and options.get("exact"):
                    run = next(i for i, run in enumerate(runs) if run.first == 2)
                    np.testing.assert_array_equal(
                        recon[name], given[run][name][0, row, 4 + 128 * unit :][:128]
                    )


@pytest.mark.nightly
def test_words_do_not_depend_on_how_tokens_arrive():
    once, pieces = (filled(aqua(), "float32", steps)[0] for steps in (300, 57))
    for one, other in zip(jax.tree.leaves(once.runs), jax.tree.leaves(pieces.runs), strict=True):
        if one.dtype == jnp.uint32:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "spec", ["higgs:group=head", "kvarn:group=32,rotate=none", "oscar:rotate=none", "turboquant"]
)
def test_a_layer_of_codecs_that_leave_sizes_open_joins(spec):
    """What they leave open is filled in as in a cache of their own. A rotated layer stays out: the
    chain passes it."""
    layout = CacheLayout(
        shape=CONFIG.kv_shape, method=parse(f"aqua;1={spec}"), capacity=300, dtype="float32"
    )
    chained = [bool(run.wiring.chain.carry) for run in runs_of(layout)]
    assert chained == [True, spec != "turboquant", True]
    alone = runs_of(dataclasses.replace(layout, method=parse(spec)))[0].wiring.storage.codecs["k"]
    assert bits_per_value(runs_of(layout)[1].wiring.storage.codecs["k"]) == bits_per_value(alone)


def test_the_ledger_counts_what_flows_between_layers():
    layout = CacheLayout(shape=CONFIG.kv_shape, method=aqua(), capacity=1028, dtype="bfloat16")
    book = ledger(jax.eval_shape(lambda: allocate_cache(layout, 1)))
    assert book.carry == 1024 * 2 * 32 * 2


@pytest.mark.nightly
def test_a_step_holds_one_layers_carry():
    """The declared carry, 2*S*K*D, plus blocks: measured 1.36 times the carry; a second layer's
    would make 2."""
    capacity, model = 16388, Model(init_params(jax.random.key(0), CONFIG), config=CONFIG)
    runs = runs_of(
        CacheLayout(shape=CONFIG.kv_shape, method=aqua(), capacity=capacity, dtype="float32")
    )
    constants = jax.eval_shape(lambda: predictors(runs, "float32"))
    cache = jax.eval_shape(lambda: init_cache(model, aqua(), 1, capacity))
    new = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    program = (
        jax.jit(forward, donate_argnums=3)
        .lower(model.replace(constants=constants), *new, cache)
        .compile()
    )
    carry = 2 * capacity * CONFIG.kv_width * 4
    assert carry < program.memory_analysis().temp_size_in_bytes < 1.7 * carry


@pytest.mark.nightly
def test_exact_residuals_give_the_exact_caches_logits():
    """With 16-bit codecs everything but the quantisation remains: predictors, carry, order and
    rotation."""
    model = Model(init_params(jax.random.key(0), CONFIG), config=CONFIG)
    method = aqua(bits=16, first_bits=16)
    runs = runs_of(CacheLayout(shape=CONFIG.kv_shape, method=method, capacity=300, dtype="float32"))
    tokens = jax.random.randint(jax.random.key(1), (2, 290), 0, 50)
    out = []
    for ready, kind in (
        (model.replace(constants=predictors(runs, "float32")), method),
        (model, exact()),
    ):
        cache, step, logits = init_cache(ready, kind, 2, 300), jax.jit(forward), []
        for start in (0, 145):
            counts = jnp.asarray([145, 145])
            piece, cache = step(ready, tokens[:, start : start + 145], counts, cache)
            logits.append(piece)
        out.append(np.concatenate(logits, axis=1))
    np.testing.assert_allclose(out[0], out[1], atol=1e-4 * np.abs(out[1]).max())


def test_layers_that_see_different_tokens_cannot_feed_each_other():
    config = dataclasses.replace(CONFIG, sliding_window=(None, 64, None, None))
    with pytest.raises(UserError, match="must see the same tokens"):
        chains(CacheLayout(shape=config.kv_shape, method=aqua(), capacity=300, dtype="float32"))
    # All layers slide alike, but blocks of 3-bit and 4-bit codes differ, and so would their rings.
    config = dataclasses.replace(CONFIG, sliding_window=64)
    chains(CacheLayout(shape=config.kv_shape, method=aqua(bits=2), capacity=4000, dtype="float32"))
    with pytest.raises(UserError, match="must see the same tokens"):
        chains(
            CacheLayout(shape=config.kv_shape, method=aqua(bits=3), capacity=4000, dtype="float32")
        )


def test_exact_tokens_follow_the_released_rule_where_prompts_fill_whole_buffers():
    """The released cache compresses its whole buffer of 128 or more; ours whole units of 128. They
    agree from prompts that leave no part of a buffer behind, or that are shorter than one."""
    with np.load(DATA / "golden_aqua_window_trace.npz") as data:
        trace, prompts = data["lens_p4_b128_steps"], data["prompts_p4_b128"]
    clock, seen = Clock(("k", "v"), 0, 128), 0
    for lens, prompt in zip(trace, prompts, strict=True):
        if (prompt - 4) % 128 and prompt - 4 >= 128:
            continue
        seen += 1
        total = prompt + np.arange(len(lens))
        encoded = (
            np.asarray(due(clock, jnp.asarray(total - 4), jnp.zeros(len(lens), jnp.int32))) * 128
        )
        np.testing.assert_array_equal(encoded, lens[:, 1])
        np.testing.assert_array_equal(np.maximum(total - 4, 0) - encoded, lens[:, 2])
    assert seen >= 3


@pytest.fixture(scope="module")
def model():
    return Model(init_params(jax.random.key(2), CONFIG), config=CONFIG, fingerprint="config=1")


def test_calibration_resumes_with_the_same_bytes_and_its_artifact_runs(model, tmp_path):
    tokens = np.random.default_rng(3).integers(0, 50, (4, 270))
    method = aqua()
    whole = calibrate(model, method, tokens)

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    state = tmp_path / "state.npz"
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, method, tokens, state=state, advance=stop)
    seen = []
    resumed = calibrate(
        model, method, tokens, state=state, advance=lambda done, total: seen.append((done, total))
    )
    assert seen == [(3, 4), (4, 4)]
    assert resumed.about == whole.about
    for one, other in zip(
        jax.tree.leaves(whole.constants), jax.tree.leaves(resumed.constants), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    for row in whole.about["report"][2:]:
        assert 0 < row["explained"] <= 1
        assert row["bits_saved"] == pytest.approx(-np.log(row["relative_mse"]) / np.log(4))
        assert row["reconstruction_mse"] < row["relative_mse"]
    whole.save(tmp_path / "artifact")
    ready = model.with_artifact(load_artifact(tmp_path / "artifact"))
    cache = init_cache(ready, method, 1, 300)
    logits, _ = jax.jit(forward)(ready, jnp.asarray(tokens[:1]), jnp.asarray([270]), cache)
    assert np.isfinite(logits).all()
    with pytest.raises(UserError, match="wanted \\[sequences, 132 tokens or more\\]"):
        calibrate(model, method, tokens[:, :100])
    with pytest.raises(UserError, match="AQUA-KV in every layer"):
        calibrate(model, exact(), tokens)


def test_released_predictors_load_from_plain_arrays(model):
    rng, width = np.random.default_rng(4), CONFIG.kv_width
    arrays = {}
    for layer in range(1, 4):
        for name, inputs in (("key", width), ("value", 2 * width)):
            arrays[f"{name}_predictors.{layer}.weight"] = rng.normal(size=(width, inputs))
            arrays[f"{name}_predictors.{layer}.bias"] = rng.normal(size=width)
    constants = released(arrays, model, aqua()).constants
    np.testing.assert_allclose(
        constants[1]["v"]["weight"][1], arrays["value_predictors.2.weight"].T, rtol=1e-6
    )
    assert constants[0] == {}
    with pytest.raises(UserError, match="predictors were released for AQUA-KV"):
        released(arrays, model, "kivi")
    del arrays["key_predictors.2.bias"]
    with pytest.raises(
        UserError, match=r"key_predictors\.2\.bias: wanted an array \(32,\), got nothing"
    ):
        released(arrays, model, aqua())
