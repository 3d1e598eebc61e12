"""One layer of AQUA-KV's calibration (arXiv 2501.19392, Algorithm 1 and Appendix B): fit the
predictors of keys and values, then reconstruct as the cache will.

Linear predictors are fitted to second moments. X [n, I] are inputs and Y [n, O] outputs of n rows
(tokens), and Xa = [X, 1]. Rows are read in chunks, and only the sums Xa^T Xa, Xa^T Y and the
squares of Y are kept, in float64. Ridge regression, reduced-rank regression, 4-bit weights and all
errors are computed from these sums. The two-layer predictor (section 4.3) is trained by optax.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from kvqjax.calibrate import klt
from kvqjax.codecs import Centred
from kvqjax.codecs.klt import Klt
from kvqjax.methods.papers.aqua import (
    CONSTANT_DTYPES,
    AquaLayer,
    encode_source,
    missed,
    predict,
    predictor_inputs,
    predictor_shapes,
)
from kvqjax.model.weight_codes import pack_nibbles

Matrix = np.ndarray
Pair = dict[str, np.ndarray]  # "k" and "v": [N, n, W] float32 on the host
MEASURES = ("relative_mse", "explained", "bits_saved", "held_out_mse", "reconstruction_mse")
CODES = 15  # largest 4-bit code
BATCH = 1024  # rows of a step of the two-layer predictor's training
PEAK_RATE = 2e-3  # Adam's learning rate at the start of a cosine schedule
TINY = 1e-300  # keeps float64 quotients of sums of squares finite where a sum is 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How predictors are fitted.

    Attributes:
        damping: of the ridge regression, relative to the mean of the moments' diagonal.
        centred: whether means are subtracted from X and Y; else the released rule (see `ridge`).
        held_out: the share of the sequences, taken from the end, that predictors are measured on
            but not fitted to.
        body_only: whether tokens that the cache keeps exact (sinks, window) are left out.
        clean: whether predictors see the exact layer below, as in the paper's quantiser-agnostic
            ablation, instead of its reconstruction.
        mlp_steps: of the two-layer predictor's training.
    """

    damping: float = 1e-3
    centred: bool = True
    held_out: float = 0.125
    body_only: bool = True
    clean: bool = False
    mlp_steps: int = 2000

    def training(self, sequences: int) -> int:
        """Count the sequences, of `sequences` in all, that predictors are fitted to: one at
        least."""
        return max(1, sequences - int(sequences * self.held_out))


# --- Linear regression from second moments


class Moments(NamedTuple):
    """Second moments of n rows, float64 on the host. With Xa = [X, 1], the column of ones last:

    Attributes:
        xx: Xa^T Xa, [I+1, I+1]. Its last entry is n.
        xy: Xa^T Y, [I+1, O].
        yy: the sums of the squares of Y, [O].
    """

    xx: Matrix
    xy: Matrix
    yy: Matrix

    @property
    def rows(self) -> float:
        return float(self.xx[-1, -1])


class Score(NamedTuple):
    """How well Yhat predicts Y, over all outputs.

    Attributes:
        relative_mse: |Y - Yhat|^2 / |Y|^2.
        explained: 1 - |Y - Yhat|^2 / |Y - mean Y|^2.
    """

    relative_mse: float
    explained: float

    @property
    def bits_saved(self) -> float:
        """Compute the bits per number that the prediction saves, -log4(relative MSE): an ideal
        quantiser of a Gaussian would need these bits for the same error."""
        return float(-np.log(max(self.relative_mse, TINY)) / np.log(4.0))


@jax.jit
def _products(
    x: Float[Array, "N I"], y: Float[Array, "N O"], keep: Float[Array, " N"]
) -> tuple[Array, Array, Array]:
    """Compute the moments of one chunk in float32; `keep` is 1 for rows that count, else 0."""
    ones = jnp.ones((x.shape[0], 1), jnp.float32)
    xa = jnp.concatenate([x.astype(jnp.float32), ones], axis=1) * keep[:, None]
    y = y.astype(jnp.float32) * keep[:, None]
    times = functools.partial(jnp.einsum, "ni,nj->ij", precision=jax.lax.Precision.HIGHEST)
    return times(xa, xa), times(xa, y), (y * y).sum(0)


