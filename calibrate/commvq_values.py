"""Training of CommVQ's value encoder and codebook, one layer at a time (arXiv 2506.18879, section
4.1).

The encoder chooses one of four values for every two bits. In training the choices are drawn from a
Gumbel softmax with a straight-through gradient (temperature 1); at inference they are the argmax.
Every layer is trained on the exact inputs of the model, as released: no error passes from layer to
layer. Its loss is

    mean |v_hat - v|^2 / mean |v|^2 / 2  +  attention * mean |o_hat - o|^2 / mean |o|^2

where o and o_hat are the layer's attention outputs, after the output projection, of values v and
v_hat. The paper states the first term only (`attention=0`); the released code uses both. The
divisions by mean squares are ours: they give the two terms and the gradient clipping the same scale
in every layer and model.

Training begins with a transform coder (commvq_start.py). The released training begins with random
numbers and takes 100 000 steps. The optimizer is AdamW with the released coefficients. Its learning
rate follows a cosine schedule after a linear warm-up, and the global norm of the gradient is
clipped. The random numbers of step i come from the key and i alone, so a resumed training ends with
the same bytes.
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

# Trained arrays of one layer: the codec's constants but "scale", with the codebook not yet folded
Params = dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueSettings:
    """How one layer's encoder and codebook are trained.

    Attributes:
        steps: of the training.
        batch: sequences of a step.
        queries: number of places at which attention outputs are compared. They are drawn anew at
            every step; 0: all.
        rate: AdamW's largest learning rate.
        warmup: steps until the largest learning rate is reached.
        decay: AdamW's weight decay.
        clip: the largest norm of a gradient.
        attention: weighs the term of the attention output; 0: the paper's plain squared error of
            the values.
    """

    # 200 steps take about 40 processor seconds a layer of SmolLM2-135M (2026-11-27). `rate`,
    # `decay`, `clip` and `attention` are the released ones.
    steps: int = 200
    batch: int = 2
    queries: int = 128
    rate: float = 1e-3
    warmup: int = 20
    decay: float = 0.1
    clip: float = 1.0
    attention: float = 1.0


class Seen(NamedTuple):
    """Properties of a layer's causal attention.

    Attributes:
        sliding: tokens of its sliding window; None: a query sees all tokens before it.
        softcap: bounds scores; None: no cap.
        chunked: whether the window is a chunk of the sequence, which does not slide.
    """

    sliding: int | None = None
    softcap: float | None = None
    chunked: bool = False


class Training(NamedTuple):
    """The state between two steps: everything that a resumed training needs, except for the key and
    the data."""

    params: Params
    optimizer: tuple
    scale: Float[Array, " W"]
    step: Int[Array, ""]


def work(spec: CommVQValues, shape: KVShape, length: int, settings: ValueSettings) -> float:
    """Estimate the floating point operations of one layer's training: forward and backward through
    encoder, codebook, attention and output projection.

    Args:
        length: tokens of a sequence.
    """
    # Multiply-accumulates of one token, forward
    shapes = spec.shapes(shape.kv_width)
    coder = sum(math.prod(shapes[name]) for name in ("w1", "w2", "codebook"))
    width = shape.num_heads * shape.head_dim
    # Scores and sums over `length` tokens, and the output projection.
    attention = width * (2 * length + width)
    attention *= min(settings.queries or length, length) / length  # only some tokens are queries
    # A multiply-accumulate is 2 operations, and going backward takes twice as many as going
    # forward: 6 in all.
    return 6.0 * settings.steps * settings.batch * length * (coder + attention)


def channel_scale(v: Float[Array, "*n W"]) -> Float[Array, " W"]:
    """Compute the mean |v| of each channel. It is fixed before training."""
    return jnp.abs(v.astype(jnp.float32)).reshape(-1, v.shape[-1]).mean(0)


def _optimizer(settings: ValueSettings):
    steps = max(settings.steps, settings.warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.rate, settings.warmup, steps)
    adam = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=settings.decay)
    return optax.chain(optax.clip_by_global_norm(settings.clip), adam)


def random_encoder(key: Array, spec: CommVQValues, width: int) -> Params:
    """Draw an encoder of values of `width` channels. Weights and biases of a linear layer are
    uniform in +-1/sqrt(inputs), as PyTorch draws them."""
    shapes = spec.shapes(width)
    # Parameter -> the matrix of its layer.
    matrix_of = {
        "w1": "w1",
        "b1": "w1",
        "w2": "w2",
        "b2": "w2",
    }
    keys = dict(zip(matrix_of, jax.random.split(key, len(matrix_of)), strict=True))
    params = {"norm_weight": jnp.ones((width,)), "norm_bias": jnp.zeros((width,))}
    for name, matrix in matrix_of.items():
        inputs = shapes[matrix][0]
        bound = inputs**-0.5
        params[name] = jax.random.uniform(keys[name], shapes[name], minval=-bound, maxval=bound)
    return params


def start(
    key: Array, v: Float[Array, "*n W"], spec: CommVQValues, settings: ValueSettings
) -> Training:
    """Make the state before training: a transform coder of a layer's values (commvq_start.py).

    Args:
        key: of the random weights of hidden units that the transform does not need.
        v: the values to learn.

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
    """Compute v_hat with choices drawn from the Gumbel softmax, differentiable by the
    straight-through estimator."""
    unit, norm = normalise(v, scale)
    z = logits(params, unit)
    soft = jax.nn.softmax(z + jax.random.gumbel(key, z.shape), -1)
    hard = jax.nn.one_hot(soft.argmax(-1), 4, dtype=soft.dtype)
    # Straight through: the value of `hard`, the gradient of `soft`.
    bits = choice_bits(hard + soft - jax.lax.stop_gradient(soft))
    w = jnp.einsum("nti,iw->ntw", bits, params["codebook"])
    # v_hat has the norm of v. EPS^2 under the root keeps its gradient finite where w is 0.
    gain = (norm + EPS) / (jnp.sqrt((w * w).sum(-1) + EPS**2) + EPS)
    return gain[..., None] * w * (scale + EPS)[None, None]


