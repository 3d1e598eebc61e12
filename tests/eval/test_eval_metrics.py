"""The benchmarks' scores against values worked out by hand."""

import pytest

from kvqjax.eval.tasks import Sample, infinitebench, longbench
from kvqjax.eval.tasks import metrics as m


def test_token_f1_ignores_case_articles_and_punctuation():
    assert m.token_f1("The red house.", "red house") == 1
    assert m.token_f1("a red old house", "red house") == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert m.token_f1("red red", "red") == pytest.approx(2 / 3)
    assert m.token_f1("blue", "red") == 0


def test_rouge_l_is_the_longest_common_subsequence():
    pytest.importorskip("rouge_score")
    # "the cat mat" is common: 3 of 5 predicted and 3 of 4 wanted words.
    got = m.rouge_l("the cat on a mat", "the cat sat mat")
    assert got == pytest.approx(2 * (3 / 5) * (3 / 4) / (3 / 5 + 3 / 4))
    assert m.rouge_l("one two\nthree four", "three four\none two") == pytest.approx(0.5)
    assert m.rouge_l("one two\nthree four", "three four\none two", "rougeLsum") == pytest.approx(1)


def test_classification_shares_the_point_among_the_named_classes():
    classes = ("city", "city gate", "river")
    assert m.classification("It is a river", "river", classes) == 1
    assert m.classification("river or city", "river", classes) == 0.5
    assert m.classification("city gate", "city gate", classes) == 1  # "city" is part of the right name
    assert m.classification("mountain", "river", classes) == 0


def test_edit_similarity_takes_the_first_line_of_code():
    assert m.edit_similarity("```python\n# a comment\nx = 1\ny = 2", "x = 1") == 1
    assert m.edit_similarity("x = 1", "x = 2") == 0.8  # four of five characters match on both sides
    assert m.edit_similarity("// nothing else", "x = 1") == 0


def test_numbers():
    assert m.number_share("Paragraph 7, or 3", "Paragraph 7") == 0.5
    assert m.number_share("none", "5") == 0


@pytest.mark.parametrize(
    ("task", "prediction", "answer", "want"),
    [
        ("passkey", " 71432.", "71432", 1),
        ("passkey", "1 71432", "71432", 0),
        ("kv_retrieval", ': "ab-12".', "ab-12", 1),
        ("kv_retrieval", "ab-123", "ab-12", 0),
        ("longbook_choice_eng", "B. The sea", "B", 1),
        ("longbook_choice_eng", "I think the answer is: C", "C", 1),
        ("longbook_choice_eng", "Because of D", "D", 1),
        ("longbook_choice_eng", "Both", "B", 0),
        ("longdialogue_qa_eng", "it is Anna.", "ANNA", 1),
        ("math_find", "is 4.50", "4.5", 1),
        ("math_find", "12", "2", 0),
        ("code_run", "The value is -17.", "-17", 1),
        ("code_run", "17 18", "17", 0),
    ],
)
def test_infinitebench_scores(task, prediction, answer, want):
    assert infinitebench._KINDS[task].score(prediction, answer) == want


def test_few_shot_tasks_score_the_first_line_and_the_best_answer():
    sample = Sample("", ("Jonas Weber", "Weber"))
    assert longbench._KINDS["triviaqa"].score("\nWeber\nQuestion: next", sample) == 1
    assert longbench._KINDS["hotpotqa"].score("\nWeber\nQuestion: next", sample) == pytest.approx(2 / 4)
    classes = ("city", "river")
    assert longbench._KINDS["trec"].score("river\ncity", Sample("", ("river",), classes)) == 1