def add(
    total: Moments | None,
    x: Float[Array | np.ndarray, "N I"],
    y: Float[Array | np.ndarray, "N O"],
    keep: Bool[Array | np.ndarray, " N"] | None = None,
) -> Moments:
    """Add the rows of one chunk to moments.

    A chunk's products are summed in float32, and chunks in float64. So a chunk should have a few
    thousand rows at most.

    Args:
        total: the moments so far; None where there are no rows yet.
        x: inputs.
        y: outputs.
        keep: the rows that count; None: all.

    Returns:
        The moments with these rows.
    """
    keep = jnp.ones(x.shape[0], jnp.float32) if keep is None else jnp.asarray(keep, jnp.float32)
    products = _products(jnp.asarray(x), jnp.asarray(y), keep)
    moments = Moments(*(np.asarray(product, np.float64) for product in products))
    if total is None:
        return moments
    return Moments(total.xx + moments.xx, total.xy + moments.xy, total.yy + moments.yy)


def _damped(xx: Matrix, damping: float) -> Matrix:
    """Add `damping` times the mean of a matrix's diagonal to its diagonal."""
    return xx + damping * np.mean(np.abs(np.diag(xx))) * np.eye(len(xx))


def _solve(a: Matrix, b: Matrix) -> Matrix:
    """Solve a x = b for a symmetric a. If a is singular, give the solution of least norm."""
    try:
        factor = np.linalg.cholesky(a)
    except np.linalg.LinAlgError:
        return np.linalg.pinv(a, hermitian=True) @ b
    return np.linalg.solve(factor.T, np.linalg.solve(factor, b))


def _centred(moments: Moments) -> tuple[Matrix, Matrix]:
    """Compute the covariance of X and the covariance of X with Y, both times the number of rows."""
    x_sums, y_sums = moments.xx[-1, :-1], moments.xy[-1]  # the products with the column of ones
    xx = moments.xx[:-1, :-1] - np.outer(x_sums, x_sums) / moments.rows
    xy = moments.xy[:-1] - np.outer(x_sums, y_sums) / moments.rows
    return xx, xy


def ridge(
    moments: Moments, damping: float = 1e-3, intercept: bool = True, centred: bool = False
) -> tuple[Matrix, Matrix]:
    """Find the W and b that minimise |Xa [W; b] - Y|^2 plus damping.

    The released rule adds `damping` times the mean of C's diagonal to every diagonal entry of C =
    Xa^T Xa. The column of ones counts in that mean, and the intercept is damped too. So the damping
    grows with the square of an offset of X. Qwen's keys have offsets of 50 times their spread: with
    so much damping W would stay near 0. `centred` subtracts the means of X and Y first, which
    removes the offsets.

    Args:
        moments: of X and Y.
        damping: relative to the mean of the diagonal.
        intercept: whether there is a b; with `centred` there always is.
        centred: subtract the means of X and Y, and fit b afterwards.

    Returns:
        W [I, O] and b [O], float64.
    """
    if centred:
        xx, xy = _centred(moments)
        weight = _solve(_damped(xx, damping), xy)
        return weight, refit_bias(moments, weight)
    if not intercept:
        weight = _solve(_damped(moments.xx[:-1, :-1], damping), moments.xy[:-1])
        return weight, np.zeros(weight.shape[1])
    solution = _solve(_damped(moments.xx, damping), moments.xy)
    return solution[:-1], solution[-1]


