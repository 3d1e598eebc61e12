"""A tiny model with recurrent layers between those of attention, every weight random."""

import functools

import jax
from checkpoints import random_params
from tiny import tiny

import kvqjax as kvq
from kvqjax.model.config import RecurrentConfig, RopeConfig

# Recurrent layers before each of attention; or none, two, and one at the end.
EVEN, UNEVEN = (
    (0, 1, 3, 4),
    (1, 2, 4),
)

# What the tiny model of `cases` becomes: Qwen3.5's parts.
PARTS = {
    "output_gate": True,
    "qk_norm": True,
    "norm_offset": 1.0,
    "rope": RopeConfig(fraction=0.25),
}


def recurrent(layers: tuple[int, ...] = EVEN) -> RecurrentConfig:
    return RecurrentConfig(
        layers=layers, key_heads=2, value_heads=4, key_dim=8, value_dim=12, kernel=4
    )


def drawn(model: kvq.Model) -> kvq.Model:
    """The model with every weight random, of a gain that keeps errors of float32 small."""
    params = random_params(model.config)
    layers = jax.tree.map(
        lambda x: x * (x.shape[-2] ** -0.5 if x.ndim > 2 else 0.5), params["layers"]
    )
    return model.replace(params=params | {"layers": layers, "norm": 0.5 * params["norm"]})


@functools.cache
def hybrid(layers: tuple[int, ...] = EVEN, **changes) -> kvq.Model:
    """Two layers of attention, and recurrent ones where `layers` says."""
    return drawn(tiny(**PARTS | {"recurrent": recurrent(layers)} | changes))
