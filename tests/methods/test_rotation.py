"""Rotations as a part of the frame: the body is stored rotated, queries go in and outputs come back
once, and nothing else is touched."""

import dataclasses
import importlib

import biased
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import model_and_method, thinned, with_nightly
from kernel_cache import filled, for_chip, logits
from kernel_cases import check_outputs
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax import Method
from kvqjax.cache import runs_of
from kvqjax.cache.readers import kernel as kernel_reader
from kvqjax.calibrate import rotation as fitting
from kvqjax.calibrate.activations import activations
from kvqjax.codecs import Exact
from kvqjax.methods import KeysAndValues
from kvqjax.methods import rotation as rotations
from kvqjax.methods.rotation import matrix_of, turned
from kvqjax.pallas_kernels import dispatch
from kvqjax.pallas_kernels.tpu import packed as tpu

forward, prefill = jax.jit(kvq.forward), jax.jit(kvq.prefill)
TEXT = tokens(2, 200)


def after(model, method, within="chunk"):
    """Logits of three tokens after a prompt that is mostly encoded, and the cache before them."""
    cache = prefill(
        model, TEXT[:, :190], jnp.asarray([190, 120]), kvq.init_cache(model, method, 2, 256)
    )[1]
    return np.asarray(
        kvq.attend(model, TEXT[:, 190:193], jnp.full(2, 3), cache, within=within)[0]
    ), cache


def orthogonal(model, method):
    random = np.random.default_rng(0)
    return model.replace(
        constants=tuple(
            jax.tree.map(
                lambda x: jnp.asarray(np.linalg.qr(random.normal(size=x.shape))[0], jnp.float32),
                run.wiring.constants(run.count, "float32"),
            )
            for run in runs_of(kvq.init_cache(model, method, 1, 1).layout)
        )
    )


@pytest.mark.parametrize(
    ("kind", "rope", "keep"),
    [
        ("hadamard", "post", None),
        pytest.param("signs:3", "post", None, marks=pytest.mark.nightly),
        pytest.param("pairs", "post", None, marks=pytest.mark.nightly),
        pytest.param("pairs", "pre", None, marks=pytest.mark.nightly),
        pytest.param("pairs", "pre", "streaming:96", marks=pytest.mark.nightly),
        pytest.param("fitted", "post", None, marks=pytest.mark.nightly),
        pytest.param("fitted", "post", "streaming:96", marks=pytest.mark.nightly),
    ],
)
def test_exact_codecs_in_any_frame_give_exact_attention(kind, rope, keep):
    """float32: the products of a rotation and its inverse differ from 1 by some eps."""

    def method(kind):
        layer = KeysAndValues(
            key=Exact(), value=Exact(), rope=rope, key_rotation=kind, value_rotation=kind
        )
        return dataclasses.replace(
            kvq.parse("exact:sinks=3" + (f",keep={keep}" if keep else "")), layer=layer
        )

    model = tiny()
    plain, bare = after(model, method("none"))
    found, cache = after(orthogonal(model, method(kind)), method(kind))
    np.testing.assert_allclose(found, plain, atol=2e-5 * np.abs(plain).max())
    for run, other in zip(cache.runs, bare.runs, strict=True):
        jax.tree.map(
            np.testing.assert_array_equal, (run.sinks, run.window), (other.sinks, other.window)
        )
        for source in "kv":  # the body is another
            assert (
                np.abs(np.asarray(run.body[source]["x"][0] - other.body[source]["x"][0])).max()
                > 0.1
            )


