"""FP8, GPTQ and AWQ checkpoints are decoded as an independent decoder, number by number, decodes
them."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
from cases import thinned
from checkpoints import CONFIG, assert_same, edit, random_params
from hf_folders import save_params
from safetensors.numpy import load_file

from kvqjax import UserError, load
from kvqjax.model.checkpoint import decode_slice, find_weight, open_checkpoint
from kvqjax.model.config import ExpertConfig, ModelConfig
from kvqjax.model.hf_config import read_config, read_scheme

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 .. 7 in a word
BLOCK, GROUP = (10, 12), 8
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def fp8(random, out: int, into: int, one: bool = False) -> tuple[dict, np.ndarray]:
    """Tensors of a matrix and what they mean, block by block."""
    codes = random.normal(size=(out, into)).astype(ml_dtypes.float8_e4m3fn)
    shape = (1,) if one else (-(-out // BLOCK[0]), -(-into // BLOCK[1]))
    scales = random.uniform(0.5, 2, shape).astype(np.float32)
    meant = np.empty((out, into), np.float32)
    for o in range(out):
        for i in range(into):
            meant[o, i] = np.float32(codes[o, i]) * (
                scales[0] if one else scales[o // BLOCK[0], i // BLOCK[1]]
            )
    return {"weight": codes, "weight_scale_inv": scales}, meant


def packed(random, out: int, into: int, about: dict) -> tuple[dict, np.ndarray]:
    """Random words of GPTQ or AWQ and what they mean, code by code."""
    bits, gptq = about["bits"], about["quant_method"] == "gptq"
    word, groups = 32 // bits, into // GROUP

    def words(*shape):
        return random.integers(-(2**31), 2**31, shape).astype(np.int32)

    def code(value, place):
        return (int(value) >> (bits * place)) & (2**bits - 1)

    def place(o):
        return o % word if gptq else AWQ_PLACES[o % word]

    parts = {"qweight": words(into // word, out) if gptq else words(into, out // word)}
    parts |= {
        "qzeros": words(groups, out // word),
        "scales": random.uniform(0.1, 1, (groups, out)).astype(np.float16),
    }
    group = np.arange(into) // GROUP
    if gptq and about["desc_act"]:
        group = random.permutation(group)
        parts["g_idx"] = group.astype(np.int32)
    offset, meant = (
        int(gptq and about.get("checkpoint_format", "gptq") == "gptq"),
        np.empty((out, into), np.float32),
    )
    for o in range(out):
        for i in range(into):
            g = group[i]
            found = (
                code(parts["qweight"][i // word, o], i % word)
                if gptq
                else code(parts["qweight"][i, o // word], place(o))
            )
            zero = code(parts["qzeros"][g, o // word], place(o)) + offset
            meant[o, i] = np.float32(found - zero) * np.float32(parts["scales"][g, o])
    return parts, meant


KINDS = {
    "fp8": (FP8, fp8),
    "fp8-one-scale": (FP8 | {"weight_block_size": None}, lambda r, o, i: fp8(r, o, i, one=True)),
    "gptq": (GPTQ, lambda r, o, i: packed(r, o, i, GPTQ)),
    "gptq-8-bits-in-order": (
        GPTQ | {"bits": 8, "desc_act": False},
        lambda r, o, i: packed(r, o, i, GPTQ | {"bits": 8, "desc_act": False}),
    ),
    "gptq-v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        lambda r, o, i: packed(r, o, i, GPTQ | {"checkpoint_format": "gptq_v2"}),
    ),
    "awq": (AWQ, lambda r, o, i: packed(r, o, i, AWQ)),
}


def quantise(folder, kind: str, spoil=lambda tensors: None):
    """Put codes in the place of the layers' matrices; plain folder beside it holds what they
    mean."""
    about, make = KINDS[kind]
    plain, random = folder.with_name(f"{folder.name}-plain"), np.random.default_rng(0)
    save_params(folder, random_params(), CONFIG)
    save_params(plain, random_params(), CONFIG)
    meant = {}

    def change(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            out, into = tensors.pop(name).shape
            parts, meant[name] = make(random, out, into)
            stem = name.removesuffix(".weight")
            tensors.update({f"{stem}.{part}": x for part, x in parts.items()})
            if kind.startswith("gptq") and f"{stem}.bias" not in tensors:
                tensors[f"{stem}.bias"] = np.zeros(out, np.float16)  # its tools write these
        spoil(tensors)

    edit(folder, change)
    edit(plain, lambda tensors: tensors.update(meant))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": about}))
    return plain


@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_decoded_weights(kind, tmp_path):
    plain = quantise(tmp_path / "codes", kind)
    wanted = load(plain, dtype="f32")
    got = load(tmp_path / "codes", dtype="f32")
    assert_same(got.params, wanted.params)
    assert np.asarray(got.params["layers"]["down"]).std() > 0.5
    assert got.config == wanted.config
    assert load(tmp_path / "codes", dtype="f32", weights="int8").weights == "int8"


@pytest.mark.parametrize("kind", ["fp8", "gptq", "awq"])
def test_slices_are_decoded_alone(kind, tmp_path):
    """What a device of a mesh reads: also where its slice cuts words and blocks apart."""
    quantise(tmp_path / "codes", kind)
    checkpoint = open_checkpoint(tmp_path / "codes")
    scheme = read_scheme(json.loads((tmp_path / "codes" / "config.json").read_text()))
    found = find_weight(checkpoint, "model.layers.0.mlp.gate_proj.weight", scheme)
    whole = decode_slice(found, (slice(None), slice(None)))
    assert whole.shape == (24, 16)
    for index in (
        (slice(5, 19), slice(None)),
        (slice(None), slice(3, 13)),
        (slice(8, 16), slice(8, 16)),
    ):
        np.testing.assert_array_equal(decode_slice(found, index), whole[index])


def config_with(folder, about):
    save_params(folder, random_params(), CONFIG)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": about}))
    return folder


@pytest.mark.parametrize(
    ("about", "text"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "decoded are quant_method fp8, gptq, awq and mxfp4",
        ),
        (
            {"quant_method": "compressed-tensors"},
            "decoded are quant_method fp8, gptq, awq and mxfp4",
        ),
        ("int4", "decoded are quant_method fp8, gptq, awq and mxfp4"),
        (
            GPTQ | {"bits": 3},
            "quantization_config.bits = 3 is not supported; gptq is decoded of 4 or 8 bits",
        ),
        (AWQ | {"version": "gemv"}, 'quantization_config.version = "gemv"'),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            'quantization_config.checkpoint_format = "marlin"',
        ),
        (FP8 | {"weight_block_size": [128]}, r"quantization_config.weight_block_size = \[128\]"),
    ],
)
def test_unknown_quantisation_is_refused_by_name(about, text, tmp_path):
    with pytest.raises(UserError, match=text) as caught:
        read_config(config_with(tmp_path, about))
    assert "\n" not in str(caught.value)


def without(part: str):
    return lambda t: [
        t.pop(name)
        for name in list(t)
        if name.endswith(part) and "layers.1.self_attn.q_proj" in name
    ]


def with_shape(part: str, shape):
    return lambda t: t.update(
        {f"model.layers.1.self_attn.q_proj.{part}": np.zeros(shape, np.float16)}
    )


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        (
            "fp8",
            without("weight_scale_inv"),
            "q_proj.weight_scale_inv' is missing; without it .* cannot be decoded",
        ),
        ("fp8", with_shape("weight_scale_inv", (1, 1)), r"has shape \[1, 1\], wanted \[4, 2\]"),
        ("gptq", without("qzeros"), "q_proj.qzeros' is missing"),
        ("gptq", with_shape("qweight", (2, 32)), "qweight' has dtype F16, wanted I32"),
        ("awq", with_shape("scales", (2, 30)), r"scales' has shape \[2, 30\], wanted \[2, 32\]"),
        ("awq", without("qweight"), "q_proj.weight' is missing"),
    ],
)
def test_parts_that_do_not_fit(kind, change, text, tmp_path):
    quantise(tmp_path / "codes", kind, change)
    with pytest.raises(UserError, match=text) as caught:
        load(tmp_path / "codes")
    assert "\n" not in str(caught.value)


def test_fp8_without_its_description_is_refused(tmp_path):
    quantise(tmp_path / "codes", "fp8")
    file = tmp_path / "codes" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": None}))
    with pytest.raises(
        UserError, match=r"is FP8, but config.json has no quantization_config of fp8"
    ):
        load(tmp_path / "codes")


def test_zero_biases_alone_are_passed_over(tmp_path):
    quantise(tmp_path / "codes", "gptq")
    assert "model.layers.0.mlp.up_proj.bias" in load_file(tmp_path / "codes" / "model.safetensors")
    edit(tmp_path / "codes", lambda t: t["model.layers.0.mlp.up_proj.bias"].__setitem__(3, 1.0))
    with pytest.raises(
        UserError, match=r"'model.layers.0.mlp.up_proj.bias' is not part of Qwen2ForCausalLM"
    ):
        load(tmp_path / "codes")


EXPERTS = ModelConfig(
    vocab_size=32,
    width=24,
    mlp_width=20,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    architecture="Qwen3MoeForCausalLM",
    experts=ExpertConfig(count=3, per_token=2, width=20),
)


def fuse(tensors: dict):
    """The tensors of each layer's experts, and their scales, as one."""
    for layer, scales in itertools.product(range(2), ("", "_scale_inv")):
        front = f"model.layers.{layer}.mlp.experts"

        def take(n, x, front=front, scales=scales):
            return tensors.pop(f"{front}.{x}.{n}_proj.weight{scales}")

        pairs = [np.concatenate([take("gate", x), take("up", x)]) for x in range(3)]
        tensors[f"{front}.gate_up_proj{scales}"] = np.stack(pairs)
        tensors[f"{front}.down_proj{scales}"] = np.stack([take("down", x) for x in range(3)])


