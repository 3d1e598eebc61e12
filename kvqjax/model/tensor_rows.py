"""Finds a parameter's rows in a checkpoint's tensor that holds several parameters or another order.

A family whose queries are gated packs query and gate of a head into one matrix.

A rope that turns a part of a head's channels turns the first ones in the checkpoint. Here they
stand first in both halves of the head. So every rope turns channel i with channel i + D/2, and
pairs of other channels have the frequency 0. Keys and queries are laid out alike, so that scores do
not change.

Recurrent layers pack their projections in two ways. Attention of latents packs the latent with the
shared part of the keys, and a head's keys with its values.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvqjax.model.config import ModelConfig, RecurrentConfig
from kvqjax.model.rope import channel_order


class Order(NamedTuple):
    """The order of the rows of a file's tensor, or of its columns.

    From the row `first` on, groups of [outer, inner, size] rows lie as [inner, outer, size]. The
    two halves of a head whose rotary pairs lie side by side are such a group (`Order(2, D // 2)`).

    Attributes:
        outer: the parts of a group, in Hugging Face's order.
        inner: runs of rows in each part.
        size: rows of a run, which stay together.
        first: the rows before it lie as they are read.
        axis: 0 for rows, 1 for columns.
    """

    outer: int
    inner: int
    size: int = 1
    first: int = 0
    axis: int = 0

    def places(self, rows: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Give the places in the file of some rows in Hugging Face's order."""
        run, within = divmod(rows - self.first, self.size)
        part, number = divmod(run, self.inner)
        group, part = divmod(part, self.outer)
        moved = ((group * self.inner + number) * self.outer + part) * self.size + within
        return np.where(rows < self.first, rows, self.first + moved)


class TensorRows(NamedTuple):
    """The rows of a tensor that a parameter is, in its order, and how many the tensor has."""

    rows: Int[np.ndarray, " N"]
    total: int


def _order_here(config: ModelConfig) -> Int[np.ndarray, " D"] | None:
    """The channels of a head in the order in which they lie here; None where they lie as in the
    checkpoint."""
    dim = config.head_dim
    turned = min((rope.turned_channels(dim) for rope in config.ropes), default=dim)
    return None if turned == dim else channel_order(dim, turned, "front")


def _by_head(heads: int, size: int, first: int, order: Int[np.ndarray, " n"]) -> TensorRows:
    """Take from every head of `size` rows those from `first` on, in `order`."""
    return TensorRows(
        (np.arange(heads)[:, None] * size + first + order[None]).reshape(-1), heads * size
    )


def rows_of(config: ModelConfig, name: str, packed: bool) -> TensorRows | None:
    """The rows of its tensor that a parameter is.

    Args:
        name: the parameter ("layers/q").
        packed: whether recurrent layers have two tensors of projections, packed key head by key
            head (Qwen3-Next). Otherwise one tensor holds queries, keys and values after each other,
            and every other projection has its own.

    Returns:
        The rows; None where the tensor is the parameter.
    """
    if config.latent is not None:
        return _of_latents(config, name)
    order, dim = _order_here(config), config.head_dim
    turned = np.arange(dim) if order is None else order
    heads = {"layers/q": config.num_heads, "layers/k": config.num_kv_heads}
    if config.output_gate and name in ("layers/q", "layers/q_gate"):
        span = (0, turned) if name == "layers/q" else (dim, np.arange(dim))
        return _by_head(config.num_heads, 2 * dim, *span)
    if order is not None and name in heads:
        return _by_head(heads[name], dim, 0, order)
    if order is not None and name in ("layers/q_norm", "layers/k_norm"):
        return TensorRows(order, dim)
    part = name.removeprefix("layers/delta_")
    if config.recurrent is None or part == name:
        return None
    if part.startswith("conv_") or (not packed and part in "qkv"):
        return _after_each_other(config.recurrent, part[-1])
    return _by_key_head(config.recurrent, part) if packed and part in "qkvzab" else None


def _of_latents(config: ModelConfig, name: str) -> TensorRows | None:
    """Rows of attention of latents. Pairs of a rope lie side by side in the checkpoint."""
    sizes, latent = config.latent_heads, config.latent
    assert sizes is not None
    assert latent is not None
    turned = config.head_dim - latent
    halves = channel_order(turned, turned, "neighbours")
    if name == "layers/q":
        head_order = np.concatenate([np.arange(sizes.key_dim), sizes.key_dim + halves])
        return _by_head(config.num_heads, len(head_order), 0, head_order)
    if name in ("layers/k", "layers/v"):
        return TensorRows(
            latent + halves if name == "layers/k" else np.arange(latent), config.head_dim
        )
    spans = {"layers/k_up": (0, sizes.key_dim), "layers/v_up": (sizes.key_dim, sizes.value_dim)}
    if name not in spans:
        return None
    first, count = spans[name]
    return _by_head(config.num_heads, sizes.key_dim + sizes.value_dim, first, np.arange(count))


def _after_each_other(shape: RecurrentConfig, part: str) -> TensorRows:
    """Queries, keys and values one after the other."""
    names = list(shape.widths)
    first = sum(shape.widths[name] for name in names[: names.index(part)])
    return TensorRows(first + np.arange(shape.widths[part]), sum(shape.widths.values()))


def _by_key_head(shape: RecurrentConfig, part: str) -> TensorRows:
    """Rows of a tensor that is packed key head by key head. A head's rows are its query, key,
    values and gates, or the writes and decays of its value heads."""
    group = shape.value_heads // shape.key_heads
    sizes = {
        "q": shape.key_dim,
        "k": shape.key_dim,
        "v": group * shape.value_dim,
        "z": group * shape.value_dim,
    }
    if part in "ab":
        sizes = {"b": group, "a": group}
    first = sum(sizes[name] for name in list(sizes)[: list(sizes).index(part)])
    return _by_head(shape.key_heads, sum(sizes.values()), first, np.arange(sizes[part]))