@pytest.mark.parametrize("name", thinned(["kivi-rotated", "oscar", "turboquant"], 3))
def test_what_is_stored_is_the_code_of_rotated_vectors(name):
    model, method = model_and_method(name)
    run = runs_of(kvq.init_cache(model, method, 1, 256).layout)[0]
    fixed = {
        group: {n: a[0] for n, a in names.items()} for group, names in model.constants[0].items()
    }
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, model.config.kv_width)), jnp.float32)
    payload, recon, _ = run.wiring.maps.encode(fixed, {"k": x, "v": x}, {})
    for source in "kv":
        matrix = (
            fixed["rotation"][rotations.NAMES[source]]
            if name == "oscar"
            else matrix_of(method.layer.key_rotation, model.config.head_dim)
        )
        rows = turned(x.reshape(32, model.config.num_kv_heads, 1, -1), matrix)
        codec = run.wiring.storage.codecs[source]
        wanted = codec.encode({}, rows.reshape(x.shape))
        jax.tree.map(np.testing.assert_array_equal, payload[source], wanted)
        decoded = codec.decode({}, wanted).reshape(rows.shape)
        back = turned(decoded, matrix, back=True).reshape(x.shape)
        np.testing.assert_allclose(recon[source], back, atol=1e-6)


@pytest.mark.parametrize("form", ["planes", "heads"])
def test_nothing_is_rotated_per_cached_token(form, monkeypatch):
    """A step rotates the new tokens' queries and outputs, two products a layer, whatever the cache
    holds."""
    shapes, plain = [], turned

    def noted(x, matrix, back=False):
        shapes.append((x.shape, back))
        return plain(x, matrix, back)

    model, method = model_and_method("kivi-rotated")
    cache = kvq.init_cache(model, method, 2, 4096, form=form)
    monkeypatch.setattr(rotations, "turned", noted)
    jax.eval_shape(lambda m, c: kvq.attend(m, TEXT[:, :1], jnp.ones(2, jnp.int32), c), model, cache)
    # Rows, token, KV heads, queries of each.
    assert shapes == [
        ((2, 1, 2, 2, 16), False),
        ((2, 1, 2, 2, 16), True),
    ]


@pytest.mark.nightly
def test_drafts_see_what_steps_would_have_seen():
    """Tokens that fall due inside a chunk are shown as encoded, in the source's frame."""
    model, method = model_and_method("kivi-rotated")
    cache = prefill(
        model, TEXT[:, :150], jnp.asarray([150, 150]), kvq.init_cache(model, method, 2, 256)
    )[1]
    wanted = []
    stepped = cache
    for column in range(150, 190):
        out, stepped = forward(model, TEXT[:, column : column + 1], jnp.ones(2, jnp.int32), stepped)
        wanted.append(np.asarray(out)[:, 0])
    got = kvq.attend(model, TEXT[:, 150:190], jnp.full(2, 40), cache, within="step")[0]
    np.testing.assert_allclose(got, np.stack(wanted, 1), atol=2e-4)


COMPOSED = (
    "kivi:bits=4,window=32,rotate=hadamard",
    "uniform:bits=4,group=16,rotate=signs",
    "uniform:bits=8,group=16,rotate=hadamard",
    "higgs:bits=4,rope=post,group=head,buffer=32,rotate=signs",
    "kvquant:bits=4,outliers=0.02,rope=post,rotate=hadamard",
    "kvquant:bits=4,outliers=0.02,rotate=none,value_rotate=hadamard",
    "kivi:bits=4,window=32,rope=pre,rotate=pairs,value_rotate=signs",
    "kvarn:bits=4,group=32,sinks=0",
    "omniscale:bits=4,window=32,value_group=16",
    "oscar:bits=4,window=0,sinks=0",
    "oscar:bits=4,window=0,sinks=0,centre=mean",
    "kvarn:bits=4,group=32,sinks=0,centre=mean",
    "turboquant:bits=4",
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    with_nightly(
        COMPOSED,
        ["kivi:bits=4,window=32,rope=pre,rotate=pairs,value_rotate=signs", "turboquant:bits=4"],
    ),
)
def test_codecs_in_a_rotated_frame_are_near_exact(text):
    """Calibrated where the codec or the rotation needs it: logits move, and less than by another
    frame, which would leave nothing of them. 4 bits of random vectors of 16 numbers cost up to a
    quarter of their size."""
    model, method = tiny(), kvq.parse(text)
    if kvq.calibrate.learns(method, model.config):
        module = importlib.import_module(kvq.calibrate.needed(method, model.config)[0].module)
        rows = np.asarray(tokens(4, 128, 5))
        model = model.with_artifact(module.calibrate(model, method, rows))
    exact, found = after(tiny(), kvq.exact())[0], after(model, method)[0]
    error = (np.square(found - exact).mean() / np.square(exact).mean()) ** 0.5
    assert 1e-4 < error < 0.35


