"""`kvqjax tune`: from a text to a policy that other commands take; bad input; the estimate."""

import json

import numpy as np
import pytest
from commands import run

import kvqjax as kvq

METHODS = "higgs:bits=2,buffer=32,kivi:bits=4,window=0"


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


@pytest.mark.nightly
def test_from_a_text_to_an_answer(call, tmp_path):
    """The same command again measures nothing and says the same; its policy serves other
    commands."""
    letters = np.random.default_rng(0).choice(list("abcdefgh"), 2400)
    (tmp_path / "text.txt").write_text(" ".join("".join(part) for part in letters.reshape(-1, 8)))
    out = tmp_path / "tuned"
    words = (
        "tune",
        "--model",
        "recall",
        "--data",
        str(tmp_path / "text.txt"),
        "--budget",
        "3",
        "--out",
        str(out),
    )
    words += ("--methods", METHODS, "--window", "96")
    code, printed, err = call(*words)
    assert code == 0, err
    report = json.loads((out / "report.json").read_text())
    assert report["policy"] == str(kvq.parse(out / "policy.json"))
    assert report["rows"][0]["bits_stored"] <= 3
    assert f"kvqjax generate --model recall --cache {out / 'policy.json'}" in printed
    measured = (out / "searched.jsonl").read_text()
    code, again, _ = call(*words, "--json")
    assert code == 0
    assert json.loads(again)["rows"] == report["rows"]
    assert (out / "searched.jsonl").read_text() == measured
    code, printed, _ = call(
        "plan",
        "--model",
        "recall",
        "--cache",
        str(out / "policy.json"),
        "--context",
        "1024",
        "--json",
    )
    assert code == 0
    assert json.loads(printed)[0]["cache"] == report["policy"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "2.5"), "--out is missing"),
        (("--budget", "2.5", "--estimate"), "--estimate needs a --device"),
        (("--budget", "2.5", "--methods", "kivy", "--out"), "did you mean 'kivi'"),
        (("--budget", "much", "--out"), "budget 'much'; wanted bits"),
        (
            ("--budget", "2.5", "--device", "abacus", "--out"),
            "device 'abacus' is not known. Known:",
        ),
    ],
)
def test_bad_input_is_one_line(call, tmp_path, words, message):
    words = (*words, str(tmp_path / "tuned")) if words[-1] == "--out" else words
    code, printed, err = call("tune", "--model", "recall", *words)
    assert (code, printed) == (2, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_the_estimate_needs_no_model(call):
    words = ("--model", "llama-3.1-8b", "--device", "v5e", "--mesh", "model=8", "--methods", "kivi")
    code, printed, _ = call("tune", "--budget", "2.5", "--estimate", "--json", *words)
    assert code == 0
    (row,) = json.loads(printed)
    assert row["hours"] > 0
    assert row["parts_alone"] == 64 * (row["candidates"] - 1)
