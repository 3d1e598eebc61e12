"""Mixtures of experts: a router scores every expert for a token, the best few compute, their outputs are added up.

    s = softmax(x W_router),   y = sum over the per_token largest s_e of  s_e (silu(x G_e) * (x U_e)) D_e
                             (+ sigmoid(x w_shared) times a shared MLP)

`s` may be divided by the sum of the chosen ones. Equal scores: the expert with the lower number wins.

Weights that only some layers have, or that are read expert by expert, are rows of a stack of their own:

    {"q": [L, E, H*D], "gate": Rows([2, E, F], layers=(0, 3)), "experts_gate": Rows([L-2, X, E, F], layers=(1, 2, ...))}

A loop over stacked layers knows its layer only as data. A `Row` is therefore a promise: which row of the stack, and
whether this layer has one at all. What is read of it is cut out of the whole stack where it is used, inside a branch
or a loop over experts. Cut out before, all experts of the layer would be copied.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from kvqjax.model.config import ModelConfig
from kvqjax.model.weight_codes import CodedWeight
from kvqjax.ops.xla import few_rows, times_matrix

__all__ = ["BY_EXPERT", "Row", "Rows", "is_unrolled", "mix", "mlp", "route", "whole"]

BY_EXPERT = ("experts_gate", "experts_up", "experts_down")  # [X, E, F], [X, E, F], [X, F, E]
MOST_AT_ONCE = 512  # tokens that all experts compute together
MOST_TOGETHER = 128  # tokens that one product with an expert's matrices takes

Leaf = Any  # an array, a CodedWeight, or whatever a tree map puts in its place


def _decoded(x: Leaf) -> Leaf:
    return x.decoded() if isinstance(x, CodedWeight) else x


class Row(struct.PyTreeNode):
    """One layer's row of a stack. `here` says whether the layer has one; if not, `number` is that of any row."""

    stack: Leaf  # [N, ...]
    number: Leaf  # Int[]
    here: Leaf  # Bool[]

    def whole(self) -> Leaf:
        """All of the row, in the compute dtype."""
        cut = lambda a: jax.lax.dynamic_index_in_dim(a, self.number, keepdims=False)  # noqa: E731
        return _decoded(jax.tree.map(cut, self.stack))

    @property
    def experts(self) -> int:
        """How many experts this device holds."""
        return jax.tree.leaves(self.stack)[0].shape[1]

    def expert(self, number: Int[Array, ""] | int) -> Leaf:
        """One expert's matrix [I, O], in the compute dtype."""

        def cut(a):
            starts = (self.number, number, *[0] * (a.ndim - 2))
            return jax.lax.dynamic_slice(a, starts, (1, 1, *a.shape[2:]))[0, 0]

        return _decoded(jax.tree.map(cut, self.stack))


class Rows(struct.PyTreeNode):
    """Row i of `stack` belongs to layer `layers[i]`."""

    stack: Leaf
    layers: tuple[int, ...] = struct.field(pytree_node=False)

    def row(self, layer: Int[Array, ""] | int) -> Row | None:
        """The row of a layer; None where a plain number says that it has none."""
        if not isinstance(layer, jax.core.Tracer):
            return Row(self.stack, self.layers.index(int(layer)), True) if int(layer) in self.layers else None
        known = np.arange(self.layers[-1] + 1)
        numbers, here = np.searchsorted(self.layers, known).astype(np.int32), np.isin(known, self.layers)
        inside = jnp.clip(layer, 0, len(known) - 1)
        return Row(self.stack, jnp.asarray(numbers)[inside], jnp.asarray(here)[inside] & (layer < len(known)))


def is_unrolled(params: dict) -> bool:
    """Say whether the layers' weights are a list of one dict a layer; a list has no rows to be read."""
    return isinstance(params["layers"], list | tuple)


def whole(weight: Row | Leaf) -> Leaf:
    """A layer's weight, in the compute dtype, whether or not it is a row still to be read."""
    return weight.whole() if isinstance(weight, Row) else _decoded(weight)


