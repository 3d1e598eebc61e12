"""Broken checkpoints: one clear line for everything that is wrong."""

import json
import struct

import numpy as np
import pytest
from checkpoints import CONFIG, Q_PROJ, assert_same, edit, random_params, split
from hf_folders import save_params

from kvqjax import UserError, load


@pytest.fixture
def folder(tmp_path):
    save_params(tmp_path, random_params(), CONFIG)
    return tmp_path


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lie_about_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**40) + file.read_bytes()[8:])


def wrong_index(folder):
    split(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    places = index["weight_map"]
    places[Q_PROJ] = next(other for other in places.values() if other != places[Q_PROJ])
    file.write_text(json.dumps(index))


def outside_index(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../a.safetensors"}})
    )


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def vision_alone(folder):
    edit(
        folder,
        lambda t: (
            t.clear(),
            t.update({"vision_tower.patch_conv.weight": np.zeros((4, 4), np.float32)}),
        ),
    )


BROKEN = {
    "bin": (
        pickled,
        "pytorch_model.bin: a .bin file can run code and is not read; convert it where .*m.save_pretrained",
    ),
    "vision alone": (
        vision_alone,
        "holds a vision model alone .'vision_tower.patch_conv.weight' and its like.",
    ),
    "vision too": (
        lambda f: edit(
            f, lambda t: t.update({"multi_modal_projector.norm.weight": np.zeros(4, np.float32)})
        ),
        r"tensor 'multi_modal_projector.norm.weight' is of the vision part .1 such.*text_only=True loads",
    ),
    "truncated": (
        truncate,
        r"model.safetensors: truncated: its header describes \d+ bytes, the file has \d+$",
    ),
    "garbage": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x93" * 999),
        "not a safetensors file",
    ),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "not a safetensors file"),
    "header length": (lie_about_header, "not a safetensors file .header of 1099511627776 bytes"),
    "no file": (
        lambda f: (f / "model.safetensors").unlink(),
        "no model.safetensors or model.safetensors.index.json",
    ),
    "missing tensor": (lambda f: edit(f, lambda t: t.pop(Q_PROJ)), f"tensor '{Q_PROJ}' is missing"),
    "missing head": (
        lambda f: edit(f, lambda t: t.pop("lm_head.weight")),
        "'lm_head.weight' is missing; config.json says tie_word_embeddings = false",
    ),
    "wrong shape": (
        lambda f: edit(f, lambda t: t.update({Q_PROJ: np.zeros((16, 32), np.float32)})),
        f"'{Q_PROJ}' has shape .16, 32., wanted .32, 16.",
    ),
    "quantised": (
        lambda f: edit(f, lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.int8)})),
        f"'{Q_PROJ}' has dtype I8, wanted one of F64, F32, F16, BF16",
    ),
    "unread tensor": (
        lambda f: edit(
            f, lambda t: t.update({"model.layers.0.mlp.up_proj.bias": np.zeros(24, np.float32)})
        ),
        "'model.layers.0.mlp.up_proj.bias' is not part of Qwen2ForCausalLM",
    ),
    "missing shard": (
        lambda f: (split(f), (f / "model-00001.safetensors").unlink()),
        "index.json: 1 of 3 files it names are missing: model-00001.safetensors$",
    ),
    "index names a wrong shard": (
        wrong_index,
        f"tensor '{Q_PROJ}' is missing, though the index places it here",
    ),
    "index names a path": (outside_index, "is not a file name in this folder"),
    "index is no index": (
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        "model.safetensors.index.json: wanted a JSON object, got list",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_checkpoints_are_refused_in_one_line(kind, folder, capsys):
    spoil, text = BROKEN[kind]
    assert_same(load(folder, dtype="f32").params, random_params())
    spoil(folder)
    with pytest.raises(UserError, match=text) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_float16_overflow_is_refused(folder):
    edit(folder, lambda t: t[Q_PROJ].__setitem__((0, 0), 1e5))
    load(folder, dtype="bf16")
    with pytest.raises(UserError, match="exceeds float16's range"):
        load(folder, dtype="f16")
