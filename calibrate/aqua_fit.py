"""One layer of AQUA-KV's calibration: fit the predictors of keys and values, then reconstruct as the cache will."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax.calibrate.mlp import train_mlp
from kvqjax.calibrate.moments import Moments, Score, add, gptq, low_rank, refit_bias, ridge, score
from kvqjax.methods.papers.aqua import (
    PREDICTOR_DTYPES,
    AquaLayer,
    encode_source,
    predict,
    predictor_inputs,
    predictor_shapes,
)
from kvqjax.model.weight_codes import pack_nibbles

__all__ = ["MEASURES", "Pair", "Recipe", "cast", "fit_layer", "fit_linear"]

Pair = dict[str, np.ndarray]  # "k" and "v": [N, n, W] float32 on the host
MEASURES = ("relative_mse", "explained", "bits_saved", "held_out_mse", "reconstruction_mse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """`damping` of the ridge, on `centred` moments or as released (see `moments.ridge`); the last `held_out` share of
    the sequences only measures. `body_only` leaves out what the cache keeps exact (sinks, window). `clean` fits on the
    exact layer below (the paper's quantiser-agnostic ablation)."""

    damping: float = 1e-3
    centred: bool = True
    held_out: float = 0.125
    body_only: bool = True
    clean: bool = False
    mlp_steps: int = 2000

    def training(self, sequences: int) -> int:
        """How many of the sequences are fitted."""
        return max(1, sequences - int(sequences * self.held_out))


def cast(constants: dict, dtype) -> dict[str, jax.Array]:
    """Constants as a model of compute dtype `dtype` holds them."""
    return {name: jnp.asarray(a, PREDICTOR_DTYPES.get(name, dtype)) for name, a in constants.items()}


def fit_linear(layer: AquaLayer, moments: Moments, recipe: Recipe, dtype) -> tuple[dict, np.ndarray, np.ndarray]:
    """Constants of a predictor that is linear in effect, and the float64 weight and bias they stand for. A weight that
    was rounded, to `dtype` or to 4 bits, has its bias fitted afterwards."""
    inputs, outputs = moments.xy.shape[0] - 1, moments.xy.shape[1]
    rounded = lambda a: np.asarray(jnp.asarray(a, dtype), np.float64)  # noqa: E731
    if layer.predictor == "low_rank":
        down, up, _ = low_rank(moments, layer.rank, recipe.damping, recipe.centred)
        parts = {"down": rounded(down), "up": rounded(up)}
        weight = parts["down"] @ parts["up"]
    elif layer.predictor == "int4":
        size = inputs // predictor_shapes("int4", inputs, outputs)["scale"][0]
        parts = gptq(moments, ridge(moments, recipe.damping, centred=recipe.centred)[0], size)
        weight = parts["codes"] * np.repeat(parts["scale"], size, axis=0) + np.repeat(parts["low"], size, axis=0)
        parts["codes"] = np.asarray(pack_nibbles(jnp.asarray(parts["codes"])))
    else:
        exact, bias = ridge(moments, recipe.damping, centred=recipe.centred)
        weight = rounded(exact)
        parts = {"weight": weight}
        if dtype == jnp.float32:  # the released rule damps the bias too
            return {"weight": weight.astype(np.float32), "bias": bias.astype(np.float32)}, weight, bias
    bias = refit_bias(moments, weight)
    parts = parts | {"bias": bias}
    return {name: a if a.dtype == np.uint32 else a.astype(np.float32) for name, a in parts.items()}, weight, bias


def _measured(constants: dict, inputs, y: np.ndarray, span: range) -> Score:
    """An MLP's errors on some sequences, from the data themselves."""
    error = sum(float(((predict("mlp", constants, inputs(i)) - y[i]) ** 2).sum()) for i in span)
    own = y[span.start : span.stop]
    return Score(error / float((own**2).sum()), 1 - error / float(((own - own.mean((0, 1))) ** 2).sum()))


def _totals(inputs, y: np.ndarray, span: range) -> Moments:
    """Moments of the sequences of `span`, one after the other."""
    total = add(None, inputs(span[0]), y[span[0]])
    for i in span[1:]:
        total = add(total, inputs(i), y[i])
    return total


def _fit_source(layer: AquaLayer, inputs, y: np.ndarray, recipe: Recipe, dtype, seed: int) -> tuple[dict, dict]:
    """Constants of one predictor and its measures. `inputs(i)` are sequence i's predictor inputs [n, I]."""
    train = recipe.training(len(y))
    spans = [span for span in (range(train), range(train, len(y))) if span]
    if layer.predictor == "mlp":
        rows = np.concatenate([np.asarray(inputs(i), np.float32) for i in spans[0]])
        constants = train_mlp(jax.random.key(seed), rows, y[:train].reshape(-1, y.shape[-1]), recipe.mlp_steps)
        scores = [_measured(cast(constants, dtype), inputs, y, span) for span in spans]
    else:
        totals = [_totals(inputs, y, span) for span in spans]
        constants, weight, bias = fit_linear(layer, totals[0], recipe, dtype)
        scores = [score(total, weight, bias) for total in totals]
    found = {"relative_mse": scores[0].relative_mse, "explained": scores[0].explained}
    found |= {"bits_saved": scores[0].bits_saved}
    return constants, found | ({"held_out_mse": scores[1].relative_mse} if len(scores) > 1 else {})


@functools.partial(jax.jit, static_argnames=("layer", "source"))
def _reconstruct(layer: AquaLayer, source: str, constants, x, carry, keys):
    """What the cache will hold of one sequence [n, W], tile by tile, in the carry's dtype."""
    codec = (layer.key if source == "k" else layer.value).build(x.shape[-1])
    tiles = jax.tree.map(lambda a: a.reshape(-1, layer.unit, a.shape[-1]), (x, carry, keys))
    step = lambda tile: encode_source(layer, codec, source, {source: constants}, *tile)[1]  # noqa: E731
    return jax.lax.map(step, tiles).reshape(x.shape)


def _inputs(names: str, keys: np.ndarray, values: np.ndarray, i: int) -> jax.Array:
    """Predictor inputs of sequence i, [n, I]."""
    return predictor_inputs(names, jnp.asarray(keys[i]), jnp.asarray(values[i]))


def fit_layer(
    layer: AquaLayer, exact: Pair, below: Pair, recipe: Recipe, dtype, exact_below: Pair, seed: int = 0
) -> tuple[dict, Pair, dict]:
    """One layer's constants, reconstructions and measures. `exact` are its keys and values, `below` the reconstructions
    of the layer below for the same tokens, `exact_below` the exact ones (used by a clean fit only)."""
    constants, recon, report = {}, {}, {}
    seen = exact_below if recipe.clean else below
    for source in ("k", "v"):
        constants[source], report[source] = {}, {}
        keys = seen["k"] if source == "k" else (exact if recipe.clean else recon)["k"]
        if layer.inputs(source) != "none":
            inputs = functools.partial(_inputs, layer.inputs(source), keys, seen["v"])
            constants[source], report[source] = _fit_source(layer, inputs, exact[source], recipe, dtype, seed)
        elif "mean" in layer.needs(source, exact[source].shape[-1]):
            constants[source] = {"mean": exact[source].mean((0, 1), dtype=np.float64).astype(np.float32)}
        ready, own = cast(constants[source], dtype), recon.get("k", below["k"])
        out = np.empty(exact[source].shape, np.float32)
        for i in range(len(out)):
            carry = {name: jnp.asarray(below[name][i], dtype) for name in ("k", "v")}
            x, keys_now = jnp.asarray(exact[source][i]), jnp.asarray(own[i], dtype)
            out[i] = _reconstruct(layer, source, ready, x, carry, keys_now)
        recon[source] = out
        error = ((out - exact[source]) ** 2).sum() / max((exact[source] ** 2).sum(), 1e-30)
        report[source]["reconstruction_mse"] = float(error)
    return constants, recon, report