def _attended(
    batch: Activations, v: Float[Array, "N T W"], seen: Seen, places: Int[Array, " Q"] | None = None
) -> Float[Array, "N Q E"]:
    """Compute the causal attention output after the output projection, of the queries at `places`
    (None: of all)."""
    count, length = v.shape[:2]
    key_places = jnp.arange(length)
    query_places = key_places if places is None else places
    key_positions = jnp.broadcast_to(key_places[None], (count, length))
    query_positions = jnp.broadcast_to(query_places[None], (count, query_places.shape[0]))
    q = batch.q if places is None else batch.q[:, places]
    mask = visible(
        query_positions, key_positions, jnp.ones((count, length), bool), seen.sliding, seen.chunked
    )
    part = segment_attention(q, batch.k, v.reshape(batch.k.shape), mask, seen.softcap)
    out = with_sinks(part, batch.sinks).out
    return jnp.einsum("ntf,fe->nte", out.reshape(*q.shape[:2], -1), batch.o)


def output_error(
    data: Activations, errors: Float[Array, "N T W"], seen: Seen = Seen()
) -> Float[Array, ""]:
    """Compute the mean squared error of attention outputs, where the values have these `errors`.

    Attention is linear in the values, so the error of an output is the output of the errors."""

    # One sequence at a time, because the scores of all sequences would take much memory.
    def error(sequence):
        v, q, k = (x[None].astype(jnp.float32) for x in sequence)
        return jnp.mean(
            _attended(Activations(v, q, k, data.o.astype(jnp.float32), data.sinks), v, seen) ** 2
        )

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
        queries: number of places at which attention outputs are compared; 0: all. The loss's
            expectation is the same.

    Returns:
        The training loss, and the plain mean squared error of the values.
    """
    choice_key, length = key, batch.v.shape[1]
    places = None
    if 0 < queries < length:
        choice_key, place_key = jax.random.split(key)
        places = jax.random.choice(place_key, length, (queries,), replace=False)
    v_hat = reconstruct(params, scale, choice_key, batch.v)
    value_error = jnp.mean((v_hat - batch.v) ** 2)
    total = value_error / jnp.maximum(jnp.mean(batch.v**2), EPS) / 2
    if attention:
        attention_error = jnp.mean(_attended(batch, v_hat - batch.v, seen, places) ** 2)
        total = total + attention * attention_error / jnp.maximum(energy, EPS)
    return total, value_error


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
        key: of all random numbers. Those of a step depend on the key and the step's number alone.
        state: after the steps so far.
        data: the layer's activations on all sequences.
        count: of steps. It is data, so that one compiled program serves every number.
        seen: what the layer's attention does.

    Returns:
        The new state, and the means of the steps' losses and plain squared errors of the values.
    """
    optimizer = _optimizer(settings)
    energy = output_energy(data, seen) if settings.attention else jnp.ones(())

    def step(_, loop):
        state, sums = loop
        pick, noise = jax.random.split(jax.random.fold_in(key, state.step))
        rows = jax.random.choice(
            pick, data.v.shape[0], (settings.batch,), replace=data.v.shape[0] < settings.batch
        )
        v, q, k = (x[rows].astype(jnp.float32) for x in data[:3])
        batch = Activations(v, q, k, data.o.astype(jnp.float32), data.sinks)
        losses, gradient = jax.value_and_grad(loss, has_aux=True)(
            state.params,
            state.scale,
            noise,
            batch,
            energy,
            settings.attention,
            seen,
            settings.queries,
        )
        with jax.numpy_dtype_promotion("standard"):  # optax's updates mix float32 and weak types
            updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
        return Training(params, optimizer_state, state.scale, state.step + 1), sums + jnp.stack(
            losses
        )

    state, sums = jax.lax.fori_loop(0, count, step, (state, jnp.zeros(2)))
    return state, sums / count.astype(jnp.float32)


def constants(state: Training) -> dict[str, Float[Array, "..."]]:
    """Give the codec's constants of this layer, with the channels' scale folded into the
    codebook."""
    return state.params | {
        "scale": state.scale,
        "codebook": fold(state.params["codebook"], state.scale),
    }
