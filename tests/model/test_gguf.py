"""GGUF files: equal to the checkpoint they were made from, to transformers' reading of them, and
block for block to an independent decoding; what is wrong with a file is one line."""

import contextlib
import dataclasses
import re
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly
from checkpoints import assert_same, random_params
from commands import run
from hf_folders import save_params

gguf = pytest.importorskip("gguf", reason="needs the package gguf, of the extra of the same name")

from gguf_files import write_gguf, write_vocabulary  # noqa: E402

import kvqjax as kvq  # noqa: E402
from kvqjax.cache.artifacts import Artifact  # noqa: E402
from kvqjax.model.checkpoint import fingerprint, open_checkpoint, read_slice  # noqa: E402
from kvqjax.model.config import ExpertConfig, ModelConfig, RecurrentConfig, RopeConfig  # noqa: E402
from kvqjax.model.decoder import logits  # noqa: E402
from kvqjax.model.gguf_file import BLOCKS, read_header  # noqa: E402
from kvqjax.model.gguf_model import find_tensors  # noqa: E402
from kvqjax.model.hf_config import read_config  # noqa: E402
from kvqjax.model.rope import inverse_frequencies  # noqa: E402
from kvqjax.model.weights import load_params  # noqa: E402

BASE = ModelConfig(
    vocab_size=64,
    width=32,
    mlp_width=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    max_position=128,
    architecture="LlamaForCausalLM",
)


def family(name: str, **changes) -> ModelConfig:
    return dataclasses.replace(BASE, architecture=f"{name}ForCausalLM", **changes)


