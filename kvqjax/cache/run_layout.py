"""The static plan of a run of layers, as a value. `kvqjax.cache.runs` makes it.

RunLayout    the run's layers, the lengths of its arrays, how many tokens are read at a time
Deal         which blocks of a body lie on which device"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.methods.layer_cache import Wiring
from kvqjax.model.config import KVShape
from kvqjax.ops.xla_workarounds import floor_divide, modulo

__all__ = ["AT_ONCE", "MANY_QUERIES", "MOST_ROWS", "Deal", "RunLayout", "few_block"]

MANY_QUERIES = 128  # new tokens of a row, at least, whose products are worth decoding large tiles for
MOST_ROWS = 128  # queries of a row, those of all heads, at most, that meet the channels of all heads in one product
AT_ONCE = 16384  # tokens that a GPU decodes in one turn of a loop: few turns, but not a layer's whole body


class Deal(NamedTuple):
    """How a body's blocks are dealt over devices: in turn, so that short rows use all devices too.

        block     0  1  2  3  4  5  6  7      two devices
        device    0  1  0  1  0  1  0  1
        number    0  0  1  1  2  2  3  3      among the blocks on that device

    Attributes:
        parts: How many devices there are; 1: the body is not dealt.
        block: The tokens of a block.
        axes: The mesh axes that number the devices, inside `shard_map`. Outside there are none, and a body that is
            dealt can be moved, but not written or read."""

    parts: int = 1
    block: int = 1
    axes: tuple[str, ...] = ()

    def _here(self) -> Int[Array, ""]:
        """Give this device's number."""
        if not self.axes:
            raise ValueError("a cache dealt over devices is read and written on its mesh only")
        return jax.lax.axis_index(self.axes)

    def place(self, token: Int[Array, "*S"] | int) -> tuple[Bool[Array, "*S"] | None, Int[Array, "*S"] | int]:
        """Find body tokens on the devices.

        Args:
            token: The numbers of body tokens in the sequence.

        Returns:
            (whether each lies on this device, its number among the body tokens of its device). None in the place of the
            first where the body is not dealt."""
        if self.parts == 1:
            return None, token
        block = floor_divide(token, self.block)
        number = floor_divide(block, self.parts) * self.block + modulo(token, self.block)
        return jnp.equal(modulo(block, self.parts), self._here()), number

    def tokens(self, local: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Give the numbers in the sequence of the `local`-th body tokens on this device."""
        if self.parts == 1:
            return local
        block = floor_divide(local, self.block) * self.parts + self._here()
        return block * self.block + modulo(local, self.block)

    def share(self, tokens: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Count how many of the first `tokens` body tokens lie on this device."""
        if self.parts == 1:
            return tokens
        blocks, device = floor_divide(tokens, self.block), self._here()
        # Tokens behind the last whole block are the beginning of block number `blocks`, which lies on one device.
        remainder = jnp.where(modulo(blocks, self.parts) == device, modulo(tokens, self.block), 0)
        return floor_divide(blocks - device + self.parts - 1, self.parts) * self.block + remainder

    def most(self, tokens: int) -> int:
        """Bound how many of the first `tokens` body tokens lie on any one device."""
        if self.parts == 1:
            return tokens
        return -(-tokens // (self.block * self.parts)) * self.block


class RunLayout(NamedTuple):
    """The plan of a run: neighbouring layers of equal shape and wiring, stored as one stack.

    Attributes:
        first: The number of the first layer.
        count: How many layers the run has.
        shape: What the cache must know of the model, for each of these layers.
        wiring: How each of these layers caches.
        block: The tokens of a block, the least that is read at a time.
        slots: The body's slots of a row, whole blocks: on all devices together where blocks are dealt.
        ring: The window's slots of a row. The window is a ring.
        wraps: Whether the body is a ring of blocks. Layers with a sliding window then keep few more tokens than they
            see.
        deal: How blocks are dealt over devices.
        budget: The most tokens of a row that the body holds where some are evicted; 0: none is.
        static_loops: How many blocks a few queries read is bounded by the slots and not by data. That is for GPUs,
            whose host decides on every turn of a loop that data bounds.
        on_gpu: Whether programs are for a GPU, or a CPU stands in for one.
        lanes: How many tokens a few queries read at a time where they meet the channels of all heads in one product;
            0: they meet each head's channels apart.
        carrying: How many tokens of all rows together a few queries read at a time where layers feed each other; 0:
            nothing flows, or there is no limit of its own.
        tiles: How many new tokens meet large tiles of the body (kvqjax/cache/readers/tiles.py).
        page: The slots of a page, where the body lies in pages; 0: every row has slots of its own."""

    first: int
    count: int
    shape: KVShape
    wiring: Wiring
    block: int
    slots: int
    ring: int
    wraps: bool
    deal: Deal = Deal()
    budget: int = 0
    static_loops: bool = False
    on_gpu: bool = False
    lanes: int = 0
    carrying: int = 0
    tiles: str = "off"
    page: int = 0

    @property
    def sliding(self) -> int | None:
        """Say how many tokens a query sees, its own included; None: all before it."""
        return self.shape.window

    @property
    def chunked(self) -> bool:
        """Say whether a query sees the tokens of its own chunk, `sliding` tokens long, instead of the newest tokens."""
        return self.sliding is not None and self.shape.common_chunked

    @property
    def slots_here(self) -> int:
        """Count the body's slots of a row on one device."""
        return self.slots // self.deal.parts

    @property
    def reading(self) -> int:
        """Choose how many tokens of a row are read at a time.

        They are as many whole blocks as divide the body, up to what the wiring or a GPU asks for. Of a ring it is one
        block."""
        wanted = max(self.wiring.fast.reading, AT_ONCE if self.static_loops else 1)  # tokens
        most = 1 if self.wraps else max(1, wanted // self.block)
        count = next(n for n in range(most, 0, -1) if self.slots_here % (n * self.block) == 0)
        return self.within_pages(self.block * count)

    def within_pages(self, size: int) -> int:
        """Choose how many of `size` tokens are read at a time so that no read spans a part of a page and another page.

        Args:
            size: Tokens, whole blocks.

        Returns:
            At most `size` tokens, whole blocks: whole pages, or a part that divides a page. All of them where the body
            is not in pages."""
        if not self.page or size % self.page == 0:
            return size
        if size > self.page:
            return size // self.page * self.page
        count = next(n for n in range(size // self.block, 0, -1) if self.page % (n * self.block) == 0)
        return self.block * count

    @property
    def carried(self) -> int:
        """Count the body tokens of a row whose carry is in memory during a decode step (methods.layer_cache.Chain)."""
        return self.slots if self.wiring.chain.read else 0


def few_block(run: RunLayout, batch: int, rows: int) -> int:
    """Choose how many tokens of every row a few queries read at a time.

    They are more than `run.reading` where the small operations between two reads cost much: where `RunLayout.carrying`
    or `RunLayout.lanes` is set.

    Args:
        run: The run's plan.
        batch: How many rows the cache has.
        rows: The queries of a row, those of all heads counted together.

    Returns:
        A number of tokens. It need not divide the body: the last read may then begin within the one before it."""
    # `most` is the most tokens of a row; 0: no more than `run.reading`.
    if run.carrying:
        most = run.carrying // batch
    elif rows <= MOST_ROWS:
        most = run.lanes // max(1, batch // 2)
    else:
        most = 0
    if run.wraps or not most:
        return run.reading
    # `reading` divides the body into so many pieces. A read is some of them, and reads are as even as pieces allow.
    pieces = run.slots_here // run.reading
    count = -(-pieces // max(1, most // run.reading))
    return run.within_pages(run.reading * -(-pieces // max(1, count)))