def test_fused_experts_of_fp8(tmp_path):
    """Codes and scales of blocks of all experts in one tensor each, as single ones are decoded."""
    name = "model.layers.1.mlp.experts.gate_up_proj"

    def code(tensors):
        random = np.random.default_rng(0)
        for matrix in [matrix for matrix in tensors if ".experts." in matrix]:
            parts, _ = fp8(random, *tensors[matrix].shape)
            tensors |= {matrix: parts["weight"], f"{matrix}_scale_inv": parts["weight_scale_inv"]}

    def write(kind: str, *changes):
        save_params(tmp_path / kind, random_params(EXPERTS), EXPERTS)
        file = tmp_path / kind / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": FP8}))
        edit(tmp_path / kind, lambda tensors: [change(tensors) for change in changes])
        return tmp_path / kind

    apart, fused = write("apart", code), write("fused", code, fuse)
    assert open_checkpoint(fused)[name].shape == (3, 40, 24)
    assert_same(load(fused, dtype="f32").params, load(apart, dtype="f32").params)
    odd = write("odd", code, fuse, lambda t: t.update({name: t[name][:, 1:]}))
    with pytest.raises(
        UserError, match=r"has shape .3, 39, 24., wanted .experts, 2 x outputs, inputs."
    ):
        load(odd)
