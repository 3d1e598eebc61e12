"""The loss of every candidate in every layer, in one pass over the layers.

A candidate codes the keys and values of one layer, all else exact. Its error is that of the layer's
output: |h' - h|^2 over the tokens of the sequences that are scored. How much of the model's output
that costs differs from layer to layer. So the outputs by one candidate, the yardstick, go through
all layers above, and give a KL divergence for each layer. The loss of another candidate is
estimated as

    loss = divergence of the yardstick in this layer * error of the candidate / error of the yardstick

A query sees sinks, its window and the tokens of its own unit exactly, and all others coded. The
constants that a candidate learns from text are fitted to the other sequences, layer by layer.

The state between two layers is the hidden states of one layer and the outputs that go on, so that a
stopped pass continues. No keys or values are kept.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax.cache.runs import runs_for
from kvqjax.calibrate import learns, xquant
from kvqjax.calibrate.activations import Captured
from kvqjax.calibrate.layerwise import of_model
from kvqjax.calibrate.parts import Part, calibrated, captured_fitter
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.eval.scores import token_scores
from kvqjax.methods import Clock, Method, exact
from kvqjax.model import decoder
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.rope import positions_of_layer, rotate, unrotated
from kvqjax.model.weight_trees import stacked
from kvqjax.ops.attention import segment_attention, with_sinks

Rows = Float[Array | np.ndarray, "N T E"]  # hidden states of sequences


class Scores(NamedTuple):
    """The scores of one pass. C candidates, L layers."""

    errors: Float[np.ndarray, "L C"]  # of layers' outputs, squared
    divergences: Float[np.ndarray, " L"]  # of the yardstick in one layer, nats

    def losses(self, yardstick: int) -> Float[np.ndarray, "L C"]:
        """Estimate the divergence of each candidate in each layer."""
        return self.divergences[:, None] * self.errors / self.errors[:, yardstick, None]


# --- One layer


@functools.partial(jax.jit, static_argnames="config")
def _exact(params, index, h: Rows, config: ModelConfig) -> Rows:
    """Run a layer on sequences, one at a time."""
    positions = jnp.arange(h.shape[1])[None]
    weights = decoder.layer(params, index)
    turns = positions_of_layer(positions, config, index)

    def row_pass(row):
        row = decoder.up_to(params, index, row[None], config)
        projected = decoder.project(weights, row, positions, config, index)
        keys = rotate(projected.k, turns, config)
        attended = decoder.attend_plainly(projected.q, keys, projected.v, index, weights, config)
        return decoder.finish(weights, row, attended, config)[0]

    return jax.lax.map(row_pass, h)


def _recent(length: int, sinks: int, clocks: tuple[Clock, ...]) -> Bool[np.ndarray, "T T"]:
    """Mark the keys that are still exact when a query reads them: sinks, those of the window, and
    those of the query's own unit."""
    queries = np.arange(length)[:, None]
    keys = np.arange(length)[None]
    # Keys and values may have clocks of their own. One mask serves both.
    unit = max(clock.unit for clock in clocks)
    window = min(clock.window for clock in clocks)
    same_unit = (queries - sinks) // unit == (keys - sinks) // unit
    return (keys < sinks) | (queries - keys < window) | same_unit


