"""All that is static about a cache, as one frozen value: `CacheLayout`."""

import dataclasses
from typing import Any, NamedTuple

from kvqjax._errors import UserError
from kvqjax.methods.spec import Method
from kvqjax.model.config import KVShape
from kvqjax.pallas_kernels.chips import family
from kvqjax.pallas_kernels.choice import BY_TABLE, Kernels

__all__ = ["CacheLayout", "LengthBound", "Pool"]

FORMS = ("planes", "heads", "stripes")


class LengthBound(NamedTuple):
    """A promise of how many tokens rows hold. A row that breaks it gets NaN.

    Attributes:
        row: The most tokens of any row.
        total: The most tokens of all rows together. None: as many as `row` allows."""

    row: int
    total: int | None = None


class Pool(NamedTuple):
    """The pages in which the bodies of all rows lie (kvqjax/cache/pages.py).

    Attributes:
        pages: How many pages there are.
        tokens: How many body tokens of a row a page holds, with all fields of all layers."""

    pages: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything static about a cache.

    Attributes:
        shape: What the cache must know of the model.
        method: What every layer stores, in which codec, with which window.
        capacity: The most tokens that a row can hold.
        dtype: The dtype of sinks and window.
        layers: "scan": neighbouring layers that cache alike are stored as one stack. "unroll": each layer is stored by
            itself.
        form: How bodies are stored. "planes": as planes of words. "heads": head by head where a codec can be stored so
            (kvqjax/ops/packing/heads.py), which GPUs read best. "stripes": as planes, but uniform codes of long bodies
            in lines and stripes (kvqjax/ops/packing/stripes.py), which CPUs read best.
        target: The chip that programs on the cache are for (`kvqjax.pallas_kernels.chips.TARGETS`).
        kernels: Which of the chip's kernels may read the body.
        dealt: Over how many devices the body's blocks are dealt.
        dealt_over: Inside `shard_map`, the mesh axes of these devices.
        heads_over: Inside `shard_map`, the mesh axes over which heads are split.
        rules: How a cache that belongs to no model of ours lies on a mesh (kvqjax/parallel/rules.py).
        bound: A promise of how many tokens rows hold: programs read no further (kvqjax/cache/length_bound.py).
        pool: The pages in which encoded tokens lie, which rows may share. None: every row reserves its capacity."""

    shape: KVShape
    method: Method
    capacity: int
    dtype: str
    layers: str = "scan"
    form: str = "planes"
    target: str = "cpu"
    kernels: Kernels = BY_TABLE
    dealt: int = 1
    dealt_over: tuple[str, ...] = ()
    heads_over: tuple[str, ...] = ()
    rules: Any = None
    bound: LengthBound | None = None
    pool: Pool | None = None

    def __post_init__(self):
        if self.layers not in ("scan", "unroll"):
            raise UserError(f"layers={self.layers!r}; known: scan, unroll")
        if self.form not in FORMS:
            raise UserError(f"form={self.form!r}; known: {', '.join(FORMS)}")
        family(self.target)  # refuses what is no target


def stored_form(target: str) -> str:
    """Choose the form that a chip reads best. Raises UserError for a target that is not known."""
    return {"gpu": "heads", "cpu": "stripes", "tpu": "planes"}[family(target)]