EXPERTS = ExpertConfig(count=3, per_token=2, width=64)
FAMILIES = {
    "llama": BASE,
    "llama-tied-head-dim": family("Llama", tied_embeddings=True, head_dim=12, num_kv_heads=1),
    "mistral-window": family("Mistral", sliding_window=16),
    "mixtral": family("Mixtral", experts=EXPERTS),
    "qwen2": family("Qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": family("Qwen3", qk_norm=True, head_dim=16),
    "qwen2-moe": family(
        "Qwen2Moe",
        qkv_bias=True,
        experts=ExpertConfig(count=3, per_token=2, width=32, shared_width=64, normalised=False),
    ),
    "qwen3-moe": family(
        "Qwen3Moe", qk_norm=True, experts=ExpertConfig(count=3, per_token=2, width=32)
    ),
}


GEMMA = {
    "norm_offset": 1.0,
    "post_norms": True,
    "activation": "gelu_tanh",
    "embedding_scale": 32**0.5,
    "tied_embeddings": True,
}
RECURRENT = {
    "qk_norm": True,
    "norm_offset": 1.0,
    "output_gate": True,
    "head_dim": 16,
    "rope": RopeConfig(theta=1e6, fraction=0.25),
    "recurrent": RecurrentConfig(
        layers=(0, 2, 3), key_heads=2, value_heads=6, key_dim=4, value_dim=4, kernel=4
    ),
}
LINEAR = RopeConfig(theta=1e6, kind="linear", factor=8.0, original_max_position=16)
# What the converters of these do besides renaming stands in tests/gguf_files.py.
CONVERTED = {
    "gemma2": family(
        "Gemma2", softcap=50.0, logit_softcap=30.0, sliding_window=(16, None), **GEMMA
    ),
    "gemma3": family(
        "Gemma3",
        qk_norm=True,
        num_layers=6,
        sliding_window=(*[16] * 5, None),
        rope=(*[RopeConfig()] * 5, LINEAR),
        **GEMMA,
    ),
    "gpt-oss": family(
        "GptOss",
        qkv_bias=True,
        output_bias=True,
        score_sinks=True,
        sliding_window=(16, None),
        mlp_width=32,
        experts=ExpertConfig(count=3, per_token=2, width=32, biases=True, swiglu_limit=7.0),
        rope=RopeConfig(
            kind="yarn",
            theta=150000.0,
            factor=32.0,
            original_max_position=32,
            truncate=False,
            attention_factor=1.5,
        ),
    ),
    "qwen3.5": family("Qwen3_5", **RECURRENT),
    "qwen3.5-moe": family(
        "Qwen3_5Moe",
        mlp_width=32,
        experts=ExpertConfig(count=3, per_token=2, width=32, shared_width=64),
        **RECURRENT,
    ),
}


def made(config: ModelConfig, tmp_path: Path, **options) -> tuple[Path, Path]:
    """A random checkpoint as a Hugging Face folder, and as a GGUF file."""
    save_params(tmp_path / "hf", random_params(config), config)
    return tmp_path / "hf", write_gguf(tmp_path / "hf", tmp_path / "model.gguf", **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_and_config_are_those_of_the_checkpoint(name, tmp_path):
    folder, file = made(FAMILIES[name], tmp_path)
    config = read_config(file)
    assert config == read_config(folder)
    assert_same(load_params(file, config), load_params(folder, config))
    parts, theirs = (
        dict(p.split("=") for p in fingerprint(x, config).split(",")) for x in (file, folder)
    )
    assert parts["config"] == theirs["config"]
    assert parts["samples"] == fingerprint(file, config).rpartition("=")[2]


def assert_close(got, wanted):
    """Equal but for the rounding of 1 + weight, and of a logarithm of an exponential, of numbers
    below 5."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), got, wanted)


@pytest.mark.parametrize("name", CONVERTED)
def test_weights_that_are_stored_in_another_form(name, tmp_path):
    folder, file = made(CONVERTED[name], tmp_path)
    config = read_config(file)
    assert config == read_config(folder) == CONVERTED[name]
    assert_close(load_params(file, config), load_params(folder, config))


@pytest.mark.parametrize("pattern", [3, [True, True, False, True, True, False]])
def test_which_layers_slide(pattern, tmp_path):
    config = CONVERTED["gemma3"]

    def add(w):
        return (w.add_array if isinstance(pattern, list) else w.add_uint32)(
            "gemma3.attention.sliding_window_pattern", pattern
        )

    _, file = made(config, tmp_path, extra=add)
    assert read_config(file).windows == (16, 16, None) * 2


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_largest_gemma(name, layers, tmp_path):
    """No file says what scores are divided by: in the models of 27B it is the root of width /
    heads."""

    def extra(writer):
        for data in writer.kv_data:
            data.pop(f"{name}.block_count")
        writer.add_block_count(layers)

    config = dataclasses.replace(CONVERTED[name], head_dim=16)
    assert read_config(made(config, tmp_path / "small")[1]).scale is None
    assert read_config(made(config, tmp_path / "large", extra=extra)[1]).scale == (32 / 4) ** -0.5


def test_heads_of_values_in_blocks(tmp_path):
    """Columns in another order within blocks of codes: each head of values is half a block."""
    shape = RecurrentConfig(
        layers=(0,), key_heads=2, value_heads=4, key_dim=4, value_dim=16, kernel=4
    )
    config = dataclasses.replace(CONVERTED["qwen3.5"], recurrent=shape, num_layers=1)
    folder, file = made(config, tmp_path, kind="Q8_0")
    got, wanted = open_checkpoint(file), open_checkpoint(folder)
    name = "model.layers.0.linear_attn.out_proj.weight"
    exact = read_slice(wanted[name], (slice(None), slice(None)))
    rounded = read_slice(got[name], (slice(None), slice(None)))
    np.testing.assert_allclose(
        rounded, exact, rtol=0, atol=np.abs(exact).max() / 127 * 0.51 + 2**-11
    )
    part = (slice(3, 20), slice(5, 41))
    np.testing.assert_array_equal(read_slice(got[name], part), rounded[part])


def test_layers_that_draft_tokens_are_left_out(tmp_path):
    """A file may have them behind the others, and count them."""
    config = CONVERTED["qwen3.5"]
    folder, _ = made(config, tmp_path)

    def extra(writer):
        count = config.depth
        for data in writer.kv_data:
            data.pop("qwen35.block_count"), data.pop("qwen35.attention.recurrent_layers")
        writer.add_block_count(count + 1)
        writer.add_array(
            "qwen35.attention.recurrent_layers", [index in (0, 2, 3) for index in range(count + 1)]
        )
        writer.add_uint32("qwen35.nextn_predict_layers", 1)

    def change(tensors):
        drafting = f"blk.{config.depth}."
        tensors[f"{drafting}attn_norm.weight"] = tensors["blk.0.attn_norm.weight"]
        tensors[f"{drafting}nextn.eh_proj.weight"] = np.zeros((32, 64), np.float32)

    file = write_gguf(folder, tmp_path / "drafting.gguf", extra=extra, change=change)
    assert read_config(file) == config
    assert_close(load_params(file, config), load_params(folder, config))


def test_gates_of_experts_beside_their_inner_matrices(tmp_path):
    def together(tensors):
        for name in [name for name in tensors if "ffn_gate_exps" in name]:
            pair = [tensors.pop(name), tensors.pop(name.replace("gate", "up"))]
            tensors[name.replace("gate", "gate_up")] = np.concatenate(pair, 1)

    folder, file = made(FAMILIES["qwen3-moe"], tmp_path, change=together)
    assert_same(load_params(file, read_config(file)), load_params(folder, read_config(folder)))


def test_old_files_have_a_tensor_for_every_expert(tmp_path):
    def apart(tensors):
        for name in [name for name in tensors if "_exps" in name]:
            for number, matrix in enumerate(tensors.pop(name)):
                tensors[name.replace("_exps.", f".{number}.")] = matrix

    folder, file = made(FAMILIES["mixtral"], tmp_path, change=apart)
    assert_same(load_params(file, read_config(file)), load_params(folder, read_config(folder)))


# --- Rotary embedding ---

LLAMA3 = RopeConfig(
    kind="llama3",
    theta=500.0,
    factor=8.0,
    original_max_position=32,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = RopeConfig(kind="yarn", theta=1000.0, factor=4.0, original_max_position=32)
YARN_FACTOR = float(0.1 * np.log(4.0) + 1.0)


def without_factor(writer):
    for data in writer.kv_data:
        data.pop("llama.rope.scaling.yarn_attn_factor", None)


def multiplied(writer):
    without_factor(writer)
    writer.add_rope_scaling_attn_factors(1.5)


@pytest.mark.parametrize(
    ("rope", "extra"),
    [
        (RopeConfig(kind="linear", theta=500.0, factor=4.0), lambda writer: None),
        (dataclasses.replace(YARN, attention_factor=YARN_FACTOR), without_factor),
        (
            dataclasses.replace(YARN, attention_factor=1.25, beta_fast=8.0, beta_slow=2.0),
            lambda writer: None,
        ),
        (dataclasses.replace(YARN, attention_factor=1.5 * YARN_FACTOR), multiplied),
    ],
    ids=["linear", "yarn", "yarn-stated", "yarn-multiplied"],
)
def test_rope_scaling(rope, extra, tmp_path):
    _, file = made(dataclasses.replace(BASE, rope=rope), tmp_path, extra=extra)
    got = read_config(file).rope
    assert dataclasses.replace(got, attention_factor=1.0) == dataclasses.replace(
        rope, attention_factor=1.0
    )
    assert got.attention_factor == pytest.approx(rope.attention_factor, rel=1e-7)


def test_llama3_divisors(tmp_path):
    """Llama 3's rope is a tensor of divisors; the frequencies are those of the checkpoint."""
    config = dataclasses.replace(BASE, rope=LLAMA3, head_dim=32)
    plain = dataclasses.replace(config, rope=RopeConfig(theta=LLAMA3.theta))
    divisors = inverse_frequencies(plain) / inverse_frequencies(config)

    def add(tensors):
        tensors["rope_freqs.weight"] = divisors.astype(np.float32)

    folder, file = made(config, tmp_path, change=add)
    got, wanted = read_config(file), read_config(folder)
    assert len(np.unique(divisors)) > 3
    np.testing.assert_allclose(inverse_frequencies(got), inverse_frequencies(wanted), rtol=1e-6)
    assert (got.rope.attention_factor, got.rope.limit) == (1.0, 128)
    assert_same(load_params(file, got), load_params(folder, wanted))


# --- Blocks, decoded by an implementation of the formats' own definition ---


def half(data: bytes) -> float:
    return float(np.frombuffer(data, "<f2")[0])


def five_bits(nibbles: np.ndarray, high: bytes) -> np.ndarray:
    bits = int.from_bytes(high, "little")
    return nibbles + 16 * np.array([bits >> place & 1 for place in range(32)])


def nibbles(data: bytes) -> np.ndarray:
    """Low halves of the bytes, then high halves."""
    codes = np.frombuffer(data, np.uint8).astype(int)
    return np.concatenate([codes & 15, codes >> 4])


def six_bit_scales(data: bytes) -> list[tuple[int, int]]:
    """Scale and minimum of the 8 groups of a block of 256."""
    pairs = []
    for group in range(8):
        if group < 4:
            pairs.append((data[group] & 63, data[group + 4] & 63))
        else:
            low, scale, minimum = data[group + 4], data[group - 4], data[group]
            pairs.append((low & 15 | scale >> 6 << 4, low >> 4 | minimum >> 6 << 4))
    return pairs


def grouped(block: bytes, codes: np.ndarray) -> np.ndarray:
    """Codes of 8 groups of 32 with their scales and minima."""
    d, dmin = half(block[:2]), half(block[2:4])
    out = [
        d * s * codes[32 * g : 32 * g + 32] - dmin * m
        for g, (s, m) in enumerate(six_bit_scales(block[4:16]))
    ]
    return np.concatenate(out)


def pairs_of_groups(data: bytes) -> np.ndarray:
    """256 nibbles: each 32 bytes hold a group in their low halves and the next one in their high
    halves."""
    return np.concatenate([nibbles(data[start : start + 32]) for start in range(0, 128, 32)])


def q5_k(block: bytes) -> np.ndarray:
    high = np.frombuffer(block[16:48], np.uint8).astype(int)
    return grouped(
        block, pairs_of_groups(block[48:]) + 16 * np.concatenate([high >> g & 1 for g in range(8)])
    )


def q6_k(block: bytes) -> np.ndarray:
    low, high = (
        np.frombuffer(block[:128], np.uint8).astype(int),
        np.frombuffer(block[128:192], np.uint8).astype(int),
    )
    scales, d, out = np.frombuffer(block[192:208], np.int8).astype(int), half(block[208:210]), []
    for part in range(2):
        a, b, h = (
            low[64 * part : 64 * part + 32],
            low[64 * part + 32 : 64 * part + 64],
            high[32 * part : 32 * part + 32],
        )
        codes = [a & 15, b & 15, a >> 4, b >> 4]
        out += [(code | (h >> 2 * place & 3) << 4) - 32 for place, code in enumerate(codes)]
    return d * np.repeat(scales, 16) * np.concatenate(out)


DECODE = {
    "Q4_0": lambda b: half(b[:2]) * (nibbles(b[2:]) - 8),
    "Q4_1": lambda b: half(b[:2]) * nibbles(b[4:]) + half(b[2:4]),
    "Q5_0": lambda b: half(b[:2]) * (five_bits(nibbles(b[6:]), b[2:6]) - 16),
    "Q5_1": lambda b: half(b[:2]) * five_bits(nibbles(b[8:]), b[4:8]) + half(b[2:4]),
    "Q8_0": lambda b: half(b[:2]) * np.frombuffer(b[2:], np.int8),
    "Q4_K": lambda b: grouped(b, pairs_of_groups(b[16:])),
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "MXFP4": lambda b: 2.0 ** (b[0] - 127) * E2M1[nibbles(b[1:])],
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Where a block has its float16 numbers, which random bytes would make infinite.
HALVES = dict.fromkeys(BLOCKS, (0, 2)) | dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,))
HALVES |= {"Q6_K": (208,), "MXFP4": ()}


def random_blocks(kind: str, rows: int, count: int) -> np.ndarray:
    random = np.random.default_rng(5)
    blocks = random.integers(0, 256, (rows, count, BLOCKS[kind][1]), np.uint8)
    for place in HALVES[kind]:
        blocks[..., place : place + 2] = (
            random.normal(size=(rows, count, 1)).astype("<f2").view(np.uint8)
        )
    if kind == "MXFP4":  # the exponent of a power of two, of which the largest have no float32
        blocks[..., 0] = random.integers(110, 140, (rows, count))
    return blocks


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks(kind, tmp_path):
    """Numbers of every type, of a slice too that begins and ends within blocks; rows of Llama's
    keys in their order."""
    size, _ = BLOCKS[kind]
    folder, _ = made(dataclasses.replace(BASE, width=2 * size), tmp_path)
    raw = gguf.GGMLQuantizationType[kind]
    blocks = {
        "token_embd.weight": random_blocks(kind, 64, 2),
        "blk.1.attn_k.weight": random_blocks(kind, 16, 2),
    }
    file = tmp_path / "blocks.gguf"
    written = write_blocks(folder, file, blocks, raw)
    checkpoint = open_checkpoint(written)
    plain = {
        name: np.stack(
            [np.concatenate([DECODE[kind](block.tobytes()) for block in row]) for row in rows]
        )
        for name, rows in blocks.items()
    }
    embedding, keys = (
        checkpoint["model.embed_tokens.weight"],
        checkpoint["model.layers.1.self_attn.k_proj.weight"],
    )
    full = read_slice(embedding, (slice(None), slice(None)))
    assert full.dtype == np.float32
    np.testing.assert_allclose(full, plain["token_embd.weight"], rtol=2e-6, atol=1e-5)
    part = (slice(3, 50), slice(size // 2 + 1, size + 3))
    np.testing.assert_array_equal(read_slice(embedding, part), full[part])
    # Row h * D + 2 * j + s of the file is row h * D + s * D / 2 + j.
    order = [
        8 * head + 2 * pair + side for head in range(2) for side in range(2) for pair in range(4)
    ]
    np.testing.assert_allclose(
        read_slice(keys, (slice(5, 12), slice(1, size + 1))),
        plain["blk.1.attn_k.weight"][order][5:12, 1 : size + 1],
        rtol=2e-6,
        atol=1e-5,
    )


def write_blocks(folder, file, blocks, raw):
    """The model of a folder with some tensors as these blocks."""
    from gguf_files import stored, write_values

    config, tensors = stored(folder)
    writer = gguf.GGUFWriter(file, "llama")
    write_values(writer, config)
    for name, x in tensors.items():
        if name in blocks:
            writer.add_tensor(name, blocks[name].reshape(len(blocks[name]), -1), raw_dtype=raw)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "MXFP4"])
def test_models_of_every_kind_of_numbers(kind, tmp_path):
    """Every matrix of a model with experts: what the file's codes stand for, in the checkpoint's
    order."""
    folder, file = made(FAMILIES["mixtral"], tmp_path, kind=kind)
    config = read_config(file)
    raw = gguf.GGMLQuantizationType[kind]

    def rounded(name, leaf):
        if name.endswith("norm") or name == "layers/router":
            return np.asarray(leaf)
        transposed = np.asarray(leaf) if name == "embed" else np.swapaxes(np.asarray(leaf), -1, -2)
        numbers = gguf.quants.dequantize(
            gguf.quants.quantize(np.ascontiguousarray(transposed), raw), raw
        )
        return (
            numbers.astype(np.float32)
            if name == "embed"
            else np.swapaxes(numbers, -1, -2).astype(np.float32)
        )

    got, wanted = load_params(file, config), load_params(folder, config)
    named = jax.tree_util.tree_map_with_path(
        lambda path, leaf: rounded(
            "/".join(str(key.key) for key in path if hasattr(key, "key")), leaf
        ),
        wanted,
    )
    jax.tree.map(np.testing.assert_array_equal, got, named)


def test_slices_of_devices_are_those_of_the_file(tmp_path, monkeypatch):
    """A mesh's devices read their own rows and columns alone, of large tensors some rows at a
    time."""
    _, file = made(BASE, tmp_path, kind="Q8_0")
    model = kvq.load(file, layers="scan")
    config = model.config
    mesh = jax.make_mesh(
        (2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )

    def place(name):
        axes = {
            "layers/q": (None, None, "model"),
            "layers/o": (None, "model", None),
            "embed": (None, "model"),
        }
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes.get(name, ())))

    monkeypatch.setattr("kvqjax.model.weights.PART", 7 * 32)
    assert_same(load_params(file, config, sharding=place), model.params)