@pytest.mark.nightly
def test_calibration_of_tables_sees_rotated_vectors():
    """Thresholds of KVQuant's keys bound the rotated channels, and its Fisher weights are those of
    rotated entries."""
    model, method = (
        tiny(),
        kvq.parse("kvquant:bits=3,outliers=0.02,sinks=0,rope=post,rotate=hadamard"),
    )
    from kvqjax.calibrate.kvquant import calibrate

    rows = np.asarray(tokens(2, 64, 5))
    bounds = calibrate(model, method, rows).constants[0]["k"]
    k = activations(model.params, jnp.asarray(rows), model.config, rope="post", gradients=False).k
    k = turned(k.reshape(*k.shape[:3], 2, 1, 16), matrix_of("hadamard", 16)).reshape(2, -1, 32)
    high = np.quantile(np.asarray(k), 0.99, axis=1)
    np.testing.assert_allclose(bounds["upper"], high, rtol=1e-4, atol=1e-5)
    turn = runs_of(kvq.init_cache(model, method, 1, 1).layout)[0].wiring.maps.frame.turn
    both = [
        activations(model.params, jnp.asarray(rows), model.config, rope="post", turn=t)
        for t in (lambda s, x: x, lambda s, x: turn({}, s, x))
    ]
    sums = [np.asarray(a.k_fisher).reshape(2, 2, 64, 2, 16).sum(-1) for a in both]
    # A rotation keeps the length of a head's gradient.
    np.testing.assert_allclose(*sums, rtol=1e-3, atol=1e-9)
    assert np.abs(both[0].k_fisher - both[1].k_fisher).max() > 0


