"""XQuant's constants from the weights alone (arXiv 2508.10395, section 3.3): no data is needed.

The SVD runs in float64 on the host, one layer at a time, with a sign convention: neighbouring
singular values can lie so close that a float32 SVD rotates their vectors, and with them every code.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax.cache.runs import runs_for
from kvqjax.methods import Method
from kvqjax.methods.papers.xquant import LayerInput
from kvqjax.methods.papers.xquant_cl import CrossLayer
from kvqjax.methods.spec import LayerSpec
from kvqjax.model import decoder
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import Params

Factors = tuple[np.ndarray, np.ndarray, np.ndarray]


def signed_svd(weight: Float[Array | np.ndarray, "E N"]) -> Factors:
    """Compute the economy SVD, U [E, R], S [R] and B^T [R, N], in float64. In every column of U the
    entry of the largest size is positive."""
    u, s, bt = np.linalg.svd(np.asarray(weight, np.float64), full_matrices=False)
    columns = np.arange(u.shape[1])
    largest = u[np.abs(u).argmax(0), columns]
    sign = np.where(largest < 0, -1.0, 1.0)
    # Both factors turn their sign, so that the product stays.
    return u * sign, s, bt * sign[:, None]


def _host(weight) -> np.ndarray:
    """Copy to the host as float64. bfloat16 goes through float32, which NumPy knows."""
    return np.asarray(weight, np.float32).astype(np.float64)


def latent_maps(weight: Float[Array | np.ndarray, "E N"]) -> dict[str, np.ndarray]:
    """Factorise a weight into down @ up: {"down": U [E, R], "up": S B^T [R, N]}, float32."""
    u, s, bt = signed_svd(_host(weight))
    return {"down": u.astype(np.float32), "up": (s[:, None] * bt).astype(np.float32)}


def shared_map(
    layer: Mapping[str, Array | np.ndarray], space: str, norm_offset: float = 0.0
) -> dict[str, np.ndarray]:
    """Find the basis that keys and values of a layer share: {"down": U [E, R]}, float32.

    Args:
        layer: the layer's weights.
        space: "norm": U is that of [W_k | W_v]. "residual", where the residual stream is cached:
            that of diag(gain) [W_k | W_v].
        norm_offset: the gain is the norm's weight plus this.
    """
    joint = np.concatenate([_host(layer["k"]), _host(layer["v"])], axis=1)
    if space == "residual":
        # The norm comes after what is cached, so its gain belongs to the weight.
        gain = _host(layer["attn_norm"]) + norm_offset
        joint = gain[:, None] * joint
    u, _, _ = signed_svd(joint)
    return {"down": u.astype(np.float32)}


def _layer_constants(spec: LayerSpec, params: Params, number: int, config: ModelConfig) -> dict:
    """Compute one layer's constants. A layer of another method has none, and neither has one whose
    inputs are cached without latents."""
    if not (isinstance(spec, LayerInput | CrossLayer) and spec.uses_latents(config)):
        return {}
    layer = decoder.layer(params, number)
    if isinstance(spec, CrossLayer):
        return {"x": shared_map(layer, spec.space, config.norm_offset)}
    return {name: latent_maps(layer[name]) for name in ("k", "v")}


def _stacked(shape: jax.ShapeDtypeStruct, *layers: np.ndarray) -> np.ndarray:
    return np.stack(layers).astype(shape.dtype)


def constants(params: Params, config: ModelConfig, method: Method) -> tuple[dict, ...]:
    """Compute what every run of XQuant's layers needs, stacked over its layers. Arrays are on the
    host, in the dtype in which a model of the params' dtype holds them. Layers that need nothing,
    or what weights alone do not tell, have {}."""
    specs = method.layers(config)
    dtype = str(params["embed"].dtype)
    stacks = []
    for run in runs_for(method, config, dtype):
        numbers = range(run.first, run.first + run.count)
        layers = [_layer_constants(specs[run.first], params, number, config) for number in numbers]
        # The shapes tell each constant's dtype. Constants of all layers of a run have the same
        # names.
        shapes = run.wiring.constants(run.count, dtype) if layers[0] else {}
        stacks.append(jax.tree.map(_stacked, shapes, *layers))
    return tuple(stacks)


def prepared(model: Model, method: Method) -> Model:
    """Add to a model the constants that an XQuant method needs, computed from its weights. A model
    that has constants already stays as it is, and so does one whose method needs none. It takes
    seconds for small models. For large ones store the artifact (`kvqjax calibrate`)."""
    if model.constants:
        return model
    computed = constants(model.params, model.config, method)
    if not any(computed):
        return model
    return model.replace(constants=jax.tree.map(jnp.asarray, computed))
