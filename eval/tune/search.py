"""Which candidate each layer's keys and values take within a budget: a first guess that adds losses up, then measured
exchanges.

A policy is an int array [L, 2]: the candidates of every layer's keys and values. `Table` says what each costs. Nothing
here knows what a candidate is: `measure(policies)` gives the divergences of policies in every window.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from kvqjax._errors import UserError
from kvqjax._options import BYTES
from kvqjax.model.config import ModelConfig

__all__ = ["Budget", "Measure", "Table", "better", "chosen", "climb", "guess", "limit_of", "neighbours", "read_budget"]


GRID = 400  # steps of the budget per layer in the dynamic programme
ROUND = 16  # exchanges that are measured together
PATIENCE = 2  # rounds without a gain after which the search ends
NOISE = 1.0  # standard errors of the paired difference by which an exchange must help
PAIRED = 64  # best changes, and as many that save bytes, of which pairs are made
HALVINGS = 12  # of the bytes, in the search for the fewest that keep a divergence

MOST_BITS = 32  # of a number

Policy = np.ndarray  # Int [L, 2]
Measure = Callable[[list[Policy]], Float[np.ndarray, "P N"]]


# --- What a user can spend


class Budget(NamedTuple):
    """What may be spent: average bits of all that is stored, bytes, or a KL divergence that may not be exceeded. `kind`
    is "bits", "bytes" or "kld"."""

    kind: str
    amount: float


def read_budget(text: str | float | int) -> Budget:
    """Read a budget.

    Args:
        text: `2.5` or `2.5 bits`, `8GiB`, `kld=0.01` or `kld<0.01`.

    Raises:
        UserError: a text that is none of these, an amount that is not above 0, and more bits than exact numbers have.
    """
    match = re.fullmatch(r"\s*(?:(kld)\s*[<=]=?)?\s*([\d.]+(?:e-?\d+)?)\s*([a-z]*)\s*", str(text).lower())
    try:
        amount = float(match[2]) if match else 0.0
    except ValueError:  # several points
        amount = 0.0
    unit = match[3] if match else ""
    if match is None or not 0 < amount < math.inf or (match[1] and unit) or unit not in ("", "bit", "bits", *BYTES):
        raise UserError(f"budget {text!r}; wanted bits (2.5), bytes (8GiB) or a divergence (kld=0.01)")
    if match[1]:
        return Budget("kld", amount)
    if unit in BYTES:
        return Budget("bytes", amount * BYTES[unit])
    if amount > MOST_BITS:
        raise UserError(f"budget {text!r}; wanted at most {MOST_BITS} bits, which a number has that is stored exactly")
    return Budget("bits", amount)


# --- What policies cost


class Table(NamedTuple):
    """`bytes`[l, a, b] of a layer whose keys follow candidate a and values b, inf where that cannot be; `loss`[l, part,
    c] is the divergence when one part alone follows c. `joint`[c]: keys and values of c are one choice, whose loss
    stands half with each."""

    bytes: Float[np.ndarray, "L C C"]
    loss: Float[np.ndarray, "L 2 C"]
    joint: Bool[np.ndarray, " C"]

    def size(self, policy: Policy) -> float:
        """Bytes of a policy."""
        return float(sum(self.bytes[layer, a, b] for layer, (a, b) in enumerate(policy)))

    def sum(self, policy: Policy) -> float:
        """The loss of a policy if losses added up."""
        return float(sum(self.loss[layer, 0, a] + self.loss[layer, 1, b] for layer, (a, b) in enumerate(policy)))

    def changes(self, policy: Policy) -> list[list[tuple[int, int, int]]]:
        """Every change (layer, part, candidate) of one part, or of a layer where keys and values are one choice."""
        count, changes = self.bytes.shape[1], []
        for layer, candidate in itertools.product(range(len(policy)), range(count)):
            pair = [(layer, part, candidate) for part in (0, 1)]
            if self.joint[candidate] or self.joint[policy[layer]].any():
                changes.append(pair)
            else:
                changes += [[change] for change in pair]
        return [parts for parts in changes if any(policy[layer, part] != c for layer, part, c in parts)]


def limit_of(budget: Budget, table: Table, config: ModelConfig, context: int) -> float:
    """The budget in bytes of a row of `context` tokens; of a divergence, the exact cache's bytes.

    Raises:
        UserError: a budget that no method reaches, or that the exact cache does not fill.
    """
    exact = np.zeros((len(table.bytes), 2), np.int64)
    smallest = np.asarray([np.unravel_index(np.argmin(size), size.shape) for size in table.bytes])
    most, least = table.size(exact), table.size(smallest)
    if budget.kind == "kld":
        return most
    values = config.num_layers * config.cached_width
    limit = budget.amount * values * context / 8 if budget.kind == "bits" else budget.amount

    def said(size: float) -> str:
        return f"{size:.0f} bytes" if budget.kind == "bytes" else f"{8 * size / values / context:.4g} bits"

    if limit < least:
        raise UserError(f"a budget of {said(limit)} is below what any of these methods reaches: {said(least)}")
    if limit >= most:
        raise UserError(f"a budget of {said(limit)} is not below the exact cache, which takes {said(most)}")
    return limit


# --- The first guess: a dynamic programme over layers, as if losses added up


def _options(table: Table, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pairs [n, 2], bytes, loss) of a layer, without pairs that another one beats in both."""
    count = table.bytes.shape[1]
    pairs = np.stack(np.meshgrid(np.arange(count), np.arange(count), indexing="ij"), -1).reshape(-1, 2)
    size = table.bytes[layer].reshape(-1)
    loss = table.loss[layer, 0][pairs[:, 0]] + table.loss[layer, 1][pairs[:, 1]]
    order = np.lexsort((loss, size))
    order = order[np.isfinite(size[order])]
    lowest = np.minimum.accumulate(loss[order])
    front = order[np.r_[True, lowest[1:] < lowest[:-1]]]
    return pairs[front], size[front], loss[front]


