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
from kvqjax.attention import merge, merge_over, total_lse
from kvqjax.cache.append import admitted, flush_layer, remember
from kvqjax.cache.eviction import Chosen, no_mass
from kvqjax.cache.state import Cache, CacheLayout, Run, RunPlan, allocate_cache, due, plan
from kvqjax.errors import UserError
from kvqjax.layout import row_major
from kvqjax.methods import Method
from kvqjax.model import Model
from kvqjax.pallas_kernels.packed import target_of
from kvqjax.prompt import chosen_tokens, exact_layer
from kvqjax.segments import LayerView, NewTokens, attend_body, attend_exact, recoded_units, weigh
from kvqjax.sharding import cache_layout, over_mesh

__all__ = ["attend", "check_constants", "commit", "forward", "init_cache", "prefill"]

CHUNK = 512  # prompt tokens per step of an exact prefill

Pending = tuple  # one {source: [L_run, B, T, W]} per run


def init_cache(model: Model, method: Method, batch: int, capacity: int, *, target: str | None = None) -> Cache:
    """An empty cache for `batch` rows of at most `capacity` tokens each, in the model's compute dtype.

    `target` names the chip whose attention kernels the programs on this cache use; by default the one that holds the
    model's weights ("cpu", whose path runs everywhere, for abstract or traced ones)."""
    embed = model.params["embed"]
    layout = CacheLayout(
        config=model.config,
        method=method,
        capacity=capacity,
        dtype=str(embed.dtype),
        target=target or target_of(embed),
    )
    layout = cache_layout(model.rules, layout, batch)
    if model.rules is None:
        return allocate_cache(layout, batch)
    specs = model.rules.cache(jax.eval_shape(lambda: allocate_cache(layout, batch)))
    places = jax.tree.map(lambda spec: NamedSharding(model.rules.mesh, spec), specs)
    return jax.jit(lambda: allocate_cache(layout, batch), out_shardings=places)()


def _constants(model: Model, runs: tuple[RunPlan, ...]) -> tuple[dict, ...]:
    """Calibrated constants of every run; missing or misshapen ones are refused here, at trace time."""
    given = model.constants or tuple({} for _ in runs)
    if len(given) != len(runs):
        raise UserError(f"constants for {len(given)} runs of layers given, the method has {len(runs)}")
    for run, constants in zip(runs, given, strict=True):
        for group, names in run.wiring.wanted().items():
            for name, shape in names.items():
                array = constants.get(group, {}).get(name)
                if array is None:
                    hint = "run `kvqjax calibrate` and load the artifact"
                    raise UserError(f"layer {run.first} needs the calibrated constant {group}.{name}; {hint}")
                if array.shape != (run.count, *shape):
                    raise UserError(f"constant {group}.{name} has shape {array.shape}, wanted {(run.count, *shape)}")
    return given


def check_constants(model: Model, method: Method) -> None:
    """Raise UserError where the model lacks a calibrated constant of `method`, or has one of another shape."""
    layout = CacheLayout(config=model.config, method=method, capacity=1, dtype=str(model.params["embed"].dtype))
    _constants(model, plan(layout))


def _check_capacity(cache: Cache, counts) -> None:
    """Outside jit, overflow is an error; inside it, and on rows of other hosts, it raises the row's sticky flag (see
    `Cache`)."""
    numbers = cache.lengths, counts
    if any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in numbers):
        return
    longest = int((cache.lengths + counts).max())
    if longest > cache.layout.capacity:
        raise UserError(f"a row would hold {longest} tokens; the cache was made for {cache.layout.capacity}")


def _slab(runs, rows: tuple[int, ...], dtype) -> dict:
    """Zeros [*rows, W] for whatever flows from layer to layer."""
    return {name: jnp.zeros((*rows, width), dtype) for run in runs for name, width in run.wiring.carry.items()}


def _after(h, new: dict) -> dict:
    """`new`, made to depend on `h`. The loop over a single layer is unrolled, and what it captured is ready before its
    attention has read the body: without this, XLA copies the body so that `commit` may write at the same time. It must
    be data, since an optimization barrier is gone when XLA's CPU backend places copies."""
    never = jnp.isposinf(h.reshape(-1)[0]) & jnp.isneginf(h.reshape(-1)[0])
    return {name: jnp.where(never, jnp.zeros_like(x), x) for name, x in new.items()}


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
    if within not in ("chunk", "step"):
        raise ValueError(f"within={within!r}; known: chunk, step")
    step = functools.partial(_attend, within=within, last=last)
    if model.rules is None:
        return step(model, cache, tokens, counts)
    return over_mesh(step, model, cache, tokens, counts, out=("logits" if last else "chunk", "pending"))


