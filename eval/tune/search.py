"""The search for a policy: which candidate the keys and the values of each layer follow, within a
budget.

A policy is an int array [L, 2]: the numbers of the candidates of every layer's keys and values.
`Table` has the bytes and losses of candidates. Nothing here knows what a candidate is.

A first guess assumes that the losses of layers add up, and is found by dynamic programming. From
there the search goes on by exchanges of candidates, which are measured: `measure(policies)` gives
the KL divergence [P, N] of P policies in N windows of text.
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

GRID = 400  # steps per layer into which dynamic programming divides the budget
ROUND = 16  # exchanges that are measured together
PATIENCE = 2  # rounds without a gain after which the search ends
NOISE = 1.0  # an exchange must help by more standard errors of the paired difference than this
# Pairs are made of this number of the best changes, and of the same number of changes that save
# bytes.
PAIRED = 64
HALVINGS = 12  # steps of the bisection for the fewest bytes that keep a divergence

MOST_BITS = 32  # of a number

Policy = np.ndarray  # Int [L, 2]
Measure = Callable[[list[Policy]], Float[np.ndarray, "P N"]]


# --- What a user can spend


class Budget(NamedTuple):
    """The largest amount that a policy may take."""

    kind: str  # "bits" per number of keys and values, on average over all that is stored; "bytes"; or "kld"
    amount: float  # of a KL divergence in nats


def read_budget(text: str | float | int) -> Budget:
    """Read a budget.

    Args:
        text: `2.5` or `2.5 bits`, `8GiB`, `kld=0.01` or `kld<0.01`.

    Raises:
        UserError: a text that is none of these, an amount that is not above 0, and more bits than
            exact numbers have.
    """
    match = re.fullmatch(
        r"\s*(?:(kld)\s*[<=]=?)?\s*([\d.]+(?:e-?\d+)?)\s*([a-z]*)\s*", str(text).lower()
    )
    try:
        amount = float(match[2]) if match else 0.0
    except ValueError:  # several points
        amount = 0.0
    unit = match[3] if match else ""
    if (
        match is None
        or not 0 < amount < math.inf
        or (match[1] and unit)
        or unit not in ("", "bit", "bits", *BYTES)
    ):
        raise UserError(
            f"budget {text!r}; wanted bits (2.5), bytes (8GiB) or a divergence (kld=0.01)"
        )
    if match[1]:
        return Budget("kld", amount)
    if unit in BYTES:
        return Budget("bytes", amount * BYTES[unit])
    if amount > MOST_BITS:
        raise UserError(
            f"budget {text!r}; wanted at most {MOST_BITS} bits, the size of an exact number"
        )
    return Budget("bits", amount)


# --- What policies cost


class Table(NamedTuple):
    """The costs of C candidates in L layers. Part 0 of a layer is its keys, part 1 its values."""

    # By the candidates of keys and of values; inf for candidates that cannot combine.
    bytes: Float[np.ndarray, "L C C"]
    # The divergence where this part alone follows the candidate; half for each if joint.
    loss: Float[np.ndarray, "L 2 C"]
    joint: Bool[np.ndarray, " C"]  # keys and values must both follow the candidate, or neither

    def size(self, policy: Policy) -> float:
        """Sum the bytes of a policy."""
        return float(sum(self.bytes[layer, a, b] for layer, (a, b) in enumerate(policy)))

    def sum(self, policy: Policy) -> float:
        """Sum the losses of a policy's parts: an estimate of its divergence."""
        return float(
            sum(
                self.loss[layer, 0, a] + self.loss[layer, 1, b]
                for layer, (a, b) in enumerate(policy)
            )
        )

    def changes(self, policy: Policy) -> list[list[tuple[int, int, int]]]:
        """List the smallest changes of a policy. A change is a list of (layer, part, candidate). It
        has one part, or both parts of a layer whose old or new candidate is joint."""
        count, changes = self.bytes.shape[1], []
        for layer, candidate in itertools.product(range(len(policy)), range(count)):
            both = [(layer, part, candidate) for part in (0, 1)]
            if self.joint[candidate] or self.joint[policy[layer]].any():
                changes.append(both)
            else:
                changes += [[change] for change in both]
        # A part that follows the candidate already is no change.
        return [
            parts for parts in changes if any(policy[layer, part] != c for layer, part, c in parts)
        ]


