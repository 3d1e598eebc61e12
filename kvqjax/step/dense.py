"""One layer of a cache as plain arrays of keys and values, for frameworks that attend by themselves.

dense         checks its arguments
_dense        finds the calibrated constants, and on a mesh runs the rest on every device's part
_dense_here   decodes a layer on one device; where layers feed each other, those below it first
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvqjax import cache as caches
from kvqjax._arguments import check_index
from kvqjax._errors import UserError
from kvqjax.cache.readers.blocks import body_blocks
from kvqjax.cache.shapes import check_cache
from kvqjax.cache.state import Cache
from kvqjax.cache.view import LayerView, body_view, expanded, side_by_side
from kvqjax.model import decoder
from kvqjax.model.loading import Model
from kvqjax.model.rope import as_given
from kvqjax.ops.finite import saturated
from kvqjax.parallel.sharding import of_constants, on_parts
from kvqjax.step.doors import check_both, check_entries, kept_program, run_constants, with_own_constants
from kvqjax.step.layer_step import Call, begin, first_flow
from kvqjax.step.layers import placed_layer

__all__ = ["dense"]


class Dense(NamedTuple):
    """Keys and values by position, and which positions hold them."""

    k: Float[Array, "B S K D"]
    v: Float[Array, "B S K D"]
    valid: Bool[Array, "B S"]

    def having(self, k, v, positions: Int[Array, "B n"], valid: Bool[Array, "B n"]) -> "Dense":
        """Put the keys and values of n tokens at their positions. Tokens that are not valid are left out."""
        row = jnp.arange(len(valid))[:, None]
        # A token that is not valid gets a place beyond the end, where mode="drop" writes nothing.
        place = jnp.where(valid, positions, self.valid.shape[1])
        put = lambda array, part: array.at[row, place].set(part, mode="drop")  # noqa: E731
        k, v = (saturated(x, self.k.dtype) for x in (k, v))
        return Dense(put(self.k, k), put(self.v, v), put(self.valid, True))


class _NoWeights(dict):
    """Stands for a layer's weights where no model was given. A method that asks for a weight gets an error that says to
    pass `model=`."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def __missing__(self, name: str):
        raise UserError(f"{self.method}: its keys and values are made with the model's weights; pass model=")


def dense(
    cache: Cache, layer: Int[Array, ""] | int, model: Model | None = None, *, constants=None
) -> tuple[Float[Array, "B S K D"], Float[Array, "B S K D"], Bool[Array, "B S"]]:
    """Decode one layer of a cache into plain arrays, every token at its position: sinks, body and window.

    It costs what compression saves: a call decodes all tokens that are stored, O(S), and gives 2 * B * S * K * D
    numbers of the cache's dtype (8192 tokens of 8 heads of 128 in bfloat16: 32 MiB a row). `attend_layer` reads the
    same tokens without these arrays. Pure; works inside and outside jit.

    Args:
        cache: any cache whose tokens lie on one device; its rows and heads may be split over a mesh.
        layer: its number. It may be traced where all layers are stored as one stack and do not depend on each other.
        model: the model of the cache, with its constants. Methods that make keys and values of a layer's input need it
            (XQuant, XQuant-CL); others take it and need only `constants`.
        constants: an artifact's, where no model is given.

    Returns:
        k: keys [B, S, K, D] as they are attended to, rotated, their channels as `Rope.pairs` says. S is the cache's
            capacity.
        v: values [B, S, K, D].
        valid: Bool[B, S], the tokens that a query at position `cache.lengths[b]` sees: not those that a sliding window
            has passed or that were evicted. Keys and values at other positions are 0.

        Scores are q . k with the shape's scale. Where layers depend on each other (AQUA-KV, XQuant-CL), those below are
        decoded first.

    Raises:
        UserError: for what is no cache, or none of this model; for a layer that does not exist, a missing model or
            constant, and a body that is dealt over devices."""
    check_cache(cache)
    check_entries(constants)
    if model is not None:
        check_both(model, cache)
    if cache.layout.dealt > 1:
        raise UserError(f"dense reads bodies of one device; this cache's are dealt over {cache.layout.dealt}")
    layer = check_index("layer", layer, cache.layout.shape.num_layers, "layers in this cache")[0]
    return _dense(cache, model, constants, layer=layer)


