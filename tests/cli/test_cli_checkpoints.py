"""Checkpoints that cannot be served: one line on stderr and exit code 2."""

import json
import re
import shutil

import pytest
from commands import run

from kvqjax.model import locate

EXPERTS = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 6}
LONGROPE = {"rope_type": "longrope", "short_factor": [1] * 32, "long_factor": [4] * 32}
LONGROPE |= {"original_max_position_embeddings": 256}
# what the folder's config.json has besides, the files it loses, files that are renamed, words, what
# the line says
BAD = {
    "experts": (
        EXPERTS,
        {},
        ["plan", "-c", "exact", "--mesh", "model=4"],
        "mesh model=4 must divide .* and 6 experts",
    ),
    "quantisation": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {},
        ["plan", "-c", "exact"],
        "decoded are quant_method fp8, gptq, awq and mxfp4",
    ),
    "vision-only": (
        {"architectures": ["PixtralVisionModel"], "vision_config": {}},
        {},
        ["generate", "-p", "ab"],
        "a vision model without a language part",
    ),
    "pickle": (
        {},
        {"model.safetensors": "pytorch_model.bin"},
        ["generate", "-p", "ab"],
        "a .bin file can run code",
    ),
    "shards": (
        {},
        {"model.safetensors": "model-00001.safetensors"},
        ["generate", "-p", "ab"],
        "1 of 2 files it names are missing: model-00002.safetensors",
    ),
    "rope": (
        {"rope_scaling": LONGROPE},
        {},
        ["generate", "-p", "ab", "--capacity", "512"],
        r"512 tokens are more than the 256 .* longrope RoPE .*; load it with --rope-length 512",
    ),
}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(locate("recall"), tmp_path / "model")


def change(folder, fields: dict, renamed: dict):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    for name, other in renamed.items():
        (folder / name).rename(folder / other)
    if (folder / "model-00001.safetensors").exists():
        places = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("kind", BAD)
def test_refused_in_one_line(kind, folder, capsys, monkeypatch):
    fields, renamed, (command, *words), said = BAD[kind]
    change(folder, fields, renamed)
    code, out, err = run(capsys, monkeypatch, command, "-m", str(folder), *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(said, err), err


@pytest.mark.nightly
def test_longer_texts_when_they_are_said_beforehand(folder, capsys, monkeypatch):
    """The same folder and cache as are refused above."""
    change(folder, {"rope_scaling": LONGROPE}, {})
    words = ("generate", "-m", str(folder), "-p", "ab", "--capacity", "512", "-n", "1")
    code, out, _ = run(capsys, monkeypatch, *words, "--rope-length", "512")
    assert code == 0
    assert out
