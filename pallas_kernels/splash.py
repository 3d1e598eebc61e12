"""Attention of many queries to exact keys and values on TPUs, by JAX's own splash attention.

Splash attention takes queries and keys in blocks, and skips blocks of keys that a block of queries
does not see. Here it gets these blocks as arrays, so that one program serves every offset and
length."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial, oldest_seen
from kvqjax.pallas_kernels.chips import LANES

MOST_QUERIES, MOST_KEYS = 1024, 2048  # in a block
MOST_AT_ONCE = 1024  # keys of one product within a block
# Splash asks which keys a query sees with one int32 number for each query. Where that number must
# hold the oldest and the newest key, the newest one has this number of lower bits.
LIMIT_BITS = 15
MOST_LIMITED = 2**LIMIT_BITS
HEAD_DIMS = (64, 96, 128, 256)  # the kernel was compiled for these


class Blocks(NamedTuple):
    """Sizes of blocks: queries of a block, keys of a block, and keys of one product within a
    block."""

    queries: int
    keys: int
    at_once: int


def _part(length: int, most: int) -> int:
    """Return the largest multiple of LANES that divides `length`, at most `most`; 0 where there is
    none."""
    return max((n for n in range(LANES, most + 1, LANES) if length % n == 0), default=0)


def block_sizes(queries: int, keys: int) -> Blocks:
    """Choose the blocks for these numbers of queries and keys. A size is 0 if none fits."""
    block = _part(keys, MOST_KEYS)
    return Blocks(_part(queries, MOST_QUERIES), block, _part(block, MOST_AT_ONCE))


def fits(queries: int, keys: int, head_dim: int) -> bool:
    """Say whether a kernel takes these numbers of queries and keys."""
    return head_dim in HEAD_DIMS and min(block_sizes(queries, keys)) > 0


def seen_blocks(
    newest: Int[Array, " T"],
    keys: int,
    blocks: Blocks,
    sliding: int | None,
    oldest=None,
    chunked: bool = False,
):
    """Find the blocks of keys that each block of queries sees.

    Args:
        newest: The newest key that each query sees; -1: it sees none.
        keys: How many keys there are.
        blocks: The sizes of blocks.
        sliding: Tokens of a sliding window, or None.
        oldest: The oldest key that each query sees, or None.
        chunked: Whether `sliding` are chunks instead of windows, as in `splash_attention`.

    Returns:
        (number of the first block of keys, one past the last), [N] each for N blocks of queries.
        The second number is 0 where a block of queries sees no key."""
    by_block = newest.reshape(-1, blocks.queries)
    last = jnp.minimum(by_block.max(1), keys - 1) // blocks.keys + 1
    if sliding is None and oldest is None:
        return jnp.zeros_like(last), last
    reach = (
        oldest_seen(newest, sliding, chunked)
        if sliding is not None and oldest is None
        else jnp.asarray(oldest)
    )
    # Queries that see nothing reach back no further than the others.
    reach = jnp.where(by_block < 0, keys, reach.reshape(by_block.shape)).min(1)
    return jnp.clip(reach // blocks.keys, 0, jnp.maximum(last - 1, 0)), last


def _sees(sliding: int | None, chunked: bool, newest, key):
    """Say whether queries see keys. Splash calls this with arrays `newest` and `key` of one
    shape."""
    if chunked and sliding is not None:
        return (key <= newest) & (key >= newest // sliding * sliding)
    return key <= newest if sliding is None else (key <= newest) & (key > newest - sliding)


def _sees_both(limits, key):
    """Say the same where one number holds the oldest key in its upper bits and the newest key in
    its lower ones."""
    return (key <= (limits & (MOST_LIMITED - 1))) & (key >= limits >> LIMIT_BITS)


def _limits(
    newest: Int[Array, " T"], keys: int, sliding: int | None, oldest, chunked: bool
) -> tuple[Callable, Int[Array, " T"]]:
    """Choose how splash finds out which keys a query sees.

    Returns:
        (the function that it calls, the number [T] of each query that it calls it with).

    Raises:
        ValueError: Too many keys for two limits in one number."""
    if oldest is None:
        return functools.partial(_sees, sliding, chunked), newest
    if keys >= MOST_LIMITED:
        raise ValueError(f"{keys} keys are too many for two limits")
    return _sees_both, jnp.clip(newest, 0, keys - 1) + MOST_LIMITED * jnp.clip(
        oldest, 0, keys
    ).astype(jnp.int32)


def _mask(
    newest: Int[Array, " T"], keys: int, blocks: Blocks, sliding: int | None, oldest, chunked: bool
) -> tuple[Array, Array]:
    """Say for every one of N blocks of queries and M blocks of keys which block of keys is fetched,
    and whether it is seen: [1, N, M] each."""
    first, last = (x[:, None] for x in seen_blocks(newest, keys, blocks, sliding, oldest, chunked))
    every = jnp.arange(keys // blocks.keys)[None]
    # In place of a block that is not seen the nearest one that is seen is named. It is fetched
    # anyway, so that nothing more is moved.
    nearest = jnp.clip(every, first, jnp.maximum(last - 1, first))
    seen = (every >= first) & (every < last)
    return nearest[None], seen.astype(jnp.int32)[None]


def splash_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "N S D"],
    v: Float[Array, "N S D"],
    newest: Int[Array, " T"],
    sliding: int | None = None,
    interpret: bool = False,
    oldest: Int[Array, " T"] | None = None,
    softcap: float | None = None,
    chunked: bool = False,
) -> Partial:
    """Attend with T queries of every row to S keys.

    Args:
        k: Keys by head: N = B * K.
        v: Values likewise.
        newest: The newest key that each query sees; -1: it sees none.
        sliding: Each query sees only the newest `sliding` of these keys; None: all.
        interpret: As in `pl.pallas_call`.
        oldest: Each query sees only keys from this one on; None: all. Only with fewer than
            MOST_LIMITED keys.
        softcap: As in `kvqjax.ops.attention.ScoreOptions`.
        chunked: Each query sees only the keys from the latest multiple of `sliding` on.

    Returns:
        Attention to these keys. Before it is returned, it is rounded to the queries' dtype.

    Raises:
        ValueError: Too many keys for `oldest`."""
    # Imported only here: not every jaxlib has the compiler of TPU kernels.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    batch, length, heads, dim = q.shape
    blocks, keys = block_sizes(length, k.shape[1]), k.shape[1]
    by_head = (
        (q * jnp.asarray(dim**-0.5, q.dtype))
        .transpose(0, 2, 1, 3)
        .reshape(batch * heads, length, dim)
    )
    # Heads of fewer than 128 channels have tokens on the lanes. With channels there, XLA would pad
    # and copy them.
    layout = splash.QKVLayout.SEQ_MINOR if dim < LANES else splash.QKVLayout.HEAD_DIM_MINOR
    newest = newest.astype(jnp.int32)
    nearest, seen = _mask(newest, keys, blocks, sliding, oldest, chunked)
    sees, limits = _limits(newest, keys, sliding, oldest, chunked)
    info: Any = (nearest, None, seen, None, limits, None)  # typed for NumPy's arrays
    kernel = splash.SplashAttentionKernel(
        MaskInfo(*info),
        None,
        None,
        block_sizes=splash.BlockSizes(*blocks, k_layout=layout, v_layout=layout),
        is_mqa=False,
        save_residuals=True,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=None,
        mask_function=sees,
        interpret=interpret,
    )
    out, (lse,) = kernel(by_head, k, v)
    empty = (newest < 0)[None, :]
    out = jnp.where(empty[..., None], 0, out.astype(jnp.float32)).reshape(batch, heads, length, dim)
    lse = jnp.where(empty, -jnp.inf, lse).reshape(batch, heads, length)
    return Partial(jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2))
