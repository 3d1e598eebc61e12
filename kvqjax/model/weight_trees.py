"""The weights of a decoder as a pytree: their names and shapes, their forms, the tiles in which they lie.

    params = {"embed": [V, E], "norm": [E], "head": [E, V] (absent when tied), "layers": stacks or a list}

A stack has one array a name, with the layers in front. A list has one dict a layer. In place of a stacked matrix there
may be `LayerMatrices`: an array a layer, one of which a loop over layers chooses. kvqjax/model/decoder.py says which
form is for what.

Weights that only some layers have, or that are read expert by expert, are rows of a stack of their own:

    {"q": [L, E, H*D], "gate": Rows([2, E, F], layers=(0, 3)), "experts_gate": Rows([L-2, X, E, F], layers=(1, 2, ...))}

Layers are of two kinds, attention and recurrent. In a model that has both, what one kind alone has is such rows too:
`layers_of` reads off the weights which layers are of a kind.

A loop over stacked layers knows its layer only as data. So a `Row` says which row of the stack the layer has, and
whether it has one at all. The row's matrices are cut out of the stack where they are used, inside a branch or a loop
over experts. To cut the row out before would copy all experts of the layer.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int

from kvqjax.model.config import ModelConfig
from kvqjax.model.weight_codes import CodedWeight
from kvqjax.ops.xla_workarounds import times_matrix

__all__ = [
    "BY_EXPERT",
    "CHOSEN",
    "FORMS",
    "KINDS",
    "MATRICES",
    "OF_EXPERTS",
    "SPARSE",
    "Layer",
    "LayerMatrices",
    "Params",
    "Row",
    "Rows",
    "as_multiplied",
    "init_params",
    "is_coded",
    "is_unrolled",
    "layers_of",
    "product",
    "read_weight",
    "stack_of",
    "stacked",
    "stored_layers",
    "switched",
    "tiles_of",
    "unrolled",
]

Params = dict
Layer = dict
Leaf = Any  # an array, a CodedWeight, or whatever a tree map puts in its place

BY_EXPERT = ("experts_gate", "experts_up", "experts_down")  # [X, E, F], [X, E, F], [X, F, E]
OF_EXPERTS = (*BY_EXPERT, *(f"{name}_bias" for name in BY_EXPERT))  # biases [X, F], [X, F], [X, E]
SPARSE = ("router", *BY_EXPERT, "shared_router", "shared_gate", "shared_up", "shared_down")  # of layers with experts
_SPARSE_BIASES = ("router_bias", *OF_EXPERTS[len(BY_EXPERT) :])  # likewise

_ATTENTION = ("q", "k", "v", "o", "q_gate", "q_latent", "k_up", "v_up")  # matrices of a layer of attention
_RECURRENT = tuple(f"delta_{name}" for name in ("q", "k", "v", "z", "a", "b", "o"))  # of a recurrent one
# What layers of one kind have, and no others.
KINDS = {
    "attention": (
        *_ATTENTION,
        *("q_norm", "k_norm", "q_latent_norm", "latent_norm"),
        *(f"{name}_bias" for name in "qkvo"),
        "score_sinks",
    ),
    "recurrent": (
        *_RECURRENT,
        *(f"delta_{name}" for name in ("conv_q", "conv_k", "conv_v", "rate", "bias", "norm")),
    ),
}

# The parameters that are matrices [in, out]. The others are vectors, and the embedding is a table of rows. The kernels
# of convolutions are [channels, tokens], as they are stored.
MATRICES = frozenset({
    "head",
    *(f"layers/{name}" for name in (*_ATTENTION, *_RECURRENT, "gate", "up", "down", *SPARSE)),
})  # fmt: skip
# The matrices of a layer that are `LayerMatrices` where layers are chosen. Experts are cut out of their stacks one by
# one, which copies no more than is read; up-projections of latents are no plain products.
CHOSEN = frozenset({*_ATTENTION, *_RECURRENT, "gate", "up", "down"} - {"k_up", "v_up"})
# Small matrices whose products decide: which experts compute, what a state keeps.
_NEVER_CODED = ("layers/router", "layers/shared_router", "layers/delta_a", "layers/delta_b")


def is_coded(name: str) -> bool:
    """Whether a parameter is kept as codes where weights are ("int8", "int4")."""
    return name.startswith("layers/") and name in MATRICES and name not in _NEVER_CODED


# --- Leaves that are rows of a stack ---


def _decoded(leaf: Leaf) -> Leaf:
    return leaf.decoded() if isinstance(leaf, CodedWeight) else leaf


class LayerMatrices(struct.PyTreeNode):
    """A matrix of each of several layers, in place of the stack of them.

    XLA for CPUs copies a matrix out of a stack before it multiplies by it, which takes as long as the product. Here a
    branch a layer multiplies by the array itself. The branches hold nothing but products, which compile quickly, where
    straight code over all layers compiles everything as often as there are layers. A step of SmolLM2-135M, one row and
    512 cached tokens on two cores (`python -m benchmarks.layer_forms`), exact cache: 42.5 ms from stacks, 32.5 by
    straight code, 32.0 by branches; the first call takes 1.7, 12.2 and 4.4 s.

    Attributes:
        matrices: the arrays [in, out], or their codes.
    """

    matrices: tuple[Leaf, ...]

    def chosen(self, number: Int[Array, ""] | int, use: Callable, *operands):
        """Give `use(matrix, *operands)` for the matrix of this number."""
        if not isinstance(number, jax.core.Tracer):
            return use(self.matrices[int(number)], *operands)
        return jax.lax.switch(number, [functools.partial(use, matrix) for matrix in self.matrices], *operands)


class Row(struct.PyTreeNode):
    """One layer's row of a stack.

    Attributes:
        stack: the stack [N, ...], or the `LayerMatrices` in its place.
        number: the row, Int[]; any row where the layer has none.
        here: whether the layer has one, Bool[].
    """

    stack: Leaf
    number: Leaf
    here: Leaf

    def read(self) -> Leaf:
        """Cut out all of the row, in the compute dtype."""
        if isinstance(self.stack, LayerMatrices):
            return self.stack.chosen(self.number, _decoded)
        cut = lambda a: jax.lax.dynamic_index_in_dim(a, self.number, keepdims=False)  # noqa: E731
        return _decoded(jax.tree.map(cut, self.stack))

    @property
    def experts(self) -> int:
        """How many experts this device holds."""
        return jax.tree.leaves(self.stack)[0].shape[1]

    def expert(self, number: Int[Array, ""] | int) -> Leaf:
        """Cut out one expert's matrix [I, O], in the compute dtype."""

        def cut(a):
            starts = (self.number, number, *[0] * (a.ndim - 2))
            return jax.lax.dynamic_slice(a, starts, (1, 1, *a.shape[2:]))[0, 0]

        return _decoded(jax.tree.map(cut, self.stack))


