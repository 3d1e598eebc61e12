"""Scores of CommVQ keys without decoding them, in plain jnp (arXiv 2506.18879, section 4.3; GQA cost is ours).

Keys are k_n = p_n sum_r (C_r[A_rn] + j C_r[B_rn]) before RoPE, which multiplies pair i by e^{j theta_i n}; q is rotated
at its own position. Two orders of the same sum give the scores:

- commuted: tables U[h,r,l] = conj(q_h) C_r[l] once per query; per token 2R gathers from them *per query head*;
- fused:    per token 2R gathers from C_r *per KV head*, one rotation, then one dot product per query head.

The angle depends on pair and token, so the sum over pairs cannot be taken before the gathers: with G query heads to a
KV head the commuted form gathers G times as much. `score_operations` counts both. A cache reads its keys block by
block in the fused order (`kvqjax.segments.attend_body`); these two are what that choice was measured with
(benchmarks/commvq_scores.py).

Codes are [B, n, R*2*C] (round, A then B, group); codebooks [R, C, V, 2g], a row's real parts first; V levels, C groups
of all KV heads, g pairs in a group, P = D/2 pairs of a head. Everything is float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

__all__ = ["commuted_scores", "fused_scores", "score_operations"]


def _levels(codes: Num[Array, "B n W"], codebook: Float[Array, "R C V g2"]) -> Int[Array, "R 2 B n C"]:
    rounds, groups = codebook.shape[:2]
    return jnp.moveaxis(codes.astype(jnp.int32).reshape(*codes.shape[:-1], rounds, 2, groups), (-3, -2), (0, 1))


def _pairs(x: Float[Array, "*n D"], split: int) -> tuple[Float[Array, "*n split g"], Float[Array, "*n split g"]]:
    """Real and imaginary parts of a head's pairs in `split` groups."""
    real, imag = jnp.split(x, 2, axis=-1)
    return real.reshape(*real.shape[:-1], split, -1), imag.reshape(*imag.shape[:-1], split, -1)


def _rotations(positions, frequencies, factor: float, split: int):
    """cos and sin of every token's angles, [B, n, split, g]."""
    angles = jnp.einsum("bn,p->bnp", positions.astype(jnp.float32), frequencies)
    return tuple((f(angles) * factor).reshape(*angles.shape[:2], split, -1) for f in (jnp.cos, jnp.sin))


def commuted_scores(
    q: Float[Array, "B H D"],
    codebook: Float[Array, "R C V g2"],
    codes: Num[Array, "B n W"],
    prescale: Float[Array, "B n"],
    positions: Int[Array, "B n"],
    frequencies: Float[Array, " P"],
    *,
    kv_heads: int,
    factor: float = 1.0,
) -> Float[Array, "B H n"]:
    """Scores q.k/sqrt(D) from per-query tables. `factor` multiplies the keys' cos and sin (yarn)."""
    batch, heads, dim = q.shape
    rounds, groups, levels, width = codebook.shape
    split, ratio = groups // kv_heads, heads // kv_heads
    q_real, q_imag = _pairs(q.reshape(batch, kv_heads, ratio, dim), split)
    book = codebook.reshape(rounds, kv_heads, split, levels, width)
    cos, sin = _rotations(positions, frequencies, factor, split)
    entries = _levels(codes, codebook).reshape(rounds, 2, *codes.shape[:2], kv_heads, split)

    def one_head(q_real, q_imag, book, pair, cos, sin):
        """[s,g] queries; [R,s,V,2g] codebook; [R,2,n,s] levels; [n,s,g] rotations -> [n]."""
        real, imag = jnp.split(book, 2, axis=-1)
        qr, qi = q_real[None, :, None], q_imag[None, :, None]
        table = jnp.concatenate([qr * real + qi * imag, qr * imag - qi * real], -1)  # conj(q) C: [R, s, V, 2g]

        def add(total, entry):
            table, pair = entry  # [s, V, 2g], [2, n, s]
            rows = jax.vmap(lambda t, i: t.at[i].get(mode="promise_in_bounds"), (0, 2), 2)(table, pair)
            return total + rows, None

        total = jax.lax.scan(add, jnp.zeros((2, *cos.shape[:-1], width), jnp.float32), (table, pair))[0]
        (a_real, a_imag), (b_real, b_imag) = (jnp.split(part, 2, axis=-1) for part in total)
        return ((a_real - b_imag) * cos - (a_imag + b_real) * sin).sum((-1, -2))

    over_group = jax.vmap(one_head, (0, 0, None, None, None, None))
    over_heads = jax.vmap(over_group, (0, 0, 1, 3, None, None))
    scores = jax.vmap(over_heads, (0, 0, None, 2, 0, 0))(q_real, q_imag, book, entries, cos, sin)
    return scores.reshape(batch, heads, -1) * prescale[:, None] * dim**-0.5


