"""kvqjax: KV-cache compression for Llama, Mistral and Qwen models in JAX.

`kvqjax.calibrate`, `kvqjax.eval` and `kvqjax.tune` are loaded when first used.
"""

import importlib
from pathlib import Path

# A source checkout, and an editable install of one, keep three of the package's folders beside this one.
_here = Path(__file__).resolve().parent
if __name__ != "kvqjax":
    raise ImportError(f"{__name__}: import kvqjax itself")  # a walk over the packages beside this one ends here
if not (_here / "pallas_kernels").is_dir():
    __path__.append(str(_here.parent))

from kvqjax._errors import UserError
from kvqjax._version import __version__
from kvqjax.cache.accounting import ledger
from kvqjax.cache.artifacts import load_artifact
from kvqjax.cache.pieces import cut, join
from kvqjax.cache.surgery import crop, evict, fork, gather, insert, repeat, resize, row_axes
from kvqjax.generation.beam import beam_search
from kvqjax.generation.decoding import Generated, generate, stream
from kvqjax.generation.session import Session
from kvqjax.generation.speculation import speculate
from kvqjax.methods import (
    METHODS,
    Method,
    aqua,
    commvq,
    exact,
    higgs,
    kivi,
    kivi_star,
    kvarn,
    kvquant,
    omniscale,
    oscar,
    parse,
    policy,
    to_dict,
    turboquant,
    uniform,
    xquant,
    xquant_cl,
)
from kvqjax.model.config import KVShape
from kvqjax.model.config import RopeConfig as Rope
from kvqjax.model.loading import Model, load
from kvqjax.parallel.hosts import join_hosts
from kvqjax.parallel.sharding import shard
from kvqjax.step.forward import attend, commit, forward
from kvqjax.step.layers import append, attend_layer, below_first
from kvqjax.step.new_cache import init_cache
from kvqjax.step.persist import load_cache, save_cache
from kvqjax.step.prefill import prefill

__all__ = [
    "METHODS",
    "Generated",
    "KVShape",
    "Method",
    "Model",
    "Rope",
    "Session",
    "UserError",
    "__version__",
    "append",
    "aqua",
    "attend",
    "attend_layer",
    "beam_search",
    "below_first",
    "calibrate",
    "commit",
    "commvq",
    "crop",
    "cut",
    "eval",
    "evict",
    "exact",
    "fork",
    "forward",
    "gather",
    "generate",
    "higgs",
    "init_cache",
    "insert",
    "join",
    "join_hosts",
    "kivi",
    "kivi_star",
    "kvarn",
    "kvquant",
    "ledger",
    "load",
    "load_artifact",
    "load_cache",
    "omniscale",
    "oscar",
    "parse",
    "policy",
    "prefill",
    "repeat",
    "resize",
    "row_axes",
    "save_cache",
    "shard",
    "speculate",
    "stream",
    "to_dict",
    "tune",
    "turboquant",
    "uniform",
    "xquant",
    "xquant_cl",
]


def __getattr__(name: str):
    if name in ("calibrate", "eval"):
        return importlib.import_module(f"kvqjax.{name}")
    if name == "tune":
        return importlib.import_module("kvqjax.eval.tune").tune
    raise AttributeError(f"module 'kvqjax' has no attribute {name!r}")