@functools.lru_cache(maxsize=64)
def _coded(method: Method, place: int, config: ModelConfig) -> Callable:
    """Make the program that runs a layer of a method's run `place` with coded keys and values."""
    wiring = runs_for(method, config)[place].wiring

    @jax.jit
    def layer_pass(params, index, h: Rows, constants) -> Rows:
        positions = jnp.arange(h.shape[1])[None]
        weights = decoder.layer(params, index)

        def coded(sources: dict) -> dict:
            """Encode and decode all tokens behind the sinks that fill whole units."""

            def decoded(tile: dict) -> dict:
                _, recon, _ = wiring.maps.encode(constants, tile, {})
                return recon

            result = {}
            start = method.sinks
            for clock in wiring.storage.clocks:
                units = (h.shape[1] - start) // clock.unit
                stop = start + units * clock.unit
                tokens = {name: sources[name][0] for name in clock.sources}
                tiles = {}
                for name, x in tokens.items():
                    tiles[name] = x[start:stop].reshape(-1, clock.unit, x.shape[-1])
                bodies = jax.vmap(decoded)(tiles)
                for name, x in tokens.items():
                    body = bodies[name].reshape(-1, x.shape[-1]).astype(x.dtype)
                    result[name] = jnp.concatenate([x[:start], body, x[stop:]])[None]
            return result

        seen = decoder.causal_mask(h.shape[1], index, config)
        recent = _recent(h.shape[1], method.sinks, wiring.storage.clocks)
        # Every token stands twice, coded and exact, and a query sees it once.
        mask = jnp.concatenate([seen & ~recent, seen & recent], 1)[None]

        def row_pass(row):
            row = decoder.up_to(params, index, row[None], config)
            projected = decoder.project(weights, row, positions, config, index)
            sources = wiring.maps.capture(weights, constants, projected, positions)
            coded_k, coded_v = wiring.maps.expand(weights, constants, coded(sources), positions)
            exact_k, exact_v = wiring.maps.expand(weights, constants, sources, positions)
            k = jnp.concatenate([coded_k, exact_k], 1).astype(row.dtype)
            v = jnp.concatenate([coded_v, exact_v], 1).astype(row.dtype)
            attended = segment_attention(projected.q, k, v, mask, config.softcap)
            attended = with_sinks(attended, weights.get("score_sinks")).out
            return decoder.finish(weights, row, attended, config)[0]

        return jax.lax.map(row_pass, h)

    return layer_pass


@jax.jit
def _squared(a: Rows, b: Rows) -> Float[Array, ""]:
    return jnp.square(a.astype(jnp.float32) - b.astype(jnp.float32)).sum()


@functools.partial(jax.jit, static_argnames="config")
def _divergences(
    params, h: Float[Array, "L T E"], reference: Float[Array, "T E"], config: ModelConfig
) -> Float[Array, " L"]:
    """Compute the mean KL divergence of the predictions from outputs of the last layer, one output
    at a time."""

    def logits(row):
        row = decoder.up_to(params, config.num_layers, row[None], config)
        return decoder.unembed(params, row, config)

    exact_logits = logits(reference)
    targets = jnp.zeros((1, h.shape[1]), jnp.int32)  # any: the divergence does not depend on them

    def divergence(row):
        return token_scores(logits(row), exact_logits, targets).kld.mean()

    return jax.lax.map(divergence, h)


# --- What candidates learn of one layer


def _fitted(method: Method, data: Captured) -> dict:
    """Find the constants of one layer from its tensors."""

    def fit_part(part: Part, state, advance):
        return captured_fitter(part.fit, part.method)(data, part.method, None)

    artifact = calibrated(method, data.shape, fit_part, None, lambda steps, total: None)
    return jax.tree.map(operator.itemgetter(0), artifact.constants[0])


@functools.partial(jax.jit, static_argnames="shape")
def _as_given(q: Float[Array, "N T H D"], shape: KVShape) -> Float[Array, "N T H D"]:
    positions = jnp.broadcast_to(jnp.arange(q.shape[1])[None], q.shape[:2])
    return unrotated(q, positions, shape)


def _tensors(model: Model, index: int, h: Rows) -> tuple[Captured, Rows]:
    """Compute the tensors of one layer that calibrations read, and the layer's output."""
    layers = of_model(model, exact(), np.zeros(h.shape[:2], np.int32))
    # Queries are scaled already.
    shape = dataclasses.replace(model.config.layer(index).alone, scale=None)
    keys, seen, above = layers.read(index, h)
    heads = (*h.shape[:2], shape.num_kv_heads, shape.head_dim)
    data = Captured(
        shape=shape,
        keys=[jnp.asarray(keys).reshape(heads)],
        values=[jnp.asarray(seen.v).reshape(heads)],
        queries=[_as_given(jnp.asarray(seen.q), shape)],
        outputs=[seen.o],
    )
    return data, above