# --- Against transformers ---


@pytest.mark.parametrize("name", with_nightly(["llama", "qwen2", "qwen3"], ["qwen2"]))
def test_logits_equal_those_of_transformers_for_the_same_file(name, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="transformers reads GGUF files by torch")
    transformers = pytest.importorskip("transformers")
    # Of Qwen3's files transformers reads no head_dim, so theirs is its default.
    config = dataclasses.replace(FAMILIES[name], **({"head_dim": 128} if name == "qwen3" else {}))
    _, file = made(config, tmp_path, kind="Q8_0")
    # Asked for, and not used: that package would place weights on several devices.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype="float32"
    )
    model = kvq.load(file, dtype="f32")
    ids = np.random.default_rng(3).integers(0, 64, (2, 24)).astype(np.int32)
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    assert np.std(wanted) > 0.3
    np.testing.assert_allclose(
        logits(model.params, jnp.asarray(ids), model.config), wanted, rtol=0, atol=2e-3
    )


def test_header_equals_that_of_the_package(tmp_path):
    """Every value and every tensor's place, as the package's own reader has them."""
    _, file = made(
        FAMILIES["qwen2-moe"],
        tmp_path,
        extra=lambda w: w.add_token_list(["a", "ü", ""]),
        kind="Q4_0",
    )
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            got = ours.values[key]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == field.contents(), key
    places = {
        t.name: (tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes)
        for t in theirs.tensors
    }
    assert {name: (e.shape, e.start, e.nbytes) for name, e in ours.tensors.items()} == places


