"""Keys and values that any model's attention layers computed, as the data of a calibration."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.calibrate import aqua, aqua_layers, centre, commvq, kvquant
from kvqjax.calibrate.fisher import Activations, Sequences, as_it_is, with_fisher
from kvqjax.calibrate.parts import fitter
from kvqjax.codecs import Fit
from kvqjax.methods import Method
from kvqjax.model.config import KVShape
from kvqjax.model.decoder import Projected
from kvqjax.model.rope import rotate
from kvqjax.step.layers import ready_queries

__all__ = ["Captured", "fit_of"]

Layers = Sequence[Array | np.ndarray] | Array | np.ndarray  # one array a layer, or one array with layers in front


@dataclasses.dataclass(frozen=True, kw_only=True)
class Captured:
    """`keys`, `values` [L, N, T, K, D] and `queries` [L, N, T, H, D] of N sequences of T tokens, as `kvq.attend_layer`
    takes them; `outputs` [L, H*D, E] are output projections. The gradients are those of each sequence's mean loss.
    Every field may be a list of one array a layer, on the host or not. `dtype` is the cache's."""

    shape: KVShape
    keys: Layers
    values: Layers
    queries: Layers | None = None
    outputs: Layers | None = None
    key_gradients: Layers | None = None
    value_gradients: Layers | None = None
    dtype: str = "float32"

    def __post_init__(self):
        for one, other in (("queries", "outputs"), ("key_gradients", "value_gradients")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise UserError(f"{one} and {other} go together; give both or neither")
        if not len(self.keys) or np.ndim(self.keys[0]) != 4:
            raise UserError("keys: wanted an array [sequences, tokens, heads, head_dim] for every layer")
        own, whole = self.shape, tuple(np.shape(self.keys[0])[:2])
        kv, head = (*whole, own.num_kv_heads, own.head_dim), (*whole, own.num_heads, own.head_dim)
        wanted = {"keys": kv, "values": kv, "key_gradients": kv, "value_gradients": kv, "queries": head}
        for name, shape in wanted.items():
            self._check(name, shape)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        arrays = getattr(self, name)
        if arrays is None:
            return
        if len(arrays) != self.shape.num_layers:
            raise UserError(f"{name} of {len(arrays)} layers given, the shape has {self.shape.num_layers}")
        for layer, array in enumerate(arrays):
            if np.shape(array) != shape:
                raise UserError(f"{name} of layer {layer} have shape {np.shape(array)}, wanted {shape}")

    @property
    def size(self) -> tuple[int, int]:
        """Sequences and tokens of each."""
        return tuple(np.shape(self.keys[0])[:2])

    @property
    def parts(self) -> tuple[Any, ...]:
        """What `resume.identity` takes of the data."""
        arrays = (self.keys, self.values, self.queries, self.outputs, self.key_gradients, self.value_gradients)
        return repr(self.shape), self.dtype, *(np.asarray(x) for layers in arrays if layers is not None for x in layers)

    def layout(self, method: Method) -> CacheLayout:
        return CacheLayout(shape=self.shape, method=method, capacity=1, dtype=self.dtype)


def _positions(rows: int, length: int):
    return jnp.broadcast_to(jnp.arange(length)[None], (rows, length))


def _cached(run: RunLayout, k, v) -> tuple[Float[Array, "n T W"], Float[Array, "n T W"]]:
    """Keys and values of a run's layers, [n, T, K, D] each, as a cache stores them."""
    nothing: Any = None  # of what the capture of keys and values does not look at
    projected = Projected(nothing, jnp.asarray(k), jnp.asarray(v), nothing, nothing)
    new = run.wiring.maps.capture({}, {}, projected, _positions(*projected.k.shape[:2]))
    return new["k"].astype(jnp.float32), new["v"].astype(jnp.float32)


def _by_sequence(data: Captured, method: Method) -> Sequences:
    """The data for calibrations that read one sequence of all layers at a time."""
    runs = runs_of(data.layout(method))

    def all_layers(number: int, keys, values) -> list:
        """Keys and values [L, 1, T, W] of one sequence. Gradients turn with the keys, since a rotation is linear."""
        pairs = []
        for run in runs:
            layers = range(run.first, run.first + run.count)
            pairs.append(_cached(run, *(np.stack([x[i][number] for i in layers]) for x in (keys, values))))
        return [jnp.concatenate(parts)[:, None] for parts in zip(*pairs, strict=True)]

    def read(number: int, rope: str, gradients: bool, turn=as_it_is) -> Activations:
        cached = all_layers(number, data.keys, data.values)
        slopes = all_layers(number, data.key_gradients, data.value_gradients) if gradients else ()
        return with_fisher(cached, slopes, turn)

    return Sequences(data.shape, *data.size, read, "", data.parts)


def _fit_means(data: Captured, method: Method, recipe, **options) -> Artifact:
    return centre.fit(_by_sequence(data, method), method, **options)


def _fit_kvquant(data: Captured, method: Method, recipe, **options) -> Artifact:
    recipe = recipe or kvquant.Recipe(objective="none" if data.key_gradients is None else "fisher_s2")
    if data.key_gradients is None and recipe.objective != "none":
        raise UserError(f"objective {recipe.objective!r} needs key_gradients and value_gradients")
    return kvquant.fit(_by_sequence(data, method), method, recipe=recipe, **options)


def _fit_aqua(data: Captured, method: Method, recipe, **options) -> Artifact:
    layout = data.layout(method)

    def read(index: int, number: int, h):
        run, rows = runs_of(layout)[aqua_layers.layer_run(layout, index)], slice(number, number + 1)
        k, v = _cached(run, data.keys[index][rows], data.values[index][rows])
        return k[0], v[0], None

    layers = aqua_layers.Layers(layout, np.zeros((*data.size, 0), np.float32), read, "", data.parts)
    return aqua.fit(layers, recipe=recipe or aqua.Recipe(), **options)


def _fit_commvq(data: Captured, method: Method, recipe, **options) -> Artifact:
    recipe = recipe or commvq.Recipe()
    if data.queries is None:
        recipe = dataclasses.replace(recipe, values=dataclasses.replace(recipe.values, attention=0.0))

    def read(index: int, h):
        k, v = (jnp.asarray(x[index]).reshape(*data.size, -1) for x in (data.keys, data.values))
        if data.queries is None or data.outputs is None:  # the loss then looks at values only
            blank = jnp.zeros((*data.size, 0, 1))
            return k, commvq.Activations(v, blank, blank, jnp.zeros((0, 1))), h
        own, positions = data.shape.layer(index), _positions(*data.size)
        q = ready_queries(jnp.asarray(data.queries[index]), positions, own)
        rotated = rotate(jnp.asarray(data.keys[index]), positions, own)
        return k, commvq.Activations(v, q, rotated, jnp.asarray(data.outputs[index])), h

    runs_of(data.layout(method))  # refuses shapes that the method does not fit
    layers = commvq.Layers(data.shape, np.zeros((*data.size, 0), np.float32), read, "", data.parts)
    return commvq.fit(layers, method, recipe=recipe, **options)


OWN = {
    "kvqjax.calibrate.aqua": _fit_aqua,
    "kvqjax.calibrate.centre": _fit_means,
    "kvqjax.calibrate.commvq": _fit_commvq,
    "kvqjax.calibrate.kvquant": _fit_kvquant,
}


def fit_of(fit: Fit, method: Method) -> Callable[..., Artifact]:
    """Find the function that runs a fit on captured tensors, `fit_captured(data, method, recipe, state=, advance=)` in
    modules of other packages. Raises UserError for fits that need a model."""
    if fit.source == "weights":
        raise UserError(f"{method}: its constants are factors of a model's weights; use a kvqjax model")
    if fit.module == "kvqjax.calibrate.rotation":
        raise UserError(f"{method}: rotations are fitted on a kvqjax model; use kvqjax.calibrate.run")
    found = OWN.get(fit.module) or getattr(fitter(fit), "fit_captured", None)
    if found is None:
        raise UserError(f"{method}: {fit.module} calibrates from a kvqjax model; use kvqjax.calibrate.run")
    return found
