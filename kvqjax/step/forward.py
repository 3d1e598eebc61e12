"""The decoder over a compressed cache, in two phases (docs/design.md, idea 2): `attend` computes logits and returns
the new tokens' sources, `commit` appends them. `forward` is both; `prefill` is the papers' exact prefill, layer by
layer over the prompt."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvqjax import cache as caches
from kvqjax._errors import UserError
from kvqjax._options import named_options
from kvqjax.cache.admission import admitted, finite_tokens
from kvqjax.cache.append import flush_layer, remember
from kvqjax.cache.eviction import Chosen
from kvqjax.cache.state import Cache, CacheLayout, Run, RunPlan, allocate_cache, due, plan, stored_form
from kvqjax.methods import Method, MethodLike, parse
from kvqjax.methods.advice import bias_advice
from kvqjax.model import decoder
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model, compute_dtype
from kvqjax.model.rope import check_length
from kvqjax.ops.finite import leading, saturated
from kvqjax.pallas_kernels.choice import Kernels
from kvqjax.pallas_kernels.packed import target_of
from kvqjax.parallel.sharding import Rules, over_mesh
from kvqjax.step.doors import check_counts, check_model, check_new_tokens, check_pending
from kvqjax.step.eager import kept_program
from kvqjax.step.layer_step import (
    attend_one,
    begin,
    check_capacity,
    depending_on,
    first_flow,
    is_known,
    run_constants,
    slab,
)
from kvqjax.step.prompt import Path, chosen_tokens, exact_layer, path_of
from kvqjax.verdicts.choose import choose, over_devices

__all__ = ["attend", "check_constants", "commit", "empty_cache", "forward", "init_cache", "planned_layout", "prefill"]

Pending = tuple  # one {source: [L_run, B, T, W]} per run


@named_options
def init_cache(
    model: Model | KVShape,
    method: MethodLike,
    batch: int,
    capacity: int,
    *,
    dtype: DTypeLike | None = None,
    layers: str | None = None,
    form: str | None = None,
    target: str | None = None,
    kernels: str | Kernels = "auto",
) -> Cache:
    """Make an empty cache for `batch` rows of at most `capacity` tokens each, for a model or a model's KVShape.

    `dtype` is that of keys and values as they come ("bf16", "f16", "f32"); by default the model's compute dtype, for a
    shape that of `load`. `layers="scan"` stores layers that cache alike as one stack, "unroll" each by itself (see
    kvqjax/model/decoder.py); by default as the model's weights are stored, for a shape as stacks. `form` is how bodies
    are stored: as "planes" of words or head by head ("heads", kvqjax/ops/head_major.py), by default as the target reads
    them best. `target` names the chip that programs on this cache are for; by default the one that holds the model's
    weights, or JAX's default device ("cpu", whose path runs everywhere, for abstract or traced weights). `kernels` is
    "auto" (those that this chip checked and found faster; for a chip that is not here the table's word), "off", or the
    name of those to force: "pallas", "splash", "cudnn". Warns where the model's key bias makes this method useless."""
    check_counts(batch=batch, capacity=capacity)
    options = {"dtype": dtype, "layers": layers, "form": form, "target": target, "kernels": kernels}
    return empty_cache(model, planned_layout(model, parse(method), batch, capacity, **options), batch)


def planned_layout(
    model: Model | KVShape, method: Method, batch: int, capacity: int, *, kernels: str | Kernels = "auto", **options
) -> CacheLayout:
    """The layout of the cache that `init_cache` makes of these options. Outside jit this may check kernels; inside,
    `empty_cache` makes the cache."""
    layout, held, rules = _plain_layout(model, method, batch, capacity, **options)
    shared = {} if rules is None else over_devices(rules, layout)
    return choose(layout, kernels, held, form=options.get("form"), **shared)


def empty_cache(model: Model | KVShape, layout: CacheLayout, batch: int) -> Cache:
    """An empty cache of this layout, on the model's devices."""
    rules = None if isinstance(model, KVShape) else model.rules
    return allocate_cache(layout, batch) if rules is None else _allocator(layout, batch, rules)()


def _plain_layout(
    model: Model | KVShape,
    method: Method,
    batch: int,
    capacity: int,
    *,
    dtype=None,
    layers=None,
    form=None,
    target=None,
) -> tuple[CacheLayout, Any, Rules | None]:
    """The layout before kernels are chosen, an array that lies where the model does, and the mesh's rules."""
    if isinstance(model, KVShape):
        held = jnp.zeros((), compute_dtype(dtype))
        shape, rules, stored = model.alone, None, "scan"
    else:
        check_model(model)
        if advice := bias_advice(method, model.config):
            warnings.warn(advice, stacklevel=5)
        held, shape, rules = model.params["embed"], model.config.kv_shape, model.rules
        stored = "unroll" if decoder.is_unrolled(model.params) else "scan"
        if dtype is not None and compute_dtype(dtype) != held.dtype:
            raise UserError(f"dtype {dtype!r} is not the model's, {held.dtype}; load the model with it")
    check_length(shape, capacity)
    target = target or target_of(held)
    layout = CacheLayout(
        shape=shape,
        method=method,
        capacity=capacity,
        dtype=str(held.dtype),
        layers=layers or stored,
        form=form or stored_form(target),
        target=target,
    )
    return layout if rules is None else rules.cache_layout(layout, batch), held, rules


@functools.lru_cache(maxsize=64)
def _allocator(layout: CacheLayout, batch: int, rules: Rules):
    """A program that makes an empty cache in place on a mesh; kept, because every new one would be compiled."""
    allocate = functools.partial(allocate_cache, layout, batch)
    return jax.jit(allocate, out_shardings=rules.places(jax.eval_shape(allocate)))


def check_constants(model: Model, method: Method) -> None:
    """Raise UserError where the model lacks a calibrated constant of `method`, or has one of another shape."""
    dtype = str(model.params["embed"].dtype)
    run_constants(model.constants, CacheLayout(shape=model.config.kv_shape, method=method, capacity=1, dtype=dtype))


def _placed(step, model: Model, cache: Cache, *arguments, out: tuple[str, ...], **options):
    """`step(model, cache, *arguments, **options)` on one device, or on every device's part of the model's mesh."""
    arguments = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.int32), arguments)
    step = functools.partial(step, **options)
    if model.rules is None:
        return step(model, cache, *arguments)
    return over_mesh(step, model, cache, *arguments, out=out)


