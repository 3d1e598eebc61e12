"""Every number that a command takes is checked before any work begins: one line, exit code 2."""

import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_args, get_origin

import pytest
from cases import thinned
from commands import run

import kvqjax as kvq
from kvqjax.cli.app import COMMANDS as PLACES
from kvqjax.cli.app import command_of


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def options_of(command):
    """(option, annotated type, typer's description) of a command."""
    for name, parameter in inspect.signature(command).parameters.items():
        if get_origin(parameter.annotation) is Annotated:
            kind, info = get_args(parameter.annotation)
        else:
            kind, info = parameter.annotation, None
        # Typer keeps an Annotated option's first name where a default would stand.
        given = [
            n
            for n in (getattr(info, "default", None), *(getattr(info, "param_decls", None) or ()))
            if n
        ]
        given = [n for n in given if isinstance(n, str) and n.startswith("--")] or [
            f"--{name.replace('_', '-')}"
        ]
        yield given[0], kind, info


COMMANDS = {(name,): command_of(name) for name in PLACES if name != "eval"} | {
    ("eval", command.name): command.callback for command in command_of("eval").registered_commands
}
NUMBERS = {
    # Commands share an option by its description, which is then checked in one of them.
    id(info): pytest.param(words, option, info, id=" ".join((*words, option)))
    for words, command in COMMANDS.items()
    for option, kind, info in options_of(command)
    if kind in (int, float, int | None, float | None, list[int], list[float])
}


def test_the_walk_sees_every_command():
    assert {
        ("generate",),
        ("plan",),
        ("bench",),
        ("calibrate",),
        ("eval", "ppl"),
        ("eval", "harness"),
    } <= set(COMMANDS)
    assert len(NUMBERS) > 40
    assert None not in [row.values[2] for row in NUMBERS.values()]


@pytest.mark.parametrize(("words", "option", "info"), NUMBERS.values())
def test_numbers_beyond_the_bounds_are_one_line(call, words, option, info):
    assert info.min is not None
    assert info.max is not None
    for value in (info.min - 1, info.max + 1, 10**30, "many"):
        code, out, err = call(*words, option, str(value))
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert option in err


