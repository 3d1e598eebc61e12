"""Weights of 8 and 4 bits on a mesh: logits of one device, and how many bytes each device holds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import save_params
from tiny import in_form, tiny, tokens

import kvqjax as kvq
from kvqjax.calibrate.xquant import prepared
from kvqjax.model.config import ExpertConfig
from kvqjax.model.weight_codes import CodedWeight, code_weight
from kvqjax.model.weight_trees import BY_EXPERT, Rows, is_unrolled
from kvqjax.parallel.sharding import MeshSize, rules_for

MATRICES = (
    "q",
    "k",
    "v",
    "o",
    "gate",
    "up",
    "down",
    *BY_EXPERT,
    *(f"shared_{n}" for n in ("gate", "up", "down")),
)
EXPERTS = ExpertConfig(count=8, per_token=2, width=24, shared_width=32, dense_layers=(1,))
MODELS = {
    "dense": {"width": 64, "mlp_width": 256},  # two groups of 128 inputs in `down`
    "experts": {
        "num_layers": 3,
        "experts": EXPERTS,
        "architecture": "Qwen2MoeForCausalLM",
        "qkv_bias": True,
    },
}


def coded(model: kvq.Model, bits: int) -> kvq.Model:
    def code(x):
        return code_weight(x, bits)

    layers = {
        name: x
        if name not in MATRICES
        else Rows(code(x.stack), x.layers)
        if isinstance(x, Rows)
        else code(x)
        for name, x in model.params["layers"].items()
    }
    return model.replace(params=model.params | {"layers": layers})


step = jax.jit(kvq.forward)


def after(model: kvq.Model, method: str) -> np.ndarray:
    """Logits of a prompt and of tokens behind it."""
    cache, counts, out = kvq.init_cache(model, method, 2, 64), jnp.full((2,), 12, jnp.int32), []
    for seed in (1, 2):
        logits, cache = step(model, tokens(2, 12, seed), counts, cache)
        out.append(np.asarray(logits))
    return np.concatenate(out, 1)


def bits_here(model: kvq.Model, names: list[str]) -> int:
    """Bits of some matrices' codes on the first device."""
    layers = model.params["layers"]
    held = [
        own.get(name)
        for own in (layers if is_unrolled(model.params) else [layers])
        for name in names
    ]
    codes = jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, CodedWeight))
    return sum(8 * x.codes.addressable_data(0).nbytes for x in codes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "method", "bits", "sizes", "layers"),
    [
        pytest.param(
            "dense", "exact", 8, {"data": 2, "model": 4}, "scan", marks=pytest.mark.nightly
        ),
        # Keys and values from whole projections.
        pytest.param(
            "dense", "xquant:bits=8,group=32", 4, {"model": 4}, "scan", marks=pytest.mark.nightly
        ),
        pytest.param(
            "experts", "exact", 4, {"data": 2, "model": 4}, "scan", marks=pytest.mark.nightly
        ),
        pytest.param("experts", "exact", 8, {"model": 2}, "unroll", marks=pytest.mark.nightly),
        ("experts", "exact", 8, {"data": 2, "model": 2}, "switch"),
    ],
)
def test_logits_and_bytes(name, method, bits, sizes, layers):
    model, parts = tiny(**MODELS[name]), sizes["model"]
    model = prepared(model, kvq.parse(method)) if method.startswith("xquant") else model
    one = coded(model, bits)
    one = one.replace(params=in_form(one.params, layers))
    spread = kvq.shard(one, method, **sizes)
    assert spread.weights == f"int{bits}"
    np.testing.assert_allclose(after(spread, method), after(one, method), rtol=0, atol=2e-4)
    split = [n for n in MATRICES if n not in ("k", "v")]
    held = {n: x for n, x in model.params["layers"].items() if n in split}
    numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(held))
    assert bits_here(one, split) == numbers * bits
    assert bits_here(spread, split) == numbers * bits // parts
    if (
        name == "dense"
    ):  # two groups of 128 inputs, shared out over four devices: each has the scale of its own half
        scale = spread.params["layers"]["down"].scale
        assert (scale.shape[1], scale.addressable_data(0).shape[1]) == (4, 1)


@pytest.mark.parametrize(
    ("layers", "weights"),
    [
        ("scan", "int4"),
        pytest.param("switch", "int4", marks=pytest.mark.nightly),
        pytest.param("unroll", "int8", marks=pytest.mark.nightly),
    ],
)
def test_loaded_in_place(layers, weights, tmp_path):
    """What `load` puts on a mesh is what `shard` makes of the model loaded whole."""
    model = tiny(**MODELS["experts"])
    save_params(tmp_path, model.params, model.config)
    rules = rules_for(model.config, "exact", MeshSize(data=2, model=4))
    got = kvq.load(tmp_path, dtype="f32", weights=weights, sharding=rules, layers=layers)
    whole = kvq.load(tmp_path, dtype="f32", weights=weights, layers=layers)
    wanted = kvq.shard(whole, "exact", data=2, model=4)
    assert got.weights == weights

    def same(a, b):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(same, got.params, wanted.params)


def test_a_word_of_codes_is_not_cut():
    with pytest.raises(
        kvq.UserError, match="4 devices cannot share out 2 rows of codes of int4 weights"
    ):
        kvq.shard(coded(tiny(mlp_width=16), 4), "exact", model=4)
