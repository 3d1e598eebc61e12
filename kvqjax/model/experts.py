"""Mixtures of experts: a router scores all experts for a token, the best few compute, and their
outputs are summed.

    s = softmax(x W_router),   y = sum over the per_token largest s_e of  s_e (silu(x G_e) * (x U_e)) D_e
                             (+ sigmoid(x w_shared) times a shared MLP)

The chosen scores may be divided by their sum. If scores are equal, the expert with the lower number
is chosen. Router and experts may have biases, and experts another activation
(`kvqjax.model.config.ExpertConfig`).

The matrices of experts are a `Row` of a stack (kvqjax/model/weight_trees.py): those of an expert
are cut out when it computes. Along a mesh's `split` a device has some of the experts, and computes
only these.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.model.config import ModelConfig
from kvqjax.model.weight_trees import ACTIVATIONS, BY_EXPERT, OF_EXPERTS, Layer, mlp, read_weight
from kvqjax.ops.xla_workarounds import few_rows, times_matrix

MOST_AT_ONCE = 512  # most tokens for which all experts compute together, on GPUs (`_at_once`)
# Most tokens of a tile, which one product with an expert's matrices takes (`_in_turn`).
MOST_TOGETHER = 128


def _expert(
    config: ModelConfig, x: Float[Array, "*N E"], gate, up, down, *biases
) -> Float[Array, "*N E"]:
    """Compute one expert, with the biases of its three products where it has them."""
    experts = config.experts
    assert experts is not None
    if not biases and experts.swiglu_limit is None:
        return mlp(x, gate, up, down, activation=config.activation)
    if biases:
        gate_bias, up_bias, down_bias = (
            bias.reshape((1,) * (x.ndim - 1) + bias.shape) for bias in biases
        )
    else:
        gate_bias = up_bias = down_bias = jnp.zeros((), x.dtype)
    g = times_matrix(x, gate) + gate_bias
    u = times_matrix(x, up) + up_bias
    if experts.swiglu_limit is None:
        inner = ACTIVATIONS[config.activation](g) * u
    else:
        # The clamped activation of gpt-oss
        g = jnp.minimum(g, experts.swiglu_limit)
        u = jnp.clip(u, -experts.swiglu_limit, experts.swiglu_limit)
        inner = g * jax.nn.sigmoid(experts.swiglu_alpha * g) * (1 + u)
    return times_matrix(few_rows(inner), down) + down_bias


def mix(weights: Layer, x: Float[Array, "N E"], config: ModelConfig) -> Float[Array, "N E"]:
    """Compute the weighted sum of the chosen experts' outputs, and the shared expert's, for every
    token.

    Args:
        weights: the weights of a sparse layer.
        x: the tokens, after the norm of the MLP.

    Returns:
        The outputs. Where experts are split over devices they are the part of this device's
        experts, to be summed.
    """
    bias = read_weight(weights["router_bias"]) if "router_bias" in weights else None
    chosen, shares = route(x, read_weight(weights["router"]), config, bias)
    local = weights[BY_EXPERT[0]].experts  # experts of this device
    if config.split:
        chosen = chosen - jax.lax.axis_index(config.split) * local
    local_mask = (chosen >= 0) & (chosen < local)
    # Number `local` stands for experts of other devices.
    chosen = jnp.where(local_mask, chosen, local)
    expert = functools.partial(_expert, config)
    inputs = x
    if config.experts is not None and config.experts.sigmoid:
        # Here a share multiplies the expert's input, not its output. Only one expert is chosen
        # then.
        inputs, shares = (x * shares).astype(x.dtype), jnp.ones_like(shares)
    loop = functools.partial(_in_turn, alone=not config.split, expert=expert)
    at_once = functools.partial(_at_once, expert=expert)
    out = jax.lax.platform_dependent(weights, inputs, chosen, cuda=at_once, default=loop)
    out = jnp.where(local_mask[..., None], out, jnp.zeros((), out.dtype))
    total = jnp.einsum("nke,nk->ne", out, shares, preferred_element_type=jnp.float32)
    total = total.astype(x.dtype)
    if "shared_gate" not in weights:
        return total
    names = ("shared_gate", "shared_up", "shared_down")
    shared = mlp(x, *(weights[name] for name in names), activation=config.activation)
    if "shared_router" not in weights:
        return total + shared
    share = jnp.einsum("ne,eo->no", x, read_weight(weights["shared_router"]))
    return total + jax.nn.sigmoid(share) * shared


def route(
    x: Float[Array, "N E"],
    router: Float[Array, "E X"],
    config: ModelConfig,
    bias: Float[Array, " X"] | None = None,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Choose the experts of every token.

    Args:
        x: the tokens.
        router: the router's matrix.
        bias: is added to the scores.

    Returns:
        The experts' numbers, and their shares in the output, float32.
    """
    assert config.experts is not None
    scores = jnp.einsum("ne,ex->nx", x, router, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)[None]
    if config.experts.sigmoid:
        best, chosen = jax.lax.top_k(scores, config.experts.per_token)
        return chosen, jax.nn.sigmoid(best)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), config.experts.per_token)
    if config.experts.normalised:
        shares = shares / shares.sum(-1, keepdims=True)
    return chosen, shares


