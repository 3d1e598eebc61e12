"""The command line: what works prints what it says, what is wrong gives one line and exit code
2."""

import json
import re
import shutil

import pytest
from commands import run

import kvqjax as kvq
from kvqjax.model import locate


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def broken_folder(tmp_path, change) -> str:
    folder = tmp_path / "model"
    shutil.copytree(locate("recall"), folder)
    change(folder)
    return str(folder)


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def garbage(folder):
    (folder / "model.safetensors").write_bytes(
        b"not a safetensors file at all, but long enough to look at"
    )


def architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (truncate, "truncated|shorter|bytes"),
        (garbage, "not a safetensors"),
        (architecture, "GPT2LMHeadModel"),
    ],
)
def test_bad_model_folders(call, tmp_path, change, words):
    code, out, err = call("generate", "-m", broken_folder(tmp_path, change), "-p", "ab12")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert any(word in err for word in words.split("|")), err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "-m", "/nowhere", "-p", "a"], "/nowhere"),
        (["generate", "-m", "recall", "-p", "ab", "-c", "kivy"], "did you mean 'kivi'"),
        (["generate", "-m", "recall", "-p", "ab", "-c", "kivi:bits=7"], "bits=7"),
        (["generate", "-m", "recall", "-p", "ab12ab12", "--capacity", "4"], "capacity of 4"),
        (["generate", "-m", "recall", "-p", ""], "prompt 0 is empty"),
        (["generate", "-m", "recall"], "give a prompt"),
        (["generate", "--nonsense"], "nonsense"),
        (["generate", "-m", "recall", "-p", "ab", "--temperature", "-1"], "--temperature"),
        (
            ["generate", "-m", "recall", "-p", "ab", "-p", "cd", "--stream"],
            "--stream shows one prompt",
        ),
        (["generate", "-m", "recall", "-p", "ab", "--chat"], "chat template"),
        (["eval", "ppl", "-m", "recall", "-c", "exact", "--data", "/nowhere.txt"], "/nowhere.txt"),
        (["eval", "ppl", "-m", "recall", "-c", "exact", "--mode", "magic"], "magic"),
        (["eval", "retrieval", "-c", "exact", "--task", "magic"], "magic"),
        (["eval", "copy", "-c", "exact", "--kind", "magic"], "magic"),
        (["plan", "-m", "recall", "-c", "exact", "--device", "abacus"], "abacus"),
        (["plan", "-m", "recall", "-c", "exact;9=exact"], "layer 9"),
        (["plan", "-m", "llama-3.1-7b", "-c", "exact"], "did you mean 'llama-3.1-70b'"),
        (["plan", "-m", "recall", "-c", "exact", "--compile"], "compiling needs a device"),
        (
            ["plan", "-m", "recall", "-c", "exact", "--compile", "--device", "h100"],
            "no compiler for h100 here",
        ),
        (["inspect", "/nowhere"], "/nowhere"),
        (
            ["calibrate", "-m", "recall", "-c", "kivi:bits=2", "--out", "never-made"],
            "no calibration",
        ),
    ],
)
def test_bad_input_is_one_line_and_code_2(call, words, message):
    code, out, err = call(*words)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_text_that_is_not_utf8(call, tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("caf\xe9".encode("latin-1") * 100)
    code, _, err = call("eval", "ppl", "-m", "recall", "-c", "exact", "--data", str(file))
    assert code == 2
    assert "not UTF-8" in err


def test_generate_prints_text_and_json(call):
    words = [
        "generate",
        "-m",
        "recall",
        "-p",
        "ab12,cd34,ef56,?cd",
        "-n",
        "2",
        "-c",
        "kivi:bits=8,window=32",
    ]
    code, out, _ = call(*words)
    assert (code, out) == (0, "ab12,cd34,ef56,?cd34\n")
    assert json.loads(call(*words, "--json")[1])[0]["text"] == "34"
    assert call(*words, "--stream")[1] == "34\n"


def test_methods_and_help(call):
    rows = json.loads(call("methods", "--json")[1])
    facts = {row["method"]: (row["bits"], row["needs"]) for row in rows}
    assert (facts["exact"], facts["kivi"]) == ((16, "nothing"), (3, "nothing"))
    assert (facts["kvquant"][1], facts["xquant"][1]) == ("text", "weights")
    said = " ".join(call("methods")[1].split())
    assert (
        "Attention of a decode step on an h100, in times of 16-bit keys and values (measured): kivi:bits=2"
        in said
    )
    assert call("--help")[0] == 0
    assert "generate" in call()[1]


def test_plan_counts_what_the_formula_says(call):
    _, out, _ = call(
        "plan", "-m", "recall", "-c", "exact", "-c", "kivi:bits=2", "--context", "65536", "--json"
    )
    exact, kivi = json.loads(out)
    assert exact["bytes_exact"] == 65536 * 2 * 2 * 128 * 2  # tokens, layers, K and V, K*D, bf16
    # 2 bits and 32 bits of scale and minimum for 32 values, and 128 + 32 exact tokens of 65536.
    assert abs(kivi["bits_stored"] - (3 + 160 * 16 / 65536)) < 0.02


def test_plan_prints_a_column_per_cache_in_plain_words(call):
    words = [
        "plan",
        "-m",
        "qwen3-32b",
        "-c",
        "exact",
        "-c",
        "aqua",
        "--device",
        "h200",
        "--context",
        "128k",
    ]
    out = call(*words)[1]
    assert "qwen3-32b in bfloat16, 1 row of 131072 tokens, 1 x h200" in out
    assert "_" not in out.replace("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    for label in ("KV cache", "longest context", "largest batch", "tokens a second,"):
        assert f"\n{label} " in out
    rows = json.loads(call(*words, "--json")[1])
    assert sum(rows[0]["classes"].values()) == rows[0]["bytes"]
    assert rows[0]["fits"] is True
    assert rows[0]["reason"].endswith(" to spare")


def test_plan_says_what_is_tight_what_does_not_fit_and_what_the_model_cannot_see(call):
    words = ["plan", "-m", "llama-3.1-8b", "-c", "exact", "--context", "131072", "--json"]
    found = {
        device: json.loads(call(*words, "--device", device)[1])[0]
        for device in ("h100", "v6e", "l4")
    }
    assert [row["fits"] for row in found.values()] == [True, True, False]
    assert found["v6e"]["reason"].startswith("tight: 30.97 GiB of 31.24 GiB, 277.98 MiB")
    assert "tight" not in found["h100"]["reason"]
    assert found["l4"]["reason"].endswith(" too much")
    limits = {
        device: (row["largest_context"], row["context_limited_by"]) for device, row in found.items()
    }
    assert limits["h100"] == (131072, "the model")
    assert limits["l4"][1] == "memory"
    assert limits["l4"][0] < 131072
    assert found["h100"]["beyond_model"] is False
    assert (
        found["h100"]["seconds_to_first_token_estimated"]
        > 2 * found["h100"]["seconds_to_first_token"]
        > 12
    )
    assert "seconds_to_first_token_estimated" not in found["l4"]
    assert found["l4"]["tokens_per_second"] is None
    code, out, _ = call("plan", "-m", "llama-3.1-8b", "--context", "200000")
    assert code == 0
    assert "200000 tokens are beyond the 131072 that this model was made for." in " ".join(
        out.split()
    )


@pytest.mark.parametrize("model", ["recall", "llama-2-7b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_plan_compares_some_methods_where_none_is_named(call, model):
    code, out, err = call("plan", "-m", model, "--json")
    assert code == 0, err
    assert [row["cache"] for row in json.loads(out)] == [
        "exact",
        "kivi:bits=4",
        "kivi:bits=2",
        "kvquant:bits=3",
    ]


def test_bench_sets_every_cache_against_the_exact_one(call):
    words = [
        "bench",
        "-m",
        "recall",
        "-c",
        "kivi:bits=2",
        "--context",
        "512",
        "--steps",
        "2",
        "--repeats",
        "1",
    ]
    code, out, _ = call(*words, "--prompt", "40", "--json")
    exact, kivi = json.loads(out)
    assert code == 0
    assert (exact["cache"], exact["speed_against_exact"]) == ("exact", 1)
    assert kivi["prompt"] == 40
    assert (
        min(kivi["ms_to_first_token"], exact["ms_to_first_token"])
        > kivi["ms_to_first_token_at_least"]
        > 0
    )
    assert kivi["bytes"] < exact["bytes"]
    assert kivi["ms_per_step"] > 0
    assert exact["about"]["platform"] == "cpu"


def test_a_policy_file_names_a_cache_as_its_text_does(call, tmp_path):
    file = tmp_path / "policy.json"
    file.write_text(
        '{"method": "kivi", "key_bits": 4, "keep": "streaming:512", "layers": {"0": "exact:window=128"}}'
    )
    (row,) = json.loads(
        call("plan", "-m", "recall", "-c", str(file), "--context", "8192", "--json")[1]
    )
    assert row["cache"] == "kivi:bits=2,key_bits=4,keep=streaming:512;0=exact:window=128"
    (same,) = json.loads(
        call("plan", "-m", "recall", "-c", row["cache"], "--context", "8192", "--json")[1]
    )
    assert same == row
    assert row["bytes"] < 0.2 * row["bytes_exact"]
    file.write_text('{"method": "kivi", "key_bit": 4}')
    code, _, err = call("plan", "-m", "recall", "-c", str(file))
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean 'key_bits'" in err


def test_calibrate_says_what_it_will_do_and_gives_json(call, tmp_path):
    words = ["calibrate", "-m", "recall", "-c", "kivi:centre=mean", "--out", str(tmp_path / "a")]
    code, out, err = call(*words, "--sequences", "2", "--length", "64", "--json")
    assert code == 0, err
    made = json.loads(out)
    assert (made["artifact"], made["model"]) == (str(tmp_path / "a"), "recall")
    assert made["about"]["sequences"] == 2
    assert err.startswith(
        "calibrating kivi:bits=2,centre=mean for recall: 2 sequences of 64 tokens of synthetic; "
    )
    assert re.search("; the arithmetic alone takes .* on this device; ", err)
    assert kvq.load_artifact(tmp_path / "a").about == made["about"]
