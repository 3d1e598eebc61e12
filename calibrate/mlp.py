"""AQUA-KV's two-layer predictor (arXiv 2501.19392, section 4.3): LayerNorm, a doubled hidden layer, trained by
optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from kvqjax.methods.papers.aqua import predict, predictor_shapes

__all__ = ["train_mlp"]

BATCH = 1024
PEAK_RATE = 2e-3


def _start(key: Array, inputs: int, outputs: int) -> dict[str, Array]:
    """Weights of variance 1/fan-in; the last layer starts at zero, so training starts from the mean."""
    sizes = predictor_shapes("mlp", inputs, outputs)
    start = {name: jnp.zeros(shape, jnp.float32) for name, shape in sizes.items()}
    down = jax.random.normal(key, sizes["down"], jnp.float32) * inputs**-0.5
    return start | {"gain": jnp.ones(sizes["gain"], jnp.float32), "down": down}


@functools.partial(jax.jit, static_argnames="steps")
def _train(key, x, y, steps: int) -> dict[str, jax.Array]:
    start_key, order_key = jax.random.split(key)
    tune = optax.adam(optax.cosine_decay_schedule(PEAK_RATE, steps))
    start = _start(start_key, x.shape[1], y.shape[1])

    def loss(weights, x, y):
        return ((predict("mlp", weights, x) - y) ** 2).mean()

    def step(state, key):
        weights, slots = state
        rows = jax.random.randint(key, (min(BATCH, x.shape[0]),), 0, x.shape[0])
        with jax.numpy_dtype_promotion("standard"):
            update, slots = tune.update(jax.grad(loss)(weights, x[rows], y[rows]), slots)
            return (optax.apply_updates(weights, update), slots), None

    with jax.numpy_dtype_promotion("standard"):
        return jax.lax.scan(step, (start, tune.init(start)), jax.random.split(order_key, steps))[0][0]


def train_mlp(
    key: Array, x: Float[np.ndarray, "N I"], y: Float[np.ndarray, "N O"], steps: int
) -> dict[str, np.ndarray]:
    """Constants of an `mlp` predictor of y from x. Outputs are standardised for training and scaled back afterwards, so
    one rate serves keys of any size."""
    mean, spread = y.mean(0), max(float(y.std(0).mean()), 1e-20)
    weights = _train(key, jnp.asarray(x), jnp.asarray((y - mean) / spread), steps)
    out: dict[str, np.ndarray] = {name: np.asarray(a) for name, a in weights.items()}
    return out | {"up": out["up"] * np.float32(spread), "bias": out["bias"] * np.float32(spread) + mean}
