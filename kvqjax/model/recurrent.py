"""Layers of the gated delta rule (arXiv 2412.06464): a state of fixed size in place of keys and
values of all tokens.

    S_t = a_t S_{t-1} + k_t d_t,   d_t = b_t (v_t - (a_t S_{t-1})^T k_t),   o_t = S_t^T q_t              S [Dk, Dv]

A value head keeps the share a_t = exp(-exp(rate) softplus(x w_a + bias)) of its state and writes
the share b_t = sigmoid(x w_b) of an update. Queries, keys and values come from a causal convolution
over the last few tokens, channel by channel, and silu. Then queries and keys are divided by their
length, and queries by the root of Dk. The state of a row is S and the last inputs of the
convolution: all that later tokens need of earlier ones.

`sources` computes the rule's inputs for new tokens; `advance` takes a state over tokens. They are
two functions because `attend` computes the sources of a draft without changing the state, and
`commit` takes the state over the accepted tokens. A token beyond a row's count has a = 1, b = 0 and
no key, so that it changes nothing.

All of it is computed in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.model.config import RecurrentConfig
from kvqjax.model.weight_trees import Layer, product
from kvqjax.ops.finite import Sources
from kvqjax.ops.xla_workarounds import row_major

# {"conv_q", "conv_k", "conv_v": [B, kernel - 1, W], "delta": [B, Hv, Dk, Dv]}, float32
State = dict[str, Any]
CHUNK = 64  # tokens of a chunk (`delta_rule`), as in the training of the published models
# Up to this number, tokens are taken one after the other: the triangular system of a chunk would
# cost more.
STEPWISE = 4
GIVEN = ("q", "k", "v", "decay", "beta")  # the names of `sources`
LENGTH_EPS = 1e-6  # added to the square of a query's or key's length

# A TPU multiplies float32 numbers as bfloat16 unless it is told otherwise, and errors of a state
# add up.
_product = functools.partial(jnp.einsum, precision="highest")


# --- States ---


def state_shapes(shape: RecurrentConfig, batch: int) -> dict[str, tuple[int, ...]]:
    """Give the shapes of one layer's state."""
    sizes: dict[str, tuple[int, ...]] = {
        "delta": (batch, shape.value_heads, shape.key_dim, shape.value_dim)
    }
    return sizes | {
        f"conv_{name}": (batch, shape.kernel - 1, width) for name, width in shape.widths.items()
    }


def empty_states(shape: RecurrentConfig, layers: int, batch: int) -> State:
    """Make the states of layers before the first token: zeros [layers, ...]."""
    return {
        name: jnp.zeros((layers, *size), jnp.float32)
        for name, size in state_shapes(shape, batch).items()
    }


# --- The inputs of the rule ---


def sources(weights: Layer, x: Float[Array, "B T E"]) -> Sources:
    """Compute the rule's inputs for tokens.

    Args:
        weights: the weights of a recurrent layer.
        x: the layer's input after its norm.

    Returns:
        Float32 arrays by name. "q", "k" and "v" [B, T, W] are inputs of the convolution. "decay"
        [B, T, Hv] is the logarithm of the share of the state that is kept, and "beta" [B, T, Hv]
        the share of the update that is written.
    """
    projected = {
        name: row_major(product(x, weights[f"delta_{name}"])) for name in ("q", "k", "v", "a", "b")
    }
    wide = {name: value.astype(jnp.float32) for name, value in projected.items()}
    rate, bias = (
        weights[f"delta_{name}"].astype(jnp.float32)[None, None] for name in ("rate", "bias")
    )
    decay = -jnp.exp(rate) * jax.nn.softplus(wide["a"] + bias)
    return {name: wide[name] for name in "qkv"} | {
        "decay": decay,
        "beta": jax.nn.sigmoid(wide["b"]),
    }


def _convolved(
    history: Float[Array, "B k W"], new: Float[Array, "B T W"], kernel: Float[Array, "W K"]
):
    """Convolve each token with those before it, and apply silu. `history` holds the inputs before
    the first token."""
    line = jnp.concatenate([history, new], 1)
    kernel = kernel.astype(jnp.float32)
    total = sum(
        line[:, j : j + new.shape[1]] * kernel[None, None, :, j] for j in range(kernel.shape[1])
    )
    return jax.nn.silu(total)


