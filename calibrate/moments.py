"""Linear regression from streamed second moments: ridge, reduced rank, 4-bit weights, and their errors.

With Xa = [X, 1], all that is kept of the data is C = Xa^T Xa, Xa^T Y and the squares of Y, summed in float64: fits and
errors alike come from these, whatever the number of rows (AQUA-KV, arXiv 2501.19392, Algorithm 1 and Appendix B).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

__all__ = ["Moments", "Score", "add", "gptq", "low_rank", "refit_bias", "ridge", "score"]

Matrix = np.ndarray
CODES = 15  # largest 4-bit code


class Moments(NamedTuple):
    """float64 on the host: xx [I+1,I+1] and xy [I+1,O] with the ones column last, yy [O]."""

    xx: Matrix
    xy: Matrix
    yy: Matrix

    @property
    def rows(self) -> float:
        return float(self.xx[-1, -1])


class Score(NamedTuple):
    """`relative_mse` = |Y - Yhat|^2 / |Y|^2; `explained` = 1 - |Y - Yhat|^2 / |Y - mean Y|^2, over all outputs."""

    relative_mse: float
    explained: float

    @property
    def bits_saved(self) -> float:
        """Bits per number that the prediction saves: an ideal quantiser needs so many, -log4(relative MSE), to come as
        close."""
        return float(-np.log(max(self.relative_mse, 1e-300)) / np.log(4.0))


@jax.jit
def _products(x, y, keep):
    ones = jnp.ones((x.shape[0], 1), jnp.float32)
    xa = jnp.concatenate([x.astype(jnp.float32), ones], axis=1) * keep[:, None]
    y = y.astype(jnp.float32) * keep[:, None]
    times = lambda a, b: jnp.einsum("ni,nj->ij", a, b, precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    return times(xa, xa), times(xa, y), (y * y).sum(0)


def add(
    total: Moments | None,
    x: Float[Array | np.ndarray, "N I"],
    y: Float[Array | np.ndarray, "N O"],
    keep: Bool[Array | np.ndarray, " N"] | None = None,
) -> Moments:
    """`total` with the rows of one chunk added (None starts a new one); rows where `keep` is False count for nothing.
    Products in float32 over the chunk, sums of chunks in float64: a few thousand rows a chunk are meant."""
    keep = np.ones(x.shape[0], np.float32) if keep is None else jnp.asarray(keep, jnp.float32)
    part = Moments(*(np.asarray(a, np.float64) for a in _products(jnp.asarray(x), jnp.asarray(y), keep)))
    return part if total is None else Moments(*(a + b for a, b in zip(total, part, strict=True)))


def _damped(xx: Matrix, damping: float) -> Matrix:
    return xx + damping * np.mean(np.abs(np.diag(xx))) * np.eye(len(xx))


def _solve(a: Matrix, b: Matrix) -> Matrix:
    """a^-1 b for a symmetric a; the least-norm solution where a is singular."""
    try:
        factor = np.linalg.cholesky(a)
    except np.linalg.LinAlgError:
        return np.linalg.pinv(a, hermitian=True) @ b
    return np.linalg.solve(factor.T, np.linalg.solve(factor, b))


def _centred(moments: Moments) -> tuple[Matrix, Matrix]:
    """Covariances of X, and of X with Y, times the rows."""
    sums = moments.xx[-1, :-1]
    return moments.xx[:-1, :-1] - np.outer(sums, sums) / moments.rows, (
        moments.xy[:-1] - np.outer(sums, moments.xy[-1]) / moments.rows
    )


def ridge(
    moments: Moments, damping: float = 1e-3, intercept: bool = True, centred: bool = False
) -> tuple[Matrix, Matrix]:
    """(W [I,O], b [O]) of least |Xa [W; b] - Y|^2 with `damping` times the mean of C's whole diagonal, the ones column
    included, added to every diagonal entry, the intercept's too (the released rule). `centred` takes X and Y without
    their means instead: the released damping grows with the square of an offset (Qwen's keys have offsets of 50 times
    their spread) until nothing is learnt."""
    if centred:
        xx, xy = _centred(moments)
        weight = _solve(_damped(xx, damping), xy)
        return weight, refit_bias(moments, weight)
    if not intercept:
        weight = _solve(_damped(moments.xx[:-1, :-1], damping), moments.xy[:-1])
        return weight, np.zeros(weight.shape[1])
    both = _solve(_damped(moments.xx, damping), moments.xy)
    return both[:-1], both[-1]


def low_rank(moments: Moments, rank: int, damping: float = 1e-3, centred: bool = True) -> tuple[Matrix, Matrix, Matrix]:
    """(A [I,R], B [R,O], b [O]): reduced-rank regression, the ridge fit projected on the leading eigenvectors of the
    fitted covariance. `centred=False` leaves X uncentred and takes b = mean(Y), as the released code does."""
    if not 1 <= rank <= moments.xy.shape[1]:
        raise ValueError(f"rank={rank}; 1 to {moments.xy.shape[1]} are possible")
    xx, xy = _centred(moments)
    if not centred:
        xx = moments.xx[:-1, :-1]
    fit = _solve(_damped(xx, damping), xy)
    vectors = np.linalg.eigh(xy.T @ fit)[1][:, ::-1][:, :rank]
    down, up = fit @ vectors, vectors.T
    return down, up, refit_bias(moments, down @ up) if centred else moments.xy[-1] / moments.rows


def refit_bias(moments: Moments, weight: Matrix) -> Matrix:
    """The bias [O] that makes the mean error zero for a weight that was rounded after the fit."""
    return (moments.xy[-1] - moments.xx[-1, :-1] @ weight) / moments.rows


def score(moments: Moments, weight: Matrix, bias: Matrix) -> Score:
    """Errors of Y ~ X weight + bias on the rows the moments were taken from."""
    both = np.concatenate([weight, bias[None]])
    error = moments.yy.sum() - 2 * (both * moments.xy).sum() + (both * (moments.xx @ both)).sum()
    spread = moments.yy.sum() - (moments.xy[-1] ** 2).sum() / moments.rows
    return Score(float(error / max(moments.yy.sum(), 1e-300)), float(1 - error / max(spread, 1e-300)))


def _group_range(weight: Matrix) -> tuple[Matrix, Matrix]:
    """Scale and minimum per output for 4-bit codes of one group of inputs [g, O], as stored in bfloat16."""
    low = np.minimum(weight.min(0), 0).astype(jnp.bfloat16).astype(np.float64)
    scale = ((np.maximum(weight.max(0), 0) - low) / CODES).astype(jnp.bfloat16).astype(np.float64)
    return np.where(scale > 0, scale, 1.0), low


def gptq(moments: Moments, weight: Matrix, group: int, damping: float = 1e-2) -> dict[str, Matrix]:
    """4-bit codes [I,O] and their scale and low [I/group,O] by GPTQ's rule (arXiv 2210.17323): inputs are rounded one
    by one, and what is lost is made up for by those still to come, along the inverse Cholesky factor of X's covariance
    (not X^T X: the bias is fitted again afterwards, see `refit_bias`)."""
    inputs = weight.shape[0]
    if inputs % group:
        raise ValueError(f"group={group} does not divide {inputs} inputs")
    inverse = np.linalg.inv(_damped(_centred(moments)[0], damping))
    upper = np.linalg.cholesky(inverse).T
    weight, codes = weight.copy(), np.zeros(weight.shape, np.uint32)
    scales, lows = [], []
    for i in range(inputs):
        if i % group == 0:
            scale, low = _group_range(weight[i : i + group])
            scales.append(scale)
            lows.append(low)
        codes[i] = np.clip(np.round((weight[i] - lows[-1]) / scales[-1]), 0, CODES)
        loss = (weight[i] - (codes[i] * scales[-1] + lows[-1])) / upper[i, i]
        weight[i:] -= upper[i, i:, None] * loss[None]
    return {"codes": codes, "scale": np.stack(scales), "low": np.stack(lows)}