REFUSED = {
    "kivi:rope=pre,rotate=hadamard": "rotation 'hadamard' does not commute with RoPE",
    "kvquant:rotate=signs": "rotation 'signs' does not commute with RoPE",
    "higgs:rotate=fitted": "rotation 'fitted' does not commute with RoPE",
    "kvquant:rope=post,rotate=fitted": "rotation 'fitted' needs codecs without calibrated tables",
    "kivi:rotate=haddamard": "rotation 'haddamard'; known: none, hadamard, signs, pairs, fitted, and signs:SEED",
    "kivi:rotate=signs:x": "rotation 'signs:x'; known",
    "kivi:rotate=pairs:3": "rotation 'pairs:3'; known",
    "omniscale:norm=row": "norm='row'; known: layer, head",
    "kvarn:rounds=0": "rounds=0; at least 1",
    "kvarn:group=48": "group=48; tiles have 32, 64 or 128 tokens",
    "oscar:clip=96": "clip=96.0; wanted the share that is not clipped, from 0.5 to 1",
    "turboquant:bits=5": "no grid of 5 bits in 1 dimensions",
    "turboquant:form=vlm": "form='vlm'; known: paper, vllm",
    "turboquant:centre=atuo": "centre='atuo'; known: auto, none, mean",
    "turboquant:boundary=-1": "-1 first layers",
    "higgs:rope=post,rotate=signs,seed=3": "seed=3; the rotation has the signs: rotate=signs:3",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_rotated_is_refused_by_name(text):
    with pytest.raises(kvq.UserError, match="^" + text.partition(":")[0]) as error:
        kvq.parse(text)
    assert REFUSED[text] in str(error.value)


def test_a_head_dim_without_a_hadamard_matrix_has_other_rotations():
    shape = kvq.KVShape(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=100, rope=kvq.Rope())
    with pytest.raises(
        kvq.UserError,
        match="order 100, the head_dim, is known here; the rotations pairs and fitted",
    ):
        kvq.init_cache(shape, "kivi:rotate=signs,value_group=25", batch=1, capacity=256)
    kvq.init_cache(shape, "kivi:rotate=pairs,value_group=25", batch=1, capacity=256)
    for dim in (80, 96, 112):  # Paley's constructions
        matrix = matrix_of("signs", dim).astype(int)
        np.testing.assert_array_equal(matrix @ matrix.T, dim * np.eye(dim, dtype=int))


NO_POWER_OF_TWO = (
    "kvarn:bits=2",
    "omniscale:bits=2,value_group=25",
    "oscar:bits=2,rotate=hadamard",
)


@pytest.mark.parametrize(
    "text", [*NO_POWER_OF_TWO, "turboquant:bits=2", "turboquant:bits=4,form=vllm,boundary=0"]
)
def test_methods_of_a_rotation_say_which_remain(text):
    shape = kvq.KVShape(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=100, rope=kvq.Rope())
    with pytest.raises(
        kvq.UserError,
        match="order 100, the head_dim, is known here; the rotations pairs and fitted",
    ):
        kvq.init_cache(shape, text, batch=1, capacity=256)
    if text in NO_POWER_OF_TWO:
        kvq.init_cache(
            shape, text.removesuffix(",rotate=hadamard") + ",rotate=pairs", batch=1, capacity=256
        )


@pytest.mark.nightly
@pytest.mark.parametrize("rope", [pytest.param("pre", marks=pytest.mark.nightly), "post"])
def test_a_rotated_body_gets_the_bias_rotated(rope):
    """At 8 bits nothing else is lost: a bias that were added as it is would change every score."""
    model = biased.biased(num_layers=1)
    text = f"kivi:bits=8,group=32,value_group=16,window=0,rope={rope},rotate=pairs,centre=auto"
    wanted, got = (
        biased.logits(model, biased.filled(model, kvq.parse(method))) for method in ("exact", text)
    )
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())


def test_a_boundary_of_all_layers_is_refused():
    """In vLLM's form two layers at each end are exact."""
    with pytest.raises(
        kvq.UserError, match=r"boundary=2 exact layers at each end are all 4 of this model"
    ):
        kvq.init_cache(tiny(num_layers=4), "turboquant:bits=4,form=vllm", 1, 256)
    cache = kvq.init_cache(tiny(num_layers=5), "turboquant:bits=4,form=vllm", 1, 256)
    assert [
        (run.count, list(run.wiring.storage.codecs["k"].fields)) for run in runs_of(cache.layout)
    ] == [
        (2, ["x"]),
        (1, ["codes", "scale"]),
        (2, ["x"]),
    ]
    assert kvq.parse("turboquant:bits=4").overrides == ()


def bits(text, heads=8, dim=128):
    shape = kvq.KVShape(
        num_layers=1, num_heads=heads, num_kv_heads=heads, head_dim=dim, rope=kvq.Rope()
    )
    return kvq.ledger(kvq.init_cache(shape, text, batch=1, capacity=1024)).bits_method


def test_bits_are_the_true_ones():
    """Norms, factors, scales and minima included, at the papers' geometry."""
    # One bfloat16 norm a token for keys; float32 would be twice.
    assert bits("omniscale:bits=2") == 3 + 16 / 1024 / 2
    assert bits("omniscale:bits=2,scales=float32") == 4 + 32 / 1024 / 2
    assert bits("omniscale:bits=2,group=128,value_group=128") == pytest.approx(2.25 + 16 / 1024 / 2)
    assert bits("kvarn:bits=2") == 2 + 0.375
    assert bits("kvarn:bits=4,value_bits=2") == 3 + 0.375
    assert bits("oscar:bits=2") == 2.25
    assert bits("oscar:bits=2,scales=float32") == 2.5
    assert bits("turboquant:bits=2") == 2.125
    assert bits("turboquant:bits=4,form=vllm,boundary=0") == (4.125 + 4.25) / 2


