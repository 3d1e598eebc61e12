"""KVQuant's offline constants from calibration text (arXiv 2401.18079, sections 3.1 to 3.5), in two passes.

Pass 1 finds each key channel's thresholds, percentiles of its entries. They are interpolated exactly, from the r
largest and smallest entries of each channel.

Pass 2 normalises keys by these thresholds and values by their own token. It adds every entry that is no outlier to its
layer's histogram, with the weight F s^2: s is the half range, which turns normalised errors into errors of the cached
vectors. K-means on the histograms gives the signposts.

Nothing larger than one sequence's activations and gradients is held, and the state between two sequences is small
enough to be kept on disk. Attention sinks are left out of both passes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_for
from kvqjax.calibrate import kmeans
from kvqjax.calibrate.activations import Captured, Sequences, of_captured, of_model
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.codecs.nuq import Nuq
from kvqjax.codecs.nuq_range import channel_range, excess, normalise_keys, stored_range, token_range
from kvqjax.codecs.nuq_table import fixed_signposts
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import KeysAndValues, Method
from kvqjax.model.loading import Model

__all__ = [
    "DEFAULT_LENGTH",
    "DEFAULT_SEQUENCES",
    "OBJECTIVES",
    "Extremes",
    "Recipe",
    "Tally",
    "calibrate",
    "empty_extremes",
    "fit",
    "fit_captured",
    "observe",
    "rank",
    "tally",
    "thresholds",
    "work",
]

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 16, 2048  # the paper's recipe
OBJECTIVES = ("fisher_s2", "fisher", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How thresholds and signposts are found.

    Attributes:
        objective: weighs the k-means by F s^2 ("fisher_s2", the paper's equation 3), by F alone ("fisher", the released
            code) or not at all ("none").
        sinks_in_thresholds: whether sinks count for the thresholds, as in the released code. For the k-means they never
            do.

    Raises:
        UserError: for another objective.
    """

    objective: str = "fisher_s2"
    sinks_in_thresholds: bool = False

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise UserError(f"objective {self.objective!r} is unknown; known: {', '.join(OBJECTIVES)}")


# --- Pass 1: percentiles of key channels, one sequence at a time


class Extremes(NamedTuple):
    """The r largest and the r smallest entries of each of W channels in L layers, outermost first."""

    top: Float[Array, "L W r"]
    bottom: Float[Array, "L W r"]


def _position(count: int, fraction: float) -> float:
    """Find where the upper threshold lies among `count` sorted entries, between two of them as in
    numpy.percentile."""
    return (1 - fraction / 2) * (count - 1)


def rank(count: int, fraction: float) -> int:
    """Count how many extreme entries at each end the percentiles of `count` entries need, of which `fraction` are
    outliers, half of them at each end."""
    return count - math.floor(_position(count, fraction))


def empty_extremes(layers: int, width: int, r: int) -> Extremes:
    return Extremes(jnp.full((layers, width, r), -jnp.inf), jnp.full((layers, width, r), jnp.inf))


@jax.jit
def observe(extremes: Extremes, x: Float[Array, "L T W"]) -> Extremes:
    """Take T more tokens into the extremes."""
    channels = jnp.swapaxes(x, 1, 2)

    def largest(old, new):
        rows = jnp.concatenate([old, new], -1).reshape(-1, old.shape[-1] + new.shape[-1])
        return jax.lax.top_k(rows, old.shape[-1])[0].reshape(old.shape)

    return Extremes(largest(extremes.top, channels), -largest(-extremes.bottom, -channels))


def thresholds(extremes: Extremes, count: int, fraction: float) -> tuple[Float[Array, "L W"], Float[Array, "L W"]]:
    """Compute the upper and the lower threshold of each channel.

    Args:
        extremes: of all entries; there are at least `rank(count, fraction)`.
        count: how many entries a channel has.
        fraction: of them that are outliers, half at each end.

    Returns:
        The upper and the lower thresholds.
    """
    position = _position(count, fraction)
    inner = count - 1 - math.floor(position)  # index, from the outside, of the entry below the percentile
    share = position - math.floor(position)

    def between(sorted_entries):
        below, above = sorted_entries[..., inner], sorted_entries[..., max(inner - 1, 0)]
        return below + share * (above - below)

    return between(extremes.top), between(extremes.bottom)


