"""The decoder as pure functions over a params pytree; the cache lives elsewhere and only sees
`Projected`.

    params = {"embed": [V,E], "norm": [E], "head": [E,V] (absent when tied), "layers": {name: [L,
    ...]} or a list}
    layers: attn_norm [E], q [E,H*D], k [E,K*D], v [E,K*D], o [H*D,E], mlp_norm [E], gate/up [E,F],
    down [F,E],
            q_bias/k_bias/v_bias (Qwen2), q_norm/k_norm [D] (Qwen3), o_bias [E] and score_sinks [H]
            (gpt-oss), attn_post_norm/mlp_post_norm [E] (Gemma), q_gate [E,H*D] (Qwen3-Next); a
            matrix may be a `CodedWeight`. Of latents (kvqjax/model/latents.py; Q the width of the
            queries' latent) k [E,R] and v [E,C] are what is cached before their rope and norm, q is
            [Q,H*(N+R)] and o [H*V,E], and there are q_latent [E,Q], k_up [C,H*N], v_up [C,H*V],
            q_latent_norm [Q] and latent_norm [C]. A recurrent layer (kvqjax/model/recurrent.py, M
            heads of keys, N of values) has instead of q, k, v and o: delta_q/delta_k [E,M*Dk],
            delta_v/delta_z [E,N*Dv], delta_a/delta_b [E,N], delta_o [N*Dv,E],
            delta_conv_q/delta_conv_k/delta_conv_v [W,kernel], delta_rate/delta_bias [N], delta_norm
            [Dv]. With experts (kvqjax/model/experts.py) instead of gate, up and down: router [E,X],
            experts_gate/experts_up [X,E,F], experts_down [X,F,E], shared_gate/shared_up/shared_down
            as an MLP's, shared_router [E,1]; router_bias [X] and experts_gate_bias/experts_up_bias
            [X,F], experts_down_bias [X,E] (gpt-oss).

Functions that take the number of a layer count those of attention alone, as a cache does; recurrent
layers are numbered among themselves.

Layers have three forms. "scan": a stack over L in front is read by number inside a loop, which
compiles fast, but XLA for GPUs and CPUs copies a layer's weights out of a stack first. "unroll": a
list of one dict a layer (`unrolled`) is read in place by straight code, which compiles as often as
there are layers. "switch": in a loop as over stacks, each matrix is an array of its own, and a
branch multiplies by it (`LayerMatrices`): for CPUs. Where sparse and dense layers mix, a stack of
each name holds the layers that have it, with a table of which they are
(kvqjax/model/weight_trees.py); a list holds plain arrays.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvqjax._errors import UserError
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.experts import mix
from kvqjax.model.latents import absorbed, key_parts, latent_key, raised
from kvqjax.model.recurrent import State, advance, empty_states, gated, sources
from kvqjax.model.rope import check_length, positions_of_layer, rotate
from kvqjax.model.weight_trees import (
    KINDS,
    OF_EXPERTS,
    Layer,
    LayerMatrices,
    Params,
    Row,
    Rows,
    is_unrolled,
    layers_of,
    mlp,
    product,
    read_weight,
    stack_of,
)
from kvqjax.ops.attention import capped, segment_attention, with_sinks
from kvqjax.ops.finite import Sources, found_finite, zeroed
from kvqjax.ops.xla_workarounds import row_major, times_matrix


class Projected(NamedTuple):
    """Results that one layer computes from its input `h` before attention. `x` is the input after
    the attention norm, `bare` the keys before their bias. With latents `k` and `v` are the same
    (kvqjax/model/latents.py)."""

    q: Float[Array, "B T H D"]  # rotated
    k: Float[Array, "B T K D"]  # before RoPE, after bias and QK-norm
    v: Float[Array, "B T K D"]
    x: Float[Array, "B T E"] | None
    h: Float[Array, "B T E"] | None
    bare: Float[Array, "B T K D"] | None = None


def layer(params: Params, index: Int[Array, ""] | int, kind: str = "attention") -> Layer:
    """Read the weights of one layer.

    Args:
        params: the weights.
        index: the layer, counted among those of its kind; of a list only a plain number.
        kind: "attention" or "recurrent".

    Returns:
        The weights in the compute dtype. Experts, what only some layers have, and matrices that a
        loop chooses are still to be read (`kvqjax.model.weight_trees.Row`; `read_weight`,
        `product`).

    Raises:
        UserError: for a traced number and a list.
    """
    numbers = layers_of(params, kind)
    if not is_unrolled(params):
        return _layer_of_stack(params["layers"], index, numbers, kind)
    if isinstance(index, jax.core.Tracer):
        raise UserError("this reads weights as stacks; load the model with layers='scan'")

    weights = {}
    for name, x in params["layers"][numbers[index]].items():
        if name in OF_EXPERTS:
            # Experts are read one by one, of a list too: a layer's matrices are a stack of one row.
            weights[name] = Row(jax.tree.map(lambda a: a[None], x), 0, True)
        else:
            weights[name] = read_weight(x)
    return weights


def _layer_of_stack(
    stacks: Layer, index: Int[Array, ""] | int, numbers: tuple[int, ...], kind: str
) -> Layer:
    """Read layer `index` of a kind, whose layers are `numbers` among all, out of stacks."""
    # Where layers of this kind stand first, their numbers are those among all layers.
    two_kinds = numbers != tuple(range(len(numbers)))
    number = index
    if two_kinds and isinstance(index, jax.Array):
        number = jnp.asarray(numbers)[index]
    elif two_kinds:
        number = numbers[index]
    foreign_names: set[str] = set()  # of weights that only the other kind has
    for other_kind, names in KINDS.items():
        if other_kind != kind:
            foreign_names.update(names)

    def read(name: str, x):
        # Rows of a weight that only this kind has are those of its layers, in order.
        is_kind_stack = isinstance(x, Rows) and name in KINDS[kind]
        place = index if is_kind_stack else number
        if isinstance(x, Rows) and not is_kind_stack:
            return x.row(place)
        row = Row(stack_of(x), place, True)
        # A matrix that a loop chooses stays a row: a product reads it in place, and to read it here
        # would copy it.
        is_choice = isinstance(row.stack, LayerMatrices) and isinstance(place, jax.core.Tracer)
        return row if is_choice else row.read()

    weights = {name: read(name, x) for name, x in stacks.items() if name not in foreign_names}
    return {name: x for name, x in weights.items() if x is not None}


def with_read(weights: Layer) -> Layer:
    """Give the weights with the matrices of keys and values read: methods that store a layer's
    inputs multiply by them."""
    return weights | {name: read_weight(weights[name]) for name in ("k", "v") if name in weights}


def norm(
    x: Float[Array, "*B W"], weight: Float[Array, " W"] | None, eps: float, offset: float = 0.0
) -> Float[Array, "*B W"]:
    """RMSNorm over the last axis, times the weight plus `offset` where there is one; statistics in
    float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scaled = wide * jax.lax.rsqrt(mean_square + eps)
    if weight is None:
        return scaled.astype(x.dtype)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if offset:  # a weight near 0 keeps its digits: the sum is never rounded to the compute dtype
        return (scaled * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
    return (scaled.astype(x.dtype) * weight).astype(x.dtype)


def _norm(x, weight, config: KVShape):
    """Norm as the model's layers do."""
    return norm(x, weight, config.norm_eps, config.norm_offset)


def _product(x, weights: Layer, name: str):
    """Multiply by the matrix `name`."""
    # Kept row-major, or the head split after it makes XLA transpose the whole stack of weights
    # before a decode loop.
    return row_major(product(x, weights[name]))


def _linear(x, weights: Layer, name: str):
    """Multiply by the matrix `name`, and add its bias where the model has one."""
    y = _product(x, weights, name)
    bias = weights.get(f"{name}_bias")
    if bias is None:
        return y
    return y + bias[None, None]


def key_bias(weights: Layer, config: KVShape) -> Float[Array, "1 1 K D"]:
    """Give the bias of the keys that are cached here, as heads."""
    return heads(weights["k_bias"][None, None], config.num_kv_heads)


def _all_channels(x: Float[Array, "B T w"], config: ModelConfig) -> Float[Array, "B T W"]:
    """Gather keys or values of all KV heads cached here, where the projection is split finer than
    the cache."""
    if x.shape[-1] == config.kv_width:
        return x
    return jax.lax.all_gather(x, config.split, axis=2, tiled=True)


def heads(x: Float[Array, "B T W"], count: int) -> Float[Array, "B T N D"]:
    """Split the last axis into `count` heads."""
    return x.reshape(*x.shape[:2], count, -1)


def project(
    weights: Layer,
    h: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    config: ModelConfig,
    index: Int[Array, ""] | int | None = None,
) -> Projected:
    """Compute a layer up to attention: the norm, the projections to queries, keys and values with
    what the model has of biases and QK-norms, and RoPE on the queries alone.

    Args:
        h: the layer's input.
        index: the layer's number, or that of one like it. None serves where all layers turn and
            norm alike."""
    x = _norm(h, weights["attn_norm"], config)
    if config.latent is not None:
        q, k = _of_latents(weights, x, config)
        return Projected(_turned(q, positions, config, index), k, k, x, h)
    q = _linear(x, weights, "q")
    q = heads(q, q.shape[-1] // config.head_dim)
    bare = _product(x, weights, "k")
    v = _linear(x, weights, "v")
    bare = heads(_all_channels(bare, config), config.num_kv_heads)
    v = heads(_all_channels(v, config), config.num_kv_heads)
    k = bare
    if "k_bias" in weights:
        k = bare + key_bias(weights, config)
    has_norm = _of_layer(config.qk_norm, index)
    if has_norm is not False:
        normed_q = _norm(q, weights.get("q_norm"), config)
        normed_k = _norm(k, weights.get("k_norm"), config)
        if has_norm is True:
            q, k = normed_q, normed_k
        else:  # only some layers have it, and a loop over layers knows which as data
            q = jnp.where(has_norm, normed_q, q)
            k = jnp.where(has_norm, normed_k, k)
    return Projected(_turned(q, positions, config, index), k, v, x, h, bare)


def _of_latents(
    weights: Layer, x: Float[Array, "B T E"], config: ModelConfig
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T 1 D"]]:
    """Make queries that meet latents, and the one key that is also the value, both before RoPE."""
    sizes = config.latent_heads
    latent = config.latent
    assert sizes is not None
    assert latent is not None
    q_latent = norm(_product(x, weights, "q_latent"), weights["q_latent_norm"], sizes.norm_eps)
    q = _product(q_latent, weights, "q")
    # A query has channels that meet the latent, and others that RoPE turns.
    turned_channels = config.head_dim - latent
    count = q.shape[-1] // (sizes.key_dim + turned_channels)
    plain, turned = jnp.split(heads(q, count), [sizes.key_dim], -1)
    turned_key = _product(x, weights, "k")
    plain_key = norm(_product(x, weights, "v"), weights["latent_norm"], sizes.norm_eps)
    key = latent_key(turned_key, plain_key)
    return latent_key(turned, absorbed(plain, weights["k_up"])), key[:, :, None]


def _turned(
    q: Float[Array, "B T H D"],
    positions: Int[Array, "B T"],
    config: ModelConfig,
    index: Int[Array, ""] | int | None,
) -> Float[Array, "B T H D"]:
    """Turn queries to their positions, multiply them by the growth of `_tempered`, and scale
    them."""
    rotated = rotate(q, positions_of_layer(positions, config, index), config)
    return scaled_queries(_tempered(rotated, positions, config, index), config)


def _of_layer(
    values: bool | tuple[bool, ...], index: Int[Array, ""] | int | None
) -> bool | Bool[Array, ""]:
    """Give a field's value in layer `index`, which a loop over stacked layers knows as data
    alone."""
    if not isinstance(values, tuple):
        return values
    if index is None:
        raise ValueError("layers differ; say which one this is")
    if isinstance(index, jax.Array):
        return jnp.asarray(values)[index]
    return values[index]


def scaled_queries(q: Float[Array, "B T N D"], config: KVShape) -> Float[Array, "B T N D"]:
    """Multiply queries so that scores, which attention multiplies by D^-1/2, come out times the
    shape's `scale`. The factor is a float32 number: rounded to bfloat16 it would change all scores
    by up to 0.4 percent."""
    if config.common_scale is None:
        return q
    factor = config.common_scale * config.head_dim**0.5
    return (q.astype(jnp.float32) * factor).astype(q.dtype)


def _tempered(
    q: Float[Array, "B T N D"],
    positions: Int[Array, "B T"],
    config: ModelConfig,
    index: Int[Array, ""] | int | None,
) -> Float[Array, "B T N D"]:
    """Multiply queries by a factor that grows with their position (`ModelConfig.query_growth`). It
    grows by the rope's length before scaling (Ministral 3), or in layers without a rope by a length
    of the model's own (Llama 4)."""
    if not config.query_growth:
        return q
    if config.growth_length is not None:
        times = (positions + 1) // config.growth_length
    elif config.turning is not None:
        times = positions // config.turning.original_max_position
    else:
        return q
    growth = 1 + config.query_growth * jnp.log1p(times.astype(jnp.float32))
    grown = (q * growth[:, :, None, None]).astype(q.dtype)
    if config.growth_length is None:
        return grown
    ropes = config.rope if isinstance(config.rope, tuple) else (config.rope,) * config.num_layers
    no_rope = tuple(rope is None or rope.kind == "none" for rope in ropes)
    grows = _of_layer(no_rope, 0 if index is None else index)
    return jnp.where(grows, grown, q)


def finish(
    weights: Layer, h: Float[Array, "B T E"], attended: Float[Array, "B T H D"], config: ModelConfig
):
    """Compute a layer from attention on: the output projection, the residual, and the gated MLP.

    Args:
        h: the layer's input.
        attended: what attention gives.

    Returns:
        The layer's output [B, T, E]."""
    if config.latent is not None:
        _, latents = key_parts(attended, config.latent)
        attended = raised(latents, weights["v_up"])
    attended = attended.reshape(*h.shape[:2], -1)
    if "q_gate" in weights:
        gate = _product(_norm(h, weights["attn_norm"], config), weights, "q_gate")
        attended = attended.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return _finished(weights, h, attended.astype(h.dtype), "o", config)


def _finished(
    weights: Layer,
    h: Float[Array, "B T E"],
    mixed: Float[Array, "B T W"],
    name: str,
    config: ModelConfig,
):
    """Do `finish` for what the matrix `name` takes, of either kind of layer."""
    added = _total(product(mixed, weights[name]), config)
    if "o_bias" in weights:
        added = added + weights["o_bias"][None, None]
    h = h + _post_norm(weights, "attn_post_norm", added, config)
    x = _norm(h, weights["mlp_norm"], config)
    added = _total(_feed_forward(weights, x, config), config)
    return h + _post_norm(weights, "mlp_post_norm", added, config)


def _post_norm(
    weights: Layer, name: str, x: Float[Array, "B T E"], config: ModelConfig
) -> Float[Array, "B T E"]:
    """Norm what a layer adds to its input, in models that do (Gemma)."""
    if name not in weights:
        return x
    return _norm(x, weights[name], config)


def _feed_forward(
    weights: Layer, x: Float[Array, "B T E"], config: ModelConfig
) -> Float[Array, "B T E"]:
    """Compute the MLP, or the experts. In a loop over layers of both kinds both are there, and a
    branch is taken."""

    def dense():
        matrices = [weights[name] for name in ("gate", "up", "down")]
        return mlp(x, *matrices, activation=config.activation)

    def sparse():
        tokens = x.reshape(-1, x.shape[-1])
        return mix(weights, tokens, config).reshape(x.shape)

    if "router" not in weights:
        return dense()
    if "gate" not in weights:
        return sparse()
    return jax.lax.cond(weights["router"].here, sparse, dense)


def _total(x, config: ModelConfig):
    """Sum over the devices that hold parts of a contracted axis."""
    if not config.split:
        return x
    return jax.lax.psum(x, config.split)


def embed(
    params: Params, tokens: Int[Array, "B T"], config: ModelConfig | None = None
) -> Float[Array, "B T E"]:
    """Look up rows of the embedding table; `config` is needed where it may be split over devices,
    or is scaled."""
    if config is None:
        return params["embed"][tokens]
    rows = _looked_up(params["embed"], tokens, config)
    if config.embedding_scale == 1:
        return rows
    return rows * jnp.asarray(config.embedding_scale, rows.dtype)


def _looked_up(
    table: Float[Array, "v E"], tokens: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T E"]:
    """Look up rows of a table, of which a device may hold a part of the vocabulary."""
    if table.shape[0] == config.vocab_size:
        return table[tokens]
    rows = tokens - jax.lax.axis_index(config.split) * table.shape[0]
    row_mask = (rows >= 0) & (rows < table.shape[0])
    # Every token has its row on one device. The others give zeros to the sum.
    is_here = row_mask[..., None]
    here = table[jnp.where(row_mask, rows, 0)]
    return _total(jnp.where(is_here, here, jnp.zeros((), table.dtype)), config)


def whole_heads(q: Float[Array, "B T h D"], config: ModelConfig) -> Float[Array, "B T H D"]:
    """Gather the queries of all heads that attend here: several devices share the tokens of their
    KV heads."""
    if not config.gathered:
        return q
    return jax.lax.all_gather(q, config.gathered, axis=2, tiled=True)


def own_heads(
    x: Float[Array, "B T N D"], config: ModelConfig, count: int
) -> Float[Array, "B T n D"]:
    """Cut out of all N heads here those of this device: of query heads its own `count`, of KV heads
    those that they attend to."""
    if not config.gathered:
        return x
    share = x.shape[2] * count // config.num_heads
    start = jax.lax.axis_index(config.gathered) * count * x.shape[2] // config.num_heads
    return jax.lax.dynamic_slice_in_dim(x, start, max(1, share), 2)


def unembed(params: Params, h: Float[Array, "B T E"], config: ModelConfig) -> Float[Array, "B T V"]:
    """Compute logits in float32, after the final norm."""
    h = _norm(h, params["norm"], config)
    if config.tied_embeddings:
        scores = times_matrix(h, params["embed"], jnp.float32, turned=True)
    else:
        scores = times_matrix(h, params["head"], jnp.float32)
    return capped(scores, config.logit_softcap)


def over_layers(params: Params, first: int, count: Int[Array, ""] | int, step: Callable, state):
    """Call `state = step(index, state)` for `count` layers from `first` on: a loop over stacked
    weights, straight code over a list, where `index` is a plain number."""
    if not is_unrolled(params):
        return jax.lax.fori_loop(first, first + count, step, state)
    for index in range(first, first + count):
        state = step(index, state)
    return state


# --- Recurrent layers ---


class Recurred(NamedTuple):
    """Results of a recurrent layer for some tokens.

    `h` is the layer's output. `state` is the one after the tokens that count. `new` are the tokens'
    sources (`kvqjax.model.recurrent.sources`). `finite` marks tokens whose sources are finite
    numbers. Other sources count as 0, and the output is NaN from the first such token on."""

    h: Float[Array, "B T E"]
    state: State
    new: Sources
    finite: Bool[Array, "B T"]


def recur(
    weights: Layer,
    h: Float[Array, "B T E"],
    state: State,
    counts: Int[Array, " B"],
    config: ModelConfig,
    broken: Bool[Array, " B"] | None = None,
) -> Recurred:
    """Run one recurrent layer over T tokens of each row. The first `counts[b]` of them count.
    `broken` marks rows with an earlier token whose sources are not finite."""
    assert config.recurrent is not None
    x = _norm(h, weights["attn_norm"], config)
    new = sources(weights, x)
    finite = found_finite(jnp.float32, new)
    out, state = advance(weights, state, zeroed(jnp.float32, new), counts, config.recurrent)
    # The state remembers all tokens, so that outputs are NaN from a token that is not finite on.
    spoils = ~finite & (jnp.arange(h.shape[1])[None] < counts[:, None])
    spoilt = jnp.cumsum(spoils, axis=1) > 0
    if broken is not None:
        spoilt = spoilt | broken[:, None]
    mixed = jnp.where(spoilt[..., None], jnp.nan, gated(weights, x, out, config.norm_eps))
    output = _finished(weights, h, mixed.astype(h.dtype), "delta_o", config)
    return Recurred(output, state, new, finite)


def over_recurrent(
    params: Params, config: ModelConfig, index: Int[Array, ""] | int, step: Callable, state
):
    """Call `state = step(number, state)` for every recurrent layer that stands directly before the
    layer of attention `index`. The number of layers of attention as `index` stands for those behind
    the last one.

    Weights in a list make straight code. In a loop over stacked weights it is an inner loop, whose
    length is static where layers of attention stand at even distances."""
    if config.recurrent is None:
        return state
    ends = config.recurrent_before
    starts = (0, *ends[:-1])
    if is_unrolled(params):
        for number in range(starts[index], ends[index]):
            state = step(number, state)
        return state
    if not isinstance(index, jax.core.Tracer):
        if starts[index] == ends[index]:
            return state
        return jax.lax.fori_loop(starts[index], ends[index], step, state)
    # Behind the last layer of attention there may be another number of them, but a loop over layers
    # of attention does not go there.
    counts = {end - start for start, end in zip(starts[:-1], ends[:-1], strict=True)}
    first = jnp.asarray(starts)[index]
    if len(counts) > 1:
        return jax.lax.fori_loop(first, jnp.asarray(ends)[index], step, state)
    numbers = first + jnp.arange(counts.pop())
    state, _ = jax.lax.scan(lambda state, number: (step(number, state), None), state, numbers)
    return state


def up_to(
    params: Params, index: Int[Array, ""] | int, h: Float[Array, "B T E"], config: ModelConfig
):
    """Run the recurrent layers directly before the layer of attention `index` over texts that begin
    at place 0 of h, without a cache: for training, calibration and reference. `index` as in
    `over_recurrent`."""
    shape = config.recurrent
    if shape is None:
        return h
    empty = jax.tree.map(lambda x: x[0], empty_states(shape, 1, h.shape[0]))
    counts = jnp.full(h.shape[:1], h.shape[1], jnp.int32)

    def step(number, h):
        return recur(layer(params, number, "recurrent"), h, empty, counts, config).h

    return over_recurrent(params, config, index, step, h)


def causal_mask(
    length: int, index: Int[Array, ""] | int, config: ModelConfig
) -> Bool[Array, "T T"]:
    """Mark the keys that each query of layer `index` sees among T tokens: not after it, within its
    sliding window."""
    endless = 2**30  # tokens: longer than any text, and twice that is still int32
    widths = [endless if window is None else window for window in config.windows]
    windows = jnp.asarray(widths, jnp.int32)
    queries = jnp.arange(length)[:, None]
    keys = jnp.arange(length)[None, :]
    seen = (keys <= queries) & (queries - keys < windows[index])
    if config.chunked is False:
        return seen
    # In layers with chunks a query sees its own chunk alone.
    in_chunk = (keys <= queries) & (queries // windows[index] == keys // windows[index])
    return jnp.where(_of_layer(config.chunked, index), in_chunk, seen)


def own_sinks(weights: Layer, config: ModelConfig, count: int) -> Float[Array, " n"] | None:
    """Give the logits of the score sinks of this device's own `count` query heads; None where the
    model has none."""
    sinks = weights.get("score_sinks")
    if sinks is None:
        return None
    logits = own_heads(sinks[None, None, :, None], config, count)
    return logits[0, 0, :, 0]


def attend_plainly(
    q, k, v, index: Int[Array, ""] | int, weights: Layer, config: ModelConfig
) -> Float[Array, "B T H D"]:
    """Attend among T tokens that no cache holds, as layer `index`, with these weights, does; keys
    are rotated."""
    mask = causal_mask(q.shape[1], index, config)
    mask = jnp.broadcast_to(mask, (q.shape[0], *mask.shape))
    attended = segment_attention(q, k, v, mask, config.softcap)
    return with_sinks(attended, weights.get("score_sinks")).out


def hidden_states(
    params: Params, tokens: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T E"]:
    """Compute all layers without a cache, before the final norm: for training, calibration and
    reference."""
    check_length(config, tokens.shape[1])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def step(index, h):
        h = up_to(params, index, h, config)
        weights = layer(params, index)
        turns = positions_of_layer(positions, config, index)
        projected = project(weights, h, positions, config, index)
        rotated = rotate(projected.k, turns, config)
        attended = attend_plainly(projected.q, rotated, projected.v, index, weights, config)
        return finish(weights, h, attended, config)

    h = over_layers(params, 0, config.num_layers, step, embed(params, tokens, config))
    return up_to(params, config.num_layers, h, config)


def logits(params: Params, tokens: Int[Array, "B T"], config: ModelConfig) -> Float[Array, "B T V"]:
    """Compute next-token logits in float32 without a cache."""
    return unembed(params, hidden_states(params, tokens, config), config)
