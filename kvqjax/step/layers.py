"""A cache as part of any model: one layer attends at a time, then all layers' new tokens are
appended at once.

    cache = init_cache(KVShape(...), "kivi:bits=2", batch=2, capacity=4096)
    out, new[l] = attend_layer(cache, l, q, k, v, counts)       for every layer; the cache stays as it is
    cache = append(cache, new, counts)

`attend_layer` and `append` have three steps, a function each. The public function checks its
arguments. The next one finds the calibrated constants and, on a mesh, runs the rest on every
device's part. The last one (`..._here`) does the work of one device. Where layers depend on each
other, `below` takes to a layer what the layer beneath computed for it (`Flow`). Views
(kvqjax/step/views.py) call these functions.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvqjax import cache as caches
from kvqjax._arguments import check_index, check_integer, clipped, is_known, named, typed
from kvqjax._errors import UserError
from kvqjax.cache.layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Leaf, check_cache
from kvqjax.model.config import KVShape, check_softcap
from kvqjax.model.decoder import Projected, scaled_queries
from kvqjax.model.rope import in_halves, rotate
from kvqjax.ops.attention import Partial
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla_workarounds import depending_on
from kvqjax.parallel.rules import Rules
from kvqjax.parallel.sharding import lying_as, of_constants, on_parts, over_parts
from kvqjax.step.checks import (
    accepted_part,
    check_accepted,
    check_entries,
    check_numbers,
    is_mask,
    kept_program,
    padding_of,
    run_constants,
)
from kvqjax.step.forward import Call, Flow, attend_one, begin, check_capacity, first_flow


class New(struct.PyTreeNode):
    """One layer's new tokens. What a scan over layers returns has the layers' axis in front.

    Attributes:
        sources: what `append` stores, by name. Each row begins with its first valid token, however
            the row was padded.
        flow: what the layer hands to the layer above.
    """

    sources: dict[str, Leaf]  # Float[B, T, W]
    flow: Flow


class LayerInput(NamedTuple):
    """What one layer's attention is given besides the cache, as `attend_layer` describes it."""

    q: Leaf  # Float[B, T, H, D]
    k: Leaf  # Float[B, T, K, D]
    v: Leaf  # Float[B, T, K, D]
    counts: Leaf  # Int[B], or Bool[B, T] of a mask
    below: Any = None  # New or Flow
    constants: Any = None
    sinks: Leaf | None = None  # Float[H]
    mask: Leaf | None = None  # Bool[B, T, T]


def below_first(
    cache: Cache, counts: Int[Array, " B"] | Bool[Array, "B T"], length: int, within: str = "chunk"
) -> Flow:
    """Make the `below` of the first layer: what a scan over layers starts with where layers depend
    on each other.

    Args:
        cache: any cache.
        counts: how many of each row's new tokens are valid, or a mask of the valid ones, as in
            `attend_layer`.
        length: the number T of new tokens.
        within: as in `attend_layer`.

    Returns:
        Zeros in the place of what a layer hands on. On a mesh they lie as the cache does.

    Raises:
        UserError: for a length below 1, for counts outside 0 to `length` and for a mask as
            `attend_layer` does. Counts that a trace hides are clipped.
    """
    check_cache(cache)
    length = check_integer("length", length)
    check_numbers(counts, cache.batch, length)
    return _below_first(cache, counts, length=length, within=within)


def _first(cache: Cache, counts, *, length: int, within: str) -> Flow:
    """Do `below_first` on one device, or on every device's part of the cache's mesh."""

    def first(cache, counts):
        return first_flow(begin(cache, padding_of(counts).counts, length, (), within))

    rules = cache.layout.rules
    if rules is None:
        return first(cache, counts)
    specs = (PartitionSpec(rules.batch),)
    return on_parts(first, rules, cache, counts, specs=specs, out=_specs(rules, ()).flow)


_below_first = kept_program(_first, static_argnames=("length", "within"))


