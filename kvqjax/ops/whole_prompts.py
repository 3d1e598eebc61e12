"""Attention of whole prompts to themselves by NVIDIA's cuDNN, through JAX's own door to it."""

import functools

import jax
from jaxtyping import Array, Float


def attend_by_cudnn(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    sliding: int | None,
) -> Float[Array, "B T H D"]:
    """Attend from every token of a prompt to itself and those before it.

    Tokens of padding stand behind a row's own tokens, which therefore see none of them.

    Args:
        q: Queries of 16 bits, not yet scaled.
        k: Keys.
        v: Values, which are finite.
        sliding: How many tokens a query sees, with its own; None: all before it.

    Returns:
        The output, in the queries' dtype. A program that is not for an NVIDIA GPU computes it by
        XLA's products."""
    window = None if sliding is None else (sliding - 1, 0)

    def attend(q, k, v, implementation):
        # JAX's function promotes dtypes, which a user's settings may forbid.
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=window, implementation=implementation
            )

    cudnn, plain = (functools.partial(attend, implementation=name) for name in ("cudnn", "xla"))
    if jax.default_backend() != "gpu":  # JAX refuses even to trace the call where there is no cuDNN
        return plain(q, k, v)
    return jax.lax.platform_dependent(q, k, v, cuda=cudnn, default=plain)
