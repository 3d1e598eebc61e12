"""Attention over blocks of tokens, called as vLLM's TPU engine calls its own: the new tokens of all
sequences in one flat array, and block tables.

    kv_caches = create_kv_caches(shape, "kivi:bits=4,window=0", num_blocks=512, max_model_len=8192)
    block_size = kv_caches[0].block_size                       # what the scheduler must count in

    kv_caches[i], out = attention(kv_caches[i], q, k, v, metadata)       # layer i, inside jit, caches donated

Names and arguments are those of `tpu_inference.layers.common.attention_interface` (tpu-inference
0.32.0). Nothing of that package is imported. The engine's scheduler gives blocks to sequences,
takes them back, and shares full blocks between prompts with the same first tokens. A block is a
page of one layer (kvqjax/cache/pages.py).

*What a block holds.* A block holds the codes of its tokens. Tokens are encoded a unit at a time.
While the last unit of a sequence is not full, its exact tokens are the tail. By default every block
has room for a tail, `unit` tokens in `dtype`. The blocks of a sequence are then all that is stored
of it, so that it may stand anywhere in a batch. A full block has no tail, so that sequences can
share it. This takes a method without window and sinks, and a unit that divides blocks. With
`slots=` every sequence has a tail instead. `metadata.mamba_state_indices` then says which tail each
sequence has, as it does for the states of recurrent layers.

*How tokens are worked off.* The sequences with one new token are worked off together. The others
follow one after the other, in chunks of `chunk` tokens. A chunk attends to the tokens before it as
they are stored.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_counts, check_integer, check_integers
from kvqjax._errors import UserError
from kvqjax.cache.accounting import array_bytes
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.runs import runs_of, table_width
from kvqjax.cache.state import NO_PAGE, Cache, Run
from kvqjax.methods import Method, MethodLike, parse
from kvqjax.model.config import KVShape
from kvqjax.step.checks import kept_program, run_constants
from kvqjax.step.layers import LayerInput, append, attend_checked
from kvqjax.step.new_cache import init_cache

__all__ = ["Metadata", "PagedLayer", "attention", "create_kv_caches", "layer_constants"]


def __dir__() -> list[str]:
    return __all__


class Metadata(NamedTuple):
    """Describes the sequences of one call. The engine's own `AttentionMetadata` is taken as well.

    Attributes:
        block_tables: The blocks of sequence i, in the order of its tokens, are
            `block_tables[i * width : (i + 1) * width]`. Entries beyond those that its tokens need
            may be any numbers.
        seq_lens: How many tokens each sequence has, with its new ones.
        query_start_loc: The new tokens of sequence i are `query_start_loc[i]` to
            `query_start_loc[i + 1]` - 1 of the flat array.
        request_distribution: The last number counts the sequences. Entries of the other arrays
            beyond them are not sequences.
        mamba_state_indices: With `slots=`, which tail each sequence has.
    """

    block_tables: Any  # Int[max_seqs * width]
    seq_lens: Any  # Int[max_seqs]
    query_start_loc: Any  # Int[max_seqs + 1]
    request_distribution: Any  # Int[3]
    mamba_state_indices: Any = None  # Int[max_seqs], with slots=


class PagedLayer(struct.PyTreeNode):
    """The storage of one layer.

    Attributes:
        body: The codes of all blocks, {source: {field: arrays [1, blocks, ...]}}.
        tails: The exact tokens of units that are not full, {source: [1, N, unit, W]}. N is the
            number of tails.
        ends: How many tokens the sequence had when each tail was written.
        layout: The layout of a cache of this one layer, whose rows are sequences.
        chunk: The most tokens of a sequence that are worked off together.
        by_slot: Whether tails lie by `mamba_state_indices`, and not in blocks.
    """

    body: dict[str, dict[str, Any]]
    tails: dict[str, Any]  # Float[1, N, unit, W]
    ends: Any  # Int[N]
    layout: CacheLayout = struct.field(pytree_node=False)
    chunk: int = struct.field(pytree_node=False)
    by_slot: bool = struct.field(pytree_node=False)

    @property
    def block_size(self) -> int:
        """The tokens of a block."""
        assert self.layout.pool is not None
        return self.layout.pool.tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in this layer, including its tail if every block has one."""
        # `ends` has an axis of blocks alone. In other arrays an axis of one layer comes before that
        # of blocks.
        arrays = self.body if self.by_slot else (self.body, self.tails, self.ends)
        return sum(
            array_bytes(x) // x.shape[-1 if x.ndim == 1 else 1] for x in jax.tree.leaves(arrays)
        )

    @property
    def run(self) -> RunLayout:
        """The plan of the layer's arrays."""
        return runs_of(self.layout)[0]

    def __repr__(self) -> str:
        assert self.layout.pool is not None
        tails = f"{self.ends.shape[0]} tails of {self.run.ring} tokens"
        return f"PagedLayer({self.layout.method}, {self.layout.pool.pages} blocks of {self.block_size} tokens, {tails})"


