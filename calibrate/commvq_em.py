"""EM for CommVQ's key codebooks, one group of one layer at a time (arXiv 2506.18879, appendix A.2).

Tokens are divided by their norm over all heads; each round fits the residual that the earlier rounds leave, so fewer
rounds are a prefix of the codebook. With x_n a group's residual and c(A, B) = C_A + j C_B its L^2 centres:

    E:  w_n,AB = softmax_AB( -|x_n - c(A,B)| / T )                               (equation 34; distance, not its square)
    M:  ( diag(N 1 + N^T 1) + j (N - N^T) ) C = sum_B S_AB - j sum_A S_AB,       N_AB = sum_n w_n,AB,  S = sum_n w_n x_n

the M-step being equation 33 as an L x L Hermitian system. It needs the weights only as their sums over A and over B for
each token and as counts, so one iteration costs N L (L + 4g) multiplications and holds one minibatch of weights.

T falls exponentially (equation 35) as a fraction of the residual's root mean square, so that the schedule fits every
round, group size and model. The best codebook seen is kept, by the error of hard assignment with norms restored.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.codecs.commvq_keys import CommVQKeys, centre, group_pairs, nearest, quarter_turn, split_distances
from kvqjax.model.config import KVShape

__all__ = ["EMSettings", "Fit", "Statistics", "e_step", "em_work", "fit_keys", "fit_round", "initial_book", "m_step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMSettings:
    """How one round of EM runs.

    Attributes:
        steps: iterations, at most.
        hot: the temperature of the first iteration, as a fraction of the residual's root mean square.
        cold: that of the last of `steps` iterations, likewise.
        gain: a round ends once two iterations together improve the best error by less than this share.
        patience: iterations before a round may end.
        batch: tokens that are weighed at a time: 32 suit a CPU core's cache, an accelerator takes hundreds.
        inertia: tokens that stand at every old centre, so that centres without data stay where they are.
    """

    steps: int = 24
    hot: float = 3e-2
    cold: float = 3e-4
    gain: float = 0.01
    patience: int = 9
    batch: int = 32
    inertia: float = 1e-4


class Statistics(NamedTuple):
    """What one E-step finds, for L levels and groups of 2g channels.

    Attributes:
        counts: N_AB, the soft weights of each pair of levels, summed over tokens.
        by_a: the tokens' residuals summed under their weights, by their level A.
        by_b: likewise, by their level B.
        error: the sum over tokens of weight times squared distance to the nearest centre.
    """

    counts: Float[Array, "L L"]
    by_a: Float[Array, "L g2"]
    by_b: Float[Array, "L g2"]
    error: Float[Array, ""]


class Fit(NamedTuple):
    """One round of one group, or of all C groups with an axis of them in front.

    Attributes:
        book: the codebook.
        error: the mean squared error per channel, with the tokens' norms restored.
        steps: how many iterations it took.
    """

    book: Float[Array, "*C L g2"]
    error: Float[Array, "*C"]
    steps: Int[Array, "*C"]


PAIR_WORK = 60  # operations of a token with one pair of levels, beside products: root, exponential, sums, comparisons


def em_work(spec: CommVQKeys, shape: KVShape, tokens: int, settings: EMSettings) -> float:
    """Count the floating point operations that fitting one layer takes at least."""
    groups = shape.kv_width // (2 * spec.pairs)
    products = 16 * spec.levels * spec.pairs
    return float(tokens * groups * spec.rounds * settings.patience * (spec.levels**2 * PAIR_WORK + products))


def e_step(
    x: Float[Array, "n g2"], book: Float[Array, "L g2"], temperature: Float[Array, ""], weight: Float[Array, " n"]
) -> Statistics:
    """Assign the tokens of one minibatch to centres, softly.

    Args:
        x: residuals of one group.
        book: the group's codebook.
        temperature: T, in the unit of a distance.
        weight: each token's squared norm. It weighs the error alone, but a token of weight 0 counts nowhere.

    Returns:
        What the M-step needs, and the error.
    """
    a, b, cross = split_distances(x, book)
    energy = (x * x).sum(-1)[:, None, None]
    squared = jnp.maximum(a[:, :, None] + b[:, None, :] + cross[None] + energy, 0.0)
    distance = jnp.sqrt(squared)
    least = distance.min((1, 2), keepdims=True)
    soft = jnp.exp((least - distance) / temperature)
    soft = soft * ((weight > 0).astype(x.dtype) / soft.sum((1, 2)))[:, None, None]
    exact = {"precision": "highest"}
    by_a = jnp.einsum("na,nd->ad", soft.sum(2), x, **exact)
    by_b = jnp.einsum("nb,nd->bd", soft.sum(1), x, **exact)
    return Statistics(soft.sum(0), by_a, by_b, (weight * squared.min((1, 2))).sum())


def m_step(statistics: Statistics, old: Float[Array, "L g2"], inertia: float) -> Float[Array, "L g2"]:
    """Find the codebook that minimises the weighted squared error.

    Args:
        statistics: of all minibatches.
        old: the codebook before.
        inertia: tokens that are added at every old centre. They add 2 L inertia to the diagonal, and that times the old
            codebook on the right. Off the diagonal they cancel.

    Returns:
        The new codebook.
    """
    counts, by_a, by_b, _ = statistics
    ridge = 2 * counts.shape[0] * inertia
    diagonal = counts.sum(0) + counts.sum(1) + ridge
    # A symmetric scaling to ones on the diagonal: levels of very unequal mass would cost digits otherwise.
    scale = jax.lax.rsqrt(diagonal)
    skew = (counts - counts.T) * scale[:, None] * scale[None]
    system = jax.lax.complex(jnp.eye(counts.shape[0], dtype=counts.dtype), skew)
    right = (by_a - quarter_turn(by_b) + ridge * old) * scale[:, None]
    real, imag = jnp.split(right, 2, axis=-1)
    factor = jax.scipy.linalg.cho_factor(system, lower=True)
    solved = jax.scipy.linalg.cho_solve(factor, jax.lax.complex(real, imag))
    return jnp.concatenate([solved.real, solved.imag], -1) * scale[:, None]


def initial_book(key: Array, x: Float[Array, "N g2"], levels: int) -> Float[Array, "L g2"]:
    """Choose the codebook that EM begins with: C_l = m / (1 + j) + (x_l - m) / sqrt(2), m being the mean and x_l random
    tokens. So the centres have the mean and the spread of the data, at any scale."""
    mean = x.mean(0)
    rows = x[jax.random.choice(key, x.shape[0], (levels,), replace=x.shape[0] < levels)]
    half = (mean - quarter_turn(mean)) / 2  # m / (1 + j)
    return half[None] + (rows - mean[None]) * 2**-0.5


class _Search(NamedTuple):
    book: Float[Array, "L g2"]
    best: Fit
    earlier: Float[Array, " 2"]  # the best errors one and two iterations ago
    stop: Array


def _sweep(batches, weights, book, temperature) -> Statistics:
    """Sum the statistics of all minibatches [M, n, 2g]."""

    def add(total, batch):
        x, weight = batch
        return jax.tree.map(jnp.add, total, e_step(x, book, temperature, weight)), None

    zero = jnp.zeros_like(book)
    start = Statistics(jnp.zeros((book.shape[0],) * 2), zero, zero, jnp.zeros(()))
    return jax.lax.scan(add, start, (batches, weights))[0]


def fit_round(
    key: Array, x: Float[Array, "N g2"], weight: Float[Array, " N"], levels: int, settings: EMSettings
) -> Fit:
    """Fit one codebook to the residuals of one group.

    Args:
        key: of the first codebook.
        x: the residuals; N is a multiple of `settings.batch`.
        weight: as in `e_step`.
        levels: L.
        settings: of the iterations.

    Returns:
        The codebook of the least error that was seen. Where all residuals are 0 it is the first one, of error 0.
    """
    batches = x.reshape(-1, settings.batch, x.shape[-1])
    weights = weight.reshape(batches.shape[:2])
    count = jnp.maximum((weight > 0).sum(), 1).astype(jnp.float32)
    spread = jnp.sqrt((x * x).sum() / count)
    rate = math.log(settings.cold / settings.hot) / max(settings.steps - 1, 1)

    def iterate(state: _Search) -> _Search:
        step = state.best.steps
        temperature = spread * settings.hot * jnp.exp(rate * step.astype(jnp.float32))
        statistics = _sweep(batches, weights, state.book, temperature)
        error = statistics.error / (count * x.shape[-1])
        better = error < state.best.error
        best = Fit(jnp.where(better, state.book, state.best.book), jnp.minimum(error, state.best.error), step + 1)
        slow = best.error > (1 - settings.gain) * state.earlier[1]
        book = m_step(statistics, state.book, settings.inertia)
        earlier = jnp.stack([best.error, state.earlier[0]])
        return _Search(book, best, earlier, slow & (step + 1 > settings.patience))

    book = initial_book(key, x, levels)
    start = Fit(book, jnp.asarray(jnp.inf), jnp.asarray(0, jnp.int32))
    search = _Search(book, start, jnp.full(2, jnp.inf), jnp.asarray(False))
    best = jax.lax.while_loop(lambda s: ~s.stop & (s.best.steps < settings.steps) & (spread > 0), iterate, search).best
    return best._replace(error=jnp.where(spread > 0, best.error, 0.0))


@functools.partial(jax.jit, static_argnames=("levels", "settings"))
def _fit_groups(key, residual, weight, levels: int, settings: EMSettings):
    """Fit one round of every group [C, N, 2g], one after the other. Returns the fits and the residuals they leave."""

    def fit_group(entry):
        key, x = entry
        fit = fit_round(key, x, weight, levels, settings)
        batches = x.reshape(-1, settings.batch, x.shape[-1])
        errors = jax.lax.map(lambda b: b - centre(fit.book, *nearest(b, fit.book)), batches)
        return fit, errors.reshape(x.shape)

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
        spec: the codec's sizes.
        settings: of every round.
        report: `report(round, fit)` is called after each round, with errors and iterations of all C groups.

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
    residual = jnp.swapaxes(group_pairs(unit, spec.head_dim, spec.pairs), 0, 1)
    books = []
    for index in range(spec.rounds):
        fit, residual = _fit_groups(jax.random.fold_in(key, index), residual, norm * norm, spec.levels, settings)
        books.append(fit.book)
        if report is not None:
            report(index, fit)
    return jnp.stack(books)
