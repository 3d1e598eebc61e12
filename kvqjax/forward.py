"""The decoder over a compressed cache, in two phases (docs/design.md, idea 2): `attend` computes logits and returns
the new tokens' sources, `commit` appends them. `forward` is both; `prefill` is the papers' exact prefill, layer by
layer over the prompt."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from kvqjax import cache as caches
from kvqjax import decoder
from kvqjax.cache.append import admitted, flush_layer, remember
from kvqjax.cache.eviction import Chosen
from kvqjax.cache.state import Cache, CacheLayout, Run, RunPlan, allocate_cache, due, plan
from kvqjax.config import KVShape
from kvqjax.errors import UserError
from kvqjax.layer_step import attend_one, begin, check_capacity, depending_on, first_flow, run_constants, slab
from kvqjax.methods import Method, parse
from kvqjax.model import Model, compute_dtype
from kvqjax.pallas_kernels.packed import target_of
from kvqjax.prompt import chosen_tokens, exact_layer
from kvqjax.sharding import cache_layout, over_mesh

__all__ = ["attend", "commit", "forward", "init_cache", "prefill"]

CHUNK = 512  # prompt tokens per step of an exact prefill

Pending = tuple  # one {source: [L_run, B, T, W]} per run


def init_cache(
    model: Model | KVShape,
    method: Method | str,
    batch: int,
    capacity: int,
    *,
    dtype: str | None = None,
    target: str | None = None,
) -> Cache:
    """Make an empty cache for `batch` rows of at most `capacity` tokens each, for a model or a model's KVShape.

    `method` may be a spec string. `dtype` is that of keys and values as they come ("bf16", "f16", "f32"); by default
    the model's compute dtype, for a shape that of `load`. `target` names the chip whose attention kernels the programs
    on this cache use; by default the one that holds the model's weights, or JAX's default device ("cpu", whose path
    runs everywhere, for abstract or traced weights)."""
    if isinstance(model, KVShape):
        held = jnp.zeros((), compute_dtype(dtype))
        shape, rules = model.kv_shape, None
    else:
        held, shape, rules = model.params["embed"], model.config.kv_shape, model.rules
        if dtype is not None and compute_dtype(dtype) != held.dtype:
            raise UserError(f"dtype {dtype!r} is not the model's, {held.dtype}; load the model with it")
    method = parse(method) if isinstance(method, str) else method
    layout = CacheLayout(
        shape=shape, method=method, capacity=capacity, dtype=str(held.dtype), target=target or target_of(held)
    )
    layout = cache_layout(rules, layout, batch)
    if rules is None:
        return allocate_cache(layout, batch)
    specs = rules.cache(jax.eval_shape(lambda: allocate_cache(layout, batch)))
    places = jax.tree.map(lambda spec: NamedSharding(rules.mesh, spec), specs)
    return jax.jit(lambda: allocate_cache(layout, batch), out_shardings=places)()


def attend(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    cache: Cache,
    *,
    within: str = "chunk",
    last: bool = False,
) -> tuple[Float[Array, "B V"] | Float[Array, "B T V"], Pending]:
    """Logits of the first `counts[b]` of T new tokens of each row, and their sources for `commit`; the cache stays as
    it is.

    `within="chunk"`: new tokens attend to each other exactly. `within="step"`: each new token sees what decoding one
    token at a time would have shown it, so a verified draft equals plain decoding. `last=True` returns only the logits
    of each row's last valid token, [B, V]; otherwise [B, T, V]. Logits are float32; entries past `counts` mean
    nothing. With `keep=h2o` the attention mass of these tokens' queries is a last entry of the pending tuple."""
    step = functools.partial(_attend, within=within, last=last)
    if model.rules is None:
        return step(model, cache, tokens, counts)
    return over_mesh(step, model, cache, tokens, counts, out=("logits" if last else "chunk", "pending"))


def _attend(model: Model, cache: Cache, tokens, counts, *, within: str, last: bool):
    """`attend` on one device's part."""
    call = begin(cache, counts, tokens.shape[1], model.constants, within)
    positions, config = call.tokens.positions, model.config

    def step(number, loop, index):
        h, flow = loop
        weights = decoder.layer(model.params, call.runs[number].first + index)
        projected = decoder.project(weights, h, positions, config)
        whole = projected._replace(q=decoder.whole_heads(projected.q, config))
        attended, new, flow = attend_one(call, number, index, weights, whole, flow)
        attended = decoder.own_heads(attended, config, projected.q.shape[2])
        return (decoder.finish(weights, h, attended, config), flow), new

    loop = decoder.embed(model.params, tokens, config), first_flow(call)
    # Zero, which XLA cannot know: the loop over a single layer is unrolled, and a constant number would let it copy
    # that layer's weights out of the stack before a decode loop.
    zero, pending = jnp.minimum(cache.lengths[0], 0), []
    for number, run in enumerate(call.runs):
        loop, new = jax.lax.scan(functools.partial(step, number), loop, zero + jnp.arange(run.count))
        pending.append(new)
    h, mass = loop[0], loop[1].mass
    pending = [depending_on(h, new) if run.count == 1 else new for run, new in zip(call.runs, pending, strict=True)]
    out = _last_logits(model, h, counts) if last else decoder.unembed(model.params, h, config)
    return out, (*pending, *(() if mass is None else (mass,)))