def attend_layer(
    cache: Cache,
    layer: Int[Array, ""] | int,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    counts: Int[Array, " B"] | Bool[Array, "B T"],
    *,
    below: New | Flow | None = None,
    constants=None,
    within: str = "chunk",
    softcap: float | None = None,
    sinks: Float[Array, " sinks"] | None = None,
    mask: Bool[Array, "B T T"] | None = None,
    return_lse: bool = False,
) -> (
    tuple[Float[Array, "B T H D"], New] | tuple[Float[Array, "B T H D"], Float[Array, "B T H"], New]
):
    """Attend to what one layer of the cache holds and to its new tokens. The cache stays as it is.
    Pure; works inside and outside jit.

    Args:
        cache: any cache.
        layer: the layer's number. It may be traced where all layers are stored as one stack.
        q: queries of T new tokens; unrotated where the cache's shape has a rope, else rotated.
        k: their keys, likewise.
        v: their values.
        counts: how many of each row's tokens are valid, from the first on; their positions follow
            what the row holds. A mask Bool[B, T] in its place marks any single run of each row, so
            that rows padded on the left come as they are: q, k and v are rolled inside, and the
            output is rolled back.
        below: what the layer beneath returned; methods whose layers depend on each other need it,
            such as AQUA-KV.
        constants: an artifact's.
        within: "chunk": new tokens attend to each other exactly. "step": each sees what decoding
            one token at a time would have shown it.
        softcap: caps the scores, by default as the cache's shape says: s counts as softcap * tanh(s
            / softcap) (Gemma 2).
        sinks: a logit of each query head, which takes its share of the softmax and gives nothing
            (gpt-oss).
        mask: which new tokens each new query sees, in place of those up to itself: query t of row b
            sees token s where `mask[b, t, s]` is True and s is valid. All queries see what the
            cache holds. A sliding window stays, and hides on both sides what is as far away as it
            is long. The mask changes no position and nothing that is stored.
        return_lse: also return the logarithm of the softmax's denominator, natural, with the sinks'
            share. It serves to merge the output with attention to other tokens, such as a prefix
            that lies elsewhere. With o1, l1 and o2, l2 the whole output is
            (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2).

    Returns:
        The output in q's dtype; outputs of tokens that are not valid mean nothing. With
        `return_lse` float32 logarithms [B, T, H]. Then the new tokens for `append`.

    Raises:
        UserError: for shapes or types that do not fit, missing constants, a missing `below`, a
            layer that does not exist, counts outside 0 to T and a row with several runs of valid
            tokens; for a `mask` within "step" and in a layer that attends in chunks. A layer or
            count that a trace hides is clipped, of several runs the first counts; `append` of the
            same counts then raises the flag `cache.overflow[b]`.
    """
    check_cache(cache)
    check_new(cache, q, k, v, counts)
    check_capacity(cache, counts)
    inputs = LayerInput(q, k, v, counts, below, constants, sinks, mask)
    partial, new = attend_checked(cache, layer, inputs, within, softcap)
    return (*partial, new) if typed("return_lse", return_lse, bool) else (partial.out, new)


def attend_checked(
    cache: Cache,
    layer,
    inputs: LayerInput,
    within: str = "chunk",
    softcap: float | None = None,
) -> tuple[Partial, New]:
    """Do `attend_layer` of a cache and new tokens that were checked (`check_new`).

    Only the layer's run is read, and the counts of the first run: a view is a cache without the
    other runs.

    Returns:
        Attention with its output in q's dtype, and the layer's new tokens.

    Raises:
        UserError: for a layer that does not exist, a wrong `softcap`, sinks of another shape than
            one logit a head, a mask that cannot be, missing constants and a missing `below`.
    """
    q, sinks, mask = inputs.q, inputs.sinks, inputs.mask
    layer = check_index("layer", layer, cache.layout.shape.num_layers, "layers in this cache")[0]
    if softcap is not None:
        cache = _capped(cache, softcap)
    if sinks is not None and getattr(sinks, "shape", None) != (q.shape[2],):
        raise UserError(
            f"sinks is {named(sinks)}; wanted an array [{q.shape[2]}], a logit for each query head"
        )
    if mask is not None:
        _check_mask(cache, layer, mask, (cache.batch, q.shape[1], q.shape[1]), within)
    check_entries(inputs.constants)
    return _attend_layer(cache, inputs, layer=layer, within=within)


def _capped(cache: Cache, softcap: float) -> Cache:
    """Give the cache a shape whose scores are capped by `softcap`. All readers ask the shape."""
    softcap = typed("softcap", softcap, float)
    check_softcap(softcap)
    layout = cache.layout
    shape = dataclasses.replace(layout.shape, softcap=softcap)
    return cache.replace(layout=dataclasses.replace(layout, shape=shape))


