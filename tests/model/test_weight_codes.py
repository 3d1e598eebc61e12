"""Weight-only quantisation: bounds, packing, loading, every kind of cache, and no second copy of
the weights."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method, thinned, with_nightly
from families import FAMILIES
from hf_folders import save_params
from jax.sharding import NamedSharding, PartitionSpec
from recurrent import PARTS, drawn, recurrent
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.calibrate.xquant import prepared
from kvqjax.generation.loop import decode_steps, unbegun
from kvqjax.generation.sampling import make_sampling
from kvqjax.model import decoder
from kvqjax.model.config import ExpertConfig, LatentHeads, RopeConfig
from kvqjax.model.weight_codes import (
    CodedWeight,
    code_weight,
    pack_nibbles,
    place_codes,
    unpack_nibbles,
)
from kvqjax.model.weights import load_params

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@functools.partial(jax.jit, static_argnames="bits")
def coded_layers(layers, bits):
    codes = {name: code_weight(layers[name], bits) for name in MATRICES}
    return layers | codes, layers | {name: x.decoded() for name, x in codes.items()}


def coded(model, bits):
    """The model with its layers' matrices as codes, and the model of what those codes mean."""
    new = coded_layers(model.params["layers"], bits)
    return tuple(model.replace(params=model.params | {"layers": layers}) for layers in new)


def is_coded(x) -> bool:
    return isinstance(x, CodedWeight)


def decoded(params):
    """The weights with every code as the number that it means."""
    return jax.tree.map(lambda x: x.decoded() if is_coded(x) else x, params, is_leaf=is_coded)


@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_half_a_step_of_its_own_group(bits):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(2, 256, 24)) + 0.5
    weight[0, 3, 5], weight[1, 128:, 7] = -50, 0
    coded = code_weight(jnp.asarray(weight, jnp.float32), bits)
    scale = np.abs(weight).reshape(2, 2, 128, 24).max(2) / (127 if bits == 8 else 7)
    np.testing.assert_allclose(coded.scale, scale, rtol=1e-6)
    step = np.repeat(scale, 128, axis=1)
    assert (np.abs(coded.decoded() - weight) <= 0.5 * step + 1e-5).all()
    assert (
        np.abs(coded.decoded() - weight) > 0.4 * step
    ).any()  # nearest, and no finer than stated
    assert coded.codes.nbytes == weight.size * bits // 8


def test_nibbles_come_back_in_order():
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 16, (3, 16, 5)), jnp.uint32)
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(codes)), codes)
    assert pack_nibbles(jnp.arange(8, dtype=jnp.uint32)[:, None]).item() == 0x76543210


def test_scales_keep_the_compute_dtype():
    weight = jax.random.normal(jax.random.key(0), (1, 64, 8)).astype(jnp.bfloat16)
    coded = code_weight(weight, 4)
    assert (coded.scale.dtype, coded.decoded().dtype) == (jnp.bfloat16, jnp.bfloat16)
    # Codes are made for the scale as stored; half a step, the clipped largest entry, and the
    # product's own rounding.
    bound = (0.5 + 7 * 2**-8) * np.asarray(coded.scale, np.float32)
    assert (np.abs(np.asarray(coded.decoded() - weight, np.float32)) <= bound).all()
    with pytest.raises(kvq.UserError, match="bits=3; weights are coded in 8 or 4 bits"):
        code_weight(jnp.ones((1, 12, 8)), 3)


