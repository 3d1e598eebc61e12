"""`kvqjax generate`: text as it is made."""

import pytest
from commands import run
from tiny import tiny

import kvqjax as kvq
from kvqjax.cli.run import _overlap, _print_stream
from kvqjax.generation.decoding import Generated


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def test_text_is_printed_token_by_token(call, monkeypatch):
    parts = []
    monkeypatch.setattr("kvqjax.cli.run.typer.echo", lambda text, nl=True: parts.append(text))
    code, _, err = call("generate", "-m", "recall", "-p", "ab12,cd34,?cd", "-n", "24", "--stream")
    assert code == 0, err
    assert len([part for part in parts if part]) >= 24  # this model's tokens are characters
    assert len(parts[0]) == 1


def test_what_a_later_token_may_change_is_held_back(monkeypatch):
    made = ["a", "ab\ufffd", "ab\u00e9", "ab\u00e9E", "ab\u00e9EN", "ab\u00e9ENx", "ab\u00e9ENxE", "ab\u00e9ENx"]
    parts = []
    monkeypatch.setattr("kvqjax.cli.run.stream", lambda *_, **__: iter(Generated([t], [[]]) for t in made))
    monkeypatch.setattr("kvqjax.cli.run.typer.echo", lambda text, nl=True: parts.append(text))
    _print_stream(tiny(), ["p"], kvq.exact(), {"stop": ("END",)})
    assert parts == ["a", "b", "\u00e9", "", "", "ENx", "", "", ""]


def test_overlap_is_the_longest_beginning_of_the_stop_string():
    found = [_overlap(text, "aab") for text in ("", "xa", "xaa", "aaa", "aab", "b")]
    assert found == [0, 1, 2, 2, 0, 0]
