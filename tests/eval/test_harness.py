"""lm-evaluation-harness through the cache: the harness's own Hugging Face model gives the same with the exact cache."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.model import decoder
from kvqjax.model.loading import locate

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install 'kvqjax[eval]')")

# The harness and what it imports warn about their own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = "The old man came back to the house. He had walked all the way from the town, and his coat was wet with rain. "
LENGTH = 63  # with one more token a row has 64: one program for all


@pytest.fixture(scope="module")
def instance():
    from lm_eval.api.instance import Instance

    return lambda kind, *arguments: Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module")
def ours():
    from kvqjax.eval.harness import CacheLM

    return CacheLM(kvq.load("demo"), kvq.exact(), chunk=16, batch=4, max_length=LENGTH)


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("torch", reason="the harness's own model needs PyTorch")
    pytest.importorskip("accelerate", reason="the harness's own model needs accelerate")
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(locate("demo")), device="cpu", dtype="float32", batch_size=4, max_length=LENGTH)


def test_continuations_have_the_same_likelihood(ours, theirs, instance):
    pairs = [(TEXT, "He sat down"), (TEXT, "xylophones"), ("The", " old man"), ("", "The house"), (TEXT * 3, " He ")]
    requests = [instance("loglikelihood", *pair) for pair in pairs]
    got, want = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (ours, theirs))
    np.testing.assert_allclose([value for value, _ in got], [value for value, _ in want], rtol=1e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert min(value for value, _ in got) < -10


def test_whole_texts_have_the_same_likelihood(ours, theirs, instance):
    requests = [instance("loglikelihood_rolling", text) for text in (TEXT * 4, "Rain.")]
    got, want = (lm.loglikelihood_rolling(requests, disable_tqdm=True) for lm in (ours, theirs))
    assert len(ours.tok_encode(TEXT * 4)) > LENGTH
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_answers_are_the_same(ours, theirs, instance):
    options = {"until": ["."], "max_gen_toks": 12, "do_sample": False}
    requests = [instance("generate_until", prompt, options) for prompt in (TEXT, TEXT * 4, "The old")]
    got, want = (lm.generate_until(requests, disable_tqdm=True) for lm in (ours, theirs))
    assert got == want
    assert any(got)


def test_scores_come_through_the_cache():
    from kvqjax.eval.harness import score_rows
    from kvqjax.step.new_cache import planned_layout

    model, ids, counts = tiny(), tokens(2, 96), jnp.asarray([96, 70])
    want = decoder.logits(model.params, ids, model.config)
    want = np.asarray(want - np.log(np.exp(want).sum(-1, keepdims=True)))[:, :-1]
    want = np.take_along_axis(want, np.asarray(ids)[:, 1:, None], -1)[..., 0]
    layout = planned_layout(model, kvq.kivi(bits=2, window=32), *ids.shape)
    parts = np.asarray(score_rows(model, ids, counts, layout, 32)[0])
    for row, count in enumerate((95, 69)):
        np.testing.assert_allclose(parts[row, :64], want[row, :64], rtol=1e-4)  # nothing has left the window yet
        assert np.abs(parts[row, 64:count] - want[row, 64:count]).max() > 1e-2


def test_the_harness_runs_a_task_through_the_command_line(tmp_path, capsys, monkeypatch):
    from commands import run

    rows = [{"text": TEXT, "choices": [" He sat down", " Zq"], "right": 0}] * 2
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/data.jsonl\n"
        "  cache_dir: " + str(tmp_path / "cache") + "\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: text\ndoc_to_choice: choices\n"
        "doc_to_target: right\nmetric_list:\n  - metric: acc\n"
    )
    words = ["--task", "own", "--include", str(tmp_path), "--limit", str(LENGTH), "--chunk", "16", "--batch", "4"]
    code, out, err = run(capsys, monkeypatch, "eval", "harness", "-c", "exact", *words, "--json")
    assert code == 0, err
    (row,) = json.loads(out[out.index("[\n") :])
    assert (row["task"], row["metric"], row["score"], row["samples"]) == ("own", "acc", 1.0, 2)
    assert row["mode"] == "in-the-loop-chunk16"
    assert row["about"]["fingerprint"] == kvq.load("demo").fingerprint