class Rows(struct.PyTreeNode):
    """A stack that not every layer has a row of.

    Attributes:
        stack: the stack, or the `LayerMatrices` in its place; row i belongs to layer `layers[i]`.
        layers: the layers that have one, in order.
    """

    stack: Leaf
    layers: tuple[int, ...] = struct.field(pytree_node=False)

    def row(self, layer: Int[Array, ""] | int) -> Row | None:
        """The row of a layer; None where a plain number says that it has none."""
        if not isinstance(layer, jax.core.Tracer):
            is_there = int(layer) in self.layers
            return Row(self.stack, self.layers.index(int(layer)), True) if is_there else None
        all_layers = np.arange(self.layers[-1] + 1)
        numbers = np.searchsorted(self.layers, all_layers).astype(np.int32)
        is_there = np.isin(all_layers, self.layers)
        # Layers behind the last one of the tables have no row either.
        place = jnp.clip(layer, 0, len(all_layers) - 1)
        exists = jnp.asarray(is_there)[place] & (layer < len(all_layers))
        return Row(self.stack, jnp.asarray(numbers)[place], exists)


def read_weight(weight: Row | Leaf) -> Leaf:
    """Read a layer's weight in the compute dtype, whether or not it is a row that is still to be cut out."""
    return weight.read() if isinstance(weight, Row) else _decoded(weight)


def product(x: Float[Array, "*N I"], weight: Row | Leaf) -> Float[Array, "*N O"]:
    """Multiply rows by a layer's matrix.

    Args:
        x: the rows.
        weight: the matrix [I, O], its codes, or the `Row` that is still to be read.

    Returns:
        The products.
    """
    if isinstance(weight, Row) and isinstance(weight.stack, LayerMatrices):
        return weight.stack.chosen(weight.number, lambda matrix, x: times_matrix(x, _decoded(matrix)), x)
    return times_matrix(x, read_weight(weight))


# --- The forms of the layers ---

FORMS = ("scan", "switch", "unroll")
# Bytes of weights. Those of smaller layers stay in a core's cache, where copying them out of a stack costs little, and
# stacks compile faster. An estimate from the size of such caches (2 MiB), not measured.
LARGE_LAYER = 2**20


