"""Data from a local folder in the official formats, or from the hub; what is missing is named."""

import gzip
import hashlib
import json
import sys
import types

import pytest

import kvqjax as kvq
from kvqjax.data.corpora import Source, read_text, records

ROWS = [
    {"question": "How many hats?", "answer": "Two. #### 2"},
    {"question": "How many cats?", "answer": "#### 3"},
]


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_json_lines_json_lists_and_packed_files_are_read_alike(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(ROWS) + "\n")
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / "c.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    for name in ("a.jsonl", "b.json", "c.jsonl.gz"):
        assert list(records(Source("family", (name,), "somewhere", {}), tmp_path)) == ROWS


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    source = Source("family", ("c.jsonl",), "the authors' page", {"path": "family"})
    with pytest.raises(
        kvq.UserError, match=r"c\.jsonl is not there; get it from the authors' page"
    ):
        list(records(source, tmp_path))
    (tmp_path / "c.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(kvq.UserError, match=r"c\.jsonl, line 2: not JSON"):
        list(records(source, tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(kvq.UserError, match=r"pip install datasets.*c\.jsonl.*folder="):
        list(records(source, None))


def test_the_hub_is_asked_as_the_source_says(monkeypatch):
    def load_dataset(path, **options):
        if path != "family":
            raise ConnectionError("no network\nat all")
        return [{"options": options}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    here = Source("family", ("c.jsonl",), "the authors' page", {"path": "family", "split": "test"})
    assert list(records(here, None)) == [{"options": {"split": "test"}}]
    gone = here._replace(hub={"path": "other"})
    with pytest.raises(
        kvq.UserError, match=r"the hub did not give it \(no network at all\); put c\.jsonl"
    ):
        list(records(gone, None))


def test_corpora_are_joined_as_the_papers_join_them(tmp_path):
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(" \n = Title = \n \n First line . \n")
    text, about = read_text("wikitext2", 0, 0, tmp_path)
    assert text == "\n\n = Title = \n\n\n\n\n First line . \n"
    assert about["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    pages = [{"text": f"page {number}"} for number in range(1200)]
    packed = gzip.compress(lines(pages).encode())
    (tmp_path / "c4-validation.00000-of-00008.json.gz").write_bytes(packed)
    assert read_text("c4", 0, 0, tmp_path)[0] == " ".join(page["text"] for page in pages[:1100])
    (tmp_path / "test.jsonl").write_text(lines(ROWS))
    assert read_text("gsm8k", 0, 0, tmp_path)[0].startswith(
        "How many hats?\nTwo. #### 2\n\nHow many cats?"
    )
    (tmp_path / "test.jsonl").write_text(lines([ROWS[0], {"question": "How many bats?"}]))
    with pytest.raises(
        kvq.UserError, match="gsm8k: record 2 has no text under question and answer; get it from"
    ):
        read_text("gsm8k", 0, 0, tmp_path)


def test_own_text_needs_nothing():
    text, about = read_text("synthetic", 100, 3)
    assert len(text.split()) >= 100
    assert text == read_text("synthetic", 100, 3)[0] != read_text("synthetic", 100, 4)[0]
    assert about["name"] == "synthetic"


def test_line_ends_of_other_systems_are_the_same_text(tmp_path):
    for name, end in (("unix", "\n"), ("dos", "\r\n"), ("mac", "\r")):
        (tmp_path / name).write_bytes(f"One line.{end}{end}Another, caf\xe9.{end}".encode())
    texts = {name: read_text(str(tmp_path / name), 0, 0) for name in ("unix", "dos", "mac")}
    assert {text for text, _ in texts.values()} == {"One line.\n\nAnother, caf\xe9.\n"}
    assert len({about["sha256"] for _, about in texts.values()}) == 1