@pytest.mark.parametrize("option", ["temperature", "top-p", "min-p", "repetition-penalty"])
def test_what_no_bound_refuses_is_found_before_the_model_is_loaded(call, option):
    values = ["nan", "inf", *{"top-p": ["0"], "repetition-penalty": ["0"]}.get(option, [])]
    for value in values:
        code, out, err = call("generate", "-m", "/nowhere", "-p", "a", f"--{option}", value)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert option in err.replace("_", "-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "-p", "a", "--stop", ""], "--stop ''"),
        (["generate", "-p", "a", "--stream", "--json"], "--stream and --json"),
        (["generate", "-p", "a", "--in-chunks", "--chunk", "16"], "--in-chunks and --chunk"),
        (["plan", "-m", "recall", "-c", "kivi:window=2000000000"], "at most 1073741824 tokens"),
        (
            ["plan", "-m", "recall", "-c", "exact", "--mesh", "data=9999999"],
            "at most 1048576 devices",
        ),
        (
            [
                "generate",
                "-m",
                "recall",
                "-p",
                "ab12",
                "-n",
                "16777216",
                "-c",
                "kivi:sinks=16777216",
            ],
            "there are",
        ),
        (
            ["bench", "-m", "demo", "-c", "exact", "--context", "16777216", "--batch", "65536"],
            "there are",
        ),
    ],
)
def test_other_options_are_one_line_too(call, words, message):
    code, out, err = call(*words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err


LONG = "a" * 300  # longer than file systems take
DIGITS = "9" * 5000  # more than int() reads


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "-p", "a", "-m", LONG], "name too long"),
        (["generate", "-p", "a", "-m", "~nobody-of-this-name/x"], "home folder is not known"),
        (["generate", "-p", "a", "-c", f"{LONG}.json"], "name too long"),
        (["plan", "-m", LONG], "name too long"),
        (["plan", "-m", "~nobody-of-this-name/x"], "home folder is not known"),
        (["calibrate", "-c", "kvquant", "--out", LONG], "name too long"),
        (["inspect", LONG], "name too long"),
        (["eval", "ppl", "-c", "exact", "--artifact", LONG], "name too long"),
        (["eval", "ppl", "-c", "exact", "--plot", f"{LONG}.png"], "name too long"),
        (["eval", "ppl", "-c", "exact", "--data", "wikitext2", "--folder", LONG], "name too long"),
        (["plan", "--mesh", "model=²"], "'model=²' is not one of"),
        (["plan", "--mesh", f"model={DIGITS}"], "is not one of data=N"),
        (["plan", "--device", "v5e-²"], "is not known"),
        (["plan", "--device", f"{DIGITS}xh100"], "is not known"),
        (["plan", "--device", f"a100-{DIGITS}gb"], "is not known"),
        (["plan", "-c", "higgs:group=²"], "or a number of channels"),
        (["plan", "-c", "kivi:rotate=signs:²"], "signs:SEED"),
        (["plan", "-c", f"kivi:keep=streaming:{DIGITS}"], "such as streaming:512"),
        (["plan", "-c", f"kivi;{DIGITS}=exact"], "not a layer number"),
        (["plan", "-c", "k=kivi;v=exact;k=exact"], "the keys or the values twice"),
        (["plan", "--context", DIGITS], "no number of tokens"),
        (["serve", "--pool", DIGITS], "wanted 1 to"),
        (["serve", "--host", ""], "names no address"),
        (["generate", "-p", "a", "--processes", "2"], "need --coordinator"),
        (["generate", "-p", "a", "--process", "1"], "need --coordinator"),
        (["generate", "-p", "word " * 50_000], "tokens or more, and 2048 fit at most"),
        (["tune", "--method", "higgs", "--bits", "two", "--out", "never-made"], "valid number"),
        (["tune", "--method", "higgs", "--bits", "1e999", "--out", "never-made"], "'--bits'"),
        (["tune", "--method", "kivy", "--bits", "2", "--out", "never-made"], "did you mean 'kivi'"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_names_and_numbers_that_cannot_be_are_one_line(call, words, message):
    code, out, err = call(*words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err


@pytest.mark.parametrize(
    "words",
    [
        ["calibrate", "-c", "kvquant", "--out", "FILE/x"],
        ["eval", "ppl", "-c", "exact", "--out", "FILE"],
        ["eval", "ppl", "-c", "exact", "--plot", "FILE/x.png"],
        ["tune", "--method", "higgs", "--bits", "2.5", "--out", "FILE"],
        ["tune", "--method", "higgs", "--bits", "2.5", "--out", "FILE/x"],
        ["serve", "--prefix-folder", "FILE"],
    ],
    ids=" ".join,
)
def test_a_file_in_a_folders_place_is_found_before_any_work(call, tmp_path, words):
    file = tmp_path / "file"
    file.touch()
    code, out, err = call(*[word.replace("FILE", str(file)) for word in words])
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "cannot be written" in err
    assert "File exists" not in err


def test_characters_that_the_terminal_lacks_are_replaced():
    words = [sys.executable, "-m", "kvqjax", "generate", "-n", "1", "-p", "\N{SNOWMAN}"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin1"}
    done = subprocess.run(words, capture_output=True, check=True, env=environment)
    assert done.stdout.startswith(b"?")


@pytest.mark.parametrize("port", ["0", "99999", "²", "http"])
def test_hosts_are_not_sought_at_a_port_that_cannot_be(port):
    with pytest.raises(kvq.UserError, match="the port from 1 to 65535"):
        kvq.join_hosts(f"localhost:{port}", 2, 0)


def test_serve_says_what_it_changes_and_names_its_own_options(call, monkeypatch):
    """Before anything is served: an empty key, and rows of more tokens than any request may
    have."""
    monkeypatch.setenv("KVQJAX_API_KEY", "")
    code, _, err = call("serve", "-m", "recall", "--capacity", "4096", "--pool", "1K")
    key, cut, wrong = err.splitlines()
    assert code == 2
    assert key == "KVQJAX_API_KEY is empty: clients need no key"
    assert cut.startswith(
        "rows have 2048 tokens, for which this model was trained, not 4096; --beyond-trained"
    )
    assert wrong.startswith("error: 1 row of 2048 tokens, one more for prompts, and ")
    assert "; give --pool " in wrong


@pytest.mark.parametrize("key", [" key", "key ", "k\tey", "кey"])
def test_a_key_that_no_client_can_send_is_refused_before_a_model_is_loaded(call, monkeypatch, key):
    monkeypatch.setenv("KVQJAX_API_KEY", key)
    code, out, err = call("serve", "-m", "no-such-model")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "API key must be printable ASCII" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_behind_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvqjax", "methods"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


@pytest.mark.parametrize(
    "method", thinned(["kvquant:bits=3", "aqua", "commvq", "kivi:centre=mean"], 2)
)
@pytest.mark.parametrize(
    "words", [("generate", "-p", "ab12"), ("eval", "ppl"), ("eval", "drift"), ("bench",)]
)
def test_a_calibrated_method_without_its_artifact(call, words, method):
    """Nothing is evaluated before: the exact cache beside it would take its time first."""
    cache = ["-c", method] if words[0] == "generate" else ["-c", "exact", "-c", method]
    code, out, err = call(*words, "-m", "demo", *cache)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "needs the calibrated constant" in err
    command = shlex.split(err.split("`")[1])
    assert command[:2] == ["kvqjax", "calibrate"]
    given = dict(zip(command[2::2], command[3::2], strict=True))
    assert (given["--model"], given["--cache"]) == ("demo", str(kvq.parse(method)))
    assert f"--artifact {given['--out']}" in err


def test_every_command_has_json():
    for words, command in COMMANDS.items():
        assert "--json" in [option for option, _, _ in options_of(command)], words


@pytest.mark.parametrize("options", [{"count": 0}, {"length": 0}, {"count": -1}])
def test_no_sequences_are_no_calibration(options):
    with pytest.raises(kvq.UserError, match="a whole number of at least 1"):
        kvq.calibrate.run(kvq.load("recall"), kvq.parse("kvquant"), "ab12" * 999, **options)


def test_memory_that_xla_cannot_have_is_one_line(call, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nmore lines")

    monkeypatch.setattr("kvqjax.cli.run.generate_text", refuse)
    code, _, err = call("generate", "-m", "recall", "-p", "ab12")
    assert (code, err.count("\n")) == (2, 1)
    assert "not enough memory" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "-p", "a", "--max-tokens=5"], "--max-tokens; write --max-new-tokens"),
        (
            ["generate", "-p", "a", "--max_new_tokens", "5"],
            "--max_new_tokens; write --max-new-tokens",
        ),
        (["generate", "-p", "a", "--temperture", "1"], "Possible options: --temperature"),
        (["Generate", "a"], "write kvqjax generate"),
        (["Once upon a time, there"], "write kvqjax generate 'Once upon a time, there'"),
        (["genrate"], "did you mean 'generate'?"),
        (["eval", "perplexity"], "No such command 'perplexity'; write kvqjax eval ppl"),
        (["plan", "exact"], "options begin with --"),
        (["methods", "-c", "x"], "No such option: -c"),
    ],
)
def test_what_users_of_other_programs_type_is_answered_with_what_helps(call, words, message):
    code, out, err = call(*words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err


def test_a_warning_is_printed_once(call, monkeypatch):
    import warnings

    def twice(*_, **__):
        for number in range(2):
            warnings.warn_explicit("the same   words", UserWarning, "file.py", number)

    monkeypatch.setattr("kvqjax.cli.run.generate_text", twice)
    monkeypatch.setattr("kvqjax.cli.run.speaks", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = call("generate", "-m", "recall", "-p", "ab12")
    assert (code, err) == (0, "warning: the same words\n")
