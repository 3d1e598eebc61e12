"""Prompts in every way that a shell has: words, options, files, pipes, here-documents, batches."""

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cases import thinned, with_nightly
from commands import run

from kvqjax import UserError
from kvqjax.cli.prompts import read_prompts

# About 180 KB in UTF-8, which no argument of a command may have.
LONG = "one line\n\nand \u00e9 another, " * 8000
TALK = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def pipe(monkeypatch, raw: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


def texts(words=(), prompts=(), files=(), batch=None, chat=False):
    return read_prompts(words, prompts, [Path(file) for file in files], batch, chat).texts


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"one\ntwo\n\nthree", "one\ntwo\n\nthree"),
        (b"ends in a line\n", "ends in a line"),
        (b"two line ends\n\n", "two line ends\n"),
        (b"\xef\xbb\xbfmark\r\nand Windows\r\n", "mark\nand Windows"),
        (b"  spaces  ", "  spaces  "),
        (LONG.encode(), LONG),
    ],
)
def test_a_file_is_one_prompt_and_so_is_standard_input(monkeypatch, tmp_path, raw, text):
    (tmp_path / "p.txt").write_bytes(raw)
    assert texts(files=[tmp_path / "p.txt"]) == [text]
    for files in ([], ["-"]):
        pipe(monkeypatch, raw)
        assert texts(files=files) == [text]
    assert texts(files=[tmp_path / "p.txt"], prompts=["first"]) == ["first", text]


@pytest.mark.parametrize(
    "shell",
    with_nightly(
        ["cat '{file}' | {command}", "{command} < '{file}'", "{command} -f '{file}'", "here"],
        ["cat '{file}' | {command}"],
    ),
)
def test_a_long_prompt_from_a_shell(tmp_path, shell):
    script = "import sys; from pathlib import Path; from kvqjax.cli.prompts import read_prompts; "
    script += "(text,) = read_prompts([], [], list(map(Path, sys.argv[2:])), None, False).texts; print(len(text))"
    command = f"'{sys.executable}' -c '{script}'"
    (tmp_path / "p.txt").write_text(LONG, encoding="utf-8")
    if shell == "here":
        line = f"{command} <<'END'\n{LONG}\nEND\n"
    else:
        line = shell.format(file=tmp_path / "p.txt", command=command)
    done = subprocess.run(
        ["sh"], input=line, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert int(done.stdout) == len(LONG), done.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    thinned(
        [
            ("prompts.txt", "ab12,cd34,?cd\r\n\r\nef56,gh78,?ef\n"),
            ("prompts.jsonl", '"ab12,cd34,?cd"\n{"id": 7, "prompt": "ef56,gh78,?ef"}\n'),
            ("prompts.jsonl.gz", '\ufeff"ab12,cd34,?cd"\n{"prompt": "ef56,gh78,?ef"}\n'),
        ],
        3,
    ),
)
def test_a_file_of_prompts_is_a_batch(call, tmp_path, name, text):
    raw = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    code, out, err = call(
        "generate", "-m", "recall", "-n", "2", "--prompts", str(tmp_path / name), "--json"
    )
    assert code == 0, err
    assert [row["prompt"] for row in json.loads(out)] == ["ab12,cd34,?cd", "ef56,gh78,?ef"]


def test_a_word_is_a_prompt(call):
    code, out, err = call("generate", "ab12,cd34,?cd", "-m", "recall", "-n", "2")
    assert code == 0, err
    assert out.startswith("ab12,cd34,?cd34")


def test_one_json_prompt_may_have_several_lines(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps("ab12,\nab") + "\n")
    assert texts(batch=tmp_path / "p.jsonl") == ["ab12,\nab"]


def test_messages_go_through_the_chat_template(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    assert read_prompts([], [], [], tmp_path / "p.jsonl", False) == ([TALK], True)
    assert read_prompts([], ["Hi"], [], tmp_path / "p.jsonl", True) == (["Hi", TALK], True)
    with pytest.raises(UserError, match="with --chat all go"):
        texts(prompts=["Hi"], batch=tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    "line", ["{", "7", '{"text": "ab"}', "[]", '{"messages": ["Hi"]}', '{"messages": []}']
)
def test_a_json_line_without_a_prompt_is_refused(call, tmp_path, line):
    (tmp_path / "p.jsonl").write_text(line + "\n")
    code, out, err = call("generate", "--prompts", str(tmp_path / "p.jsonl"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "p.jsonl, line 1: " in err


@pytest.mark.parametrize(
    ("words", "piped", "message"),
    [
        ([], b"", 'give a prompt: kvqjax generate "Once upon a time"'),
        (["once", "upon"], b"", "put a prompt into quotation marks: 'once upon'"),
        (["-f", "-"], b"", "standard input: empty"),
        (["-f", "-", "--prompts", "-"], b"a", "can be read once"),
        (["-f", "-"], b"\xff\xfe\xfa", "standard input: not"),
        (["-f", "nowhere.txt"], b"", "nowhere.txt: No such file"),
        (["-f", "Once upon a time"], b"", "-p takes the text itself"),
        (["-f", "Once upon\na time " * 999], b"", "-p takes the text itself"),
    ],
)
def test_no_prompt_is_one_line(call, monkeypatch, words, piped, message):
    pipe(monkeypatch, piped)
    code, out, err = call("generate", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_terminal_is_not_waited_for(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("never read"))
    with pytest.raises(UserError, match="give a prompt"):
        texts()
    monkeypatch.setattr(sys, "stdin", None)  # closed by the shell: <&-
    with pytest.raises(UserError, match="give a prompt"):
        texts()