# --- What is wrong with a file ---


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A small file with a vocabulary, so that its header has every kind of value."""
    tokens = [f"t{number}" for number in range(64)]

    def extra(writer):
        write_vocabulary(writer, "gpt2", tokens, [1] * 64, pre="qwen2", merges=["a b"], eos=3)
        writer.add_bool("general.flag", True)

    folder = tmp_path_factory.mktemp("plain")
    return made(FAMILIES["qwen2"], folder, extra=extra)[1]


def refusal(action) -> str:
    with pytest.raises(kvq.UserError) as refused:
        action()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def number_at(data: bytes, place: int, value: int, code: str = "<I") -> bytes:
    size = struct.calcsize(code)
    return data[:place] + struct.pack(code, value) + data[place + size :]


WRONG = {
    "empty": (lambda data: b"", "not a GGUF file"),
    "foreign": (lambda data: b"PK\3\4" + data[4:], "not a GGUF file"),
    "before": (lambda data: b"tjgg" + data[4:], "of llama.cpp's format before GGUF"),
    "version-1": (lambda data: number_at(data, 4, 1), "GGUF version 1; read are 2 and 3"),
    "big-endian": (lambda data: number_at(data, 4, 3, ">I"), "a big-endian GGUF file"),
    "cut-header": (
        lambda data: data[:300],
        "truncated: its header goes on beyond the file's 300 bytes",
    ),
    "cut-data": (
        lambda data: data[:-1000],
        r"truncated: its header describes \d+ bytes, the file has \d+",
    ),
    "huge-count": (lambda data: number_at(data, 16, 2**60, "<Q"), "(damaged|truncated): "),
    "architecture": (
        lambda data: data.replace(b"qwen2", b"gemma"),
        "architecture 'gemma' is not supported; known: llama",
    ),
    "missing": (
        lambda data: data.replace(b"block_count", b"block_kount"),
        "qwen2.block_count is missing",
    ),
    "foreign-tensor": (
        lambda data: data.replace(b"1.ffn_up", b"1.ffn_ux"),
        "tensor 'model.layers.1.mlp.up_proj.weight'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files(name, plain, tmp_path):
    change, message = WRONG[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(change(plain.read_bytes()))
    line = refusal(lambda: kvq.load(file))
    assert str(file) in line
    assert re.search(message, line), line


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_shexp.weight"])
def test_experts_that_are_no_matrices(name, tmp_path):
    def flatten(tensors):
        tensors[name] = tensors[name].reshape(-1)

    _, file = made(FAMILIES["qwen2-moe"], tmp_path, change=flatten)
    assert f"{file}: damaged: tensor {name!r} has shape [" in refusal(lambda: kvq.load(file))


def test_every_cut_and_every_damaged_byte_of_a_header(plain, tmp_path):
    """A file that ends too soon is refused; one with another byte is read or refused. Nothing
    hangs."""
    data, file = plain.read_bytes(), tmp_path / "model.gguf"
    end = min(entry.start for entry in read_header(plain).tensors.values())
    for cut in range(0, end, 41):
        file.write_bytes(data[:cut])
        refusal(lambda: read_header(file))
    for place in range(0, end, 29):
        file.write_bytes(data[:place] + bytes([data[place] ^ 0xA5]) + data[place + 1 :])
        with contextlib.suppress(kvq.UserError):
            read_config(file)
            find_tensors(file)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (("split.count", 3), "one of 3 parts of a model; join them with llama-gguf-split --merge"),
        (("qwen2.rope.dimension_count", 4), "partial_rotary_factor = 0.5 is not supported"),
        (("qwen2.attention.value_length", 4), "values of another width than keys"),
    ],
)
def test_files_that_are_not_supported(value, message, tmp_path):
    def extra(writer):
        for data in writer.kv_data:
            data.pop(value[0], None)
        writer.add_uint32(*value)

    _, file = made(FAMILIES["qwen2"], tmp_path, extra=extra)
    assert message in refusal(lambda: read_config(file))


def test_types_that_are_not_read(tmp_path):
    """A plan needs no weights; a load names the tensor and its type."""
    folder, _ = made(dataclasses.replace(BASE, width=256), tmp_path)
    blocks = {"token_embd.weight": np.zeros((64, 1, 84), np.uint8)}
    file = write_blocks(folder, tmp_path / "two.gguf", blocks, gguf.GGMLQuantizationType.Q2_K)
    assert read_config(file).width == 256
    assert "'token_embd.weight' is Q2_K, which is not read here; read are F32" in refusal(
        lambda: kvq.load(file)
    )


def test_without_the_package(tmp_path, monkeypatch):
    """Plain numbers need no package; codes say which one they need before anything is read."""
    _, file = made(BASE, tmp_path)
    coded = write_gguf(tmp_path / "hf", tmp_path / "coded.gguf", kind="Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert kvq.load(file).config == read_config(coded)
    assert refusal(lambda: kvq.load(coded)).endswith(
        "its Q8_0 weights are decoded by the package gguf: pip install gguf"
    )


# --- Where a model is named ---


def test_a_plan_needs_no_weights(plain, capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "plan", "-c", "exact", "--model", str(plain))
    assert code == 0
    assert "1 row of 128 tokens" in " ".join(out.split())


def test_a_folder_that_holds_one_file_names_it(plain, tmp_path, capsys, monkeypatch):
    model = kvq.load(plain)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(plain.read_bytes())
    assert kvq.load(folder).fingerprint == model.fingerprint
    (folder / "b.gguf").write_bytes(plain.read_bytes())
    assert "2 GGUF files; name one, such as" in refusal(lambda: kvq.load(folder))
    code, out, err = run(
        capsys, monkeypatch, "generate", "-m", str(tmp_path / "no.gguf"), "-p", "a"
    )
    assert (code, out, err) == (2, "", f"error: {tmp_path / 'no.gguf'}: no such file\n")


def test_a_file_of_the_hub(plain, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, file: plain)
    assert kvq.load("owner/name/model.Q4_0.gguf").folder == str(plain)

    def fail(repository, file):
        raise OSError(f"no route to {repository}, {file}")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    line = refusal(lambda: kvq.load("owner/name/folder/model.gguf"))
    assert line.endswith(
        "is no file here and could not be had from the hub: no route to owner/name, folder/model.gguf"
    )


def test_artifacts_belong_to_their_file(plain, tmp_path):
    """The fingerprint names the part that differs, as of any other checkpoint."""
    model = kvq.load(plain)
    artifact = Artifact(kvq.parse("exact"), (), model.fingerprint)
    assert model.with_artifact(artifact).calibrated == (artifact.method,)
    other = bytearray(plain.read_bytes())
    entry = read_header(plain).tensors["blk.0.attn_q.weight"]
    other[entry.start] ^= 1
    (tmp_path / "other.gguf").write_bytes(other)
    line = refusal(lambda: kvq.load(tmp_path / "other.gguf").with_artifact(artifact))
    assert "artifact is for another model: fingerprint samples is" in line
