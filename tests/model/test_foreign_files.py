"""Checkpoints as editors, exporters and older libraries leave them: each gives the same model, or
is one line."""

import codecs
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import edit, split

import kvqjax as kvq
from kvqjax import parse
from kvqjax.model import locate

CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
TEXT = "qx47,rt05,?rt"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(locate("recall"), tmp_path / "model"))


@pytest.fixture(scope="module")
def plain() -> kvq.Model:
    return kvq.load("recall")


def recode(name, encoding):
    return lambda folder: (folder / name).write_bytes((folder / name).read_text().encode(encoding))


def append(name, raw: bytes):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + raw)


def replace(name, raw: bytes):
    return lambda folder: (folder / name).write_bytes(raw)


def put(name, dropped=(), **fields):
    """Write fields into a JSON file, in which numbers that JSON has not stay as Python writes
    them."""

    def change(folder):
        tree = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        tree = {key: value for key, value in (tree | fields).items() if key not in dropped}
        (folder / name).write_text(json.dumps(tree))

    return change


def named(front, removed=""):
    def change(tensors):
        for name in list(tensors):
            tensors[front + name.removeprefix(removed)] = tensors.pop(name)

    return lambda folder: edit(folder, change)


def index(change):
    """Split the weights and rewrite the index, of which `change` gets the map."""

    def changed(folder):
        split(folder, 2)
        (folder / INDEX).write_text(
            json.dumps({"weight_map": change(json.loads((folder / INDEX).read_text()))})
        )

    return changed


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def buffers(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)


