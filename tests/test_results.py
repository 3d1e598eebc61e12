"""The results page and what it is made of: limits that are right, orders that can differ, rows that are run once."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch):
    """Import a module of benchmarks, found after everything installed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_rate_of_a_gaussian_source(bench):
    """White: log2(s / D) / 2. Two variances: water-filling by hand; above a variance its channels need no bit."""
    rate = bench("rate_distortion").rate
    assert rate(np.full(8, 4.0), 0.25) == pytest.approx(2.0)
    assert rate(np.asarray([4.0, 1.0]), 0.25) == pytest.approx((2.0 + 1.0) / 2)
    # D = (2 + 1) / 2: the smaller channel costs its whole variance, the larger is coded down to 2.
    assert rate(np.asarray([4.0, 1.0]), 1.5) == pytest.approx(np.log2(4 / 2) / 4)
    assert rate(np.asarray([4.0, 1.0]), 2.5) == 0


def test_lloyd_max_error_and_gap_on_gaussian_vectors(bench):
    """Grids of one dimension are Lloyd and Max's quantisers: 0.1175 of the variance at 2 bits."""
    from kvqjax.codecs.higgs import Higgs

    distortion = bench("rate_distortion")
    learn, test, _ = distortion.vectors("Gaussian", "")
    assert learn.shape == test.shape
    assert not np.array_equal(learn, test)
    found = float(distortion.error(Higgs(bits=2, dim=1), {}, test))
    # Each token's scale is the root mean square of its 128 values: the shape keeps 1 - 1/128 of a grid's gain.
    assert found == pytest.approx(0.1175, rel=0.02)


def test_orders_are_compared_pair_by_pair(bench):
    papers = bench("results.papers")
    rows = (("a", "", 1.0, "x"), ("b", "", 2.0, "y"), ("c", "", 3.0, "z"), ("d", "", 4.0, "not run"))
    lower = papers.Paper("", "", "", True, rows)
    assert papers.disagreements(lower, {"x": 5.0, "y": 6.0, "z": 7.0}) == []
    assert papers.disagreements(lower, {"x": 5.0, "y": 9.0, "z": 7.0}) == [("b", "c")]
    higher = lower._replace(lower=False)
    assert papers.disagreements(higher, {"x": 7.0, "y": 6.0, "z": 5.0}) == []
    assert len(papers.disagreements(higher, {"x": 5.0, "y": 6.0, "z": 7.0})) == 3


def test_every_row_of_the_papers_and_plans_can_be_read(bench):
    import kvqjax as kvq

    rows, papers = bench("results.rows"), bench("results.papers")
    caches = [cache for some in rows.CACHES.values() for cache in some]
    assert len(set(caches)) == len(caches)
    assert all(str(kvq.parse(cache)) == cache for cache in caches)
    assert {cache for paper in papers.PAPERS for *_, cache in paper.rows} <= set(caches)
    assert len({rows.path_of("demo", cache) for cache in caches}) == len(caches)
    for row in bench("gate").plan(bench("gate").SHAPES):
        assert str(kvq.parse(row["cache"])).partition(":")[0] in kvq.METHODS


def test_a_finished_row_is_kept_only_under_its_own_stamp(bench, tmp_path, monkeypatch):
    rows = bench("results.rows")
    monkeypatch.setattr(rows, "FOLDER", tmp_path)
    about = {"model": "demo", "seed": 0}
    assert rows.finished("demo", "higgs", about) is None
    rows.path_of("demo", "higgs").write_text(json.dumps({"cache": "higgs", "about": about}))
    assert rows.finished("demo", "higgs", about)["cache"] == "higgs"
    assert rows.finished("demo", "higgs", about | {"seed": 1}) is None


def test_page_is_what_the_records_say(bench):
    """The committed page is the records', and states every missed bound."""
    page = bench("results.page")
    parts = page.page_text()
    assert page.PAGE.read_text(encoding="utf-8") == parts
    rows, bounds = json.loads(page.GATE.read_text()), bench("gate_bounds")
    missed = [v for v in [*bounds.verdicts(rows), *bounds.without_x(rows)] if not v.held]
    assert parts.count("**missed**") == len(missed)


def test_answers_are_where_the_rows_say(bench):
    import kvqjax as kvq

    model = kvq.load("recall")
    ids, asked = bench("calibrated").pair_rows(model, 3, 128, seed=0)
    for row, where in zip(ids, asked, strict=True):
        text = model.tokenizer.decode(row[1:][where]).replace(" ", "")
        whole = model.tokenizer.decode(row[1:]).replace(" ", "")
        key = whole.split("?")[1][:2]
        assert len(text) == 2
        assert key + text in whole.split("?")[0]
    spans = bench("calibrated").span_rows(model, 2, 129, seed=0)
    np.testing.assert_array_equal(spans[:, 1:65], spans[:, 65:])