def low_rank(
    moments: Moments, rank: int, damping: float = 1e-3, centred: bool = True
) -> tuple[Matrix, Matrix, Matrix]:
    """Fit Y ~ (X A) B + b by reduced-rank regression: the ridge fit X W, projected on the leading
    eigenvectors of its covariance.

    Args:
        moments: of X and Y.
        rank: R.
        damping: as in `ridge`.
        centred: subtract the mean of X, and fit b afterwards; else b is the mean of Y, as in the
            released code.

    Returns:
        A [I, R], B [R, O] and b [O], float64.

    Raises:
        ValueError: for a rank that is not 1 to O.
    """
    if not 1 <= rank <= moments.xy.shape[1]:
        raise ValueError(f"rank={rank}; 1 to {moments.xy.shape[1]} are possible")
    xx, xy = _centred(moments)
    if not centred:
        xx = moments.xx[:-1, :-1]
    fit = _solve(_damped(xx, damping), xy)
    # Y^T X W is the covariance of X W, but for the damping. `eigh` sorts eigenvalues upwards.
    _, vectors = np.linalg.eigh(xy.T @ fit)
    leading = vectors[:, ::-1][:, :rank]
    down, up = fit @ leading, leading.T
    bias = refit_bias(moments, down @ up) if centred else moments.xy[-1] / moments.rows
    return down, up, bias


def refit_bias(moments: Moments, weight: Matrix) -> Matrix:
    """Compute the bias [O] for which the mean error of X weight + bias is zero. Rounding a weight
    [I, O] after the fit shifts that mean."""
    return (moments.xy[-1] - moments.xx[-1, :-1] @ weight) / moments.rows


def score(moments: Moments, weight: Matrix, bias: Matrix) -> Score:
    """Measure Y ~ X weight + bias on the rows that the moments were taken from, for a weight [I, O]
    and a bias [O]."""
    solution = np.concatenate([weight, bias[None]])  # S [I+1, O]
    energy = moments.yy.sum()
    # |Y - Xa S|^2 = |Y|^2 - 2 <S, Xa^T Y> + <S, Xa^T Xa S>
    error = energy - 2 * (solution * moments.xy).sum() + (solution * (moments.xx @ solution)).sum()
    spread = energy - (moments.xy[-1] ** 2).sum() / moments.rows  # |Y - mean Y|^2
    return Score(
        relative_mse=float(error / max(energy, TINY)),
        explained=float(1 - error / max(spread, TINY)),
    )


def _group_range(weight: Matrix) -> tuple[Matrix, Matrix]:
    """Choose scale and minimum [O] for the 4-bit codes of one group of inputs [g, O]. Both are
    rounded to bfloat16, as they are stored. The range always contains 0."""
    low = np.minimum(weight.min(0), 0).astype(jnp.bfloat16).astype(np.float64)
    scale = ((np.maximum(weight.max(0), 0) - low) / CODES).astype(jnp.bfloat16).astype(np.float64)
    return np.where(
        scale > 0, scale, 1.0
    ), low  # a group of zeros has scale 1, so that nothing is divided by 0


def gptq(moments: Moments, weight: Matrix, group: int, damping: float = 1e-2) -> dict[str, Matrix]:
    """Round a weight to 4 bits by GPTQ's rule (arXiv 2210.17323).

    Inputs are rounded one by one. The weights of the inputs that are not yet rounded are changed so
    that they compensate the rounding error. The change follows from the Cholesky factor of the
    inverse covariance of X. GPTQ takes X^T X; the covariance is right here, because the bias is
    fitted again afterwards (`refit_bias`).

    Args:
        moments: of X and Y.
        weight: [I, O].
        group: inputs that share a scale; it divides I.
        damping: of the covariance, relative to the mean of its diagonal.

    Returns:
        "codes" [I, O], and their "scale" and "low" [I / group, O].

    Raises:
        ValueError: for a group that does not divide the inputs.
    """
    inputs = weight.shape[0]
    if inputs % group:
        raise ValueError(f"group={group} does not divide {inputs} inputs")
    covariance, _ = _centred(moments)
    inverse = np.linalg.inv(_damped(covariance, damping))
    upper = np.linalg.cholesky(inverse).T
    weight = weight.copy()  # changed below
    codes = np.zeros(weight.shape, np.uint32)
    scales, lows = [], []
    for i in range(inputs):
        if i % group == 0:
            # The range of weights as they now are, changed by the rounding of the inputs before
            # them.
            scale, low = _group_range(weight[i : i + group])
            scales.append(scale)
            lows.append(low)
        codes[i] = np.clip(np.round((weight[i] - lows[-1]) / scales[-1]), 0, CODES)
        error = (weight[i] - (codes[i] * scales[-1] + lows[-1])) / upper[i, i]
        weight[i:] -= upper[i, i:, None] * error[None]
    return {"codes": codes, "scale": np.stack(scales), "low": np.stack(lows)}


