"""`kvqjax tune`: from a text to a policy that other commands take."""

import json

import numpy as np
import pytest
from commands import run

import kvqjax as kvq


@pytest.mark.nightly
def test_from_a_text_to_an_answer(capsys, monkeypatch, tmp_path):
    """The same command again scores nothing and says the same; its policy serves other commands."""

    def call(*words):
        return run(capsys, monkeypatch, *words)

    letters = np.random.default_rng(0).choice(list("abcdefgh"), 9600)
    text, out = tmp_path / "text.txt", tmp_path / "tuned"
    text.write_text(" ".join("".join(part) for part in letters.reshape(-1, 8)))
    words = ["tune", "--model", "recall", "--method", "klt:buffer=32", "--bits", "3"]
    words += ["--data", str(text), "--out", str(out), "--sequences", "2", "--length", "128"]
    code, printed, err = call(*words)
    assert code == 0, err
    report = json.loads((out / "report.json").read_text())
    assert report["policy"] == str(kvq.parse(out / "policy.json"))
    ready = f"--cache {out / 'policy.json'} --artifact {out / 'artifact'}"
    assert f"kvqjax generate --model recall {ready}" in printed
    written = (out / "scores.npz").stat().st_mtime_ns
    code, again, _ = call(*words, "--json")
    assert (code, json.loads(again)) == (0, report)
    assert (out / "scores.npz").stat().st_mtime_ns == written
    words = ["--model", "recall", *ready.split(), "--data", str(text), "--tokens", "256"]
    assert call("eval", "ppl", *words)[0] == 0
