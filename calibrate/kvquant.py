"""KVQuant's offline constants from calibration text (arXiv 2401.18079, sections 3.1 to 3.5), in two
passes.

Pass 1 finds two thresholds of each key channel, percentiles of the channel's entries. It keeps the
r largest and the r smallest entries of every channel, so that the percentiles are exact.

Pass 2 normalises keys by these thresholds, and values by the range of their token. Every entry that
is no outlier is added to its layer's histogram with the weight F s^2. F is the entry's Fisher
information (a squared gradient). The half range s turns an error of a normalised entry into an
error of the cached entry. K-means on the histograms gives the signposts, the levels to which codes
point.

Nothing larger than one sequence's activations and gradients is held, and the state between two
sequences is small enough to be kept on disk. Attention sinks are left out of both passes.
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
from kvqjax.cache.layout import RunLayout
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

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 16, 2048  # the paper's recipe
OBJECTIVES = ("fisher_s2", "fisher", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How thresholds and signposts are found.

    Attributes:
        objective: weighs the k-means by F s^2 ("fisher_s2", the paper's equation 3), by F alone
            ("fisher", the released code) or not at all ("none").
        sinks_in_thresholds: whether sinks count for the thresholds, as in the released code. They
            never count for the k-means.

    Raises:
        UserError: for another objective.
    """

    objective: str = "fisher_s2"
    sinks_in_thresholds: bool = False

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise UserError(
                f"objective {self.objective!r} is unknown; known: {', '.join(OBJECTIVES)}"
            )


# --- Pass 1: percentiles of key channels, one sequence at a time


class Extremes(NamedTuple):
    """The r largest and the r smallest entries of each of W channels in L layers, outermost
    first."""

    top: Float[Array, "L W r"]
    bottom: Float[Array, "L W r"]


def _position(count: int, fraction: float) -> float:
    """Compute the index of the upper threshold among `count` entries in ascending order. As in
    numpy.percentile it may lie between two entries."""
    return (1 - fraction / 2) * (count - 1)


def rank(count: int, fraction: float) -> int:
    """Count r, the extreme entries at each end that are needed to find the thresholds.

    Args:
        count: entries of a channel.
        fraction: of the entries that are outliers, half of them at each end.

    Returns:
        r: all entries beyond a threshold, and the one below it for the interpolation.
    """
    return count - math.floor(_position(count, fraction))


def empty_extremes(layers: int, width: int, r: int) -> Extremes:
    """Make the extremes of no tokens: any entry takes the place of these infinities."""
    return Extremes(jnp.full((layers, width, r), -jnp.inf), jnp.full((layers, width, r), jnp.inf))


@jax.jit
def observe(extremes: Extremes, x: Float[Array, "L T W"]) -> Extremes:
    """Update the extremes with T more tokens."""
    channels = jnp.swapaxes(x, 1, 2)

    def largest(old: Float[Array, "L W r"], new: Float[Array, "L W T"]) -> Float[Array, "L W r"]:
        rows = jnp.concatenate([old, new], -1).reshape(-1, old.shape[-1] + new.shape[-1])
        values, _ = jax.lax.top_k(rows, old.shape[-1])
        return values.reshape(old.shape)

    return Extremes(largest(extremes.top, channels), -largest(-extremes.bottom, -channels))


def thresholds(
    extremes: Extremes, count: int, fraction: float
) -> tuple[Float[Array, "L W"], Float[Array, "L W"]]:
    """Compute the upper and the lower threshold of each channel.

    Args:
        extremes: of all entries, at least `rank(count, fraction)` at each end.
        count: entries of a channel.
        fraction: of the entries that are outliers, half of them at each end.

    Returns:
        The upper and the lower thresholds.
    """
    position = _position(count, fraction)
    # Index of the entry inside the threshold; the outermost entry has 0.
    inner = count - 1 - math.floor(position)
    share = position - math.floor(position)

    def interpolated(outermost_first):
        inside, outside = outermost_first[..., inner], outermost_first[..., max(inner - 1, 0)]
        return inside + share * (outside - inside)

    return interpolated(extremes.top), interpolated(extremes.bottom)