def _check_mask(cache: Cache, layer, mask, shape: tuple[int, int, int], within: str) -> None:
    """Raise UserError for a mask of new tokens that has another shape or type, and where it has no
    meaning."""
    if not is_mask(mask) or mask.shape != shape:
        raise UserError(
            f"mask is {named(mask)}; wanted bool{list(shape)}: rows, queries, the new tokens that they see"
        )
    if within == "step":
        raise UserError(
            'a mask says which new tokens see each other; within="step" shows them what decoding one token at a time '
            'would have shown, so give the mask with within="chunk"'
        )
    runs = runs_of(cache.layout)
    if runs[placed_layer(runs, layer)[0]].chunked:
        raise UserError(
            f"layer {layer} attends in chunks, whose borders a mask does not move; attend there without one, and give "
            "every text a row of its own"
        )


def _attend(
    cache: Cache, inputs: LayerInput, *, layer: Int[Array, ""] | int, within: str
) -> tuple[Partial, New]:
    """Do `attend_layer` after its checks, on one device or on every device's part of the cache's
    mesh. Results as in `attend_checked`."""
    attend = functools.partial(_attend_here, within=within)
    rules = cache.layout.rules
    below = inputs.below.flow if isinstance(inputs.below, New) else inputs.below
    fixed = run_constants(inputs.constants, cache.layout)
    inputs = inputs._replace(below=below, constants=fixed)
    if rules is None:
        return attend(layer, cache, inputs)
    run = runs_of(cache.layout)[placed_layer(runs_of(cache.layout), layer)[0]]
    # Where every argument and result lies on the mesh. What is None has no arrays, so that its spec
    # does not matter.
    heads = PartitionSpec(rules.batch, None, rules.kv_heads)
    rows = PartitionSpec(rules.batch)
    new = _specs(rules, run.wiring.storage.sources)
    specs = LayerInput(
        q=heads,
        k=heads,
        v=heads,
        counts=rows,
        below=PartitionSpec() if below is None else new.flow,
        constants=of_constants(rules, fixed),
        sinks=PartitionSpec(rules.kv_heads),
        mask=rows,
    )
    # A plain number is not made an array: layers that are stored one by one are found by it at
    # trace time. A traced number is an argument of `shard_map`, as every array is.
    if isinstance(layer, int):
        of_layer = functools.partial(attend, layer)
        partial, new_tokens = on_parts(
            of_layer, rules, cache, inputs, specs=(specs,), out=(heads, new)
        )
    else:

        def traced(cache, layer, inputs):
            return attend(layer, cache, inputs)

        partial, new_tokens = on_parts(
            traced, rules, cache, layer, inputs, specs=(PartitionSpec(), specs), out=(heads, new)
        )
    # The output lies where the queries lay: the model goes on from there.
    return partial._replace(out=lying_as(partial.out, inputs.q, rules)), new_tokens


def _specs(rules: Rules, names: Iterable[str], *lead: None) -> New:
    """Say where one layer's new tokens lie on a mesh.

    Args:
        rules: those of the cache.
        names: of the sources.
        lead: one None for the layers' axis of new tokens that are stacked; nothing for those of one
            layer.

    Returns:
        A `New` with specs in place of arrays.
    """
    # [B, T, W], as the window lies
    tokens = PartitionSpec(*lead, rules.batch, None, rules.kv_heads)
    # The type checker knows `Flow` with arrays alone.
    # [B, slots, W], dealt as the body is
    body: Any = PartitionSpec(*lead, rules.batch, rules.sequence)
    rows: Any = PartitionSpec(*lead, rules.batch)
    return New(sources=dict.fromkeys(names, tokens), flow=Flow(body, tile=rows))


