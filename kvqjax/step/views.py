"""A layer of a cache as a value: each layer takes its view and hands it back, and all are stored at
once.

    views = layers(cache, valid=mask)                      # a list of pytrees, one for every layer
    out, views[i] = views[i].attend(q, k, v)               # in layer i; the cache stays as it is
    cache = commit_layers(views)

    view = layers(cache, valid=mask, stack=T)              # one pytree, the carry of a scan over the layers
    out, view = view.attend(q, k, v)                       # of one layer after the other
    cache = commit_layers(view)

A view holds what one layer reads: the arrays of its run, the rows' lengths, which new tokens are
valid, calibrated constants, and once it has attended the layer's new tokens. It crosses `jax.jit`,
`jax.checkpoint` and `jax.lax.scan` as any pytree does. Views compute nothing of their own: `attend`
is `attend_layer`, `commit_layers` is `append`.

For frameworks that attend by themselves, `dense` decodes one layer of a cache into plain arrays of
keys and values."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvqjax import cache as caches
from kvqjax._arguments import check_index, check_integer, check_within, is_known, named, typed
from kvqjax._errors import UserError
from kvqjax.cache.layout import RunLayout
from kvqjax.cache.readers.blocks import body_blocks
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Leaf, Run, check_alive, check_cache
from kvqjax.cache.view import LayerView, body_view, expanded, side_by_side
from kvqjax.model import decoder
from kvqjax.model.loading import Model
from kvqjax.model.rope import as_given
from kvqjax.ops.attention import Partial
from kvqjax.ops.finite import saturated
from kvqjax.parallel.rules import Rules
from kvqjax.parallel.sharding import of_constants, on_parts, over_parts, sent
from kvqjax.step.checks import (
    check_both,
    check_entries,
    check_numbers,
    is_mask,
    kept_program,
    padding_of,
    run_constants,
    with_own_constants,
)
from kvqjax.step.forward import (
    Call,
    Flow,
    begin,
    check_capacity,
    check_within_mode,
    first_flow,
    in_step,
)
from kvqjax.step.layers import (
    LayerInput,
    New,
    append_accepted,
    attend_checked,
    below_first,
    check_new,
    check_stateless,
    placed_layer,
)


class _View(struct.PyTreeNode):
    """What views of one layer and of a stack of layers share: the cache, and which new tokens are
    valid."""

    part: Cache  # what the layer reads of the cache
    counts: Leaf  # Int[B], or Bool[B, T] of a mask
    constants: Any  # an artifact's
    within: str = struct.field(pytree_node=False)

    def positions(self, length: int) -> Int[Array, "B T"]:
        """Give the positions of new tokens, for models that rotate queries and keys themselves.

        Args:
            length: the number T of new tokens.

        Returns:
            The position of each token, at the place where it is given. Positions of tokens that are
            not valid mean nothing.
        """
        return new_positions(self.part, self.counts, length)

    def _attended(
        self, layer, flow: Flow | None, q, k, v, *, softcap, sinks, mask
    ) -> tuple[Partial, New]:
        """Attend in a layer: (attention, its new tokens)."""
        check_alive(self.part)
        check_new(self.part, q, k, v, self.counts)
        inputs = LayerInput(q, k, v, self.counts, flow, self.constants, sinks, mask)
        return attend_checked(self.part, layer, inputs, self.within, softcap)


class CacheView(_View):
    """One layer of a cache, as `kvqjax.layers` gives it: a pytree with the layer's number in its
    structure."""

    layer: int = struct.field(pytree_node=False)
    flow: Flow | None = None  # what the layer beneath hands on
    new: New | None = None  # the layer's new tokens, once it has attended

    def attend(
        self,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        *,
        softcap: float | None = None,
        sinks: Float[Array, " sinks"] | None = None,
        mask: Bool[Array, "B T T"] | None = None,
        return_lse: bool = False,
    ) -> (
        tuple[Float[Array, "B T H D"], "CacheView"]
        | tuple[Float[Array, "B T H D"], Float[Array, "B T H"], "CacheView"]
    ):
        """Attend to what this layer of the cache holds and to its new tokens.

        Another layer that shares this one's keys and values calls the same view, from before it
        attended, with its own queries and the same k and v, and drops the view that comes back.

        Args:
            q: queries of T new tokens; unrotated where the cache's shape has a rope, else rotated.
            k: their keys, likewise.
            v: their values.
            softcap: caps the scores, as in `kvqjax.attend_layer`.
            sinks: a logit of each query head, as in `kvqjax.attend_layer`.
            mask: which new tokens each new query sees, as in `kvqjax.attend_layer`.
            return_lse: also return the logarithm of the softmax's denominator, as there.

        Returns:
            The output in q's dtype; outputs of tokens that are not valid mean nothing. With
            `return_lse` float32 logarithms [B, T, H]. Then the view that holds the new tokens, for
            `kvqjax.commit_layers`.

        Raises:
            UserError: for shapes that do not fit, a mask as in `kvqjax.attend_layer`, counts
                outside 0 to T, missing constants, a view that has attended, and where layers depend
                on each other a view that was not put `above` the one beneath.
        """
        if self.new is not None:
            raise UserError(
                f"the view of layer {self.layer} has attended; commit_layers(views) stores its tokens, and layers of "
                "the cache that it returns attend next"
            )
        partial, new = self._attended(
            self.layer, self.flow, q, k, v, softcap=softcap, sinks=sinks, mask=mask
        )
        view = self.replace(new=new, flow=None)
        return (*partial, view) if typed("return_lse", return_lse, bool) else (partial.out, view)

    def above(self, below: "CacheView") -> "CacheView":
        """Take what the layer beneath hands on. Methods whose layers depend on each other (AQUA-KV)
        need it; for others nothing flows.

        Args:
            below: the view of the layer beneath, which has attended.

        Returns:
            This view, which may attend.

        Raises:
            UserError: `below` is no view of the layer beneath, or has not attended.
        """
        if not isinstance(below, CacheView) or below.layer != self.layer - 1:
            text = f"that of layer {below.layer}" if isinstance(below, CacheView) else named(below)
            raise UserError(
                f"the view of layer {self.layer} stands above that of layer {self.layer - 1}, not {text}"
            )
        if below.new is None:
            raise UserError(
                f"the view of layer {below.layer} has not attended; above takes the view it returns"
            )
        return self.replace(flow=below.new.flow)

    def __repr__(self) -> str:
        layout = self.part.layout
        state = "attended" if self.new is not None else "to attend"
        return (
            f"CacheView(layer {self.layer} of {layout.shape.num_layers}, {layout.method}, {state})"
        )


class StackView(_View):
    """All layers of a cache that stores them as one stack, one after the other: the carry of a scan
    over layers."""

    layer: Leaf  # Int, of the layer that attends next
    flow: Flow  # what the layer beneath hands on
    sources: dict[str, Leaf]  # Float[L, B, T, W], of the layers that have attended

    def attend(
        self,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        *,
        softcap: float | None = None,
        sinks: Float[Array, " sinks"] | None = None,
        mask: Bool[Array, "B T T"] | None = None,
        return_lse: bool = False,
    ) -> (
        tuple[Float[Array, "B T H D"], "StackView"]
        | tuple[Float[Array, "B T H D"], Float[Array, "B T H"], "StackView"]
    ):
        """Attend in the next layer, as `CacheView.attend` does, and give the view for the layer
        above."""
        length = next(iter(self.sources.values())).shape[2]
        if getattr(q, "ndim", None) == 4 and q.shape[1] != length:
            raise UserError(f"q has {q.shape[1]} new tokens, the view was made with stack={length}")
        # A view beyond the last layer attends there again; `commit_layers` refuses it.
        layer = (
            self.layer
            if isinstance(self.layer, jax.core.Tracer)
            else min(int(self.layer), self._count - 1)
        )
        partial, new = self._attended(
            layer, self.flow, q, k, v, softcap=softcap, sinks=sinks, mask=mask
        )
        rules = self.part.layout.rules
        put = _put_layer if rules is None else functools.partial(_put_on_mesh, rules=rules)
        sources = {name: put(self.sources[name], x, layer) for name, x in new.sources.items()}
        view = self.replace(layer=self.layer + 1, flow=new.flow, sources=sources)
        return (*partial, view) if typed("return_lse", return_lse, bool) else (partial.out, view)

    @property
    def _count(self) -> int:
        return self.part.layout.shape.num_layers

    def __repr__(self) -> str:
        return f"StackView({self._count} layers, {self.part.layout.method})"


def _put_layer(
    stack: Float[Array, "L B T W"], x: Float[Array, "B T W"], layer
) -> Float[Array, "L B T W"]:
    """Put one layer's new tokens into those of all layers."""
    return jax.lax.dynamic_update_slice_in_dim(stack, x.astype(stack.dtype)[None], layer, 0)


