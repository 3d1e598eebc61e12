"""A whole prompt attending to itself exactly, one layer at a time: what an exact prefill is made of."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax import decoder
from kvqjax.attention import blockwise_attention
from kvqjax.cache import pick
from kvqjax.cache.append import window_tokens
from kvqjax.cache.eviction import Chosen, choose, received
from kvqjax.cache.state import Cache, RunPlan, due, plan
from kvqjax.finite import found_finite, spoiled, zeroed
from kvqjax.model import Model
from kvqjax.rope import rotate
from kvqjax.segments import visible

__all__ = ["chosen_tokens", "exact_layer"]


def chosen_tokens(model: Model, cache: Cache, constants, h, counts, chunk: int) -> tuple[Chosen | None, dict]:
    """The prompt tokens that enter the body, and the bookkeeping of it, where tokens are evicted."""
    keep, runs, sinks = cache.layout.method.keep, plan(cache.layout), cache.layout.method.sinks
    if keep is None or not cache.kept:
        return None, cache.kept

    def step(run, fixed, index, loop):
        h, mass = loop
        weights = decoder.layer(model.params, run.first + index)
        _, h, _, more = exact_layer(model, run, weights, pick(fixed, index), h, counts, chunk, weighing=True)
        return h, mass + more

    mass = jnp.zeros(h.shape[:2])
    if keep.rule == "h2o":
        for run, fixed in zip(runs, constants, strict=True):
            one = functools.partial(step, run, fixed)
            h, mass = decoder.over_layers(model.params, 0, run.count, one, (h, mass))
    clock = runs[0].wiring.clocks[0]
    leaving = due(clock, counts - sinks, jnp.zeros_like(counts)) * clock.unit
    window = window_tokens(runs[0].ring, counts - sinks)
    return choose(keep.rule, cache.kept, mass, leaving, window, clock.unit, sinks)


def exact_layer(
    model: Model, run: RunPlan, weights, constants, h: Float[Array, "B T E"], counts, chunk: int, weighing: bool = False
):
    """One layer of exact causal attention, `chunk` tokens at a time: (sources [B,T,W] with 0 for what is not finite,
    next hidden states [B,T,E], which tokens are finite [B,T], and with `weighing` the attention mass of every token,
    [B,T], else 0)."""
    config, (batch, length) = model.config, h.shape[:2]
    starts = jnp.arange(0, length, chunk)

    def project(start):
        positions = jnp.broadcast_to((start + jnp.arange(chunk))[None], (batch, chunk))
        return positions, decoder.project(weights, jax.lax.dynamic_slice_in_dim(h, start, chunk, 1), positions, config)

    def keys(start):
        positions, projected = project(start)
        sources = run.wiring.capture(weights, constants, projected, positions)
        k, v = (decoder.own_heads(x, config, projected.q.shape[2]) for x in (projected.k, projected.v))
        made = sources, {"k": rotate(k, positions, config), "v": v}
        each = found_finite(h.dtype, *jax.tree.map(lambda x: x.reshape(batch, chunk, -1), made))
        return *(zeroed(h.dtype, x) for x in made), each

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(batch, length, *x.shape[3:])

    new, attending, finite = jax.tree.map(join, jax.lax.map(keys, starts))
    k, v, broken = attending["k"], attending["v"], spoiled(finite, counts)

    def attended(mass, start):
        positions, projected = project(start)

        def read(j, carry):
            span = j * chunk + jnp.arange(chunk)
            at = jnp.broadcast_to(span[None], (batch, chunk))
            mask = visible(positions, at, at < counts[:, None], run.sliding)
            return *(jax.lax.dynamic_slice_in_dim(x, j * chunk, chunk, 1) for x in (k, v)), mask, carry

        def add(j, mass):
            keys, _, mask, _ = read(j, None)
            part = received(projected.q, keys, mask & (positions < counts[:, None])[:, :, None], found.lse)
            part = part + jax.lax.dynamic_slice_in_dim(mass, j * chunk, chunk, 1)
            return jax.lax.dynamic_update_slice_in_dim(mass, part, j * chunk, 1)

        first = jnp.int32(0) if run.sliding is None else jnp.maximum(start - run.sliding + 1, 0) // chunk
        last = start // chunk + 1
        found, _ = blockwise_attention(projected.q, k.shape[2], read, first, last)
        mass = jax.lax.fori_loop(first, last, add, mass) if weighing else mass
        spoilt = jax.lax.dynamic_slice_in_dim(broken, start, chunk, 1)[:, :, None, None]
        out = jnp.where(spoilt, jnp.nan, found.out)
        return mass, decoder.finish(weights, jax.lax.dynamic_slice_in_dim(h, start, chunk, 1), out, config)

    mass, done = jax.lax.scan(attended, jnp.zeros(h.shape[:2]) if weighing else jnp.float32(0), starts)
    return new, join(done), finite, mass