# --- The two-layer predictor


def _start(key: Array, inputs: int, outputs: int) -> dict[str, Array]:
    """Draw the weights that training begins with. Those of the first layer have variance 1 /
    inputs. Those of the last layer are zero, so that the first prediction is the mean of the
    outputs."""
    sizes = predictor_shapes("mlp", inputs, outputs)
    start = {name: jnp.zeros(shape, jnp.float32) for name, shape in sizes.items()}
    down = jax.random.normal(key, sizes["down"], jnp.float32) * inputs**-0.5
    return start | {"gain": jnp.ones(sizes["gain"], jnp.float32), "down": down}


@functools.partial(jax.jit, static_argnames="steps")
def _train(
    key: Array, x: Float[Array, "N I"], y: Float[Array, "N O"], steps: int
) -> dict[str, jax.Array]:
    """Train the predictor of standardised outputs y. The arguments are those of `train_mlp`."""
    start_key, order_key = jax.random.split(key)
    optimizer = optax.adam(optax.cosine_decay_schedule(PEAK_RATE, steps))
    start = _start(start_key, x.shape[1], y.shape[1])

    def loss(weights, x, y):
        return ((predict("mlp", weights, x) - y) ** 2).mean()

    def step(state, key):
        weights, optimizer_state = state
        rows = jax.random.randint(key, (min(BATCH, x.shape[0]),), 0, x.shape[0])
        with jax.numpy_dtype_promotion("standard"):  # optax mixes float32 and weak types
            gradient = jax.grad(loss)(weights, x[rows], y[rows])
            update, optimizer_state = optimizer.update(gradient, optimizer_state)
            return (optax.apply_updates(weights, update), optimizer_state), None

    with jax.numpy_dtype_promotion("standard"):
        state = (start, optimizer.init(start))
        (weights, _), _ = jax.lax.scan(step, state, jax.random.split(order_key, steps))
        return weights


def train_mlp(
    key: Array, x: Float[np.ndarray, "N I"], y: Float[np.ndarray, "N O"], steps: int
) -> dict[str, np.ndarray]:
    """Train an `mlp` predictor. Outputs are standardised for training and scaled back afterwards,
    so that one learning rate suits outputs of any size.

    Args:
        key: of the first weights and of the order of rows.
        x: inputs.
        y: outputs.
        steps: of Adam, with BATCH rows each.

    Returns:
        The predictor's constants, float32.
    """
    mean = y.mean(0)
    # One for all outputs, so that large ones still weigh more.
    spread = max(float(y.std(0).mean()), 1e-20)
    weights = _train(key, jnp.asarray(x), jnp.asarray((y - mean) / spread), steps)
    out: dict[str, np.ndarray] = {name: np.asarray(a) for name, a in weights.items()}
    return out | {
        "up": out["up"] * np.float32(spread),
        "bias": out["bias"] * np.float32(spread) + mean,
    }


# --- One predictor, and one layer


def cast(constants: dict, dtype) -> dict[str, jax.Array]:
    """Give constants the dtypes in which a model of compute dtype `dtype` holds them."""
    return {name: jnp.asarray(a, CONSTANT_DTYPES.get(name, dtype)) for name, a in constants.items()}