def _put_on_mesh(stack: Float[Array, "L B T W"], x: Float[Array, "B T W"], layer, rules: Rules):
    """Do `_put_layer` on every device's part."""
    token = PartitionSpec(rules.batch, None, rules.kv_heads)
    specs = PartitionSpec(None, *token), token, PartitionSpec()
    return over_parts(
        _put_layer, rules, stack, x, jnp.asarray(layer, jnp.int32), specs=specs, out=specs[0]
    )


def _blank(run: RunLayout, cache: Cache, length: int) -> dict[str, Float[Array, "L B T W"]]:
    """Make room for the sources of `length` new tokens, of all layers of a run."""
    rules, dtype = cache.layout.rules, cache.layout.dtype
    lead = run.count, cache.batch, length
    blank = {
        name: jnp.zeros((*lead, width), dtype) for name, width in run.wiring.storage.sources.items()
    }
    if rules is None:
        return blank
    return sent(
        blank, rules, dict.fromkeys(blank, PartitionSpec(None, rules.batch, None, rules.kv_heads))
    )


def new_positions(
    cache: Cache, counts: Int[Array, " B"] | Bool[Array, "B T"], length: int
) -> Int[Array, "B T"]:
    """Give the positions of new tokens.

    Args:
        cache: the cache that they are to follow.
        counts: how many of each row's tokens are valid, or a mask of the valid ones.
        length: the number T of new tokens.

    Returns:
        The position of each token, at the place where it is given. Positions of tokens that are not
        valid mean nothing.

    Raises:
        UserError: for counts that do not fit `length` tokens.
    """
    length, rules = check_integer("length", length), cache.layout.rules
    check_numbers(counts, cache.batch, length)

    def positions(lengths, counts):
        return padding_of(counts).as_given(lengths[:, None] + jnp.arange(length)[None])

    if rules is None:
        return positions(cache.lengths, counts)
    rows = PartitionSpec(rules.batch)
    return over_parts(positions, rules, cache.lengths, counts, specs=(rows, rows), out=rows)


