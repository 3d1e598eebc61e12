"""The steps from measurements to a policy within a budget."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.eval.stamp import ledger_of
from kvqjax.eval.tune.budget import Budget, bytes_of_bits
from kvqjax.eval.tune.chains import Chain, chain_bytes, chain_losses, is_chain
from kvqjax.eval.tune.constants import Bar, assembled
from kvqjax.eval.tune.measure import Meter, Subject
from kvqjax.eval.tune.search import Table, climb, guess
from kvqjax.eval.tune.trial import Trial
from kvqjax.methods import Method
from kvqjax.model.loading import Model

__all__ = ["Option", "best_of", "limit_of", "losses", "mixture", "whole"]


class Option(NamedTuple):
    """A method that may be the result: how it is measured, and what makes its constants."""

    subject: Subject
    method: Method
    artifact: Callable[[], Artifact | None]


def losses(trial: Trial, meter: Meter, bar: Bar) -> np.ndarray:
    """`Table.loss`."""
    alone = trial.alone()
    found = meter([trial.subject(policy) for *_, policy in alone], bar("each part alone")).mean(1)
    loss = np.zeros((trial.model.config.num_layers, 2, len(trial.found.parts)))
    for (layer, part, candidate, _), value in zip(alone, found, strict=True):
        loss[layer, slice(None) if part == 2 else part, candidate] = value / 2 if part == 2 else value
    return loss


def limit_of(budget: Budget, table: Table, model: Model, context: int) -> float:
    """The budget in bytes. Raises UserError for one that no method reaches, or that the exact cache does not fill."""
    exact = np.zeros((len(table.bytes), 2), np.int64)
    least = np.asarray([np.unravel_index(np.argmin(size), size.shape) for size in table.bytes])
    most, low = table.size(exact), table.size(least)
    if budget.kind == "kld":
        return most
    values = 2 * model.config.num_layers * model.config.kv_width
    limit = bytes_of_bits(budget.amount, values, context) if budget.kind == "bits" else budget.amount
    said = lambda size: f"{size:.0f} bytes" if budget.kind == "bytes" else f"{8 * size / values / context:.4g} bits"  # noqa: E731
    if limit < low:
        raise UserError(f"a budget of {said(limit)} is below what any of these methods reaches: {said(low)}")
    if limit >= most:
        raise UserError(f"a budget of {said(limit)} is not below the exact cache, which takes {said(most)}")
    return limit


def _within(bound: float, table: Table, measure: Callable) -> tuple[np.ndarray, float]:
    """The first guess of fewest bytes whose measured divergence is at most `bound`, and its bytes: by halving."""
    exact = np.zeros((len(table.bytes), 2), np.int64)
    low, high = float(table.bytes.min((1, 2)).sum()), table.size(exact)
    best = exact
    for _ in range(12):
        middle = (low * high) ** 0.5
        policy = guess(table, middle)
        if policy is not None and measure([policy])[0].mean() <= bound:
            best, high = policy, min(middle, table.size(policy))
        else:
            low = middle
    return best, table.size(best)


def _thrifty(bound: float, table: Table, policy: np.ndarray, measure: Callable) -> np.ndarray:
    """Cheaper candidates one at a time, while the measured divergence stays within `bound`."""
    while True:
        size, found = table.size(policy), []
        for layer, part in np.ndindex(*policy.shape):
            for candidate in range(table.bytes.shape[1]):
                other = policy.copy()
                both = table.whole[candidate] or table.whole[policy[layer]].any()
                other[layer, slice(None) if both else part] = candidate
                if table.size(other) < size and table.sum(other) <= 2 * bound:
                    found.append(other)
        found.sort(key=lambda p: (table.size(p), table.sum(p)))
        found = found[:16]
        kld = measure(found).mean(1) if found else np.zeros(0)
        fitting = [other for other, value in zip(found, kld, strict=True) if value <= bound]
        if not fitting:
            return policy
        policy = fitting[0]


def chosen(budget: Budget, table: Table, limit: float, measure: Callable) -> np.ndarray:
    """The policy that a search over `table` ends with."""
    if budget.kind == "kld":
        policy, limit = _within(budget.amount, table, measure)
        return _thrifty(budget.amount, table, climb(table, policy, limit, measure), measure)
    layers, count = table.bytes.shape[:2]
    starts = [guess(table, limit), *(np.full((layers, 2), number) for number in range(count))]
    starts = [policy for policy in starts if policy is not None and table.size(policy) <= limit]
    return climb(table, starts[int(measure(starts).mean(1).argmin())], limit, measure)


def mixture(trial: Trial, budget: Budget, table: Table, limit: float, meter: Meter, bar: Bar) -> Option:
    """The best policy over the candidates that may stand in any layer."""
    policy = chosen(budget, table, limit, lambda ps: meter([trial.subject(p) for p in ps], bar("exchanges")))
    make = lambda: assembled(trial.model, trial.found, policy, trial.fixed)  # noqa: E731
    return Option(trial.subject(policy), trial.found.method(policy), make)


def whole(
    trial: Trial, number: int, budget: Budget, limit: float, meter: Meter, context: int, bar: Bar
) -> list[Option]:
    """A method that is taken for all layers, with exceptions where its layers feed each other; none where it does not
    fit."""
    model, method, ready = trial.model, trial.found.others[number], trial.ready[number]
    if not is_chain(method, model.config.kv_shape):
        runs = ready.constants
        make = lambda: Artifact(method, runs, model.fingerprint, {"tuned": True}) if runs else None  # noqa: E731
        fits = ledger_of(model, method, context).bytes <= limit
        return [Option(trial.others()[number], method, make)] if fits else []
    chain = Chain(model, trial.found, method, ready)
    size = chain_bytes(chain, context)
    if size.min((1, 2)).sum() > limit:
        return []
    table = Table(size, chain_losses(chain, meter, bar), np.ones(len(chain.parts), bool))
    policy = chosen(budget, table, limit, lambda ps: meter([chain.subject(p) for p in ps], bar("exchanges")))
    return [Option(chain.subject(policy), chain.method(policy), lambda: chain.artifact(policy))]


def best_of(
    options: list[Option], budget: Budget, meter: Meter, model: Model, context: int
) -> tuple[Method, Artifact | None]:
    """The option of least divergence, with its constants; of a bounded divergence, the one of fewest bytes."""
    kld = meter([option.subject for option in options]).mean(1)
    size = np.asarray([ledger_of(model, option.method, context).bytes for option in options])
    if budget.kind == "kld":
        best = int(np.where(kld <= budget.amount, size, np.inf).argmin())
    else:
        best = int(kld.argmin())
    return options[best].method, options[best].artifact()
