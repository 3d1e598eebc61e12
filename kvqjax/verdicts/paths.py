"""Attend to a trial's bodies in two ways, by the kernel and by the plain path; make queries for both, and time both."""

import dataclasses
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax._timing import alternating_seconds
from kvqjax.cache.attention import attend_tokens
from kvqjax.cache.encoding import at_layer
from kvqjax.cache.readers import attend_body
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.ops.attention import Partial, ScoreOptions
from kvqjax.pallas_kernels.choice import OFF
from kvqjax.pallas_kernels.dispatch import at_once
from kvqjax.pallas_kernels.exact import ExactSpec
from kvqjax.pallas_kernels.packed import family
from kvqjax.verdicts.examine import Attention, Speed
from kvqjax.verdicts.trial import SINKS, Trial, full

__all__ = ["LENGTHS", "by_kernel", "by_plain_path", "decoding", "queries", "speed"]

QUERY, SPREAD = 0.25, 1.5  # of queries at first, and of log-sum-exps above that of equal scores at most
HALVINGS = 10
ROUNDS, CALLS = 5, 8  # of a timing, and how often a round attends
LENGTHS = (1, 3)  # new tokens of a call


def _attend(trial: Trial, q: jax.Array) -> Partial:
    """Attend with new tokens' queries [B, T, H, D] in the way that the cache's layout names: to the body alone; on a
    chip to all tokens where the body is exact, because its kernel takes those beside it as well."""
    run, cache, (batch, length) = trial.run, trial.cache, q.shape[:2]
    positions = cache.lengths[:, None] + jnp.arange(length)[None]
    tokens = NewTokens(positions, jnp.full((batch,), length, jnp.int32), cache.lengths - SINKS)
    draw = lambda width: jax.random.normal(jax.random.key(width), (batch, length, width), jnp.bfloat16)  # noqa: E731
    new = {name: draw(width).astype(q.dtype) for name, width in run.wiring.storage.sources.items()}
    constants = at_layer(trial.constants, 0)
    view = LayerView(run, cache.runs[0], jnp.int32(0), trial.weights, constants, new, SINKS)
    packed = run.wiring.fast.packed
    if packed is None or not isinstance(packed.spec, ExactSpec) or family(cache.layout.target) != "tpu":
        return _through_layers(q, view, tokens)
    return attend_tokens(q, view, tokens, ScoreOptions(), False, {}, {})[0]


def _through_layers(q: jax.Array, view: LayerView, tokens: NewTokens) -> Partial:
    """Attend to the body alone. Where layers feed each other, attend in two of them, both this one: what the first one
    hands on is checked by what the second one finds."""
    run, chain = view.run, view.run.wiring.chain
    attend = functools.partial(attend_body, q, view, tokens)
    if not (chain.carry and chain.held):
        return attend({})[0]
    draw = lambda width: jax.random.normal(jax.random.key(width), (len(q), run.slots_here, width), jnp.bfloat16)  # noqa: E731
    below = {name: draw(width).astype(q.dtype) for name, width in chain.carry.items()}
    return attend(attend(below)[1])[0]


_attend_compiled = jax.jit(_attend)


@jax.jit
def _precisely(trial: Trial, q: jax.Array) -> Partial:
    """Attend in float32 throughout. A TPU's matrix unit rounds float32 to bfloat16 unless it is told not to."""
    with jax.default_matmul_precision("highest"):
        return _attend(trial, q.astype(jnp.float32))


def by_kernel(trial: Trial) -> Attention:
    """Return attention as decoding does it: a function of the queries."""
    return functools.partial(_attend_compiled, trial)


def by_plain_path(trial: Trial) -> Attention:
    """Return attention to the same arrays without a kernel, in float32."""
    layout = dataclasses.replace(trial.cache.layout, kernels=OFF)
    return functools.partial(_precisely, trial._replace(cache=trial.cache.replace(layout=layout)))


def queries(trial: Trial, lengths: tuple[int, ...] = LENGTHS) -> list[jax.Array]:
    """Make queries [B, T, H, D] for every T of `lengths` that the kernel takes. They are so short that no token takes
    all the weight: with larger scores the plain path's own rounding would be a matter of percents."""
    run, random = trial.run, np.random.default_rng(1)
    shape, plain = run.shape, by_plain_path(trial)
    most, found = np.log(run.slots) + SPREAD, []
    for length in lengths:
        packed = run.wiring.fast.packed
        if packed is None or not at_once(packed.spec, shape.num_heads // shape.num_kv_heads, length):
            continue
        size = (trial.cache.batch, length, shape.num_heads, shape.head_dim)
        q = jnp.asarray(random.normal(scale=QUERY, size=size), jnp.bfloat16)
        for _ in range(HALVINGS):
            q = q if float(plain(q).lse.max()) <= most else q * jnp.bfloat16(0.5)
        found.append(q)
    return found


@functools.partial(jax.jit, static_argnames="inner")
def _chain(trial: Trial, q: jax.Array, *, inner: int) -> jax.Array:
    """Attend `inner` times, each call fed by the one before so that none can be left out. The query hardly changes."""
    step = lambda _, x: q + (1e-3 * _attend(trial, x).out).astype(q.dtype)  # noqa: E731
    return jax.lax.fori_loop(0, inner, step, q)


def decoding(trial: Trial, inner: int) -> Callable[[], jax.Array]:
    """Return a call that attends `inner` times with one new token a row."""
    shape = trial.cache.layout.shape
    q = jnp.ones((trial.cache.batch, 1, shape.num_heads, shape.head_dim), jnp.bfloat16)
    return functools.partial(_chain, trial, q, inner=inner)


def speed(kernel: Trial, plain: Trial, tokens: int) -> Speed:
    """Measure the median milliseconds of a call with one new token on bodies of `tokens` tokens, both sides in turn."""
    sides = [decoding(full(trial, tokens, plain.cache.batch), CALLS) for trial in (kernel, plain)]
    return Speed(*(1e3 * statistics.median(spent) / CALLS for spent in alternating_seconds(sides, ROUNDS)))