def layers(
    cache: Cache,
    counts: Int[Array, " B"] | Bool[Array, "B T"] | None = None,
    *,
    valid: Bool[Array, "B T"] | None = None,
    constants=None,
    within: str = "chunk",
    stack: int | None = None,
) -> list[CacheView] | StackView:
    """Take a cache apart into one view for every layer. The cache stays as it is, and no array is
    copied.

    Args:
        cache: any cache of a KVShape.
        counts: how many of each row's new tokens are valid, from the first on.
        valid: which of them are, in place of counts: any single run of each row, as in
            `kvqjax.attend_layer`.
        constants: an artifact's.
        within: as in `kvqjax.attend_layer`: "step" verifies drafts.
        stack: the number T of new tokens. Gives one view that goes through all layers: the carry of
            a scan.

    Returns:
        The layers' views, in order; or one view, with `stack`.

    Raises:
        UserError: for what is no cache, both or neither of `counts` and `valid`, counts below 0 or
            beyond T, a row of a mask with several runs, what are no constants, another `within`,
            outside jit a row that would exceed the capacity, and `stack` of a cache whose layers
            are not one stack.
    """
    check_cache(cache)
    check_stateless(cache, "layers")
    check_entries(constants)
    check_within_mode(within)
    if (counts is None) == (valid is None):
        raise UserError(
            "layers takes either counts=, how many new tokens of each row are valid, or valid=, their mask"
        )
    if valid is not None and not is_mask(valid):
        raise UserError(f"valid is {named(valid)}; wanted a mask, bool[{cache.batch}, T]")
    new_tokens: Any = valid if counts is None else counts
    stack = None if stack is None else check_integer("stack, the number of new tokens", stack)
    check_numbers(new_tokens, cache.batch, stack)
    if not is_mask(new_tokens):
        capacity = cache.layout.capacity
        check_within(
            "counts", new_tokens, 0, capacity, f"from 0 to {capacity}, the cache's capacity"
        )
    check_capacity(cache, new_tokens)
    cache, plans = in_step(cache), runs_of(cache.layout)
    shared_fields = {"counts": new_tokens, "constants": constants, "within": within}
    if stack is None:
        numbers = range(cache.layout.shape.num_layers)
        return [
            CacheView(part=_part(cache, placed_layer(plans, i)[0]), layer=i, **shared_fields)
            for i in numbers
        ]
    if len(plans) > 1:
        raise UserError(
            f"layers of this cache are stored as {len(plans)} stacks, and stack= is for one; leave it out, and attend "
            "with each layer's view"
        )
    flow = below_first(cache, new_tokens, stack, within)
    sources = _blank(plans[0], cache, stack)
    return StackView(part=cache, layer=jnp.int32(0), flow=flow, sources=sources, **shared_fields)


