"""Structured text given back to the letter: texts that fit and parse, scores of answers made by
hand, and caches that differ."""

import json
import xml.etree.ElementTree as ET

import jax.numpy as jnp
import numpy as np
import pytest
from commands import run
from tiny import tiny

import kvqjax as kvq
from kvqjax.eval import copying
from kvqjax.eval.measure_copying import Entry, kinds_for, predictions, questions, scored
from kvqjax.eval.scores import ROUNDING, exact_logits
from kvqjax.generation.prompt_ids import padded

LENGTH = 256
LOSSY = kvq.uniform(bits=1)


@pytest.fixture(scope="module")
def recall() -> kvq.Model:
    return kvq.load("recall")


@pytest.fixture(scope="module")
def rows(recall) -> dict[str, dict]:
    """Rows of the exact cache and of a lossy one, on the same texts."""
    options = {"kind": "symbols", "length": LENGTH, "samples": 4, "chunk": 32}
    return {str(method): copying(recall, method, **options) for method in (kvq.exact(), LOSSY)}


def texts(kind: str, length: int = 768) -> list[tuple[str, str, list[str]]]:
    """Prompts, answers and the parts of answers that are scored, by the tokenizer of `demo`."""
    model = kvq.load("demo")
    asked = questions(model, kind, length, 2, seed=3)
    for part in asked:
        assert length // 2 < len(part.prompt) + len(part.answer) <= length
    return [
        (
            model.tokenizer.decode(part.prompt, skip_special_tokens=True),
            part.text,
            [part.text[first:end] for first, end in part.parts],
        )
        for part in asked
    ]


@pytest.mark.parametrize(("kind", "mark"), [("json", "{\n"), ("xml", "<items>\n")])
def test_a_document_parses_and_stands_in_its_prompt_twice(kind, mark):
    for prompt, answer, parts in texts(kind):
        document, again, begun = (mark + part for part in prompt.split(mark)[1:])
        assert document == again == begun + answer + "\n"
        assert answer == "".join(parts)
        if kind == "json":
            assert len(json.loads(document)) == len(parts)  # without the first, with the end
        else:
            assert len(ET.fromstring(document)) == len(parts)


def test_fields_are_those_of_records():
    for prompt, answer, parts in texts("fields", 1024):
        records = json.loads(prompt[: prompt.index("}\n\n") + 1])
        asked = [json.loads(f"{{{line}}}") for line in answer.splitlines()]
        wanted = [(records[key]["code"], records[key]["owner"]) for line in asked for key in line]
        assert list(zip(parts[::2], parts[1::2], strict=True)) == wanted
        assert [next(iter(line.values())) for line in asked] == [
            {"code": code, "owner": owner} for code, owner in wanted
        ]
        assert len(records) > len(asked) == 6


def test_each_call_takes_the_result_before_it():
    for prompt, answer, parts in texts("chain", 1024):
        log, _, chains = prompt.partition("\n\n")
        calls = [json.loads(line) for line in log.splitlines()]
        results = {call["call"]: call["result"] for call in calls}
        asked = [json.loads(line) for line in answer.splitlines()]
        assert len(asked) == 10
        assert all(results[call["call"]] == call["result"] for call in asked)
        assert [call["call"] for call in asked[1:]] == [call["result"] for call in asked[:-1]]
        # All values but the first argument.
        assert parts == [value for call in asked for value in call.values()][1:]
        assert [call["call"] for call in calls] != sorted(results)
        assert chains.endswith("---\n")


