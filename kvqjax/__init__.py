"""kvqjax: KV-cache compression for Llama, Mistral and Qwen models in JAX.

`kvqjax.calibrate` and `kvqjax.eval` are loaded when first used.
"""

import importlib

from kvqjax.artifacts import load_artifact
from kvqjax.errors import UserError
from kvqjax.forward import attend, commit, forward, init_cache, prefill
from kvqjax.generate import generate, stream
from kvqjax.ledger import ledger
from kvqjax.methods import METHODS, Method, exact, kivi, kivi_star, parse, policy, uniform
from kvqjax.model import Model, load

__all__ = [
    "METHODS",
    "Method",
    "Model",
    "UserError",
    "attend",
    "calibrate",
    "commit",
    "eval",
    "exact",
    "forward",
    "generate",
    "init_cache",
    "kivi",
    "kivi_star",
    "ledger",
    "load",
    "load_artifact",
    "parse",
    "policy",
    "prefill",
    "stream",
    "uniform",
]


def __getattr__(name: str):
    if name in ("calibrate", "eval"):
        return importlib.import_module(f"kvqjax.{name}")
    raise AttributeError(f"module 'kvqjax' has no attribute {name!r}")