def _last_logits(model: Model, h: Float[Array, "B T E"], counts: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Logits of each row's last valid token."""
    h = jnp.take_along_axis(h, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return decoder.unembed(model.params, h, model.config)[:, 0]


def commit(model: Model, cache: Cache, pending: Pending, counts: Int[Array, " B"]) -> Cache:
    """Append the first `counts[b]` pending tokens of each row and encode what is due. Raises UserError outside jit
    when a row would exceed the capacity; inside jit its overflow flag is raised and the excess is not stored."""
    check_capacity(cache, counts)
    if model.rules is None:
        return _commit(model, cache, pending, counts)
    return over_mesh(_commit, model, cache, pending, counts, out=("cache",))


def _commit(model: Model, cache: Cache, pending: Pending, counts) -> Cache:
    return caches.commit(cache, pending, counts, run_constants(model.constants, plan(cache.layout)))


def forward(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    cache: Cache,
    *,
    last: bool = False,
) -> tuple[Float[Array, "B V"] | Float[Array, "B T V"], Cache]:
    """`attend`, then `commit`: logits of T new tokens and the cache that holds them. Pure; works inside and outside
    jit."""
    check_capacity(cache, counts)
    step = functools.partial(_forward, last=last)
    if model.rules is None:
        return step(model, cache, tokens, counts)
    return over_mesh(step, model, cache, tokens, counts, out=("logits" if last else "chunk", "cache"))


def _forward(model: Model, cache: Cache, tokens, counts, *, last: bool):
    out, pending = _attend(model, cache, tokens, counts, within="chunk", last=last)
    return out, _commit(model, cache, pending, counts)


def prefill(
    model: Model, tokens: Int[Array, "B T"], counts: Int[Array, " B"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Exact prefill of an empty cache: the prompt attends to itself exactly, then is encoded; logits of each row's
    last token, [B, V]. Runs layer by layer and holds the hidden states [B,T,E], one layer's K and V, and the method's
    carry. With `keep=h2o` all layers run twice: first for the attention mass by which tokens are chosen."""
    check_capacity(cache, counts)
    known = not isinstance(cache.lengths, jax.core.Tracer) and cache.lengths.is_fully_addressable
    if known and int(cache.lengths.max()) > 0:
        raise UserError("exact prefill starts from an empty cache; use forward to extend one")
    if model.rules is None:
        return _prefill(model, cache, tokens, counts)
    return over_mesh(_prefill, model, cache, tokens, counts, out=("logits", "cache"))


def _prefill(model: Model, cache: Cache, tokens, counts):
    layout, runs = cache.layout, plan(cache.layout)
    constants = run_constants(model.constants, runs)
    counts, overflow = admitted(cache, counts)
    chunk = min(CHUNK, tokens.shape[1])
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % chunk)))
    h = decoder.embed(model.params, tokens, model.config)
    chosen, kept = chosen_tokens(model, cache, constants, h, counts, chunk)
    carry = slab(runs, tokens.shape if chosen is None else chosen.token.shape, layout.dtype)
    states = []
    for run, state, own in zip(runs, cache.runs, constants, strict=True):
        h, carry, state = _prefill_run(model, run, state, own, h, carry, counts, chunk, layout.method.sinks, chosen)
        states.append(state)
    done = cache.replace(runs=tuple(states), lengths=cache.lengths + counts, overflow=overflow, kept=kept)
    return _last_logits(model, h, counts), done


def _prefill_run(
    model, run: RunPlan, state: Run, constants, h, carry, counts, chunk: int, sinks: int, chosen: Chosen | None
):
    """One run of layers over the whole prompt: attention, then encoding, layer by layer; where there is a choice, of
    the `chosen` tokens as if they were the whole prompt."""
    empty = jnp.zeros_like(counts)
    held = empty - sinks
    targets = tuple(due(clock, held + counts, f) for clock, f in zip(run.wiring.clocks, state.flushed, strict=True))

    def step(index, loop):
        h, carry, body, exact = loop
        weights = decoder.layer(model.params, run.first + index)
        fixed = caches.pick(constants, index)
        new, h, _ = exact_layer(model, run, weights, fixed, h, counts, chunk)
        if run.slots and chosen is None:
            body, new, carry = flush_layer(run, body, index, new, held, targets, fixed, carry)
        elif run.slots and chosen is not None and chosen.token.shape[1]:
            picked = {name: jnp.take_along_axis(x, chosen.token[:, :, None], 1) for name, x in new.items()}
            body, _, carry = flush_layer(run, body, index, picked, empty, (chosen.units,), fixed, carry)
        blank = jax.tree.map(lambda a: jnp.zeros_like(a[:1]), (state.sinks, state.window))
        fresh = state.replace(body={}, sinks=blank[0], window=blank[1])
        fresh = remember(run, fresh, {name: x[None] for name, x in new.items()}, empty, counts, sinks)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        return h, carry, body, jax.tree.map(put, exact, (fresh.sinks, fresh.window))

    # How many layers XLA cannot know: it would unroll a single one, whose products then are others than those of the
    # layers above it and compile once more.
    count = run.count + jnp.minimum(counts[0], 0)
    loop = h, carry, state.body, (state.sinks, state.window)
    h, carry, body, (kept, window) = jax.lax.fori_loop(0, count, step, loop)
    return h, carry, Run(body=body, sinks=kept, window=window, flushed=targets if run.slots else state.flushed)
