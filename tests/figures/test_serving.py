"""The benchmark of many users: its requests, the driver of llama.cpp's library, and the section
that shows its rows."""

import argparse
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = argparse.Namespace(
    seed=0, requests=40, rate=2.0, prefix=64, longest=300, answer=90, skew=1.0
)


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_every_engine_gets_the_same_requests(module):
    workload = module("serving.workload")
    requests, prefix = workload.requests_of(1000, OPTIONS), workload.prefix_of(1000, OPTIONS)
    assert requests == workload.requests_of(1000, OPTIONS)
    assert [request.shared for request in requests[:4]] == [0, 64, 0, 64]
    assert all(request.prompt[:64] == prefix for request in requests[1::2])
    assert {len(request.prompt) - request.shared >= 100 for request in requests} == {True}
    assert max(len(request.prompt) for request in requests) < 364
    assert all(50 <= request.answer < 90 for request in requests)
    arrivals = [request.seconds for request in requests]
    assert arrivals == sorted(arrivals)
    assert 5 < arrivals[-1] < 60  # 40 arrivals at 2 a second
    skewed = workload.requests_of(1000, argparse.Namespace(**vars(OPTIONS) | {"skew": 4.0}))
    assert min(request.answer for request in skewed) >= 50
    assert sum(request.answer for request in skewed) < sum(request.answer for request in requests)


class Library:
    """Stands for a context: keeps which tokens a row holds, and answers with what it was asked."""

    def __init__(self, rows: int):
        self.held = {row: [] for row in range(rows + 1)}

    def feed(self, tokens, start, row):
        assert start == 0
        self.held[row] = tokens.tolist()

    def share(self, source, row, tokens):
        self.held[row] = self.held[source][:tokens]

    def drop(self, row):
        self.held[row] = []

    def compute(self, entries):
        assert 0 < len(entries) <= 512
        self.asked = []
        for token, position, row, wanted in entries:
            assert position == len(self.held[row])
            self.held[row].append(token)
            self.asked.append((row, wanted))

    def likeliest(self, index, vocabulary):
        row, wanted = self.asked[index]
        assert wanted
        return len(self.held[row])


def test_the_driver_computes_every_token_once_and_in_order(module):
    """Each row holds its prompt, then the tokens that it was given; cells are never more than there
    are."""
    workload, peers = module("serving.workload"), module("serving.peers")
    prefix, requests = workload.prefix_of(1000, OPTIONS), workload.requests_of(1000, OPTIONS)
    cells = 1500
    batching = peers.Batching(Library(4), 4, cells, prefix, 1000)
    waiting, done, most = list(requests), [], 0
    while waiting or batching.rows:
        while waiting and batching.admit(waiting[0]):
            waiting.pop(0)
        rows = dict(batching.rows)
        before = {number: list(batching.peer.held[number]) for number in rows}
        batching.step()
        most = max(most, sum(len(batching.peer.held[number]) for number in range(4)))
        for number, row in rows.items():
            if number not in batching.rows:
                done.append(row)
                tokens = before[number]
                assert tokens[: len(row.request.prompt)] == row.request.prompt
                # Every token that was given is one more than there were before it.
                assert tokens[len(row.request.prompt) :] == list(
                    range(len(row.request.prompt), len(tokens))
                )
                assert row.made == row.request.answer
    assert len(done) == len(requests)
    assert batching.free == cells - len(prefix)
    assert batching.reused == (len(requests) // 2 - 1) * len(prefix)
    assert 0 < most <= cells


def test_the_page_says_what_the_planner_says(module):
    """Of one row, for every row takes seconds."""
    row = (
        module("serving.planned")
        .planned_table("llama-3.1-8b", "8k", ["h100"], ["exact"])
        .splitlines()[-1]
    )
    page = (ROOT / "docs/howto/serve.md").read_text(encoding="utf-8").splitlines()
    assert row in page, "run python -m benchmarks.serving.planned"


def test_the_section_shows_each_run_with_its_workload(module):
    lengths = {"prefix": 64, "longest": 300, "answer": 90, "skew": 4.0}
    about = {"requests": 8, "rate": 0.0, "pool": 2**26, "rows": 4} | lengths
    row = {
        "cache": "exact", "bits": 32.0, "running": 2.5, "tokens_per_second": 40.0, "requests_per_second": 0.25,
        "first_token_median_s": 3.0, "first_token_95_s": 9.0, "token_median_ms": None, "reused_tokens": 128,
        "pages_shared": 7, "preempted": 1,
    }  # fmt: skip
    refused = {"cache": "kivi:bits=2", "refused": "too little memory"}
    record = {
        "machine": "here",
        "versions": {"torch": "1"},
        "runs": [{"about": about | {"capacity": 512}, "rows": [refused, row]}],
    }
    text = module("figures.peers").serving(record)
    assert "8 requests, all at once; half begin with the same 64 tokens" in text
    assert text.splitlines()[-3:] == [
        "| `exact` | 32.00 | 2.5 | 40.0 | 0.25 | 3.0 | 9.0 |  | 128 | 7 | 1 |",
        "",
        "Refused: `kivi:bits=2`, too little memory.",
    ]
