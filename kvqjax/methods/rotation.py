"""Rotations of a body: an orthogonal matrix R per KV head between source and codec.

    k' = k R_k      v' = v R_v      q . k = (q R_k) . k'      sum_t p_t v_t = (sum_t p_t v'_t) R_v^T

So attention to a body that holds k' and v' takes rotated queries, and its output is rotated back.
Both rotations are done once per step and query, never per cached token. Sinks, window and new
tokens are not rotated: they are in the source's frame, the body in its own.

- hadamard: the orthonormal Hadamard matrix H / sqrt(D). It spreads a large channel over all
  channels of the head.
- signs: random signs of channels, then the Hadamard matrix; the signs are the same for every head
  (`signs:7` takes another seed). Without signs a constant vector becomes one large channel.
- pairs: 45 degrees within each RoPE pair. It commutes with RoPE, so that keys before RoPE can be
  stored rotated.
- fitted: calibrated matrices, one per layer and KV head (kvqjax.calibrate.rotation).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._arguments import whole_number
from kvqjax._errors import UserError
from kvqjax.codecs.hadamard import hadamard, has_hadamard
from kvqjax.model.config import KVShape
from kvqjax.model.latents import key_parts, latent_key

KINDS = ("none", "hadamard", "signs", "pairs", "fitted")
# The group of a layer's fitted matrices: {"keys": [K, D, D], "values": [K, D, D]}
CONSTANTS = "rotation"
NAMES = {"k": "keys", "v": "values"}  # of sources in that group

Rotations = dict[str, str]  # source -> rotation, as policies write it


class Frame(NamedTuple):
    """Functions between the frame of a source and the frame of the body. All of them take the
    layer's constants.

    turn(constants, source, x [.., W], back) -> [.., W]      vectors of a source into the body's frame, or `back`
    queries(constants, q [B, T, H, D]) -> [B, T, H, D]       queries into the frame of the body's keys
    outputs(constants, out [B, T, H, D]) -> [B, T, H, D]     sums of the body's values back into the source's frame
    keys(constants, k [B, n, K, D]) -> [B, n, K, D]          the body's keys back into the source's frame
    """

    rotations: Rotations  # of the sources that are rotated
    turn: Callable
    queries: Callable
    outputs: Callable
    keys: Callable


def check_rotation(text: str, rope: str = "post") -> None:
    """Raise UserError for text that names no rotation. With `rope` "pre", where keys are stored
    before RoPE, raise it also for a rotation that does not commute with RoPE."""
    kind, colon, seed = text.partition(":")
    if kind not in KINDS or (colon and not (kind == "signs" and whole_number(seed) is not None)):
        raise UserError(f"rotation {text!r}; known: {', '.join(KINDS)}, and signs:SEED")
    if rope == "pre" and kind not in ("none", "pairs"):
        raise UserError(
            f"rotation {text!r} does not commute with RoPE, and the keys are stored before it: rotate=pairs does, "
            "rope=post stores them after it, and value_rotate rotates values alone"
        )


def turning(
    rotate: str, value_rotate: str, rope: str = "post", fitted: bool = True
) -> dict[str, str]:
    """Turn a method's options into fields of KeysAndValues.

    Args:
        rotate: the rotation of keys.
        value_rotate: the rotation of values; "same" for the keys' rotation.
        rope: how keys are stored, "pre" or "post".
        fitted: whether matrices can be calibrated for the method's codecs.

    Returns:
        The fields `key_rotation` and `value_rotation`.

    Raises:
        UserError: for rotations that do not exist, or that such keys or codecs cannot have.
    """
    rotations = {
        "key_rotation": rotate,
        "value_rotation": rotate if value_rotate == "same" else value_rotate,
    }
    check_rotation(rotate, rope)
    check_rotation(rotations["value_rotation"])
    if "fitted" in rotations.values() and not fitted:
        kinds = ", ".join(KINDS[:-1])
        raise UserError(
            f"rotation 'fitted' needs codecs without calibrated tables; known here: {kinds}"
        )
    return rotations


@functools.lru_cache(maxsize=32)
def matrix_of(text: str, dim: int) -> np.ndarray:
    """Build a rotation that is not fitted, up to a factor, of integers.

    Args:
        text: the rotation, as policies write it.
        dim: D, the channels of a head.

    Returns:
        M [D, D], int8. All its columns have the same length. The rotation R is M divided by this
        length.

    Raises:
        UserError: where no Hadamard matrix of this order is known.
    """
    kind, _, seed = text.partition(":")
    if kind == "pairs":
        half = np.eye(dim // 2, dtype=np.int8)
        return np.block([[half, half], [-half, half]])
    if not has_hadamard(dim):
        raise UserError(
            f"rotation {text!r}: no Hadamard matrix of order {dim}, the head_dim, is known here; "
            "the rotations pairs and fitted remain"
        )
    signs = np.ones(dim, np.int8)
    if kind == "signs":
        signs = np.random.default_rng(int(seed or 0)).choice(np.array([-1, 1], np.int8), dim)
    return signs[:, None] * hadamard(dim).astype(np.int8)


def turned(
    x: Float[Array, "*B K X D"], matrix: np.ndarray | Float[Array, "K D D"], back: bool = False
) -> Float[Array, "*B K X D"]:
    """Multiply by a rotation.

    Args:
        x: vectors by KV head.
        matrix: the integers of `matrix_of`, the same for all heads, or fitted matrices R.
        back: multiply by R^T.

    Returns:
        The rotated vectors, float32.
    """
    precision = jax.lax.Precision.HIGHEST
    if isinstance(matrix, np.ndarray):
        # 1 / length of a column
        scale = float(np.square(matrix[:, 0].astype(np.float64)).sum()) ** -0.5
        # Integers are exact in the dtype of `x`, so that products with bfloat16 queries are exact,
        # too.
        fixed = jnp.asarray(matrix.T if back else matrix, x.dtype)
        out = jnp.einsum(
            "...kxd,de->...kxe", x, fixed, precision=precision, preferred_element_type=jnp.float32
        )
        return out * jnp.float32(scale)
    spelled = "...kxe,kde->...kxd" if back else "...kxd,kde->...kxe"
    return jnp.einsum(
        spelled, x.astype(jnp.float32), matrix.astype(jnp.float32), precision=precision
    )


def needs_of(rotations: Rotations, config: KVShape) -> dict[str, dict[str, tuple[int, ...]]]:
    """Give the shapes of the constants that fitted rotations need."""
    shapes: dict[str, tuple[int, ...]] = {}
    for source, text in rotations.items():
        if text == "fitted":
            heads, dim = config.cached_heads[source]
            shapes[NAMES[source]] = (heads, dim, dim)
    return {CONSTANTS: shapes} if shapes else {}


def frame(rotations: Rotations, config: KVShape) -> Frame | None:
    """Make the frame of a body of keys and values; None where nothing is rotated."""
    rotations = {source: text for source, text in rotations.items() if text != "none"}
    if not rotations:
        return None
    of_heads, latent = config.cached_heads, config.latent
    fixed = {
        source: matrix_of(text, of_heads[source][1])
        for source, text in rotations.items()
        if text != "fitted"
    }

    def matrix(constants, source: str):
        return fixed[source] if source in fixed else constants[CONSTANTS][NAMES[source]]

    def turn(constants, source: str, x, back: bool = False):
        if source not in rotations:
            return x
        kv_heads, dim = of_heads[source]
        rows = x.astype(jnp.float32).reshape(*x.shape[:-1], kv_heads, 1, dim)
        return turned(rows, matrix(constants, source), back).reshape(x.shape)

    def turn_heads(
        constants, source: str, x: Float[Array, "B T H D"], back: bool
    ) -> Float[Array, "B T H D"]:
        """Turn vectors by head, each by the rotation of its KV head."""
        if source not in rotations:
            return x
        kv_heads, dim = of_heads[source]
        rows = x.reshape(*x.shape[:2], kv_heads, -1, dim)
        return turned(rows, matrix(constants, source), back).reshape(x.shape).astype(x.dtype)

    def turn_keys(constants, x: Float[Array, "B T H D"], back: bool) -> Float[Array, "B T H D"]:
        """Turn vectors that have the channels of a key. In a model with a latent these are channels
        of both sources."""
        if latent is None:
            return turn_heads(constants, "k", x, back)
        turned_part, latent_part = key_parts(x, latent)
        turned_part = turn_heads(constants, "k", turned_part, back)
        latent_part = turn_heads(constants, "v", latent_part, back)
        return latent_key(turned_part, latent_part)

    def outputs(constants, out: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
        if latent is None:
            return turn_heads(constants, "v", out, True)
        # A latent's outputs have the channels of a key. Only the latent's channels among them are
        # read.
        return turn_keys(constants, out, True)

    return Frame(
        rotations=rotations,
        turn=turn,
        queries=lambda constants, q: turn_keys(constants, q, False),
        outputs=outputs,
        keys=lambda constants, k: turn_keys(constants, k, True),
    )