def _part(cache: Cache, number: int) -> Cache:
    """Cut out what the layers of run `number` read of a cache. Other runs have no arrays in it.

    The first run keeps its counts of encoded units. Where tokens are evicted they are read for all
    layers (`kvqjax.cache.eviction.read_as`)."""
    runs = [Run({}, {}, {}, ())] * len(cache.runs)
    runs[0] = Run({}, {}, {}, cache.runs[0].flushed)
    runs[number] = cache.runs[number]
    return cache.replace(runs=tuple(runs))


def commit_layers(
    views: Sequence[CacheView] | StackView,
    counts: Int[Array, " B"] | Bool[Array, "B T"] | None = None,
) -> Cache:
    """Store the new tokens of all layers, once each has attended.

    Args:
        views: those of all layers, in order, as their `attend` returned them; or the one of a
            stack.
        counts: how many of each row's valid tokens are stored, such as the accepted part of a
            draft. None: all.

    Returns:
        The cache that holds them.

    Raises:
        UserError: for missing or further views, views of different caches, a view that has not
            attended, counts of more tokens than were valid, and as `kvqjax.append`. Such counts
            that a trace hides are clipped, and the row's flag `cache.overflow[b]` is raised. Where
            a trace hides how many layers a scan went through, and they are not all, that of every
            row is.
    """
    if isinstance(views, StackView):
        return _commit_stack(views, counts)
    view_list: list = list(views) if isinstance(views, list | tuple) else [views]
    _check_views(view_list)
    first, cache = view_list[0], view_list[0].part
    # The views together have the arrays of every run. Layers of one run have the same.
    numbers = [placed_layer(runs_of(cache.layout), view.layer)[0] for view in view_list]
    runs = {number: view.part.runs[number] for number, view in zip(numbers, view_list, strict=True)}
    cache = cache.replace(runs=tuple(runs[number] for number in range(len(cache.runs))))
    return append_accepted(
        cache, [view.new for view in view_list], counts, first.counts, first.constants
    )


def _check_views(views: list) -> None:
    """Raise UserError unless these are the views of all layers of one cache, in order, which have
    attended."""
    for place, view in enumerate(views):
        if not isinstance(view, CacheView):
            raise UserError(
                f"view {place} is {named(view)}; wanted the views of all layers, as attend returned them"
            )
        if view.layer != place:
            raise UserError(
                f"view {place} is that of layer {view.layer}; wanted one of every layer, in order"
            )
        if view.new is None:
            raise UserError(
                f"the view of layer {place} has not attended; commit_layers takes the views it returns"
            )
        if view.part.layout != views[0].part.layout or not _equal_lengths(
            view.part.lengths, views[0].part.lengths
        ):
            raise UserError(f"the view of layer {place} is of another cache than that of layer 0")
    count = views[0].part.layout.shape.num_layers if views else None
    if len(views) != count:
        raise UserError(
            f"views of {len(views)} layers given{'' if count is None else f', the cache has {count}'}"
        )


