"""Deal a cache over another number of devices than before: on the host, in NumPy.

A body is a ring of n blocks: block j of the tokens is ring block j mod n. A body that never wraps is a ring that is
long enough. How the body is dealt decides where each ring block is stored (`_places`), and n: whole turns over all
devices. Blocks are moved as they are, from their places in the one ring to their places in the other.
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
    """Find where each ring block is stored: devices come one after the other, each with its own blocks in order."""
    ring, deal = np.arange(run.slots // run.block), run.deal
    blocks = max(1, deal.block // run.block)  # of the run, in one block that is dealt
    dealt_block = ring // blocks
    device = dealt_block % deal.parts
    number = dealt_block // deal.parts * blocks + ring % blocks  # among the device's blocks
    return device * (len(ring) // deal.parts) + number


def _moved(
    old: RunLayout, new: RunLayout, encoded: Int[np.ndarray, " B"], array: Shaped[np.ndarray, "L B R W"], axis: int
) -> Shaped[np.ndarray, "L B r w"]:
    """Move the blocks of one array of a field.

    Args:
        old: The run's plan so far.
        new: Its new plan.
        encoded: How many body tokens each row has encoded.
        array: The array.
        axis: The axis along which tokens follow each other.

    Returns:
        The array of the new plan. A ring holds the newest blocks of a row. Where the new ring is longer, blocks that
        the old one no longer held are zero."""
    count, new_count = old.slots // old.block, new.slots // new.block
    blocks = np.moveaxis(array, axis, 2)
    # [L, B, blocks, what one block takes along the axis, W]
    blocks = blocks.reshape(*blocks.shape[:2], count, -1, *blocks.shape[3:])
    moved = np.zeros((*blocks.shape[:2], new_count, *blocks.shape[3:]), array.dtype)
    source, target = _places(old), _places(new)
    for row, last in enumerate((encoded - 1) // old.block):
        # The block of the row that each block of the new ring holds: negative for none.
        newest = last - (last - np.arange(new_count)) % new_count
        stored = (newest >= 0) & (newest > last - count)
        moved[:, row, target[stored]] = blocks[:, row, source[newest[stored] % count]]
    return np.moveaxis(moved.reshape(*moved.shape[:2], -1, *moved.shape[4:]), 2, axis)


def _run(old: RunLayout, new: RunLayout, state: Run) -> Run:
    """Deal the body of a run anew. Sinks and window are not dealt."""
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
    """Deal a cache over other devices.

    Args:
        cache: The cache, of NumPy's arrays.
        layout: Its layout, but for the devices that blocks are dealt over.

    Returns:
        The cache in that layout."""
    runs = zip(runs_of(cache.layout), runs_of(layout), cache.runs, strict=True)
    return cache.replace(runs=tuple(_run(old, new, state) for old, new, state in runs), layout=layout)
