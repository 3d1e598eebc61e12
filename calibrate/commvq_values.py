"""Training of CommVQ's value encoder and codebook, one layer at a time (arXiv 2506.18879, section 4.1).

The choices are drawn from a Gumbel softmax with a straight-through gradient (temperature 1); at inference they are the
argmax. The loss of one layer, on sequences of exact inputs (no error passes from layer to layer, as released), is

    mean |v_hat - v|^2 / mean |v|^2 / 2  +  attention * mean |o_hat - o|^2 / mean |o|^2

with o the layer's attention output after its output projection, once with v and once with v_hat. The paper states the
first term only (`attention=0`), the released code uses both. Dividing by the signals' own mean squares is ours: the two
terms and the gradient clipping then mean the same for every layer and model.

Training begins with a transform coder (commvq_start.py), where the released one begins with random numbers and takes
100 000 steps. AdamW with the released coefficients; cosine schedule after a linear warm-up; the global gradient norm is
clipped. The random numbers of step i come from the key and i alone, so a resumed training ends with the same bytes.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from kvqjax.calibrate.commvq_start import transform_coder
from kvqjax.calibrate.layerwise import Activations
from kvqjax.codecs.commvq_values import EPS, CommVQValues, choice_bits, fold, logits, normalise
from kvqjax.model.config import KVShape
from kvqjax.ops.attention import segment_attention, visible, with_sinks

__all__ = [
    "Training",
    "ValueSettings",
    "channel_scale",
    "constants",
    "output_energy",
    "output_error",
    "random_encoder",
    "start",
    "train",
    "work",
]

Params = dict  # trained arrays of one layer: the codec's constants but "scale", with the codebook not yet folded


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueSettings:
    """How one layer's encoder and codebook are trained.

    Attributes:
        steps: of the training.
        batch: sequences of a step.
        queries: places of the sequences, drawn anew at every step, at which the attention output is compared; 0: all.
        rate: AdamW's largest learning rate.
        warmup: steps until it is reached.
        decay: AdamW's weight decay.
        clip: the largest norm of a gradient.
        attention: weighs the term of the attention output; 0: the paper's plain squared error of the values.
    """

    # So many steps take about 40 processor seconds a layer of SmolLM2-135M (python -m benchmarks.commvq_training). The
    # rate, and what follows it but for the warm-up, are the released ones.
    steps: int = 200
    batch: int = 2
    queries: int = 128
    rate: float = 1e-3
    warmup: int = 20
    decay: float = 0.1
    clip: float = 1.0
    attention: float = 1.0


class Seen(NamedTuple):
    """What a layer's attention does beside being causal.

    Attributes:
        sliding: the tokens of its sliding window; None: it sees all.
        softcap: of its scores; None: no cap.
        chunked: whether the window is a chunk.
    """

    sliding: int | None = None
    softcap: float | None = None
    chunked: bool = False


class Training(NamedTuple):
    """The state between two steps: all that a resumed training needs beside the key and the data."""

    params: Params
    optimizer: tuple
    scale: Float[Array, " W"]
    step: Int[Array, ""]


def work(spec: CommVQValues, shape: KVShape, length: int, settings: ValueSettings) -> float:
    """Count the floating point operations of one layer's training: forward and back through encoder, codebook,
    attention and output projection."""
    sizes = sum(math.prod(s) for name, s in spec.shapes(shape.kv_width).items() if name in ("w1", "w2", "codebook"))
    attention = shape.num_heads * shape.head_dim * (2 * length + shape.num_heads * shape.head_dim)
    attention *= min(settings.queries or length, length) / length
    return 6.0 * settings.steps * settings.batch * length * (sizes + attention)


def channel_scale(v: Float[Array, "*n W"]) -> Float[Array, " W"]:
    """Compute the mean |v| of each channel, which training leaves as it is."""
    return jnp.abs(v.astype(jnp.float32)).reshape(-1, v.shape[-1]).mean(0)


def _optimizer(settings: ValueSettings):
    steps = max(settings.steps, settings.warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.rate, settings.warmup, steps)
    adam = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=settings.decay)
    return optax.chain(optax.clip_by_global_norm(settings.clip), adam)


def random_encoder(key: Array, spec: CommVQValues, width: int) -> Params:
    """Draw an encoder of values of `width` channels, its linear layers uniform in +-1/sqrt(inputs)."""
    shapes, inputs = spec.shapes(width), {"w1": "w1", "b1": "w1", "w2": "w2", "b2": "w2"}
    keys = dict(zip(inputs, jax.random.split(key, len(inputs)), strict=True))
    params = {"norm_weight": jnp.ones((width,)), "norm_bias": jnp.zeros((width,))}
    for name, matrix in inputs.items():
        bound = shapes[matrix][0] ** -0.5
        params[name] = jax.random.uniform(keys[name], shapes[name], minval=-bound, maxval=bound)
    return params


def start(key: Array, v: Float[Array, "*n W"], spec: CommVQValues, settings: ValueSettings) -> Training:
    """The state before training: a transform coder of a layer's values (commvq_start.py).

    Args:
        key: of the random numbers that hidden units hold which the transform leaves over.
        v: the values to learn.
        spec: the codec.
        settings: of the training.

    Returns:
        Parameters, the optimizer's state and the channels' scale, at step 0.

    Raises:
        UserError: values that are not finite.
    """
    scale = channel_scale(v)
    params = transform_coder(random_encoder(key, spec, scale.shape[0]), v, scale)
    with jax.numpy_dtype_promotion("standard"):
        optimizer = _optimizer(settings).init(params)
    return Training(params, optimizer, scale, jnp.asarray(0, jnp.int32))


def reconstruct(
    params: Params, scale: Float[Array, " W"], key: Array, v: Float[Array, "N T W"]
) -> Float[Array, "N T W"]:
    """Compute v_hat with choices drawn from the Gumbel softmax, differentiable by the straight-through estimator."""
    unit, norm = normalise(v, scale)
    z = logits(params, unit)
    soft = jax.nn.softmax(z + jax.random.gumbel(key, z.shape), -1)
    hard = jax.nn.one_hot(soft.argmax(-1), 4, dtype=soft.dtype)
    bits = choice_bits(hard + soft - jax.lax.stop_gradient(soft))
    w = jnp.einsum("nti,iw->ntw", bits, params["codebook"])
    gain = (norm + EPS) / (jnp.sqrt((w * w).sum(-1) + EPS**2) + EPS)
    return gain[..., None] * w * (scale + EPS)[None, None]


def _attended(
    batch: Activations, v: Float[Array, "N T W"], seen: Seen, places: Int[Array, " Q"] | None = None
) -> Float[Array, "N Q E"]:
    """Compute the causal attention output after the output projection, of the queries at `places` (None: of all)."""
    count, length = v.shape[:2]
    everywhere = jnp.arange(length)
    of_queries, of_keys = (
        jnp.broadcast_to(x[None], (count, x.shape[0])) for x in (everywhere if places is None else places, everywhere)
    )
    q = batch.q if places is None else batch.q[:, places]
    mask = visible(of_queries, of_keys, jnp.ones((count, length), bool), seen.sliding, seen.chunked)
    part = segment_attention(q, batch.k, v.reshape(batch.k.shape), mask, seen.softcap)
    out = with_sinks(part, batch.sinks).out
    return jnp.einsum("ntf,fe->nte", out.reshape(*q.shape[:2], -1), batch.o)


def output_error(data: Activations, errors: Float[Array, "N T W"], seen: Seen = Seen()) -> Float[Array, ""]:
    """Compute the mean squared error of the attention outputs where values have these `errors`, one sequence at a time.
    Attention is linear in the values: the difference of the outputs is the output of the difference."""

    def error(sequence):
        v, q, k = (x[None].astype(jnp.float32) for x in sequence)
        return jnp.mean(_attended(Activations(v, q, k, data.o.astype(jnp.float32), data.sinks), v, seen) ** 2)

    return jax.lax.map(error, (errors, *data[1:3])).mean()


def output_energy(data: Activations, seen: Seen = Seen()) -> Float[Array, ""]:
    """Compute the mean square of the exact attention outputs."""
    return output_error(data, data.v, seen)


def loss(
    params: Params,
    scale: Float[Array, " W"],
    key: Array,
    batch: Activations,
    energy: Float[Array, ""],
    attention: float,
    seen: Seen = Seen(),
    queries: int = 0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute the loss of one step.

    Args:
        params: of encoder and codebook.
        scale: of the channels.
        key: of the drawn choices and places.
        batch: the sequences.
        energy: the data's `output_energy`.
        attention: weighs the term of the attention output; 0 leaves it out.
        seen: what the layer's attention does.
        queries: places at which the attention output is compared; 0: all. The expectation is the same.

    Returns:
        The training loss, and the plain mean squared error of the values.
    """
    draws, length = key, batch.v.shape[1]
    places = None
    if 0 < queries < length:
        draws, at = jax.random.split(key)
        places = jax.random.choice(at, length, (queries,), replace=False)
    guess = reconstruct(params, scale, draws, batch.v)
    value = jnp.mean((guess - batch.v) ** 2)
    total = value / jnp.maximum(jnp.mean(batch.v**2), EPS) / 2
    if attention:
        error = jnp.mean(_attended(batch, guess - batch.v, seen, places) ** 2)
        total = total + attention * error / jnp.maximum(energy, EPS)
    return total, value


