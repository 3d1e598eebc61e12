"""The search over a table of losses: the first guess, and measured exchanges."""

import itertools

import numpy as np
import pytest

from kvqjax.eval.tune.search import Table, climb, guess


def brute(table: Table, limit: float) -> float:
    layers, count = table.bytes.shape[:2]
    every = itertools.product(range(count), repeat=2 * layers)
    policies = (np.asarray(p).reshape(layers, 2) for p in every)
    return min((table.sum(p) for p in policies if table.size(p) <= limit), default=np.inf)


@pytest.mark.parametrize("seed", range(6))
def test_the_first_guess_is_the_best_sum(seed):
    rng = np.random.default_rng(seed)
    size = rng.integers(10, 60, (3, 2, 3))
    table = Table(
        (size[:, 0, :, None] + size[:, 1, None, :]).astype(float),
        rng.random((3, 2, 3)),
        np.zeros(3, bool),
    )
    for limit in (120.0, 180.0, 240.0):
        found, best = guess(table, limit), brute(table, limit)
        if found is None:
            assert best == np.inf
            continue
        assert table.size(found) <= limit
        assert table.sum(found) == pytest.approx(best)


def test_measured_exchanges_find_what_sums_do_not_show():
    """Two parts that are harmless alone and ruin the model together."""
    size = np.asarray([1.0, 3.0])
    table = Table(
        np.tile(size[:, None] + size[None], (3, 1, 1)), np.zeros((3, 2, 2)), np.zeros(2, bool)
    )
    table.loss[..., 0] = np.asarray([[0.1, 0.1], [0.2, 0.3], [0.3, 0.4]])

    def measure(policies):
        def both(p):
            return 5.0 * (p[0, 0] == 0 and p[0, 1] == 0)

        return np.asarray([[table.sum(p) + both(p)] * 3 for p in policies])

    start = guess(table, 14.0)
    assert (start[0] == 0).all()
    end = climb(table, start, 14.0, measure)
    assert table.size(end) <= 14.0
    assert not (end[0] == 0).all()
    every = (np.asarray(p).reshape(3, 2) for p in itertools.product(range(2), repeat=6))
    assert measure([end]).mean() == min(measure([p]).mean() for p in every if table.size(p) <= 14.0)


def test_a_gain_within_noise_is_not_taken():
    table = Table(np.ones((1, 2, 2)), np.zeros((1, 2, 2)), np.zeros(2, bool))
    noise = np.asarray([0.0, 1.0, -1.0, 0.1])

    def measure(policies):
        return np.asarray([np.ones(4) - 0.01 * p.sum() * noise for p in policies])

    assert (climb(table, np.zeros((1, 2), int), 2.0, measure) == 0).all()
