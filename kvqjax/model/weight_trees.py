"""The weights of a decoder as a pytree: their names and shapes, the forms of layers, and their
tiles in memory.

    params = {"embed": [V, E], "norm": [E], "head": [E, V] (absent when tied), "layers": stacks or a
    list}

Layers are stored as stacks, one array for each name with the layers in front, or as a list, one
dict for each layer. A stacked matrix may be replaced by `LayerMatrices`, which have one array for
each layer; a loop over layers chooses one of them. kvqjax/model/decoder.py says which form is for
what.

Weights that only some layers have, or that are read expert by expert, are `Rows`, a stack of these
layers alone:

    {"q": [L, E, H*D], "gate": Rows([2, E, F], layers=(0, 3)), "experts_gate": Rows([L-2, X, E, F],
    layers=(1, 2, ...))}

Layers are of two kinds, attention and recurrent. In a model that has both, the weights of each kind
are `Rows` as well. `layers_of` finds the layers of a kind by these weights.

A loop over stacked layers has the number of its layer as data. So a `Row` has, as data, the row of
a stack that belongs to the layer, and whether there is one. The row's matrices are cut out of the
stack where they are used, inside a branch or a loop over experts. Cutting out the whole row before
would copy all experts of the layer.
"""

import functools
import math
import operator
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
from kvqjax.ops.xla_workarounds import few_rows, times_matrix

Params = dict
Layer = dict
Leaf = Any  # an array, a CodedWeight, or a value that a tree map puts in its place

BY_EXPERT = ("experts_gate", "experts_up", "experts_down")  # [X, E, F], [X, E, F], [X, F, E]
OF_EXPERTS = (*BY_EXPERT, *(f"{name}_bias" for name in BY_EXPERT))  # biases [X, F], [X, F], [X, E]
# Matrices and biases of layers with experts.
SPARSE = ("router", *BY_EXPERT, "shared_router", "shared_gate", "shared_up", "shared_down")
_SPARSE_BIASES = ("router_bias", *OF_EXPERTS[len(BY_EXPERT) :])

# Matrices of layers of attention and of recurrent layers.
_ATTENTION = ("q", "k", "v", "o", "q_gate", "q_latent", "k_up", "v_up")
_RECURRENT = tuple(f"delta_{name}" for name in ("q", "k", "v", "z", "a", "b", "o"))
# All parameters that only layers of one kind have. The first one of each kind is in all layers of
# the kind.
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

# The parameters that are matrices [in, out]. The others are vectors, and the embedding is a table
# of rows. The kernels of convolutions are [channels, tokens], as they are stored.
MATRICES = frozenset({
    "head",
    *(f"layers/{name}" for name in (*_ATTENTION, *_RECURRENT, "gate", "up", "down", *SPARSE)),
})  # fmt: skip
# The matrices that are `LayerMatrices` in the form "switch". Experts are not: they are cut out of
# their stacks one by one, which copies no more than is read. Up-projections of latents are not:
# their products are no plain products.
CHOSEN = frozenset({*_ATTENTION, *_RECURRENT, "gate", "up", "down"} - {"k_up", "v_up"})
# Small matrices whose errors would cost most: they decide which experts compute, and what a
# recurrent state keeps.
_NEVER_CODED = ("layers/router", "layers/shared_router", "layers/delta_a", "layers/delta_b")


def is_coded(name: str) -> bool:
    """Say whether a parameter is stored as codes in a model with coded weights ("int8", "int4")."""
    return name.startswith("layers/") and name in MATRICES and name not in _NEVER_CODED


# --- Leaves that are rows of a stack ---


def _decoded(leaf: Leaf) -> Leaf:
    return leaf.decoded() if isinstance(leaf, CodedWeight) else leaf


