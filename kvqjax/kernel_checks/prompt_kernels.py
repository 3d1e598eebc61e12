"""Check kernels of others as ours are: splash attention, for prompts and chunks on TPUs, and
cuDNN's, for prompts on GPUs."""

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
from kvqjax.cache.layout import CacheLayout
from kvqjax.kernel_checks.compare import Attention, Speed, examine
from kvqjax.kernel_checks.store import Verdict
from kvqjax.model.config import KVShape
from kvqjax.ops.attention import Partial, segment_attention, visible
from kvqjax.ops.whole_prompts import attend_by_cudnn
from kvqjax.pallas_kernels.chips import family
from kvqjax.pallas_kernels.forms import CUDNN, SPLASH, KernelForm
from kvqjax.pallas_kernels.splash import HEAD_DIMS, splash_attention

QUERIES = 512  # for splash attention; cuDNN is given as many queries as keys
KEYS = 2048
SLIDING = 300  # tokens that a query sees where a window is tried
MOST_CUDNN = 128  # channels of a head that cuDNN takes on every GPU from compute capability 8.0 on


class PromptKernel(NamedTuple):
    """The subject of a verdict: SPLASH or CUDNN, and the heads of a layer. See
    `trial.Candidate`."""

    form: KernelForm
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        group = self.num_heads // self.num_kv_heads
        return f"{self.form}, {self.num_kv_heads} KV heads of {self.head_dim}, {group} queries each"


def prompt_kernel(layout: CacheLayout, shape: KVShape) -> PromptKernel | None:
    """Return the kernel that prompts on a cache would use, if one device holds `shape` of it. None
    if no such kernel runs."""
    kind = family(layout.target)
    dim = shape.head_dim
    if kind == "tpu" and dim in HEAD_DIMS:
        return PromptKernel(SPLASH, shape.num_heads, shape.num_kv_heads, dim)
    fits_cudnn = dim % 8 == 0 and dim <= MOST_CUDNN and layout.dtype == "bfloat16"
    if kind == "gpu" and layout.target != "sm75" and fits_cudnn:
        return PromptKernel(CUDNN, shape.num_heads, shape.num_kv_heads, dim)
    return None


class _Body(NamedTuple):
    """Keys and values of one row, [1, S, K, D], and the newest key that each query sees, -1 for
    none."""

    k: Float[Array, "1 S K D"]
    v: Float[Array, "1 S K D"]
    newest: Int[Array, " T"]


def _body(form: PromptKernel, random: np.random.Generator) -> _Body:
    """Make a body: signed numbers, offset by channel, some channels ten times as large, a few
    outliers. Some queries see nothing, and a last block is partly seen."""
    size = (1, KEYS, form.num_kv_heads, form.head_dim)
    magnitudes = np.where(np.arange(form.head_dim) % 17, 1, 10)

    def vectors():
        signed = random.normal(size=size) * magnitudes
        offsets = random.normal(size=size[2:])
        outliers = 20 * (random.random(size) < 1e-3)
        return jnp.asarray(signed + offsets + outliers, jnp.bfloat16)

    newest = np.sort(random.integers(-1, KEYS - 100, QUERIES))
    newest[:3] = -1
    k = vectors()
    v = vectors()
    return _Body(k, v, jnp.asarray(newest, jnp.int32))


@functools.partial(jax.jit, static_argnames="interpret")
def _by_splash(body: _Body, q, interpret: bool = False) -> Partial:
    """Attend by splash attention with queries [1, T, H, D]."""
    k = jnp.swapaxes(body.k[0], 0, 1)  # [K, S, D]
    v = jnp.swapaxes(body.v[0], 0, 1)
    return splash_attention(q, k, v, body.newest, interpret=interpret)


@functools.partial(jax.jit, static_argnames="dtype")
def _plain(body: _Body, q, dtype: str) -> Partial:
    """Attend by plain products in `dtype`."""
    seen = jnp.arange(KEYS)[None, None] <= body.newest[None, :, None]
    # Without "highest", a TPU rounds float32 factors to bfloat16.
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        q = q.astype(dtype)
        k = body.k.astype(dtype)
        v = body.v.astype(dtype)
        return segment_attention(q, k, v, seen)


@jax.jit
def _by_cudnn(body: _Body, q) -> Partial:
    """Attend by cuDNN from every token to all before it, and to the newest SLIDING of them.
    Log-sum-exps are not compared: both sides give zeros."""
    outputs = [attend_by_cudnn(q, body.k, body.v, sliding) for sliding in (None, SLIDING)]
    # JAX gives 16 bits of cuDNN's log-sum-exp, too few to compare.
    return Partial(jnp.concatenate(outputs), jnp.zeros((2, *q.shape[1:3])))


@functools.partial(jax.jit, static_argnames="dtype")
def _plain_causal(body: _Body, q, dtype: str) -> Partial:
    """Attend to the same tokens as `_by_cudnn`, by plain products in `dtype`."""
    places = jnp.arange(KEYS)[None]
    valid = jnp.ones((1, KEYS), bool)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        q = q.astype(dtype)
        k = body.k.astype(dtype)
        v = body.v.astype(dtype)
        masks = [visible(places, places, valid, sliding) for sliding in (None, SLIDING)]
        outputs = [segment_attention(q, k, v, mask).out for mask in masks]
    return Partial(jnp.concatenate(outputs), jnp.zeros((2, *q.shape[1:3])))


def _speed(kernel: Attention, plain: Attention, q) -> Speed:
    """Measure the median milliseconds of a call of both sides."""
    calls = [functools.partial(kernel, q), functools.partial(plain, q)]
    kernel_seconds, plain_seconds = alternating_seconds(calls, 5)
    return Speed(1e3 * statistics.median(kernel_seconds), 1e3 * statistics.median(plain_seconds))


class _Sides(NamedTuple):
    """A kernel and the plain products that it is compared with, and how many queries they are
    given."""

    kernel: Callable
    plain: Callable
    queries: int


SIDES = {SPLASH: _Sides(_by_splash, _plain, QUERIES), CUDNN: _Sides(_by_cudnn, _plain_causal, KEYS)}


def check_prompt_kernel(
    form: PromptKernel,
    *,
    kernel: Callable[[_Body, Array], Partial] | None = None,
    timed: Callable = _speed,
) -> Verdict:
    """Try a kernel on this process's default device, against plain products in float32.

    Args:
        form: The kernel and the heads.
        kernel: What is tried instead of the kernel itself.
        timed: Measures both sides."""
    start = time.perf_counter()
    random = np.random.default_rng(0)
    sides = SIDES[form.form]
    body = _body(form, random)
    shape = (1, sides.queries, form.num_heads, form.head_dim)
    # Small: no token takes all the weight.
    q = jnp.asarray(random.normal(scale=0.02, size=shape), jnp.bfloat16)
    attend = functools.partial(kernel or sides.kernel, body)
    # Results are compared with products in float32, the speed with products in bfloat16.
    precise = functools.partial(sides.plain, body, dtype="float32")
    rounded = functools.partial(sides.plain, body, dtype="bfloat16")
    verdict = examine(attend, precise, [q], functools.partial(timed, attend, rounded, q))
    return dataclasses.replace(verdict, seconds=time.perf_counter() - start)
