"""lm-evaluation-harness through the cache: the harness's own Hugging Face model gives the same with
the exact cache."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.model import decoder, locate

pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed (pip install '.[eval]')"
)

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
    pairs = [
        (TEXT, "He sat down"),
        (TEXT, "xylophones"),
        ("The", " old man"),
        ("", "The house"),
        (TEXT * 3, " He "),
    ]
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
    requests = [
        instance("generate_until", prompt, options) for prompt in (TEXT, TEXT * 4, "The old")
    ]
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
        # Nothing has left the window yet.
        np.testing.assert_allclose(parts[row, :64], want[row, :64], rtol=1e-4)
        assert np.abs(parts[row, 64:count] - want[row, 64:count]).max() > 1e-2


def test_prompts_are_prefilled_exactly_unless_a_chunk_is_given(instance):
    from kvqjax.eval.harness import CacheLM

    model, method = kvq.load("demo"), kvq.kivi(bits=2, window=0)
    request = instance("generate_until", TEXT * 2, {"until": [], "max_gen_toks": 24})
    answers = {}
    for chunk in (None, 16):
        lm = CacheLM(model, method, chunk=chunk, batch=1)
        (answers[chunk],) = lm.generate_until([request])
        assert (
            answers[chunk]
            == kvq.generate(model, TEXT * 2, method, chunk=chunk, max_new_tokens=24).text[0]
        )
        assert lm.mode("generate_until") == ("in-the-loop-chunk16" if chunk else "prefill-exact")
        assert lm.mode("multiple_choice") == (
            "in-the-loop-chunk16" if chunk else "in-the-loop-chunk32"
        )
    assert answers[None] != answers[16]


@pytest.mark.parametrize(("cut", "kept"), [("left", slice(-40, None)), ("middle", None)])
def test_long_texts_lose_their_beginning_or_their_middle(monkeypatch, instance, cut, kept):
    from kvqjax.eval import harness

    model, asked = kvq.load("demo"), []

    def generate(model, prompts, method, **options):
        asked.extend(prompts)
        return SimpleNamespace(text=["x"] * len(prompts))

    monkeypatch.setattr(harness, "generate", generate)
    lm = harness.CacheLM(model, kvq.exact(), max_length=LENGTH, cut=cut, batch=2)
    prompts = [
        instance("generate_until", text, {"max_gen_toks": LENGTH - 40})
        for text in (TEXT * 2, "The old")
    ]
    assert lm.generate_until(prompts) == ["x", "x"]
    whole = lm.tok_encode(TEXT * 2)

    def short(room):
        return [*whole[: room // 2], *whole[len(whole) - (room - room // 2) :]]

    assert asked == [whole[kept] if kept else short(40), lm.tok_encode("The old")]
    assert lm.cut_texts == 1
    goal = lm.tok_encode("wet with rain", add_special_tokens=False)
    room = LENGTH + 1 - len(goal)
    by_hand = whole[-room:] if kept else short(room)
    scores = lm._loglikelihood_tokens([(None, whole, goal), (None, by_hand, goal)])
    assert scores[0] == scores[1]
    assert lm.cut_texts == 2


def test_bad_choices_are_named():
    from kvqjax.eval.harness import CacheLM, read_metadata, read_samples, run_harness

    model = kvq.load("demo")
    for options, message in (
        ({"cut": "right"}, "known: left, middle"),
        ({"chunk": 0}, "at least 1"),
    ):
        with pytest.raises(kvq.UserError, match=message):
            CacheLM(model, kvq.exact(), **options)
    for read, given, message in (
        (read_metadata, ["[1]"], "neither a JSON object nor key=value"),
        (read_samples, "3", "limit=3"),
        (read_samples, "many", "not JSON"),
        (read_samples, '{"own": [-1]}', "wanted JSON"),
    ):
        with pytest.raises(kvq.UserError, match=message):
            read(given)
    for limit in (0, -1, 2.5):
        with pytest.raises(kvq.UserError, match="wanted a number of samples, or a share"):
            run_harness(CacheLM(model, kvq.exact()), ["own"], limit=limit)
    assert read_metadata(["a=[1, 2]", "b=word", '{"c": 3}']) == {"a": [1, 2], "b": "word", "c": 3}
    with pytest.raises(kvq.UserError, match="no chat template"):
        CacheLM(model, kvq.exact()).apply_chat_template([{"role": "user", "content": "Hello"}])


def test_the_harness_has_the_tasks_of_the_page():
    from lm_eval.tasks import TaskManager

    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    names = {
        *re.findall(r"--tasks (\w+)", page.split("## lm-evaluation-harness")[1]),
        "niah_single_1",
    }
    names |= set(re.findall(r"longbench_[\w-]+", page)) - {"longbench_8"}
    known, names = set(TaskManager().all_tasks), names - {"NAME", "longbench_8"}
    assert len(names) > 15
    assert names <= known


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with tasks of two rows each: choices, answers, both, and one whose data cannot be
    had."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": TEXT, "choices": [" He sat down", " Zq"], "right": 0}] * 2
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/data.jsonl\n"
        f"  cache_dir: {folder}/cache\ntest_split: test\ndoc_to_text: text\n"
    )
    choices = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: right\nmetric_list:\n  - metric: acc\n"  # noqa: E501
    (folder / "own.yaml").write_text("task: own\n" + choices + data)
    (folder / "absent.yaml").write_text(
        "task: absent\n" + choices + data.replace("data.jsonl", "none.jsonl")
    )
    (folder / "said.yaml").write_text(
        "task: said\noutput_type: generate_until\ndoc_to_target: text\n"
        "generation_kwargs:\n  max_gen_toks: 16\n  until: []\nmetric_list:\n  - metric: exact_match\n"
        + data
    )
    (folder / "both.yaml").write_text(
        "group: both\ntask:\n  - own\n  - said\naggregate_metric_list:\n  - metric: acc\n"
    )
    return folder


HARNESS = ("eval", "harness", "-c", "exact")


def test_the_harness_runs_tasks_through_the_command_line(tasks, capsys, monkeypatch):
    from commands import run

    words = [
        "--task",
        "both",
        "--include",
        str(tasks),
        "--max-length",
        "32",
        "--cut",
        "middle",
        "--batch",
        "4",
    ]
    code, out, err = run(capsys, monkeypatch, *HARNESS, *words, "--json")
    assert code == 0, err
    found = {row["task"]: row for row in json.loads(out[out.index("[\n") :])}
    own, said, both = (found[name] for name in ("own", "said", "both"))
    assert (own["metric"], own["score"], own["samples"], own["mode"]) == (
        "acc",
        1.0,
        2,
        "in-the-loop-chunk32",
    )
    assert (said["metric"], said["score"], said["samples"], said["mode"]) == (
        "exact_match",
        0.0,
        2,
        "prefill-exact",
    )
    assert (both["score"], both["samples"], set(both["mode"].split(", "))) == (
        1.0,
        4,
        {own["mode"], said["mode"]},
    )
    # Two choices of two rows, and two prompts.
    assert own["cut"] == said["cut"] == own["texts"] == 6
    assert own["about"]["fingerprint"] == kvq.load("demo").fingerprint
    assert own["about"]["warning"].startswith(
        "6 of 6 texts were longer than 32 tokens and were cut"
    )


LM_EVAL = (
    "--tasks own,said --include_path {} --limit 1 --num_fewshot 0 --batch_size auto --max_length {}"
)


@pytest.mark.parametrize(("length", "cut"), [(32, True), (63, False)])
def test_words_of_lm_eval_mean_what_they_mean_there(tasks, capsys, monkeypatch, length, cut):
    from commands import run

    words = LM_EVAL.format(tasks, length).split()
    code, out, err = run(capsys, monkeypatch, *HARNESS, *words)
    assert code == 0, err
    first = next(line for line in out.splitlines() if line.startswith(("warning", "harness")))
    assert first.startswith(
        "warning: 3 of 3 texts were longer than 32 tokens" if cut else "harness, demo"
    )
    code, out, err = run(capsys, monkeypatch, *HARNESS, *words, "--json")
    rows = json.loads(out[out.index("[\n") :])
    assert [(row["task"], row["samples"], row["cut"] > 0) for row in rows] == [
        ("own", 1, cut),
        ("said", 1, cut),
    ]
    assert rows[0]["about"]["limit"] == 1
    assert rows[0]["about"]["tasks"] == ["own", "said"]


def test_samples_are_chosen_by_number_as_in_lm_eval(tasks, ours):
    from kvqjax.eval.harness import run_harness

    options = {"include": tasks, "metadata": {"a": 1}}
    for given, count in (({"limit": 0.5}, 1), ({"limit": 2.0}, 2), ({"samples": {"own": [1]}}, 1)):
        (row,) = run_harness(ours, ["own"], **given, **options)
        assert row["samples"] == count
    for samples, message in (
        ({"own": [2]}, "own has 2 samples"),
        ({"other": [0]}, "none of the tasks own"),
    ):
        with pytest.raises(kvq.UserError, match=message):
            run_harness(ours, ["own"], samples=samples, **options)
    with pytest.raises(kvq.UserError, match="exclude each other"):
        run_harness(ours, ["own"], samples={"own": [1]}, limit=1)


def test_a_task_without_its_data_is_one_line(tasks, capsys, monkeypatch):
    from commands import run

    code, _, err = run(capsys, monkeypatch, *HARNESS, "--tasks", "absent", "--include", str(tasks))
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert re.match(
        r"error: the harness cannot load the data of absent: .*none\.jsonl.*; download the data",
        last,
    )
    assert "Traceback" not in err
