"""What is static about a cache: one frozen value."""

import dataclasses
from typing import Any

from kvqjax._errors import UserError
from kvqjax.methods.spec import Method
from kvqjax.model.config import KVShape
from kvqjax.pallas_kernels.choice import BY_TABLE, Kernels
from kvqjax.pallas_kernels.packed import family

__all__ = ["CacheLayout"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything static about a cache: the model's shape, method, most tokens per row, the dtype of sinks and window,
    whether layers that cache alike are one stack ("scan") or each is stored by itself ("unroll"), whether a body that
    can be is stored head by head ("heads", kvqjax/ops/head_major.py) or as planes of words ("planes"), the chip whose
    kernels read the body (`kvqjax.pallas_kernels.packed.TARGETS`), which `kernels` may, and over how many devices (mesh
    axes, inside `shard_map`) the body's blocks are dealt. `heads_over` are, inside `shard_map`, the axes that share out
    heads. `rules` say how a cache that belongs to no model of ours lies on a mesh (kvqjax/parallel/rules.py)."""

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

    def __post_init__(self):
        if self.layers not in ("scan", "unroll"):
            raise UserError(f"layers={self.layers!r}; known: scan, unroll")
        if self.form not in ("planes", "heads"):
            raise UserError(f"form={self.form!r}; known: planes, heads")


def stored_form(target: str) -> str:
    """Choose the form that a chip reads best."""
    return "heads" if family(target) == "gpu" else "planes"