def _programme(options: list, limit: float, steps: int) -> Policy | None:
    """The pairs of least summed loss with at most `steps` steps of the budget, costs rounded up to whole steps."""
    best, choices = np.zeros(steps + 1), []
    for _, size, loss in options:
        cost = np.ceil(size / limit * steps - 1e-9).astype(int)
        rows = np.full((len(cost), steps + 1), np.inf)
        for row, c, x in zip(rows, cost, loss, strict=True):
            if c <= steps:
                row[c:] = best[: steps + 1 - c] + x
        choices.append((rows.argmin(0), cost))
        best = rows.min(0)
    if not np.isfinite(best[steps]):
        return None
    credit, policy = steps, []
    for (pairs, _, _), (choice, cost) in zip(reversed(options), reversed(choices), strict=True):
        policy.append(pairs[choice[credit]])
        credit -= cost[choice[credit]]
    return np.asarray(policy[::-1])


def guess(table: Table, limit: float) -> Policy | None:
    """The policy of at most `limit` bytes whose losses add up to least; None where none is so small."""
    layers = len(table.bytes)
    options, steps = [_options(table, layer) for layer in range(layers)], GRID * layers
    # Costs are rounded up. A programme with room for that rounding comes first, and holds where its policy fits.
    for slack in (1 + 1 / GRID, 1.0):
        policy = _programme(options, limit * slack, steps)
        if policy is not None and table.size(policy) <= limit:
            return policy
    smallest = np.asarray([pairs[size.argmin()] for pairs, size, _ in options])
    return smallest if table.size(smallest) <= limit else None


# --- Exchanges that are measured


def _changed(policy: Policy, changes: Sequence[tuple[int, int, int]]) -> Policy:
    out = policy.copy()
    for layer, part, candidate in changes:
        out[layer, part] = candidate
    return out