class LayerMatrices(struct.PyTreeNode):
    """The matrices of several layers, each an array of its own, in place of their stack.

    XLA for CPUs copies a matrix out of a stack before it multiplies by it, which takes as long as
    the product. Here every layer has a branch that multiplies by the layer's own array. Branches
    contain products alone, which compile quickly; straight code over all layers compiles everything
    once for each layer.

    A step of SmolLM2-135M with the exact cache, one row of 512 cached tokens, measured
    on two cores on 2026-11-27, takes 42.5 ms from stacks, 32.5 ms by straight code, and 32.0 ms
    by branches. The first call takes 1.7, 12.2 and 4.4 s.

    Attributes:
        matrices: the arrays [in, out], or their codes.
    """

    matrices: tuple[Leaf, ...]

    def chosen(self, number: Int[Array, ""] | int, use: Callable, *operands):
        """Return `use(matrix, *operands)` for the matrix of this number."""
        if not isinstance(number, jax.core.Tracer):
            return use(self.matrices[int(number)], *operands)
        branches = [functools.partial(use, matrix) for matrix in self.matrices]
        return jax.lax.switch(number, branches, *operands)


class Row(struct.PyTreeNode):
    """One layer's row of a stack.

    Attributes:
        stack: the stack [N, ...], or the `LayerMatrices` in its place.
        number: the number of the row, Int[]; any number where the layer has no row.
        here: whether the layer has a row, Bool[].
    """

    stack: Leaf
    number: Leaf
    here: Leaf

    def read(self) -> Leaf:
        """Cut out the whole row, in the compute dtype."""
        if isinstance(self.stack, LayerMatrices):
            return self.stack.chosen(self.number, _decoded)

        def cut(a):
            return jax.lax.dynamic_index_in_dim(a, self.number, keepdims=False)

        return _decoded(jax.tree.map(cut, self.stack))

    @property
    def experts(self) -> int:
        """The number of experts that this device holds."""
        return jax.tree.leaves(self.stack)[0].shape[1]

    def expert(self, number: Int[Array, ""] | int) -> Leaf:
        """Cut out one expert's matrix [I, O], in the compute dtype."""

        def cut(a):
            starts = (self.number, number, *[0] * (a.ndim - 2))
            return jax.lax.dynamic_slice(a, starts, (1, 1, *a.shape[2:]))[0, 0]

        return _decoded(jax.tree.map(cut, self.stack))


class Rows(struct.PyTreeNode):
    """A stack of some of the layers.

    Attributes:
        stack: the stack, or the `LayerMatrices` in its place. Row i belongs to layer `layers[i]`.
        layers: the layers that have a row, in order.
    """

    stack: Leaf
    layers: tuple[int, ...] = struct.field(pytree_node=False)

    def row(self, layer: Int[Array, ""] | int) -> Row | None:
        """Return the row of a layer. None where the layer has none and its number is known, not
        traced."""
        if not isinstance(layer, jax.core.Tracer):
            if int(layer) not in self.layers:
                return None
            return Row(self.stack, self.layers.index(int(layer)), True)
        # Tables over all layers up to the last one with a row: its row's number, and whether it has
        # one.
        all_layers = np.arange(self.layers[-1] + 1)
        numbers = np.searchsorted(self.layers, all_layers).astype(np.int32)
        is_there = np.isin(all_layers, self.layers)
        # Layers beyond the tables have no row either.
        place = jnp.clip(layer, 0, len(all_layers) - 1)
        exists = jnp.asarray(is_there)[place] & (layer < len(all_layers))
        return Row(self.stack, jnp.asarray(numbers)[place], exists)


def read_weight(weight: Row | Leaf) -> Leaf:
    """Return a layer's weight in the compute dtype. A `Row` is cut out, codes are decoded."""
    return weight.read() if isinstance(weight, Row) else _decoded(weight)


def product(x: Float[Array, "*N I"], weight: Row | Leaf) -> Float[Array, "*N O"]:
    """Multiply rows by a layer's matrix.

    Args:
        x: the rows.
        weight: the matrix [I, O], its codes, or a `Row`.
    """

    def times(matrix, x):
        return times_matrix(x, _decoded(matrix))

    if isinstance(weight, Row) and isinstance(weight.stack, LayerMatrices):
        # Each branch has the whole product, so that no matrix is copied out.
        return weight.stack.chosen(weight.number, times, x)
    return times_matrix(x, read_weight(weight))


