"""Data as others keep it: files, folders, saved data sets, the hub; and what cannot be used, in one
line."""

import codecs
import csv
import gzip
import json
import sys
import types

import numpy as np
import pytest
from cases import thinned
from commands import run
from tiny import tiny

import kvqjax as kvq
from kvqjax.data import Data, data_or_ids, read, token_ids
from kvqjax.data import documents as documents_module
from kvqjax.eval import drift, perplexity, retrieval
from kvqjax.model import locate

DOCUMENTS = ("The old man came back.\u2028He sat.", 'Rain, "again".\nAnd wind.')
RECORDS = [{"text": text, "id": number} for number, text in enumerate(DOCUMENTS)]
MESSAGES = [
    {"role": "user", "content": "Who came?"},
    {"role": "assistant", "content": "The old man."},
]
TALK = "user: Who came?\nassistant: The old man."


def lines(rows, **options) -> bytes:
    return "".join(json.dumps(row, **options) + "\n" for row in rows).encode()


def table(path, mark=",") -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"], delimiter=mark)
        writer.writeheader()
        writer.writerows(RECORDS)


def parquet(path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(RECORDS), path)


def saved(path) -> None:
    pytest.importorskip("datasets").Dataset.from_list(RECORDS).save_to_disk(path)


def folder(path) -> None:
    (path / "part").mkdir(parents=True)
    (path / "README.md").write_text("About these data.")
    (path / ".hidden.jsonl").write_text("not JSON")
    (path / "dataset_infos.json").write_text("{}")
    (path / "b.jsonl").write_bytes(lines(RECORDS[:1]))
    (path / "part" / "a.json").write_bytes(json.dumps(RECORDS[1:]).encode())


def content(raw: bytes):
    return lambda path: path.write_bytes(raw)


KINDS = {
    "x.jsonl": content(lines(RECORDS)),
    "bare.jsonl": content(lines(RECORDS, ensure_ascii=False)),  # U+2028 is no end of a line
    "marked.jsonl": content(codecs.BOM_UTF8 + lines(RECORDS).replace(b"\n", b"\r\n")),
    "joined.jsonl": content(b"".join(codecs.BOM_UTF8 + lines([row]) for row in RECORDS)),
    "blank.jsonl": content(
        lines([RECORDS[0], {"text": None}, {"text": " "}, RECORDS[1]]) + b"\n\n"
    ),
    "x.jsonl.gz": content(gzip.compress(lines(RECORDS))),
    "wrong.gz": content(lines(RECORDS)),
    "wrong.txt": content(lines(RECORDS)),
    "lines.json": content(lines(RECORDS)),
    "list.json": content(json.dumps(RECORDS).encode()),
    "pretty.json": content(json.dumps(RECORDS, indent=2).encode()),
    "inside.json": content(json.dumps({"data": RECORDS}).encode()),
    "strings.json": content(json.dumps(DOCUMENTS).encode()),
    "strings.jsonl": content(lines(DOCUMENTS)),
    "utf16.json": content(json.dumps(RECORDS).encode("utf-16")),
    "x.csv": table,
    "x.tsv": lambda path: table(path, "\t"),
    "x.parquet": parquet,
    "wrong.raw": parquet,
    "saved": saved,
    "folder": folder,
}


@pytest.mark.parametrize("name", KINDS)
def test_the_same_documents_however_they_are_kept(tmp_path, name):
    KINDS[name](tmp_path / name)
    data = read(tmp_path / name)
    assert data.documents == DOCUMENTS
    assert data.about["name"] == str(tmp_path / name)
    assert data.about["documents"] == 2
    assert data.about.get("field", "text") == "text"
    assert data.about["sha256"] == documents_module.digest("\n\n".join(DOCUMENTS))
    if name == "folder":
        assert data.about["files"] == ["b.jsonl", "part/a.json"]