@functools.partial(jax.jit, static_argnames=("settings", "seen"))
def train(
    key: Array,
    state: Training,
    data: Activations,
    settings: ValueSettings,
    count: Int[Array, ""],
    seen: Seen = Seen(),
) -> tuple[Training, Float[Array, "2"]]:
    """Train for some steps more.

    Args:
        key: of all random numbers; those of a step follow from it and the step's number.
        state: after the steps so far.
        data: the layer's activations on all sequences.
        settings: of the training.
        count: how many steps; any number takes the same program.
        seen: what the layer's attention does.

    Returns:
        The new state, and the means of the steps' losses and plain squared errors of the values.
    """
    optimizer = _optimizer(settings)
    energy = output_energy(data, seen) if settings.attention else jnp.ones(())

    def step(_, loop):
        state, sums = loop
        pick, noise = jax.random.split(jax.random.fold_in(key, state.step))
        rows = jax.random.choice(pick, data.v.shape[0], (settings.batch,), replace=data.v.shape[0] < settings.batch)
        v, q, k = (x[rows].astype(jnp.float32) for x in data[:3])
        batch = Activations(v, q, k, data.o.astype(jnp.float32), data.sinks)
        gradient = jax.value_and_grad(loss, has_aux=True)
        weight, queries = settings.attention, settings.queries
        losses, slopes = gradient(state.params, state.scale, noise, batch, energy, weight, seen, queries)
        with jax.numpy_dtype_promotion("standard"):  # optax's updates mix float32 and weak types
            updates, inner = optimizer.update(slopes, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
        return Training(params, inner, state.scale, state.step + 1), sums + jnp.stack(losses)

    state, sums = jax.lax.fori_loop(0, count, step, (state, jnp.zeros(2)))
    return state, sums / count.astype(jnp.float32)


def constants(state: Training) -> dict[str, Float[Array, "..."]]:
    """Give the codec's constants of this layer, with the channels' scale folded into the codebook."""
    return state.params | {"scale": state.scale, "codebook": fold(state.params["codebook"], state.scale)}
