"""Check JAX's own kernel as ours are: splash attention, for prompts and chunks on TPUs."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax._timing import alternating_seconds
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.kernel_checks.compare import Attention, Speed, examine
from kvqjax.kernel_checks.store import Verdict
from kvqjax.model.config import KVShape
from kvqjax.ops.attention import Partial, segment_attention
from kvqjax.pallas_kernels.forms import SPLASH, KernelForm
from kvqjax.pallas_kernels.packed import family
from kvqjax.pallas_kernels.splash import HEAD_DIMS, splash_attention

__all__ = ["Splash", "check_splash", "splash_form"]

QUERIES, KEYS = 512, 2048


class Splash(NamedTuple):
    """What a verdict on splash attention holds for: the heads of a layer. It stands beside `trial.Candidate`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def form(self) -> KernelForm:
        return SPLASH

    @property
    def name(self) -> str:
        group = self.num_heads // self.num_kv_heads
        return f"{SPLASH}, {self.num_kv_heads} KV heads of {self.head_dim}, {group} queries each"


def splash_form(layout: CacheLayout, shape: KVShape) -> Splash | None:
    """Return what chunks on a cache would take, of which a device holds `shape`; None where splash cannot run."""
    runs = family(layout.target) == "tpu" and shape.head_dim in HEAD_DIMS
    return Splash(shape.num_heads, shape.num_kv_heads, shape.head_dim) if runs else None


class _Body(NamedTuple):
    """Keys and values of one row, [1, S, K, D], and the newest key that each query sees, -1 for none."""

    k: Float[Array, "1 S K D"]
    v: Float[Array, "1 S K D"]
    newest: Int[Array, " T"]


def _body(form: Splash, random: np.random.Generator) -> _Body:
    """Make a body: signed numbers, offset by channel, some channels ten times as large, a few outliers. Some queries
    see nothing, and a last block is partly seen."""
    size = (1, KEYS, form.num_kv_heads, form.head_dim)

    def vectors():
        x = random.normal(size=size) * np.where(np.arange(form.head_dim) % 17, 1, 10) + random.normal(size=size[2:])
        return jnp.asarray(x + 20 * (random.random(size) < 1e-3), jnp.bfloat16)

    newest = np.sort(random.integers(-1, KEYS - 100, QUERIES))
    newest[:3] = -1
    return _Body(vectors(), vectors(), jnp.asarray(newest, jnp.int32))


@functools.partial(jax.jit, static_argnames="interpret")
def _by_splash(body: _Body, q, interpret: bool = False) -> Partial:
    """Attend by splash attention with queries [1, T, H, D]."""
    k, v = (jnp.swapaxes(x[0], 0, 1) for x in (body.k, body.v))
    return splash_attention(q, k, v, body.newest, interpret=interpret)


@functools.partial(jax.jit, static_argnames="dtype")
def _plain(body: _Body, q, dtype: str) -> Partial:
    """Attend by plain products in `dtype`."""
    seen = jnp.arange(KEYS)[None, None] <= body.newest[None, :, None]
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        q, k, v = (x.astype(dtype) for x in (q, body.k, body.v))
        return segment_attention(q, k, v, seen)


def _speed(kernel: Attention, plain: Attention, q) -> Speed:
    """Measure the median milliseconds of a call of both sides."""
    spent = alternating_seconds([lambda: kernel(q), lambda: plain(q)], 5)
    return Speed(*(1e3 * statistics.median(times) for times in spent))


def check_splash(
    form: Splash, *, kernel: Callable[[_Body, Array], Partial] = _by_splash, timed: Callable = _speed
) -> Verdict:
    """Try splash attention on this process's default device, against plain products in float32."""
    start, random = time.perf_counter(), np.random.default_rng(0)
    body = _body(form, random)
    shape = (1, QUERIES, form.num_heads, form.head_dim)
    q = jnp.asarray(random.normal(scale=0.02, size=shape), jnp.bfloat16)  # small: no token takes all the weight
    ours, precise = functools.partial(kernel, body), functools.partial(_plain, body, dtype="float32")
    rounded = functools.partial(_plain, body, dtype="bfloat16")
    verdict = examine(ours, precise, [q], lambda: timed(ours, rounded, q))
    return dataclasses.replace(verdict, seconds=time.perf_counter() - start)
