"""The results page and what it is made of: orders that can differ, rows that are run once."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch):
    """Import a module of benchmarks, found after everything installed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_orders_are_compared_pair_by_pair(bench):
    papers = bench("results.papers")
    rows = (
        ("a", "", 1.0, "x"),
        ("b", "", 2.0, "y"),
        ("c", "", 3.0, "z"),
        ("d", "", 4.0, "not run"),
    )
    lower = papers.Paper("", "", "", True, rows)
    noise = np.random.default_rng(0).normal(scale=0.1, size=16)

    def ours(x, y, z):
        return {"x": x + noise, "y": y + noise, "z": z + 0.9 * noise}

    assert papers.disagreements(lower, ours(5.0, 6.0, 7.0)) == []
    assert papers.disagreements(lower, ours(5.0, 9.0, 7.0)) == [("b", "c")]
    higher = lower._replace(lower=False)
    assert papers.disagreements(higher, ours(7.0, 6.0, 5.0)) == []
    assert len(papers.disagreements(higher, ours(5.0, 6.0, 7.0))) == 3


def test_orders_differ_only_beyond_two_standard_errors(bench):
    """Of differences whose standard error is 1: a mean of 2.1 counts, one of 1.9 does not."""
    papers = bench("results.papers")
    rows = (("a", "", 1.0, "x"), ("b", "", 2.0, "y"))
    # 16 windows: its error is 1
    apart = np.asarray([-1.0, 1.0] * 8) * 4 / np.asarray([-1.0, 1.0] * 8).std(ddof=1)
    base = np.random.default_rng(1).normal(scale=50, size=16)  # what both caches share says nothing
    for mean, found in ((1.9, []), (2.1, [("a", "b")])):
        ours = {"x": base + apart + mean, "y": base}
        assert papers.disagreements(papers.Paper("", "", "", True, rows), ours) == found


def test_every_row_of_the_papers_and_plans_can_be_read(bench):
    import kvqjax as kvq

    rows, papers = bench("results.rows"), bench("results.papers")
    caches = [cache for some in rows.CACHES.values() for cache in some]
    assert len(set(caches)) == len(caches)
    for cache in caches:
        method = kvq.parse(cache)  # a policy that is shipped has a name
        assert str(method) == cache or cache.endswith(".json")
    assert {cache for paper in papers.PAPERS for *_, cache in paper.rows} <= set(caches)
    assert len({rows.path_of(cache) for cache in caches}) == len(caches)
    gate = bench("gate")
    for row in [row for row in gate.plan(gate.SHAPES) if row["cache"] not in gate.NOISES]:
        assert str(kvq.parse(row["cache"])).partition(":")[0] in kvq.METHODS


def test_a_finished_row_is_kept_only_under_its_own_stamp(bench, tmp_path, monkeypatch):
    rows = bench("results.rows")
    monkeypatch.setattr(rows, "FOLDER", tmp_path)
    about = {"model": "smollm2", "plan": rows.PLAN}
    assert rows.finished("higgs", about) is None
    rows.path_of("higgs").write_text(json.dumps({"cache": "higgs", "about": about}))
    assert rows.finished("higgs", about)["cache"] == "higgs"
    assert rows.finished("higgs", about | {"model": "demo"}) is None


def test_the_page_and_its_picture_are_shown(bench, tmp_path, monkeypatch):
    """What README and the home page show first is the picture that the page's command writes from
    the records."""
    page = bench("results.page")
    for text in (ROOT / "README.md", ROOT / "docs" / "index.md", page.PAGE):
        shown = text.read_text(encoding="utf-8").split("](")[1].split(")")[0]
        assert (text.parent / shown).resolve() == page.PICTURE.resolve(), text
    drawn = []
    monkeypatch.setattr(
        page, "draw", lambda kind, rows, title, path: drawn.append((kind, rows, path))
    )
    page.draw_picture()
    ((kind, rows, path),) = drawn
    assert (kind, path) == ("compare", page.PICTURE)
    measured = {
        (row["bits_32k"], float(np.mean(row["by_window"]["WikiText-2"]["kld"])))
        for row in page.stored().values()
    }
    assert {(row["bits_stored"], row["kld"]) for row in rows} <= measured


def _tables(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]


def test_readme_has_every_method_with_the_bits_of_the_accounting_table():
    import kvqjax as kvq

    head, *rows = [row for row in _tables(ROOT / "README.md") if len(row) == 7]
    asked = [
        "method",
        "paper",
        "what is cached",
        "bits per number",
        "needs calibration",
        "when to use",
        "what costs time",
    ]
    assert head == asked
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == set(kvq.METHODS)
    accounts = [row for row in _tables(ROOT / "docs" / "methods" / "index.md") if len(row) == 7]
    known = {
        f"{float(cell):.2f}"
        for row in accounts
        for cell in row
        if re.fullmatch(r"\d+\.\d{3}", cell)
    }
    stated = {number for row in rows for number in re.findall(r"\d+\.\d\d", row[3])}
    assert len(stated) > 10
    assert stated <= known


def test_page_is_what_the_records_say(bench):
    page = bench("results.page")
    assert page.PAGE.read_text(encoding="utf-8") == page.page_text()


def test_spans_repeat_themselves(bench):
    import kvqjax as kvq

    spans = bench("calibrated").span_rows(kvq.load("recall"), 2, 129, seed=0)
    np.testing.assert_array_equal(spans[:, 1:65], spans[:, 65:])


def test_the_picture_of_readme_has_few_curves(bench, monkeypatch):
    """At most eight, four and more of them with several points, beside the exact cache; drawn from
    the records."""
    page, drawn = bench("results.page"), []
    monkeypatch.setattr(page, "draw", lambda *given: drawn.append(given))
    page.draw_picture()
    ((kind, rows, title, _),) = drawn
    names = [row["cache"] for row in rows]
    assert kind == "compare"
    assert 4 <= len(set(names) - {"exact"}) <= 8
    assert names.count("exact") == 1
    assert sum(names.count(name) > 1 for name in set(names)) >= 4
    for word in ("SmolLM2", "WikiText-2", "KL divergence"):
        assert word in title
