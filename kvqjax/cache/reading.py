"""The choice of a reader. A reader is one of five ways in which attention reads an encoded body; each has a file in
kvqjax/cache/readers/. The first line of this table that takes a body is its reader. The choice is static.

| reader    | takes                                                               | on                              |
|-----------|---------------------------------------------------------------------|---------------------------------|
| `kernel`  | packed bodies in the table of kernels, a few new tokens             | TPUs; GPUs after a check        |
| `stored`  | uniform codes and exact rows as they lie, up to 16 or 64 new tokens | by heads on GPUs, else by words |
| `decoded` | what else a GPU stores, up to 16 new tokens                         | GPUs                            |
| `tiles`   | all of these, 128 new tokens and more                               | GPUs, TPUs                      |
| `blocks`  | any body, any number of new tokens                                  | everywhere                      |

Rings (sliding windows) and bodies that evict tokens (`keep=`) are for `blocks` alone. `kernel` takes no body whose
scores have a cap.

`stored` (by words), `blocks` and a TPU's kernels read bodies in pages where the pages lie. For the others the pages of
one layer are put side by side first."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.run_layout import MANY_QUERIES, RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.methods.direct import FEW_QUERIES
from kvqjax.methods.layer_cache import SharedValues
from kvqjax.pallas_kernels.dispatch import path, takes_pages
from kvqjax.pallas_kernels.exact import ExactSpec
from kvqjax.pallas_kernels.packed import PackedSpec

__all__ = [
    "READERS",
    "Ask",
    "reader_of",
    "reader_without_kernel",
    "readers_text",
    "reads_by_heads",
    "reads_pages",
    "shared_values",
    "takes_recent",
]

# New tokens of a row, at most, whose scores are computed from packed words. Their scores must then be put in order. For
# more tokens that costs more than decoding the keys does.
MOST_BY_WORDS = 64
# Tokens beside a body, at most, that a TPU's kernel takes. Their keys and values lie in its fast memory as a whole.
MOST_RECENT = 512


class Ask(NamedTuple):
    """What is known of attention to a body before it is traced. The choice of a reader depends on nothing else.

    Attributes:
        run: The layers' plan, with the chip that programs are for.
        length: New tokens of a row.
        evicted: Whether the body evicts tokens. The tokens in its slots are then in no order.
        softcap: The cap of the scores, if there is one (`kvqjax.ops.attention.ScoreOptions`).
        dtype: The dtype of keys and values as they come, and of the carry."""

    run: RunLayout
    length: int
    evicted: bool = False
    softcap: float | None = None
    dtype: str = "float32"

    @property
    def group(self) -> int:
        """Count the query heads of a KV head."""
        return self.run.shape.num_heads // self.run.shape.num_kv_heads


def is_linear(ask: Ask) -> bool:
    """Say whether slot i of the body holds body token i, so that all of it can be read at once."""
    return not (ask.evicted or ask.run.wraps)


def reads_by_heads(ask: Ask) -> bool:
    """Say whether XLA reads the whole body in products, from fields that lie head by head."""
    return ask.run.wiring.fast.direct is not None and is_linear(ask) and ask.length <= FEW_QUERIES


def shared_values(ask: Ask) -> SharedValues | None:
    """Choose whether values that heads share are summed first, and the sums mapped to heads.

    Args:
        ask: What is known of the attention.

    Returns:
        How to read and map such values. None: each head's own values are summed."""
    if reads_by_heads(ask):
        return None  # they are read as they are stored
    run, fast = ask.run, ask.run.wiring.fast
    few_queries = is_linear(ask) and ask.length <= FEW_QUERIES
    decoded_at_once = run.static_loops and few_queries and not run.wiring.chain.carry
    shared = fast.shared
    if fast.summed is not None and (decoded_at_once or run.lanes > 1):
        shared = fast.summed
    # For more queries than `most` it is cheaper to map each token's values.
    return shared if shared is not None and ask.length <= shared.most else None


def _kernel_chip(ask: Ask) -> str | None:
    """Name the kind of chip whose kernel reads the body, "tpu" or "gpu"; None where none does."""
    packed = ask.run.wiring.fast.packed
    if packed is None or not packed.straight or not is_linear(ask) or ask.softcap is not None:
        return None
    if shared_values(ask) is not ask.run.wiring.fast.shared:
        # The caller maps the kernel's sums by `shared.finish`. The kernel sums the vectors of `Fast.shared`, or where
        # that is None the heads' own values.
        return None
    chip = path(packed.spec, ask.group, ask.run.slots_here, ask.length, packed.trusted)
    return None if chip == "reference" else chip