def is_unrolled(params: Params) -> bool:
    """Say whether the layers' weights are a list of one dict a layer. A list has no rows to be read."""
    return isinstance(params["layers"], list | tuple)


def stack_of(leaf: Leaf) -> Leaf:
    """Give the stack of a name, whether all layers have a row of it or some."""
    return leaf.stack if isinstance(leaf, Rows) else leaf


def layers_of(params: Params, kind: str) -> tuple[int, ...]:
    """Which layers are of a kind ("attention", "recurrent"), by their numbers among all layers."""
    first, layers = KINDS[kind][0], params["layers"]
    if is_unrolled(params):
        return tuple(index for index, weights in enumerate(layers) if first in weights)
    if first not in layers:
        return ()
    stack = layers[first]
    return stack.layers if isinstance(stack, Rows) else tuple(range(_row_count(stack)))


def stored_layers(platform: str, config: ModelConfig, dtype) -> str:
    """Choose how the layers of a model are stored by default.

    Args:
        platform: "cpu", "gpu" or "tpu".
        config: the config of the model.
        dtype: the compute dtype.

    Returns:
        "scan" (as stacks), "switch" (as stacks but for the matrices, which are chosen) or "unroll" (a list).
    """
    if platform != "cpu":
        return "unroll" if platform == "gpu" else "scan"
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config, dtype))["layers"]
    numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    layer_bytes = numbers * jnp.dtype(dtype).itemsize / config.depth
    return "switch" if layer_bytes >= LARGE_LAYER else "scan"


def unrolled(params: Params) -> Params:
    """Make a list of the layers' weights.

    One stacked matrix after the other is taken apart, so that no second copy of all weights exists if the caller keeps
    none.

    Args:
        params: the weights in any form.

    Returns:
        The same weights with every layer's arrays by themselves.
    """
    if is_unrolled(params):
        return params
    stacks = dict(params["layers"])
    layers = [{} for _ in stacks["attn_norm"]]
    for name in list(stacks):
        stack = stacks.pop(name)
        numbers = stack.layers if isinstance(stack, Rows) else range(len(layers))
        for index, row in zip(numbers, _rows_of(stack_of(stack)), strict=True):
            layers[index][name] = row
    return params | {"layers": layers}


def _row_count(stack: Leaf) -> int:
    """Count the rows of a stack."""
    return len(stack.matrices) if isinstance(stack, LayerMatrices) else jax.tree.leaves(stack)[0].shape[0]


def _rows_of(stack: Leaf) -> tuple[Leaf, ...]:
    """Take a stack apart."""
    if isinstance(stack, LayerMatrices):
        return stack.matrices
    return tuple(jax.tree.map(lambda a, row=row: a[row], stack) for row in range(_row_count(stack)))


def _on_stacks(change: Callable, leaf: Leaf) -> Leaf:
    """Give `change(stack)` in place of a name's stack."""
    return leaf.replace(stack=change(leaf.stack)) if isinstance(leaf, Rows) else change(leaf)


def switched(params: Params) -> Params:
    """Make `LayerMatrices` of the stacked matrices that a loop may choose.

    Args:
        params: the weights in any form.

    Returns:
        The same weights in the form "switch".
    """
    chosen = lambda stack: LayerMatrices(_rows_of(stack))  # noqa: E731
    layers = stacked(params)["layers"] if is_unrolled(params) else params["layers"]
    return params | {"layers": {name: _on_stacks(chosen, x) if name in CHOSEN else x for name, x in layers.items()}}


def stacked(params: Params) -> Params:
    """Make stacks of the layers' weights. What is no stack yet is copied.

    Args:
        params: the weights in any form.

    Returns:
        The same weights as one stack a name.
    """
    if not is_unrolled(params):
        joined = lambda stack: _joined(stack.matrices) if isinstance(stack, LayerMatrices) else stack  # noqa: E731
        return params | {"layers": {name: _on_stacks(joined, x) for name, x in params["layers"].items()}}
    layers, stacks = params["layers"], {}
    for name in dict.fromkeys(name for weights in layers for name in weights):
        numbers = tuple(index for index, weights in enumerate(layers) if name in weights)
        stack = _joined([layers[index][name] for index in numbers])
        partial = name in (*SPARSE, *_SPARSE_BIASES) or len(numbers) < len(layers)
        stacks[name] = Rows(stack, numbers) if partial else stack
    return params | {"layers": stacks}