# --- Pass 2: weighted histograms, every layer of a run at once


class Tally(NamedTuple):
    """Pass 2's sums over the layers of one run; `outliers` and `clipped` count key entries beyond the thresholds and
    those of them for which no slot is left."""

    k: kmeans.Histogram
    v: kmeans.Histogram
    outliers: Float[Array, " L"]
    clipped: Float[Array, " L"]


def _weigh(fisher: Float[Array, "T W"] | None, scale: Float[Array, "#T #W"], objective: str):
    """Weigh each normalised entry by F s^2 or F; None stands for 1."""
    if fisher is None or objective == "none":
        return None
    return fisher * scale**2 if objective == "fisher_s2" else fisher


def _points(u, weight, keep: Bool[Array, "T W"]) -> kmeans.Histogram:
    weight = jnp.ones_like(u) if weight is None else jnp.broadcast_to(weight, u.shape)
    return kmeans.histogram(u.ravel(), weight.ravel(), keep.ravel())


def _keys(slots: int, objective: str, x: Float[Array, "T W"], fisher, bounds):
    """Make the histogram of one layer's keys inside their thresholds. Also count those outside, and those of them that
    find no slot."""
    u, outside = normalise_keys(bounds, x)
    scale = channel_range(bounds)[1][None]
    hist = _points(u, _weigh(fisher, scale, objective), ~outside & (scale > 0))
    return hist, outside.sum().astype(jnp.float32), excess(slots, bounds, x).sum().astype(jnp.float32)


