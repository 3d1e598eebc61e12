"""Marks, line ends and packing that other programs leave in text are read; other files give one
line."""

import codecs
import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvqjax as kvq
from kvqjax._files import decode_text, open_lines, open_text, read_json
from kvqjax.data import read as read_data

TEXT = "One line, café.\n\nAnother 漢字 🙂.\n"
LEFT = {
    "plain": TEXT.encode(),
    "windows editor": codecs.BOM_UTF8 + TEXT.replace("\n", "\r\n").encode(),
    "mark saved twice": codecs.BOM_UTF8 * 2 + TEXT.encode(),
    "old mac": TEXT.replace("\n", "\r").encode(),
    "utf-16 of windows": codecs.BOM_UTF16_LE + TEXT.replace("\n", "\r\n").encode("utf-16-le"),
    "utf-16 big end": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "utf-32": codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"),
    "gzip": gzip.compress(TEXT.encode()),
    "gzip with a mark": gzip.compress(codecs.BOM_UTF8 + TEXT.encode()),
    "gzip of two parts": gzip.compress(TEXT.encode()[:9]) + gzip.compress(TEXT.encode()[9:]),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("suffix", [".txt", ".gz"])  # the name says nothing about the packing
def test_the_same_text_however_it_was_saved(tmp_path, name, suffix):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(LEFT[name])
    assert open_text(path) == decode_text(LEFT[name], "-") == TEXT
    assert list(open_lines(path)) == TEXT.split("\n")[:-1]


NO_TEXT = {
    "latin-1": ("café".encode("latin-1"), "not UTF-8 text"),
    "half a utf-16 unit": (codecs.BOM_UTF16_LE + b"a\0b", "not UTF-16"),
    "utf-16 without a mark": ("text".encode("utf-16-le"), "a NUL character"),
    "holes of a crash": (b"text" + bytes(9), "a NUL character"),
    "half a gzip": (gzip.compress(TEXT.encode() * 99)[:-20], "damaged gzip"),
    "a spoilt gzip": (gzip.compress(TEXT.encode())[:-8] + bytes(8), "damaged gzip"),
    "zstandard": (
        b"\x28\xb5\x2f\xfd" + b"\xff" * 30,
        "packed by zstd, which is not read here; unpack it",
    ),
    "a zip": (b"PK\x03\x04" + b"\xff" * 30, "packed by zip"),
    "a pdf": (b"%PDF-1.7\n" + b"\xff" * 30, "a PDF is not read here"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_one_line(tmp_path, name):
    raw, message = NO_TEXT[name]
    (tmp_path / "file").write_bytes(raw)
    for read in (open_text, lambda path: list(open_lines(path))):
        with pytest.raises(kvq.UserError, match=message) as caught:
            read(tmp_path / "file")
        assert "\n" not in str(caught.value)
        assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.parametrize("path", ["", "absent", "with a \0"])
def test_a_path_that_cannot_be_read_is_one_line(tmp_path, path):
    for read in (open_text, read_json, lambda path: list(open_lines(path))):
        with pytest.raises(kvq.UserError):
            read(tmp_path / path)


def test_a_pipe_is_read_once(tmp_path):
    """As `-f <(command)` wants it."""
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        pool.submit((tmp_path / "pipe").write_text, "Bonjour")
        assert open_text(tmp_path / "pipe", pipes=True) == "Bonjour"


@pytest.mark.parametrize("path", ["pipe", "/dev/zero"])  # waits for a writer; has no end
def test_what_is_no_file_is_one_line(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    for read in (open_text, read_data, lambda path: list(open_lines(path))):
        with pytest.raises(kvq.UserError, match=f"{path}: a pipe or a device, not a file"):
            read(tmp_path / path)
    with pytest.raises(kvq.UserError, match="wanted the folder of a model"):
        kvq.load(tmp_path / path)


def test_marks_of_joined_files_are_taken_from_every_line(tmp_path):
    (tmp_path / "file").write_bytes((codecs.BOM_UTF8 + b"{}\r\n") * 2)
    assert list(open_lines(tmp_path / "file")) == ["{}", "{}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ('{"a": 1,}', "line 1, column"),
        ('{"a": 1\n', "line 2, column 1"),
        ("[" * 100_000, "not readable as JSON"),
        ("9" * 5000, "not readable as JSON"),
    ],
)
def test_json_that_cannot_be_read_says_where(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(kvq.UserError, match=message) as caught:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(caught.value)


def test_json_is_read_through_the_same_door(tmp_path):
    value = {"café": [1, None, float("inf")]}
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        (tmp_path / "x.json").write_bytes(json.dumps(value, ensure_ascii=False).encode(encoding))
        assert read_json(tmp_path / "x.json") == value
