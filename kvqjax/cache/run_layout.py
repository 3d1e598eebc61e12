"""A run's static plan as a value: its layers, how long its arrays are, where its blocks lie, how many tokens are read
at a time. `kvqjax.cache.runs` makes it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.methods.layer_cache import Wiring
from kvqjax.model.config import KVShape
from kvqjax.ops.xla_workarounds import floor_divide, modulo

__all__ = ["AT_ONCE", "MANY_QUERIES", "MOST_ROWS", "Deal", "RunLayout", "few_block"]

MANY_QUERIES = 128  # new tokens a row, at least: products with them pay for decoding large tiles
MOST_ROWS = 128  # queries of all heads that meet all heads' channels at once
AT_ONCE = 16384  # tokens that a GPU decodes at a turn of a loop over data: few turns, and not a layer's whole body


class Deal(NamedTuple):
    """A body's blocks dealt over `parts` devices in turn, so that short rows use all of them.

    Block j, of `block` tokens, lies on device j mod `parts`, and a device keeps its blocks in order. A body that is not
    dealt has one part. `axes` names the mesh axes that number the devices; outside `shard_map` there are none, and a
    dealt cache can only be moved."""

    parts: int = 1
    block: int = 1
    axes: tuple[str, ...] = ()

    def _here(self) -> Int[Array, ""]:
        if not self.axes:
            raise ValueError("a cache dealt over devices is read and written on its mesh only")
        return jax.lax.axis_index(self.axes)

    def place(self, token: Int[Array, "*S"] | int) -> tuple[Bool[Array, "*S"] | None, Int[Array, "*S"] | int]:
        """Say whether body tokens lie here (None: everything does), and give their numbers among those that do."""
        if self.parts == 1:
            return None, token
        turn = floor_divide(token, self.block)
        number = floor_divide(turn, self.parts) * self.block + modulo(token, self.block)
        return jnp.equal(modulo(turn, self.parts), self._here()), number

    def tokens(self, local: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Number the `local`-th body tokens here as the sequence does."""
        if self.parts == 1:
            return local
        turn = floor_divide(local, self.block) * self.parts + self._here()
        return turn * self.block + modulo(local, self.block)

    def share(self, tokens: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Count how many of the first `tokens` body tokens lie here."""
        if self.parts == 1:
            return tokens
        blocks, device = floor_divide(tokens, self.block), self._here()
        remainder = jnp.where(modulo(blocks, self.parts) == device, modulo(tokens, self.block), 0)
        return floor_divide(blocks - device + self.parts - 1, self.parts) * self.block + remainder

    def most(self, tokens: int) -> int:
        """Count the most of a row's first `tokens` body tokens that lie on one device."""
        return -(-tokens // (self.block * self.parts)) * self.block if self.parts > 1 else tokens


class RunLayout(NamedTuple):
    """A run of `count` equal layers from layer `first` on, each of one `shape` and `wiring`.

    - The body has `slots` slots in blocks of `block` tokens, on all devices together where blocks are dealt (`deal`).
      It is a ring of blocks if it `wraps`: layers that see only `sliding` tokens keep no more. With eviction it never
      holds more than `budget` tokens (0: no eviction).
    - The body's slots lie in pages of `page` tokens, which a table gives every row (0: they are the row's own).
    - The window is a ring of `ring` tokens.
    - `static_loops`: how many blocks a few new tokens read is bounded by the slots and not by data, because a GPU's
      host decides on every turn of a loop that data bounds.
    - `on_gpu`: programs are for a GPU, or a CPU stands in for one.
    - `lanes`: so many tokens are read at a time by a few queries, which meet all heads' channels in one product (0:
      head by head).
    - `carrying`: so many tokens of all rows are read at a time by a few queries where layers feed each other
      (0: elsewhere).
    - `tiles`: how many new tokens meet large tiles of the body (kvqjax/cache/readers/tiles.py)."""

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
        """Say how many tokens a query sees, itself included; None: all before it."""
        return self.shape.window

    @property
    def chunked(self) -> bool:
        """Say whether these tokens are the query's chunk, from its first token on. A layer that sees all has none."""
        return self.sliding is not None and self.shape.common_chunked

    @property
    def slots_here(self) -> int:
        return self.slots // self.deal.parts

    @property
    def reading(self) -> int:
        """Choose how many tokens are read at a time: as many blocks as divide the body, up to what the wiring or a GPU
        asks for; one block where it is a ring."""
        least = max(self.wiring.fast.reading, AT_ONCE if self.static_loops else 1)
        most = 1 if self.wraps else max(1, least // self.block)
        size = self.block * next(n for n in range(most, 0, -1) if self.slots_here % (n * self.block) == 0)
        return self.within_pages(size)

    def within_pages(self, size: int) -> int:
        """Choose at most `size` tokens, whole blocks, that are a part of a page or whole pages. Without pages, all of
        them."""
        if not self.page or size % self.page == 0:
            return size
        if size > self.page:
            return size // self.page * self.page
        return self.block * next(n for n in range(size // self.block, 0, -1) if self.page % (n * self.block) == 0)

    @property
    def carried(self) -> int:
        """Count the body tokens of a row whose carry is live during a decode step (methods.layer_cache.Chain)."""
        return self.slots if self.wiring.chain.read else 0


def few_block(run: RunLayout, batch: int, rows: int) -> int:
    """Choose how many tokens of each of `batch` rows a few queries, `rows` of all heads, read at a time: more than one
    block where small operations between blocks cost much (`RunLayout.lanes`, `carrying`). The last block may begin
    within the one before it."""
    if run.carrying:
        most = run.carrying // batch
    else:
        most = run.lanes // max(1, batch // 2) if rows <= MOST_ROWS else 0
    if run.wraps or not most:
        return run.reading
    blocks = run.slots_here // run.reading
    count = -(-blocks // max(1, most // run.reading))  # of even blocks
    return run.within_pages(run.reading * -(-blocks // max(1, count)))
