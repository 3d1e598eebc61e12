"""CommVQ keys: additive codes over a RoPE-commutative codebook (arXiv 2506.18879, section 4.2), in
complex form.

RoPE turns the channels i and i + D/2 of a head together. This pair is the complex number k_i = x_i
+ j x_{i+D/2}, which RoPE multiplies by exp(j theta_i pos). The paper's 2x2 blocks [[x, -y], [y, x]]
are complex numbers too. Complex multiplications commute, so the codebook may be rotated instead of
the decoded keys.

A group of g pairs is coded in R rounds. Round r has a codebook C_r of L rows. It codes what the
rounds before it left over, the residual, by two levels A_r and B_r:

    k_hat = prescale * sum_r ( C_r[A_r] + j C_r[B_r] )

    R rounds, L levels, g pairs per group, C groups of all heads (C g = K D/2), u tokens of a tile

A level is the number of a codebook row. A centre is C_r[A] + j C_r[B], one of the L^2 vectors that
a round can add.

A codebook row is stored as a vector of 2g channels, real parts first, as a head stores its pairs.
Multiplication by j is then a quarter turn, (x | y) -> (-y | x). `prescale` is the norm of a token's
key over all heads. Codes are computed against its stored value. A key of zeros has prescale 0 and
decodes to zeros; an infinite key stays non-finite.

    encode    x [u, K*D] -> / prescale -> groups [C, u, 2g] -> each round: nearest centre, residual -> levels [u, 2 R C]
    decode    levels -> rows of the codebook -> sum over rounds [u, C, 2g] -> channels [u, K*D] -> * prescale

Decoding has three forms, each for one kind of chip (`_decode`). Their results differ in rounding
only.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec, Fit
from kvqjax.codecs.commvq_tpu import columns, summed_columns
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field
from kvqjax.ops.xla_workarounds import kept_apart

FIT = Fit("kvqjax.calibrate.commvq")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommVQKeys:
    """Additive codes of keys before RoPE.

    Stored bits per channel: rounds * log2(levels) / group, and the prescale's 16/W.

    Attributes:
        head_dim: D, the channels of a head.
        rounds: R, how many centres are added.
        levels: L, the rows of a round's codebook: a power of two.
        group: g, the rotation pairs that share a code; 0: all D/2 pairs of a head.
        dtype: stores the prescale.
    """

    head_dim: int
    rounds: int
    levels: int = 64
    group: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self):
        check_fields(self)
        if self.levels not in (2, 4, 8, 16, 32, 64, 128, 256):
            raise UserError(f"levels={self.levels}; a power of two from 2 to 256")
        if self.rounds < 1:
            raise UserError(f"rounds={self.rounds}; at least 1")
        if self.head_dim % 2 or self.group < 0 or (self.head_dim // 2) % self.pairs:
            raise UserError(
                f"group={self.group} does not divide the {self.head_dim // 2} pairs of a head"
            )
        if self.dtype not in ("bfloat16", "float32"):
            raise UserError(f"dtype={self.dtype!r}; the prescale is stored as bfloat16 or float32")

    @property
    def pairs(self) -> int:
        """Count g, the rotation pairs that share one code."""
        return self.group or self.head_dim // 2

    def build(self, width: int) -> Codec:
        """Build the codec.

        Args:
            width: K*D, the channels of all KV heads.

        Returns:
            A codec with codes of log2(L) bits, 2 R C a token, and a prescale for each token. Its
            constant "codebook" is [R, C, L, 2g].

        Raises:
            UserError: for a width that is not made of whole heads.
        """
        if width % self.head_dim:
            raise UserError(f"head_dim={self.head_dim} does not divide the width {width}")
        groups = width // (2 * self.pairs)
        bits = self.levels.bit_length() - 1
        fields = {
            "codes": Field(
                kind="codes",
                form="columns",
                width=2 * self.rounds * groups,
                bits=bits,
                role="payload",
            ),
            "prescale": Field(kind="token", width=1, role="scales", dtype=self.dtype),
        }

        def encode(constants, x: Float[Array, "u W"]) -> dict[str, Num[Array, "rows lanes"]]:
            return _encode(self, constants["codebook"], x)

        def decode(constants, tile):
            return _decode(self, constants, tile)

        needs: dict[str, tuple[int, ...]] = {
            "codebook": (self.rounds, groups, self.levels, 2 * self.pairs)
        }
        return Codec(width, 1, fields, encode, decode, needs, FIT)


def group_pairs(x: Float[Array, "*n W"], head_dim: int, pairs: int) -> Float[Array, "*n C g2"]:
    """Reshape channels to groups of rotation pairs, real parts first. (A head's channels are its
    pairs' real parts, then their imaginary parts.)"""
    # [.., heads, real or imaginary, groups of a head, pairs of a group]
    parts = x.reshape(*x.shape[:-1], -1, 2, head_dim // 2 // pairs, pairs)
    return jnp.swapaxes(parts, -2, -3).reshape(*x.shape[:-1], -1, 2 * pairs)


def ungroup_pairs(x: Float[Array, "*n C g2"], head_dim: int, pairs: int) -> Float[Array, "*n W"]:
    """Undo `group_pairs`."""
    parts = x.reshape(*x.shape[:-2], -1, head_dim // 2 // pairs, 2, pairs)
    return jnp.swapaxes(parts, -2, -3).reshape(*x.shape[:-2], -1)


def quarter_turn(x: Float[Array, "*n g2"]) -> Float[Array, "*n g2"]:
    """Multiply every pair by j."""
    real, imag = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-imag, real], axis=-1)


def centre(
    book: Float[Array, "L g2"], a: Int[Array, "*n"], b: Int[Array, "*n"]
) -> Float[Array, "*n g2"]:
    """Look up the cluster centres C[A] + j C[B] in one group's codebook of one round."""
    # Levels come from `nearest`, so that they name rows of the codebook. Out-of-bounds checks are
    # left out.
    row = book.at[a].get(mode="promise_in_bounds")
    return row + quarter_turn(book.at[b].get(mode="promise_in_bounds"))


def split_distances(
    x: Float[Array, "n g2"], book: Float[Array, "L g2"]
) -> tuple[Float[Array, "n L"], Float[Array, "n L"], Float[Array, "L L"]]:
    """Split the squared distances to all centres into terms of A, of B and of both.

    So a vector needs inner products with 2L vectors, and not with L^2 centres. The terms of both
    are the same for all vectors.

    Args:
        x: vectors of one group.
        book: the group's codebook of one round.

    Returns:
        (a, b, cross) with |x - centre(A, B)|^2 - |x|^2 = a[A] + b[B] + cross[A, B].
    """
    exact = {"precision": "highest"}  # float32 whatever the platform's default precision
    turned = quarter_turn(book)
    energy = (book * book).sum(-1)[None]  # |C|^2, which a quarter turn leaves as it is
    a = energy - 2 * jnp.einsum("nd,ld->nl", x, book, **exact)
    b = energy - 2 * jnp.einsum("nd,ld->nl", x, turned, **exact)
    return a, b, 2 * jnp.einsum("ad,bd->ab", book, turned, **exact)


def nearest(
    x: Float[Array, "n g2"], book: Float[Array, "L g2"]
) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Find the levels (A, B) of the nearest centre; of equally near ones the smallest A, then the
    smallest B."""
    # |x|^2 is the same for all centres, and is left out.
    a, b, cross = split_distances(x, book)
    distance = a[:, :, None] + b[:, None, :] + cross[None]
    code = distance.reshape(x.shape[0], -1).argmin(-1).astype(jnp.int32)
    return code // book.shape[0], code % book.shape[0]


def _encode(spec: CommVQKeys, codebook, x):
    """Encode keys, one round after the other on what the rounds before leave.

    Args:
        codebook: [R, C, L, 2g].
        x: keys [u, K*D].

    Returns:
        Codes [u, 2 R C], which stand in the order of rounds, then A before B, then groups; and
        prescales [1, u].
    """
    # float32, with numbers beyond `LARGEST` cut, so that the sum of squares stays finite.
    x = wide(x)
    prescale = jnp.sqrt((x * x).sum(-1)).astype(spec.dtype)
    stored = prescale.astype(jnp.float32)[:, None]
    unit = x / jnp.where(stored > 0, stored, 1.0)
    # Groups come first, [C, u, 2g]: each has a codebook of its own.
    residual = jnp.swapaxes(group_pairs(unit, spec.head_dim, spec.pairs), 0, 1)

    def search(target, book):
        """Quantize what the rounds before left, [C, u, 2g], by one round's codebook [C, L, 2g]."""
        a, b = jax.vmap(nearest)(target, book)
        return target - jax.vmap(centre)(book, a, b), jnp.stack([a, b])

    codes = jax.lax.scan(search, residual, codebook.astype(jnp.float32))[1]  # [R, 2, C, u]
    return {"codes": codes.reshape(-1, x.shape[0]).T, "prescale": prescale[None]}


def _indices(codebook, codes) -> Int[Array, "R 2 *B n C"]:
    """Number the codebook rows that codes name.

    Args:
        codebook: [R, C, L, 2g]. Its R*C*L rows are numbered in this order.
        codes: [.., n, 2 R C], as `_encode` gives them.

    Returns:
        The row's number, for the level A and the level B of every round and group.
    """
    rounds, groups, levels, _ = codebook.shape
    codes = codes.astype(jnp.int32)
    codes = jnp.moveaxis(codes.reshape(*codes.shape[:-1], rounds, 2, groups), (-3, -2), (0, 1))
    # The first row of each round's and group's codebook.
    first = (
        jnp.arange(rounds * groups, dtype=jnp.int32).reshape(
            rounds, *[1] * (codes.ndim - 2), groups
        )
        * levels
    )
    return codes + first


def _rows_of(codebook, indices) -> Float[Array, "*B C g2"]:
    """Look up rows of a codebook, float32."""
    rows = codebook.astype(jnp.float32).reshape(-1, codebook.shape[-1])
    return rows.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _gathered(codebook, codes):
    """Sum C[A] + j C[B] over all rounds, [..., n, C, 2g] float32: one round after the other."""
    # The rows of all A and of all B are summed apart. The sum for B is turned once, at the end.
    indices = _indices(codebook, codes)
    start = jnp.zeros((*indices.shape[1:], codebook.shape[-1]), jnp.float32)
    total = jax.lax.scan(lambda total, at: (total + _rows_of(codebook, at), None), start, indices)[
        0
    ]
    return total[0] + quarter_turn(total[1])


def _at_once(codebook, codes):
    """Do as `_gathered`, but in one sum over rounds. XLA for GPUs makes one kernel of it. A loop
    would write its partial sums to memory."""
    total = _rows_of(codebook, _indices(codebook, codes)).sum(0)
    return total[0] + quarter_turn(total[1])


def _decode(spec: CommVQKeys, constants, tile):
    """Decode keys, by the form that suits the chip that the program runs on.

    Args:
        constants: "codebook" [R, C, L, 2g], and "columns" where they were prepared once per step.
        tile: codes [.., n, 2 R C] and prescales [.., 1, n].

    Returns:
        Keys [.., n, K*D], float32.
    """

    def multiplied(constants, codes):
        """Choose rows by products with one-hot columns: XLA for TPUs gathers row by row."""
        book = constants["columns"] if "columns" in constants else columns(constants["codebook"])
        return summed_columns(book, codes)

    def gathered(constants, codes):
        """Look rows up, one round after the other."""
        return _gathered(constants["codebook"], codes)

    def fused(constants, codes):
        """Look rows up in one kernel, which writes float16: float32 would be twice the bytes."""
        # A key over its norm is a unit vector, whose numbers fit float16. `kept_apart` makes XLA
        # write float16.
        total = _at_once(constants["codebook"], codes)
        return kept_apart(total.astype(jnp.float16)).astype(jnp.float32)

    codes = tile["codes"].astype(jnp.uint32)
    total = jax.lax.platform_dependent(
        constants, codes, tpu=multiplied, cuda=fused, default=gathered
    )
    prescale = jnp.swapaxes(tile["prescale"], -1, -2).astype(jnp.float32)
    return ungroup_pairs(total, spec.head_dim, spec.pairs) * prescale
