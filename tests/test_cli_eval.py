"""`kvqjax eval`: one table for several caches, JSON with its stamp, files and pictures."""

import json

import pytest
from test_cli import run

import kvqjax as kvq
from kvqjax.eval import measure_perplexity
from kvqjax.eval.plots import PLOTS, draw

ROWS = {
    "ppl": [{"cache": "exact", "mode": "m", "windows": "w", "bits_stored": 16.0, "ppl": 3.0}],
    "drift": [{"cache": "exact", "steps": 64, "kld": [0.0, 0.1]}],
    "retrieval": [
        {"cache": "exact", "mode": "m", "task": "kv", "length": 64, "by_depth": [1.0, 0.0]},
        {"cache": "exact", "mode": "m", "task": "kv", "length": 128, "by_depth": [0.5]},
    ],
    "tasks": [{"cache": "exact", "task": "ruler/vt", "score": 40.0}],
    "harness": [{"cache": "exact", "task": "own", "score": 0.4}],
}


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def test_a_report_in_full(call, tmp_path):
    words = ["eval", "ppl", "-m", "recall", "-c", "kivi:bits=2,window=0", "--window", "64", "--tokens", "128"]
    words += ["--chunk", "32"]
    code, out, err = call(*words, "--json", "--out", str(tmp_path / "reports"))
    assert code == 0, err
    (row,) = json.loads(out)
    about = row.pop("about")
    assert {"about": about, "rows": [row]} == json.loads((tmp_path / "reports" / "ppl.json").read_text())
    names = {"cache", "mode", "tokens", "bits_method", "bits_stored", "bytes", "ppl", "ppl_exact", "kld", "top1"}
    assert names <= set(row)
    assert row["cache"] == "kivi:bits=2,window=0"
    assert row["kld"] > 0
    assert about["fingerprint"] == kvq.load("recall").fingerprint
    assert about["data"]["name"] == "synthetic"
    assert len(about["data"]["sha256"]) == 64
    assert (about["seed"], set(about["versions"])) == (0, {"kvqjax", "jax", "jaxlib"})
    assert sum(about["ledger"]["bytes"][row["cache"]].values()) == row["bytes"]


def test_every_mode_with_every_chunk(call, monkeypatch):
    def row(model, ids, method, *, mode, chunk, **options):
        return {"cache": str(method), "mode": mode, "chunk": chunk, "windows": options["cut"], "bits_stored": 16.0}

    monkeypatch.setattr(measure_perplexity, "perplexity", row)
    words = ["--mode", "loop", "--mode", "prefill", "--chunk", "1", "--chunk", "512", "--windows", "aqua", "--json"]
    code, out, err = call("eval", "ppl", "-m", "recall", "-c", "exact", "-c", "kivi:bits=2", *words)
    assert code == 0, err
    got = [(row["cache"], row["mode"], row["chunk"], row["windows"]) for row in json.loads(out)]
    caches, modes = ("exact", "kivi:bits=2"), ("loop", "prefill")
    assert got == [(cache, mode, chunk, "aqua") for cache in caches for mode in modes for chunk in (1, 512)]


def test_a_table_carries_the_stamp(call, tmp_path):
    text = tmp_path / "hay.txt"
    text.write_text("Owls sing at night. " * 10)
    words = ["eval", "retrieval", "-m", "demo", "-c", "exact", "--task", "passkey", "--length", "64", "--samples", "2"]
    code, out, err = call(*words, "--depths", "2", "--data", str(text))
    assert code == 0, err
    assert "by depth" in out
    for part in ("kvqjax 0", "seed 0", "hay.txt"):
        assert part in " ".join(out.split())


def test_tasks_from_a_folder(call, tmp_path):
    row = {"input": "Where is Anna?", "context": "Anna is at home.", "answers": ["at home"], "all_classes": None}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
    words = ["eval", "tasks", "-c", "exact", "--task", "longbench/hotpotqa", "--folder", str(tmp_path), "--limit", "64"]
    code, out, err = call(*words, "--json")
    assert code == 0, err
    (got,) = json.loads(out)
    assert (got["task"], got["metric"], got["samples"], got["mode"]) == ("longbench/hotpotqa", "F1", 1, "prefill-exact")
    assert 0 <= got["score"] <= 100
    assert got["about"]["data"]["longbench/hotpotqa"]["prompts"] == "own"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tasks", "-c", "exact", "--task", "mmlu"], "known: longbench"),
        (["tasks", "-c", "exact", "--task", "longbench/qasper", "--folder", "/nowhere"], "qasper.jsonl is not there"),
        (["tasks", "-c", "exact"], "--task"),
        (["ppl", "-m", "recall", "-c", "exact", "--data", "wikitext2", "--folder", "/nowhere"], "wiki.test.raw"),
        (["ppl", "-m", "recall", "-c", "exact", "--windows", "round"], "known: gptq"),
    ],
)
def test_bad_input_is_one_line_and_code_2(call, words, message):
    code, out, err = call("eval", *words)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("kind", PLOTS)
def test_every_report_has_a_picture(kind, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"{kind}.png"
    draw(kind, ROWS[kind], "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(kvq.UserError, match="cannot be written"):
        draw(kind, ROWS[kind], "title", tmp_path / "no" / "folder.png")


@pytest.mark.parametrize("command", ["ppl", "drift"])
def test_a_short_text_is_refused_before_anything_is_said(call, tmp_path, command):
    (tmp_path / "short").write_text("ab12")
    code, out, err = call("eval", command, "-m", "recall", "-c", "exact", "--data", str(tmp_path / "short"))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "fewer than one window" in err


def test_an_evaluation_says_what_it_will_do(call):
    words = ["-m", "recall", "-c", "exact", "-c", "kivi", "--task", "kv", "--length", "64", "--samples", "1"]
    code, _, err = call("eval", "retrieval", *words)
    assert (code, err) == (0, "retrieval of recall through exact, then kivi\n")
