"""Prefixes that one engine kept, and that another one goes on from."""

import json

import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache.artifacts import read_arrays, read_description
from kvqjax.serving.engine import EngineClosed
from kvqjax.serving.prefix_folder import newest_folder, write_newest

CHUNK = 64
METHOD = "kivi:bits=2,window=32,sinks=4;0=exact"  # of most engines here: they share programs
BEGINS = [token % 49 for token in range(645)]
PROMPTS = [[*BEGINS, *tail] for tail in ([1] * 10, [2, 3] * 20, [4], [5] * 70)]


@pytest.fixture(scope="module")
def model():
    return tiny()


def engine_of(model, method, **options):
    return kvq.Engine(
        model, method, **{"rows": 2, "capacity": 1024, "chunk": CHUNK, "prefixes": 2} | options
    )


def answers(engine, prompts):
    return [engine.submit(prompt, max_new_tokens=30, eos_ids=()).result() for prompt in prompts]


def written(model, method, path, prompts=PROMPTS[:2], **options):
    with engine_of(model, method, **options) as engine:
        answers(engine, prompts)
        count = engine.save_prefixes(path)
        assert count == engine.stats().prefixes
    return count


@pytest.mark.parametrize(
    "method",
    [
        METHOD,
        pytest.param("higgs:bits=2,window=16;0=exact", marks=pytest.mark.nightly),
        # Rows without pages.
        pytest.param("kivi:bits=4,keep=streaming:512", marks=pytest.mark.nightly),
    ],
)
def test_a_later_engine_goes_on_where_an_earlier_one_ended(model, method, tmp_path):
    path = tmp_path / "kept"
    count = written(model, method, path)
    assert count == 1
    with engine_of(model, method) as cold:
        wanted = answers(cold, PROMPTS[2:])
    with engine_of(model, method) as engine:
        assert engine.load_prefixes(path) == count
        got = answers(engine, PROMPTS[2:])
        stats = engine.stats()
        held = {page for prefix in engine._prefixes._kept.values() for page in prefix.pages}
    assert [answer.reused_tokens for answer in got] == [640, 640]
    assert [answer.tokens for answer in got] == [answer.tokens for answer in wanted]
    assert stats.pages_free + len(held) == stats.pages


@pytest.mark.nightly
def test_rows_and_pages_come_back_bit_for_bit(model, tmp_path):
    with engine_of(model, METHOD) as engine:
        answers(engine, PROMPTS[:2])
        engine.save_prefixes(tmp_path / "first")
    with engine_of(model, METHOD) as engine:
        engine.load_prefixes(tmp_path / "first")
        assert engine.load_prefixes(tmp_path / "first") == 0  # all are known already
        engine.save_prefixes(tmp_path / "second")
        engine.load_prefixes(tmp_path / "second")
    folders = [tmp_path / name for name in ("first", "second")]
    read = [read_arrays(folder, read_description(folder, "prefixes")) for folder in folders]
    assert read[0]
    assert read[0].keys() == read[1].keys()
    for name, array in read[0].items():
        np.testing.assert_array_equal(array, read[1][name])


@pytest.mark.nightly
def test_those_used_last_come_first_where_room_is_short(model, tmp_path):
    small = {"capacity": 192, "chunk": 32}
    assert (
        written(model, "exact", tmp_path / "kept", [[number] * 40 for number in (3, 5, 9)], **small)
        == 3
    )
    with engine_of(model, "exact", prefixes=1, **small) as engine:
        assert engine.load_prefixes(tmp_path / "kept") == 2
        reused = [
            answer.reused_tokens for answer in answers(engine, [[9] * 40, [5] * 40, [3] * 40])
        ]
    assert reused == [32, 32, 0]
    with engine_of(model, "exact", prefixes=0, **small) as engine:
        assert engine.load_prefixes(tmp_path / "kept") == 0


@pytest.mark.nightly
def test_requests_go_on_meanwhile_and_a_closed_engine_can_be_asked(model, tmp_path):
    with engine_of(model, METHOD) as engine:
        answers(engine, PROMPTS[:1])
        running = engine.submit([1, 2], max_new_tokens=300, eos_ids=())
        next(iter(running))
        assert engine.save_prefixes(tmp_path / "meanwhile") == 1
        assert not running.ended
        assert len(running.result().tokens) == 300
    assert engine.save_prefixes(tmp_path / "closed") == 1
    with pytest.raises(kvq.UserError, match="exists already"):
        engine.save_prefixes(tmp_path / "closed")


