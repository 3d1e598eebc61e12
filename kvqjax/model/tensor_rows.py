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
    """Give the channels of a head in the order in which they lie here; None where they lie as in
    the checkpoint."""
    dim = config.head_dim
    # The rope that turns the fewest channels decides on the order for all layers.
    turned = min((rope.turned_channels(dim) for rope in config.ropes), default=dim)
    if turned == dim:
        return None
    return channel_order(dim, turned, "front")


def _by_head(heads: int, size: int, first: int, order: Int[np.ndarray, " n"]) -> TensorRows:
    """Take from every head of `size` rows those from `first` on, in `order`."""
    starts = np.arange(heads)[:, None] * size + first
    rows = (starts + order[None]).reshape(-1)
    return TensorRows(rows, heads * size)


def rows_of(config: ModelConfig, name: str, packed: bool) -> TensorRows | None:
    """Find the rows of its tensor that a parameter is.

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
    dim = config.head_dim
    order = _order_here(config)
    in_order = np.arange(dim)
    # With a gate a head of the tensor is its query's channels, then its gate's. A rope turns the
    # query's alone.
    if config.output_gate and name == "layers/q":
        return _by_head(config.num_heads, 2 * dim, 0, in_order if order is None else order)
    if config.output_gate and name == "layers/q_gate":
        return _by_head(config.num_heads, 2 * dim, dim, in_order)
    heads = {"layers/q": config.num_heads, "layers/k": config.num_kv_heads}
    if order is not None and name in heads:
        return _by_head(heads[name], dim, 0, order)
    if order is not None and name in ("layers/q_norm", "layers/k_norm"):
        return TensorRows(order, dim)
    part = name.removeprefix("layers/delta_")
    if config.recurrent is None or part == name:
        return None
    # The convolution is one tensor for queries, keys and values in both packings.
    if part.startswith("conv_") or (not packed and part in "qkv"):
        return _after_each_other(config.recurrent, part[-1])
    if packed and part in "qkvzab":
        return _by_key_head(config.recurrent, part)
    return None


def _of_latents(config: ModelConfig, name: str) -> TensorRows | None:
    """Find the rows of a parameter of attention of latents. Pairs of a rope lie side by side in the
    checkpoint."""
    sizes = config.latent_heads
    latent = config.latent
    assert sizes is not None
    assert latent is not None
    turned = config.head_dim - latent
    halves = channel_order(turned, turned, "neighbours")
    if name == "layers/q":
        head_order = np.concatenate([np.arange(sizes.key_dim), sizes.key_dim + halves])
        return _by_head(config.num_heads, len(head_order), 0, head_order)
    # One tensor has the latent, then the channels of the keys that a rope turns.
    if name == "layers/k":
        return TensorRows(latent + halves, config.head_dim)
    if name == "layers/v":
        return TensorRows(np.arange(latent), config.head_dim)
    # Another has of every head the matrix of its keys, then that of its values.
    both = sizes.key_dim + sizes.value_dim
    if name == "layers/k_up":
        return _by_head(config.num_heads, both, 0, np.arange(sizes.key_dim))
    if name == "layers/v_up":
        return _by_head(config.num_heads, both, sizes.key_dim, np.arange(sizes.value_dim))
    return None


def _after_each_other(shape: RecurrentConfig, part: str) -> TensorRows:
    """Find the rows of a part in a tensor of queries, keys and values, one after the other."""
    first = _before(shape.widths, part)
    return TensorRows(first + np.arange(shape.widths[part]), sum(shape.widths.values()))


def _before(sizes: dict[str, int], part: str) -> int:
    """Count the rows of the parts that stand before a part."""
    names = list(sizes)
    return sum(sizes[name] for name in names[: names.index(part)])


def _by_key_head(shape: RecurrentConfig, part: str) -> TensorRows:
    """Find the rows of a part in a tensor that is packed key head by key head. A head's rows are
    its query, key, values and gates, or the writes and decays of its value heads."""
    group = shape.value_heads // shape.key_heads
    sizes = {
        "q": shape.key_dim,
        "k": shape.key_dim,
        "v": group * shape.value_dim,
        "z": group * shape.value_dim,
    }
    if part in "ab":
        sizes = {"b": group, "a": group}
    order = np.arange(sizes[part])
    return _by_head(shape.key_heads, sum(sizes.values()), _before(sizes, part), order)