def _constants_of(
    model: Model, method: Method, place: int, index: int, data: Captured | None
) -> dict:
    """Find the constants of one layer: from the weights, or learnt from the layer's tensors."""
    if learns(method, model.config):
        assert data is not None
        return _fitted(method, data)
    runs = xquant.prepared(model.replace(constants=()), method).constants
    if not runs:
        return {}
    first = runs_for(method, model.config)[place].first
    return jax.tree.map(operator.itemgetter(index - first), runs[place])


# --- All layers


def scored(
    model: Model,
    candidates: tuple[Method, ...],
    yardstick: int,
    learnt: Int[np.ndarray, "N T"],
    held_out: Int[np.ndarray, "M T"],
    *,
    state: Path | None,
    advance: Callable[[int, int], None],
) -> Scores:
    """Score candidates in every layer.

    Args:
        candidates: methods of one kind of layer each, without a carry.
        yardstick: the number of the candidate whose outputs go through the layers above.
        learnt: sequences that candidates are calibrated on.
        held_out: sequences that they are scored on.
        state: a file that keeps the progress after every layer.
        advance: advance(steps, total) is called after every layer.
    """
    config = model.config
    params = stacked(model.params)
    model = model.replace(params=params, constants=())
    if not any(learns(method, config) for method in candidates):
        learnt = learnt[:0]
    dtype = params["embed"].dtype
    places = []  # of each candidate: the run that each layer is in
    for method in candidates:
        run_of_layer = []
        for number, run in enumerate(runs_for(method, config)):
            run_of_layer += [number] * run.count
        places.append(run_of_layer)

    def embedded(tokens) -> np.ndarray:
        return np.asarray(decoder.embed(params, jnp.asarray(tokens), config), np.float32)

    def step(progress: dict) -> dict:
        layer = int(progress["done"])
        index = jnp.int32(layer)
        below = jnp.asarray(progress["learnt"], dtype)
        h = jnp.asarray(progress["h"], dtype)
        data = None
        if len(below):
            data, below = _tensors(model, layer, below)
        above = _exact(params, index, h, config)
        others = []  # outputs of the yardstick in this layer or in one below, which go on exactly
        for x in progress["others"]:
            output = _exact(params, index, jnp.asarray(x, dtype), config)
            others.append(np.asarray(output, np.float32))
        errors = []
        for number, method in enumerate(candidates):
            place = places[number][layer]
            constants = _constants_of(model, method, place, layer, data)
            out = _coded(method, place, config)(params, index, h, constants)
            errors.append(float(_squared(out, above)))
            if number == yardstick:
                others.append(np.asarray(out, np.float32))
        return {
            "learnt": np.asarray(below, np.float32),
            "h": np.asarray(above, np.float32),
            "others": np.stack(others),
            "errors": np.concatenate([progress["errors"], np.asarray(errors)[None]]),
        }

    h = embedded(held_out)
    start = {
        "done": np.int64(0),
        "learnt": embedded(learnt),
        "h": h,
        "others": np.zeros((0, *h.shape), np.float32),
        "errors": np.zeros((0, len(candidates))),
    }
    owner = identity(model.fingerprint, repr(candidates), str(yardstick), learnt, held_out)
    end = stepped(start, config.num_layers, step, state, owner, advance)
    outputs = jnp.asarray(end["others"], dtype)
    divergences = []
    for row, reference in enumerate(jnp.asarray(end["h"], dtype)):
        divergences.append(_divergences(params, outputs[:, row], reference, config))
    return Scores(end["errors"], np.mean(divergences, 0))
