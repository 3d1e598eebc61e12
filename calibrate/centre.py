"""The mean of every key channel, for methods that subtract it before they encode
(kvqjax.codecs.centring).

The text is read once, a sequence at a time. Sums are float64. Attention sinks are left out, because
the cache keeps them exact. Keys are taken as the method caches them, before or after RoPE.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.layout import RunLayout
from kvqjax.cache.runs import runs_for
from kvqjax.calibrate.activations import Captured, Sequences, of_captured, of_model
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 16, 512  # 8192 tokens: a mean needs few


def _rope(method: Method, shape: KVShape) -> str:
    """Say whether the method's centred keys are cached before RoPE ("pre") or after it ("post").
    Raises UserError where it has both."""
    layers: tuple[Any, ...] = method.layers(shape)
    ropes = {layers[run.first].rope for run in runs_for(method, shape) if run.wiring.wanted()}
    if len(ropes) != 1:
        raise UserError(
            f"{method}: centred keys both before and after RoPE; one kind is wanted for calibration"
        )
    return ropes.pop()


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Count the floating point operations of `calibrate` on `count` sequences of `length`
    tokens."""
    return count * prompt_operations(model.config, 0, length)


def in_frame(run: RunLayout, constants: dict, mean: Float[Array, "n W"]) -> Float[Array, "n W"]:
    """Rotate the key means of a run's n layers into the frame of the body, in which codecs subtract
    them. `constants` has the matrices of a fitted rotation."""
    frame = run.wiring.maps.frame
    return mean if frame is None else frame.turn(constants, "k", mean)


def calibrate(model: Model, method: Method, tokens: Int[np.ndarray, "N T"], **options) -> Artifact:
    """Find the key means of `method` for `model` from N sequences of T tokens; `options` as in
    `fit`."""
    return fit(of_model(model, np.asarray(tokens)), method, **options)


def fit_captured(data: Captured, method: Method, recipe=None, **options) -> Artifact:
    """Find the key means of `method` from tensors of any model; `options` as in `fit`. There is no
    recipe."""
    return fit(of_captured(data, method), method, **options)


def fit(
    data: Sequences,
    method: Method,
    *,
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda steps, total: None,
) -> Artifact:
    """Find the key means of `method` from sequences of any model.

    Args:
        data: the sequences.
        method: says which layers' keys are centred, and whether they are cached before RoPE or
            after it.
        state: a file that keeps the progress after every sequence. A run that was killed continues
            from it.
        advance: advance(steps, total) is called after every sequence.

    Returns:
        The method with the `mean` of every layer that needs one, float32.

    Raises:
        UserError: sequences that are no longer than the sinks, and a method that centres keys both
            before and after RoPE.
    """
    shape, sinks = data.shape, method.sinks
    if data.length <= sinks:
        raise UserError(
            f"calibration tokens are {(data.count, data.length)}; wanted [sequences, more than {sinks} tokens]"
        )
    rope, owner = _rope(method, shape), identity(data.fingerprint, repr(method), *data.parts)
    start = {"done": np.int64(0), "sum": np.zeros((shape.num_layers, shape.kv_width))}

    def step(progress):
        keys = data.read(int(progress["done"]), rope, False).k[:, 0, sinks:]
        return {"sum": progress["sum"] + np.asarray(keys, np.float64).sum(1)}

    progress = stepped(start, data.count, step, state, owner, advance)
    mean = jnp.asarray(progress["sum"] / (data.count * (data.length - sinks)), jnp.float32)
    constants: list[dict[str, dict[str, jax.Array | np.ndarray]]] = []
    for run in runs_for(method, shape):
        of_run = mean[run.first : run.first + run.count]
        constants.append({"k": {"mean": in_frame(run, {}, of_run)}} if run.wiring.wanted() else {})
    about = {"sequences": data.count, "tokens": data.length, "rope": rope}
    return Artifact(method, tuple(constants), data.fingerprint, about)
