"""Timing, and what says where it was done."""

from kvqjax import _timing as timing


def test_the_median_leaves_the_first_call_out(monkeypatch):
    clock = iter([0.0, 100.0, 200.0, 201.0, 300.0, 305.0, 400.0, 402.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    assert timing.median_seconds(lambda: calls.append(1), 3) == 2.0
    assert len(calls) == 4


def test_calls_take_turns():
    order = []
    spent = timing.alternating_seconds([lambda: order.append("a"), lambda: order.append("b")], 2)
    assert "".join(order) == "ababab"
    assert [len(times) for times in spent] == [2, 2]