def _equal_lengths(lengths: Array, first_lengths: Array) -> bool:
    """Say whether rows' lengths are equal, as far as they are known."""
    return (
        lengths is first_lengths
        or not is_known(lengths, first_lengths)
        or np.array_equal(lengths, first_lengths)
    )


def _commit_stack(view: StackView, counts) -> Cache:
    """Do `commit_layers` of the view that went through all layers."""
    count, layer = view.part.layout.shape.num_layers, view.layer
    if is_known(layer) and int(layer) != count:
        raise UserError(f"the view has gone through {int(layer)} layers, the cache has {count}")
    new = New(sources=view.sources, flow=view.flow)
    cache = append_accepted(view.part, new, counts, view.counts, view.constants)
    return cache.replace(overflow=cache.overflow | (layer != count))


class Dense(NamedTuple):
    """Keys and values by position, and which positions hold them."""

    k: Float[Array, "B S K D"]
    v: Float[Array, "B S K D"]
    valid: Bool[Array, "B S"]

    def having(self, k, v, positions: Int[Array, "B n"], valid: Bool[Array, "B n"]) -> "Dense":
        """Put the keys and values of n tokens at their positions. Tokens that are not valid are
        left out."""
        row = jnp.arange(len(valid))[:, None]
        # A token that is not valid gets a place beyond the end, where mode="drop" writes nothing.
        place = jnp.where(valid, positions, self.valid.shape[1])

        def put(array, part):
            return array.at[row, place].set(part, mode="drop")

        k, v = (saturated(x, self.k.dtype) for x in (k, v))
        return Dense(put(self.k, k), put(self.v, v), put(self.valid, True))


class _NoWeights(dict):
    """Stands for a layer's weights where no model was given. A method that asks for a weight gets
    an error that says to pass `model=`."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def __missing__(self, name: str):
        raise UserError(
            f"{self.method}: its keys and values are made with the model's weights; pass model="
        )


def dense(
    cache: Cache, layer: Int[Array, ""] | int, model: Model | None = None, *, constants=None
) -> tuple[Float[Array, "B S K D"], Float[Array, "B S K D"], Bool[Array, "B S"]]:
    """Decode one layer of a cache into plain arrays, every token at its position: sinks, body and
    window.

    It costs what compression saves: a call decodes all tokens that are stored, O(S), and gives 2 *
    B * S * K * D numbers of the cache's dtype (8192 tokens of 8 heads of 128 in bfloat16: 32 MiB a
    row). `attend_layer` reads the same tokens without these arrays. Pure; works inside and outside
    jit.

    Args:
        cache: any cache whose tokens lie on one device; its rows and heads may be split over a
            mesh.
        layer: its number. It may be traced where all layers are stored as one stack and do not
            depend on each other.
        model: the model of the cache, with its constants. Methods that make keys and values of a
            layer's input need it (XQuant, XQuant-CL); others take it and need only `constants`.
        constants: an artifact's, where no model is given.

    Returns:
        k: keys [B, S, K, D] as they are attended to, rotated, their channels as `Rope.pairs` says.
            S is the cache's capacity.
        v: values [B, S, K, D].
        valid: Bool[B, S], the tokens that a query at position `cache.lengths[b]` sees: not those
            that a sliding window has passed or that were evicted. Keys and values at other
            positions are 0.

        Scores are q . k with the shape's scale. Where layers depend on each other (AQUA-KV,
        XQuant-CL), those below are decoded first.

    Raises:
        UserError: for what is no cache, or none of this model; for a layer that does not exist, a
            missing model or constant, and a body that is dealt over devices."""
    check_cache(cache)
    check_entries(constants)
    if model is not None:
        check_both(model, cache)
    if cache.layout.dealt > 1:
        raise UserError(
            f"dense reads bodies of one device; this cache's are dealt over {cache.layout.dealt}"
        )
    layer = check_index("layer", layer, cache.layout.shape.num_layers, "layers in this cache")[0]
    return _dense(cache, model, constants, layer=layer)


@functools.partial(kept_program, static_argnames=("layer",))
def _dense(cache: Cache, model: Model | None, constants, *, layer):
    """Do `dense` after its checks, on one device or on every device's part of the cache's mesh."""
    if model is not None:
        model = with_own_constants(model, cache.layout.method)
        constants = model.constants if constants is None else constants
    fixed, rules = run_constants(constants, cache.layout), cache.layout.rules
    if rules is None:
        return _dense_here(model, layer, cache, fixed)
    heads = PartitionSpec(rules.batch, None, rules.kv_heads)
    constants_specs = of_constants(rules, fixed)
    read = functools.partial(_dense_here, model)
    out = heads, heads, PartitionSpec(rules.batch)
    # A plain number is not made an array: layers that are stored one by one are found by it at
    # trace time. A traced number is an argument of `shard_map`, as every array is.
    if isinstance(layer, int):
        return on_parts(
            functools.partial(read, layer), rules, cache, fixed, specs=(constants_specs,), out=out
        )

    def traced(cache, layer, fixed):
        return read(layer, cache, fixed)

    specs = PartitionSpec(), constants_specs
    return on_parts(traced, rules, cache, layer, fixed, specs=specs, out=out)


def _dense_here(model: Model | None, layer, cache: Cache, fixed: tuple[dict, ...]):
    """Do `_dense` on one device's part. Arguments and result are those of `dense`; `fixed` are the
    runs' constants."""
    # As for attention with one new token of each row that is not valid: it stands for the query
    # that sees the tokens.
    call = begin(cache, jnp.zeros_like(cache.lengths), 1, fixed, "chunk")
    carry, layers_below = first_flow(call).body, ()
    if carry:
        if isinstance(layer, jax.core.Tracer):
            raise UserError(
                f"{cache.layout.method}: layers depend on each other, so `layer` must be a plain number"
            )
        # They are decoded for their carry alone; XLA drops their keys and values.
        layers_below = range(layer)
    for number in layers_below:
        carry = _read(call, model, number, carry)[1]
    k, v, valid = _read(call, model, layer, carry)[0]
    return as_given(k, cache.layout.shape), v, valid


