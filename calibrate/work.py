"""Floating point operations of passes over a text, for an estimate of the time before the first step is measured."""

import math

import jax

from kvqjax.config import ModelConfig
from kvqjax.planner import parameter_shapes

__all__ = ["forward_work"]


def forward_work(config: ModelConfig, tokens: int) -> float:
    """Operations of one exact pass over `tokens` tokens: two for every weight that multiplies. Attention is left
    out: it is small beside them for sequences of a few thousand tokens."""
    shapes = parameter_shapes(config)
    lookups = {"embed"} if "head" in shapes else set()  # a tied embedding is the head's matrix too
    matrices = {name: part for name, part in shapes.items() if name not in lookups}
    return 2.0 * tokens * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(matrices))
