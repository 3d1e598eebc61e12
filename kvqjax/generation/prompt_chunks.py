"""How many tokens of a prompt enter the cache at a time, by chip and memory."""

import os

import jax

from kvqjax.model.config import ModelConfig
from kvqjax.pallas_kernels.chips import family

AUTO = "auto"
SMALL, LARGE = 512, 2048  # tokens of a row that keep one core busy, and a chip with a matrix unit
LEAST = 128  # fewer leave a matrix unit idle
SHARE = 8  # of the memory that is left, activations may take one part in so many


def free_memory() -> int | None:
    """Bytes that the first device has left; the machine's where that is a CPU; None where nobody
    says."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return (
            stats["bytes_limit"] - stats["bytes_in_use"]
            if {"bytes_limit", "bytes_in_use"} <= stats.keys()
            else None
        )
    return (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        if hasattr(os, "sysconf")
        else None
    )


def chunk_for(config: ModelConfig, target: str, batch: int, free: int | None) -> int:
    """Tokens of each of `batch` rows at a time on a chip of which `free` bytes are left: as many as
    keep it busy, fewer where what a layer makes of them, its widest products in float32, would take
    too large a part."""
    chunk = SMALL if family(target) == "cpu" else LARGE
    widest = 4 * (
        2 * config.mlp_width + config.query_width + config.cached_width + 2 * config.width
    )
    while free is not None and chunk > LEAST and batch * chunk * widest > free // SHARE:
        chunk //= 2
    return chunk