def _joined(rows: Sequence[Leaf]) -> Leaf:
    """Make a stack of its rows."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *rows)


# --- Random weights, and with them every name and shape ---


def init_params(key: Array, config: ModelConfig, dtype=jnp.float32) -> Params:
    """Draw random weights.

    Matrices are normal with variance 1/fan_in; those that write into the residual stream are smaller by sqrt(2 L), so
    that its variance does not grow with depth. Norms are one, biases zero.

    Args:
        key: the random key.
        config: the config of the model.
        dtype: the dtype of the weights.

    Returns:
        The weights, with the layers as stacks.
    """
    c, count = config, config.depth
    shapes = (
        _attention_shapes(config)
        | _mlp_shapes("", c.width, c.mlp_width)
        | _expert_shapes(config)
        | _delta_matrices(config)
    )
    drawn = [*shapes, "embed", "head"]
    keys = dict(zip(drawn, jax.random.split(key, len(drawn)), strict=True))

    def draw(name: str, shape: tuple[int, ...], rows: int):
        stack = jax.random.normal(keys[name], (rows, *shape), dtype) * shape[-2] ** -0.5
        return stack * (2 * count) ** -0.5 if name.endswith(("o", "down")) else stack

    def layers_with(name: str) -> tuple[int, ...]:
        if name in SPARSE:
            return c.sparse_layers
        return kinds.get(name, c.dense_layers)

    kinds = dict.fromkeys(KINDS["attention"], c.attention_layers)
    if c.recurrent is not None:
        kinds |= dict.fromkeys(KINDS["recurrent"], c.recurrent.layers)

    def of_kind(name: str, make: Callable):
        """The stack that `make(layers)` gives for the layers of the kind that has the name, or for all."""
        numbers = kinds.get(name, tuple(range(count)))
        return make(len(numbers)) if len(numbers) == count else Rows(make(len(numbers)), numbers)

    layers = {}
    for name, shape in shapes.items():
        numbers = layers_with(name)
        if numbers:
            stack = draw(name, shape, len(numbers))
            complete = len(numbers) == count and name not in SPARSE
            layers[name] = stack if complete else Rows(stack, numbers)
    norms = {"attn_norm": c.width, "mlp_norm": c.width}
    if c.latent_heads is not None and c.latent is not None:
        norms |= {"q_latent_norm": c.latent_heads.query_rank, "latent_norm": c.latent}
    if c.qk_norm and c.qk_gain:
        norms |= {"q_norm": c.head_dim, "k_norm": c.head_dim}
    if c.post_norms:
        norms |= {"attn_post_norm": c.width, "mlp_post_norm": c.width}
    ones, zeros = functools.partial(jnp.full, fill_value=1 - c.norm_offset), jnp.zeros
    vectors = {name: (ones, (size,)) for name, size in norms.items()}
    vectors |= {name: (zeros, (size,)) for name, size in _bias_sizes(c).items()} | _delta_vectors(c)
    layers |= {
        name: of_kind(name, lambda rows, fill=fill, size=size: fill((rows, *size), dtype=dtype))
        for name, (fill, size) in vectors.items()
    }
    if c.experts is not None and c.experts.biases:
        x, rows = c.experts, len(c.sparse_layers)
        sizes = {"router_bias": (x.count,), "experts_gate_bias": (x.count, x.width)}
        sizes |= {"experts_up_bias": (x.count, x.width), "experts_down_bias": (x.count, c.width)}
        layers |= {n: Rows(jnp.zeros((rows, *shape), dtype), c.sparse_layers) for n, shape in sizes.items()}
    embedding = jax.random.normal(keys["embed"], (c.vocab_size, c.width), dtype) * 0.02
    params = {"embed": embedding, "norm": jnp.full((c.width,), 1 - c.norm_offset, dtype), "layers": layers}
    if not c.tied_embeddings:
        head = jax.random.normal(keys["head"], (c.width, c.vocab_size), dtype)
        params["head"] = head * c.width**-0.5
    return params


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The matrices of a layer of attention."""
    c, sizes = config, config.latent_heads
    if sizes is not None and c.latent is not None:
        turned = c.head_dim - c.latent
        return {
            "q_latent": (c.width, sizes.query_rank),
            "q": (sizes.query_rank, c.num_heads * (sizes.key_dim + turned)),
            "k": (c.width, turned),
            "v": (c.width, c.latent),
            "k_up": (c.latent, c.num_heads * sizes.key_dim),
            "v_up": (c.latent, c.num_heads * sizes.value_dim),
            "o": (c.num_heads * sizes.value_dim, c.width),
        }
    outwards, inwards = (c.width, c.query_width), (c.width, c.kv_width)
    shapes: dict[str, tuple[int, ...]] = {"q": outwards, "k": inwards, "v": inwards, "o": outwards[::-1]}
    return shapes | ({"q_gate": outwards} if c.output_gate else {})