def _names(weights: Layer) -> tuple[str, ...]:
    """List the weights of an expert that the model has, in the order in which `_expert` takes
    them."""
    return tuple(name for name in OF_EXPERTS if name in weights)


def _in_turn(
    weights: Layer, x, chosen: Int[Array, "N k"], alone: bool, expert: Callable
) -> Float[Array, "N k E"]:
    """Compute the output of every chosen expert, in a loop over tiles of tokens.

    An expert's matrices are read once for each tile of its tokens, and never if no token chose it.

    Args:
        x: the tokens.
        chosen: the experts of every token.
        alone: whether this device has all experts.
        expert: computes one expert.
    """
    (count, k), pairs, local = chosen.shape, chosen.size, weights[BY_EXPERT[0]].experts
    # A tile has the smallest power of two of tokens that is at least the mean number of tokens of
    # an expert.
    size = min(MOST_TOGETHER, 1 << (max(1, pairs // local) - 1).bit_length())
    tiles, place = _tiles(chosen.reshape(-1), local, size)

    def compute(number, rows):
        return expert(x[rows // k], *(weights[name].expert(number) for name in _names(weights)))

    def step(_, tile):
        number, rows, used = tile
        if alone and size == 1:  # there is one tile per pair, and all are used
            return None, compute(number, rows)

        def zeros(number, rows):
            return jnp.zeros((size, x.shape[1]), x.dtype)

        return None, jax.lax.cond(used, compute, zeros, number, rows)

    _, out = jax.lax.scan(step, None, tiles)
    # The place of a pair with an expert of another device may be beyond the last tile. `mix` sets
    # its output to 0.
    place = jnp.minimum(place, out.shape[0] * size - 1)
    return out.reshape(-1, x.shape[1])[place].reshape(count, k, -1)


def _tiles(chosen: Int[Array, " P"], local: int, size: int):
    """Sort pairs of a token and an expert by expert, and cut them into tiles of one expert each.

    Args:
        chosen: the expert of every pair. Number `local` stands for experts of other devices.
        local: experts of this device.
        size: pairs of a tile.

    Returns:
        Three arrays with an entry for each of n tiles: its expert [n], its pairs [n, size] and
        whether it has any [n]. And the place [P] of every pair among the n * size rows of all
        tiles.
    """
    pairs, numbers = chosen.shape[0], jnp.arange(local)
    order = jnp.argsort(chosen)
    counts = (chosen[:, None] == numbers[None]).sum(0, dtype=jnp.int32)
    tiles = -(-counts // size)
    first_pair = jnp.cumsum(counts) - counts  # of each expert, in sorted order
    last_tile = jnp.cumsum(tiles)
    first_tile = last_tile - tiles

    # At most one tile of every expert is not full. So there are at most pairs // size + local
    # tiles, and no more than pairs.
    tile = jnp.arange(min(pairs, pairs // size + local))
    expert = jnp.searchsorted(last_tile, tile, side="right")
    expert = jnp.minimum(expert, local - 1).astype(jnp.int32)
    first = first_pair[expert] + (tile - first_tile[expert]) * size
    rows = order[jnp.minimum(first[:, None] + jnp.arange(size)[None], pairs - 1)]

    expert_of_pair = jnp.minimum(chosen[order], local - 1)
    place = first_tile[expert_of_pair] * size + jnp.arange(pairs) - first_pair[expert_of_pair]
    return (expert, rows, tile < last_tile[-1]), jnp.zeros_like(order).at[order].set(place)


def _at_once(
    weights: Layer, x, chosen: Int[Array, "N k"], expert: Callable
) -> Float[Array, "N k E"]:
    """Compute the output of every chosen expert without a loop; the arguments are those of
    `_in_turn`.

    With few tokens the matrices of each token's experts are read. XLA for GPUs does not copy them
    before. With many tokens all experts compute for all tokens, so that every matrix is read once.
    """
    (count, k), local = chosen.shape, weights[BY_EXPERT[0]].experts
    local_choice = jnp.minimum(chosen, local - 1)
    if chosen.size <= local:
        numbers = local_choice.reshape(-1)
        matrices = (jax.vmap(weights[name].expert)(numbers) for name in _names(weights))
        return jax.vmap(expert)(jnp.repeat(x, k, axis=0), *matrices).reshape(count, k, -1)
    matrices = [weights[name].read() for name in _names(weights)]

    def of_token(token):
        outputs = jax.vmap(expert, in_axes=(None, *[0] * len(matrices)))(token[0], *matrices)
        return outputs[token[1]]

    if count <= MOST_AT_ONCE:
        return jax.vmap(of_token)((x, local_choice))
    return jax.lax.map(of_token, (x, local_choice), batch_size=MOST_AT_ONCE)
