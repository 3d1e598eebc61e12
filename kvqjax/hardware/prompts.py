"""Estimates how long a prompt takes on a chip, and the least time by its operations."""

import math
from typing import NamedTuple

import jax

from kvqjax.hardware.devices import DEVICES
from kvqjax.hardware.planner import parameter_shapes
from kvqjax.model.config import ModelConfig


class Shares(NamedTuple):
    """Parts of a chip's peak: what products with weights reach, and what attention does."""

    weights: float
    attention: float


# What a prompt of 32K tokens of Llama-3.1-8B should reach: the instructions of its program were
# counted, which had been compiled for the chip (2026-11-26, jax 0.11.2). It did not run.
REACHED = {
    "v5e": Shares(0.78, 0.63),
    "v6e": Shares(0.57, 0.25),
    "v7x": Shares(0.55, 0.24),
    "a100-80": Shares(0.91, 0.29),
    "h100": Shares(0.83, 0.15),
}


def prompt_parts(config: ModelConfig, length: int, new: int) -> tuple[float, float]:
    """Return the fewest operations of `new` tokens of a row that holds `length` tokens, two per
    multiply-accumulate: (products with every weight that a token meets, which of experts are those
    it is sent to, and with the head for the last; scores and weighted sums over what each sees)."""
    layers = parameter_shapes(config)["layers"]
    weights = sum(math.prod(shape.shape) for shape in jax.tree.leaves(layers)) - config.idle_numbers
    shapes = [config.layer(index) for index in range(config.num_layers)]
    seen = sum(
        _seen(length + new, shape.window, shape.common_chunked)
        - _seen(length, shape.window, shape.common_chunked)
        for shape in shapes
    )
    return 2.0 * (weights * new + config.vocab_size * config.width), 4.0 * config.query_width * seen


def prompt_operations(config: ModelConfig, length: int, new: int) -> float:
    """Return the fewest operations of `new` tokens of a row that holds `length` tokens."""
    return sum(prompt_parts(config, length, new))


def estimated_seconds(config: ModelConfig, context: int, batch: int, chip: str) -> float | None:
    """Estimate an exact prefill of `batch` prompts of `context` tokens on one chip; None where none
    was compiled."""
    if chip not in REACHED:
        return None
    parts = zip(prompt_parts(config, 0, context), REACHED[chip], strict=True)
    return (
        batch
        * sum(operations / share for operations, share in parts)
        / (DEVICES[chip].tflops * 1e12)
    )


def _seen(tokens: int, window: int | None, chunked: bool) -> int:
    """Return how many tokens the first `tokens` of a row see, all in all, themselves included.
    `chunked`: the window is a chunk, of which a token sees what comes before it."""
    inside = min(tokens, window or tokens)
    triangle = inside * (inside + 1) // 2
    if not chunked:
        return triangle + (tokens - inside) * inside
    chunks, rest = divmod(tokens, inside) if inside else (0, 0)
    return chunks * triangle + rest * (rest + 1) // 2