def neighbours(table: Table, policy: Policy, limit: float) -> list[Policy]:
    """Policies of at most `limit` bytes that differ from this one in one choice or two, the most promising first."""
    singles = table.changes(policy)
    worth = [table.sum(_changed(policy, changes)) for changes in singles]
    order = np.argsort(worth, kind="stable")
    # Pairs of the best changes and of the cheapest: one gains, the other pays for it.
    sizes = [table.size(_changed(policy, changes)) for changes in singles]
    best = [singles[i] for i in order[:PAIRED]]
    payers = [singles[i] for i in order if sizes[i] < table.size(policy)][:PAIRED]
    pairs = [a + b for a, b in itertools.product(best, payers) if not {x[:2] for x in a} & {x[:2] for x in b}]
    variants = {p.tobytes(): p for p in (_changed(policy, changes) for changes in [*singles, *pairs])}
    fitting = [p for p in variants.values() if table.size(p) <= limit]
    return sorted(fitting, key=lambda p: (table.sum(p), p.tobytes()))


def better(new: np.ndarray, old: np.ndarray) -> bool:
    """Whether the mean over windows fell by more than its paired standard error."""
    gap = old - new
    error = gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else 0.0
    return bool(gap.mean() > NOISE * error)


def climb(table: Table, start: Policy, limit: float, measure: Measure) -> Policy:
    """The policy that no measured exchange improves beyond noise."""
    policy, seen, idle = start, {start.tobytes()}, 0
    (current,) = measure([policy])
    while idle < PATIENCE:
        fresh = [p for p in neighbours(table, policy, limit) if p.tobytes() not in seen][:ROUND]
        if not fresh:
            break
        seen |= {p.tobytes() for p in fresh}
        measured = measure(fresh)
        best = measured.mean(1).argmin()
        if better(measured[best], current):
            policy, current, idle = fresh[best], measured[best], 0
        else:
            idle += 1
    return policy


# --- The search for each kind of budget


def _within(bound: float, table: Table, measure: Measure) -> tuple[Policy, float]:
    """The first guess of fewest bytes whose measured divergence is at most `bound`, and its bytes: by halving."""
    exact = np.zeros((len(table.bytes), 2), np.int64)
    low, high = float(table.bytes.min((1, 2)).sum()), table.size(exact)
    best = exact
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        policy = guess(table, middle)
        if policy is not None and measure([policy])[0].mean() <= bound:
            best, high = policy, min(middle, table.size(policy))
        else:
            low = middle
    return best, table.size(best)


def _thrifty(bound: float, table: Table, policy: Policy, measure: Measure) -> Policy:
    """Cheaper candidates one at a time, while the measured divergence stays within `bound`."""
    while True:
        size = table.size(policy)
        # Sums of losses only guide: a policy counts out where its sum is far beyond the bound.
        cheaper = [
            candidate
            for candidate in (_changed(policy, changes) for changes in table.changes(policy))
            if table.size(candidate) < size and table.sum(candidate) <= 2 * bound
        ]
        cheaper = sorted(cheaper, key=lambda p: (table.size(p), table.sum(p)))[:ROUND]
        kld = measure(cheaper).mean(1) if cheaper else np.zeros(0)
        fitting = [candidate for candidate, value in zip(cheaper, kld, strict=True) if value <= bound]
        if not fitting:
            return policy
        policy = fitting[0]


def chosen(budget: Budget, table: Table, limit: float, measure: Measure) -> Policy:
    """The policy that a search over `table` ends with; `limit` is that of `limit_of`."""
    if budget.kind == "kld":
        policy, limit = _within(budget.amount, table, measure)
        return _thrifty(budget.amount, table, climb(table, policy, limit, measure), measure)
    layers, count = table.bytes.shape[:2]
    starts = [guess(table, limit), *(np.full((layers, 2), number) for number in range(count))]
    starts = [policy for policy in starts if policy is not None and table.size(policy) <= limit]
    return climb(table, starts[int(measure(starts).mean(1).argmin())], limit, measure)