def _layer_method(method: Method, shape: KVShape, index: int) -> Method:
    """Give the method of one layer by itself: without exceptions for other layers."""
    return dataclasses.replace(method, layer=method.layers(shape)[index], overrides=(), boundary=0)


def _check_method(layout: CacheLayout) -> None:
    """Raise UserError for a layer that stores tokens outside blocks, or that needs what another
    layer computed."""
    (run,), method = runs_of(layout), layout.method
    clocks = run.wiring.storage.clocks
    if method.sinks or method.keep is not None or len(clocks) > 1 or clocks[0].window:
        raise UserError(
            f"{method}: blocks that sequences share hold all of their tokens, so that none may stay outside; wanted a "
            "method with window=0, sinks=0 and no keep="
        )
    if run.wiring.chain.carry:
        raise UserError(
            f"{method}: layers depend on each other, and the engine calls each by itself"
        )
    if run.sliding is not None:
        raise UserError(
            f"a sliding window of {run.sliding} tokens; blocks are for layers that see all tokens"
        )
    unit = clocks[0].unit
    if not run.page:
        raise UserError(
            f"max_model_len={layout.capacity} is less than {unit} tokens, which are encoded together"
        )
    if run.page % unit:
        raise UserError(
            f"{unit} tokens are encoded together, and a block has {run.page}; wanted a multiple of {unit}"
        )


def create_kv_caches(
    shape: KVShape,
    method: MethodLike,
    num_blocks: int,
    max_model_len: int,
    *,
    block_size: int | None = None,
    slots: int | None = None,
    chunk: int = 512,
    **options: Any,
) -> list[PagedLayer]:
    """Make the empty caches of all layers.

    Args:
        shape: the model's keys and values. With a rope, `attention` gets queries and keys before
            RoPE.
        method: how they are stored, with window=0 and sinks=0.
        num_blocks: the number of blocks. The engine's scheduler gives them to sequences.
        max_model_len: the most tokens of a sequence.
        block_size: the tokens of a block; by default the fewest that bodies allow.
        slots: how many sequences have a tail at a time, where `mamba_state_indices` says which tail
            is theirs. None: every block has one.
        chunk: the most tokens of a sequence that are worked off together.
        options: further options of `kvq.init_cache`, such as `dtype` and `target`.

    Returns:
        One cache for every layer.

    Raises:
        UserError: a number below 1; a method with a window, sinks or eviction, or whose layers
            depend on each other; a layer with a sliding window; a mesh; and as `kvq.init_cache`,
            such as for a `block_size` that bodies do not allow.
    """
    check_counts(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=block_size,
        slots=slots,
        chunk=chunk,
    )
    method, pool = parse(method), {"pages": num_blocks, "page_tokens": block_size}

    def layer(index: int) -> PagedLayer:
        cache = init_cache(
            shape.layer(index),
            _layer_method(method, shape, index),
            1,
            max_model_len,
            **pool,
            **options,
        )
        _check_method(cache.layout)
        if cache.layout.rules is not None:
            raise UserError("a cache of blocks lies on one device; leave mesh= and sharding= out")
        (run,), (state,) = runs_of(cache.layout), cache.runs
        # The method has no window, so that the ring of a row's window holds one unit: a tail.
        count = slots or num_blocks
        tails = {
            name: jnp.zeros((1, count, *x.shape[2:]), x.dtype) for name, x in state.window.items()
        }
        ends = jnp.zeros((count,), jnp.int32)
        return PagedLayer(
            state.body, tails, ends, cache.layout, min(chunk, run.slots), slots is not None
        )

    return [layer(index) for index in range(shape.num_layers)]


