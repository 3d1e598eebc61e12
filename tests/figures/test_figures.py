"""Pages of figures say what the records say, and each ablation compares with its group's first cache."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import kvqjax as kvq

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("page", ["kernels", "peers", "scale"])
def test_the_page_is_what_the_records_give(module, page):
    text = module(f"figures.{page}").text()
    assert text == (ROOT / "benchmarks" / f"{page}.md").read_text(encoding="utf-8"), "run python -m benchmarks.figures"


def test_the_page_of_ablations_is_what_the_records_give(module):
    page = module("ablations.page")
    assert page.text() == page.PAGE.read_text(encoding="utf-8"), "run python -m benchmarks.ablations --page-only"


def test_every_ablation_is_a_cache_and_named_once(module):
    cases = module("ablations.cases")
    for group in cases.GROUPS:
        names = [case.name for case in group.cases]
        assert group.data in cases.SETS
        assert len(set(names)) == len(names) > 1
        for case in group.cases:
            kvq.parse(case.cache)


def test_differences_are_paired(module):
    """A shift that all batches share has no error, however much the batches differ."""
    compare = module("ablations.paired").compare
    first = [[100.0 + 50 * i, 0.0, 1.0, 5.0, 10.0] for i in range(4)]
    found = compare([[nats + 20, *rest] for nats, *rest in first], first)
    assert found["against_first"] == pytest.approx(2.0)
    assert found["against_first_error"] == pytest.approx(0.0)
    assert found["nats"] == pytest.approx(np.mean([10 + 5 * i for i in range(4)]) + 2)
