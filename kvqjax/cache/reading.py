"""Which reader attends to an encoded body: the first line of this table that takes it. The choice is static.

| reader    | takes                                                               | on                              |
|-----------|---------------------------------------------------------------------|---------------------------------|
| `kernel`  | packed bodies in the table of kernels, a few new tokens             | TPUs; GPUs after a check        |
| `stored`  | uniform codes and exact rows as they lie, up to 16 or 64 new tokens | by heads on GPUs, else by words |
| `decoded` | what else a GPU stores, up to 16 new tokens                         | GPUs                            |
| `tiles`   | all of these, 128 new tokens and more                               | GPUs, TPUs                      |
| `blocks`  | any body, any number of new tokens                                  | everywhere                      |

`stored` (by words), `blocks` and a TPU's kernels read bodies in pages where the pages lie. For the others the pages of
one layer are put side by side first. A ring (sliding windows) and a body that loses tokens (`keep=`) are for `blocks`
alone, and a score cap is beyond `kernel`. How each reader attends is in kvqjax/cache/readers/, a file each."""

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

# New tokens of a row, at most, whose scores are multiplied out with packed words: of more, decoding keys costs less
# than putting scores in order.
MOST_BY_WORDS = 64
MOST_RECENT = 512  # tokens beside a body: their keys and values lie in a TPU core's fast memory as a whole


class Ask(NamedTuple):
    """What is known of attention to a body before it is traced. The choice of a reader depends on nothing else.

    - `run`: the layers' plan, with the chip that programs are for.
    - `length`: new tokens of a row.
    - `evicted`: tokens of the body are dropped now and then, so that those left do not follow each other.
    - `softcap`: of the scores (`kvqjax.ops.attention.ScoreOptions`).
    - `dtype`: of keys and values as they come, and of what flows from layer to layer."""

    run: RunLayout
    length: int
    evicted: bool = False
    softcap: float | None = None
    dtype: str = "float32"

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.run.shape.num_heads // self.run.shape.num_kv_heads


def is_linear(ask: Ask) -> bool:
    """Say whether slot i of the body holds body token i, so that all of it can be read at once."""
    return not (ask.evicted or ask.run.wraps)


def reads_by_heads(ask: Ask) -> bool:
    """Say whether XLA reads the whole body in products, from fields that lie head by head."""
    return ask.run.wiring.fast.direct is not None and is_linear(ask) and ask.length <= FEW_QUERIES


def shared_values(ask: Ask) -> SharedValues | None:
    """Give the values that are summed before they are mapped to heads, where that is the cheaper order."""
    if reads_by_heads(ask):
        return None  # they are read as they are stored
    run, fast = ask.run, ask.run.wiring.fast
    few_queries = is_linear(ask) and ask.length <= FEW_QUERIES
    decoded_at_once = run.static_loops and few_queries and not run.wiring.chain.carry
    shared = (fast.summed if decoded_at_once or run.lanes > 1 else None) or fast.shared
    return shared if shared is not None and ask.length <= shared.most else None


def _kernel_chip(ask: Ask) -> str | None:
    """Name the kind of chip whose kernel reads the body, "tpu" or "gpu"; None where none does."""
    packed = ask.run.wiring.fast.packed
    if packed is None or not packed.straight or not is_linear(ask) or ask.softcap is not None:
        return None
    if shared_values(ask) is not ask.run.wiring.fast.shared:
        return None  # the kernel would give means of other vectors
    chip = path(packed.spec, ask.group, ask.run.slots_here, ask.length, packed.trusted)
    return None if chip == "reference" else chip


def _by_kernel(ask: Ask) -> bool:
    """A Pallas kernel reads the body as it is packed."""
    return _kernel_chip(ask) is not None


def _reads_words(ask: Ask) -> bool:
    """Say whether XLA reads packed words by sums that decode as they go."""
    fast = ask.run.wiring.fast
    if fast.packed is None or not (isinstance(fast.packed.spec, PackedSpec) and fast.packed.spec.plain):
        return False
    # Means of values that are still to be mapped by another function than the kernels' would be mapped twice.
    return is_linear(ask) and ask.length <= MOST_BY_WORDS and shared_values(ask) is fast.shared


def _as_stored(ask: Ask) -> bool:
    """XLA meets the codes where they lie."""
    return reads_by_heads(ask) or _reads_words(ask)


def _decoded(ask: Ask) -> bool:
    """XLA decodes large parts, in loops of static length: bodies on GPUs. Where layers feed each other, what flows
    between them must be what keys and values are made of, and all of it."""
    run, chain = ask.run, ask.run.wiring.chain
    exact = chain.read_in is None or ask.dtype in chain.read_in
    readable = not chain.carry or (chain.flows and exact and chain.carry.keys() == run.wiring.storage.sources.keys())
    return run.static_loops and is_linear(ask) and ask.length <= FEW_QUERIES and readable


def _in_tiles(ask: Ask) -> bool:
    """Many queries meet large tiles of decoded tokens."""
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
    """Say whether this reader of a body in pages goes from page to page. Others want a row's pages side by side."""
    packed = ask.run.wiring.fast.packed
    if reader == "kernel":
        return packed is not None and takes_pages(packed.spec, _kernel_chip(ask), ask.run.page)
    return reader == "blocks" or (reader == "stored" and not reads_by_heads(ask))


def reader_without_kernel(ask: Ask) -> str:
    """Name what reads a body in a program that was traced for a chip with a kernel and lowered for another."""
    return next(name for name, takes in READERS.items() if name != "kernel" and takes(ask))


def takes_recent(ask: Ask, sinks: int) -> bool:
    """Say whether the kernel takes the tokens beside the body too (sinks, window, new ones): a TPU's kernel for exact
    bodies does. Otherwise XLA runs some thirty small operations a layer for those few tokens and for merging them with
    the body, and on a TPU each takes as long as the keys and values of a few hundred tokens take its memory."""
    run = ask.run
    packed = run.wiring.fast.packed
    if packed is None or not isinstance(packed.spec, ExactSpec) or run.deal.parts > 1 or not run.slots:
        return False
    if run.page and not reads_pages("kernel", ask):
        return False
    few_queries = ask.length < MANY_QUERIES and sinks + run.ring + ask.length <= MOST_RECENT
    return few_queries and _kernel_chip(ask) == "tpu"


def readers_text(layout: CacheLayout) -> list[str]:
    """Name what reads every run's body, in layer order: "stored, blocks from 65 new tokens"."""
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
