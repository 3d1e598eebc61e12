"""EM for CommVQ's key codebooks, one group of one layer at a time (arXiv 2506.18879, appendix A.2).

Tokens are divided by their norm over all heads. Each round fits the residual that the earlier
rounds leave, so the first rounds of a codebook are a codebook too. x_n is the residual of token n
in one group: g channel pairs, read as g complex numbers. A group has L levels C_A and L^2 centres
c(A, B) = C_A + j C_B, where j is the imaginary unit.

    E:  w_n,AB = softmax_AB( -|x_n - c(A,B)| / T )                               (equation 34; distance, not its square)
    M:  ( diag(N 1 + N^T 1) + j (N - N^T) ) C = sum_B S_AB - j sum_A S_AB,       N_AB = sum_n w_n,AB,  S = sum_n w_n x_n

The M-step is equation 33 written as an L x L Hermitian system. It needs no single weight: the
counts N, and for each token the weights' sums over A and over B, suffice. So one iteration takes N
L (L + 4g) multiplications for N tokens, and only one minibatch of weights is in memory.

The temperature T falls exponentially (equation 35). It is a fraction of the residual's root mean
square, so that one schedule fits every round, group size and model. Of all codebooks seen, the one
is kept whose hard assignment has the least error, measured after the tokens' norms are restored.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.codecs.commvq_keys import (
    CommVQKeys,
    centre,
    group_pairs,
    nearest,
    quarter_turn,
    split_distances,
)
from kvqjax.model.config import KVShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMSettings:
    """How one round of EM runs.

    Attributes:
        steps: iterations, at most.
        hot: the temperature of the first iteration, as a fraction of the residual's root mean
            square.
        cold: the temperature of the last of `steps` iterations, as the same fraction.
        gain: a round ends once two iterations together improve the best error by less than this
            share.
        patience: iterations before a round may end.
        batch: tokens of a minibatch. 32 suit a CPU core's cache; an accelerator takes hundreds.
        inertia: (fractional) tokens that are added at every old centre, so that centres without
            data stay in place.
    """

    steps: int = 24
    hot: float = 3e-2
    cold: float = 3e-4
    gain: float = 0.01
    patience: int = 9
    batch: int = 32
    inertia: float = 1e-4


class Statistics(NamedTuple):
    """The result of one E-step, for L levels and groups of 2g channels.

    Attributes:
        counts: N_AB, the soft weights of each pair of levels, summed over tokens.
        by_a: weighted sums of the tokens' residuals for each level A, sum_B S_AB.
        by_b: weighted sums of the tokens' residuals for each level B, sum_A S_AB.
        error: the sum over tokens of `weight` times squared distance to the nearest centre.
    """

    counts: Float[Array, "L L"]
    by_a: Float[Array, "L g2"]
    by_b: Float[Array, "L g2"]
    error: Float[Array, ""]


class Fit(NamedTuple):
    """One fitted round of one group, or of all C groups with their axis in front.

    Attributes:
        book: the codebook.
        error: the mean squared error per channel, with the tokens' norms restored.
        steps: iterations that the round took.
    """

    book: Float[Array, "*C L g2"]
    error: Float[Array, "*C"]
    steps: Int[Array, "*C"]


# Operations of one token and pair of levels that are no matrix products: root, exponential, sums,
# comparisons.
PAIR_WORK = 60


def em_work(spec: CommVQKeys, shape: KVShape, tokens: int, settings: EMSettings) -> float:
    """Count the floating point operations that fitting one layer takes at least: every round has
    `patience` iterations or more."""
    groups = shape.kv_width // (2 * spec.pairs)
    products = 16 * spec.levels * spec.pairs
    of_token = spec.levels**2 * PAIR_WORK + products  # in one iteration, for one group
    return float(tokens * groups * spec.rounds * settings.patience * of_token)


def e_step(
    x: Float[Array, "n g2"],
    book: Float[Array, "L g2"],
    temperature: Float[Array, ""],
    weight: Float[Array, " n"],
) -> Statistics:
    """Assign the tokens of one minibatch to centres, softly.

    Args:
        x: residuals of one group.
        book: the group's codebook.
        temperature: T, in the unit of a distance.
        weight: each token's squared norm. It weighs the token's error, but not its residual: a
            token of weight 0 counts nowhere, all others count alike.

    Returns:
        The sums that the M-step needs, and the error.
    """
    a, b, cross = split_distances(x, book)
    energy = (x * x).sum(-1)[:, None, None]
    # [n, L, L]; rounding may make a distance near 0 negative
    squared = jnp.maximum(a[:, :, None] + b[:, None, :] + cross[None] + energy, 0.0)
    distance = jnp.sqrt(squared)
    least = distance.min((1, 2), keepdims=True)
    # 1 for the nearest centre, so that no sum is 0
    soft = jnp.exp((least - distance) / temperature)
    soft = soft * ((weight > 0).astype(x.dtype) / soft.sum((1, 2)))[:, None, None]
    exact = {"precision": "highest"}
    by_a = jnp.einsum("na,nd->ad", soft.sum(2), x, **exact)
    by_b = jnp.einsum("nb,nd->bd", soft.sum(1), x, **exact)
    return Statistics(soft.sum(0), by_a, by_b, (weight * squared.min((1, 2))).sum())


def m_step(
    statistics: Statistics, old: Float[Array, "L g2"], inertia: float
) -> Float[Array, "L g2"]:
    """Find the codebook that minimises the weighted squared error.

    Args:
        statistics: of all minibatches.
        old: the codebook before.
        inertia: tokens that are added at every old centre. They add r = 2 L inertia to the diagonal
            of the system, and r times the old codebook to its right side. Off the diagonal they
            cancel.

    Returns:
        The new codebook.
    """
    counts, by_a, by_b, _ = statistics
    ridge = 2 * counts.shape[0] * inertia
    diagonal = counts.sum(0) + counts.sum(1) + ridge
    # Rows and columns are scaled so that the diagonal is 1. Without it, very different counts cost
    # digits.
    scale = jax.lax.rsqrt(diagonal)
    skew = (counts - counts.T) * scale[:, None] * scale[None]
    system = jax.lax.complex(jnp.eye(counts.shape[0], dtype=counts.dtype), skew)
    right = (by_a - quarter_turn(by_b) + ridge * old) * scale[:, None]
    real, imag = jnp.split(right, 2, axis=-1)
    factor = jax.scipy.linalg.cho_factor(system, lower=True)
    solved = jax.scipy.linalg.cho_solve(factor, jax.lax.complex(real, imag))
    return jnp.concatenate([solved.real, solved.imag], -1) * scale[:, None]


def initial_book(key: Array, x: Float[Array, "N g2"], levels: int) -> Float[Array, "L g2"]:
    """Choose the codebook that EM begins with: C_l = m / (1 + j) + (x_l - m) / sqrt(2), where m is
    the mean of all tokens and x_l are random ones. The centres C_A + j C_B then have the mean and
    the spread of the data."""
    mean = x.mean(0)
    rows = x[jax.random.choice(key, x.shape[0], (levels,), replace=x.shape[0] < levels)]
    half = (mean - quarter_turn(mean)) / 2  # m / (1 + j)
    return half[None] + (rows - mean[None]) * 2**-0.5


class _Search(NamedTuple):
    """The state between two iterations of a round."""

    book: Float[Array, "L g2"]  # the current codebook
    best: Fit  # the best codebook so far; its `steps` count all iterations so far
    earlier: Float[Array, " 2"]  # the best errors one and two iterations ago
    stop: Array


def _sweep(batches, weights, book, temperature) -> Statistics:
    """Sum the statistics of all minibatches [M, n, 2g]."""

    def add(total, batch):
        x, weight = batch
        return jax.tree.map(jnp.add, total, e_step(x, book, temperature, weight)), None

    zero = jnp.zeros_like(book)
    start = Statistics(jnp.zeros((book.shape[0],) * 2), zero, zero, jnp.zeros(()))
    total, _ = jax.lax.scan(add, start, (batches, weights))
    return total


def fit_round(
    key: Array,
    x: Float[Array, "N g2"],
    weight: Float[Array, " N"],
    levels: int,
    settings: EMSettings,
) -> Fit:
    """Fit one codebook to the residuals of one group.

    Args:
        key: of the first codebook.
        x: the residuals; N is a multiple of `settings.batch`.
        weight: as in `e_step`.
        levels: L.
        settings: of the iterations.

    Returns:
        The codebook of least error among those of all iterations. If all residuals are 0 it is the
        initial codebook, with error 0.
    """
    batches = x.reshape(-1, settings.batch, x.shape[-1])
    weights = weight.reshape(batches.shape[:2])
    count = jnp.maximum((weight > 0).sum(), 1).astype(jnp.float32)
    spread = jnp.sqrt((x * x).sum() / count)
    # Of the temperature, per iteration.
    rate = math.log(settings.cold / settings.hot) / max(settings.steps - 1, 1)

    def iterate(state: _Search) -> _Search:
        step = state.best.steps
        temperature = spread * settings.hot * jnp.exp(rate * step.astype(jnp.float32))
        statistics = _sweep(batches, weights, state.book, temperature)
        error = statistics.error / (count * x.shape[-1])  # of `state.book`
        better = error < state.best.error
        best = Fit(
            jnp.where(better, state.book, state.best.book),
            jnp.minimum(error, state.best.error),
            step + 1,
        )
        slow = best.error > (1 - settings.gain) * state.earlier[1]
        book = m_step(statistics, state.book, settings.inertia)
        earlier = jnp.stack([best.error, state.earlier[0]])
        return _Search(book, best, earlier, slow & (step + 1 > settings.patience))

    book = initial_book(key, x, levels)
    start = Fit(book, jnp.asarray(jnp.inf), jnp.asarray(0, jnp.int32))
    search = _Search(book, start, jnp.full(2, jnp.inf), jnp.asarray(False))

    def goes_on(state: _Search) -> Array:
        return ~state.stop & (state.best.steps < settings.steps) & (spread > 0)

    best = jax.lax.while_loop(goes_on, iterate, search).best
    return best._replace(error=jnp.where(spread > 0, best.error, 0.0))


@functools.partial(jax.jit, static_argnames=("levels", "settings"))
def _fit_groups(key, residual, weight, levels: int, settings: EMSettings):
    """Fit one round of every group [C, N, 2g], one group after the other. Gives the fits, and the
    residuals after this round."""

    def fit_group(entry):
        key, x = entry
        fit = fit_round(key, x, weight, levels, settings)
        batches = x.reshape(-1, settings.batch, x.shape[-1])

        def residual_of(batch):
            return batch - centre(fit.book, *nearest(batch, fit.book))

        # In minibatches, because the distances of all tokens to all centres would take much memory.
        return fit, jax.lax.map(residual_of, batches).reshape(x.shape)

    return jax.lax.map(fit_group, (jax.random.split(key, residual.shape[0]), residual))


def fit_keys(
    key: Array,
    k: Float[Array, "N W"],
    spec: CommVQKeys,
    settings: EMSettings = EMSettings(),
    report: Callable[[int, Fit], None] | None = None,
) -> Float[Array, "R C L g2"]:
    """Fit the codebook of one layer.

    Args:
        key: of all random numbers.
        k: keys before RoPE, all heads. Tokens beyond a multiple of `settings.batch` are left out.
        settings: of every round.
        report: `report(round, fit)` is called after each round, with errors and iterations of all C
            groups.

    Returns:
        The codebook, float32.

    Raises:
        ValueError: for fewer tokens than one batch.
    """
    if k.shape[0] < settings.batch:
        raise ValueError(f"{k.shape[0]} tokens; EM needs at least one batch of {settings.batch}")
    k = k[: k.shape[0] // settings.batch * settings.batch].astype(jnp.float32)
    norm = jnp.linalg.norm(k, axis=-1)
    unit = k / jnp.where(norm > 0, norm, 1.0)[:, None]
    residual = jnp.swapaxes(group_pairs(unit, spec.head_dim, spec.pairs), 0, 1)  # [C, N, 2g]
    books = []
    for index in range(spec.rounds):
        fit, residual = _fit_groups(
            jax.random.fold_in(key, index), residual, norm * norm, spec.levels, settings
        )
        books.append(fit.book)
        if report is not None:
            report(index, fit)
    return jnp.stack(books)
