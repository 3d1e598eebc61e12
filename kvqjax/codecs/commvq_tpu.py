"""Decoding of CommVQ's keys on TPUs: matrix products with one-hot columns choose the codebook rows.

XLA for TPUs gathers row by row, which is slow. Results differ from those of the gathers in
kvqjax.codecs.commvq_keys in rounding only: a codebook number is taken as the sum of two bfloat16
numbers, its first 16 significant bits. So a key is off by 2^-16 of the sum of its rows' sizes at
most.

    R rounds, C groups, L levels, n tokens; a codebook row has 2g numbers (g2 in shapes)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

# Rounds that one product sums: enough to fill matrix units, and so few that one-hot columns stay on
# the chip
CHUNK = 4


def _turn(width: int) -> np.ndarray:
    """Make the matrix that turns (x | y) to (-y | x): the quarter turn of
    kvqjax.codecs.commvq_keys, on the matrix unit."""
    half = np.eye(width // 2)
    # Rows are multiplied from the left: (x | y) @ [[0, 1], [-1, 0]] = (-y | x).
    return np.block([[0 * half, half], [-half, 0 * half]])


def _pieces(x: Float[Array, "*n w"]) -> list[Float[Array, "*n w"]]:
    """Split float32 numbers into their first 8 significant bits and the next 8, both bfloat16."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    top = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return [top.astype(jnp.bfloat16), (x - top).astype(jnp.bfloat16)]


def columns(codebook: Float[Array, "R C L g2"]) -> Float[Array, "steps C rows pieces"]:
    """Lay out the codebook that one-hot columns choose from.

    Args:
        codebook: of a layer.

    Returns:
        For each step of `CHUNK` rounds and each group: the round's rows, for A, then its turned
        rows, for B, round after round. Both pieces of a number lie side by side (`_pieces`), so
        that `rows` = 2 CHUNK L and `pieces` = 2 g2. Rounds that the last step lacks are zeros.
    """
    rounds, groups, levels, width = codebook.shape
    steps = -(-rounds // CHUNK)
    book = jnp.pad(
        codebook.astype(jnp.float32), ((0, steps * CHUNK - rounds), (0, 0), (0, 0), (0, 0))
    )
    book = jnp.swapaxes(book.reshape(steps, CHUNK, groups, levels, width), 1, 2)
    turn = jnp.asarray(_turn(width), jnp.bfloat16)
    pieces = _pieces(book)
    turned = [
        jnp.einsum("sckly,yx->scklx", x, turn, preferred_element_type=jnp.bfloat16) for x in pieces
    ]
    # [steps, C, CHUNK, 2, L, 2 g2]
    rows = jnp.stack([jnp.concatenate(pieces, -1), jnp.concatenate(turned, -1)], 3)
    return rows.reshape(steps, groups, CHUNK * 2 * levels, 2 * width)


def summed_columns(
    columns: Float[Array, "steps C rows pieces"], codes: UInt[Array, "*n lanes"]
) -> Float[Array, "*n C g2"]:
    """Sum C[A] + j C[B] over all rounds for every token and group.

    Args:
        columns: the codebook, as the function `columns` lays it out.
        codes: levels as `commvq_keys` stores them, of at most 8 bits, so that bfloat16 holds them
            exactly.

    Returns:
        The sums, float32.
    """
    steps, groups, rows, width = columns.shape
    levels = rows // (2 * CHUNK)
    flat = codes.reshape(-1, codes.shape[-1]).astype(jnp.bfloat16).T  # [2 R C, n]
    flat = flat.reshape(-1, groups, codes[..., 0].size)  # [2R, C, n]
    # Of the last step's levels; their codebook rows are zeros.
    missing = steps * 2 * CHUNK - len(flat)
    chosen = jnp.pad(flat, ((0, missing), (0, 0), (0, 0))).reshape(steps, -1, *flat.shape[1:])
    # One-hot columns are made by a product, which copies a code to the rows of all its levels, and
    # by arithmetic, which compares it with them. XLA would write broadcast copies to memory, and
    # truth values in a layout of bytes.
    copies = jnp.asarray(np.repeat(np.eye(2 * CHUNK), levels, axis=0), jnp.bfloat16)
    level = jnp.tile(jnp.arange(levels, dtype=jnp.float32), 2 * CHUNK).reshape(1, rows, 1)

    def add(total, step):
        """Add one step's rows: `rows` [C, rows, pieces], `chosen` [2 CHUNK, C, n]."""
        rows, chosen = step
        code = jnp.einsum("rk,kcn->crn", copies, chosen, preferred_element_type=jnp.float32)
        # 1 where the code equals the level, 0 where it is off by 1 or more: both are integers.
        hot = jnp.maximum(1.0 - jnp.abs(code - level), 0.0).astype(jnp.bfloat16)
        return total + jnp.einsum(
            "crn,crp->cnp", hot, rows, preferred_element_type=jnp.float32
        ), None

    start = jnp.zeros((groups, flat.shape[-1], width), jnp.float32)
    total, _ = jax.lax.scan(add, start, (columns, chosen))
    top, remainder = jnp.split(total, 2, axis=-1)  # the sums of both pieces, [C, n, g2] each
    return jnp.swapaxes(top + remainder, 0, 1).reshape(*codes.shape[:-1], groups, width // 2)