def mlp(x: Float[Array, "*N E"], gate, up, down) -> Float[Array, "*N E"]:
    """A gated MLP; of parts of its inner width, the part of its output."""
    inner = jax.nn.silu(times_matrix(x, gate)) * times_matrix(x, up)
    return times_matrix(few_rows(inner), down)


def route(
    x: Float[Array, "N E"], router: Float[Array, "E X"], config: ModelConfig
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """The experts of every token and their shares in its output, float32."""
    assert config.experts is not None
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


def _in_turn(weights: dict, x, chosen: Int[Array, "N k"], alone: bool) -> Float[Array, "N k E"]:
    """Every chosen expert's output in a loop over tiles: an expert's matrices are read once per tile of its tokens, and
    those of an expert that nobody chose never. `alone`: every pair is of an expert that is here."""
    (count, k), pairs, held = chosen.shape, chosen.size, weights[BY_EXPERT[0]].experts
    size = min(MOST_TOGETHER, 1 << (max(1, pairs // held) - 1).bit_length())
    expert, rows, used, place = _tiles(chosen.reshape(-1), held, size)
    one = lambda number, rows: mlp(x[rows // k], *(weights[name].expert(number) for name in BY_EXPERT))  # noqa: E731

    def step(_, tile):
        number, rows, used = tile
        if alone and size == 1:  # every tile is used
            return None, one(number, rows)
        return None, jax.lax.cond(used, one, lambda *_: jnp.zeros((size, x.shape[1]), x.dtype), number, rows)

    _, out = jax.lax.scan(step, None, (expert, rows, used))
    return out.reshape(-1, x.shape[1])[jnp.minimum(place, out.shape[0] * size - 1)].reshape(count, k, -1)


def _at_once(weights: dict, x, chosen: Int[Array, "N k"]) -> Float[Array, "N k E"]:
    """The same without a loop. Few tokens: the matrices of each one's experts, which XLA for GPUs reads where they lie.
    Many: all experts on all tokens, which reads every matrix once."""
    (count, k), held = chosen.shape, weights[BY_EXPERT[0]].experts
    inside = jnp.minimum(chosen, held - 1)
    if chosen.size <= held:
        matrices = (jax.vmap(weights[name].expert)(inside.reshape(-1)) for name in BY_EXPERT)
        return jax.vmap(mlp)(jnp.repeat(x, k, axis=0), *matrices).reshape(count, k, -1)
    matrices = [weights[name].whole() for name in BY_EXPERT]
    one = lambda token: jax.vmap(mlp, in_axes=(None, 0, 0, 0))(token[0], *matrices)[token[1]]  # noqa: E731
    if count <= MOST_AT_ONCE:
        return jax.vmap(one)((x, inside))
    return jax.lax.map(one, (x, inside), batch_size=MOST_AT_ONCE)


def mix(weights: dict, x: Float[Array, "N E"], config: ModelConfig) -> Float[Array, "N E"]:
    """What the experts, and the shared one, make of every token; of experts split over devices, this device's part."""
    chosen, shares = route(x, whole(weights["router"]), config)
    held = weights[BY_EXPERT[0]].experts
    if config.split:
        chosen = chosen - jax.lax.axis_index(config.split) * held
    here = (chosen >= 0) & (chosen < held)
    chosen = jnp.where(here, chosen, held)  # of no expert here
    turns = functools.partial(_in_turn, alone=not config.split)
    out = jax.lax.platform_dependent(weights, x, chosen, cuda=_at_once, default=turns)
    out = jnp.where(here[..., None], out, jnp.zeros((), out.dtype))
    total = jnp.einsum("nke,nk->ne", out, shares, preferred_element_type=jnp.float32).astype(x.dtype)
    if "shared_gate" not in weights:
        return total
    shared = mlp(x, *(whole(weights[name]) for name in ("shared_gate", "shared_up", "shared_down")))
    return total + jax.nn.sigmoid(jnp.einsum("ne,eo->no", x, whole(weights["shared_router"]))) * shared