KIVI = "kivi:bits={b},group=128,sinks=3"


@pytest.mark.parametrize("b", [2, 4])
def test_rotated_bodies_take_kivis_kernels_unchanged(b):
    model = tiny(head_dim=128, num_layers=1)
    for form, target, name in (("planes", "v6e", "packed"), ("heads", "sm90", "direct")):
        found = []
        for rotate in ("none", "signs", "fitted"):
            method = f"{KIVI.format(b=b)},rotate={rotate}"
            layout = kvq.init_cache(model, method, 2, 1024, form=form).layout
            wiring = runs_of(dataclasses.replace(layout, target=target))[0].wiring
            assert getattr(wiring.fast, name) is not None
            packed = wiring.fast.packed
            found.append(
                (*(wiring.storage.codecs[s].fields for s in ("k", "v")), packed and packed.spec)
            )
        assert found[0] == found[1] == found[2]
        if form == "planes":
            assert dispatch.path(found[0][2], 2, 1024) == "tpu"


@pytest.mark.nightly
def test_kivis_tpu_kernel_reads_a_rotated_body(monkeypatch):
    model, cache = filled("kivi:bits=4,group=128,sinks=3,window=0,rotate=signs")
    plain, calls = logits(model, cache), []

    def kernel(q, body, layer, start, stop, spec, general, trusted, recent=None):
        calls.append(spec)
        return tpu.packed_attention(q, body, layer, start, stop, spec, interpret=True)

    monkeypatch.setattr(kernel_reader, "packed_attention", kernel)
    found = logits(model, for_chip(cache, "v6e"))
    assert calls
    check_outputs(found, plain)


def test_fitted_rotations_spread_what_queries_see():
    """Orthogonal matrices, in whose frame an error costs the same in every channel."""
    model, method = tiny(), kvq.parse("oscar:bits=2,window=0,sinks=0")
    rows = np.asarray(tokens(3, 96, 5))
    constants = fitting.calibrate(model, method, rows).constants
    found = {name: np.asarray(x) for name, x in constants[0]["rotation"].items()}
    for matrix in found.values():
        product = np.swapaxes(matrix, -1, -2) @ matrix
        np.testing.assert_allclose(product, np.broadcast_to(np.eye(16), product.shape), atol=1e-5)
    settings = {"config": model.config, "values": "outputs", "sinks": 0, "unbiased": False}
    seen = [fitting._moments(model.params, jnp.asarray(row)[None], **settings) for row in rows]
    for index, matrix in enumerate(found.values()):
        covariance = sum(np.asarray(one[index], np.float64) for one in seen)
        cost = np.diagonal(np.swapaxes(matrix, -1, -2) @ covariance @ matrix, axis1=-2, axis2=-1)
        np.testing.assert_allclose(
            cost, np.broadcast_to(cost.mean(-1, keepdims=True), cost.shape), rtol=1e-3
        )


