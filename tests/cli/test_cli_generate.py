"""`kvqjax generate`: text as it is made."""

import json

import pytest
from commands import run

import kvqjax as kvq


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


@pytest.mark.nightly
def test_end_tokens_by_id_and_by_text(call):
    words = ("generate", "-m", "recall", "-p", "ab12,cd34,?cd", "-n", "24", "--json")
    code, out, _ = call(*words)
    row = json.loads(out)[0]
    text = row["text"]
    assert (code, len(text)) == (0, row["tokens"])  # this model's tokens are characters
    letter = next(character for character in text if not character.isdecimal())
    token = str(kvq.load("recall").encode(letter, add_special_tokens=False)[0])
    for end in (["--end", letter], ["--end", token], ["--end", "</s>", "--end", token]):
        assert json.loads(call(*words, *end)[1])[0]["text"] == text[: text.index(letter)]
    assert (
        json.loads(call(*words, "--stop", text[2:5])[1])[0]["text"] == text[: text.index(text[2:5])]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--end", "ab"], "--end 'ab' is 2 tokens; wanted one"),
        (["--end", "64"], "--end=64; it must be a whole number from 0 to 63"),
        (["-n", "2048"], "go beyond the 2048 that this model was trained for"),
    ],
)
def test_what_cannot_be_asked_is_one_line(call, words, said):
    code, out, err = call("generate", "-m", "recall", "-p", "ab12", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_every_option_of_a_generation_is_handed_on(call):
    """The shell's text is that of `generate` with the same options."""
    model, prompt = kvq.load("recall"), "ab12,cd34,?cd"
    plain = kvq.generate(model, prompt, max_new_tokens=16)
    first, third = plain.tokens[0][0], plain.tokens[0][2]
    for words, options in (
        (
            f"--presence-penalty 2 --logit-bias {first}=-100",
            {"presence_penalty": 2.0, "logit_bias": {first: -100}},
        ),
        ("--frequency-penalty 2 --ignore-eos", {"frequency_penalty": 2.0, "ignore_eos": True}),
        (f"--stop-token-ids {third} --min-tokens 5", {"stop_token_ids": [third], "min_tokens": 5}),
        ("--temperature 2 --top-k -1 --seed 4", {"temperature": 2.0, "seed": 4}),
    ):
        code, out, err = call(
            "generate", "-m", "recall", "-p", prompt, "-n", "16", "--json", *words.split()
        )
        assert code == 0, err
        wanted = kvq.generate(model, prompt, max_new_tokens=16, **options).text[0]
        assert (json.loads(out)[0]["text"], wanted != plain.text[0]) == (wanted, True), words


@pytest.mark.parametrize("text", ["5", "5=x", "a=1", "=1", "5=nan", "5=101", "64=1"])
def test_a_bias_that_cannot_be_is_one_line(call, text):
    code, out, err = call("generate", "-m", "recall", "-p", "ab12", "--logit-bias", text)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "bias" in err