def _values(slots: int, dtype: str, objective: str, x: Float[Array, "T W"], fisher) -> kmeans.Histogram:
    """Make the histogram of one layer's values inside their token's range, normalised as the codec will."""
    high, low, _ = token_range(x, slots // 2)
    centre, scale = (a.astype(jnp.float32) for a in stored_range(high, low, dtype))
    inside = (x <= high) & (x >= low) & (scale > 0)
    return _points((x - centre) / jnp.where(scale > 0, scale, 1.0), _weigh(fisher, scale, objective), inside)


@functools.partial(jax.jit, static_argnames=("key_slots", "value_slots", "dtype", "objective"))
def tally(
    x: tuple[Float[Array, "L T W"], ...],
    bounds: dict[str, Float[Array, "L W"]],
    *,
    key_slots: int,
    value_slots: int,
    dtype: str,
    objective: str,
) -> Tally:
    """Compute the sums that one sequence adds for a run of layers.

    Args:
        x: keys, values and, unless the objective is "none", their F.
        bounds: the keys' thresholds, "upper" and "lower".
        key_slots: outlier slots of a token's keys.
        value_slots: those of its values.
        dtype: that of the values' stored scales.
        objective: as in `Recipe`.

    Returns:
        The sums.
    """

    def layer(xs):
        (k, v, *fisher), bounds = xs
        k_fisher, v_fisher = fisher or (None, None)
        k_hist, outliers, clipped = _keys(key_slots, objective, k, k_fisher, bounds)
        return Tally(k_hist, _values(value_slots, dtype, objective, v, v_fisher), outliers, clipped)

    return jax.lax.map(layer, (x, bounds))


# --- Both passes over all runs of layers


@dataclasses.dataclass(frozen=True)
class _Task:
    """One calibration: what is measured, on what. `specs` has a run of layers' (key, value) codecs, None for other
    runs."""

    data: Sequences
    recipe: Recipe
    sinks: int
    runs: tuple[RunLayout, ...]
    specs: tuple[tuple[Nuq, Nuq] | None, ...]
    rope: str

    @property
    def entries(self) -> int:
        """Count the entries of a channel that pass 1 sees."""
        skipped = 0 if self.recipe.sinks_in_thresholds else self.sinks
        return self.data.count * (self.data.length - skipped)


def _codecs(spec) -> tuple[Nuq, Nuq] | None:
    """Give the (key, value) codecs of a layer that KVQuant calibrates; None for other layers. Raises UserError for
    other pairs of KVQuant's codecs."""
    key, value = (spec.key, spec.value) if isinstance(spec, KeysAndValues) else (None, None)
    if not (isinstance(key, Nuq) or isinstance(value, Nuq)):
        return None
    if isinstance(key, Nuq) and isinstance(value, Nuq) and (key.per, value.per) == ("channel", "token"):
        return key, value
    raise UserError("KVQuant's calibration needs keys quantised per channel and values per token, both by KVQuant")


def _prepare(data: Sequences, method: Method, recipe: Recipe) -> _Task:
    layers: tuple[Any, ...] = method.layers(data.shape)
    runs = runs_for(method, data.shape)
    specs = tuple(_codecs(layers[run.first]) for run in runs)
    ropes = {layers[run.first].rope for run, pair in zip(runs, specs, strict=True) if pair}
    if len(ropes) != 1:
        kinds = f"{len(ropes)} kinds of keys (before and after RoPE)" if ropes else "no layer of KVQuant"
        raise UserError(f"{method}: has {kinds}; one is wanted for calibration")
    size, least = (data.count, data.length), method.sinks + 1
    if data.length <= least:
        raise UserError(f"calibration tokens are {size}; wanted [sequences, more than {least} tokens]")
    return _Task(data, recipe, method.sinks, runs, specs, ropes.pop())


def _fresh_state(task: _Task) -> dict[str, Any]:
    shape = task.data.shape
    r = max(rank(task.entries, pair[0].outliers) for pair in task.specs if pair)
    extremes = empty_extremes(shape.num_layers, shape.kv_width, r)
    shapes = [_tally_shape(run.count) if pair else {} for run, pair in zip(task.runs, task.specs, strict=True)]
    return {"done": np.int64(0), "extremes": extremes, "tallies": shapes}


def _tally_shape(layers: int) -> Tally:
    row, bins = jnp.zeros(layers), jnp.zeros((layers, kmeans.BINS))
    hist = kmeans.Histogram(bins, bins, row, bins, bins)
    return Tally(hist, hist, row, row)


def _bounds(task: _Task, run: RunLayout, pair: tuple[Nuq, Nuq], extremes) -> dict:
    """Compute the key thresholds of one run, [L_run, W]."""
    of_run = jax.tree.map(lambda a: a[run.first : run.first + run.count], extremes)
    upper, lower = thresholds(of_run, task.entries, pair[0].outliers)
    return {"upper": upper, "lower": lower}


def _turn(task: _Task, source: str, x):
    """Turn keys or values of all layers [L, B, T, W] to the frame of each run's codecs."""
    frames = [(slice(run.first, run.first + run.count), run.wiring.maps.frame) for run in task.runs]
    return jnp.concatenate([x[at] if frame is None else frame.turn({}, source, x[at]) for at, frame in frames])


def _first_pass(task: _Task, state: dict, number: int) -> dict:
    k = task.data.read(number, task.rope, False, functools.partial(_turn, task)).k[:, 0]
    skipped = 0 if task.recipe.sinks_in_thresholds else task.sinks
    return state | {"extremes": observe(Extremes(*state["extremes"]), k[:, skipped:])}


def _second_pass(task: _Task, state: dict, number: int) -> dict:
    objective = task.recipe.objective
    activations = task.data.read(number, task.rope, objective != "none", functools.partial(_turn, task))
    tallies = []
    for run, pair, old in zip(task.runs, task.specs, state["tallies"], strict=True):
        if pair is None:
            tallies.append(old)
            continue
        arrays = tuple(x[run.first : run.first + run.count, 0, task.sinks :] for x in activations if x is not None)
        bounds = _bounds(task, run, pair, state["extremes"])
        slots = dict(zip(("key_slots", "value_slots"), (c.slot_count(arrays[0].shape[-1]) for c in pair), strict=True))
        new = tally(arrays, bounds, **slots, dtype=pair[1].dtype, objective=objective)
        tallies.append(jax.tree.map(jnp.add, old, new))
    return state | {"tallies": tallies}


def _constants(task: _Task, state: dict) -> tuple[tuple[dict, ...], list[dict]]:
    """Collect the constants of every run, and for each layer the shares of key entries that lie beyond the thresholds
    and that find no slot."""
    constants, reports = [], []
    for run, pair, sums in zip(task.runs, task.specs, state["tallies"], strict=True):
        if pair is None:
            constants.append({})
            continue
        groups = {"k": _bounds(task, run, pair, state["extremes"]), "v": {}}
        for name, spec, hist in zip("kv", pair, (sums.k, sums.v), strict=True):
            groups[name] |= _tables(spec, hist)
        seen = task.data.count * (task.data.length - task.sinks) * task.data.shape.kv_width
        shares = {"key_outliers": (sums.outliers / seen).tolist(), "key_clipped": (sums.clipped / seen).tolist()}
        constants.append(groups)
        reports.append({"first_layer": run.first} | shares)
    return tuple(constants), reports


def _tables(spec: Nuq, hist: kmeans.Histogram) -> dict:
    """Find the signposts and Q-Norm of one run's keys or values, as far as the codec asks for them."""
    if spec.datatype == "nuq":
        tables = {"signposts": kmeans.weighted_kmeans(hist, 2**spec.bits)}
        table = tables["signposts"]
    else:
        tables, fixed = {}, jnp.asarray(fixed_signposts(spec.datatype, spec.bits))
        table = jnp.broadcast_to(fixed[None], (hist.energy.shape[0], fixed.size))
    return tables | ({"norm": kmeans.q_norm(hist, table)} if spec.q_norm else {})


# --- The doors


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Count the floating point operations of `calibrate` on `count` sequences of `length` tokens: those of two exact
    passes, and of the second one's gradients, which cost two passes more."""
    return 4 * count * prompt_operations(model.config, 0, length)


def calibrate(model: Model, method: Method, tokens: Int[np.ndarray, "N T"], **options) -> Artifact:
    """Constants of `method` for `model` from N sequences of T tokens; `options` as in `fit`."""
    return fit(of_model(model, np.asarray(tokens)), method, **options)


def fit_captured(data: Captured, method: Method, recipe: Recipe | None = None, **options) -> Artifact:
    """Constants of `method` from tensors of any model; `options` as in `fit`. Without gradients every entry weighs the
    same, unless the recipe says otherwise."""
    recipe = recipe or Recipe(objective="none" if data.key_gradients is None else "fisher_s2")
    if data.key_gradients is None and recipe.objective != "none":
        raise UserError(f"objective {recipe.objective!r} needs key_gradients and value_gradients")
    return fit(of_captured(data, method), method, recipe=recipe, **options)


def fit(
    data: Sequences,
    method: Method,
    *,
    recipe: Recipe = Recipe(),
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda steps, total: None,
) -> Artifact:
    """Constants of `method` from sequences of any model. `state` names a file that keeps the progress after every
    sequence: a run that was killed continues there. `advance(steps, total)` is told each step."""
    task, count = _prepare(data, method, recipe), data.count
    owner = identity(data.fingerprint, repr(method), repr(recipe), *data.parts)

    def step(progress):
        visit = _first_pass if progress["done"] < count else _second_pass
        return visit(task, progress, int(progress["done"]) % count)

    progress = stepped(_fresh_state(task), 2 * count, step, state, owner, advance)
    constants, reports = _constants(task, progress)
    about = {"sequences": count, "tokens": data.length, **dataclasses.asdict(recipe), "runs": reports}
    return Artifact(method, constants, data.fingerprint, about)