# --- Pass 2: weighted histograms, every layer of a run at once


class Tally(NamedTuple):
    """Pass 2's sums for every layer of one run."""

    k: kmeans.Histogram
    v: kmeans.Histogram
    outliers: Float[Array, " L"]  # key entries beyond the thresholds
    clipped: Float[Array, " L"]  # outliers for which a token has no slot left


def _weigh(fisher: Float[Array, "T W"] | None, scale: Float[Array, "#T #W"], objective: str):
    """Compute the weight of each normalised entry, F s^2 or F, with half ranges s = `scale`. None
    means that all weights are 1."""
    if fisher is None or objective == "none":
        return None
    return fisher * scale**2 if objective == "fisher_s2" else fisher


def _points(u: Float[Array, "T W"], weight, keep: Bool[Array, "T W"]) -> kmeans.Histogram:
    """Make the histogram of the normalised entries u that `keep` marks."""
    weight = jnp.ones_like(u) if weight is None else jnp.broadcast_to(weight, u.shape)
    return kmeans.histogram(u.ravel(), weight.ravel(), keep.ravel())


def _keys(slots: int, objective: str, x: Float[Array, "T W"], fisher, bounds):
    """Make the histogram of one layer's key entries inside their thresholds. Also count the entries
    outside, and how many of these find no slot."""
    u, outside = normalise_keys(bounds, x)
    _, half_range = channel_range(bounds)
    scale = half_range[None]
    # A channel of range 0 has no error to be weighed.
    hist = _points(u, _weigh(fisher, scale, objective), ~outside & (scale > 0))
    outliers = outside.sum().astype(jnp.float32)
    clipped = excess(slots, bounds, x).sum().astype(jnp.float32)
    return hist, outliers, clipped


