"""What one layer's attention knows: the layer's part of a cache, the new tokens, and how both are read."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.encoding import at_layer
from kvqjax.cache.runs import RunLayout
from kvqjax.cache.state import Run, body_tokens, ring_tokens
from kvqjax.ops.finite import saturated
from kvqjax.ops.layout import read

__all__ = [
    "LayerView",
    "NewTokens",
    "expanded",
    "payload_of",
    "reached",
    "rebuilt",
    "seen",
    "side_by_side",
    "visible",
]


class NewTokens(NamedTuple):
    """What every layer knows of the T new tokens: absolute positions, how many of each row are valid, and how many body
    tokens (tokens after the sinks) each row held before; negative while the sinks fill. Where tokens are evicted,
    `stored` are the body's positions (-1: none) and `oldest` the first one each query may see, if not all of them."""

    positions: Int[Array, "B T"]
    counts: Int[Array, " B"]
    held: Int[Array, " B"]
    stored: Int[Array, "B N"] | None = None
    oldest: Int[Array, "B T"] | None = None


class LayerView(NamedTuple):
    """One layer of a run: its arrays by number, its weights and constants, and the new tokens' sources [B, T, W].
    `below` are (run, state, constants, layers) of the runs up to this layer, where their carry is rebuilt; `chunks`
    says how many queries attend (kvqjax/cache/chunk_paths.py). No row holds more than `reach` tokens (None: than the
    capacity)."""

    run: RunLayout
    state: Run
    layer: Int[Array, ""]
    weights: dict
    constants: dict
    new: dict
    sinks: int
    below: tuple[tuple[RunLayout, Run, dict, Int[Array, ""] | int], ...] = ()
    chunks: str = "off"
    reach: int | None = None


def visible(queries, keys, valid, sliding: int | None) -> Bool[Array, "B T S"]:
    """Causal and sliding-window mask by absolute position: queries [B,T], keys [B,S], valid [B,S]."""
    query, key = queries[:, :, None], keys[:, None, :]
    seen = (key <= query) & valid[:, None, :]
    return seen if sliding is None else seen & (key > query - sliding)


def seen(view: LayerView, tokens: NewTokens, positions, valid) -> Bool[Array, "B T S"]:
    """Which of the tokens at `positions` each query sees."""
    mask = visible(tokens.positions, positions, valid, view.run.sliding)
    if tokens.oldest is None:
        return mask
    return mask & ((positions[:, None] >= tokens.oldest[:, :, None]) | (positions < view.sinks)[:, None])


def side_by_side(view: LayerView, tokens: NewTokens):
    """Sinks, window slots and new tokens on one axis: (sources {name: [B,N,W]}, positions [B,N], valid [B,N])."""
    batch, length = tokens.positions.shape
    ring = ring_tokens(view.run.ring, body_tokens(view.run, view.state))
    sink = jnp.broadcast_to(jnp.arange(view.sinks)[None], (batch, view.sinks))
    fresh = jnp.arange(length)[None] < tokens.counts[:, None]
    total = (tokens.held + view.sinks)[:, None]
    valid = jnp.concatenate([sink < total, ring < tokens.held[:, None], fresh], axis=1)
    positions = jnp.concatenate([sink, ring + view.sinks, tokens.positions], axis=1)
    kept = at_layer(view.state.sinks, view.layer), at_layer(view.state.window, view.layer), view.new
    sources = {name: jnp.concatenate([part[name].astype(x.dtype) for part in kept], 1) for name, x in view.new.items()}
    return sources, positions, valid


def expanded(view: LayerView, sources: dict, positions):
    """Keys and values of exact or decoded sources, [B, N, K, D]; what overflows on the way saturates."""
    k, v = view.run.wiring.maps.expand(view.weights, view.constants, sources, positions)
    return saturated(k, k.dtype), saturated(v, v.dtype)


def payload_of(run: RunLayout, state: Run, layer, at, size: int) -> dict:
    """`size` tokens of every row of one layer, whole blocks, unpacked."""
    return {
        source: {name: read(f, state.body[source][name], layer, at, size) for name, f in codec.fields.items()}
        for source, codec in run.wiring.storage.codecs.items()
    }


def _passed(run: RunLayout, state: Run, constants, at, size: int, layer, carry: dict) -> dict:
    """The carry of one block after one more layer."""
    return run.wiring.maps.decode(at_layer(constants, layer), payload_of(run, state, layer, at, size), carry)[1]


def rebuilt(view: LayerView, at, size: int) -> dict:
    """The carry of one block where none is held: zeros, and what the layers `below` make of them."""
    batch, dtype = next(iter(view.new.values())).shape[0], next(iter(view.new.values())).dtype
    carry = {name: jnp.zeros((batch, size, width), dtype) for name, width in view.run.wiring.chain.carry.items()}
    for run, state, constants, count in view.below:
        carry = jax.lax.fori_loop(0, count, functools.partial(_passed, run, state, constants, at, size), carry)
    return carry


def reached(view: LayerView) -> int:
    """The most body tokens that any row may have here, by what is static."""
    run = view.run
    return run.slots_here if view.reach is None else run.deal.most(min(view.reach, run.slots))
