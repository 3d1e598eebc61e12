"""`kvqjax bench`: a decode step at a given context, every cache against the exact one, all in one
run."""

import functools
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from kvqjax._timing import machine, median_seconds, product_rate
from kvqjax.cache import Cache, runs_of
from kvqjax.cache.accounting import array_bytes
from kvqjax.cache.runs import readers_text
from kvqjax.cli.common import (
    MOST_ROWS,
    Artifacts,
    Batch,
    Caches,
    Dtype,
    Json,
    Kernels,
    ModelName,
    RopeLength,
    TextOnly,
    Weights,
    calibrated,
    methods_of,
    number,
    open_model,
    require_room,
    token_number,
)
from kvqjax.cli.output import announce, progress_bar, show
from kvqjax.generation.prompt_ids import bucket
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method, exact
from kvqjax.model.loading import Model
from kvqjax.step.forward import commit, forward
from kvqjax.step.new_cache import init_cache, planned_layout
from kvqjax.step.prompt import prefill_donated

CHUNK = 512


@functools.partial(jax.jit, donate_argnames="cache")
def _fill(model: Model, cache: Cache, key) -> Cache:
    """Append CHUNK tokens of random sources: normal, with an offset per channel, as keys and values
    have."""
    shape = (cache.batch, CHUNK)
    pending = []
    for run in runs_of(cache.layout):
        sources = {}
        for name, width in run.wiring.storage.sources.items():
            key, noise, offset = jax.random.split(key, 3)
            x = jax.random.normal(noise, (run.count, *shape, width)) + jax.random.normal(
                offset, (1, 1, 1, width)
            )
            sources[name] = x.astype(cache.layout.dtype)
        pending.append(sources)
    return commit(model, cache, tuple(pending), jnp.full((cache.batch,), CHUNK, jnp.int32))


@functools.partial(jax.jit, static_argnames="steps", donate_argnames="cache")
def _steps(model: Model, cache: Cache, *, steps: int) -> tuple[jax.Array, Cache]:
    tokens, ones = jnp.zeros((cache.batch, 1), jnp.int32), jnp.ones((cache.batch,), jnp.int32)

    def step(_, loop):
        total, cache = loop
        logits, cache = forward(model, tokens, ones, cache, last=True)
        return total + logits.max(), cache

    return jax.lax.fori_loop(0, steps, step, (jnp.float32(0), cache))


def decoding(
    model: Model,
    method: Method,
    context: int,
    batch: int,
    steps: int,
    calls: int,
    progress=lambda fraction: None,
    kernels: str = "auto",
) -> tuple[int, Callable[[], jax.Array]]:
    """Bytes of a cache that holds `context` tokens a row, and what decodes `steps` more at each of
    `calls` calls. `progress(fraction)` is told as the cache fills."""
    cache = init_cache(model, method, batch, context + CHUNK + steps * calls, kernels=kernels)
    size = array_bytes(cache)
    for start in range(0, context, CHUNK):
        cache = jax.block_until_ready(_fill(model, cache, jax.random.key(start // CHUNK)))
        progress(min(1.0, (start + CHUNK) / context))
    return size, stepping(model, cache, steps)


def stepping(model: Model, cache: Cache, steps: int) -> Callable[[], jax.Array]:
    """What decodes `steps` more tokens at each call, the first of them behind what `cache` holds.
    It takes the cache's memory."""

    def run():
        nonlocal cache
        out, cache = _steps(model, cache, steps=steps)
        return out

    return run


def step_milliseconds(
    model: Model,
    method: Method,
    context: int,
    batch: int,
    steps: int,
    repeats: int,
    progress=lambda fraction: None,
    kernels: str = "auto",
) -> tuple[int, float]:
    """Bytes of the cache, and the median milliseconds of a decode step once it holds `context`
    tokens a row."""
    size, run = decoding(model, method, context, batch, steps, repeats + 1, progress, kernels)
    return size, 1e3 * median_seconds(run, repeats) / steps


def first_token_milliseconds(
    model: Model, method: Method, tokens: int, batch: int, repeats: int, kernels: str = "auto"
) -> float:
    """The median milliseconds of an exact prefill of `tokens` tokens a row: what the first new
    token waits for."""
    prompt, counts = (
        jnp.zeros((batch, bucket(tokens)), jnp.int32),
        jnp.full((batch,), tokens, jnp.int32),
    )

    def run():
        return prefill_donated(
            model, prompt, counts, init_cache(model, method, batch, tokens, kernels=kernels)
        )

    return 1e3 * median_seconds(run, repeats)


def bench(
    cache: Caches,
    model: ModelName = "demo",
    context: Annotated[int, token_number(help="tokens each row holds, also as 32k")] = 8192,
    batch: Batch = 1,
    steps: Annotated[int, number(most=MOST_ROWS, help="decode steps per timing")] = 16,
    repeats: Annotated[int, number(most=MOST_ROWS, help="timings; the median is shown")] = 5,
    prompt: Annotated[
        int, number(least=0, help="time a prompt of N tokens up to its first new one; 0: none")
    ] = 0,
    artifact: Artifacts = [],  # noqa: B006
    kernels: Kernels = "auto",
    dtype: Dtype = None,
    weights: Weights = None,
    text_only: TextOnly = False,
    rope_length: RopeLength = None,
    as_json: Json = False,
) -> None:
    """Time decode steps on caches filled with random vectors, against the exact cache in the same
    run.

    With --prompt, exact prefills as well; "at least" is every operation of theirs once, at the rate
    at which this device multiplies matrices.
    """
    loaded = open_model(model, dtype, weights, text_only=text_only, rope_length=rope_length)
    pairs = [
        (loaded, exact()),
        *calibrated(loaded, [m for m in methods_of(cache) if str(m) != "exact"], artifact),
    ]
    rows, first = [], None
    for ready_model, method in pairs:
        require_room(ready_model, method, batch, max(context, prompt))
    filled = f"{batch} row{'s' * (batch > 1)} of {context} tokens"
    announce(
        f"{repeats + 1} x {steps} decode steps, {filled}, through {', then '.join(str(m) for _, m in pairs)}"
    )
    least = (
        batch
        * 1e3
        * prompt_operations(loaded.config, 0, prompt)
        / product_rate(dtype=str(loaded.params["embed"].dtype))
        if prompt
        else 0
    )
    for ready_model, method in pairs:
        # What is forced is forced on the caches that were asked for, not on the exact one beside
        # them.
        forced = kernels if first or kernels == "off" else "auto"
        chosen = planned_layout(ready_model, method, batch, context, kernels=forced)
        with progress_bar() as bar:
            filling = bar(f"filling {method}")
            size, spent = step_milliseconds(
                ready_model, method, context, batch, steps, repeats, filling, forced
            )
        first = first or spent
        row = {"cache": str(method), "context": context, "batch": batch, "bytes": size}
        row["kernels"] = chosen.kernels.text(chosen.target)
        row["read_by"] = "; ".join(dict.fromkeys(readers_text(chosen)))
        row |= {"ms_per_step": spent, "speed_against_exact": first / spent}
        if prompt:
            waited = first_token_milliseconds(ready_model, method, prompt, batch, repeats, forced)
            row |= {
                "prompt": prompt,
                "ms_to_first_token": waited,
                "ms_to_first_token_at_least": least,
            }
        rows.append(row)
    this_machine = machine()
    title = f"decode on {this_machine['device']}, {model}, {loaded.params['embed'].dtype}"
    show(rows, as_json, title, about=this_machine if as_json else None)
