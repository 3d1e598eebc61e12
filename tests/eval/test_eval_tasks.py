"""Benchmarks from files in their official formats (our own contents), and RULER from our own text."""

import json

import numpy as np
import pytest

import kvqjax as kvq
from kvqjax.eval import tasks
from kvqjax.eval.synthetic import sentences_of
from kvqjax.eval.tasks import Options, base, longbench, ruler
from kvqjax.generation.decoding import Generated

WORDS = Options(None, 600, 3, 0, lambda text: len(text.split()))
LONGBENCH = {
    "input": "Who lives on the hill?",
    "context": "Anna lives on the hill. Leo lives by {the} river.",
    "answers": ["Anna", "the woman Anna"],
    "length": 10,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "x1",
}


def write(path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def replies(monkeypatch, text: str) -> list:
    """Make every answer `text`, and return the list of what was asked."""
    asked = []

    def generate(model, prompts, method, **options):
        asked.append((prompts, options))
        return Generated([text] * len(prompts), [[]] * len(prompts))

    monkeypatch.setattr(base, "generate", generate)
    return asked


def test_longbench_uses_the_official_wording_where_it_is_there(tmp_path):
    write(tmp_path / "data" / "hotpotqa.jsonl", [LONGBENCH] * 5)
    own = tasks.load_task("longbench/hotpotqa", WORDS._replace(folder=tmp_path))
    assert (own.prompts, own.new, own.chat, len(own.samples)) == ("own", 32, True, 3)
    assert LONGBENCH["context"] in own.samples[0].prompt
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "Q: {input} C: {context}"}))
    (tmp_path / "config" / "dataset2maxlen.json").write_text(json.dumps({"hotpotqa": 7}))
    official = tasks.load_task("longbench/hotpotqa", WORDS._replace(folder=tmp_path))
    assert (official.prompts, official.new) == ("official", 7)
    assert official.samples[0].prompt == f"Q: {LONGBENCH['input']} C: {LONGBENCH['context']}"
    with pytest.raises(kvq.UserError, match=r"dataset2prompt\.json: no entry 'qasper'"):
        tasks.load_task("longbench/qasper", WORDS._replace(folder=tmp_path))
    with pytest.raises(kvq.UserError, match=r"qasper\.jsonl is not there"):
        tasks.load_task("longbench/qasper", WORDS._replace(folder=tmp_path / "data"))


def test_averages_need_all_their_tasks(tmp_path, monkeypatch):
    for name in longbench.AVERAGES["8"]:
        row = LONGBENCH | {"all_classes": ["Anna", "Leo"], "answers": ["Anna"]}
        write(tmp_path / f"{name}.jsonl", [row, row | {"answers": ["Leo"]}])
    pytest.importorskip("rouge_score")
    names = tasks.chosen(["longbench/8", "longbench/qasper"])
    assert len(names) == 8
    assert len(tasks.chosen(["longbench"])) == 16
    assert len(longbench.AVERAGES["14"]) == 14
    replies(monkeypatch, "Anna")
    model, options = kvq.load("demo"), WORDS._replace(folder=tmp_path)
    loaded = [tasks.load_task(name, options) for name in names]
    rows = [tasks.run_task(model, kvq.exact(), task, limit=600) for task in loaded]
    scores = {row["task"]: row["score"] for row in rows}
    assert scores["longbench/qasper"] == scores["longbench/trec"] == scores["longbench/qmsum"] == 50
    assert scores["longbench/lcc"] == pytest.approx(50)  # "Anna" and "Leo" share no character
    (average,) = tasks.averages(rows)
    assert average["task"] == "longbench/average of 8"
    assert average["score"] == pytest.approx(np.mean(list(scores.values())))
    assert average["samples"] == 16
    assert average.keys() == rows[0].keys()
    assert tasks.averages(rows[:-1]) == []
    assert tasks.fingerprint(loaded[0])["sha256"] != tasks.fingerprint(loaded[1])["sha256"]


def test_long_prompts_keep_their_first_and_last_halves(tmp_path, monkeypatch):
    write(tmp_path / "hotpotqa.jsonl", [LONGBENCH | {"context": " ".join(map(str, range(300)))}])
    task = tasks.load_task("longbench/hotpotqa", WORDS._replace(folder=tmp_path))
    asked, model = replies(monkeypatch, "Anna"), kvq.load("demo")
    row = tasks.run_task(model, kvq.kivi(bits=2), task, limit=64, chunk=16)
    (((ids,), options),) = asked
    whole, text = task.samples[0].prompt, model.tokenizer.decode(ids, skip_special_tokens=True)
    assert (row["cut"], row["mode"], row["score"]) == (1, "in-the-loop-chunk16", 100)
    assert 60 <= len(ids) <= 68  # encoded again, the seam may cost a token or two
    assert whole.startswith(text[:30])
    assert whole.endswith(text[-30:])
    assert (options["chunk"], options["max_new_tokens"]) == (16, 32)
    assert options["capacity"] >= len(ids) + 32


def test_chat_templates_are_used_where_the_benchmark_says_so(tmp_path, monkeypatch):
    for name in ("hotpotqa", "trec"):
        write(tmp_path / f"{name}.jsonl", [LONGBENCH])
    model = kvq.load("demo")
    monkeypatch.setattr(model.tokenizer, "chat_template", "{% for m in messages %}USER {{ m.content }} END{% endfor %}")
    for name, used in (("hotpotqa", True), ("trec", False)):
        task = tasks.load_task(f"longbench/{name}", WORDS._replace(folder=tmp_path))
        (ids,), _, chat = base.prepare(model, task, 600)
        assert chat == used
        assert model.tokenizer.decode(ids, skip_special_tokens=True).strip().startswith("USER") == used