@functools.partial(kept_program, static_argnames=("layer",))
def _dense(cache: Cache, model: Model | None, constants, *, layer):
    """Do `dense` after its checks, on one device or on every device's part of the cache's mesh."""
    if model is not None:
        model = with_own_constants(model, cache.layout.method)
        constants = model.constants if constants is None else constants
    fixed, rules = run_constants(constants, cache.layout), cache.layout.rules
    if rules is None:
        return _dense_here(model, layer, cache, fixed)
    heads = PartitionSpec(rules.batch, None, rules.kv_heads)
    constants_specs = of_constants(rules, fixed)
    read = functools.partial(_dense_here, model)
    out = heads, heads, PartitionSpec(rules.batch)
    # A plain number is not made an array: layers that are stored one by one are found by it at trace time. A traced
    # number is an argument of `shard_map`, as every array is.
    if isinstance(layer, int):
        return on_parts(functools.partial(read, layer), rules, cache, fixed, specs=(constants_specs,), out=out)
    traced = lambda cache, layer, fixed: read(layer, cache, fixed)  # noqa: E731
    specs = PartitionSpec(), constants_specs
    return on_parts(traced, rules, cache, layer, fixed, specs=specs, out=out)


def _dense_here(model: Model | None, layer, cache: Cache, fixed: tuple[dict, ...]):
    """Do `_dense` on one device's part. Arguments and result are those of `dense`; `fixed` are the runs' constants."""
    # As for attention with one new token of each row that is not valid: it stands for the query that sees the tokens.
    call = begin(cache, jnp.zeros_like(cache.lengths), 1, fixed, "chunk")
    carry, layers_below = first_flow(call).body, ()
    if carry:
        if isinstance(layer, jax.core.Tracer):
            raise UserError(f"{cache.layout.method}: layers depend on each other, so `layer` must be a plain number")
        layers_below = range(layer)  # they are decoded for their carry alone; XLA drops their keys and values
    for number in layers_below:
        carry = _read(call, model, number, carry)[1]
    k, v, valid = _read(call, model, layer, carry)[0]
    return as_given(k, cache.layout.shape), v, valid


def _read(call: Call, model: Model | None, layer, carry: dict) -> tuple[Dense, dict]:
    """Decode one layer.

    Args:
        call: What all layers share.
        model: The cache's model, if one was given.
        layer: The layer's number.
        carry: The layer below's carry of the body's tokens; empty where layers do not feed each other.

    Returns:
        (keys and values by position, this layer's carry)."""
    place: tuple[int, Any] = placed_layer(call.runs, layer)
    number, index = place
    run, state, layout = call.runs[number], call.cache.runs[number], call.cache.layout
    weights = _NoWeights(layout.method) if model is None else decoder.with_read(decoder.layer(model.params, layer))
    fixed = caches.at_layer(call.constants[number], index)
    rows, dtype = call.cache.batch, layout.dtype
    # The sources of the new token that stands for the query. It is not valid, so that its key and value go nowhere.
    new = {name: jnp.zeros((rows, 1, width), dtype) for name, width in run.wiring.storage.sources.items()}
    view = LayerView(run, state, index, weights, fixed, new, layout.method.sinks, layout.bound, call.cache.pages)
    blank = jnp.zeros((rows, layout.capacity, run.shape.num_kv_heads, run.shape.head_dim), dtype)
    sources, positions, mask = side_by_side(view, call.tokens)
    read = Dense(blank, blank, jnp.zeros(blank.shape[:2], bool))
    read = read.having(*expanded(view, sources, positions), positions, mask[:, 0])
    if not run.slots:
        return read, carry
    size = run.reading
    places = body_view(view, call.tokens).places
    read_block, first, last = body_blocks(view, call.tokens, size)

    def step(j, loop):
        read, carry = loop
        k, v, mask, carry = read_block(j, carry)
        k, v = _turned_back(view, k, v)
        positions, _ = places(j, size)
        return read.having(k, v, positions, mask[:, 0]), carry

    return jax.lax.fori_loop(first, last, step, (read, carry))


def _turned_back(view: LayerView, k, v):
    """Rotate keys and values [B, n, K, D] of a rotated body back into the frame of queries and outputs."""
    frame = view.run.wiring.maps.frame
    if frame is None:
        return k, v
    return frame.keys(view.constants, k), frame.outputs(view.constants, v)