# --- The forms of the layers ---

FORMS = ("scan", "switch", "unroll")
# Bytes of a layer's weights. Weights of smaller layers stay in a core's cache, so that copying them
# out of a stack costs little, and stacks compile faster. It is an estimate from the size of these
# caches (2 MiB), not measured.
LARGE_LAYER = 2**20

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def mlp(
    x: Float[Array, "*N E"], gate, up, down, *, activation: str = "silu"
) -> Float[Array, "*N E"]:
    """Compute a gated MLP. The matrices may be `Row`s. Matrices with a part of the inner width, as
    devices of a mesh have them, give one term of the output."""
    inner = ACTIVATIONS[activation](product(x, gate)) * product(x, up)
    return product(few_rows(inner), down)


def is_unrolled(params: Params) -> bool:
    """Say whether the layers' weights are a list of one dict for each layer. A list has neither
    stacks nor `Row`s."""
    return isinstance(params["layers"], list | tuple)


def stack_of(leaf: Leaf) -> Leaf:
    """Return the stack of a parameter, whether all layers have a row of it or some (`Rows`)."""
    return leaf.stack if isinstance(leaf, Rows) else leaf


def layers_of(params: Params, kind: str) -> tuple[int, ...]:
    """List the layers of a kind ("attention", "recurrent"), by their numbers among all layers."""
    # A parameter that all layers of the kind have, and no others.
    first = KINDS[kind][0]
    layers = params["layers"]
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
        dtype: the compute dtype.

    Returns:
        "scan" (stacks), "switch" (stacks, and `LayerMatrices` in place of most matrices' stacks) or
        "unroll" (a list).
    """
    if platform == "gpu":
        return "unroll"
    if platform != "cpu":
        return "scan"
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config, dtype))["layers"]
    numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    layer_bytes = numbers * jnp.dtype(dtype).itemsize / config.depth
    return "switch" if layer_bytes >= LARGE_LAYER else "scan"


def unrolled(params: Params) -> Params:
    """Make a list of the layers' weights.

    Stacked matrices are taken apart one after the other. So all weights are never in memory twice,
    unless the caller keeps `params`.

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
    if isinstance(stack, LayerMatrices):
        return len(stack.matrices)
    return jax.tree.leaves(stack)[0].shape[0]


def _rows_of(stack: Leaf) -> tuple[Leaf, ...]:
    """Take a stack apart."""
    if isinstance(stack, LayerMatrices):
        return stack.matrices
    numbers = range(_row_count(stack))
    return tuple(jax.tree.map(operator.itemgetter(number), stack) for number in numbers)


def _on_stacks(change: Callable, leaf: Leaf) -> Leaf:
    """Replace the stack of a parameter by `change(stack)`."""
    if isinstance(leaf, Rows):
        return leaf.replace(stack=change(leaf.stack))
    return change(leaf)


def switched(params: Params) -> Params:
    """Make `LayerMatrices` of the stacked matrices that a loop may choose.

    Args:
        params: the weights in any form.

    Returns:
        The same weights in the form "switch".
    """

    def by_layer(stack: Leaf) -> LayerMatrices:
        return LayerMatrices(_rows_of(stack))

    layers = stacked(params)["layers"] if is_unrolled(params) else params["layers"]
    changed = {}
    for name, leaf in layers.items():
        changed[name] = _on_stacks(by_layer, leaf) if name in CHOSEN else leaf
    return params | {"layers": changed}


def stacked(params: Params) -> Params:
    """Make stacks of the layers' weights. Weights that are no stack yet are copied.

    Args:
        params: the weights in any form.

    Returns:
        The same weights with one stack for each name.
    """

    def joined(stack: Leaf) -> Leaf:
        return _joined(stack.matrices) if isinstance(stack, LayerMatrices) else stack

    layers = params["layers"]
    stacks = {}
    if not is_unrolled(params):
        for name, leaf in layers.items():
            stacks[name] = _on_stacks(joined, leaf)
        return params | {"layers": stacks}
    names: dict[str, None] = {}  # of any layer, in order
    for weights in layers:
        names |= dict.fromkeys(weights)
    for name in names:
        numbers = tuple(index for index, weights in enumerate(layers) if name in weights)
        stack = _joined([layers[index][name] for index in numbers])
        # Weights of experts are `Rows` even if all layers have them, since they are read expert by
        # expert.
        is_rows = name in (*SPARSE, *_SPARSE_BIASES) or len(numbers) < len(layers)
        stacks[name] = Rows(stack, numbers) if is_rows else stack
    return params | {"layers": stacks}


def _joined(rows: Sequence[Leaf]) -> Leaf:
    """Stack rows of arrays, or of codes."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *rows)


# --- Random weights, and with them every name and shape ---


def init_params(key: Array, config: ModelConfig, dtype=jnp.float32) -> Params:
    """Draw random weights.

    Matrices are normal with variance 1 / inputs. Those that write into the residual stream are
    divided by sqrt(2 L), so that the stream's variance does not grow with depth. Norms are one,
    biases zero.

    Args:
        key: the random key.
        dtype: the dtype of the weights.

    Returns:
        The weights, with the layers as stacks.
    """
    c = config
    count = config.depth
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
        if name.endswith(("o", "down")):
            stack = stack * (2 * count) ** -0.5
        return stack

    # Parameter -> the layers that have it, for parameters of one kind of layer.
    kinds = dict.fromkeys(KINDS["attention"], c.attention_layers)
    if c.recurrent is not None:
        kinds |= dict.fromkeys(KINDS["recurrent"], c.recurrent.layers)

    def layers_with(name: str) -> tuple[int, ...]:
        """List the layers that have a matrix."""
        if name in SPARSE:
            return c.sparse_layers
        return kinds.get(name, c.dense_layers)

    def of_kind(name: str, fill: Callable, size: tuple[int, ...]):
        """Make the stack of a vector for the layers of its kind, or for all if it belongs to no
        kind."""
        numbers = kinds.get(name, tuple(range(count)))
        stack = fill((len(numbers), *size), dtype=dtype)
        return stack if len(numbers) == count else Rows(stack, numbers)

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
    # Name -> the function that fills the vector, and its shape.
    vectors: dict[str, tuple[Callable, tuple[int, ...]]] = {}
    unit_gain = functools.partial(jnp.full, fill_value=1 - c.norm_offset)
    for name, size in norms.items():
        vectors[name] = (unit_gain, (size,))
    for name, size in _bias_sizes(c).items():
        vectors[name] = (jnp.zeros, (size,))
    vectors |= _delta_vectors(c)
    for name, (fill, size) in vectors.items():
        layers[name] = of_kind(name, fill, size)
    if c.experts is not None and c.experts.biases:
        experts = c.experts
        biases = {
            "router_bias": (experts.count,),
            "experts_gate_bias": (experts.count, experts.width),
            "experts_up_bias": (experts.count, experts.width),
            "experts_down_bias": (experts.count, c.width),
        }
        for name, shape in biases.items():
            stack = jnp.zeros((len(c.sparse_layers), *shape), dtype)
            layers[name] = Rows(stack, c.sparse_layers)
    embedding = jax.random.normal(keys["embed"], (c.vocab_size, c.width), dtype) * 0.02
    params = {
        "embed": embedding,
        "norm": jnp.full((c.width,), 1 - c.norm_offset, dtype),
        "layers": layers,
    }
    if not c.tied_embeddings:
        head = jax.random.normal(keys["head"], (c.width, c.vocab_size), dtype)
        params["head"] = head * c.width**-0.5
    return params


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices of a layer of attention."""
    c = config
    sizes = config.latent_heads
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
    shapes: dict[str, tuple[int, ...]] = {
        "q": (c.width, c.query_width),
        "k": (c.width, c.kv_width),
        "v": (c.width, c.kv_width),
        "o": (c.query_width, c.width),
    }
    if c.output_gate:
        shapes["q_gate"] = (c.width, c.query_width)
    return shapes


def _bias_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes of the vectors of a layer of attention that are no norms."""
    c = config
    sizes = {}
    if c.qkv_bias:
        sizes |= {"q_bias": c.query_width, "k_bias": c.kv_width, "v_bias": c.kv_width}
    if c.output_bias:
        sizes["o_bias"] = c.width
    if c.score_sinks:
        sizes["score_sinks"] = c.num_heads
    return sizes


def _delta_matrices(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices of a recurrent layer."""
    c = config.recurrent
    if c is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in c.widths.items():
        shapes[f"delta_{name}"] = (config.width, size)
    shapes["delta_z"] = (config.width, c.widths["v"])
    shapes["delta_a"] = (config.width, c.value_heads)
    shapes["delta_b"] = (config.width, c.value_heads)
    shapes["delta_o"] = (c.widths["v"], config.width)
    return shapes


def _delta_vectors(config: ModelConfig) -> dict[str, tuple[Callable, tuple[int, ...]]]:
    """Return, for every other parameter of a recurrent layer, the function that fills it, and its
    shape. A convolution begins as a mean over its tokens."""
    c = config.recurrent
    if c is None:
        return {}
    mean = functools.partial(jnp.full, fill_value=1 / c.kernel)
    vectors: dict[str, tuple[Callable, tuple[int, ...]]] = {}
    for name, size in c.widths.items():
        vectors[f"delta_conv_{name}"] = (mean, (size, c.kernel))
    vectors["delta_rate"] = (jnp.zeros, (c.value_heads,))
    vectors["delta_bias"] = (jnp.zeros, (c.value_heads,))
    vectors["delta_norm"] = (jnp.ones, (c.value_dim,))
    return vectors


def _mlp_shapes(prefix: str, width: int, inner: int, *lead: int) -> dict[str, tuple[int, ...]]:
    inward = (*lead, width, inner)
    outward = (*lead, inner, width)
    return {f"{prefix}gate": inward, f"{prefix}up": inward, f"{prefix}down": outward}


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices that a layer with experts has in place of an MLP."""
    width = config.width
    experts = config.experts
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
# XLA for a TPU v7x multiplies by 16-bit matrices in tiles of 16 x 128 numbers, but stores arrays in
# tiles of 8 x 128 by default. Every call would then copy all weights into other tiles, and need
# memory for both copies. A jitted function takes its arguments in the tiles in which they are
# stored. So matrices are stored in the tiles of products. The embedding keeps the default tiles,
# from which its rows are read, and a head that is tied to it is copied at every call. Arrays
# without 16-bit numbers keep the default tiles, too.

CHIP = "TPU7x"  # the first letters of these chips' device kinds
TALL = ((16, 128), (2, 1))  # tiles of 16 x 128 numbers, two rows to a 32-bit word


def tiles_of(name: str, x, place: Sharding) -> Sharding | Format:
    """Return the placement of a parameter, with its tiles.

    Args:
        name: the name of the parameter ("head", "layers/q").
        x: anything of the shape and dtype of the parameter.
        place: the placement without tiles.

    Returns:
        `place` itself where the tiles are XLA's default, else `place` with the tiles.
    """
    chip = next(iter(place.device_set)).device_kind
    if not chip.startswith(CHIP) or name not in MATRICES or x.dtype.itemsize != 2:
        return place
    return Format(Layout(tuple(range(x.ndim)), tiling=TALL), place)


def as_multiplied(params: Params, put: Callable = jax.device_put) -> Params:
    """Store weights in the tiles in which their chip multiplies by them.

    Args:
        params: arrays, or shapes with a sharding.
        put: put(x, place) gives an array the placement of `tiles_of`. It is called only where that
            is another one.

    Returns:
        The same weights.
    """

    def lay(path, x):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        place = tiles_of("/".join(names), x, x.sharding)
        return x if place in (x.sharding, x.format) else put(x, place)

    return jax.tree_util.tree_map_with_path(lay, params)
