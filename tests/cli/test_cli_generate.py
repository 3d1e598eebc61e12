"""`kvqjax generate`: text as it is made."""

import pytest
from commands import run


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