SAME = {
    "config with a mark": recode(CONFIG, "utf-8-sig"),
    "config in utf-16": recode(CONFIG, "utf-16"),
    "config with dos lines": lambda folder: (folder / CONFIG).write_bytes(
        (folder / CONFIG).read_bytes().replace(b"\n", b"\r\n")
    ),
    "config with empty lines at its end": append(CONFIG, b"\n\n \r\n"),
    "config with half a surrogate pair": put(CONFIG, _name_or_path="a \ud83d"),
    "config with infinities in other fields": put(CONFIG, _other=[0.0, float("inf"), float("nan")]),
    "dtype of transformers 4": put(CONFIG, dropped=("dtype",), torch_dtype="float32"),
    "dtype of transformers 5": put(CONFIG, dropped=("torch_dtype",), dtype="float32"),
    "rope of transformers 4": put(CONFIG, rope_theta=10000, rope_scaling={"type": "default"}),
    "rope of transformers 5": put(
        CONFIG,
        dropped=("rope_theta", "rope_scaling"),
        rope_parameters={"rope_type": "default", "rope_theta": 10000},
    ),
    "both spellings of a rope's kind": put(
        CONFIG, rope_scaling={"type": "default", "rope_type": "default"}
    ),
    "an end id in a list": put(CONFIG, eos_token_id=[1]),
    "the end id in generation_config alone": both(
        put(CONFIG, eos_token_id=None), put(GENERATION, eos_token_id=1)
    ),
    "generation_config with a mark": both(
        put(GENERATION, eos_token_id=[1]), recode(GENERATION, "utf-8-sig")
    ),
    "a begin id in a list": put(CONFIG, bos_token_id=[0]),
    "tokenizer.json with a mark": recode(TOKENIZER, "utf-8-sig"),
    "tokenizer_config with a mark": recode(SETTINGS, "utf-8-sig"),
    "special tokens as objects": put(
        SETTINGS, eos_token={"content": "</s>", "lstrip": False, "__type": "AddedToken"}
    ),
    "a decoder saved alone": named("", "model."),
    "weights of a compiled model": named("_orig_mod."),
    "weights of data parallel training": named("module."),
    "buffers among the weights": lambda folder: edit(folder, buffers),
    "an index with a mark": both(
        index(lambda tree: tree["weight_map"]), recode(INDEX, "utf-8-sig")
    ),
    "an index with ./ in front": index(
        lambda tree: {n: f"./{file}" for n, file in tree["weight_map"].items()}
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_model_however_it_was_saved(folder, plain, name):
    SAME[name](folder)
    found = kvq.load(folder)
    assert found.config == plain.config
    assert found.encode(TEXT) == plain.encode(TEXT)
    for part in ("embed", "norm"):
        np.testing.assert_array_equal(found.params[part], plain.params[part])


ONE_LINE = {
    "comma": (replace(CONFIG, b'{"a": 1,}'), r"config\.json: not readable as JSON: line 1, column"),
    "empty": (replace(CONFIG, b""), r"config\.json: .*the file is empty"),
    "holes": (append(CONFIG, bytes(9)), r"config\.json: not text: a NUL"),
    "latin-1": (replace(CONFIG, b'{"a": "\xe9"}'), r"config\.json: not UTF-8 text"),
    "nested": (replace(CONFIG, b"[" * 100_000), r"config\.json: not readable as JSON"),
    "no object": (replace(CONFIG, b"[]"), r"wanted a JSON object, got list"),
    "no number": (put(CONFIG, rms_norm_eps=float("nan")), "rms_norm_eps = NaN"),
    "text for a number": (put(CONFIG, rms_norm_eps="1e-05"), 'rms_norm_eps = "1e-05"'),
    "half generation_config": (
        replace(GENERATION, b'{"eos_token_id": '),
        r"generation_config\.json: not readable",
    ),
    "half tokenizer": (
        replace(TOKENIZER, b'{"version": '),
        r"tokenizer\.json: not readable as JSON",
    ),
    "another's tokenizer": (replace(TOKENIZER, b"{}"), "the tokenizer cannot be read"),
    "comma in the settings": (
        replace(SETTINGS, b'{"a": 1,}'),
        r"tokenizer_config\.json: not readable as JSON",
    ),
    "half an index": (
        both(index(dict), replace(INDEX, b"{")),
        r"index\.json: not readable as JSON",
    ),
    "an empty index": (
        both(index(dict), replace(INDEX, b'{"weight_map": {}}')),
        "no readable weight_map",
    ),
    "numbers in an index": (
        index(lambda tree: dict.fromkeys(tree["weight_map"], 3)),
        "=3 is not a file name in this",
    ),
    "another machine's paths": (
        index(lambda tree: {n: f"/home/me/{file}" for n, file in tree["weight_map"].items()}),
        "is not a file name in this folder",
    ),
}


@pytest.mark.parametrize("name", ONE_LINE)
def test_what_cannot_be_read_is_one_line(folder, name):
    change, message = ONE_LINE[name]
    change(folder)
    with pytest.raises(kvq.UserError, match=message) as caught:
        kvq.load(folder).encode(TEXT)
    assert "\n" not in str(caught.value)


TEMPLATE = "{% for m in messages %}\n{{ m.role }}: {{ m.content }}\n{% endfor %}"
LISTED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
TEMPLATES = {
    "a field": put(SETTINGS, chat_template=TEMPLATE),
    "several by name": put(SETTINGS, chat_template=LISTED),
    "a file": replace("chat_template.jinja", TEMPLATE.encode()),
    "a file with a mark and dos lines": replace(
        "chat_template.jinja", codecs.BOM_UTF8 + TEMPLATE.replace("\n", "\r\n").encode()
    ),
    "as processors have it": put("chat_template.json", chat_template=TEMPLATE),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("through", ["tokenizers", "transformers"])
def test_chat_templates_are_found_where_exporters_put_them(folder, name, through):
    TEMPLATES[name](folder)
    if through == "transformers":  # which is asked for settings that are not repeated here
        put(SETTINGS, split_special_tokens=True)(folder)
    talk = [{"role": "user", "content": "Who came?"}]
    wanted = "user: Who came?\n"
    assert kvq.load(folder).tokenizer.apply_chat_template(talk, tokenize=False) == wanted


def test_text_that_no_tokenizer_reads_is_one_line(plain):
    with pytest.raises(kvq.UserError, match="no character at place 2"):
        plain.encode("a \ud83d b")


def test_policies_and_artifacts_with_marks_are_read(tmp_path, plain, capsys, monkeypatch):
    from commands import run

    (tmp_path / "policy.json").write_bytes(
        json.dumps({"method": "kivi", "bits": 2}).encode("utf-8-sig")
    )
    assert parse(tmp_path / "policy.json") == kvq.kivi(bits=2)
    kvq.calibrate.run(plain, "xquant:latent=true").save(tmp_path / "made")
    recode("description.json", "utf-8-sig")(tmp_path / "made")
    assert kvq.load_artifact(tmp_path / "made").fingerprint == plain.fingerprint
    assert run(capsys, monkeypatch, "inspect", str(tmp_path / "made"))[0] == 0
    for raw, message in ((b'{"method": "kivi",}', "line 1, column"), (b"\xff\xfe{", "not UTF-16")):
        (tmp_path / "policy.json").write_bytes(raw)
        with pytest.raises(kvq.UserError, match=message):
            parse(tmp_path / "policy.json")