def _attend_here(layer, cache: Cache, inputs: LayerInput, *, within: str) -> tuple[Partial, New]:
    """Do `_attend` on one device's part, where the cache's layout is that of the part. `inputs` has
    the runs' constants, and the flow in the place of the layer below's new tokens."""
    padding = padding_of(inputs.counts)
    # Channels of a RoPE pair stand half a head apart from here on. Rows are rolled to begin with
    # their first valid token: everything below counts places from it, as positions and the cache
    # do.
    q, k = (in_halves(x, cache.layout.shape) for x in (inputs.q, inputs.k))
    q, k, v = (padding.begun(x) for x in (q, k, inputs.v))
    mask = None if inputs.mask is None else padding.begun_mask(inputs.mask)
    call = begin(cache, padding.counts, q.shape[1], inputs.constants, within, mask)
    number, index = placed_layer(call.runs, layer)
    flow = _flow_below(call, layer, inputs.below)
    # The layer's input (`x`, `h`) is not known here. Methods that cache it refuse shapes of other
    # models.
    projected = Projected(
        ready_queries(q, call.tokens.positions, call.runs[number].shape), k, v, None, None
    )
    partial, new, flow = attend_one(call, number, index, {}, projected, flow, inputs.sinks)
    # Attention is float32. What float16 cannot hold becomes its largest number (`saturated`).
    attention = Partial(
        padding.as_given(saturated(partial.out, inputs.q.dtype)), padding.as_given(partial.lse)
    )
    # Sources that depend on nothing are ready before attention has read the body, which XLA then
    # copies for `append`.
    return attention, New(depending_on(partial.out, new), flow)


_attend_layer = kept_program(_attend, static_argnames=("layer", "within"))


def ready_queries(
    q: Float[Array, "B T H D"], positions: Int[Array, "B T"], shape: KVShape
) -> Float[Array, "B T H D"]:
    """Scale and rotate one layer's queries for our attention, which multiplies scores by D^-1/2.

    Args:
        q: queries as the model gives them: unrotated where the shape has a rope, else rotated.
        positions: of the tokens.
        shape: that of the layer.

    Returns:
        Queries in their own dtype.
    """
    return rotate(scaled_queries(q, shape), positions, shape)