def test_texts_are_those_of_their_seed():
    model = kvq.load("demo")
    first, again, other = (questions(model, "json", 768, 1, seed)[0].text for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.nightly
def test_the_exact_cache_predicts_what_no_cache_does(recall):
    asked = questions(recall, "symbols", LENGTH, 4, seed=0)
    (made,) = predictions([(recall, kvq.exact())], asked, LENGTH, Entry(chunk=32))
    ids = padded([[*part.prompt, *part.answer] for part in asked], LENGTH)
    plain = np.asarray(exact_logits(recall, jnp.asarray(ids)).argmax(-1))
    for part, row, best in zip(asked, made, plain, strict=True):
        first = len(part.prompt) - 1
        wanted = best[first : first + len(part.answer)]
        np.testing.assert_array_equal(row.best, wanted)
        np.testing.assert_array_equal(row.best_exact, wanted)
        assert abs(row.kld.mean()) < ROUNDING


def test_greedy_decoding_goes_wrong_at_the_first_wrong_token(recall):
    asked = questions(recall, "symbols", LENGTH, 4, seed=0)
    made = predictions([(recall, LOSSY)], asked, LENGTH, Entry(chunk=32))[0]
    options = {"chunk": 32, "capacity": LENGTH, "eos_ids": ()}
    # The first token of a span cannot be known, and is given.
    prompts = [[*part.prompt, part.answer[0]] for part in asked]
    written = kvq.generate(recall, prompts, LOSSY, max_new_tokens=48, **options).tokens
    for part, row, tokens in zip(asked, made, written, strict=True):
        wrong = int(np.argmax(row.best[1:] != part.answer[1:])) + 1
        assert 0 < wrong < 48
        assert tokens[:wrong] == row.best[1 : wrong + 1].tolist()


def test_scores_of_an_answer_made_by_hand():
    model = kvq.load("demo")
    (asked,) = questions(model, "chain", 1024, 1, seed=0)
    right = np.asarray(asked.answer)
    perfect = scored(asked, right)
    assert (perfect.first_wrong, perfect.tokens.all(), perfect.parts.all()) == (1.0, True, True)
    # The second digit of the third of 19 numbers of four digits.
    first, _ = asked.parts[2]
    place = int(np.searchsorted(asked.ends, first + 1, "right"))
    other = model.encode(str((int(asked.text[first + 1]) + 1) % 10), False)[-1]
    wrong = right.copy()
    wrong[place] = other
    answer = scored(asked, wrong)
    assert answer.first_wrong == pytest.approx((2 * 4 + 1) / (19 * 4))
    assert answer.parts.tolist() == [number != 2 for number in range(19)]
    assert (answer.tokens.size, answer.tokens.sum()) == (76, 75)
    # What lies between the numbers is given.
    between = right.copy()
    between[0] = other
    assert scored(asked, between).first_wrong == 1.0


def test_a_lossy_cache_scores_worse(rows):
    exact, lossy = rows["exact"], rows[str(LOSSY)]
    assert exact["right"] == exact["right_exact"] == lossy["right_exact"] > 0.95
    assert lossy["right"] < exact["right"] - 0.1
    assert lossy["parts"] < exact["parts"]
    assert lossy["first_wrong"] < exact["first_wrong"]
    assert exact["exact"] > lossy["exact"] == 0
    assert abs(exact["kld"]) < ROUNDING < 0.1 < lossy["kld"] < lossy["kld_p999"]


@pytest.mark.nightly
def test_the_command_gives_the_same_rows(rows, capsys, monkeypatch, tmp_path):
    words = ["eval", "copy", "-c", "exact", "-c", str(LOSSY), "--length", str(LENGTH)]
    words += ["--samples", "4", "--chunk", "32", "--json", "--plot", str(tmp_path / "copy.png")]
    code, out, err = run(capsys, monkeypatch, *words)
    assert code == 0, err
    printed = [{key: row[key] for key in row if key != "about"} for row in json.loads(out)]
    for row in printed:
        assert row == pytest.approx(rows[row["cache"]], abs=1e-6)
    assert [row["cache"] for row in printed] == list(rows)
    assert (tmp_path / "copy.png").exists()


def test_what_is_read_apart_is_answered_behind_all_of_it(recall):
    options = {"kind": "symbols", "length": LENGTH, "samples": 4}
    alone = copying(recall, "exact", apart=16, **options)
    anew = copying(recall, "exact", apart=16, recompute=12, **options)
    assert (alone["mode"], anew["mode"]) == ("apart16-recompute0", "apart16-recompute12")
    # What is read anew has seen what comes before it.
    assert alone["kld"] > anew["kld"] > ROUNDING
    # A prompt that is shorter than a stretch and its end is read as one text.
    assert abs(copying(recall, "exact", apart=128, **options)["kld"]) < ROUNDING


def test_kinds_are_those_that_a_tokenizer_can_spell(recall):
    assert kinds_for(recall) == ("symbols",)
    assert kinds_for(kvq.load("demo")) == ("json", "xml", "fields", "chain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "yaml"}, "kind='yaml'; known: json, xml, fields, chain, symbols"),
        ({"kind": "json", "length": 512}, "this tokenizer lacks some of the characters"),
        ({"kind": "json", "length": 40}, "length=40; this problem needs at least"),
        ({"kind": "symbols", "length": 16}, "two spans of 8 symbols do not fit twice"),
        ({"kind": "symbols", "samples": 0}, "samples=0"),
        ({"kind": "symbols", "recompute": 4}, "recompute=4 is of texts that are read apart"),
        ({"kind": "symbols", "apart": 64, "chunk": 8}, "leave out chunk or apart"),
        ({"kind": "symbols", "apart": 64, "recompute": 64}, "wanted less than apart=64"),
        ({"kind": "symbols", "length": 128, "apart": 96}, "of 128 tokens the last 64"),
        ({"model": tiny()}, "it has no tokenizer; pass token ids"),
    ],
)
def test_bad_input_is_one_line(recall, options, message):
    with pytest.raises(kvq.UserError) as raised:
        copying(**({"model": recall, "method": "exact"} | options))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
