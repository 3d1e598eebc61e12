"""The first things a newcomer meets: the version, dtypes by every name, a model in print, a
checkpoint's own sampling."""

import datetime
import importlib
import json
import re
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import run
from tiny import tiny

import kvqjax as kvq
from kvqjax.generation.options import GenerateOptions
from kvqjax.model import locate
from kvqjax.model.loading import read_sampling

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def test_the_version_is_printed(call):
    assert call("--version") == (0, f"kvqjax {kvq.__version__}\n", "")


@pytest.mark.smoke
def test_the_version_has_one_home():
    """The package's metadata, the citation and README's entry for a bibliography say what the code
    says."""
    assert metadata.version("kvqjax") == kvq.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {kvq.__version__}\n" in citation
    assert f"version = {{{kvq.__version__}}}" in (ROOT / "README.md").read_text()
    assert kvq.__version__ not in (ROOT / "pyproject.toml").read_text()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def test_the_changelog_ends_at_the_version():
    """Its versions have dates and fall. A development version comes after the newest and has a
    section of its own."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    is_development = kvq.__version__.endswith(".dev0")
    assert (headings[0] == "Unreleased") == is_development
    releases = [heading.split(" - ") for heading in headings if heading != "Unreleased"]
    dates = [datetime.date.fromisoformat(date) for _, date in releases]
    assert dates == sorted(dates, reverse=True)
    versions = [numbers(version) for version, _ in releases]
    assert versions == sorted(set(versions), reverse=True)
    version = numbers(kvq.__version__.removesuffix(".dev0"))
    assert version > versions[0] if is_development else version == versions[0]


@pytest.mark.parametrize("command", [(), ("generate",), ("eval", "ppl"), ("plan",)])
def test_short_help(call, command):
    code, out, err = call(*command, "-h")
    assert (code, err) == (0, "")
    assert (code, out, err) == call(*command, "--help")


@pytest.mark.parametrize("name", ["bfloat16", "bf16", jnp.bfloat16, np.dtype("bfloat16")])
def test_dtypes_by_every_name(name):
    assert kvq.load("recall", dtype=name).params["embed"].dtype == jnp.bfloat16


@pytest.mark.parametrize(("short", "name"), [("f16", "float16"), ("f32", "float32")])
def test_short_dtypes_mean_the_same(short, name):
    assert {
        kvq.load("recall", dtype=n).params["embed"].dtype.name
        for n in (short, name, jnp.dtype(name))
    } == {name}


PACKAGES = (
    "calibrate",
    "eval",
    "eval.tune",
    "cache",
    "methods",
    "codecs",
    "model",
    "generation",
    "testing",
    "flax_bridge",
)


@pytest.mark.parametrize("name", ["", *PACKAGES])
def test_dir_lists_what_is_public_and_nothing_else(name):
    module = importlib.import_module(f"kvqjax.{name}".rstrip("."))
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, public) is not None for public in dir(module))


def test_a_ledger_prints_as_a_table():
    model = kvq.load("recall")
    book = kvq.ledger(jax.eval_shape(lambda: kvq.init_cache(model, "kvquant:bits=3", 2, 4096)))
    lines = str(book).splitlines()
    assert lines[0].startswith(
        f"cache of 2 rows of 4096 tokens: {book.bits_stored:.4g} bits per number, "
    )
    assert lines[1].split("  ")[0] == "role"
    assert max(map(len, lines)) <= 80
    cells = {line.split("  ")[0]: line.split()[-1] for line in lines[3:-1]}
    assert {
        "numbers or codes",
        "outliers",
        "scales",
        "exact sinks",
        "exact window",
        "lengths and flags",
        "all",
    } <= set(cells)
    assert float(cells["all"]) == pytest.approx(book.bits_stored, rel=1e-3)
    rows = book.table()
    assert sum(row["bytes"] for row in rows[:-1]) == rows[-1]["bytes"] == book.bytes
    assert sum(row["bits_per_number"] for row in rows[:-1]) == pytest.approx(book.bits_stored)
    assert f"<td>{rows[-1]['bits_per_number']:.4g}</td>" in book._repr_html_()


def test_a_model_prints_as_one_line():
    model = kvq.load("demo")
    assert repr(model) == (
        "Model(demo: 3 layers of width 128, 4 query and 2 KV heads of 64, 2048 tokens, 1,000,320 numbers in float32)"
    )
    strange = (
        jax.eval_shape(lambda: model),
        jax.tree.map(lambda x: None, model),
        kvq.load("recall", weights="int4"),
    )
    for other in strange:
        assert re.fullmatch(r"Model\(.*\)", repr(other)), other
    ready = model.with_artifact(kvq.calibrate.run(model, "xquant:latent=true"))
    assert repr(ready).endswith("in float32, with calibrated constants)")


def generation(folder: Path, **fields) -> Path:
    """The folder, with these fields in its generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_a_checkpoint_s_sampling_is_used_on_request_only(tmp_path, monkeypatch):
    """The checkpoint says do_sample, yet `generate` is greedy until it is given
    `sampling_defaults()`."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(locate("recall") / name)
    model = kvq.load(generation(tmp_path, do_sample=True, temperature=0.6, top_k=40, top_p=0.95))
    assert model.sampling_defaults() == {"temperature": 0.6, "top_k": 40, "top_p": 0.95}
    drawn = []

    def begun(*arguments):
        drawn.append(arguments[2])
        # Nothing needs to be generated: which options are read is all that is asked.
        raise kvq.UserError("begun")

    monkeypatch.setattr("kvqjax.generation.decoding.Settings.of", begun)
    for asked in ({}, model.sampling_defaults()):
        with pytest.raises(kvq.UserError, match="begun"):
            kvq.generate(model, "ab12", **asked)
    assert drawn == [GenerateOptions(), GenerateOptions(temperature=0.6, top_k=40, top_p=0.95)]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            {"repetition_penalty": 1.1},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
    ],
)
def test_what_a_checkpoint_s_sampling_becomes(tmp_path, fields, options):
    assert read_sampling(generation(tmp_path, **fields)) == options
    GenerateOptions(**options)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot"},
        {"top_k": 1.5},
        {"top_p": True},
        {"min_p": [1]},
        {"top_k": float("inf")},
        {"top_k": float("nan")},
        {"temperature": 10**400},
    ],
)
def test_sampling_that_is_no_number(tmp_path, fields):
    with pytest.raises(
        kvq.UserError, match=rf"generation_config.json: {next(iter(fields))}=.* is not of type"
    ):
        read_sampling(generation(tmp_path, do_sample=True, **fields))


def test_models_without_a_folder_state_no_sampling():
    assert tiny().sampling_defaults() == {}