def limit_of(budget: Budget, table: Table, config: ModelConfig, context: int) -> float:
    """Convert a budget to bytes of a row.

    Args:
        budget: the budget. A divergence has no limit of bytes but those of the exact cache.
        table: the costs. Candidate 0 is the exact cache.
        config: the model's.
        context: tokens of the row.

    Returns:
        The most bytes that a policy may take.

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
        return (
            f"{size:.0f} bytes"
            if budget.kind == "bytes"
            else f"{8 * size / values / context:.4g} bits"
        )

    if limit < least:
        raise UserError(
            f"a budget of {said(limit)} is below what any of these methods reaches: {said(least)}"
        )
    if limit >= most:
        raise UserError(
            f"a budget of {said(limit)} is not below the exact cache, which takes {said(most)}"
        )
    return limit


# --- The first guess: a dynamic programme over layers, as if losses added up


def _options(table: Table, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List the pairs of candidates (for keys, for values) of a layer. A pair is left out if another
    one takes no more bytes and loses no more.

    Args:
        table: the costs.
        layer: the layer.

    Returns:
        The pairs [n, 2] in ascending order of bytes, their bytes [n] and their losses [n].
    """
    count = table.bytes.shape[1]
    pairs = np.stack(np.meshgrid(np.arange(count), np.arange(count), indexing="ij"), -1).reshape(
        -1, 2
    )
    size = table.bytes[layer].reshape(-1)
    loss = table.loss[layer, 0][pairs[:, 0]] + table.loss[layer, 1][pairs[:, 1]]
    order = np.lexsort((loss, size))  # by bytes, then by loss
    order = order[np.isfinite(size[order])]
    # A pair is kept if it loses less than every pair before it.
    lowest = np.minimum.accumulate(loss[order])
    front = order[np.r_[True, lowest[1:] < lowest[:-1]]]
    return pairs[front], size[front], loss[front]


def _programme(options: list, limit: float, steps: int) -> Policy | None:
    """Find the policy of least summed loss by dynamic programming.

    Args:
        options: of every layer, as `_options` gives them.
        limit: the budget in bytes.
        steps: equal parts into which the budget is divided. The bytes of a pair are rounded up to
            whole parts.

    Returns:
        The policy; None where no policy fits.
    """
    # The least loss of the layers so far, by the steps that they may take.
    best = np.zeros(steps + 1)
    choices = []
    for _, size, loss in options:
        # In steps; 1e-9 is for rounding errors.
        costs = np.ceil(size / limit * steps - 1e-9).astype(int)
        # The least loss if this layer takes a pair: a row for each pair.
        by_pair = np.full((len(costs), steps + 1), np.inf)
        for row, cost, pair_loss in zip(by_pair, costs, loss, strict=True):
            if cost <= steps:
                row[cost:] = best[: steps + 1 - cost] + pair_loss
        choices.append((by_pair.argmin(0), costs))
        best = by_pair.min(0)
    if not np.isfinite(best[steps]):
        return None
    # Backwards: the last layer's choice with all steps, then the choice before it with what is
    # left.
    left, policy = steps, []
    for (pairs, _, _), (choice, costs) in zip(reversed(options), reversed(choices), strict=True):
        policy.append(pairs[choice[left]])
        left -= costs[choice[left]]
    return np.asarray(policy[::-1])


def guess(table: Table, limit: float) -> Policy | None:
    """Find a policy of at most `limit` bytes with the least summed loss, up to the rounding of
    bytes to steps. None where no policy is so small."""
    layers = len(table.bytes)
    options = [_options(table, layer) for layer in range(layers)]
    steps = GRID * layers
    # Bytes are rounded up by at most one step a layer. So a budget of one step more for each layer
    # is tried first. Its policy is taken if it fits the true limit.
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
    """List policies of at most `limit` bytes that differ from this one by one or two changes. Those
    of least summed loss come first."""
    singles = table.changes(policy)
    losses = [table.sum(_changed(policy, changes)) for changes in singles]
    sizes = [table.size(_changed(policy, changes)) for changes in singles]
    order = np.argsort(losses, kind="stable")
    # In a pair, one change lowers the loss, and the other one saves the bytes for it.
    best = [singles[i] for i in order[:PAIRED]]
    savings = [singles[i] for i in order if sizes[i] < table.size(policy)][:PAIRED]
    pairs = []
    for gain, saving in itertools.product(best, savings):
        places = {(layer, part) for layer, part, _ in gain} & {
            (layer, part) for layer, part, _ in saving
        }
        if not places:  # the changes do not overlap
            pairs.append(gain + saving)
    variants = [_changed(policy, changes) for changes in [*singles, *pairs]]
    unique = {variant.tobytes(): variant for variant in variants}
    fitting = [variant for variant in unique.values() if table.size(variant) <= limit]
    return sorted(fitting, key=lambda variant: (table.sum(variant), variant.tobytes()))