def layer_constants(
    shape: KVShape, method: MethodLike, constants: Any, layer: int
) -> tuple[dict, ...]:
    """Cut one layer's calibrated constants out of those of all, for `attention`.

    Args:
        shape: the model's keys and values.
        method: how they are stored.
        constants: those of an artifact.
        layer: the layer's number.

    Returns:
        The layer's constants.

    Raises:
        UserError: missing constants, or a layer that does not exist.
    """
    layer = check_integer("layer", layer, 0, shape.num_layers - 1)
    layout = CacheLayout(
        shape=shape.alone, method=parse(method), capacity=1, dtype="float32", layers="unroll"
    )
    return (run_constants(constants, layout)[layer],)


def attention(
    kv_cache: Any,
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    attention_metadata: Any,
    mesh: Mesh | None = None,
    head_dim_original: int | None = None,
    *,
    sm_scale: float | None = None,
    sinks: Float[Array, " sinks"] | None = None,
    attn_logits_soft_cap: float | None = None,
    constants: Any = None,
    **engine_options: Any,
) -> tuple[PagedLayer, Float[Array, "T H D"]]:
    """Attend to the tokens in the sequences' blocks and to their new tokens, and store the new
    tokens.

    The function is pure. It is for use inside jit, with the cache donated.

    Args:
        kv_cache: the layer's cache, one of `create_kv_caches`.
        q: queries of the new tokens of all sequences, one sequence behind the other.
        k: keys of the same tokens.
        v: values of the same tokens.
        attention_metadata: a `Metadata`, or the engine's own.
        mesh: a mesh of one device.
        head_dim_original: the shape's head_dim, where the arrays have further channels of zeros.
            These are not stored.
        sm_scale: what multiplies the scores, by default as the shape says.
        sinks: a logit of each query head, as in `kvq.attend_layer`.
        attn_logits_soft_cap: what caps the scores, by default as the shape says.
        constants: the layer's calibrated constants (`layer_constants`).
        engine_options: further arguments of the engine's `attention`, with values that change
            nothing (`NEUTRAL`).

    Returns:
        The cache that holds the tokens, and the output in q's dtype.

        - Tokens of no sequence get 0.
        - All new tokens of a sequence get NaN, and none is stored, where its metadata are
          impossible or its tail is lost. Impossible are a table with too few blocks or with a block
          that does not exist, and numbers of tokens that do not fit the arrays or the layout. A
          tail is lost when tokens beyond its unit are taken back, as after drafts.
        - In a sequence with a new token that is not finite, this token and later ones of the call
          get NaN. Its numbers that are not finite are stored as 0, which later calls see.

    Raises:
        UserError: for arrays of other shapes, missing constants, and features that are not served:
            further arguments that ask for something (scales of quantised inputs, attention in
            chunks or in both directions, caches that layers share, drafts), and meshes of several
            devices.
    """
    _check_options(mesh, attention_metadata, engine_options)
    md = _metadata(kv_cache, attention_metadata)
    shape, width = kv_cache.layout.shape, q.shape[-1]
    if head_dim_original == shape.head_dim:
        q, k, v = (x[..., :head_dim_original] for x in (q, k, v))
    for name, x, heads in (
        ("q", q, shape.num_heads),
        ("k", k, shape.num_kv_heads),
        ("v", v, shape.num_kv_heads),
    ):
        expected = q.shape[0], heads, shape.head_dim
        if x.shape != expected:
            raise UserError(
                f"{name} has shape {list(x.shape)}; wanted {list(expected)}: new tokens, heads, head_dim"
            )
    # Attention multiplies scores by the shape's scale. Queries take up the quotient.
    if sm_scale is not None:
        q = q * jnp.asarray(sm_scale / (shape.scale or shape.head_dim**-0.5), q.dtype)
    kv_cache, out = _attention(
        kv_cache, q, k, v, md, sinks, constants, softcap=attn_logits_soft_cap
    )
    return kv_cache, jnp.pad(out, ((0, 0), (0, 0), (0, width - shape.head_dim)))