def fit_linear(
    layer: AquaLayer, moments: Moments, recipe: Recipe, dtype
) -> tuple[dict, np.ndarray, np.ndarray]:
    """Fit a predictor of kind "linear", "low_rank" or "int4", all of which multiply by one matrix.
    If the weight is rounded, to `dtype` or to 4 bits, the bias is fitted after the rounding.

    Args:
        layer: its `predictor` is the kind, its `rank` that of "low_rank".
        moments: of inputs and outputs.
        dtype: the model's compute dtype.

    Returns:
        The constants, and the rounded weight [I, O] and the bias [O] that they represent, float64.
    """
    inputs, outputs = moments.xy.shape[0] - 1, moments.xy.shape[1]

    def rounded(a: Matrix) -> Matrix:
        return np.asarray(jnp.asarray(a, dtype), np.float64)

    if layer.predictor == "low_rank":
        down, up, _ = low_rank(moments, layer.rank, recipe.damping, recipe.centred)
        parts = {"down": rounded(down), "up": rounded(up)}
        weight = parts["down"] @ parts["up"]
    elif layer.predictor == "int4":
        groups = predictor_shapes("int4", inputs, outputs)["scale"][0]
        group = inputs // groups  # inputs that share a scale
        exact, _ = ridge(moments, recipe.damping, centred=recipe.centred)
        parts = gptq(moments, exact, group)
        weight = parts["codes"] * np.repeat(parts["scale"], group, axis=0) + np.repeat(
            parts["low"], group, axis=0
        )
        parts["codes"] = np.asarray(pack_nibbles(jnp.asarray(parts["codes"])))
    else:
        exact, bias = ridge(moments, recipe.damping, centred=recipe.centred)
        weight = rounded(exact)
        parts = {"weight": weight}
        if dtype == jnp.float32:
            # Rounding to float32 shifts the mean error by nothing that counts. So the bias of
            # `ridge` is kept, which the released rule damps.
            return (
                {"weight": weight.astype(np.float32), "bias": bias.astype(np.float32)},
                weight,
                bias,
            )
    bias = refit_bias(moments, weight)
    parts = parts | {"bias": bias}
    constants = {
        name: a if a.dtype == np.uint32 else a.astype(np.float32) for name, a in parts.items()
    }
    return constants, weight, bias


def _measured(constants: dict, inputs, y: np.ndarray, span: range) -> Score:
    """Measure an MLP on the sequences of `span`. Moments do not suffice for its errors, so that it
    is evaluated."""
    error = sum(float(((predict("mlp", constants, inputs(i)) - y[i]) ** 2).sum()) for i in span)
    rows = y[span.start : span.stop]
    energy = float((rows**2).sum())
    spread = float(((rows - rows.mean((0, 1))) ** 2).sum())
    return Score(relative_mse=error / energy, explained=1 - error / spread)


def _totals(inputs, y: np.ndarray, span: range) -> Moments:
    """Sum the moments of the sequences of `span`."""
    total = add(None, inputs(span[0]), y[span[0]])
    for i in span[1:]:
        total = add(total, inputs(i), y[i])
    return total


def _fit_source(
    layer: AquaLayer, inputs, y: np.ndarray, recipe: Recipe, dtype, seed: int
) -> tuple[dict, dict]:
    """Fit one predictor.

    Args:
        layer: its spec.
        inputs: inputs(i) gives the inputs [n, I] of sequence i.
        y: the outputs of all sequences, [N, n, O].
        dtype: the model's compute dtype.
        seed: of an MLP's first weights.

    Returns:
        The predictor's constants and measures.
    """
    train = recipe.training(len(y))
    # The sequences that the predictor is fitted to, and those that are held out, if any.
    spans = [span for span in (range(train), range(train, len(y))) if span]
    if layer.predictor == "mlp":
        rows = np.concatenate([np.asarray(inputs(i), np.float32) for i in spans[0]])
        constants = train_mlp(
            jax.random.key(seed), rows, y[:train].reshape(-1, y.shape[-1]), recipe.mlp_steps
        )
        scores = [_measured(cast(constants, dtype), inputs, y, span) for span in spans]
    else:
        totals = [_totals(inputs, y, span) for span in spans]
        constants, weight, bias = fit_linear(layer, totals[0], recipe, dtype)
        scores = [score(total, weight, bias) for total in totals]
    fitted, *held_out = scores
    measures = {
        "relative_mse": fitted.relative_mse,
        "explained": fitted.explained,
        "bits_saved": fitted.bits_saved,
    }
    if held_out:
        measures["held_out_mse"] = held_out[0].relative_mse
    return constants, measures


@functools.partial(jax.jit, static_argnames=("layer", "source"))
def _reconstruct(layer: AquaLayer, source: str, constants, x, carry, keys):
    """Compute what the cache will hold of one sequence [n, W], tile by tile, in the carry's
    dtype."""
    codec = layer.codec(source).build(x.shape[-1])
    tiles = jax.tree.map(lambda a: a.reshape(-1, layer.unit, a.shape[-1]), (x, carry, keys))

    def reconstruct_tile(tile):
        _, recon = encode_source(layer, codec, source, {source: constants}, *tile)
        return recon

    return jax.lax.map(reconstruct_tile, tiles).reshape(x.shape)