def fused_scores(
    q: Float[Array, "B H D"],
    codebook: Float[Array, "R C V g2"],
    codes: Num[Array, "B n W"],
    prescale: Float[Array, "B n"],
    positions: Int[Array, "B n"],
    frequencies: Float[Array, " P"],
    *,
    kv_heads: int,
    factor: float = 1.0,
) -> Float[Array, "B H n"]:
    """Scores q.k/sqrt(D) by gathering C_A + j C_B once per KV head, rotating, and one dot product per query head."""
    batch, heads, dim = q.shape
    groups, levels, width = codebook.shape[1:]
    first = (jnp.arange(groups, dtype=jnp.int32) * levels)[None, None, None]

    def add(total, entry):  # [2, B, n, C, 2g]
        book, pair = entry
        return total + book.reshape(groups * levels, width).at[pair + first].get(mode="promise_in_bounds"), None

    start = jnp.zeros((2, *codes.shape[:2], groups, width), jnp.float32)
    total = jax.lax.scan(add, start, (codebook, _levels(codes, codebook)))[0]
    (a_real, a_imag), (b_real, b_imag) = (jnp.split(part, 2, axis=-1) for part in total)
    real, imag = a_real - b_imag, a_imag + b_real  # [B, n, C, g]
    cos, sin = _rotations(positions, frequencies, factor, groups // kv_heads)
    cos, sin = (jnp.tile(x, (1, 1, kv_heads, 1)) for x in (cos, sin))
    by_head = (*codes.shape[:2], kv_heads, -1)
    k_real, k_imag = (real * cos - imag * sin).reshape(by_head), (real * sin + imag * cos).reshape(by_head)
    q_real, q_imag = jnp.split(q.reshape(batch, kv_heads, heads // kv_heads, dim), 2, axis=-1)
    dot = {"precision": "highest"}
    scores = jnp.einsum("bkgp,bnkp->bkgn", q_real, k_real, **dot) + jnp.einsum("bkgp,bnkp->bkgn", q_imag, k_imag, **dot)
    return scores.reshape(batch, heads, -1) * prescale[:, None] * dim**-0.5


def score_operations(*, heads: int, kv_heads: int, head_dim: int, rounds: int, levels: int) -> dict[str, dict]:
    """Real operations of one decode step's scores per cached token, and per step for the tables: gathered numbers,
    additions and multiplications of "commuted", "fused" and "exact" (rotated keys at hand); no cos and sin."""
    gathered = 2 * rounds * head_dim  # numbers fetched for one head of one token: A and B of every round
    sums = 2 * (rounds - 1) * head_dim + head_dim  # ... added up over rounds, then A with jB
    commuted = {"gathers": heads * gathered, "adds": heads * (sums + head_dim), "multiplies": heads * (head_dim + 1)}
    dots = {"adds": heads * head_dim, "multiplies": heads * head_dim}
    fused = {
        "gathers": kv_heads * gathered,
        "adds": kv_heads * (sums + head_dim) + dots["adds"],
        "multiplies": kv_heads * 2 * head_dim + dots["multiplies"] + heads,
    }
    tables = {"multiplies": heads * rounds * levels * 2 * head_dim, "adds": heads * rounds * levels * head_dim}
    return {
        "commuted": commuted | {"per_step": tables["multiplies"] + tables["adds"]},
        "fused": fused | {"per_step": 0},
        "exact": {"gathers": 0, "per_step": 0} | dots,
    }
