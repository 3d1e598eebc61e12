"""Mixtures of experts: a router scores every expert for a token, the best few compute, their outputs are added up.

    s = softmax(x W_router),   y = sum over the per_token largest s_e of  s_e (silu(x G_e) * (x U_e)) D_e
                             (+ sigmoid(x w_shared) times a shared MLP)

`s` may be divided by the sum of the chosen ones. Equal scores: the expert with the lower number wins.
"""

import os
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.config import ModelConfig
from kvqjax.rows import Row, whole

__all__ = ["BY_EXPERT", "mix", "mlp", "route"]

BY_EXPERT = ("experts_gate", "experts_up", "experts_down")  # [X, E, F], [X, E, F], [X, F, E]
MOST_TOGETHER = 128  # tokens that one product with an expert's matrices takes


def mlp(x: Float[Array, "*N E"], gate, up, down) -> Float[Array, "*N E"]:
    """A gated MLP; of parts of its inner width, the part of its output."""
    inner = jax.nn.silu(jnp.einsum("...e,ef->...f", x, gate)) * jnp.einsum("...e,ef->...f", x, up)
    return jnp.einsum("...f,fe->...e", inner, down)


def route(
    x: Float[Array, "N E"], router: Float[Array, "E X"], config: ModelConfig
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """The experts of every token and their shares in its output, float32."""
    scores = jnp.einsum("ne,ex->nx", x, router, preferred_element_type=jnp.float32)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), config.experts.per_token)
    return chosen, shares / shares.sum(-1, keepdims=True) if config.experts.normalised else shares


def _tiles(chosen: Int[Array, " P"], held: int, size: int):
    """Pairs of a token and an expert sorted by expert and cut into tiles of one expert each: (expert of each tile, its
    pairs [n, size], whether it has any, and where each pair lies among the tiles' rows). Experts from `held` on are
    nobody's here."""
    pairs, numbers = chosen.shape[0], jnp.arange(held)
    order = jnp.argsort(chosen)
    counts = (chosen[:, None] == numbers[None]).sum(0, dtype=jnp.int32)
    tiles = -(-counts // size)
    begins, ends = jnp.cumsum(counts) - counts, jnp.cumsum(tiles)
    tile = jnp.arange(min(pairs, pairs // size + held))
    expert = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), held - 1).astype(jnp.int32)
    first = begins[expert] + (tile - (ends - tiles)[expert]) * size
    rows = order[jnp.minimum(first[:, None] + jnp.arange(size)[None], pairs - 1)]
    of = jnp.minimum(chosen[order], held - 1)
    place = (ends - tiles)[of] * size + jnp.arange(pairs) - begins[of]
    return expert, rows, tile < ends[-1], jnp.zeros_like(order).at[order].set(place)


def _by_tiles(x, chosen: Int[Array, "N k"], weights: dict, held: int) -> Float[Array, "N k E"]:
    """Every chosen expert's output, tile after tile: the matrices of an expert are read once per tile, those of an
    expert that nobody chose never."""
    (count, k), pairs = chosen.shape, chosen.size
    size = min(MOST_TOGETHER, 1 << (max(1, pairs // held) - 1).bit_length())
    expert, rows, used, place = _tiles(chosen.reshape(-1), held, size)

    def step(_, tile):
        number, rows, used = tile
        run = lambda: mlp(x[rows // k], *(weights[name].expert(number) for name in BY_EXPERT))  # noqa: E731
        return None, jax.lax.cond(used, run, lambda: jnp.zeros((size, x.shape[1]), x.dtype))

    _, out = jax.lax.scan(step, None, (expert, rows, used))
    return out.reshape(-1, x.shape[1])[jnp.minimum(place, out.shape[0] * size - 1)].reshape(count, k, -1)


def _by_pairs(x, chosen, weights, held):
    form = os.environ.get("MOE", "reduce")
    count, k = chosen.shape
    xs = jnp.repeat(x, k, axis=0)
    if form == "loop":

        def step(_, pair):
            number, row = pair
            return None, mlp(row[None], *(weights[name].expert(number) for name in BY_EXPERT))[0]

        return jax.lax.scan(step, None, (chosen.reshape(-1), xs))[1].reshape(count, k, -1)
    if form == "unroll":
        ys = [
            mlp(xs[i][None], *(weights[name].expert(chosen.reshape(-1)[i]) for name in BY_EXPERT))[0]
            for i in range(count * k)
        ]
        return jnp.stack(ys).reshape(count, k, -1)
    gate, up, down = (jax.vmap(weights[name].expert)(chosen.reshape(-1)) for name in BY_EXPERT)
    if form == "vmap":
        return jax.vmap(lambda x, g, u, d: mlp(x[None], g, u, d)[0])(xs, gate, up, down).reshape(count, k, -1)

    def times(x, w):
        return (x[:, :, None].astype(jnp.float32) * w.astype(jnp.float32)).sum(1).astype(x.dtype)

    return times(jax.nn.silu(times(xs, gate)) * times(xs, up), down).reshape(count, k, -1)


def _ragged(x, chosen, weights, held):
    count, k = chosen.shape
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = (flat[:, None] == jnp.arange(held)[None]).sum(0, dtype=jnp.int32)
    gate, up, down = (weights[name].whole() for name in BY_EXPERT)
    xs = x[order // k]
    inner = jax.nn.silu(jax.lax.ragged_dot(xs, gate, sizes)) * jax.lax.ragged_dot(xs, up, sizes)
    ys = jax.lax.ragged_dot(inner, down, sizes)
    return jnp.zeros_like(ys).at[order].set(ys).reshape(count, k, -1)


def mix(weights: dict, x: Float[Array, "N E"], config: ModelConfig) -> Float[Array, "N E"]:
    """What the experts, and the shared one, make of every token; of experts split over devices, this device's part."""
    chosen, shares = route(x, whole(weights["router"]), config)
    held = weights[BY_EXPERT[0]].experts
    if config.split:
        chosen = chosen - jax.lax.axis_index(config.split) * held
    here = (chosen >= 0) & (chosen < held)
    form = os.environ.get("MOE", "reduce")
    if form == "ragged":
        out = _ragged(x, chosen, weights, held)
    elif form == "tiles" or config.split or chosen.size > held:
        out = _by_tiles(x, jnp.where(here, chosen, held), weights, held)
    else:
        out = _by_pairs(x, chosen, weights, held)
    shares = jnp.where(here, shares, 0)
    out = jnp.where(here[..., None], out, jnp.zeros((), out.dtype))
    total = jnp.einsum("nke,nk->ne", out, shares, preferred_element_type=jnp.float32).astype(x.dtype)
    if "shared_gate" not in weights:
        return total
    shared = mlp(x, *(whole(weights[name]) for name in ("shared_gate", "shared_up", "shared_down")))
    return total + jax.nn.sigmoid(jnp.einsum("ne,eo->no", x, whole(weights["shared_router"]))) * shared
