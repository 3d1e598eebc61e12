"""Pages of figures say what the records say."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("page", ["kernels", "peers"])
def test_the_page_is_what_the_records_give(module, page):
    text = module(f"figures.{page}").text()
    assert text == (ROOT / "benchmarks" / f"{page}.md").read_text(encoding="utf-8"), (
        "run python -m benchmarks.figures"
    )
