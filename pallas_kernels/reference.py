"""Decode attention on packed keys and values in plain jnp, one block at a time: oracle, fallback
and the path on CPUs.

A loop goes over rows, in each over its pages (a body without pages has one for every row), in each
over blocks of tokens, and folds each into an online softmax:

    cut a block's words -> keys -> scores -> softmax weights -> values -> weighted sums      (`_attend_block`)
    all blocks -> divide by the sum of the weights -> output and log-sum-exp                 (`_finish`)

Rows take turns, so that what is decoded stays in a core's cache. A step of 16 rows with 600 tokens
at 2 bits took 257 ms with all rows at a time in turns of 1024 tokens, and takes 180 (SmolLM2-135M,
x86_64 with 2 cores; 140 are weights).

A block of S tokens is n = S/32 stretches of 32 tokens. `_Block` names one block of the body and
reads its arrays. A few queries read codes in lines and stripes without decoding them into memory
(`kvqjax.pallas_kernels.few_queries`). More queries meet decoded keys and values in products.

Letters beside the usual ones (docs/design.md): M = T*G query rows of one KV head, g groups of
tokens that share the keys' scales, V slices of a head whose channels share the values' scales.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from kvqjax.ops.attention import Partial, capped
from kvqjax.ops.packing.base import PLANE, from_bits, split_bits, unpack
from kvqjax.ops.packing.planes import unpack_lines
from kvqjax.ops.xla_workarounds import (
    exp_in_loops,
    floor_divide,
    kept_apart,
    known_after,
    row_major,
)
from kvqjax.pallas_kernels import few_queries
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check

# Tokens of one turn of the loop. Decoded, at 192 channels, they and their values take 0.8 MB, and
# stay in a core's second-level cache. 2-bit codes of 6000 tokens took 101 ms a step in turns of
# 1024 and 70 in turns of 512 (SmolLM2-135M, x86_64 with 2 cores and 2 MB each).
AT_ONCE = 512
NUMBERS = 2**20  # of the keys or scores of one turn, at most, where a token has many channels


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
    softcap: float | None = None,
    pages: Int[Array, "B N"] | None = None,
) -> Partial:
    """Attend to the packed tokens of one layer's body.

    Only blocks that some query sees are read. Scales and minima that lie before the first token or
    behind the last one that a query of the row sees may hold anything: they are read as 0, since 0
    x inf would be NaN.

    Args:
        q: queries, rotated by RoPE, and not yet multiplied by D^-1/2.
        start: the first body token that query t of row b sees; 0 without a sliding window.
        stop: one past the last body token that the query sees: for a decode step the row's body
            tokens. A query sees nothing where `start` >= `stop`.
        softcap: caps the scores (`kvqjax.ops.attention.capped`); None: no cap.
        pages: where it is given, the body's rows are pages of S tokens, and row b's tokens lie in
            pages[b, 0], pages[b, 1], ... in this order; -1 stands for no page.

    Returns:
        The output [B, T, H, D] and the log-sum-exp [B, T, H], float32. A query that sees nothing
        gets 0 and -inf.

    Raises:
        ValueError: for a spec that is not `plain`, and for arrays whose shapes do not fit the spec.
    """
    if not spec.plain:
        raise ValueError(f"{spec}: this reads uniform codes of keys after RoPE only")
    check(q, body, spec, pages)
    if pages is None:
        pages = jnp.arange(len(q), dtype=jnp.int32)[:, None]
    return _finish(
        _over_pages(_grouped(q, spec), body, layer, start, stop, spec, softcap, pages), q.shape
    )


def _unseen(grouped: Float[Array, "B K M D"], spec: PackedSpec) -> tuple[Array, Array, Array]:
    """Make the online softmax of queries that have seen nothing: peak -inf, sums 0."""
    # `few_queries.weighted` leaves the sums of every 32nd token apart, on a last axis that
    # `_finish` sums up.
    shape, sum_count = grouped.shape[:-1], PLANE if _are_few(grouped.shape[2], spec) else 1
    return jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*grouped.shape, sum_count))


def _seen(
    block: "_Block", start: Int[Array, "B T"], stop: Int[Array, "B T"], first_new
) -> Bool[Array, "B T n 32"]:
    """Mark the tokens of a block that each query sees. Tokens before `first_new` belong to the
    block before."""
    slot = (block.token + _numbers(block.size))[None, None]
    low, high = (x[..., None, None] for x in (start, stop))
    return (slot >= low) & (slot < high) & (slot >= first_new)


def _over_pages(
    grouped: Float[Array, "B K M D"],
    body: PackedBody,
    layer,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
    softcap: float | None,
    pages: Int[Array, "B N"],
) -> tuple[Array, Array, Array]:
    """Attend row by row, in a row page by page.

    A page's words are read where they lie: pages of all rows at a time would have to be gathered
    first.

    Args:
        grouped: the scaled queries, as `_grouped` gives them.
        body: the stored fields, whose rows are pages of S tokens.
        start: the first body token that each query sees.
        stop: one past the last body token that each query sees.
        pages: the pages of each row, in the order of its tokens; -1: none.

    Returns:
        The online softmax of all rows.
    """
    page, batch = body.slots, len(start)
    size = at_once(spec, grouped.shape[1] * grouped.shape[2], page)
    turns = -(-page // size)  # of the loop, for a page

    def attend_row(row, rows):
        """Put the online softmax of one row, over all its pages, into that of all `rows`."""
        queries = jax.lax.dynamic_slice_in_dim(grouped, row, 1)
        low, high = (jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (start, stop))

        def step(j, state):
            """Attend to the tokens of turn j, which are of one page."""
            number = floor_divide(j, turns)  # of the page, among those of the row
            # Tokens are numbered from the page's first one on.
            first_new = (j - number * turns) * size
            begin, end = low - number * page, high - number * page
            token = jnp.minimum(first_new, page - size)
            # A row that lacks a page holds no tokens there; the clip keeps the read within the
            # array.
            place = jnp.maximum(pages[row, number], 0)
            block = _Block(body, layer, token, size, spec, begin.min(1), end.max(1), place)
            return _attend_block(
                state, queries, block, _seen(block, begin, end, first_new), softcap
            )

        # Where `size` does not divide a page, the last turn of a page begins within the one before
        # it. Turn j does not begin at token j * size then, so the loop's bounds are counted in
        # whole pages.
        span, span_turns = (size, 1) if page % size == 0 else (page, turns)
        first = low.min() // span * span_turns
        last = jnp.minimum(-(-high.max() // span) * span_turns, pages.shape[1] * turns)
        state = jax.lax.fori_loop(first, last, step, _unseen(queries, spec))

        def put(x, new):
            return jax.lax.dynamic_update_slice_in_dim(x, new, row, 0)

        return jax.tree.map(put, rows, state)

    return jax.lax.fori_loop(0, batch, attend_row, _unseen(grouped, spec))


def at_once(spec: PackedSpec, queries: int, slots: int) -> int:
    """Choose how many tokens of a row are decoded in one turn of the loop.

    Args:
        queries: of a row, times the query heads.
        slots: the slots of a row, or of a page.

    Returns:
        Whole units of the spec, at least one and at most half of them, rounded up; never more than
        `slots`. So the loop over several units has two turns or more: what no turn changes, XLA
        would decode before the loop.
    """
    most = min(AT_ONCE, NUMBERS // max(spec.width, queries)) // spec.unit
    half = -(-slots // (2 * spec.unit))
    return min(max(1, min(most, half)) * spec.unit, slots)


def _grouped(q: Float[Array, "B T H D"], spec: PackedSpec) -> Float[Array, "B K M D"]:
    """Scale the queries, in float32, and put the M = T*G rows of one KV head together, the G rows
    of a token side by side."""
    batch, length, heads, dim = q.shape
    q = (
        q.astype(jnp.float32).reshape(batch, length, spec.kv_heads, heads // spec.kv_heads, dim)
        * dim**-0.5
    )
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, spec.kv_heads, -1, dim)


def _numbers(block: int) -> Int[Array, "n 32"]:
    """Number a block's tokens by sums alone: XLA for CPUs does not vectorise loops that divide."""
    shape = block // PLANE, PLANE
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) * PLANE + jax.lax.broadcasted_iota(
        jnp.int32, shape, 1
    )