def _attend(model: Model, cache: Cache, tokens, counts, *, within: str, last: bool):
    """`attend` on one device's part."""
    layout, runs = cache.layout, plan(cache.layout)
    constants, sinks = _constants(model, runs), cache.layout.method.sinks
    length = tokens.shape[1]
    positions = cache.lengths[:, None] + jnp.arange(length)[None]
    new_tokens = NewTokens(positions, counts, cache.lengths - sinks, **_eviction(cache, positions, within))
    units = recoded_units(runs[0].wiring.clocks[0].unit, length)
    recode = within == "step" and units > 0
    holding = [run for run in runs if run.wiring.copy == "layer"]
    body_carry = _slab(holding, (cache.batch, max(run.slots_here for run in runs)), layout.dtype)
    tile = (cache.batch, units, runs[0].wiring.clocks[0].unit)
    tile_carry = _slab(runs, tile, layout.dtype) if recode else {}

    def step(number, loop, index):
        run, state, run_constants = runs[number], cache.runs[number], constants[number]
        h, body_carry, tile_carry, mass = loop
        weights = decoder.layer(model.params, run.first + index)
        fixed = caches.pick(run_constants, index)
        projected = decoder.project(weights, h, positions, model.config)
        new = run.wiring.capture(weights, fixed, projected, positions)
        below = _below(runs, cache, constants, number, index)
        view = LayerView(run, state, index, weights, fixed, new, sinks, below)
        q, entering = decoder.whole_heads(projected.q, model.config), body_carry
        parts, tile_carry = attend_exact(q, view, new_tokens, recode and run.slots > 0, tile_carry)
        if run.slots:
            body, body_carry = attend_body(q, model.config.num_kv_heads, view, new_tokens, body_carry)
            parts.append(merge_over(body, run.deal.axes))
        if mass is not None:
            mass = jax.tree.map(jnp.add, mass, weigh(q, view, new_tokens, total_lse(*parts), entering))
        attended = decoder.own_heads(merge(*parts), model.config, projected.q.shape[2])
        h = decoder.finish(weights, h, attended, model.config)
        return (h, body_carry, tile_carry, mass), {name: row_major(x) for name, x in new.items()}

    loop = (
        decoder.embed(model.params, tokens, model.config),
        body_carry,
        tile_carry,
        no_mass(cache.kept, sinks, length),
    )
    # Zero, which XLA cannot know: the loop over a single layer is unrolled, and a constant number would let it copy
    # that layer's weights out of the stack before a decode loop.
    zero, pending = jnp.minimum(cache.lengths[0], 0), []
    for number, run in enumerate(runs):
        loop, new = jax.lax.scan(functools.partial(step, number), loop, zero + jnp.arange(run.count))
        pending.append(new)
    h, mass = loop[0], loop[3]
    pending = [_after(h, new) if run.count == 1 else new for run, new in zip(runs, pending, strict=True)]
    out = _last_logits(model, h, counts) if last else decoder.unembed(model.params, h, model.config)
    return out, (*pending, *(() if mass is None else (mass,)))


def _last_logits(model: Model, h: Float[Array, "B T E"], counts: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Logits of each row's last valid token."""
    h = jnp.take_along_axis(h, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return decoder.unembed(model.params, h, model.config)[:, 0]


def _below(runs, cache: Cache, constants, number: int, index) -> tuple:
    """(run, state, constants, layers) of the runs up to `number`, of which `index` layers lie below the present one."""
    counts = [*(run.count for run in runs[:number]), index]
    return tuple(zip(runs, cache.runs, constants, counts, strict=False))


def _eviction(cache: Cache, positions: Int[Array, "B T"], within: str) -> dict:
    """`stored` and `oldest` of `NewTokens`: what the body holds, and from where on each query of a draft sees it."""
    if not cache.kept:
        return {}
    if within == "chunk" or positions.shape[1] == 1:
        return {"stored": cache.kept["positions"]}
    if "mass" in cache.kept:
        raise UserError(
            "keep=h2o drops tokens by what every earlier query attended to, so a draft cannot be verified at once; "
            "with keep=streaming it can"
        )
    run, sinks = plan(cache.layout)[0], cache.layout.method.sinks
    clock = run.wiring.clocks[0]
    units = due(clock, positions - sinks, cache.runs[0].flushed[0][:, None])
    return {"stored": cache.kept["positions"], "oldest": units * clock.unit - run.kept + sinks}


def commit(model: Model, cache: Cache, pending: Pending, counts: Int[Array, " B"]) -> Cache:
    """Append the first `counts[b]` pending tokens of each row and encode what is due. Raises UserError outside jit
    when a row would exceed the capacity; inside jit its overflow flag is raised and the excess is not stored."""
    _check_capacity(cache, counts)
    if model.rules is None:
        return _commit(model, cache, pending, counts)
    return over_mesh(_commit, model, cache, pending, counts, out=("cache",))


def _commit(model: Model, cache: Cache, pending: Pending, counts) -> Cache:
    return caches.commit(cache, pending, counts, _constants(model, plan(cache.layout)))


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
    _check_capacity(cache, counts)
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
    _check_capacity(cache, counts)
    known = not isinstance(cache.lengths, jax.core.Tracer) and cache.lengths.is_fully_addressable
    if known and int(cache.lengths.max()) > 0:
        raise UserError("exact prefill starts from an empty cache; use forward to extend one")
    if model.rules is None:
        return _prefill(model, cache, tokens, counts)
    return over_mesh(_prefill, model, cache, tokens, counts, out=("logits", "cache"))


def _prefill(model: Model, cache: Cache, tokens, counts):
    layout, runs = cache.layout, plan(cache.layout)
    constants = _constants(model, runs)
    counts, overflow = admitted(cache, counts)
    chunk = min(CHUNK, tokens.shape[1])
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % chunk)))
    h = decoder.embed(model.params, tokens, model.config)
    chosen, kept = chosen_tokens(model, cache, constants, h, counts, chunk)
    carry = _slab(runs, tokens.shape if chosen is None else chosen.token.shape, layout.dtype)
    states = []
    for run, state, run_constants in zip(runs, cache.runs, constants, strict=True):
        h, carry, state = _prefill_run(
            model, run, state, run_constants, h, carry, counts, chunk, layout.method.sinks, chosen
        )
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