def test_fields_are_found_or_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(
        lines([{"id": 1, "prompt": "Who came?", "body": "The old man."}])
    )
    assert read(tmp_path / "x.jsonl").documents == ("Who came?",)
    data = read(tmp_path / "x.jsonl", field="body")
    assert (data.documents, data.about["field"]) == (("The old man.",), "body")
    for field in ("absent", "id"):
        with pytest.raises(kvq.UserError, match=field):
            read(tmp_path / "x.jsonl", field=field)


TURNS = {
    "messages": {"messages": MESSAGES},
    "prompt": {"prompt": MESSAGES},
    "from and value": {
        "conversations": [{"from": m["role"], "value": m["content"]} for m in MESSAGES]
    },
    "parts": {
        "messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
    },
    "bare": MESSAGES,
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("several", [False, True])
def test_conversations_are_lines_without_a_template(tmp_path, name, several):
    rows = [TURNS[name]] * (2 if several else 1)
    (tmp_path / "x.jsonl").write_bytes(lines(rows))
    (tmp_path / "x.json").write_bytes(json.dumps(rows if several else rows[0]).encode())
    for file in ("x.jsonl", "x.json"):
        assert read(tmp_path / file, model=kvq.load("demo")).documents == (TALK,) * len(rows)


def test_conversations_go_through_the_chat_template(tmp_path):
    import shutil

    shutil.copytree(locate("recall"), tmp_path / "model")
    template = (
        "{{ '<s>' }}{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}{{ missing() }}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template.replace("{{ missing() }}", ""))
    (tmp_path / "x.jsonl").write_bytes(lines([{"messages": MESSAGES}]))
    data = read(tmp_path / "x.jsonl", model=kvq.load(tmp_path / "model"))
    assert data.documents == ("<s>user=Who came?;assistant=The old man.;",)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text(template)
    with pytest.raises(
        kvq.UserError, match=r"x\.jsonl, line 1, field 'messages': the chat template refuses"
    ):
        read(tmp_path / "x.jsonl", model=kvq.load(tmp_path / "other"))


def test_half_a_surrogate_pair_is_repaired_and_said(tmp_path):
    (tmp_path / "x.jsonl").write_text(r'{"text": "a \ud83d b \ud83d\ude42"}' "\n")
    data = read(tmp_path / "x.jsonl")
    assert data.documents == ("a \ufffd b \U0001f642",)
    assert data.about["repaired documents"] == 1


UNUSABLE = {
    "object.json": (b'{"a": {"b": 1}}', "none of them is text, prompt, messages"),
    "object.txt": (b'{"a": 1}\n', "object.txt, line 1: has the fields a; none of them is"),
    "numbers.json": (b"[1, 2]", "neither text nor messages, but int"),
    "half.json": (b'[{"text": "a"},', "half.json: not readable as JSON: line 1, column"),
    "half.jsonl": (b'{"text": "a"}\n{"text": ', "half.jsonl, line 2: not JSON"),
    "comma.json": (b'{"text": "a",}', "comma.json: not readable as JSON: line 1"),
    "ids.jsonl": (b'{"text": [1, 2]}\n', "token ids"),
    "other.jsonl": (
        b'{"text": "a"}\n{"body": "b"}\n',
        "line 2: has the fields body; none of them is",
    ),
    "none.jsonl": (b'{"text": ""}\n{"text": null}\n', "no text"),
    "x.parquet": (b"PAR1 and no more", "cannot be read as Parquet"),
    "picture.jsonl": (
        b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
        "only text is read",
    ),
    "role.jsonl": (b'{"messages": [{"role": 1, "content": "a"}]}\n', "no usable role"),
    "x.csv": (b"a,b\n1,2\n", "has the fields a, b; none of them is text"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_used_is_one_line(tmp_path, name):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    raw, message = UNUSABLE[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(kvq.UserError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_splits_are_chosen_not_guessed(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    with pytest.raises(kvq.UserError, match=r"has the splits train, test; choose with split="):
        read(tmp_path / "saved")
    with pytest.raises(kvq.UserError, match="no split 'dev'; it has train, test"):
        read(tmp_path / "saved", split="dev")
    assert read(tmp_path / "saved", split="test").documents == ("test",)
    assert read(tmp_path / "saved" / "train").documents == ("train",)
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(kvq.UserError, match="files have no splits"):
        read(tmp_path / "x.txt", split="test")


def test_the_hub_is_read_by_name(monkeypatch):
    def load_dataset(path, name, streaming):
        if path != "owner/name":
            raise ConnectionError("no network\nat all")
        return {"train": [{"text": f"{name} {streaming}"}]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read("owner/name").documents == ("None True",)
    assert read("owner/name:own", split="train").documents == ("own True",)
    with pytest.raises(
        kvq.UserError, match=r"the hub did not give it \(no network at all\); download it"
    ) as caught:
        read("owner/other")
    assert "\n" not in str(caught.value)


def test_what_a_library_is_missing_for_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(kvq.UserError, match=r"pip install pyarrow"):
        read(tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(kvq.UserError, match=r"pip install datasets"):
        read("owner/name")


def test_names_that_are_nearly_right_are_answered(tmp_path):
    for name in ("wikitext", "wikitext-2", "wikitext3"):
        with pytest.raises(kvq.UserError, match="did you mean 'wikitext2'"):
            read(name)
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "empty", "no data in this folder"),
        (tmp_path / "absent.jsonl", "No such file"),
    ):
        with pytest.raises(kvq.UserError, match=message):
            read(path)


def test_large_data_are_read_up_to_a_limit_unless_all_is_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "MOST_CHARACTERS", 30)
    (tmp_path / "x.jsonl").write_bytes(lines(RECORDS))
    data = read(tmp_path / "x.jsonl", tokens=100)
    assert sum(map(len, data.documents)) == 30
    assert data.about["read"] == "the first 30 characters"
    assert read(tmp_path / "x.jsonl").documents == DOCUMENTS


TEXT = "qx47,rt05,ab31," * 40


@pytest.fixture(scope="module")
def recall() -> kvq.Model:
    return kvq.load("recall")


def test_every_door_takes_text_paths_and_ids_alike(tmp_path, recall):
    (tmp_path / "x.txt").write_text(TEXT)
    ids = recall.encode(TEXT)
    rows = np.asarray(ids)[: len(ids) // 8 * 8].reshape(8, -1)
    options = {"window": 64, "tokens": 64, "chunk": 64}
    ways = [
        TEXT,
        [TEXT],
        tmp_path / "x.txt",
        str(tmp_path / "x.txt"),
        read(tmp_path / "x.txt"),
        ids,
        np.asarray(ids),
    ]
    for measure in (perplexity, drift):
        wanted = measure(recall, np.asarray(ids), "exact", **options)
        for way in [*ways, rows, rows.tolist()]:
            assert measure(recall, way, "exact", **options) == wanted
    method = kvq.higgs(bits=3, centre="mean")
    wanted = kvq.calibrate.run(recall, method, ids, count=2, length=64)
    for way in ways:
        data = kvq.calibrate.run(recall, method, way, count=2, length=64)
        assert data.about == wanted.about
        for got, want in zip(data.constants, wanted.constants, strict=True):
            for group in want:
                for name in want[group]:
                    np.testing.assert_array_equal(got[group][name], want[group][name])


NO_TOKENS = {
    "None": (None, "wanted a text"),
    "a number": (5, "wanted a text"),
    "floats": ([0.5, 1.0], "type float64"),
    "truths": ([True, False], "type bool"),
    "bytes": (b"text", "decode it first"),
    "nothing": ([], "empty"),
    "empty text": ("", "no text"),
    "mixed": (["text", 1], "wanted a text"),
    "a tokenizer's output": ({"input_ids": [1, 2]}, r"pass texts\['input_ids'\]"),
    "three axes": (np.zeros((2, 2, 2), int), r"\[2, 2, 2\]"),
    "another vocabulary": ([1, 10**6], "outside 0 .. "),
    "beyond 64 bits": ([1, 2**70], "wanted a text"),
    "negative": ([1, -1], "outside 0 .. "),
    "absent file": ("absent.jsonl", "No such file"),
    "a generator": ((n for n in [1]), "wanted a text"),
}


@pytest.mark.parametrize("name", thinned(NO_TOKENS, 3))
def test_what_is_neither_text_nor_tokens_is_one_line(recall, name):
    given, message = NO_TOKENS[name]
    doors = {
        "perplexity": lambda: perplexity(recall, given, "exact"),
        "drift": lambda: drift(recall, given, "exact"),
        "calibrate": lambda: kvq.calibrate.run(recall, "kvquant", given),
        "tune": lambda: kvq.tune(recall, given, method="higgs", bits=4),
    }
    for door in doors.values():
        with pytest.raises(kvq.UserError, match=message) as caught:
            door()
        assert "\n" not in str(caught.value)


def test_text_for_a_model_without_a_tokenizer_is_one_line():
    with pytest.raises(kvq.UserError, match="no tokenizer; pass token ids"):
        perplexity(tiny(), "text", "exact")


def test_a_long_text_is_not_in_the_message(recall):
    with pytest.raises(kvq.UserError) as caught:
        perplexity(recall, "ab12" * 20, "exact", window=4096)
    assert "ab12ab12" not in str(caught.value)
    with pytest.raises(kvq.UserError) as caught:
        token_ids(recall, ["ab12" * 20, 1])
    assert "ab12ab12" not in str(caught.value)


@pytest.mark.nightly
def test_sentences_between_needles_come_from_text_or_a_path(tmp_path, recall):
    hay = "The sea was calm. " * 9
    (tmp_path / "x.txt").write_text(hay)
    options = {"task": "passkey", "length": 96, "samples": 2, "batch": 2}
    demo = kvq.load("demo")
    rows = [
        retrieval(demo, "exact", hay=way, **options)
        for way in (hay, tmp_path / "x.txt", Data((hay,), {}))
    ]
    assert rows[0] == rows[1] == rows[2]
    with pytest.raises(kvq.UserError, match="hay is"):
        retrieval(demo, "exact", hay="", **options)


def test_commands_take_every_kind_of_data_and_say_what_they_read(tmp_path, capsys, monkeypatch):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines([{"body": TEXT}] * 2)))
    words = [
        "--data",
        str(tmp_path / "x.jsonl.gz"),
        "--field",
        "body",
        "--model",
        "recall",
        "--json",
    ]
    sizes = ["--window", "64", "--tokens", "64"]
    code, out, err = run(capsys, monkeypatch, "eval", "ppl", "-c", "exact", *words, *sizes)
    assert code == 0, err
    about = json.loads(out[out.index("[\n") :])[0]["about"]["data"]
    assert (about["field"], about["documents"]) == ("body", 2)
    assert about["tokens"] == len(kvq.load("recall").encode(f"{TEXT}\n\n{TEXT}"))
    made = [
        "-c",
        "higgs:bits=3,centre=mean",
        "--out",
        str(tmp_path / "made"),
        "--sequences",
        "2",
        "--length",
        "64",
    ]
    code, out, err = run(capsys, monkeypatch, "calibrate", *made, *words)
    assert code == 0, err
    about = kvq.load_artifact(tmp_path / "made").about
    assert (about["sequences"], about["data"]["documents"], about["data"]["field"]) == (
        2,
        2,
        "body",
    )
    code, out, err = run(capsys, monkeypatch, "eval", "ppl", "-c", "exact", *words[:2])
    assert code == 2
    assert "--field" in err
    assert err.count("\n") == 1


def test_data_or_ids_keeps_documents_apart():
    assert data_or_ids(tiny(), ["a", "b"]).documents == ("a", "b")
