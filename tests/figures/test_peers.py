"""Other libraries' caches beside ours: bytes that are counted, the line through theirs, rows of the
same windows."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch):
    """Import a module of benchmarks, found after everything installed; no other engine is needed
    for what is tested."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return lambda name: importlib.import_module(f"benchmarks.{name}")


class Codes:
    """A tensor that holds others, as torch's subclasses say what they are made of. Its own size is
    not stored."""

    nbytes = 10**6

    def __init__(self):
        self.words, self.scale = np.zeros(32, np.uint8), np.zeros(2, np.float32)

    def __tensor_flatten__(self):
        return ["words", "scale"], {"axis": 0}


def test_all_arrays_of_a_cache_are_counted(bench):
    count = bench("results.engines").stored_bytes
    assert count(Codes()) == 32 + 8
    meta = {
        "scale": np.zeros(4, np.float16),
        "zero": np.zeros(4, np.float16),
        "nbits": 4,
        "shape": (1, 2),
        "axis": None,
    }
    assert count((np.zeros(16, np.uint8), meta)) == 16 + 8 + 8
    assert count([(Codes(), meta), None]) == 40 + 16


def test_the_line_goes_through_what_no_other_beats(bench):
    peers = bench("results.peers")
    points = [(4.0, 0.01), (2.0, 1.0), (3.0, 2.0), (5.0, 0.02), (4.0, 0.05)]
    assert peers.front(points) == [(2.0, 1.0), (4.0, 0.01)]
    # Halfway in bits the line has the geometric mean of its ends, 0.1, where a straight one would
    # have 0.5.
    assert peers.beats((3.0, 0.099), points) is True
    assert peers.beats((3.0, 0.101), points) is False
    assert peers.beats((8.0, 0.011), points) is False
    assert peers.beats((8.0, 0.009), points) is True
    # Left of it: below its first point is better in both, above is another trade.
    assert peers.beats((1.0, 0.9), points) is True
    assert peers.beats((1.0, 1.1), points) is None


def test_rows_beside_theirs_take_no_more_bits(bench):
    def made(cache, bits, divergence, seconds=0):
        means = {"text": {"kld": divergence}}
        return {
            "cache": cache,
            "bits_32k": bits,
            "calibration_seconds": seconds,
            "by_window": means,
        }

    made_ours = (
        made("a", 4.4, [0.2, 0.0]),
        made("b", 4.5, [0.0, 0.1], 60),
        made("c", 4.6, [0.0]),
        made("d", 3.0, [9.0]),
    )
    theirs = [made("q4_0", 4.5, [0.5]), made("another", 4.5, [0.5])]
    chosen = bench("results.peers").nearest(
        {row["cache"]: row for row in made_ours}, theirs, "text"
    )
    assert [row["cache"] for row in chosen] == ["b", "a"]


def test_records_are_of_the_same_windows_as_ours(bench):
    """Same weights, texts and plan, and exact caches that agree; all of an engine's own exact
    losses are one run's."""
    peers, page = bench("results.peers"), bench("results.page")
    ours, found = page.stored()["exact"], peers.stored()
    assert {row["engine"] for row in found} == set(peers.PEERS)
    assert len(
        {peers.path_of(engine, cache) for engine, some in peers.PEERS.items() for cache in some}
    ) == sum(map(len, peers.PEERS.values()))
    exact = {row["engine"]: row for row in found if row["cache"] == peers.exact_of(row["engine"])}
    for row in found:
        assert row["about"]["fingerprint"] == ours["about"]["fingerprint"]
        assert row["about"]["plan"].items() <= ours["about"]["plan"].items()
        assert row["about"]["data"].items() <= ours["about"]["data"].items()
        for text, means in row["by_window"].items():
            if row is exact[row["engine"]]:
                # Two engines' float32 sums, one with keys and values of 16 bits: far below any
                # quantised cache.
                np.testing.assert_allclose(
                    means["nll"], ours["by_window"][text]["nll"], rtol=0, atol=1e-3
                )
                assert max(means["kld"]) < 1e-4
            else:  # the same sums in another order, by the number of threads, kept in seven digits
                reference = exact[row["engine"]]["by_window"][text]["nll"]
                np.testing.assert_allclose(means["nll_exact"], reference, rtol=0, atol=1e-5)


def test_readme_states_the_records_figures(bench):
    """README's table beside other libraries is what the page's command makes of the records."""
    page = bench("results.page")
    text = page.readme_text()
    assert page.README.read_text(encoding="utf-8") == text
    assert text.count("| kvqjax |") == len(bench("results.peers").README["kvqjax"])


def test_the_section_counts_our_rows_below_the_line(bench, monkeypatch):
    """A cache of theirs that is worse than all of ours leaves all of them below the line; one that
    is better, none."""
    peers, page = bench("results.peers"), bench("results.page")
    some = json.loads(peers.path_of("llama.cpp", "q4_0").read_text(encoding="utf-8"))
    for factor, share in ((1e6, 1.0), (1e-9, 0.0)):
        kld = {
            name: means | {"kld": [factor] * len(means["kld"])}
            for name, means in some["by_window"].items()
        }
        row = some | {"by_window": kld, "bits_32k_of_16": 1.0}
        monkeypatch.setattr(peers, "stored", lambda row=row: [row])
        said = peers.section(page.stored(), lambda row, text: [])
        count = len(page.stored()) - 1
        assert (
            said.count(f"{round(share * count)} of our {count} rows are below it on both texts")
            == 1
        )
