"""Tables and progress lines: what fits is a table, nothing is broken inside a word, time left
follows the work done."""

import os
import shutil

import pytest
from commands import run

import kvqjax as kvq
from kvqjax import _tables as tables
from kvqjax.cli import output
from kvqjax.cli.demo import _print_demo, explain
from kvqjax.eval.stamp import ledger_of

CACHES = (
    "exact",
    "kivi:bits=4,window=64",
    "kivi:key_bits=4,value_bits=2,group=64,window=32;0-1=exact:window=128",
)
ROWS = [
    {
        "cache": cache, "mode": mode, "windows": "gptq 512", "tokens": 8176, "bits_method": 3.5, "bits_stored": 9.512,
        "bytes": 312334 + number, "ppl": 203.512, "ppl_exact": 197.6, "kld": 0.1927, "top1": 0.8219,
    }
    for number, (cache, mode) in enumerate((c, m) for c in CACHES for m in ("in-the-loop-chunk32", "prefill-exact"))
]  # fmt: skip
LONG = [
    {
        "method": "one",
        "about": "a sentence of quite a few words that says what it is " * 2,
        "options": "a=1, b=2 " * 9,
    },
    {"method": "two_and_more", "about": "short", "options": ""},
]
STEPS = [{"cache": c, "kld": [0.1 * n for n in range(12)], "growth": 1.5} for c in CACHES]


@pytest.mark.parametrize(
    "rows", [ROWS, ROWS[:3], ROWS[:1], LONG, STEPS], ids=["six", "three", "one", "long", "steps"]
)
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_too_long_and_no_word_is_broken(rows, width):
    lines = tables.table(rows, width, "a title", "a caption of some words")
    assert all(len(line) <= width or " " not in line.strip(" ,") for line in lines)
    words = "\n".join(lines).replace(",", " ").split()
    for row in rows:
        for name, value in row.items():
            shown = tables.cell(name, value).replace(tables.TIE, " ")
            assert set(shown.replace(",", " ").split()) <= set(words), (name, shown)
        assert {name.replace("_", " ").split()[0] for name in list(row)[1:]} <= set(words)


def test_what_all_rows_share_stands_below():
    lines = tables.table(ROWS, 200)
    assert lines[-1].startswith("all rows: windows gptq 512, tokens 8176, bits method 3.5, ")
    assert "tokens" not in lines[0]
    assert len(lines) == 2 + len(ROWS) + 1
    assert "windows" in tables.table(ROWS[:1], 200)[0]


def test_long_names_take_a_line_of_their_own():
    lines = tables.table(ROWS, 80)
    assert f"{CACHES[1]}, prefill-exact" in lines
    assert lines[0] == "cache, mode"
    assert lines[1].split() == ["bytes"]
    assert "  305.01 KiB" in lines


def test_numbers_stand_under_each_other():
    rows = [{"cache": "a", "ppl": 3.0}, {"cache": "b", "ppl": 1234.0}]
    assert tables.table(rows, 80)[2:] == ["a         3", "b      1234"]


def not_a_terminal(fallback=(80, 24)):
    return os.terminal_size(fallback)


def test_pipes_have_eighty_columns(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "get_terminal_size", not_a_terminal)
    caches = [word for cache in CACHES for word in ("-c", cache)]
    for words in (
        ["methods"],
        ["plan", "-m", "llama-3.1-8b"],
        ["plan", "-m", "demo", "--device", "h100", *caches],
    ):
        code, out, err = run(capsys, monkeypatch, *words)
        assert code == 0, err
        assert max(map(len, out.splitlines())) <= 80, out
        for cache in CACHES if "-c" in words else ():
            assert str(kvq.parse(cache)) in out


def test_the_demonstration_breaks_no_name(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "get_terminal_size", not_a_terminal)
    made = {
        "bytes": 432,
        "bits_stored": 18.0,
        "tokens_per_second": 161.0,
        "agreement": 1.0,
        "same_until": 24,
    }
    _print_demo(
        "Once", [made | {"cache": cache, "text": " upon a time"} for cache in CACHES[:2]], "demo"
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("kivi:bits=4,window=64") for line in lines) == 2


def test_the_demonstration_says_what_its_caches_hold():
    """Tokens that are codes, and why a short cache has more bits a number than its codes."""
    model, method = kvq.load("demo"), kvq.parse("kivi:bits=2,window=64")
    said = explain(model, method, 172, 1024)
    # 172 less the window, in whole groups of 32
    assert "at least 96 of 172 tokens were read as codes" in said
    bits = [
        book.bits_stored
        for book in (ledger_of(model, method, capacity) for capacity in (1024, 32768))
    ]
    assert (
        f"the window makes that {bits[0]:.3g}, and in a cache for 32768 tokens {bits[1]:.3g}."
        in said
    )


def test_time_left_leaves_the_first_step_out(monkeypatch):
    clock, told = iter([0.0, 100.0, 105.0, 109.0, 120.0, 181.0, 200.0]), []
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    update = output.reporter("work", told.append)
    for fraction in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        update(fraction)
    # Compiling, or an earlier run, took the first half: 0.1 in 5 s since then. Lines come at most
    # once a minute.
    assert told == [
        "work: 60% after 2 min, about 20 s left",
        "work: 90% after 3 min, about 20 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.2, "4 s"), (89.0, "89 s"), (420.0, "7 min"), (12600.0, "3.5 h")]
)
def test_durations(seconds, text):
    assert output.duration(seconds) == text