@pytest.mark.parametrize("bits", thinned([8, 4], 3))
@pytest.mark.parametrize("inputs", [1, 7, 12, 31, 36, 130, 257])
def test_any_width_is_coded(inputs, bits):
    """Within half a step of its group, which has at most 128 inputs; scales take less than the
    codes do from 8 on."""
    weight = np.random.default_rng(inputs).normal(size=(2, inputs, 5)).astype(np.float32)
    coded = code_weight(jnp.asarray(weight), bits)
    assert coded.decoded().shape == weight.shape
    count = coded.scale.shape[1]
    group = -(-inputs // count)
    assert group <= 128
    assert count <= -(-inputs // 8)
    step = np.repeat(np.asarray(coded.scale), group, axis=1)[:, :inputs]
    assert (np.abs(coded.decoded() - weight) <= 0.5 * step + 1e-5).all()
    assert coded.codes.nbytes == 2 * 5 * (inputs if bits == 8 else 4 * -(-inputs // 8))


def test_shares_of_an_odd_width_keep_their_scales():
    """Where a device's share ends inside a group; of 4-bit codes whole words alone can be shared
    out."""
    mesh = jax.make_mesh((2,), ("model",))
    spread = NamedSharding(mesh, PartitionSpec(None, "model"))
    weight = jax.random.normal(jax.random.key(0), (2, 258, 6))
    coded = code_weight(weight, 8)
    np.testing.assert_array_equal(place_codes(coded, spread).decoded(), coded.decoded())
    with pytest.raises(
        kvq.UserError, match="2 devices cannot share out 33 rows of codes of int4 weights"
    ):
        place_codes(code_weight(weight, 4), spread)
    with pytest.raises(
        kvq.UserError, match="2 devices cannot share out 2 rows of codes of int4 weights"
    ):
        place_codes(code_weight(weight[:, :12], 4), spread)


ODD = {"width": 36, "mlp_width": 31, "num_heads": 3, "num_kv_heads": 1, "head_dim": 10}
EXPERTS = {
    "experts": ExpertConfig(count=3, per_token=2, width=13, shared_width=7, dense_layers=(0,)),
    "architecture": "Qwen2MoeForCausalLM",
    "qkv_bias": True,
}


@pytest.mark.parametrize(
    ("layers", "weights"),
    with_nightly(
        itertools.product(["scan", "unroll", "switch"], ["int8", "int4"]),
        [("switch", "int8")],
    ),
)
@pytest.mark.parametrize("experts", thinned([{}, EXPERTS], 2), ids=["dense", "experts"])
def test_a_model_of_odd_widths_loads_in_every_option(tmp_path, weights, layers, experts):
    """Its logits are those of a model of the decoded matrices."""
    model = tiny(**ODD, **experts)
    save_params(tmp_path, model.params, model.config)
    coded = kvq.load(tmp_path, weights=weights, dtype="f32", layers=layers)
    assert sum(map(is_coded, jax.tree.leaves(coded.params, is_leaf=is_coded))) >= 7
    meant = decoded(coded.params)
    one, other = (
        kvq.forward(m, tokens(1, 5), jnp.asarray([5]), kvq.init_cache(m, "exact", 1, 16))[0]
        for m in (coded, coded.replace(params=meant))
    )
    assert np.abs(one - other).max() < 1e-4  # the same products in another fusion


OTHERS = {
    "Qwen3_5": PARTS | {"recurrent": recurrent()},
    "GptOss": FAMILIES["gpt-oss"] | {"mlp_width": 24},
    "Gemma3": FAMILIES["gemma3"]
    | {"rope": RopeConfig()},  # a linear one is not loaded as the same fields
    "Llama4": FAMILIES["llama4"] | {"mlp_width": 24},
    "Mistral4": {
        "num_kv_heads": 1,
        "head_dim": 40,
        "latent": 32,
        "latent_heads": LatentHeads(query_rank=20, key_dim=10, value_dim=12),
        "rope": RopeConfig(kind="yarn", factor=4.0, original_max_position=32, fraction=0.2),
        "scale": 18**-0.5,
        "query_growth": 0.3,
    },
}
WINDOW = (8, None)  # fewer tokens than the text has


@pytest.mark.nightly
@pytest.mark.parametrize("family", with_nightly(OTHERS, ["GptOss"]))
def test_parts_of_other_families_load_as_codes(family, tmp_path):
    """Recurrent layers, sinks, chunks, latents: logits are those of a model of the decoded
    matrices."""
    fields = OTHERS[family] | (
        {"sliding_window": WINDOW} if "sliding_window" in OTHERS[family] else {}
    )
    model = drawn(tiny(architecture=f"{family}ForCausalLM", **fields))
    save_params(tmp_path, model.params, model.config)
    loaded = kvq.load(tmp_path, weights="int4", dtype="f32")
    assert loaded.config == model.config
    logits = jax.jit(decoder.logits, static_argnums=2)
    trees = loaded.params, decoded(loaded.params), model.params
    codes, meant, plain = (
        np.asarray(logits(params, tokens(1, 24), model.config)) for params in trees
    )
    # As above: the same products in another fusion, of logits of up to 10 times their size.
    assert np.abs(codes - meant).max() < 1e-4 * max(1, np.abs(meant).max())
    assert np.abs(codes - plain).max() > 2e-2


@pytest.mark.parametrize("weights", ["int3", 8, ["int8"], ""])
def test_other_weights_are_one_line(weights):
    with pytest.raises(kvq.UserError, match="known: int8, int4"):
        inspect.unwrap(kvq.load)("demo", weights=weights)


def test_codes_mean_the_decoded_matrices():
    """Logits of a model of 4-bit codes are those of its decoded matrices, and not those it was made
    of."""
    logits = jax.jit(decoder.logits, static_argnums=2)
    codes, meant, plain = (
        np.asarray(logits(m.params, tokens(1, 24), m.config)) for m in (*coded(tiny(), 4), tiny())
    )
    # The same products in another fusion: float32 sums of 64 terms, 2 layers.
    assert np.abs(codes - meant).max() < 1e-4
    assert np.abs(codes - plain).max() > 2e-2


ALSO = ("xquant:bits=4,group=32", "xquant_cl:bits=2,group=32,base=0,protected=0")


@pytest.mark.parametrize("name", with_nightly([*CASES, *ALSO], ["kivi-pre", "xquant-latents"]))
def test_every_kind_of_cache_takes_them(name):
    """Traced only: methods see a layer's weights through `decoder.layer`, which the test above is
    about."""
    model, method = model_and_method(name) if name in CASES else (tiny(), kvq.parse(name))
    own = coded(model, 4)[0]
    own = own if name in CASES else prepared(own, method)
    numbers = jax.ShapeDtypeStruct((2,), jnp.int32)
    cache = jax.eval_shape(lambda: kvq.init_cache(own, method, 2, 128))
    out, after = jax.eval_shape(
        kvq.forward, own, jax.ShapeDtypeStruct((2, 3), jnp.int32), numbers, cache
    )
    assert out.shape == (2, 3, 50)
    assert jax.tree.structure(after) == jax.tree.structure(cache)


def test_loading_codes_one_parameter_after_the_other(tmp_path):
    model = tiny()
    save_params(tmp_path, model.params, model.config)
    found = kvq.load(tmp_path, weights="int4", dtype="f32")
    assert (found.weights, kvq.load(tmp_path, dtype="f32").weights) == ("int4", "float32")
    jax.tree.map(np.testing.assert_array_equal, found.params, coded(model, 4)[0].params)
    mesh = jax.make_mesh((2,), ("model",))
    spread = NamedSharding(mesh, PartitionSpec(None, None, "model"))

    def rule(name):
        return (
            spread
            if name.removeprefix("layers/") in MATRICES
            else NamedSharding(mesh, PartitionSpec())
        )

    sharded = load_params(tmp_path, model.config, sharding=rule, bits=8)
    down = sharded["layers"]["down"]
    assert down.codes.addressable_data(0).shape == (2, 64, 16)
    np.testing.assert_array_equal(
        down.decoded(), code_weight(model.params["layers"]["down"], 8).decoded()
    )
    with pytest.raises(kvq.UserError, match="weights 'int3'"):
        kvq.load(tmp_path, weights="int3")


@pytest.mark.parametrize("bits", thinned([8, 4], 2))
def test_one_layer_at_a_time_is_decoded(bits):
    """Compiled decode loop: its arguments are the codes, its temporaries hold less than two layers
    in float32."""
    plain = tiny(num_layers=16, width=64, mlp_width=256)
    layer = sum(plain.params["layers"][name][0].nbytes for name in MATRICES)
    model = jax.eval_shape(lambda: coded(plain, bits)[0])
    cache = jax.eval_shape(lambda: kvq.init_cache(model, kvq.exact(), 1, 32))
    state = jax.eval_shape(unbegun, cache)
    eos, limit = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    memory = (
        decode_steps.lower(model, state, make_sampling(), eos, limit).compile().memory_analysis()
    )
    leaves = jax.tree.leaves((model, state.replace(key=None)))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert memory.argument_size_in_bytes < 1.02 * held
    assert memory.temp_size_in_bytes < 2 * layer, (memory.temp_size_in_bytes, layer)
