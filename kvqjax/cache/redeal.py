"""Deal a cache on the host over another number of devices than it was dealt over before.

A body is a ring of blocks: token block j stands in ring block j mod n; a body that never wraps is a ring that is long
enough. Dealing says where ring block q is stored, and how many there are: whole turns of all devices. So a block moves,
as it is, from its place in the one ring to its place in the other.
"""

import dataclasses

import numpy as np
from jaxtyping import Int, Shaped

from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run

__all__ = ["dealt_anew"]


def _places(run: RunLayout) -> Int[np.ndarray, " n"]:
    """Find where each ring block is stored: devices one after the other, each with its own blocks in order."""
    ring, deal = np.arange(run.slots // run.block), run.deal
    blocks = max(1, deal.block // run.block)
    turn = ring // blocks
    return turn % deal.parts * (len(ring) // deal.parts) + turn // deal.parts * blocks + ring % blocks


def _moved(
    old: RunLayout, new: RunLayout, encoded: Int[np.ndarray, " B"], array: Shaped[np.ndarray, "L B R W"], axis: int
) -> Shaped[np.ndarray, "L B r w"]:
    """Move the blocks of a field's array from where `old` stores them to where `new` does; tokens follow each other
    along `axis`. Each ring holds the newest of a row's blocks. Blocks that the old one no longer held are zero."""
    count, new_count = old.slots // old.block, new.slots // new.block
    blocks = np.moveaxis(array, axis, 2)
    blocks = blocks.reshape(*blocks.shape[:2], count, -1, *blocks.shape[3:])
    moved = np.zeros((*blocks.shape[:2], new_count, *blocks.shape[3:]), array.dtype)
    source, target = _places(old), _places(new)
    for row, last in enumerate((encoded - 1) // old.block):
        # The block that each place of the new ring stands for.
        newest = last - (last - np.arange(new_count)) % new_count
        stored = (newest >= 0) & (newest > last - count)
        moved[:, row, target[stored]] = blocks[:, row, source[newest[stored] % count]]
    return np.moveaxis(moved.reshape(*moved.shape[:2], -1, *moved.shape[4:]), 2, axis)


def _run(old: RunLayout, new: RunLayout, state: Run) -> Run:
    body = {}
    for clock, flushed in zip(old.wiring.storage.clocks, state.flushed, strict=True):
        for source in clock.sources if state.body else ():
            fields = old.wiring.storage.codecs[source].fields
            body[source] = {
                name: tuple(_moved(old, new, flushed * clock.unit, x, fields[name].packing.token_axis) for x in part)
                for name, part in state.body[source].items()
            }
    return dataclasses.replace(state, body=body)


def dealt_anew(cache: Cache, layout: CacheLayout) -> Cache:
    """Deal the blocks of a cache, its arrays numpy's, as `layout` says, which differs from its own in nothing else."""
    runs = zip(runs_of(cache.layout), runs_of(layout), cache.runs, strict=True)
    return cache.replace(runs=tuple(_run(old, new, state) for old, new, state in runs), layout=layout)