def _newest(history: Float[Array, "B k W"], new: Float[Array, "B T W"], counts: Int[Array, " B"]):
    """Give the last inputs of the convolution after the first `counts[b]` new tokens of each
    row."""
    line = jnp.concatenate([history, new], 1)
    place = counts[:, None] + jnp.arange(history.shape[1])[None]
    return jnp.take_along_axis(line, place[..., None], axis=1, mode="promise_in_bounds")


def _of_unit_length(x: Float[Array, "B T N D"]) -> Float[Array, "B T N D"]:
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + LENGTH_EPS)


# --- A state taken over tokens ---


def advance(
    weights: Layer, state: State, new: Sources, counts: Int[Array, " B"], shape: RecurrentConfig
) -> tuple[Float[Array, "B T N V"], State]:
    """Take a layer's state over the first `counts[b]` of T tokens of each row.

    Args:
        state: before these tokens.
        new: the `sources` of T tokens, finite numbers.
        counts: of the tokens that are taken, from 0 to T.
        shape: the sizes of the layer.

    Returns:
        The rule's outputs, float32, which mean nothing for tokens beyond a count; and the state
        after the tokens.
    """
    live = (jnp.arange(new["q"].shape[1])[None] < counts[:, None])[..., None]
    new = {name: jnp.where(live, x, 0) for name, x in new.items()}
    mixed = {
        name: _convolved(state[f"conv_{name}"], new[name], weights[f"delta_conv_{name}"])
        for name in "qkv"
    }
    heads = {
        name: x.reshape(*x.shape[:2], -1, shape.key_dim) for name, x in mixed.items() if name != "v"
    }
    q, k = (_of_unit_length(heads[name]) for name in "qk")
    # The convolution makes keys for tokens beyond the count, too. Their beta of 0 keeps them out of
    # the state.
    v = mixed["v"].reshape(*mixed["v"].shape[:2], -1, shape.value_dim)
    out, delta = delta_rule(
        q * shape.key_dim**-0.5, k, v, new["decay"], new["beta"], state["delta"]
    )
    new_state = {
        f"conv_{name}": _newest(state[f"conv_{name}"], new[name], counts) for name in "qkv"
    }
    return out, new_state | {"delta": delta}