def test_a_killed_fit_goes_on(tmp_path):
    model, method, rows = (
        tiny(),
        kvq.parse("oscar:bits=2,sinks=0,centre=mean"),
        np.asarray(tokens(3, 96, 5)),
    )
    whole, state = fitting.calibrate(model, method, rows), tmp_path / "state"

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitting.calibrate(model, method, rows, state=state, advance=stop)
    again = fitting.calibrate(model, method, rows, state=state)
    jax.tree.map(np.testing.assert_array_equal, again.constants, whole.constants)
    other = fitting.calibrate(
        model, method, rows, recipe=fitting.Recipe(values="energy", shared=True)
    ).constants[0]
    keys = np.asarray(other["rotation"]["keys"])
    np.testing.assert_array_equal(keys[:, 0], keys[:, 1])  # one pair of matrices a layer
    assert (
        np.abs(
            np.asarray(other["rotation"]["values"] - whole.constants[0]["rotation"]["values"])
        ).max()
        > 0.01
    )
    with pytest.raises(kvq.UserError, match="values='scores' is unknown"):
        fitting.Recipe(values="scores")


def test_rotations_of_captured_tensors_are_refused():
    zeros = np.zeros((1, 1, 64, 2, 16), np.float32)
    with pytest.raises(kvq.UserError, match="rotations are fitted on a kvqjax model"):
        kvq.calibrate.from_tensors("oscar", tiny().config.kv_shape, keys=zeros, values=zeros)


SCALE_FREE = (
    "omniscale:bits=2,value_group=16",
    "kvarn:bits=2,group=32",
    "turboquant:bits=2",
    "oscar:bits=2",
)


@pytest.mark.parametrize("text", thinned(SCALE_FREE, 2))
def test_factors_are_divided_out_as_stored(text):
    """A token of zeros, a small and a large one: equal up to powers of two; finite whatever the
    size."""
    wiring = runs_of(kvq.init_cache(tiny(), kvq.parse(text), 1, 256).layout)[0].wiring
    groups = wiring.wanted().items()
    fixed = {
        group: {n: jnp.broadcast_to(jnp.eye(16), size) for n, size in names.items()}
        for group, names in groups
    }
    x = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    x[1], x[2] = x[1] * 1e-2, x[2] * 1e2
    padded = np.where(np.arange(32)[:, None] == 0, 0, x).astype(np.float32)

    def recon(x):
        tile = {name: jnp.asarray(x) for name in "kv"}
        return {name: np.asarray(a) for name, a in wiring.maps.encode(fixed, tile, {})[1].items()}

    one, eight, zero, huge = recon(x), recon(8 * x), recon(padded), recon(1e30 * x)
    for name in "kv":
        # Some codes at ties differ.
        assert np.abs(eight[name] - 8 * one[name]).mean() < 1e-3 * np.abs(x).mean()
        assert np.isfinite(zero[name]).all()
        np.testing.assert_allclose(zero[name][0], 0, atol=1e-3)
        assert np.isfinite(huge[name]).all()


def test_policies_of_other_engines_parse():
    """What the pages name."""
    for text in (
        "uniform:bits=4,group=32,rotate=hadamard",
        "uniform:bits=8,group=32,rotate=hadamard",
    ):
        assert isinstance(kvq.parse(text), Method)


@pytest.mark.nightly
def test_a_shape_s_fitted_rotations_are_matrices_of_its_owner():
    """`from_tensors` cannot fit them, so that the line names another way; with that the cache
    attends."""
    shape = kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rope=kvq.Rope())
    cache, counts = kvq.init_cache(shape, "oscar:bits=4,window=0", 1, 256), jnp.asarray([128])
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, 128, heads, 16))
        for i, heads in enumerate((4, 2, 2))
    )
    with pytest.raises(
        kvq.UserError, match=r"constants= takes orthogonal matrices of your own, \[2, 2, 16, 16\]"
    ):
        kvq.layers(cache, counts)[0].attend(q, k, v)
    turn = jnp.broadcast_to(
        jnp.linalg.qr(jax.random.normal(jax.random.key(3), (16, 16)))[0], (2, 2, 16, 16)
    )
    views = kvq.layers(cache, counts, constants=({"rotation": {"keys": turn, "values": turn}},))
    for layer in range(2):
        _, views[layer] = views[layer].attend(q, k, v)
    assert kvq.commit_layers(views).lengths.tolist() == [128]
