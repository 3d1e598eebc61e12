"""CommVQ's keys decoded for TPUs: codebook rows chosen by products with one-hot columns instead of gathers, which XLA
does row by row. Equal to kvqjax.codecs.commvq_keys's own form but for rounding: a codebook number is taken as two
bfloat16 numbers, its first 16 significant bits, so that a key is off by 2^-16 of the sum of its rows' sizes at most.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

__all__ = ["columns", "summed_columns"]

CHUNK = 4  # rounds that one product sums: deep enough to fill matrix units, while the one-hot columns stay on the chip


def _turn(width: int) -> np.ndarray:
    """Make the matrix that turns (x | y) to (-y | x): the quarter turn of kvqjax.codecs.commvq_keys, on the matrix
    unit."""
    half = np.eye(width // 2)
    return np.block([[0 * half, half], [-half, 0 * half]])


def _pieces(x: Float[Array, "*n w"]) -> list[Float[Array, "*n w"]]:
    """Split float32 numbers into their first 8 significant bits and the next 8, both bfloat16."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    top = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return [top.astype(jnp.bfloat16), (x - top).astype(jnp.bfloat16)]


def columns(codebook: Float[Array, "R C L g2"]) -> Float[Array, "steps C rows pieces"]:
    """Lay out the codebook that one-hot columns choose from: rows and turned rows of `CHUNK` rounds at a time, both
    pieces side by side. Missing rounds of the last step are zeros."""
    rounds, groups, levels, width = codebook.shape
    steps = -(-rounds // CHUNK)
    book = jnp.pad(codebook.astype(jnp.float32), ((0, steps * CHUNK - rounds), (0, 0), (0, 0), (0, 0)))
    book = jnp.swapaxes(book.reshape(steps, CHUNK, groups, levels, width), 1, 2)
    turn = jnp.asarray(_turn(width), jnp.bfloat16)
    pieces = _pieces(book)
    turned = [jnp.einsum("sckly,yx->scklx", x, turn, preferred_element_type=jnp.bfloat16) for x in pieces]
    rows = jnp.stack([jnp.concatenate(pieces, -1), jnp.concatenate(turned, -1)], 3)  # [steps, C, CHUNK, 2, L, 2 g2]
    return rows.reshape(steps, groups, CHUNK * 2 * levels, 2 * width)


def summed_columns(
    columns: Float[Array, "steps C rows pieces"], codes: UInt[Array, "*n lanes"]
) -> Float[Array, "*n C g2"]:
    """Sum C[A] + j C[B] over all rounds for every token and group, float32. Codes have at most 8 bits."""
    steps, groups, rows, width = columns.shape
    levels = rows // (2 * CHUNK)
    flat = codes.reshape(-1, codes.shape[-1]).astype(jnp.bfloat16).T.reshape(-1, groups, codes[..., 0].size)
    chosen = jnp.pad(flat, ((0, steps * 2 * CHUNK - len(flat)), (0, 0), (0, 0))).reshape(steps, -1, *flat.shape[1:])
    # A product copies a code to the rows of all its levels, and arithmetic compares it with them. XLA would write
    # broadcast copies to memory, and truth values in a layout of bytes.
    copies = jnp.asarray(np.repeat(np.eye(2 * CHUNK), levels, axis=0), jnp.bfloat16)
    level = jnp.tile(jnp.arange(levels, dtype=jnp.float32), 2 * CHUNK).reshape(1, rows, 1)

    def add(total, step):
        rows, chosen = step
        code = jnp.einsum("rk,kcn->crn", copies, chosen, preferred_element_type=jnp.float32)
        hot = jnp.maximum(1.0 - jnp.abs(code - level), 0.0).astype(jnp.bfloat16)
        return total + jnp.einsum("crn,crp->cnp", hot, rows, preferred_element_type=jnp.float32), None

    start = jnp.zeros((groups, flat.shape[-1], width), jnp.float32)
    top, remainder = jnp.split(jax.lax.scan(add, start, (columns, chosen))[0], 2, axis=-1)
    return jnp.swapaxes(top + remainder, 0, 1).reshape(*codes.shape[:-1], groups, width // 2)