def delta_rule(
    q: Float[Array, "B T M K"],
    k: Float[Array, "B T M K"],
    v: Float[Array, "B T N V"],
    decay: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N K V"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """Compute the gated delta rule over T tokens: one after the other if they are few, else in
    chunks.

    G_i is the sum of the logarithms of a over the chunk's tokens up to i. The updates d of a chunk
    solve a triangular system (the WY form of arXiv 2406.06484, section 3.2, with decay as in arXiv
    2412.06464, section 3.3):

        d_i + b_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) d_j = b_i (v_i - exp(G_i) S^T k_i)

    Outputs and the next state are then matrix products.

    Args:
        q, k: queries, divided by the root of K, and keys of M heads, of which each serves N / M
            heads of values.
        v: values.
        decay: the logarithms of a, at most 0.
        beta: b, from 0 to 1.
        state: S before the first token.
        chunk: tokens of a chunk.

    Returns:
        Outputs, and S after the last token.
    """
    (batch, length, heads, _), group = q.shape, v.shape[2] // q.shape[2]

    def by_key_head(x: Array) -> Array:
        """Reshape [B, T, N, ..] to [B, T, M, N / M, ..]."""
        return x.reshape(batch, length, heads, group, *x.shape[3:])

    inputs = (q, k, by_key_head(v), by_key_head(decay), by_key_head(beta))
    state = state.reshape(batch, heads, group, *state.shape[2:])
    if length <= STEPWISE:
        outs = []
        for index in range(length):
            state, out = _step(state, *(x[:, index] for x in inputs))
            outs.append(out)
        out = jnp.stack(outs, 1)
    else:
        size = min(chunk, length)

        def in_chunks(x: Array) -> Array:
            """Pad [B, T, ..] with zeros to whole chunks and reshape it to [chunks, B, size, ..]."""
            padded = jnp.pad(x, ((0, 0), (0, -length % size), *[(0, 0)] * (x.ndim - 2)))
            return jnp.moveaxis(padded.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

        state, out = jax.lax.scan(_chunk, state, tuple(map(in_chunks, inputs)))
        out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, heads, group, v.shape[3])[:, :length]
    return out.reshape(v.shape), state.reshape(batch, heads * group, *state.shape[3:])


def _step(state, q, k, v, decay, beta):
    """Take the state over one token.

    The shapes are: state [B, M, G, K, V], q and k [B, M, K], v [B, M, G, V], decay and beta [B, M,
    G]."""
    state = state * jnp.exp(decay)[..., None, None]
    # Sums instead of matrix products: each matrix is multiplied by one vector only, and sums are
    # float32 on every chip.
    remembered = (state * k[:, :, None, :, None]).sum(-2)
    update = (v - remembered) * beta[..., None]
    state = state + k[:, :, None, :, None] * update[:, :, :, None]
    return state, (state * q[:, :, None, :, None]).sum(-2)


def _chunk(state, parts):
    """Take the state over one chunk of C tokens: state [B, M, G, K, V], q and k [B, C, M, K], v [B,
    C, M, G, V], decay and beta [B, C, M, G]. Tokens of padding have decay and beta 0."""
    q, k, v, decay, beta = parts
    size = q.shape[1]
    total = jnp.moveaxis(jnp.cumsum(decay, 1), 1, -1)  # G_i, [B, M, G, C]
    beta = jnp.moveaxis(beta, 1, -1)
    seen = jnp.tril(jnp.ones((size, size), bool))[None, None, None]
    # exp(G_i - G_j) for j <= i, else 0; [B, M, G, C, C]. The mask comes first, because the
    # exponential could overflow above the diagonal.
    decays = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    gram = _product("bimk,bjmk->bmij", k, k)[:, :, None]
    # The solver takes the diagonal as 1 and does not read it.
    system = gram * decays * beta[..., None]
    # exp(G_i) S^T k_i.
    remembered = _product("bimk,bmgkv->bmgiv", k, state) * jnp.exp(total)[..., None]
    right_side = (jnp.moveaxis(v, 1, 3) - remembered) * beta[..., None]
    # Solved by substitution. A solution by powers of the matrix would need products alone, but lose
    # all digits where tokens repeat each other: entries of the matrix are then 1, and those of its
    # powers binomial coefficients.
    update = jax.lax.linalg.triangular_solve(
        system, right_side, left_side=True, lower=True, unit_diagonal=True
    )
    # o_i = exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) d_j
    scores = _product("bimk,bjmk->bmij", q, k)[:, :, None] * decays
    out = _product("bimk,bmgkv->bmgiv", q, state) * jnp.exp(total)[..., None]
    out = out + _product("bmgij,bmgjv->bmgiv", scores, update)
    # S after the chunk's last token C: exp(G_C) S + sum_j exp(G_C - G_j) k_j d_j
    end_update = jnp.exp(total[..., -1:] - total)[..., None] * update
    state = state * jnp.exp(total[..., -1])[..., None, None] + _product(
        "bjmk,bmgjv->bmgkv", k, end_update
    )
    return state, jnp.moveaxis(out, 3, 1)


# --- The output of the layer ---


def gated(
    weights: Layer, x: Float[Array, "B T E"], out: Float[Array, "B T N V"], eps: float
) -> Float[Array, "B T W"]:
    """Normalise the rule's outputs head by head, and multiply them by silu(x W_z), a gate made of
    the layer's input."""
    scaled = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
    scaled = scaled * weights["delta_norm"].astype(jnp.float32)[None, None, None]
    gate = row_major(product(x, weights["delta_z"])).astype(jnp.float32)
    return (scaled.reshape(gate.shape) * jax.nn.silu(gate)).astype(x.dtype)