def _read(call: Call, model: Model | None, layer, carry: dict) -> tuple[Dense, dict]:
    """Decode one layer.

    Args:
        call: What all layers share.
        model: The cache's model, if one was given.
        carry: The layer below's carry of the body's tokens; empty where layers do not feed each
            other.

    Returns:
        (keys and values by position, this layer's carry)."""
    place: tuple[int, Any] = placed_layer(call.runs, layer)
    number, index = place
    run, state, layout = call.runs[number], call.cache.runs[number], call.cache.layout
    weights = (
        _NoWeights(layout.method)
        if model is None
        else decoder.with_read(decoder.layer(model.params, layer))
    )
    fixed = caches.at_layer(call.constants[number], index)
    rows, dtype = call.cache.batch, layout.dtype
    # The sources of the new token that stands for the query. It is not valid, so that its key and
    # value go nowhere.
    new = {
        name: jnp.zeros((rows, 1, width), dtype)
        for name, width in run.wiring.storage.sources.items()
    }
    view = LayerView(
        run, state, index, weights, fixed, new, layout.method.sinks, layout.bound, call.cache.pages
    )
    blank = jnp.zeros((rows, layout.capacity, run.shape.num_kv_heads, run.shape.head_dim), dtype)
    sources, positions, mask = side_by_side(view, call.tokens)
    read = Dense(blank, blank, jnp.zeros(blank.shape[:2], bool))
    read = read.having(*expanded(view, sources, positions), positions, mask[:, 0])
    if not run.slots:
        return read, carry
    size = run.reading
    places = body_view(view, call.tokens).places
    read_block, first, last = body_blocks(view, call.tokens, size)

    def step(j, loop):
        read, carry = loop
        k, v, mask, carry = read_block(j, carry)
        k, v = _turned_back(view, k, v)
        positions, _ = places(j, size)
        return read.having(k, v, positions, mask[:, 0]), carry

    return jax.lax.fori_loop(first, last, step, (read, carry))


def _turned_back(view: LayerView, k, v):
    """Rotate keys and values [B, n, K, D] of a rotated body back into the frame of queries and
    outputs."""
    frame = view.run.wiring.maps.frame
    if frame is None:
        return k, v
    return frame.keys(view.constants, k), frame.outputs(view.constants, v)