# Arguments of the engine's `attention` that are not served, each with the values that ask for
# nothing.
NEUTRAL = {
    "attention_chunk_size": (None,),
    "q_scale": (None,),
    "k_scale": (None,),
    "v_scale": (None,),
    "update_kv_cache": (True,),
    "use_causal_mask": (None, True),
    "decode_query_size": (1,),
}
IGNORED = ("shared_attention_metadata", "attention_backend")  # arguments that may have any value


def _check_options(mesh: Mesh | None, metadata: Any, engine_options: dict[str, Any]) -> None:
    """Raise UserError for what the engine may ask of its own attention and this one does not
    serve."""
    if mesh is not None and mesh.size > 1:
        raise UserError(f"a mesh of {mesh.size} devices; caches of blocks lie on one device")
    for name, value in engine_options.items():
        # Compared by identity: an array has no truth value, and 1 is not True.
        if name not in IGNORED and not any(value is neutral for neutral in NEUTRAL.get(name, ())):
            hint = (
                f"; left out, or {NEUTRAL[name][-1]}"
                if name in NEUTRAL
                else ", which is no argument"
            )
            raise UserError(f"attention over our blocks has no {name}={value!r}{hint}")
    if getattr(metadata, "pcp", None) is not None or not getattr(metadata, "use_causal_mask", True):
        raise UserError(
            "attention over our blocks is causal and of one device; the metadata ask for another"
        )


def _metadata(kv_cache: Any, metadata: Any) -> Metadata:
    """Read the engine's metadata. Raises UserError for arrays whose shapes do not agree."""
    if not isinstance(kv_cache, PagedLayer):
        raise UserError(
            f"kv_cache is a {type(kv_cache).__name__}; wanted one of create_kv_caches(...)"
        )
    md = Metadata(*(getattr(metadata, name, None) for name in Metadata._fields))
    check_integers("seq_lens", md.seq_lens, ("max_seqs",), "the tokens of every sequence")
    count, width = md.seq_lens.shape[0], table_width(kv_cache.layout)
    check_integers(
        "query_start_loc", md.query_start_loc, (count + 1,), "where every sequence's tokens begin"
    )
    check_integers(
        "request_distribution",
        md.request_distribution,
        (3,),
        "of which the last counts the sequences",
    )
    check_integers(
        "block_tables", md.block_tables, ("max_seqs * width",), "the blocks of every sequence"
    )
    if md.block_tables.size % count or md.block_tables.size < count * width:
        raise UserError(
            f"block_tables has {md.block_tables.size} entries for {count} sequences; wanted as many for each, and at "
            f"least {width}, the blocks of {kv_cache.layout.capacity} tokens"
        )
    if not kv_cache.by_slot:
        return md._replace(mamba_state_indices=None)
    check_integers(
        "mamba_state_indices", md.mamba_state_indices, (count,), "the slot of every sequence's tail"
    )
    return md


class _Sequences(NamedTuple):
    """The sequences of a call, S of them.

    Attributes:
        cached: How many tokens each had before the call.
        first: Where its new tokens begin in the flat array.
        count: How many new tokens it has.
        table: Its blocks, N at most.
        source: Which tail is its own before the call.
        target: Which tail is its own after the call.
    """

    cached: Int[Array, " S"]
    first: Int[Array, " S"]
    count: Int[Array, " S"]
    table: Int[Array, "S N"]
    source: Int[Array, " S"]
    target: Int[Array, " S"]