_run = kept_program(_placed, static_argnums=(0,), static_argnames=("out", "within", "last", "reach"))


def attend(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    cache: Cache,
    *,
    within: str = "chunk",
    last: bool = False,
    reach: int | None = None,
) -> tuple[Float[Array, "B V"] | Float[Array, "B T V"], Pending]:
    """Logits of the first `counts[b]` of T new tokens of each row, and their sources for `commit`; the cache stays as
    it is.

    `within="chunk"`: new tokens attend to each other exactly. `within="step"`: each new token sees what decoding one
    token at a time would have shown it, so a verified draft equals plain decoding. `last=True` returns only the logits
    of each row's last valid token, [B, V]; otherwise [B, T, V]. Logits are float32; entries past `counts` mean
    nothing. From a token on whose key, value or other source is not finite they are NaN, also in later calls. With
    `keep=h2o` the attention mass of these tokens' queries is a last entry of the pending tuple.

    `reach` promises that no row of the cache holds more tokens, so that a body that is read as a whole is read only so
    far (`kvqjax.cache.reach`); a row that breaks it gets NaN."""
    check_new_tokens(model, tokens, counts, cache)
    out = ("logits" if last else "chunk", "pending")
    return _run(_attend, model, cache, tokens, counts, out=out, within=within, last=last, reach=reach)