def test_infinitebench_files(tmp_path):
    options = WORDS._replace(folder=tmp_path)
    choice = {
        "id": 0,
        "context": "A book.",
        "input": "Who?",
        "answer": ["Leo"],
        "options": ["Anna", "Leo", "Emma", "Jonas"],
    }
    write(tmp_path / "longbook_choice_eng.jsonl", [choice])
    (sample,) = tasks.load_task("infinitebench/longbook_choice_eng", options).samples
    assert sample.answers == ("B",)
    assert "B. Leo\n" in sample.prompt
    write(tmp_path / "code_run.jsonl", [{"context": "def f(x)", "input": "f(1)", "answer": -17}])
    assert tasks.load_task("infinitebench/code_run", options).samples[0].answers == ("-17",)


@pytest.mark.parametrize("name", ruler.NAMES)
def test_ruler_problems_fill_their_length_and_hold_their_answers(name):
    limit = 450
    task = tasks.load_task(f"ruler/{name}", WORDS._replace(limit=limit, samples=2))
    again = tasks.load_task(f"ruler/{name}", WORDS._replace(limit=limit, samples=2))
    assert task.samples == again.samples
    assert task.samples[0] != task.samples[1]
    for sample in task.samples:
        words = len(sample.prompt.split())
        assert limit - task.new - 40 < words <= limit - task.new  # the next step of size would not fit
        assert all(answer in sample.prompt for answer in sample.answers)
        assert task.score(" ".join(sample.answers), sample) == 1
        assert task.score("nothing of it", sample) == 0
    wanted = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}.get(name, 1)
    assert len(task.samples[0].answers) == wanted


def test_ruler_answers_are_right():
    options = WORDS._replace(limit=600, samples=1)
    (cwe,) = tasks.load_task("ruler/cwe", options).samples
    listed = cwe.prompt.split("\n\n")[1].split()
    assert all(listed.count(word) == 6 for word in cwe.answers)
    (fwe,) = tasks.load_task("ruler/fwe", options).samples
    counts = [fwe.prompt.split().count(word) for word in ("...", *fwe.answers)]
    assert counts == sorted(counts, reverse=True)
    assert max(fwe.prompt.split().count(word) for word in set(fwe.prompt.split()) - {"...", *fwe.answers}) < counts[-1]
    (vt,) = tasks.load_task("ruler/vt", options).samples
    held = {}
    for part in vt.prompt.split("\n\n")[1].split("VAR ")[1:]:
        held |= {part.split(" = ")[0]: part.split(" = ")[1].split(".")[0]} if " = " in part else {}
    assert set(vt.answers) == set(held)


def test_ruler_takes_what_a_folder_holds(tmp_path):
    options = WORDS._replace(folder=tmp_path, samples=1)
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": "One owl sings. Two owls sing."}))
    essay = tasks.load_task("ruler/niah_single_2", options).samples[0].prompt
    assert essay.count("owl") > 50
    paragraph = {"context": "Leo keeps bees.", "qas": [{"question": "Who keeps bees?", "answers": [{"text": "Leo"}]}]}
    nobody = {"context": "Nobody keeps wasps.", "qas": [{"question": "Who?", "answers": [], "is_impossible": True}]}
    squad = {"data": [{"paragraphs": [paragraph, nobody]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    (sample,) = tasks.load_task("ruler/qa_1", options).samples
    assert sample.answers == ("Leo",)
    assert "Question: Who keeps bees?" in sample.prompt
    assert "wasps" in sample.prompt
    pages = [["Bees", ["Leo keeps bees. ", "He sells honey."]], ["Wasps", ["Wasps sting."]]]
    hotpot = [{"question": "What does he sell?", "answer": "honey", "context": pages}]
    (tmp_path / "hotpotqa.json").write_text(json.dumps(hotpot * 2))
    (sample,) = tasks.load_task("ruler/qa_2", options._replace(limit=100)).samples
    assert "Bees\nLeo keeps bees. He sells honey." in sample.prompt
    write(
        tmp_path / "vt" / "validation.jsonl",
        [{"index": 0, "input": "Which?", "outputs": ["AB"], "answer_prefix": " It is"}],
    )
    official = tasks.load_task("ruler/vt", options)
    assert official.prompts == "official"
    assert official.samples[0] == base.Sample("Which? It is", ("AB",))


def test_unknown_names_and_lengths():
    with pytest.raises(kvq.UserError, match="known: longbench"):
        tasks.chosen(["mmlu"])
    with pytest.raises(kvq.UserError, match="niah_single_1"):
        tasks.chosen(["ruler/niah"])
    with pytest.raises(kvq.UserError, match="not even the smallest"):
        tasks.load_task("ruler/cwe", WORDS._replace(limit=150))


def test_sentences_of_a_text_come_in_order_and_again():
    text = sentences_of("One. Two!  Three?\nFour")(np.random.default_rng(0))
    got = [next(text) for _ in range(5)]
    assert got[4] == got[0]
    assert sorted(got[:4]) == ["Four ", "One. ", "Three? ", "Two! "]