def _values(
    slots: int, dtype: str, objective: str, x: Float[Array, "T W"], fisher
) -> kmeans.Histogram:
    """Make the histogram of one layer's value entries inside the range of their token, normalised
    as the codec will."""
    high, low, _ = token_range(x, slots // 2)  # half of the outlier slots for each end
    centre, scale = (a.astype(jnp.float32) for a in stored_range(high, low, dtype))
    inside = (x <= high) & (x >= low) & (scale > 0)
    u = (x - centre) / jnp.where(scale > 0, scale, 1.0)
    return _points(u, _weigh(fisher, scale, objective), inside)


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
        value_slots: outlier slots of a token's values.
        dtype: of the values' stored scales.
        objective: as in `Recipe`.
    """

    def layer(xs):
        (k, v, *fisher), bounds = xs
        k_fisher, v_fisher = fisher or (None, None)
        k_hist, outliers, clipped = _keys(key_slots, objective, k, k_fisher, bounds)
        v_hist = _values(value_slots, dtype, objective, v, v_fisher)
        return Tally(k_hist, v_hist, outliers, clipped)

    return jax.lax.map(layer, (x, bounds))


# --- Both passes over all runs of layers


@dataclasses.dataclass(frozen=True)
class _Task:
    """One calibration: the data, and what is measured on them."""

    data: Sequences
    recipe: Recipe
    sinks: int
    runs: tuple[RunLayout, ...]
    # (key, value) codecs of each run; None for runs of other methods
    specs: tuple[tuple[Nuq, Nuq] | None, ...]
    rope: str  # whether keys are cached before RoPE ("pre") or after it ("post")

    @property
    def entries(self) -> int:
        """Count the entries of a channel that pass 1 sees."""
        skipped = 0 if self.recipe.sinks_in_thresholds else self.sinks
        return self.data.count * (self.data.length - skipped)


def _codecs(spec) -> tuple[Nuq, Nuq] | None:
    """Give the (key, value) codecs of a layer that KVQuant calibrates; None for other layers.
    Raises UserError for other pairs of KVQuant's codecs."""
    key, value = (spec.key, spec.value) if isinstance(spec, KeysAndValues) else (None, None)
    if not (isinstance(key, Nuq) or isinstance(value, Nuq)):
        return None
    if (
        isinstance(key, Nuq)
        and isinstance(value, Nuq)
        and (key.per, value.per) == ("channel", "token")
    ):
        return key, value
    raise UserError(
        "KVQuant's calibration needs keys quantised per channel and values per token, both by KVQuant"
    )


def _prepare(data: Sequences, method: Method, recipe: Recipe) -> _Task:
    """Describe one calibration. Raises UserError for a method without KVQuant's layers, or with two
    kinds of keys among them, and for sequences that are no longer than the sinks."""
    layers: tuple[Any, ...] = method.layers(data.shape)
    runs = runs_for(method, data.shape)
    specs = tuple(_codecs(layers[run.first]) for run in runs)
    ropes = {layers[run.first].rope for run, pair in zip(runs, specs, strict=True) if pair}
    if len(ropes) != 1:
        kinds = (
            f"{len(ropes)} kinds of keys (before and after RoPE)"
            if ropes
            else "no layer of KVQuant"
        )
        raise UserError(f"{method}: has {kinds}; one is wanted for calibration")
    size, least = (data.count, data.length), method.sinks + 1
    if data.length <= least:
        raise UserError(
            f"calibration tokens are {size}; wanted [sequences, more than {least} tokens]"
        )
    return _Task(data, recipe, method.sinks, runs, specs, ropes.pop())


def _fresh_state(task: _Task) -> dict[str, Any]:
    """Make the state before the first sequence. All layers keep the number of extremes of the layer
    that needs most."""
    shape = task.data.shape
    r = max(rank(task.entries, pair[0].outliers) for pair in task.specs if pair)
    extremes = empty_extremes(shape.num_layers, shape.kv_width, r)
    tallies = [
        _empty_tally(run.count) if pair else {}
        for run, pair in zip(task.runs, task.specs, strict=True)
    ]
    return {"done": np.int64(0), "extremes": extremes, "tallies": tallies}


def _empty_tally(layers: int) -> Tally:
    per_layer, bins = jnp.zeros(layers), jnp.zeros((layers, kmeans.BINS))
    hist = kmeans.Histogram(bins, bins, per_layer, bins, bins)
    return Tally(hist, hist, per_layer, per_layer)


def _bounds(task: _Task, run: RunLayout, pair: tuple[Nuq, Nuq], extremes) -> dict:
    """Compute the key thresholds of one run, [L_run, W]."""
    of_run = jax.tree.map(lambda a: a[run.first : run.first + run.count], extremes)
    upper, lower = thresholds(of_run, task.entries, pair[0].outliers)
    return {"upper": upper, "lower": lower}


def _turn(task: _Task, source: str, x):
    """Rotate keys or values of all layers [L, B, T, W] into the frame of each run's body."""
    turned = []
    for run in task.runs:
        of_run = x[run.first : run.first + run.count]
        frame = run.wiring.maps.frame
        turned.append(of_run if frame is None else frame.turn({}, source, of_run))
    return jnp.concatenate(turned)


def _first_pass(task: _Task, state: dict, number: int) -> dict:
    """Update the extremes with sequence `number`."""
    with_gradients = False
    # [L, T, W]
    k = task.data.read(number, task.rope, with_gradients, functools.partial(_turn, task)).k[:, 0]
    skipped = 0 if task.recipe.sinks_in_thresholds else task.sinks
    return state | {"extremes": observe(Extremes(*state["extremes"]), k[:, skipped:])}


def _second_pass(task: _Task, state: dict, number: int) -> dict:
    """Update the tallies with sequence `number`."""
    objective = task.recipe.objective
    activations = task.data.read(
        number, task.rope, objective != "none", functools.partial(_turn, task)
    )
    tallies = []
    for run, pair, old in zip(task.runs, task.specs, state["tallies"], strict=True):
        if pair is None:
            tallies.append(old)
            continue
        # Keys, values and their gradients, each [L_run, T, W]
        arrays = tuple(
            x[run.first : run.first + run.count, 0, task.sinks :]
            for x in activations
            if x is not None
        )
        key, value = pair
        width = arrays[0].shape[-1]
        new = tally(
            arrays,
            _bounds(task, run, pair, state["extremes"]),
            key_slots=key.slot_count(width),
            value_slots=value.slot_count(width),
            dtype=value.dtype,
            objective=objective,
        )
        tallies.append(jax.tree.map(jnp.add, old, new))
    return state | {"tallies": tallies}


def _constants(task: _Task, state: dict) -> tuple[tuple[dict, ...], list[dict]]:
    """Collect the constants of every run, and a report: for each layer the share of key entries
    beyond the thresholds, and the share of key entries that are beyond and find no slot."""
    constants, reports = [], []
    for run, pair, sums in zip(task.runs, task.specs, state["tallies"], strict=True):
        if pair is None:
            constants.append({})
            continue
        groups = {"k": _bounds(task, run, pair, state["extremes"]), "v": {}}
        for name, spec, hist in zip("kv", pair, (sums.k, sums.v), strict=True):
            groups[name] |= _tables(spec, hist)
        seen = task.data.count * (task.data.length - task.sinks) * task.data.shape.kv_width
        shares = {
            "key_outliers": (sums.outliers / seen).tolist(),
            "key_clipped": (sums.clipped / seen).tolist(),
        }
        constants.append(groups)
        reports.append({"first_layer": run.first} | shares)
    return tuple(constants), reports


def _tables(spec: Nuq, hist: kmeans.Histogram) -> dict:
    """Find the signposts and Q-Norm's constants of one run's keys or values, if the codec needs
    them."""
    tables = {}
    if spec.datatype == "nuq":
        signposts = kmeans.weighted_kmeans(hist, 2**spec.bits)  # [L_run, levels]
        tables["signposts"] = signposts
    else:
        fixed = jnp.asarray(fixed_signposts(spec.datatype, spec.bits))
        signposts = jnp.broadcast_to(fixed[None], (hist.energy.shape[0], fixed.size))
    if spec.q_norm:
        tables["norm"] = kmeans.q_norm(hist, signposts)
    return tables


# --- The doors


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Count the floating point operations of `calibrate` on `count` sequences of `length` tokens.
    Two forward passes, and the gradients in the second one, which cost as much as two more, are
    four."""
    return 4 * count * prompt_operations(model.config, 0, length)


def calibrate(model: Model, method: Method, tokens: Int[np.ndarray, "N T"], **options) -> Artifact:
    """Find the constants of `method` for `model` from N sequences of T tokens; `options` as in
    `fit`."""
    return fit(of_model(model, np.asarray(tokens)), method, **options)


def fit_captured(
    data: Captured, method: Method, recipe: Recipe | None = None, **options
) -> Artifact:
    """Find the constants of `method` from tensors of any model; `options` as in `fit`.

    Without gradients and without a recipe all entries have the same weight. Raises UserError for a
    recipe that needs gradients where there are none."""
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
    """Find the constants of `method` from sequences of any model.

    Args:
        data: the sequences.
        method: with layers of KVQuant.
        state: a file that keeps the progress after every sequence. A run that was killed continues
            from it.
        advance: advance(steps, total) is called after every sequence of either pass.

    Returns:
        The method with its constants.

    Raises:
        UserError: for a method without KVQuant's layers, or with two kinds of keys among them, and
            for sequences that are no longer than the sinks.
    """
    task, count = _prepare(data, method, recipe), data.count
    owner = identity(data.fingerprint, repr(method), repr(recipe), *data.parts)

    def step(progress):
        visit = _first_pass if progress["done"] < count else _second_pass
        return visit(task, progress, int(progress["done"]) % count)

    progress = stepped(_fresh_state(task), 2 * count, step, state, owner, advance)
    constants, reports = _constants(task, progress)
    about = {
        "sequences": count,
        "tokens": data.length,
        **dataclasses.asdict(recipe),
        "runs": reports,
    }
    return Artifact(method, constants, data.fingerprint, about)