def _inputs(names: str, keys: np.ndarray, values: np.ndarray, i: int) -> jax.Array:
    """Give the inputs [n, I] of a predictor for sequence i."""
    return predictor_inputs(names, jnp.asarray(keys[i]), jnp.asarray(values[i]))


def _cache_inputs(
    exact: np.ndarray, below: Pair, keys: np.ndarray, dtype, i: int
) -> tuple[Array, dict[str, Array], Array]:
    """Give the arrays that `encode_source` takes for sequence i: one source, the carry and the keys
    of this layer."""
    carry = {name: jnp.asarray(below[name][i], dtype) for name in ("k", "v")}
    return jnp.asarray(exact[i]), carry, jnp.asarray(keys[i], dtype)


@functools.partial(jax.jit, static_argnames=("layer", "source"))
def _missed(layer: AquaLayer, source: str, constants, x, carry, keys):
    """Compute the predictor's error on one sequence [n, W], float32."""
    return missed(layer, source, {source: constants}, x, carry, keys)


def fit_layer(
    layer: AquaLayer,
    exact: Pair,
    below: Pair,
    recipe: Recipe,
    dtype,
    exact_below: Pair,
    seed: int = 0,
    costs: dict[str, Matrix] | None = None,
) -> tuple[dict, Pair, dict]:
    """Fit one layer.

    Args:
        layer: with codecs whose sizes are known (`AquaLayer.sized`).
        exact: keys and values of this layer.
        below: the reconstructions of the layer below for the same tokens.
        dtype: the model's compute dtype.
        exact_below: the exact keys and values of the layer below, used only where `recipe.clean` is
            set.
        seed: of an MLP's first weights.
        costs: for each source that is coded by a transform, the cost of its errors (`costs_of` of
            kvqjax.calibrate.klt).

    Returns:
        The layer's constants, reconstructions and measures.
    """
    constants, recon, report = {}, {}, {}
    seen_below = exact_below if recipe.clean else below
    # Keys come first: the predictor of values sees the keys of this layer.
    for source in ("k", "v"):
        constants[source], report[source] = {}, {}
        if source == "k":
            seen_keys = seen_below["k"]
        else:
            seen_keys = exact["k"] if recipe.clean else recon["k"]
        if layer.inputs(source) != "none":
            inputs = functools.partial(_inputs, layer.inputs(source), seen_keys, seen_below["v"])
            constants[source], report[source] = _fit_source(
                layer, inputs, exact[source], recipe, dtype, seed
            )
        elif isinstance(layer.codec(source), Centred):
            constants[source] = {
                "mean": exact[source].mean((0, 1), dtype=np.float64).astype(np.float32)
            }
        # A cache only has reconstructions, whatever predictors were fitted to. For keys, this
        # layer's keys are unused.
        inputs_of = functools.partial(
            _cache_inputs, exact[source], below, recon.get("k", below["k"]), dtype
        )
        if isinstance(layer.codec(source), Klt):
            # A transform is fitted to the predictor's errors, which it codes.
            predictor, train = cast(constants[source], dtype), recipe.training(len(exact[source]))
            residuals = [_missed(layer, source, predictor, *inputs_of(i)) for i in range(train)]
            needs = layer.needs(source, exact[source].shape[-1])
            assert costs is not None, f"a transform of {source} needs to know what its errors cost"
            constants[source] |= klt.constants_of(jnp.stack(residuals), costs[source], needs)
        fixed = cast(constants[source], dtype)
        out = np.empty(exact[source].shape, np.float32)
        for i in range(len(out)):
            out[i] = _reconstruct(layer, source, fixed, *inputs_of(i))
        recon[source] = out
        error = ((out - exact[source]) ** 2).sum() / max((exact[source] ** 2).sum(), 1e-30)
        report[source]["reconstruction_mse"] = float(error)
    return constants, recon, report
