"""The weights of a decoder as a pytree: their two forms, and random ones."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvqjax.model.config import ModelConfig
from kvqjax.model.experts import BY_EXPERT, Rows, is_unrolled

__all__ = ["Params", "init_params", "is_unrolled", "stacked", "stored_layers", "unrolled"]

Params = dict
Layer = dict
LARGE_LAYER, DEEPEST = 2**26, 48  # bytes of weights, layers
SPARSE = ("router", *BY_EXPERT, "shared_router", "shared_gate", "shared_up", "shared_down")


def stored_layers(platform: str, config: ModelConfig, dtype) -> str:
    """Say how the layers of a model are stored by default: "unroll" (each by itself) on GPUs, "scan" (as stacks) on
    TPUs. XLA for CPUs copies every matrix out of a stack at every step, which takes as long as the product, but
    compiles each layer of a list anew, a second or more: that is repaid within a text of some hundred tokens where
    layers are large, and never in a very deep model."""
    if platform != "cpu":
        return "unroll" if platform == "gpu" else "scan"
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config, dtype))["layers"]
    each = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) * jnp.dtype(dtype).itemsize / config.num_layers
    return "unroll" if each >= LARGE_LAYER and config.num_layers <= DEEPEST else "scan"


def unrolled(params: Params) -> Params:
    """The same weights with every layer's arrays by themselves. One stacked matrix after the other is taken apart, so
    that no second copy of all weights exists if the caller keeps none."""
    if is_unrolled(params):
        return params
    rest = dict(params["layers"])
    layers = [{} for _ in rest["attn_norm"]]
    for name in list(rest):
        stack = rest.pop(name)
        numbers = stack.layers if isinstance(stack, Rows) else range(len(layers))
        stack = stack.stack if isinstance(stack, Rows) else stack
        for row, index in enumerate(numbers):
            layers[index][name] = jax.tree.map(lambda a, row=row: a[row], stack)
    return params | {"layers": layers}


def stacked(params: Params) -> Params:
    """The same weights as one stack a name, which is a second copy of a list's."""
    if not is_unrolled(params):
        return params
    layers, join = params["layers"], lambda *parts: jnp.stack(parts)
    found = {}
    for name in dict.fromkeys(name for own in layers for name in own):
        numbers = tuple(index for index, own in enumerate(layers) if name in own)
        stack = jax.tree.map(join, *(layers[index][name] for index in numbers))
        found[name] = Rows(stack, numbers) if name in SPARSE or len(numbers) < len(layers) else stack
    return params | {"layers": found}


def init_params(key: Array, config: ModelConfig, dtype=jnp.float32) -> Params:
    """Random weights: normal with variance 1/fan_in, residual outputs scaled down by sqrt(2 L); norms one, biases
    zero."""
    c, count = config, config.num_layers
    shapes = {
        "q": (c.width, c.query_width),
        "k": (c.width, c.kv_width),
        "v": (c.width, c.kv_width),
        "o": (c.query_width, c.width),
    }
    own = shapes | _mlp_shapes("", c.width, c.mlp_width) | _expert_shapes(config)
    keys = dict(zip([*own, "embed", "head"], jax.random.split(key, len(own) + 2), strict=True))

    def stack(name: str, shape: tuple[int, ...], rows: int):
        drawn = jax.random.normal(keys[name], (rows, *shape), dtype) * shape[-2] ** -0.5
        return drawn * (2 * count) ** -0.5 if name.endswith(("o", "down")) else drawn

    layers = {}
    for name, shape in own.items():
        numbers = c.sparse_layers if name in SPARSE else range(count) if name in shapes else c.dense_layers
        if numbers:
            drawn = stack(name, shape, len(numbers))
            layers[name] = drawn if len(numbers) == count and name not in SPARSE else Rows(drawn, tuple(numbers))
    ones = {"attn_norm": c.width, "mlp_norm": c.width}
    if c.qk_norm:
        ones |= {"q_norm": c.head_dim, "k_norm": c.head_dim}
    layers |= {name: jnp.ones((count, size), dtype) for name, size in ones.items()}
    if c.qkv_bias:
        sizes = {"q_bias": c.query_width, "k_bias": c.kv_width, "v_bias": c.kv_width}
        layers |= {name: jnp.zeros((count, size), dtype) for name, size in sizes.items()}
    params = {"embed": jax.random.normal(keys["embed"], (c.vocab_size, c.width), dtype) * 0.02}
    params |= {"norm": jnp.ones((c.width,), dtype), "layers": layers}
    if not c.tied_embeddings:
        params["head"] = jax.random.normal(keys["head"], (c.width, c.vocab_size), dtype) * c.width**-0.5
    return params


def _mlp_shapes(prefix: str, width: int, inner: int, *lead: int) -> dict[str, tuple[int, ...]]:
    into, back = (*lead, width, inner), (*lead, inner, width)
    return {f"{prefix}gate": into, f"{prefix}up": into, f"{prefix}down": back}


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What a sparse layer has in place of an MLP."""
    c, x = config, config.experts
    if x is None:
        return {}
    shapes = {"router": (c.width, x.count)} | _mlp_shapes("experts_", c.width, x.width, x.count)
    shared = _mlp_shapes("shared_", c.width, x.shared_width) | {"shared_router": (c.width, 1)}
    return shapes | (shared if x.shared_width else {})