def _by_kernel(ask: Ask) -> bool:
    """Say whether a Pallas kernel reads the body as it is packed."""
    return _kernel_chip(ask) is not None


def _reads_words(ask: Ask) -> bool:
    """Say whether XLA reads packed words by sums that decode as they go."""
    fast = ask.run.wiring.fast
    if fast.packed is None or not (isinstance(fast.packed.spec, PackedSpec) and fast.packed.spec.plain):
        return False
    # As for a kernel, whose sums are mapped by `shared.finish`.
    return is_linear(ask) and ask.length <= MOST_BY_WORDS and shared_values(ask) is fast.shared


def _as_stored(ask: Ask) -> bool:
    """Say whether XLA computes with the codes where they lie."""
    return reads_by_heads(ask) or _reads_words(ask)


def _decoded(ask: Ask) -> bool:
    """Say whether XLA decodes large parts of the body, in loops of static length, as for bodies on GPUs.

    Where layers feed each other, the reader makes keys and values of the carry alone. So the carry must be the decoded
    sources, all of them and number by number."""
    run, chain = ask.run, ask.run.wiring.chain
    exact = chain.read_in is None or ask.dtype in chain.read_in
    all_sources = chain.carry.keys() == run.wiring.storage.sources.keys()
    readable = not chain.carry or (chain.flows and exact and all_sources)
    return run.static_loops and is_linear(ask) and ask.length <= FEW_QUERIES and readable


def _in_tiles(ask: Ask) -> bool:
    """Say whether many queries meet large tiles of decoded tokens."""
    run = ask.run
    return ask.length >= MANY_QUERIES and run.tiles != "off" and is_linear(ask) and run.deal.parts == 1


READERS: dict[str, Callable[[Ask], bool]] = {
    "kernel": _by_kernel,
    "stored": _as_stored,
    "decoded": _decoded,
    "tiles": _in_tiles,
    "blocks": lambda ask: True,
}


def reader_of(ask: Ask) -> str:
    """Name the first reader of the table that takes a body."""
    return next(name for name, takes in READERS.items() if takes(ask))


def reads_pages(reader: str, ask: Ask) -> bool:
    """Say whether a reader of a body in pages goes from page to page. Otherwise it wants a row's pages side by side."""
    packed = ask.run.wiring.fast.packed
    if reader == "kernel":
        return packed is not None and takes_pages(packed.spec, _kernel_chip(ask), ask.run.page)
    return reader == "blocks" or (reader == "stored" and not reads_by_heads(ask))


def reader_without_kernel(ask: Ask) -> str:
    """Name the reader of a body that has a kernel, in programs that are lowered for another platform than the kernel's
    chip."""
    return next(name for name, takes in READERS.items() if name != "kernel" and takes(ask))


def takes_recent(ask: Ask, sinks: int) -> bool:
    """Say whether the kernel also takes the tokens beside the body: sinks, window and new tokens.

    A TPU's kernel for exact bodies does. Otherwise XLA runs some thirty small operations a layer for these few tokens
    and for merging them with the body. On a TPU each of them takes as long as it takes to read the keys and values of a
    few hundred tokens.

    Args:
        ask: What is known of the attention.
        sinks: How many first tokens of a row are sinks.

    Returns:
        Whether one call of the kernel is all of the layer's attention."""
    run = ask.run
    packed = run.wiring.fast.packed
    if packed is None or not isinstance(packed.spec, ExactSpec) or run.deal.parts > 1 or not run.slots:
        return False
    if run.page and not reads_pages("kernel", ask):
        return False
    few_queries = ask.length < MANY_QUERIES and sinks + run.ring + ask.length <= MOST_RECENT
    return few_queries and _kernel_chip(ask) == "tpu"


def readers_text(layout: CacheLayout) -> list[str]:
    """Print what reads each run's body, in layer order: "stored, blocks from 65 new tokens"."""
    lines, evicted = [], layout.method.keep is not None
    for run in runs_of(layout):
        names = [
            reader_of(Ask(run, length, evicted, run.shape.softcap, layout.dtype))
            for length in range(1, MANY_QUERIES + 1)
        ]
        changes = [
            f"{name} from {length} new tokens"
            for length, (before, name) in enumerate(itertools.pairwise(names), 2)
            if name != before
        ]
        lines.append(", ".join([names[0], *changes]) if run.slots else "no body")
    return lines