class _Block(NamedTuple):
    """`size` tokens of one layer, still packed.

    Attributes:
        body: the stored fields of the run.
        layer: the layer's number in the run.
        token: the block's first token.
        size: how many tokens the block has.
        spec: the static description of the body.
        start: no query of the row sees a token before this one.
        stop: no query of the row sees this token or one behind it. Scales and minima outside
            `start` to `stop` are read as 0.
        row: the row of the body, or page, that is read.
    """

    body: PackedBody
    layer: Int[Array, ""] | int
    token: Int[Array, ""]
    size: int
    spec: PackedSpec
    start: Int[Array, " B"]
    stop: Int[Array, " B"]
    row: Int[Array, ""]

    def inside(self, numbers: Int[Array, "..."], tokens: int) -> Bool[Array, "B ..."]:
        """Mark the spans that hold a token which a row may see. A span begins at one of `numbers`,
        counted from the block's first token, and is `tokens` tokens long."""
        start, stop = (
            jnp.expand_dims(x, range(1, 1 + numbers.ndim)) for x in (self.start, self.stop)
        )
        first = (self.token + numbers)[None]
        return (first + tokens > start) & (first < stop)

    def cut(
        self, array: Array, axis: int, after: Array, only: dict[int, tuple[int, int]] | None = None
    ) -> Array:
        """Cut the block out of a stored array.

        Args:
            array: [L, B, ...], one stored array of the body.
            axis: the axis that goes along tokens.
            after: the cut is not made before this array is there (`known_after`).
            only: the axes of which less than the block is wanted, with (first, count) of their
                entries in the block.

        Returns:
            The block's part of the array, without the layers' axis.
        """
        entry = self.body.slots // array.shape[axis]  # tokens of one entry along the axis
        starts, sizes = [self.layer, self.row, *[0] * (array.ndim - 2)], [1, 1, *array.shape[2:]]
        sizes[axis] = self.size // entry
        for axis_number, (first, count) in (only or {}).items():
            starts[axis_number], sizes[axis_number] = first, count
        # Added last: `only` counts the entries of this axis from the block's first one.
        starts[axis] += floor_divide(known_after(after, self.token), entry)
        piece = jax.lax.dynamic_slice(array, starts, sizes)
        # A CPU cuts in the loop that unpacks. A layout constraint would make two loops of it.
        return (piece if self.spec.target == "cpu" else row_major(piece))[0]

    def words(self, name: str, after: Array) -> tuple[UInt[Array, "B ..."], ...]:
        """Read the words of keys or values, as they are stored: one array for each plane set."""
        # Lines have the KV heads before the tokens: [L, B, K, S/32, D*b/32, 32].
        axis = 3 if self.spec.striped and name == "key_codes" else 2
        return tuple(self.cut(array, axis, after) for array in getattr(self.body, name))

    def lines(
        self, array: UInt[Array, "L N K _ R 32"], after: Array
    ) -> list[UInt[Array, "B K n 32"]]:
        """Read the words of one plane set of keys, one array for each word of a token's head."""
        return [
            self.cut(array, 3, after, {4: (row, 1)})[:, :, :, 0] for row in range(array.shape[4])
        ]

    def stripes(
        self, array: UInt[Array, "L N _ W _"], after: Array
    ) -> list[UInt[Array, "B K D 32"]]:
        """Read the words of one plane set of values, 32 of each channel at a time, the blocks in
        order."""
        blocks, lanes = (
            self.size * array.shape[2] // self.body.slots,
            range(0, array.shape[4], PLANE),
        )
        cuts = [{2: (block, 1), 4: (lane, PLANE)} for block in range(blocks) for lane in lanes]
        shape = self.spec.kv_heads, self.spec.head_dim, PLANE
        return [self.cut(array, 2, after, only).reshape(-1, *shape) for only in cuts]

    def of_keys(self, name: str, after: Array) -> Float[Array, "B K g D"]:
        """Read the keys' scales or minima."""
        x = from_bits(self.cut(getattr(self.body, name), 2, after), self.spec.scales).astype(
            jnp.float32
        )
        group = self.spec.key_group
        # A group counts where a row may see one of its tokens. Other groups may hold NaN, which
        # `few_queries.scores` would add to the -inf of what is not seen.
        x = jnp.where(self.inside(jnp.arange(0, self.size, group), group)[..., None], x, 0.0)
        # Or XLA for CPUs would make the transpose of four slices that it joins, which is not
        # vectorised.
        return kept_apart(x.reshape(*x.shape[:2], self.spec.kv_heads, -1)).swapaxes(1, 2)

    def of_values(self, name: str, after: Array) -> Float[Array, "B K V n 32"]:
        """Read the values' scales or minima, for each of the V slices of a head that share them."""
        x = from_bits(self.cut(getattr(self.body, name), 3, after), self.spec.scales).astype(
            jnp.float32
        )
        x = jnp.where(
            self.inside(_numbers(self.size), 1)[:, None], x.reshape(*x.shape[:2], -1, PLANE), 0.0
        )
        # A group of channels may reach over several heads. Each slice of it then gets the group's
        # number.
        x = jnp.repeat(x, self.spec.value_group // self.spec.value_slice, axis=1)
        return x.reshape(len(x), self.spec.kv_heads, -1, *x.shape[2:])


def _are_few(queries: int, spec: PackedSpec) -> bool:
    """Say whether `queries` query rows of a KV head are few enough for `few_queries`, which reads
    lines and stripes."""
    return spec.striped and queries <= few_queries.MOST


def _codes(
    words: tuple[UInt[Array, "B ..."], ...], bits: int, spec: PackedSpec
) -> Float[Array, "B K S D"]:
    """Unpack codes of `bits` bits as float32."""
    codes, shift = jnp.uint32(0), 0
    # A plane set holds some bits of every code. The first set, the one of most bits, holds the
    # lowest.
    for x, set_bits in zip(words, split_bits(bits), strict=True):
        codes, shift = codes | (_unpacked(x, set_bits, spec) << shift), shift + set_bits
    # Converting unsigned integers is slow on x86.
    return codes.astype(jnp.int32).astype(jnp.float32)


def _unpacked(words: UInt[Array, "B ..."], bits: int, spec: PackedSpec) -> UInt[Array, "B K S D"]:
    """Unpack the codes of one plane set, each head by itself, so that words are transposed and not
    codes."""
    if words.ndim == 5:  # lines
        return unpack_lines(words, bits)
    plane = PLANE * bits if spec.striped else PLANE
    # A stripe is a block of planes, turned: [B, blocks, W, 32*b] goes back to rows of W words.
    rows = words.swapaxes(2, 3).reshape(len(words), -1, spec.width) if spec.striped else words
    return unpack(rows.reshape(*rows.shape[:2], spec.kv_heads, -1).swapaxes(1, 2), bits, plane)


def _scores(
    q: Float[Array, "B K M D"], block: _Block, seen: Bool[Array, "B M n 32"]
) -> Float[Array, "B K M n 32"]:
    """Decode keys and multiply queries by them; -inf where a query does not see the token.

    Args:
        q: scaled queries.
        seen: the tokens that each query row sees, the same for all KV heads.
    """
    scale, low = block.of_keys("key_scale", q), block.of_keys("key_low", q)
    if _are_few(q.shape[2], block.spec):
        words = tuple(block.lines(array, q) for array in block.body.key_codes)
        return few_queries.scores(q, words, block.spec.key_bits, scale, low, seen)
    codes = _codes(block.words("key_codes", q), block.spec.key_bits, block.spec)
    keys = (
        codes.reshape(*scale.shape[:3], -1, scale.shape[3]) * scale[:, :, :, None]
        + low[:, :, :, None]
    )
    # XLA for CPUs multiplies the tokens first faster than the queries first.
    scores = jnp.einsum("bksd,bkmd->bksm", keys.reshape(codes.shape), q).swapaxes(2, 3)
    return jnp.where(seen[:, None], scores.reshape(*scores.shape[:3], -1, PLANE), -jnp.inf)


def _weighted(
    weights: Float[Array, "B K M n 32"], q: Float[Array, "B K M D"], block: _Block
) -> Float[Array, "B K M D _"]:
    """Sum the values under their softmax weights.

    Args:
        weights: of every query row and token of the block.
        q: the queries, an array that is there before the weights are.

    Returns:
        The sums. The last axis has the sums of every 32nd token apart for few queries, and one
        entry for others.
    """
    spec = block.spec
    by_sums = _are_few(weights.shape[2], spec)
    # Values for a product are decoded into memory. They are not read before the weights are there,
    # when the decoded keys are no longer needed.
    after = q if by_sums else weights
    scale, low = block.of_values("value_scale", after), block.of_values("value_low", after)
    if by_sums:
        words = tuple(block.stripes(array, after) for array in block.body.value_codes)
        return few_queries.weighted(weights, words, spec.value_bits, scale, low)
    codes = _codes(block.words("value_codes", after), spec.value_bits, spec)
    scale, low = (
        jnp.repeat(x.reshape(*x.shape[:3], -1).swapaxes(2, 3), spec.value_slice, axis=3)
        for x in (scale, low)
    )
    flat = weights.reshape(*weights.shape[:3], -1)
    return jnp.einsum("bkms,bksd->bkmd", flat, codes * scale + low)[..., None]


def _attend_block(
    state,
    q: Float[Array, "B K M D"],
    block: _Block,
    seen: Bool[Array, "B T n 32"],
    softcap: float | None,
):
    """Fold one block into the online softmax.

    Args:
        state: (running maximum [B, K, M], running sum of the weights [B, K, M], running sums of the
            values [B, K, M, D, _]), as `_unseen` begins it.
        q: scaled queries.
        seen: the tokens that each of the T queries sees.
    """
    peak, total, acc = state
    # The G rows of one token see the same tokens.
    scores = _scores(q, block, jnp.repeat(seen, q.shape[2] // seen.shape[1], axis=1))
    if softcap is not None:
        # Scores that are seen are finite, so -inf marks the others. The cap would make a finite
        # number of -inf.
        scores = jnp.where(jnp.isneginf(scores), scores, capped(scores, softcap))
    new_peak = jnp.maximum(peak, scores.max((-1, -2)))
    # A finite stand-in for the peak of a row that has seen nothing keeps exp(-inf - -inf) from
    # becoming NaN.
    safe = jnp.where(jnp.isneginf(new_peak), 0.0, new_peak)
    weights, decay = exp_in_loops(scores - safe[..., None, None]), jnp.exp(peak - safe)
    acc = acc * decay[..., None, None] + _weighted(weights, q, block)
    return new_peak, total * decay + weights.sum((-1, -2)), acc


def _finish(state, shape: tuple[int, ...]) -> Partial:
    """Divide the sums by the sum of the weights, and bring rows [B, K, T*G] back to [B, T, H].

    Args:
        state: the online softmax after all blocks.
        shape: that of the queries, [B, T, H, D].

    Returns:
        Output and log-sum-exp; 0 and -inf for queries that have seen nothing.
    """
    peak, total, acc = state
    acc = acc.sum(-1)
    batch, length, heads, dim = shape
    kv_heads = acc.shape[1]
    # No division by 0 and no logarithm of 0 for a query that has seen nothing.
    floor = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    lse = jnp.where(total > 0, jnp.log(floor) + peak, -jnp.inf)
    out = (acc / floor[..., None]).reshape(batch, kv_heads, length, heads // kv_heads, dim)
    lse = lse.reshape(batch, kv_heads, length, heads // kv_heads).transpose(0, 2, 1, 3)
    return Partial(out.transpose(0, 2, 1, 3, 4).reshape(shape), lse.reshape(batch, length, heads))