def check_new(cache: Cache, q, k, v, counts) -> None:
    """Raise UserError unless q, k and v are T new tokens of one layer for every row, in floating
    point numbers, and `counts` fits them.

    Args:
        cache: any cache, whose shape says how many heads there are.
        q: queries, wanted as [B, T, H, D].
        k: keys, wanted as [B, T, K, D].
        v: values, wanted as [B, T, K, D].
        counts: how many of each row's tokens are valid, or a mask of the valid ones. Numbers are
            checked where they are known.
    """
    shape = cache.layout.shape
    if any(getattr(x, "ndim", None) != 4 for x in (q, k, v)):
        shapes = [list(getattr(x, "shape", ())) for x in (q, k, v)]
        raise UserError(f"q, k and v have shapes {shapes}; wanted arrays [B, T, heads, head_dim]")
    for name, x, heads in (
        ("q", q, shape.num_heads),
        ("k", k, shape.num_kv_heads),
        ("v", v, shape.num_kv_heads),
    ):
        expected_shape = (cache.batch, q.shape[1], heads, shape.head_dim)
        if x.shape != expected_shape:
            text = f"{name} has shape {x.shape}, wanted {expected_shape}: rows, new tokens, heads, head_dim"
            other_width = name == "v" and x.shape[:3] == expected_shape[:3]
            raise UserError(
                text + (_of_one_width(shape.head_dim, x.shape[3]) if other_width else "")
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise UserError(f"{name} is of type {x.dtype}; wanted floating point numbers")
    if not q.shape[1]:
        raise UserError("q, k and v have no new tokens; wanted at least one a row")
    check_numbers(counts, cache.batch, q.shape[1])


def _of_one_width(keys: int, values: int) -> str:
    """Say in a message what to do where values have another number of channels than keys."""
    if values < keys:
        return f"; pad values with zeros to {keys} channels, and cut the output to {values}"
    return (
        f"; pad queries and keys with zeros to {values} channels, for a cache of KVShape(head_dim={values}, "
        f"scale={keys}**-0.5)"
    )


def placed_layer(runs: tuple[RunLayout, ...], layer) -> tuple[int, Int[Array, ""] | int]:
    """Find a layer among the runs.

    Args:
        runs: the cache's, in layer order.
        layer: the layer's number among all; checked by the caller where it is a plain number.

    Returns:
        The number of the layer's run, and the layer's number in that run.

    Raises:
        UserError: for a traced number where there are several runs: the run's arrays must be known
            at trace time.
    """
    if isinstance(layer, jax.core.Tracer):
        if len(runs) > 1:
            raise UserError(
                f"layers of this cache are stored as {len(runs)} stacks, so `layer` must be a plain number"
            )
        return 0, clipped(layer, 0, runs[0].count - 1)[0]
    number = next(number for number, run in enumerate(runs) if layer < run.first + run.count)
    return number, int(layer) - runs[number].first


def _flow_below(call: Call, layer, below: Flow | None) -> Flow:
    """Give what flows into `layer`: what the layer beneath returned, or for the first one zeros.

    Args:
        call: what all layers of the call share.
        below: what the layer beneath returned; None: nothing was given.

    Returns:
        The flow, whose parts are empty where layers do not depend on each other.

    Raises:
        UserError: where layers depend on each other, and nothing was given for a layer that may not
            be the first.
    """
    if below is not None:
        return below
    flow = first_flow(call)
    # A traced number may be any layer's: zeros would be wrong for all but the first.
    first = not isinstance(layer, jax.core.Tracer) and int(layer) == 0
    if jax.tree.leaves(flow) and not first:
        raise UserError(
            f"{call.cache.layout.method}: layers depend on each other; pass below=, what the layer beneath returned, "
            "or attend with view.above(its view)"
        )
    return flow


def append(
    cache: Cache,
    new: New | Sequence[New | dict],
    counts: Int[Array, " B"] | Bool[Array, "B T"],
    *,
    constants=None,
) -> Cache:
    """Store new tokens of each row and encode what is due.

    Args:
        cache: the cache that `attend_layer` was given.
        new: one entry a layer, as `attend_layer` returns them or only their sources {name: [B, T,
            W]}; or what a scan over layers stacked. Tokens begin with a row's first valid one,
            however `attend_layer` was given them.
        counts: how many of them are stored, from the first on, such as the accepted part of a
            draft. Of a mask only their number counts.
        constants: an artifact's.

    Returns:
        The cache that holds them.

    Raises:
        UserError: for a cache with recurrent layers, new tokens that do not fit the cache and,
            outside jit, for counts outside 0 to T and where a row would exceed the capacity. Inside
            jit such counts are clipped, the excess is not stored, and the row's flag
            `cache.overflow[b]` is raised.
    """
    if not isinstance(cache, Cache):
        kind = type(cache).__name__
        raise UserError(
            f"append takes the cache first, not a {kind}; with a model in front it is commit"
        )
    check_cache(cache)
    check_stateless(cache, "append")
    check_entries(constants)
    if not isinstance(new, New | Iterable):
        raise UserError(f"new is {named(new)}; wanted what attend_layer returned for every layer")
    new = new if isinstance(new, New) else tuple(new)
    check_numbers(counts, cache.batch, _check_new(cache, new))
    check_capacity(cache, counts)
    # What flows from layer to layer is not stored.
    if isinstance(new, New):
        sources = new.sources
    else:
        sources = tuple(entry.sources if isinstance(entry, New) else entry for entry in new)
    return _append(cache, sources, counts, constants)


def append_accepted(cache: Cache, new: New | Sequence[New], counts, given, constants) -> Cache:
    """Do `append` where it is known how many new tokens were valid when the layers attended.

    Args:
        cache: as in `append`.
        new: as there.
        counts: how many of the valid tokens are stored, or a mask of them. None: all.
        given: how many tokens were valid, or the mask of them.
        constants: as in `append`.

    Returns:
        The cache that holds them. The flag `overflow[b]` is raised of a row whose counts a trace
        hides and which are more than were valid: the others are not stored.

    Raises:
        UserError: as `append`, and for known counts of more tokens than were valid.
    """
    if counts is None:
        return append(cache, new, given, constants=constants)
    check_numbers(counts, cache.batch, None)
    if is_known(counts, given):
        check_accepted(counts, given)
        return append(cache, new, counts, constants=constants)
    rules = cache.layout.rules
    if rules is None:
        stored, clipped_rows = accepted_part(counts, given)
    else:
        rows = PartitionSpec(rules.batch)
        stored, clipped_rows = over_parts(
            accepted_part, rules, counts, given, specs=(rows, rows), out=(rows, rows)
        )
    cache = append(cache, new, stored, constants=constants)
    return cache.replace(overflow=cache.overflow | clipped_rows)


def check_stateless(cache: Cache, caller: str) -> None:
    """Raise UserError for a cache with states of recurrent layers, which would fall behind those of
    attention."""
    if cache.states:
        raise UserError(
            f"{caller}: this cache also holds the states of a model's recurrent layers, which take in the same tokens; "
            "forward, or attend and commit, do both"
        )


def _check_new(cache: Cache, new: New | tuple) -> int:
    """Check that every layer has its sources, with one T for all.

    Args:
        cache: the cache that is to hold them.
        new: one `New` with the layers' axis in front of every array; or one entry a layer, a `New`
            or a dict of sources.

    Returns:
        The number T of new tokens.

    Raises:
        UserError: for a wrong number of layers, for no tokens, and for a source that is missing,
            has another shape, or is no floating point number.
    """
    layers = cache.layout.shape.num_layers
    if not isinstance(new, New) and len(new) != layers:
        raise UserError(f"new tokens of {len(new)} layers given, the cache has {layers}")
    length = None
    for run in runs_of(cache.layout):
        for layer in range(run.first, run.first + run.count):
            entry = new if isinstance(new, New) else new[layer]
            sources = entry.sources if isinstance(entry, New) else entry
            for name, width in run.wiring.storage.sources.items():
                source_shape = (
                    getattr(sources.get(name), "shape", None) if isinstance(sources, dict) else None
                )
                if isinstance(new, New) and source_shape is not None:
                    if len(source_shape) != 4 or source_shape[0] != layers:
                        raise UserError(
                            f"new tokens {name!r} have shape {list(source_shape)}, wanted [{layers}, B, T, W]"
                        )
                    source_shape = source_shape[1:]
                # The first source that has three axes says what T is for all others.
                if length is None and source_shape is not None and len(source_shape) == 3:
                    length = source_shape[1]
                if source_shape != (cache.batch, length, width):
                    text = "nothing" if source_shape is None else f"shape {list(source_shape)}"
                    sizes = f"[{cache.batch}, T, {width}]"
                    raise UserError(
                        f"new tokens {name!r} of layer {layer}: {text} given, wanted {sizes}, one T for all"
                    )
                if not jnp.issubdtype(sources[name].dtype, jnp.floating):
                    raise UserError(
                        f"new tokens {name!r} of layer {layer} are of type {sources[name].dtype}; wanted floating "
                        "point numbers"
                    )
    if not length:
        raise UserError("there are no new tokens; wanted at least one a row")
    return length


@kept_program
def _append(cache: Cache, sources, counts, constants) -> Cache:
    """Do `append` after its checks, on one device or on every device's part of the cache's mesh.

    `sources` has those of all layers as stacks, {name: [L, B, T, W]}, or a dict {name: [B, T, W]}
    for each layer."""
    fixed, rules = run_constants(constants, cache.layout), cache.layout.rules
    if rules is None:
        return _append_here(cache, sources, counts, fixed)
    if isinstance(sources, dict):
        new_specs = _specs(rules, sources, None).sources
    else:
        new_specs = tuple(_specs(rules, layer_sources).sources for layer_sources in sources)
    specs = new_specs, PartitionSpec(rules.batch), of_constants(rules, fixed)
    return on_parts(
        _append_here, rules, cache, sources, counts, fixed, specs=specs, out=rules.cache(cache)
    )


def _append_here(cache: Cache, sources, counts, fixed) -> Cache:
    """Do `_append` on one device's part. The overflow flag is also raised where a row's mask has
    several runs."""
    padding = padding_of(counts)
    pending = [_of_run(sources, run) for run in runs_of(cache.layout)]
    new_cache = caches.commit(cache, tuple(pending), padding.counts, fixed)
    return new_cache.replace(overflow=padding.flagged(new_cache.overflow))


def _of_run(sources, run: RunLayout) -> dict[str, Float[Array, "L B T W"]]:
    """Collect the sources of a run's layers, from those of all layers as `_append` takes them."""
    layers = slice(run.first, run.first + run.count)
    if isinstance(sources, dict):
        return {name: stack[layers] for name, stack in sources.items()}
    by_layer = sources[layers]
    return {name: jnp.stack([layer[name] for layer in by_layer]) for name in by_layer[0]}