def _attend(model: Model, cache: Cache, tokens, counts, *, within: str, last: bool, reach: int | None):
    """`attend` on one device's part."""
    call = begin(cache, counts, tokens.shape[1], model.constants, within, reach)
    positions, config = call.tokens.positions, model.config

    def step(number, loop, index):
        h, flow = loop
        weights = decoder.layer(model.params, call.runs[number].first + index)
        projected = decoder.project(weights, h, positions, config)
        whole = projected._replace(q=decoder.whole_heads(projected.q, config))
        attended, new, flow = attend_one(call, number, index, weights, whole, flow)
        attended = saturated(decoder.own_heads(attended, config, projected.q.shape[2]), h.dtype)
        return (decoder.finish(weights, h, attended, config), flow), new

    loop = decoder.embed(model.params, tokens, config), first_flow(call)
    each = _unrolled if decoder.is_unrolled(model.params) else _scanned
    pending = []
    for number, run in enumerate(call.runs):
        loop, new = each(functools.partial(step, number), loop, run.count, cache)
        pending.append(new)
    h, mass = loop[0], loop[1].mass
    pending = [depending_on(h, new) if run.count == 1 else new for run, new in zip(call.runs, pending, strict=True)]
    out = _last_logits(model, h, counts) if last else decoder.unembed(model.params, h, config)
    return out, (*pending, *(() if mass is None else (mass,)))


def _scanned(step, loop, count: int, cache: Cache):
    """`step` over `count` layers of stacked weights: (loop, new sources [count, B, T, W])."""
    # Zero, which XLA cannot know: the loop over a single layer is unrolled, and a constant number would let it copy
    # that layer's weights out of the stack before a decode loop.
    zero = jnp.minimum(cache.lengths[0], 0)
    return jax.lax.scan(step, loop, zero + jnp.arange(count))


def _unrolled(step, loop, count: int, cache: Cache):
    """`_scanned` over a list of weights: straight code."""
    new = []
    for index in range(count):
        loop, own = step(loop, index)
        new.append(own)
    return loop, jax.tree.map(lambda *x: jnp.stack(x), *new)