def _sequences(
    layer: PagedLayer, md: Metadata, length: int
) -> tuple[_Sequences, Bool[Array, " T"]]:
    """Read a call's sequences, and mark the new tokens of those with impossible metadata or a lost
    tail.

    Such sequences are returned without tokens and blocks, so that nothing is read or stored of
    them."""
    assert layer.layout.pool is not None
    max_seqs, size, blocks = md.seq_lens.shape[0], layer.block_size, layer.layout.pool.pages
    lengths, start, table = (
        x.astype(jnp.int32) for x in (md.seq_lens, md.query_start_loc, md.block_tables)
    )
    table = table.reshape(max_seqs, -1)
    is_sequence = jnp.arange(max_seqs) < md.request_distribution[-1]
    first, count = start[:-1], jnp.where(is_sequence, start[1:] - start[:-1], 0)
    cached = jnp.where(is_sequence, lengths - count, 0)

    def tail(tokens: Int[Array, " S"]) -> Int[Array, " S"]:
        """Find the tails of sequences that hold `tokens` tokens: by default in the block of the
        last one."""
        if md.mamba_state_indices is not None:
            return md.mamba_state_indices.astype(jnp.int32)
        return jnp.take_along_axis(
            table, (jnp.maximum(tokens - 1, 0) // size)[:, None], 1, mode="clip"
        )[:, 0]

    # In a layer without a window the ring holds one unit.
    source, target, unit, num_tails = (
        tail(cached),
        tail(lengths),
        layer.run.ring,
        layer.ends.shape[0],
    )
    block_mask = jnp.arange(table.shape[1])[None] < -(-lengths // size)[:, None]
    lacks_block = (
        (block_mask & ((table < 0) | (table >= blocks))).any(1)
        | (target < 0)
        | (target >= num_tails)
    )
    out_of_range = (
        (first < 0)
        | (count < 0)
        | (first + count > length)
        | (cached < 0)
        | (lengths > layer.layout.capacity)
    )
    # Where `cached` is not whole units, the last unit's tokens must be in the tail. The tail was
    # last written with token number `end` - 1. That must be the last cached token, or a later one
    # of the same unit. Otherwise the sequence went on to another unit before tokens were taken
    # back, or another sequence took the tail.
    end = layer.ends.at[source].get(mode="clip")
    lost_tail = (cached % unit > 0) & ((end < cached) | ((end - 1) // unit != cached // unit))
    fault = is_sequence & (lacks_block | out_of_range | lost_tail)
    tokens = jnp.arange(length)[None]
    token_fault = (fault[:, None] & (tokens >= first[:, None]) & (tokens < start[1:, None])).any(0)
    cached, count = (jnp.where(fault, 0, x) for x in (cached, count))
    table = jnp.where(block_mask & ~fault[:, None], table, NO_PAGE)[:, : table_width(layer.layout)]
    return _Sequences(cached, first, count, table, source, target), token_fault


# The body, and tails [1, S, unit, W] per source in the order of the sequences.
Stored = tuple[dict, dict]
Step = Callable[..., tuple[Stored, Float[Array, "B T H D"]]]


def _step(
    layout: CacheLayout,
    constants,
    sinks,
    softcap: float | None,
    stored: Stored,
    rows: _Sequences,
    new,
) -> tuple[Stored, Any]:
    """Attend with new tokens of some sequences, and append them.

    Args:
        layout: The layer's layout.
        constants: The layer's calibrated constants.
        sinks: As in `attention`.
        softcap: What caps the scores; None: the shape says it.
        stored: The body, and the tails of these sequences.
        rows: The sequences, which are the rows of a cache.
        new: q, k and v of the new tokens, [B, T, heads, D] each.

    Returns:
        (what is stored after the call, the output)."""
    (body, tails), (q, k, v) = stored, new
    (run,), no_overflow = runs_of(layout), jnp.zeros(rows.cached.shape, bool)
    # A cache over the same arrays: no sinks, tails as windows, blocks as pages, all whole units
    # flushed.
    state = Run(body, {}, tails, (rows.cached // run.ring,))
    cache = Cache((state,), rows.cached, no_overflow, rows.cached, layout, pages=rows.table)
    inputs = LayerInput(q, k, v, rows.count, constants=constants, sinks=sinks)
    partial, sources = attend_checked(cache, 0, inputs, softcap=softcap)
    (state,) = append(cache, [sources], rows.count, constants=constants).runs
    return (state.body, state.window), partial.out


def _single_tokens(
    step: Step, stored: Stored, sequences: _Sequences, new, size: int
) -> tuple[Stored, Float[Array, "N H D"]]:
    """Work off the sequences with one new token.

    Returns:
        (what is stored after them, their output in a flat array). The array has room for `size`
        further tokens, because `_chunks` writes whole chunks. It has 0 for the tokens of other
        sequences."""
    row_mask, length = sequences.count == 1, new[0].shape[0]
    # Other sequences become empty rows. Nothing of them is read or written.
    rows = sequences._replace(
        cached=jnp.where(row_mask, sequences.cached, 0),
        count=row_mask.astype(jnp.int32),
        table=jnp.where(row_mask[:, None], sequences.table, NO_PAGE),
    )
    token = jnp.clip(rows.first, 0, length - 1)
    (body, tails), out = step(stored, rows, [x[token][:, None] for x in new])
    tails = {
        name: jnp.where(row_mask[None, :, None, None], x, stored[1][name])
        for name, x in tails.items()
    }
    flat_out = jnp.zeros((length + size, *out.shape[2:]), out.dtype)
    return (body, tails), flat_out.at[jnp.where(row_mask, token, length + size)].set(
        out[:, 0], mode="drop"
    )


def _chunks(
    step: Step, stored: Stored, sequences: _Sequences, new, size: int, out: Float[Array, "N H D"]
) -> tuple[Stored, Float[Array, "N H D"]]:
    """Work off the sequences with several new tokens, in chunks of `size` tokens.

    Returns:
        (what is stored after them, `out` with their output)."""
    chunk_counts = jnp.where(sequences.count > 1, -(-sequences.count // size), 0)
    chunk_ends = jnp.cumsum(chunk_counts)
    # A chunk that is not full may begin with the last token. It is cut as a whole chunk all the
    # same.
    new = [jnp.pad(x, ((0, size), (0, 0), (0, 0))) for x in new]

    def chunk(number, loop):
        """Work off chunk `number`, counted over all sequences: of the sequence `row` the tokens
        from `offset` on."""
        ((body, tails), flat_out), row = loop, jnp.searchsorted(chunk_ends, number, side="right")
        offset = (number - (chunk_ends[row] - chunk_counts[row])) * size
        rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), sequences)
        count = jnp.minimum(rows.count - offset, size)
        rows = rows._replace(cached=rows.cached + offset, first=rows.first + offset, count=count)

        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, rows.first[0], size)

        tail = {name: jax.lax.dynamic_slice_in_dim(x, row, 1, 1) for name, x in tails.items()}
        (body, tail), out = step((body, tail), rows, [cut(x)[None] for x in new])
        tails = {
            name: jax.lax.dynamic_update_slice_in_dim(x, tail[name], row, 1)
            for name, x in tails.items()
        }
        # Behind the tokens of a chunk that is not full stands the output of other sequences, which
        # must stay.
        out = jnp.where((jnp.arange(size) < rows.count)[:, None, None], out[0], cut(flat_out))
        return (body, tails), jax.lax.dynamic_update_slice_in_dim(flat_out, out, rows.first[0], 0)

    return jax.lax.fori_loop(0, chunk_ends[-1], chunk, (stored, out))


def _attention(
    layer: PagedLayer, q, k, v, md: Metadata, sinks, constants, *, softcap: float | None
):
    """Do `attention` after its checks."""
    new, length, size = (q, k, v), q.shape[0], min(layer.chunk, q.shape[0])
    sequences, token_fault = _sequences(layer, md, length)
    step = functools.partial(_step, layer.layout, constants, sinks, softcap)
    # Tails are put in the order of the sequences, which are the rows of a cache, and put back at
    # the end.
    tails = {
        name: jnp.take(x, sequences.source, axis=1, mode="clip") for name, x in layer.tails.items()
    }
    stored, out = _single_tokens(step, (layer.body, tails), sequences, new, size)
    (body, tails), out = _chunks(step, stored, sequences, new, size, out)
    # A sequence without new tokens leaves its tail where it is.
    target = jnp.where(sequences.count > 0, sequences.target, layer.ends.shape[0])
    tails = {name: x.at[:, target].set(tails[name], mode="drop") for name, x in layer.tails.items()}
    ends = layer.ends.at[target].set(sequences.cached + sequences.count, mode="drop")
    out = jnp.where(token_fault[:, None, None], jnp.nan, out[:length])
    return layer.replace(body=body, tails=tails, ends=ends), out


_attention = kept_program(_attention, static_argnames=("softcap",))
