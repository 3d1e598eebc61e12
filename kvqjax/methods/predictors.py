"""Maps that predict a vector from vectors of the same token: AQUA-KV's predictors (arXiv 2501.19392, sections 3.1 and
4.3).

    linear    y = x W + b                                    {"weight": [I,O], "bias": [O]}
    int4      the same with W in 4 bits, decoded at use      {"codes": uint32 [I/8,O], "scale", "low": [I/g,O], "bias"}
    low_rank  y = (x A) B + b                                {"down": [I,R], "up": [R,O], "bias"}
    mlp       y = silu(norm(x) A + a) B + b                  {"gain", "offset": [I], "down": [I,2O], "inner": [2O], ...}
    none      y = 0                                          {}

Products take the weights' dtype and accumulate in float32; the result is float32.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.model.weight_codes import WEIGHT_GROUP, unpack_nibbles

__all__ = ["DTYPES", "KINDS", "predict", "shapes", "unpack_weight"]

KINDS = ("linear", "int4", "low_rank", "mlp", "none")
DTYPES = {"codes": "uint32", "scale": "bfloat16", "low": "bfloat16", "bias": "float32"}  # others: the compute dtype
NORM_EPS = 1e-5


def shapes(kind: str, inputs: int, outputs: int, rank: int = 0) -> dict[str, tuple[int, ...]]:
    """Give the shapes of one layer's constants by name, without the layer axis."""
    if kind not in KINDS:
        raise UserError(f"predictor={kind!r}; known: {', '.join(KINDS)}")
    if kind == "none":
        return {}
    bias: tuple[int, ...] = (outputs,)
    if kind == "linear":
        return {"weight": (inputs, outputs), "bias": bias}
    if kind == "low_rank":
        return {"down": (inputs, rank), "up": (rank, outputs), "bias": bias}
    if kind == "int4":
        groups = (inputs // math.gcd(inputs, WEIGHT_GROUP), outputs)
        return {"codes": (inputs // 8, outputs), "scale": groups, "low": groups, "bias": bias}
    hidden = 2 * outputs
    layers = {"down": (inputs, hidden), "inner": (hidden,), "up": (hidden, outputs), "bias": bias}
    return {"gain": (inputs,), "offset": (inputs,), **layers}


def unpack_weight(constants: dict[str, Array]) -> Float[Array, "I O"]:
    """Decode the float32 weight of an `int4` predictor: codes * scale + low per group of inputs."""
    codes = unpack_nibbles(constants["codes"]).astype(jnp.float32)
    groups = codes.reshape(constants["scale"].shape[0], -1, codes.shape[1])
    scale, low = (constants[name].astype(jnp.float32)[:, None] for name in ("scale", "low"))
    return (groups * scale + low).reshape(codes.shape)


def _times(x, weight):
    return jnp.einsum("ti,io->to", x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)


def predict(kind: str, constants: dict[str, Array], x: Float[Array, "u I"]) -> Float[Array, "u O"]:
    """Predict vectors of u tokens, float32."""
    if kind == "linear":
        y = _times(x, constants["weight"])
    elif kind == "int4":
        y = _times(x, unpack_weight(constants).astype(constants["scale"].dtype))
    elif kind == "low_rank":
        y = _times(_times(x, constants["down"]), constants["up"])
    elif kind == "mlp":
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        wide = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + NORM_EPS)
        wide = wide * constants["gain"].astype(jnp.float32)[None] + constants["offset"].astype(jnp.float32)[None]
        inner = _times(wide, constants["down"]) + constants["inner"].astype(jnp.float32)[None]
        y = _times(jax.nn.silu(inner), constants["up"])
    else:
        raise UserError(f"predictor={kind!r} cannot be evaluated; known: {', '.join(KINDS[:-1])}")
    return y + constants["bias"].astype(jnp.float32)[None]
