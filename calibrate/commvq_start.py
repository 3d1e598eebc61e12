"""How CommVQ's value encoder begins: as a transform coder, which training then improves.

Random numbers, with which the released training begins, take it 100 000 steps. But an encoder with GELU can be linear,
for gelu(c) - gelu(-c) = c, and the largest of four linear logits is a scalar quantiser of four cells:

    c               |      t1      |      t2      |      t3      |
    cell k          0              1              2              3        logit of cell k:  s (k c - t1 - ... - tk)
    bits            00             10             01             11       worth 0, a, 2 a, 3 a by two codebook rows

So each choice begins as a quantiser of one principal component c of the values. m choices of one component take turns
at the thresholds of 3 m + 1 equal cells. Components get choices where one more lowers the squared error most. One
choice is always 11, for the mean. The codebook is the regression of the values on the bits that this encoder gives
them. On layer 10 of SmolLM2-135M, at 2 bits, values then lose 0.098 of their energy and attention's outputs 0.090,
after 200 steps 0.097 and 0.071; from random numbers as many steps reach 0.35 and 0.23
(`python -m benchmarks.commvq_training`).
"""

import functools
import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.optimize import minimize_scalar
from scipy.special import ndtr

from kvqjax._errors import UserError
from kvqjax.codecs.commvq_values import CHOICE_BITS, EPS, chosen_bits, layer_normed, logits, normalise

__all__ = ["transform_coder"]

SAMPLE = 8192  # values of which components and regressions are made: 4 for every row of the codebook at W = 1024
# Logits a standard deviation of a component apart from a threshold. The noise that training draws choices with has a
# standard deviation of 1.8 (the difference of two Gumbel variables).
SHARPNESS = 16.0
RIDGE = 1e-3  # of the regressions, relative to the mean square of what is regressed on
CELLS = [CHOICE_BITS.index(bits) for bits in ((0, 0), (1, 0), (0, 1), (1, 1))]  # the choice that stands for each cell
ALWAYS = CELLS[3]


# ---- Quantisers of a standard normal component ----


def _distortion(step: float, count: int) -> float:
    """Mean squared error of `count` equal cells of a standard normal variable, the outer ones open, each read as its
    middle (the outer ones as if they were as wide as the others)."""
    levels = (np.arange(count) - (count - 1) / 2) * step
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    share, first = np.diff(ndtr(edges)), density[:-1] - density[1:]
    return float(1 - 2 * levels @ first + levels**2 @ share)


@functools.cache
def _quantiser(choices: int) -> tuple[float, float]:
    """The best step of the cells that `choices` choices make, and its mean squared error."""
    if not choices:
        return 0.0, 1.0
    best = minimize_scalar(lambda step: _distortion(step, 3 * choices + 1), bounds=(0.01, 1.5), method="bounded")
    return float(best.x), float(best.fun)


def _allotted(variances: Float[np.ndarray, " n"], choices: int) -> Int[np.ndarray, " n"]:
    """Give each choice to the component whose squared error it lowers most. Components without variance get none."""
    counts = np.zeros(len(variances), int)

    def gained(component: int) -> float:
        count = int(counts[component])
        return float(variances[component] * (_quantiser(count)[1] - _quantiser(count + 1)[1]))

    heap = [(-gained(component), component) for component in range(len(variances)) if variances[component] > 0]
    heapq.heapify(heap)
    for _ in range(choices if heap else 0):
        _, component = heap[0]
        counts[component] += 1
        heapq.heapreplace(heap, (-gained(component), component))
    return counts


# ---- The encoder and its codebook ----


def _regressed(
    on: Float[np.ndarray, "n a"], of: Float[np.ndarray, "n b"], weights: Float[np.ndarray, " n"]
) -> Float[np.ndarray, "a b"]:
    """The matrix with the least weighted squared error |on @ matrix - of|."""
    weighted = on * weights[:, None]
    square = weighted.T @ on
    ridge = RIDGE * max(float(np.trace(square)) / len(square), np.finfo(np.float32).tiny)
    return np.linalg.solve(square + ridge * np.eye(len(square)), weighted.T @ of)


def _components(
    seen: Float[np.ndarray, "n W"], values: Float[np.ndarray, "n W"], weights: Float[np.ndarray, " n"], most: int
) -> tuple[Float[np.ndarray, " c"], Float[np.ndarray, "W1 c"]]:
    """Principal components of what the encoder can know of weighted values, at most `most`: their variances, and the
    matrix that gives each, of variance 1, from what the encoder sees and a one."""
    with_one = np.concatenate([seen, np.ones((len(seen), 1))], 1)
    matrix = _regressed(with_one, values, weights)
    # LayerNorm hides the mean over channels. A choice for it would be lost, so that components are those of what can be
    # predicted, not of the values themselves.
    predicted = with_one @ matrix
    mean = weights @ predicted / weights.sum()
    centred = predicted - mean
    variances, axes = np.linalg.eigh((centred * weights[:, None]).T @ centred / weights.sum())
    largest = np.argsort(variances)[::-1][:most]
    # What float32 rounds away is no component: it would be divided by nearly 0.
    kept = largest[variances[largest] > np.finfo(np.float32).eps * (mean @ mean + variances.max())]
    matrix[-1] -= mean
    return variances[kept], matrix @ axes[:, kept] / np.sqrt(variances[kept])


