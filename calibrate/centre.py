"""The mean of every key channel, for methods that take it off before they encode (kvqjax.codecs.centring).

One pass over the text, a sequence at a time; sums in float64. Attention sinks, which the cache keeps exact, are left
out. Keys are taken as the method caches them, before or after RoPE.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvqjax.artifacts import Artifact
from kvqjax.cache.state import CacheLayout, RunPlan, plan
from kvqjax.calibrate.fisher import activations
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.config import ModelConfig
from kvqjax.errors import UserError
from kvqjax.methods import Method
from kvqjax.model import Model

__all__ = ["DEFAULT_LENGTH", "DEFAULT_SEQUENCES", "calibrate", "needs_only_means"]

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 16, 512  # 8192 tokens: a mean needs few


def _runs(method: Method, config: ModelConfig) -> tuple[RunPlan, ...]:
    return plan(CacheLayout(shape=config.kv_shape, method=method, capacity=1, dtype="float32"))


def needs_only_means(method: Method, config: ModelConfig) -> bool:
    """Whether key means are all that some layer of this method asks for, and nothing else is asked for anywhere."""
    wanted = [run.wiring.wanted() for run in _runs(method, config)]
    return any(wanted) and all(w in ({}, {"k": {"mean": (config.kv_width,)}}) for w in wanted)


def _rope(method: Method, config: ModelConfig) -> str:
    layers: tuple[Any, ...] = method.layers(config)
    ropes = {layers[run.first].rope for run in _runs(method, config) if run.wiring.wanted()}
    if len(ropes) != 1:
        raise UserError(f"{method}: centred keys both before and after RoPE; one kind is wanted for calibration")
    return ropes.pop()


def calibrate(
    model: Model,
    method: Method,
    tokens: Int[np.ndarray, "N T"],
    *,
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Artifact:
    """Key means of `method` for `model` from N sequences of T tokens. `state` names a file that keeps the progress
    after every sequence: a run that was killed continues there. `advance(done, total)` is told each sequence."""
    tokens, config = np.asarray(tokens), model.config
    if tokens.ndim != 2 or tokens.shape[1] <= method.sinks:
        raise UserError(f"calibration tokens are {tokens.shape}; wanted [N, more than {method.sinks} tokens]")
    rope, owner = _rope(method, config), identity(model.fingerprint, repr(method), repr(config), tokens)
    start = {"done": np.int64(0), "sum": np.zeros((config.num_layers, config.kv_width))}

    def step(now):
        row = jnp.asarray(tokens[int(now["done"])][None], jnp.int32)
        keys = activations(model.params, row, config, rope=rope, gradients=False).k[:, 0, method.sinks :]
        return {"sum": now["sum"] + np.asarray(keys, np.float64).sum(1)}

    now = stepped(start, len(tokens), step, state, owner, advance)
    mean = jnp.asarray(now["sum"] / (len(tokens) * (tokens.shape[1] - method.sinks)), jnp.float32)
    constants: tuple[dict[str, dict[str, jax.Array | np.ndarray]], ...] = tuple(
        {"k": {"mean": mean[run.first : run.first + run.count]}} if run.wiring.wanted() else {}
        for run in _runs(method, config)
    )
    about = {"sequences": len(tokens), "tokens": int(tokens.shape[1]), "rope": rope}
    return Artifact(method, constants, model.fingerprint, about)