def _bias_sizes(config: ModelConfig) -> dict[str, int]:
    """Vectors of a layer's attention that are no norms."""
    c, sizes = config, {}
    if c.qkv_bias:
        sizes |= {"q_bias": c.query_width, "k_bias": c.kv_width, "v_bias": c.kv_width}
    if c.output_bias:
        sizes["o_bias"] = c.width
    if c.score_sinks:
        sizes["score_sinks"] = c.num_heads
    return sizes


def _delta_matrices(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The matrices of a recurrent layer."""
    c = config.recurrent
    if c is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {
        f"delta_{name}": (config.width, size) for name, size in (c.widths | {"z": c.widths["v"]}).items()
    }
    shapes |= {f"delta_{name}": (config.width, c.value_heads) for name in "ab"}
    return shapes | {"delta_o": (c.widths["v"], config.width)}


def _delta_vectors(config: ModelConfig) -> dict[str, tuple[Callable, tuple[int, ...]]]:
    """What fills the other parameters of a recurrent layer, and their shapes: a convolution begins as a mean."""
    c = config.recurrent
    if c is None:
        return {}
    mean = functools.partial(jnp.full, fill_value=1 / c.kernel)
    sizes: dict[str, tuple[Callable, tuple[int, ...]]] = {
        f"delta_conv_{name}": (mean, (size, c.kernel)) for name, size in c.widths.items()
    }
    sizes |= {f"delta_{name}": (jnp.zeros, (c.value_heads,)) for name in ("rate", "bias")}
    return sizes | {"delta_norm": (jnp.ones, (c.value_dim,))}


def _mlp_shapes(prefix: str, width: int, inner: int, *lead: int) -> dict[str, tuple[int, ...]]:
    inward, outward = (*lead, width, inner), (*lead, inner, width)
    return {f"{prefix}gate": inward, f"{prefix}up": inward, f"{prefix}down": outward}


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What a sparse layer has in place of an MLP."""
    width, experts = config.width, config.experts
    if experts is None:
        return {}
    shapes = {"router": (width, experts.count)}
    shapes |= _mlp_shapes("experts_", width, experts.width, experts.count)
    if experts.shared_width:
        shapes |= _mlp_shapes("shared_", width, experts.shared_width)
    if experts.shared_width and experts.shared_gate:
        shapes["shared_router"] = (width, 1)
    return shapes


# --- Tiles ---
#
# XLA for a TPU v7x multiplies by 16-bit matrices in tiles of 16 x 128 numbers, but holds what it is given in tiles of
# 8 x 128. Every call would lay all weights out anew and hold them twice. A jitted function takes its arguments in the
# tiles in which they lie, so matrices are stored as they are multiplied. Rows of the embedding are read from the
# default tiles, so it stays as it is, and a head that is tied to it is laid out anew. What has no 16-bit numbers stays
# as it is, too.

CHIP = "TPU7x"  # how the device kinds of these chips begin
TALL = ((16, 128), (2, 1))  # tiles of 16 x 128 numbers, two rows to a 32-bit word


def tiles_of(name: str, x, place: Sharding) -> Sharding | Format:
    """Say where a parameter lies.

    Args:
        name: the name of the parameter ("head", "layers/q").
        x: anything of the shape and dtype of the parameter.
        place: the devices on which it lies.

    Returns:
        `place` itself, or its devices with the tiles there where these are not XLA's default.
    """
    chip = next(iter(place.device_set)).device_kind
    if not chip.startswith(CHIP) or name not in MATRICES or x.dtype.itemsize != 2:
        return place
    return Format(Layout(tuple(range(x.ndim)), tiling=TALL), place)


def as_multiplied(params: Params, put: Callable = jax.device_put) -> Params:
    """Lay weights in the tiles in which their chip multiplies by them.

    Args:
        params: arrays, or shapes with a sharding.
        put: `put(x, place)` moves one that lies otherwise to where `tiles_of` says.

    Returns:
        The same weights. What lies as it should is not moved.
    """

    def lay(path, x):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        place = tiles_of("/".join(names), x, x.sharding)
        return x if place in (x.sharding, x.format) else put(x, place)

    return jax.tree_util.tree_map_with_path(lay, params)