def transform_coder(
    params: dict[str, Float[Array, "..."]], v: Float[Array, "*n W"], scale: Float[Array, " W"]
) -> dict[str, Float[Array, "..."]]:
    """Make an encoder and a codebook begin as a transform coder of the values' principal components.

    Args:
        params: of an encoder, random ones of the shapes of `CommVQValues.shapes`. Hidden units that the transform
            leaves over keep theirs; nothing reads them until training does.
        v: values of a layer.
        scale: of their channels.

    Returns:
        The parameters, float32, and a codebook that is not yet folded.

    Raises:
        UserError: values that are not finite.
    """
    sample = _sample(v)
    unit, norm = normalise(jnp.asarray(sample), jnp.asarray(scale, jnp.float32))
    seen, directions, weights = (np.asarray(x, np.float64) for x in (layer_normed(unit), unit, norm * norm))
    # Errors of large values are larger. Where all values are 0, every one counts.
    weights = weights / weights.mean() if weights.any() else np.ones_like(weights)
    # Components are those of values as they are, not of values over their channels' scale: so errors are measured.
    values = directions * (np.asarray(scale, np.float64) + EPS)
    hidden = params["b1"].shape[0]
    variances, matrix = _components(seen, values, weights, most=hidden // 2)  # two hidden units a component
    encoder = _quantising(params, variances, matrix)
    bits = np.asarray(chosen_bits(logits(encoder, unit)), np.float64)
    codebook = _regressed(bits, directions, weights)
    # A codebook gives directions, and its size does not matter. Entries of about 1 are what the training's rate is for.
    size = max(float(np.sqrt((codebook**2).mean())), np.finfo(np.float32).tiny)
    return encoder | {"codebook": jnp.asarray(codebook / size, jnp.float32)}


def _sample(v: Float[Array, "*n W"]) -> Float[np.ndarray, "s W"]:
    """Take at most `SAMPLE` values, evenly spread. Raises UserError where one is not finite."""
    flat = np.asarray(v, np.float32).reshape(-1, v.shape[-1])
    sample = flat[np.linspace(0, len(flat) - 1, min(SAMPLE, len(flat))).astype(int)]
    if not np.isfinite(sample).all():
        raise UserError("values to calibrate on are NaN or infinite")
    return sample


def _quantising(
    params: dict[str, Float[Array, "..."]], variances: Float[np.ndarray, " c"], matrix: Float[np.ndarray, "W1 c"]
) -> dict[str, Float[Array, "..."]]:
    """Make an encoder's choices quantisers of components.

    Args:
        params: of the encoder.
        variances: of the components, which say how many choices each gets.
        matrix: that gives the components, of variance 1, from what the encoder sees and a one.

    Returns:
        The parameters. Component c is the difference of hidden units c and n + c, of n components.
    """
    new = {name: np.array(x, np.float32) for name, x in params.items()}
    count, choices = len(variances), new["b2"].shape[0] // 4
    for units, sign in ((slice(count), 1.0), (slice(count, 2 * count), -1.0)):
        new["w1"][:, units], new["b1"][units] = sign * matrix[:-1], sign * matrix[-1]
    new["w2"][:], new["b2"][:] = 0, 0
    choice = 0
    for component, shares in enumerate(_allotted(variances, choices - 1).tolist()):
        thresholds = (np.arange(1, 3 * shares + 1) - (3 * shares + 1) / 2) * _quantiser(shares)[0]
        for turn in range(shares):
            # Choices of one component have every `shares`-th threshold, so that together they tell all its cells apart.
            passed = np.concatenate([[0.0], np.cumsum(thresholds[turn::shares])])
            logit = 4 * choice + np.asarray(CELLS)
            new["w2"][component, logit] = SHARPNESS * np.arange(4)
            new["w2"][count + component, logit] = -SHARPNESS * np.arange(4)
            new["b2"][logit] = -SHARPNESS * passed
            choice += 1
    # One choice at least is left: its bits are always 11, and their codebook rows hold the mean.
    new["b2"][4 * np.arange(choice, choices) + ALWAYS] = SHARPNESS
    return jax.tree.map(jnp.asarray, new)