def _last_logits(model: Model, h: Float[Array, "B T E"], counts: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Logits of each row's last valid token."""
    h = jnp.take_along_axis(h, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return decoder.unembed(model.params, h, model.config)[:, 0]


def commit(model: Model, cache: Cache, pending: Pending, counts: Int[Array, " B"]) -> Cache:
    """Append the first `counts[b]` pending tokens of each row and encode what is due. Raises UserError outside jit
    when a row would exceed the capacity; inside jit its overflow flag is raised and the excess is not stored."""
    check_pending(model, cache, pending, counts)
    check_capacity(cache, counts)
    return _run(_commit, model, cache, pending, counts, out=("cache",))


def _commit(model: Model, cache: Cache, pending: Pending, counts) -> Cache:
    return caches.commit(cache, pending, counts, run_constants(model.constants, cache.layout))


def forward(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    cache: Cache,
    *,
    last: bool = False,
    reach: int | None = None,
) -> tuple[Float[Array, "B V"] | Float[Array, "B T V"], Cache]:
    """`attend`, then `commit`: logits of T new tokens and the cache that holds them. Pure; works inside and outside
    jit. `reach` as in `attend`."""
    check_new_tokens(model, tokens, counts, cache)
    check_capacity(cache, counts)
    out = ("logits" if last else "chunk", "cache")
    return _run(_forward, model, cache, tokens, counts, out=out, last=last, reach=reach)


def _forward(model: Model, cache: Cache, tokens, counts, *, last: bool, reach: int | None):
    out, pending = _attend(model, cache, tokens, counts, within="chunk", last=last, reach=reach)
    return out, _commit(model, cache, pending, counts)


def prefill(
    model: Model, tokens: Int[Array, "B T"], counts: Int[Array, " B"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Exact prefill of an empty cache: the prompt attends to itself exactly, then is encoded; logits of each row's
    last token, [B, V]. Runs layer by layer and holds the hidden states [B,T,E], one layer's K and V, and the method's
    carry. With `keep=h2o` all layers run twice: first for the attention mass by which tokens are chosen."""
    check_new_tokens(model, tokens, counts, cache)
    check_capacity(cache, counts)
    if is_known(cache.lengths) and int(cache.lengths.max()) > 0:
        raise UserError("exact prefill starts from an empty cache; use forward to extend one")
    return _run(_prefill, model, cache, tokens, counts, out=("logits", "cache"))


def _prefill(model: Model, cache: Cache, tokens, counts):
    layout, runs = cache.layout, plan(cache.layout)
    constants = run_constants(model.constants, layout)
    counts, overflow = admitted(cache, counts)
    path = path_of(layout, tokens.shape[1])
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % path.chunk)))
    h = decoder.embed(model.params, tokens, model.config)
    chosen, kept = chosen_tokens(model, cache, constants, h, counts)
    carry = slab(runs, tokens.shape if chosen is None else chosen.token.shape, layout.dtype)
    states, whole = [], counts
    for run, state, own in zip(runs, cache.runs, constants, strict=True):
        (h, carry, whole), state = _prefill_run(
            model, run, state, own, (h, carry, whole), counts, path, layout.method.sinks, chosen
        )
        states.append(state)
    finite = finite_tokens(cache, whole, counts)
    done = cache.replace(
        runs=tuple(states), lengths=cache.lengths + counts, overflow=overflow, finite=finite, kept=kept
    )
    return _last_logits(model, h, counts), done


def _prefill_run(
    model, run: RunPlan, state: Run, constants, flow: tuple, counts, path: Path, sinks: int, chosen: Chosen | None
):
    """One run of layers over the whole prompt: attention, then encoding, layer by layer; where there is a choice, of
    the `chosen` tokens as if they were the whole prompt. `flow` goes from layer to layer: hidden states, the method's
    carry, and how many tokens come before the first that is not finite."""
    empty = jnp.zeros_like(counts)
    held = empty - sinks
    targets = tuple(due(clock, held + counts, f) for clock, f in zip(run.wiring.clocks, state.flushed, strict=True))

    def step(index, loop):
        (h, carry, whole), body, exact = loop
        weights = decoder.layer(model.params, run.first + index)
        fixed = caches.pick(constants, index)
        new, h, finite, _ = exact_layer(model, run, weights, fixed, h, counts, path)
        whole = jnp.minimum(whole, leading(finite))
        if run.slots and chosen is None:
            body, new, carry = flush_layer(run, body, index, new, held, targets, fixed, carry)
        elif run.slots and chosen is not None and chosen.token.shape[1]:
            picked = {name: jnp.take_along_axis(x, chosen.token[:, :, None], 1) for name, x in new.items()}
            body, _, carry = flush_layer(run, body, index, picked, empty, (chosen.units,), fixed, carry)
        blank = jax.tree.map(lambda a: jnp.zeros_like(a[:1]), (state.sinks, state.window))
        fresh = state.replace(body={}, sinks=blank[0], window=blank[1])
        fresh = remember(run, fresh, {name: x[None] for name, x in new.items()}, empty, counts, sinks)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        return (h, carry, whole), body, jax.tree.map(put, exact, (fresh.sinks, fresh.window))

    # How many layers XLA cannot know: it would unroll a single one, whose products then are others than those of the
    # layers above it and compile once more.
    count = run.count if decoder.is_unrolled(model.params) else run.count + jnp.minimum(counts[0], 0)
    loop = flow, state.body, (state.sinks, state.window)
    flow, body, (kept, window) = decoder.over_layers(model.params, 0, count, step, loop)
    return flow, Run(body=body, sinks=kept, window=window, flushed=targets if run.slots else state.flushed)
