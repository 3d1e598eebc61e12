"""Which candidate each layer's keys and values take: a first guess that adds losses up, then measured exchanges.

A policy is an int array [L, 2]: the candidates of every layer's keys and values. `Table` says what each costs.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

__all__ = ["Table", "better", "climb", "guess", "neighbours"]

GRID = 400  # steps of the budget per layer in the dynamic programme
ROUND = 16  # exchanges that are measured together
PATIENCE = 2  # rounds without a gain after which the search ends
NOISE = 1.0  # standard errors of the paired difference by which an exchange must help

Policy = np.ndarray  # Int [L, 2]


class Table(NamedTuple):
    """`bytes`[l, a, b] of a layer whose keys follow candidate a and values b, inf where that cannot be; `loss`[l, part,
    c] is the divergence when one part alone follows c. `whole`[c]: keys and values of c are one choice, whose loss
    stands half with each."""

    bytes: Float[np.ndarray, "L C C"]
    loss: Float[np.ndarray, "L 2 C"]
    whole: np.ndarray

    def size(self, policy: Policy) -> float:
        return float(sum(self.bytes[layer, a, b] for layer, (a, b) in enumerate(policy)))

    def sum(self, policy: Policy) -> float:
        """The loss if losses added up."""
        return float(sum(self.loss[layer, 0, a] + self.loss[layer, 1, b] for layer, (a, b) in enumerate(policy)))


def _options(table: Table, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pairs [n, 2], bytes, loss) of a layer, without pairs that another one beats in both."""
    count = table.bytes.shape[1]
    pairs = np.stack(np.meshgrid(np.arange(count), np.arange(count), indexing="ij"), -1).reshape(-1, 2)
    size = table.bytes[layer].reshape(-1)
    loss = table.loss[layer, 0][pairs[:, 0]] + table.loss[layer, 1][pairs[:, 1]]
    order = np.lexsort((loss, size))
    order = order[np.isfinite(size[order])]
    lowest = np.minimum.accumulate(loss[order])
    kept = order[np.r_[True, lowest[1:] < lowest[:-1]]]
    return pairs[kept], size[kept], loss[kept]


def _programme(options: list, limit: float, steps: int) -> Policy | None:
    """The pairs of least summed loss with at most `steps` steps of the budget, costs rounded up to whole steps."""
    best, taken = np.zeros(steps + 1), []
    for _, size, loss in options:
        cost = np.ceil(size / limit * steps - 1e-9).astype(int)
        rows = np.full((len(cost), steps + 1), np.inf)
        for row, c, x in zip(rows, cost, loss, strict=True):
            if c <= steps:
                row[c:] = best[: steps + 1 - c] + x
        taken.append((rows.argmin(0), cost))
        best = rows.min(0)
    if not np.isfinite(best[steps]):
        return None
    at, out = steps, []
    for (pairs, _, _), (choice, cost) in zip(reversed(options), reversed(taken), strict=True):
        out.append(pairs[choice[at]])
        at -= cost[choice[at]]
    return np.asarray(out[::-1])


def guess(table: Table, limit: float) -> Policy | None:
    """The policy of at most `limit` bytes whose losses add up to least; None where none is so small. Costs are rounded
    up; a programme with room for that rounding comes first, and holds where its policy fits all the same."""
    layers = len(table.bytes)
    options, steps = [_options(table, layer) for layer in range(layers)], GRID * layers
    for slack in (1 + 1 / GRID, 1.0):
        found = _programme(options, limit * slack, steps)
        if found is not None and table.size(found) <= limit:
            return found
    least = np.asarray([pairs[size.argmin()] for pairs, size, _ in options])
    return least if table.size(least) <= limit else None


def _changed(policy: Policy, changes: Sequence[tuple[int, int, int]]) -> Policy:
    out = policy.copy()
    for layer, part, candidate in changes:
        out[layer, part] = candidate
    return out


def _singles(table: Table, policy: Policy) -> list[list[tuple[int, int, int]]]:
    """Every change of one part, or of a whole layer where keys and values are one choice."""
    count, found = table.bytes.shape[1], []
    for layer, candidate in itertools.product(range(len(policy)), range(count)):
        both = [(layer, part, candidate) for part in (0, 1)]
        if table.whole[candidate] or table.whole[policy[layer]].any():
            found.append(both)
        else:
            found += [[change] for change in both]
    return [changes for changes in found if any(policy[layer, part] != c for layer, part, c in changes)]


def neighbours(table: Table, policy: Policy, limit: float) -> list[Policy]:
    """Policies of at most `limit` bytes that differ from this one in one choice or two, the most promising first."""
    singles = _singles(table, policy)
    worth = [table.sum(_changed(policy, changes)) for changes in singles]
    order = np.argsort(worth, kind="stable")
    # Pairs of the best changes and of the cheapest: one gains, the other pays for it.
    sizes = [table.size(_changed(policy, changes)) for changes in singles]
    best = [singles[i] for i in order[:64]]
    payers = [singles[i] for i in order if sizes[i] < table.size(policy)][:64]
    both = [a + b for a, b in itertools.product(best, payers) if not {x[:2] for x in a} & {x[:2] for x in b}]
    made = {made.tobytes(): made for made in (_changed(policy, changes) for changes in [*singles, *both])}
    fitting = [p for p in made.values() if table.size(p) <= limit]
    return sorted(fitting, key=lambda p: (table.sum(p), p.tobytes()))


def better(new: np.ndarray, old: np.ndarray) -> bool:
    """Whether the mean over windows fell by more than its paired standard error."""
    gap = old - new
    error = gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else 0.0
    return bool(gap.mean() > NOISE * error)


def climb(
    table: Table, start: Policy, limit: float, measure: Callable[[list[Policy]], Float[np.ndarray, "P N"]]
) -> Policy:
    """The policy that no measured exchange improves beyond noise. `measure(policies)` gives divergences in every
    window."""
    policy, seen, idle = start, {start.tobytes()}, 0
    (own,) = measure([policy])
    while idle < PATIENCE:
        fresh = [p for p in neighbours(table, policy, limit) if p.tobytes() not in seen][:ROUND]
        if not fresh:
            break
        seen |= {p.tobytes() for p in fresh}
        found = measure(fresh)
        order = found.mean(1).argmin()
        if better(found[order], own):
            policy, own, idle = fresh[order], found[order], 0
        else:
            idle += 1
    return policy