def test_nothing_is_kept_is_a_folder_too(model, tmp_path):
    assert written(model, "exact", tmp_path / "kept", []) == 0
    with engine_of(model, "exact") as engine:
        assert engine.load_prefixes(tmp_path / "kept") == 0


def test_what_another_engine_wrote_is_refused(model, tmp_path):
    written(model, METHOD, tmp_path / "kept")
    other = model.replace(
        params={**model.params, "embed": model.params["embed"] * 2}, fingerprint="other"
    )
    for options, field in (
        ({"method": "kivi:bits=4,window=32"}, "method"),
        ({"chunk": 32}, "chunk"),
        ({"capacity": 512}, "capacity"),
        ({"model": other}, "fingerprint"),
    ):
        with engine_of(**{"model": model, "method": METHOD} | options) as engine:
            with pytest.raises(kvq.UserError, match=f"another {field}"):
                engine.load_prefixes(tmp_path / "kept")
            assert engine.stats().prefixes == 0


def test_damaged_folders_are_one_line(model, tmp_path):
    path = tmp_path / "kept"
    written(model, METHOD, path)
    text = json.loads((path / "description.json").read_text())
    prefix = text["prefixes"][0]
    with engine_of(model, METHOD) as engine:
        with pytest.raises(kvq.UserError, match="no description"):
            engine.load_prefixes(tmp_path)
        for damaged in (
            "x",
            {},
            prefix | {"trace": "zz"},
            prefix | {"trace": "00"},
            prefix | {"length": -1},
            prefix | {"pages": [1.5]},
        ):
            (path / "description.json").write_text(json.dumps(text | {"prefixes": [damaged]}))
            with pytest.raises(kvq.UserError, match="cannot be read"):
                engine.load_prefixes(path)
        (path / "description.json").write_bytes(b"\xff\x00")
        with pytest.raises(kvq.UserError, match=r"description.json: not UTF-8 text \(byte 0\)$"):
            engine.load_prefixes(path)
        (path / "description.json").write_text(json.dumps(text | {"prefixes": [prefix, prefix]}))
        with pytest.raises(kvq.UserError, match="should be"):
            engine.load_prefixes(path)
        (path / "description.json").write_text(json.dumps(text))
        for file in path.glob("arrays/**/d/*"):
            file.unlink()
        with pytest.raises(kvq.UserError, match="arrays cannot be read"):
            engine.load_prefixes(path)
        assert answers(engine, PROMPTS[:1])[0].reused_tokens == 0


def test_a_fault_is_told_to_whoever_asks(model, tmp_path, monkeypatch):
    engine = engine_of(model, METHOD)
    answers(engine, PROMPTS[:1])
    monkeypatch.setattr(engine._batch, "page_content", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.save_prefixes(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    assert len(answers(engine, PROMPTS[:1])[0].tokens) == 30  # requests go on
    monkeypatch.setattr(engine._batch, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answers(engine, PROMPTS[:1])
    with pytest.raises(EngineClosed):
        engine.save_prefixes(tmp_path / "kept")
    engine.close()


@pytest.mark.nightly
def test_a_mesh_keeps_its_part(model, tmp_path):
    """KV heads are shared out over two devices; one device reads what they wrote."""
    method = "kivi:bits=4,window=32"
    written(kvq.shard(model, method, model=2), method, tmp_path / "kept")
    with engine_of(model, method) as engine:
        wanted = answers(engine, PROMPTS[2:3])
    with engine_of(kvq.shard(model, method, model=2), method) as engine:
        assert engine.load_prefixes(tmp_path / "kept") == 1
        got = answers(engine, PROMPTS[2:3])
    assert [(answer.tokens, answer.reused_tokens) for answer in got] == [(wanted[0].tokens, 640)]


def test_a_folder_counts_when_it_is_complete(tmp_path):
    """What a killed process left behind is passed over, and older folders go when the new one is
    there."""
    folder = tmp_path / "prefixes"
    assert newest_folder(folder) is None
    write_newest(folder, lambda path: path.mkdir(parents=True))
    write_newest(folder, lambda path: path.mkdir())
    (folder / "prefixes-9.part").mkdir()
    assert [path.name for path in sorted(folder.iterdir())] == ["prefixes-2", "prefixes-9.part"]
    assert newest_folder(folder) == folder / "prefixes-2"
    with pytest.raises(ZeroDivisionError):
        write_newest(folder, lambda path: 1 / 0)
    assert newest_folder(folder) == folder / "prefixes-2"
