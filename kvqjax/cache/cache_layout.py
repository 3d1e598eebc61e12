"""One frozen value of all that is static about a cache."""

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
    """A promise: no row holds more than `row` tokens, all rows together no more than `total` (None: as many as `row`
    allows). Rows that break it get NaN."""

    row: int
    total: int | None = None


class Pool(NamedTuple):
    """Bodies of all rows in one pool of `pages` pages. Each page holds all fields of `tokens` body tokens of one row in
    all layers (kvqjax/cache/pages.py)."""

    pages: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything static about a cache.

    - `shape` of the model, `method`, `capacity` in tokens a row, and the `dtype` of sinks and window.
    - `layers`: those that cache alike are one stack ("scan"), or each is stored by itself ("unroll").
    - `form`: bodies are planes of words ("planes"), head by head where they can be ("heads",
      kvqjax/ops/packing/heads.py), or planes but for uniform codes of long bodies, in lines and stripes for CPUs
      ("stripes", kvqjax/ops/packing/stripes.py).
    - `target`: the chip that programs on the cache are for (`kvqjax.pallas_kernels.chips.TARGETS`). `kernels` says
      which of its kernels may read the body.
    - `dealt`: over how many devices the body's blocks are dealt. Inside `shard_map`, `dealt_over` names their mesh
      axes, and `heads_over` those that share out heads.
    - `bound`: a promise of how many tokens rows hold, for as long as programs are to read no further
      (kvqjax/cache/length_bound.py).
    - `pool`: encoded tokens lie in pages that rows may share. None: every row reserves its capacity.
    - `rules` say how a cache that belongs to no model of ours lies on a mesh (kvqjax/parallel/rules.py)."""

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
