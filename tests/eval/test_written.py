"""Data that the model writes itself: the same rows each time, kept from one run to the next, and no
row that goes round in circles."""

import jax
import numpy as np
import pytest
from commands import run
from tiny import repeating, tiny

import kvqjax as kvq
from kvqjax.calibrate import sequences
from kvqjax.data import read, token_ids

TOKENS = 512  # two rows of the bundled model, one at each of two temperatures


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """An empty folder for what the library keeps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvqjax" / "texts"


def labels_of(told: list):
    """A bar that notes what it is called."""

    def bar(label):
        told.append(label)
        return lambda fraction: None

    return bar


@pytest.mark.nightly
def test_same_model_seed_and_size_give_the_same_tokens(kept):
    model, told = kvq.load("demo"), []
    first = read("self", model=model, tokens=256, seed=3, bar=labels_of(told))
    (file,) = kept.iterdir()
    again = read("self", model=model, tokens=256, seed=3, bar=labels_of(told))
    assert told == ["writing the text"]  # the second time nothing was written
    file.write_bytes(b"broken")
    anew = read("self", model=model, tokens=256, seed=3)
    other = read("self", model=model, tokens=256, seed=4)
    assert first == again._replace(ids=first.ids) == anew._replace(ids=first.ids)
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.ids, anew.ids)
    assert (first.ids != other.ids).any()
    assert first.about["tokens"] == len(first.ids) == 256
    assert first.documents[0] == model.tokenizer.decode(
        first.ids.tolist(), skip_special_tokens=True
    )


@pytest.mark.nightly
def test_writing_that_was_stopped_goes_on_where_it_was(kept, monkeypatch, tmp_path):
    model = kvq.load("demo")

    def stopping(label):
        def progress(fraction):
            if fraction > 0.6:
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        read("self", model=model, tokens=TOKENS, bar=stopping)
    fractions = []
    resumed = read("self", model=model, tokens=TOKENS, bar=lambda label: fractions.append)
    assert fractions[0] > 0.5
    assert fractions[-1] == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    np.testing.assert_array_equal(resumed.ids, read("self", model=model, tokens=TOKENS).ids)


@pytest.mark.nightly
def test_a_model_without_a_tokenizer_writes_tokens():
    model = tiny()
    data = read("self", model=model, tokens=TOKENS)
    assert data.documents == ()
    assert data.about["tokens"] == TOKENS
    rows = sequences(model, data, 4, 128)
    assert rows.shape == (4, 128)
    np.testing.assert_array_equal(rows.reshape(-1), token_ids(model, data))
    artifacts = [
        kvq.calibrate.run(model, "klt:bits=2", source, count=4, length=128)
        for source in ("self", rows)
    ]
    by_name, expected = (jax.tree.leaves(artifact.constants) for artifact in artifacts)
    for constant, other in zip(by_name, expected, strict=True):
        np.testing.assert_array_equal(constant, other)


def test_rows_that_go_round_in_circles_are_refused():
    with pytest.raises(kvq.UserError, match="rows that this model wrote go round in circles"):
        read("self", model=repeating(), tokens=TOKENS)


def test_another_row_comes_in_place_of_one_that_goes_round_in_circles(monkeypatch):
    seen = []

    def first_is_bad(row):
        seen.append(row)
        return float(len(seen) > 1)

    monkeypatch.setattr("kvqjax.data.written.variety", first_is_bad)
    data = read("self", model=tiny(), tokens=TOKENS)
    assert len(seen) == data.about["rows"] + 1
    np.testing.assert_array_equal(data.ids, np.concatenate(seen[1:]))


def test_what_cannot_be_written_is_one_line():
    with pytest.raises(kvq.UserError, match="self: what the model writes needs the model"):
        read("self")
    with pytest.raises(kvq.UserError, match="self: its field and split are fixed"):
        read("self", model=tiny(), field="text")


def calibrated(capsys, monkeypatch, out, *words):
    """What `kvqjax calibrate` says of the data of the artifact that it writes."""
    code, _, err = run(capsys, monkeypatch, "calibrate", *words, "--out", str(out))
    assert code == 0, err
    return kvq.load_artifact(out).about.get("data")


def test_calibrate_command_and_what_learns_from_no_text(kept, capsys, monkeypatch, tmp_path):
    words = ["-m", "demo", "--data", "self"]
    about = calibrated(capsys, monkeypatch, tmp_path / "x", *words, "-c", "xquant:bits=4")
    assert about is None  # it learns from the weights alone
    assert not kept.exists()
    words += ["-c", "klt:bits=2", "--sequences", "2", "--length", "256"]
    about = calibrated(capsys, monkeypatch, tmp_path / "klt", *words)
    assert (about["name"], about["tokens"]) == ("self", 512)
