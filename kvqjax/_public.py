"""Every public name of the library.

`kvqjax` loads this module when the first of them is asked for: the command line answers `--help`
without it, and without JAX. `calibrate`, `compare`, `Engine`, `eval`, `plan` and `tune` are loaded
when they are used.
"""

import importlib
from typing import TYPE_CHECKING

from kvqjax._errors import UserError
from kvqjax._version import __version__
from kvqjax.cache.accounting import ledger
from kvqjax.cache.artifacts import load_artifact
from kvqjax.cache.moves import drop
from kvqjax.cache.pages import PagePool, copy_page, with_pages, without_pages
from kvqjax.cache.pieces import cut, join
from kvqjax.cache.runs import pages_needed
from kvqjax.cache.surgery import (
    crop,
    evict,
    fork,
    gather,
    insert,
    repeat,
    resize,
    row_axes,
    snapshot,
)
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
    klt,
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
from kvqjax.model.fetch import fetch
from kvqjax.model.loading import Model, load
from kvqjax.parallel.hosts import join_hosts
from kvqjax.parallel.sharding import shard
from kvqjax.step.chunks import concatenate
from kvqjax.step.forward import attend, commit, forward
from kvqjax.step.layers import append, attend_layer, below_first
from kvqjax.step.new_cache import init_cache
from kvqjax.step.persist import load_cache, save_cache
from kvqjax.step.prompt import prefill
from kvqjax.step.views import commit_layers, dense, layers

if TYPE_CHECKING:
    import kvqjax.calibrate as calibrate
    import kvqjax.eval as eval
    from kvqjax.eval.comparison import compare
    from kvqjax.eval.tune import tune
    from kvqjax.hardware.plan import plan
    from kvqjax.serving.engine import Engine

__all__ = [
    "METHODS",
    "Engine",
    "Generated",
    "KVShape",
    "Method",
    "Model",
    "PagePool",
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
    "commit_layers",
    "commvq",
    "compare",
    "concatenate",
    "copy_page",
    "crop",
    "cut",
    "dense",
    "drop",
    "eval",
    "evict",
    "exact",
    "fetch",
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
    "klt",
    "kvarn",
    "kvquant",
    "layers",
    "ledger",
    "load",
    "load_artifact",
    "load_cache",
    "omniscale",
    "oscar",
    "pages_needed",
    "parse",
    "plan",
    "policy",
    "prefill",
    "repeat",
    "resize",
    "row_axes",
    "save_cache",
    "shard",
    "snapshot",
    "speculate",
    "stream",
    "to_dict",
    "tune",
    "turboquant",
    "uniform",
    "with_pages",
    "without_pages",
    "xquant",
    "xquant_cl",
]

# Public names that are loaded when first used -> their module.
_LAZY = {
    "Engine": "kvqjax.serving.engine",
    "compare": "kvqjax.eval.comparison",
    "plan": "kvqjax.hardware.plan",
    "tune": "kvqjax.eval.tune",
}


def __getattr__(name: str):
    if name in ("calibrate", "eval"):
        return importlib.import_module(f"kvqjax.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvqjax' has no attribute {name!r}")