def better(new: np.ndarray, old: np.ndarray) -> bool:
    """Say whether the mean over windows fell by more than the standard error of the paired
    differences."""
    gap = old - new
    error = gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else 0.0
    return bool(gap.mean() > NOISE * error)


def climb(table: Table, start: Policy, limit: float, measure: Measure) -> Policy:
    """Exchange candidates as long as measurements improve beyond noise.

    Args:
        table: the costs.
        start: the policy to begin with.
        limit: the most bytes of a policy.
        measure: gives the divergences of policies.

    Returns:
        The last policy: `PATIENCE` rounds of its neighbours did not improve on it, or none was
            left.
    """
    policy = start
    seen = {start.tobytes()}
    idle_rounds = 0
    (divergence,) = measure([policy])  # in every window
    while idle_rounds < PATIENCE:
        unseen = [p for p in neighbours(table, policy, limit) if p.tobytes() not in seen][:ROUND]
        if not unseen:
            break
        seen |= {p.tobytes() for p in unseen}
        measured = measure(unseen)
        best = measured.mean(1).argmin()
        if better(measured[best], divergence):
            policy, divergence = unseen[best], measured[best]
            idle_rounds = 0
        else:
            idle_rounds += 1
    return policy


# --- The search for each kind of budget


def _within(bound: float, table: Table, measure: Measure) -> tuple[Policy, float]:
    """Find by bisection the fewest bytes whose first guess has a measured divergence of at most
    `bound`. Give this guess with its bytes."""
    exact = np.zeros((len(table.bytes), 2), np.int64)
    low, high = float(table.bytes.min((1, 2)).sum()), table.size(exact)
    best = exact
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5  # the geometric mean, as bytes span orders of magnitude
        policy = guess(table, middle)
        if policy is not None and measure([policy])[0].mean() <= bound:
            best, high = policy, min(middle, table.size(policy))
        else:
            low = middle
    return best, table.size(best)


def _thrifty(bound: float, table: Table, policy: Policy, measure: Measure) -> Policy:
    """Take cheaper candidates, one change at a time, as long as the measured divergence is at most
    `bound`."""
    while True:
        size = table.size(policy)
        # The sum of losses is only an estimate. So a policy is not measured if its sum is far
        # beyond the bound.
        cheaper = [
            candidate
            for candidate in (_changed(policy, changes) for changes in table.changes(policy))
            if table.size(candidate) < size and table.sum(candidate) <= 2 * bound
        ]
        cheaper = sorted(cheaper, key=lambda p: (table.size(p), table.sum(p)))[:ROUND]
        kld = measure(cheaper).mean(1) if cheaper else np.zeros(0)
        fitting = [
            candidate for candidate, value in zip(cheaper, kld, strict=True) if value <= bound
        ]
        if not fitting:
            return policy
        policy = fitting[0]


def chosen(budget: Budget, table: Table, limit: float, measure: Measure) -> Policy:
    """Search for the best policy of a budget.

    Args:
        budget: the budget.
        table: the costs of candidates.
        limit: the budget in bytes (`limit_of`).
        measure: gives the divergences of policies.

    Returns:
        The policy.
    """
    if budget.kind == "kld":
        policy, limit = _within(budget.amount, table, measure)
        improved = climb(table, policy, limit, measure)
        return _thrifty(budget.amount, table, improved, measure)
    # The search begins with the first guess, or with one candidate in all layers where that
    # measures better.
    layers, count = table.bytes.shape[:2]
    starts = [guess(table, limit), *(np.full((layers, 2), number) for number in range(count))]
    starts = [policy for policy in starts if policy is not None and table.size(policy) <= limit]
    best = int(measure(starts).mean(1).argmin())
    return climb(table, starts[best], limit, measure)
