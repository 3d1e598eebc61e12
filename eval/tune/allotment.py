"""Which candidate each layer gets: the least sum of losses within a budget of bytes.

Layers that follow one another with the same candidate are one run. Every run is compiled, and every
reader has a program for each kind of run, so that runs and kinds are few. Under a price for a byte
the best choice is found exactly, by a dynamic programme over layers. All sets of a few candidates
are tried at many prices, and the best choice that fits wins.
"""

import itertools

import numpy as np
from jaxtyping import Float, Int

# A program of a decode step is compiled for each kind, and again where a run's layers are another
# number: with SmolLM2 on two cores a run adds some seconds to each shape of a step.
RUNS, KINDS = 6, 3
PRICES = 64  # tried between free bytes and a price at which only the smallest candidate is taken
SPARE = 1.02  # fewer runs are taken where the sum of losses is at most this much larger


def _cheapest(cost: Float[np.ndarray, "P L M"], runs: int) -> Int[np.ndarray, "P R L"]:
    """Choose among M candidates in each layer, for each of P prices, so that the sum of costs is
    least with 1 to R runs."""
    prices, layers, kinds = cost.shape
    best = np.full((prices, runs, kinds), np.inf)  # of all layers so far, by the last one's choice
    best[:, 0] = cost[:, 0]
    steps = []
    for layer in range(1, layers):
        change = best.min(2)  # a new run begins with this layer
        change = np.concatenate([np.full((prices, 1), np.inf), change[:, :-1]], 1)[..., None]
        begins = change < best
        # The choice before, where a run begins; else the same.
        before = np.concatenate([np.zeros((prices, 1), int), best.argmin(2)[:, :-1]], 1)[..., None]
        steps.append(np.where(begins, before, np.arange(kinds)))
        best = np.where(begins, change, best) + cost[:, layer, None]
    chosen = np.zeros((prices, runs, layers), int)
    chosen[..., -1] = best.argmin(2)
    used = np.broadcast_to(np.arange(runs), (prices, runs)).copy()
    rows = np.arange(prices)[:, None]
    for layer in range(layers - 1, 0, -1):
        now = chosen[..., layer]
        chosen[..., layer - 1] = steps[layer - 1][rows, used, now]
        used -= chosen[..., layer - 1] != now
    return chosen


def stretches(chosen: Int[np.ndarray, " L"]) -> list[tuple[int, int, int]]:
    """Group neighbouring layers of the same candidate: (first, last, candidate)."""
    edges = [0, *(np.flatnonzero(np.diff(chosen)) + 1).tolist(), len(chosen)]
    return [(first, stop - 1, int(chosen[first])) for first, stop in itertools.pairwise(edges)]


def _runs(chosen: Int[np.ndarray, "... L"]) -> Int[np.ndarray, "..."]:
    """Count the runs of choices."""
    return 1 + (np.diff(chosen, axis=-1) != 0).sum(-1)


def _filled(
    chosen: Int[np.ndarray, " L"],
    losses: Float[np.ndarray, "L C"],
    size: Float[np.ndarray, "L C"],
    limit: float,
    runs: int,
) -> Int[np.ndarray, " L"]:
    """Spend what is left of the budget: as long as it helps, give neighbouring layers another of
    the candidates that take part. No price leads to some of the best choices."""
    at, kinds = np.arange(len(chosen)), np.unique(chosen)
    pairs = itertools.combinations(range(len(chosen) + 1), 2)
    spans = np.asarray([(at >= first) & (at < stop) for first, stop in pairs])
    while True:
        changed = np.where(spans[:, None], kinds[:, None], chosen).reshape(-1, len(chosen))
        fits = (size[at, changed].sum(1) <= limit) & (_runs(changed) <= runs)
        loss = np.where(fits, losses[at, changed].sum(1), np.inf)
        if not loss.min() < losses[at, chosen].sum():
            return chosen
        chosen = changed[loss.argmin()]


def allotted(
    losses: Float[np.ndarray, "L C"],
    size: Float[np.ndarray, "L C"],
    limit: float,
    runs: int = RUNS,
    kinds: int = KINDS,
) -> Int[np.ndarray, " L"] | None:
    """Choose a candidate for each layer.

    Args:
        losses: of each candidate in each layer.
        size: bytes likewise.
        limit: the most bytes of all layers together.
        runs: the most runs.
        kinds: the most candidates that take part.

    Returns:
        The numbers of candidates; None where none fits.
    """
    layers, count = losses.shape
    scale = np.ptp(losses.sum(0)) / max(np.ptp(size.sum(0)), 1.0)
    prices = np.concatenate([[0.0], scale * np.geomspace(1e-3, 1e3, PRICES - 1)])
    at, best, choices = np.arange(layers), np.full(runs, np.inf), np.zeros((runs, layers), int)
    for names in itertools.combinations(range(count), min(kinds, count)):
        part = np.asarray(names)
        cost = losses[None, :, part] + prices[:, None, None] * size[None, :, part]
        chosen = part[_cheapest(cost, runs)]  # by price and number of runs
        fits = size[at, chosen].sum(2) <= limit
        loss = np.where(fits, losses[at, chosen].sum(2), np.inf)
        for number, price in enumerate(loss.argmin(0)):
            if loss[price, number] < best[number]:
                best[number], choices[number] = loss[price, number], chosen[price, number]
    if best.min() == np.inf:
        return None
    few = int((best <= SPARE * best.min()).argmax())
    return _filled(choices[few], losses, size, limit, few + 1)
