"""safetensors as the pytree of weights (kvqjax/model/weight_trees.py), without torch.

Hugging Face stores linear layers as [out, in]. Ours are [in, out] and stacked over layers.

Parameters are read one after the other, some layers of one at a time. Every device reads only the
slice that it holds. The layers are written into their place in the stack, in place (the stack is
donated). So a load needs memory for the weights and `PIECE` bytes, or one layer's experts.

This file is in the order of a load: names, parameters and their tensors, the choice of tensors,
reading and placing.
"""

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvqjax._errors import UserError
from kvqjax._files import path_of, read_object
from kvqjax.model.checkpoint import (
    Checkpoint,
    StoredWeight,
    Tensor,
    decode_slice,
    find_weight,
    open_checkpoint,
    read_slice,
    sample,
)
from kvqjax.model.config import ModelConfig
from kvqjax.model.hf_config import Scheme, read_scheme
from kvqjax.model.hf_families import FAMILIES
from kvqjax.model.tensor_rows import Order, TensorRows, rows_of
from kvqjax.model.weight_codes import code_weight, place_codes
from kvqjax.model.weight_trees import (
    CHOSEN,
    MATRICES,
    LayerMatrices,
    Params,
    Rows,
    as_multiplied,
    init_params,
    is_coded,
    tiles_of,
)

ShardingRule = Callable[[str], jax.sharding.Sharding]

PIECE = 2**28  # bytes of layers that are read before they are written into their stack
PART = 2**24  # numbers of a tensor that are decoded at a time, 64 MiB in float32
_PROGRESS_AFTER_SECONDS = 2.0  # a shorter load shows no bar


# --- Names ---

# Our names -> those of Hugging Face. Names under "layers/" exist once per layer, those with {} once
# per expert too. Names that differ in one family are in kvqjax/model/hf_families.py.
_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers/attn_norm": "input_layernorm.weight",
    "layers/mlp_norm": "post_attention_layernorm.weight",
    "layers/router": "mlp.gate.weight",
    "layers/shared_router": "mlp.shared_expert_gate.weight",
    **{f"layers/{n}": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    **{f"layers/experts_{n}": f"mlp.experts.{{}}.{n}_proj.weight" for n in ("gate", "up", "down")},
    **{f"layers/shared_{n}": f"mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")},
    **{f"layers/{n}": f"self_attn.{n}_proj.weight" for n in "qkvo"},
    **{f"layers/{n}_bias": f"self_attn.{n}_proj.bias" for n in "qkvo"},
    **{f"layers/experts_{n}_bias": f"mlp.experts.{n}_proj_bias" for n in ("gate", "up", "down")},
    **{f"layers/{n}_norm": f"self_attn.{n}_norm.weight" for n in "qk"},
    "layers/q_gate": "self_attn.q_proj.weight",
    "layers/delta_o": "linear_attn.out_proj.weight",
    "layers/delta_norm": "linear_attn.norm.weight",
    "layers/delta_rate": "linear_attn.A_log",
    "layers/delta_bias": "linear_attn.dt_bias",
    **{f"layers/delta_{n}": f"linear_attn.in_proj_{n}.weight" for n in "zab"},
    **{f"layers/delta_{n}": "linear_attn.in_proj_qkv.weight" for n in "qkv"},
    **{f"layers/delta_conv_{n}": "linear_attn.conv1d.weight" for n in "qkv"},
}

# Prefixes in a checkpoint of pictures and text: of the language part -> of a language model alone;
# of the vision part.
_LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_VISION_PARTS = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.")
_VISION = (*_VISION_PARTS, *(f"model.{part}" for part in _VISION_PARTS))
# Matrices whose products RoPE rotates.
_TURNED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
_CONVOLUTION = "linear_attn.conv1d.weight"  # [channels, 1, tokens]
_DRAFTING = "mtp."  # prefix of layers that draft tokens, which are not computed here
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes by data-parallel training and by torch.compile

# Newer releases of transformers save one tensor for all experts of a layer; some families always
# do. It has the gate and up matrices of every expert, one after the other or interleaved column by
# column.
_FUSED = {"gate_up_proj": ("experts_gate", "experts_up"), "down_proj": ("experts_down",)}
_FUSED_NAME = re.compile(
    r"(model\.layers\.\d+\.)((?:mlp|feed_forward)\.experts\.(gate_up_proj|down_proj))(_scale_inv|_bias|_blocks|_scales)?"
)
_FUSED_PARTS = {
    "": ".weight",
    "_scale_inv": ".weight_scale_inv",
    "_blocks": ".blocks",
    "_scales": ".exponents",
}
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")


def _hf_name(config: ModelConfig, name: str) -> str:
    """Return the name of a parameter in checkpoints of the model's family."""
    family = FAMILIES.get(config.architecture)
    if family is not None and name in family.tensor_names:
        return family.tensor_names[name]
    return _NAMES[name]


class Parameter(NamedTuple):
    """One entry of the pytree of weights.

    Attributes:
        name: the name in the tree ("embed", "layers/q").
        layers: the layers that have it; None outside of layers.
        shape: the shape in one layer.
        tensors: for each of these layers, the names of the tensors of its experts, or of the one
            tensor.
        matrix: whether Hugging Face stores it with its last two axes swapped.
        rows: whether its stack is `Rows`.
        picked: the rows of its tensors that it has, in its own order; None: all rows in the
            tensors' order.
    """

    name: str
    layers: tuple[int, ...] | None
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, ...], ...]
    matrix: bool
    rows: bool
    picked: TensorRows | None = None

    @property
    def by_expert(self) -> bool:
        """Say whether each expert's matrix is a tensor of its own."""
        return self.matrix and len(self.shape) == 3


def parameters(config: ModelConfig) -> list[Parameter]:
    """List all parameters of a model, from the one place that defines their shapes
    (`init_params`)."""
    tree = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    layers = tree.pop("layers")
    described = []
    for name, leaf in tree.items():
        tensors = ((_hf_name(config, name),),)
        described.append(Parameter(name, None, leaf.shape, tensors, name in MATRICES, False))
    for name, leaf in layers.items():
        described.append(_layer_parameter(config, f"layers/{name}", leaf))
    return described


def _layer_parameter(config: ModelConfig, name: str, leaf: Any) -> Parameter:
    """Describe a parameter of layers, whose stack is `leaf`."""
    rows = isinstance(leaf, Rows)
    shape = leaf.stack.shape if rows else leaf.shape
    numbers = leaf.layers if rows else tuple(range(shape[0]))
    hf_name = _hf_name(config, name)
    experts = range(shape[1] if "{}" in hf_name else 1)
    names = [hf_name.format(expert) for expert in experts]
    tensors = []
    for index in numbers:
        tensors.append(tuple(f"model.layers.{index}.{tensor_name}" for tensor_name in names))
    family = FAMILIES.get(config.architecture)
    is_packed = family is not None and family.packed_recurrence
    picked = rows_of(config, name, is_packed)
    return Parameter(name, numbers, shape[1:], tuple(tensors), name in MATRICES, rows, picked)


# --- A checkpoint's tensors under the names that transformers gives a language model alone ---


def _named_alike(
    checkpoint: Checkpoint, config: ModelConfig, folder: Path, text_only: bool
) -> Checkpoint:
    """Rename and cut a checkpoint's tensors to those of `_NAMES` (with the family's own names).

    Args:
        checkpoint: the tensors as stored.
        folder: of the checkpoint, for messages.
        text_only: leave out a vision part.

    Returns:
        Tensors by name. None of their data is read.

    Raises:
        UserError: for a vision part without `text_only`, and for tensors of experts in a shape that
            is not known.
    """
    checkpoint = _without_wrappers(checkpoint)
    checkpoint = _language_part(checkpoint, folder, text_only)
    if config.recurrent is not None:
        tensors = {}
        for name, tensor in checkpoint.items():
            if name.startswith(_DRAFTING):
                continue
            if name.endswith(_CONVOLUTION) and len(tensor.shape) == 3:
                # [channels, 1, tokens] -> [channels, tokens]
                tensor = tensor.part(name, (slice(None), 0))
            tensors[name] = tensor
        checkpoint = tensors
    family = FAMILIES.get(config.architecture)
    if family is not None and family.paired_rope:
        # These families rotate channels 2i and 2i + 1, this library channels i and i + D/2. Rows of
        # the matrices are read in another order, so that both are the same.
        tensors = {}
        for name, tensor in checkpoint.items():
            order = _pairs(config) if name.endswith(_TURNED) else None
            tensors[name] = dataclasses.replace(tensor, order=order)
        checkpoint = tensors
    if config.experts is not None:
        checkpoint = _experts_apart(checkpoint, config)
    return checkpoint


def _pairs(config: ModelConfig) -> Order:
    """Return the order of rows in tensors whose rotary pairs lie side by side."""
    return Order(2, config.head_dim // 2)


def _without_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """Remove prefixes that wrappers of PyTorch put in front of all names."""
    for front in _WRAPPERS:
        if checkpoint and all(name.startswith(front) for name in checkpoint):
            checkpoint = {name.removeprefix(front): tensor for name, tensor in checkpoint.items()}
    # A decoder that was saved alone lacks the "model." of its names.
    if "embed_tokens.weight" in checkpoint:
        tensors = {}
        for name, tensor in checkpoint.items():
            if name.startswith(("embed_tokens.", "layers.", "norm.")):
                name = f"model.{name}"
            tensors[name] = tensor
        return tensors
    return checkpoint


def _language_part(checkpoint: Checkpoint, folder: Path, text_only: bool) -> Checkpoint:
    """Return the tensors of the language model. With `text_only` those of a vision part are left
    out; without it they raise UserError."""
    vision = sorted(name for name in checkpoint if name.startswith(_VISION))
    if vision and len(vision) == len(checkpoint):
        raise UserError(
            f"{folder}: holds a vision model alone ({vision[0]!r} and its like), no language model"
        )
    if vision and not text_only:
        raise UserError(
            f"{folder}: tensor {vision[0]!r} is of the vision part ({len(vision)} such), which is not computed here",
            "{text_only} loads the language part without it",
            text_only=True,
        )
    tensors = {}
    for name, tensor in checkpoint.items():
        if name.startswith(_VISION):
            continue
        for front, front_alone in _LANGUAGE.items():
            if name.startswith(front):
                name = front_alone + name.removeprefix(front)
                break
        tensors[name] = tensor
    return tensors


def _experts_apart(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """Replace fused tensors of experts by the single matrices that they hold."""
    tensors = {}
    for name, tensor in checkpoint.items():
        fused = _FUSED_NAME.fullmatch(name)
        router = _ROUTER.fullmatch(name)
        if fused:
            layer, place, kind, part = fused.groups()
            inward = _lies_inward(checkpoint.get(layer + place), config, kind)
            tensors |= _expert_matrices(tensor, config, layer, kind, part or "", inward)
        elif router:
            tensors[router[1] + _hf_name(config, "layers/router")] = tensor
        else:
            tensors[name] = tensor
    return tensors


def _lies_inward(tensor: Tensor | None, config: ModelConfig, fused: str) -> bool:
    """Say whether the matrices in a fused tensor of experts are [inputs, outputs]. Else they are
    [outputs, inputs]."""
    fields = FAMILIES[config.architecture].experts
    experts = config.experts
    assert fields is not None
    assert experts is not None
    if tensor is None:  # codes of MXFP4 are stored without this tensor, as [outputs, inputs]
        return False
    if fields.inward:  # the family always stores [inputs, outputs]
        return True
    # Other families are known by the shape. A square matrix is [outputs, inputs].
    inward = (config.width, 2 * experts.width)
    if fused == "down_proj":
        inward = (experts.width, config.width)
    outward = inward[::-1]
    return tensor.shape[1:] == inward and inward != outward


def _expert_matrices(
    tensor: Tensor, config: ModelConfig, layer: str, fused: str, part: str, inward: bool
) -> Checkpoint:
    """Cut a fused tensor into the matrices of single experts.

    Args:
        tensor: [experts, inputs, matrices * outputs] if `inward`, else [experts, matrices *
            outputs, inputs]. Biases are [experts, matrices * outputs].
        layer: prefix of the layer's names.
        fused: "gate_up_proj" or "down_proj".
        part: what the tensor holds of the matrices: "" for their numbers, "_bias", or parts of
            codes.
        inward: whether matrices are [inputs, outputs].

    Returns:
        The matrices under the names that they have in files of single matrices. Biases stay
        together for all experts.

    Raises:
        UserError: for another shape.
    """
    names = _FUSED[fused]
    fields = FAMILIES[config.architecture].experts
    is_bias = part == "_bias"
    axis = 1 if is_bias or not inward else 2  # of outputs
    axes = {"_bias": 2, "_blocks": 4}.get(part, 3)
    if len(tensor.shape) != axes or 0 in tensor.shape or tensor.shape[axis] % len(names):
        layout = f"[experts, {len(names)} x outputs, inputs]"
        if axis == 2:
            layout = f"[experts, inputs, {len(names)} x outputs]"
        raise UserError(
            f"{tensor.file}: {tensor.name!r} has shape {list(tensor.shape)}, wanted {layout}"
        )
    size = tensor.shape[axis] // len(names)
    tensors = {}
    for number, matrix in enumerate(names):
        span = slice(number * size, (number + 1) * size)
        if fields is not None and fields.interleaved:
            span = slice(number, None, len(names))
        if is_bias:
            name = layer + _hf_name(config, f"layers/{matrix}_bias")
            tensors[name] = tensor.part(name, (slice(None), span))
            continue
        of_experts = _hf_name(config, f"layers/{matrix}").removesuffix(".weight")
        for expert in range(tensor.shape[0]):
            name = layer + of_experts.format(expert) + _FUSED_PARTS[part]
            cut = (expert, slice(None), span) if axis == 2 else (expert, span)
            tensors[name] = tensor.part(name, cut, turned=axis == 2)
    return tensors


# --- The choice of tensors: all that the model needs. A checkpoint with others is refused ---

# Ends of names of tensors that are no weights: frequencies that the config has too, and scales of
# rounded activations.
_IGNORED = ("rotary_emb.inv_freq", ".activation_scale", ".input_scale")

# The stored weights of a parameter: by row of its stack, then by expert.
Sources = list[list[StoredWeight]]


def _find_sources(
    checkpoint: Checkpoint, config: ModelConfig, scheme: Scheme | None, folder: Path
) -> dict[str, Sources]:
    """Find the stored weights of each parameter. Raises UserError for a checkpoint that lacks a
    tensor, and for a tensor of another shape or dtype, or that no parameter needs."""
    used: set[str] = set()
    sources = {}
    for parameter in parameters(config):
        rows = []
        for names in parameter.tensors:
            row = [_find_source(checkpoint, parameter, name, scheme, folder) for name in names]
            rows.append(row)
            for weight in row:
                stem = weight.name.removesuffix(".weight")
                used.add(weight.name)
                used.update(f"{stem}.{part}" for part in weight.parts)
                used.add(f"{stem}.g_idx")  # the order of inputs in GPTQ; other schemes ignore it
        sources[parameter.name] = rows
    _check_unread(checkpoint, used, config, folder)
    return sources


def _find_source(
    checkpoint: Checkpoint, parameter: Parameter, name: str, scheme: Scheme | None, folder: Path
) -> StoredWeight:
    """Find the stored weight `name` of a parameter. Raises UserError where it is missing or has
    another shape."""
    shape = parameter.shape[1:] if parameter.by_expert else parameter.shape
    if parameter.matrix:
        shape = shape[::-1]
    if parameter.picked is not None:
        shape = (parameter.picked.total, *shape[1:])
    weight = find_weight(checkpoint, name, scheme)
    if weight is None:
        cause = f"{folder}: tensor {name!r} is missing"
        if parameter.name == "head":
            cause += "; config.json says tie_word_embeddings = false"
        raise UserError(cause)
    if weight.shape != shape:
        raise UserError(
            f"{weight.file}: {name!r} has shape {list(weight.shape)}, wanted {list(shape)}"
        )
    if parameter.picked is not None:
        weight = weight.picked(parameter.picked.rows)
    return weight


def _check_unread(checkpoint: Checkpoint, used: set[str], config: ModelConfig, folder: Path):
    """Raise UserError for tensors that no parameter needs: without them the model would not be the
    checkpoint's."""
    unread = sorted(name for name in checkpoint.keys() - used if not name.endswith(_IGNORED))
    if config.tied_embeddings and "lm_head.weight" in unread:
        unread.remove("lm_head.weight")
        head = checkpoint["lm_head.weight"]
        embedding = checkpoint["model.embed_tokens.weight"]
        if sample(head) != sample(embedding):
            raise UserError(
                f"{folder}: tie_word_embeddings = true, but lm_head.weight differs from embed_tokens.weight"
            )
    # GPTQ's tools write biases of zeros for every matrix.
    unread = [name for name in unread if not _is_zero_bias(checkpoint, name)]
    if unread:
        raise UserError(
            f"{folder}: tensor {unread[0]!r} is not part of {config.architecture} ({len(unread)} such)"
        )


def _is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Say whether a tensor is the bias of a GPTQ matrix and has zeros alone."""
    stem = name.removesuffix(".bias")
    if stem == name or f"{stem}.qweight" not in checkpoint:
        return False
    bias = read_slice(checkpoint[name], (slice(None),))
    return not bias.any()


# --- Loading ---


def load_params(
    folder: str | Path,
    config: ModelConfig,
    dtype=jnp.float32,
    sharding: ShardingRule | None = None,
    bits: int | None = None,
    *,
    layers: str = "scan",
    text_only: bool = False,
) -> Params:
    """Load the weights of a Hugging Face folder.

    Args:
        folder: the folder. FP8, GPTQ and AWQ matrices are decoded (kvqjax/model/checkpoint.py).
        dtype: the dtype of the weights.
        sharding: `sharding(name)` gives each parameter's placement. Names are those of the pytree
            joined by "/", such as "embed" or "layers/q" (axes as in kvqjax/model/decoder.py, [L,
            in, out]). None: everything on the default device.
        bits: 8 or 4 stores the layers' matrices as codes (kvqjax/model/weight_codes.py), made layer
            by layer.
        layers: "scan" gives stacks; "switch" gives stacks, and `LayerMatrices` in place of most
            matrices' stacks; "unroll" gives a list.
        text_only: leave out a vision part.

    Returns:
        The pytree of weights.

    Raises:
        UserError: for a missing folder, file or tensor, a wrong shape, a truncated or foreign file.
    """
    folder = path_of(folder)
    dtype = np.dtype(dtype)
    checkpoint = _named_alike(open_checkpoint(folder), config, folder, text_only)
    file = folder / "config.json"
    scheme = read_scheme(read_object(file)) if file.exists() else None
    sources = _find_sources(checkpoint, config, scheme, folder)

    params: dict[str, Any] = {}
    stacks: dict[str, Any] = {}  # of layers, by name
    layer_list: list[dict] = [{} for _ in range(config.depth)]  # the same, layer by layer
    with _progress(_stored_bytes(sources)) as advance:
        for parameter in parameters(config):
            name = parameter.name.removeprefix("layers/")
            place = sharding and sharding(parameter.name)
            by_layer = layers == "unroll" or (layers == "switch" and name in CHOSEN)
            pieces = _pieces(
                parameter, sources[parameter.name], dtype, place, bits, by_layer, advance
            )
            if parameter.layers is None:
                _, piece = next(pieces)
                params[name] = piece[0]
            elif layers == "unroll":
                for row, piece in pieces:
                    layer_list[parameter.layers[row]][name] = _only_layer(piece)
            else:
                stacks[name] = _of_all_layers(pieces, parameter, by_layer)
    params["layers"] = layer_list if layers == "unroll" else stacks
    return as_multiplied(params)


def _stored_bytes(sources: dict[str, Sources]) -> int:
    """Count the bytes of a checkpoint that will be read."""
    total = 0
    for rows in sources.values():
        for row in rows:
            total += sum(weight.nbytes for weight in row)
    return total


def _only_layer(piece: Any) -> Any:
    """Take the layer out of a piece of one layer."""
    return jax.tree.map(lambda array: array[0], piece)


def _of_all_layers(pieces: Iterator, parameter: Parameter, by_layer: bool) -> Any:
    """Put the pieces of a parameter of layers together.

    Args:
        by_layer: whether a piece is one layer, which stays an array of its own. Else all layers are
            one stack.
    """
    assert parameter.layers is not None
    if by_layer:
        stack = LayerMatrices(tuple(_only_layer(piece) for _, piece in pieces))
    else:
        stack = _stack(pieces, len(parameter.layers), parameter.name)
    return Rows(stack, parameter.layers) if parameter.rows else stack


def _pieces(
    parameter: Parameter,
    sources: Sources,
    dtype: np.dtype,
    place,
    bits: int | None,
    by_layer: bool,
    advance: Callable,
) -> Iterator[tuple[int, Any]]:
    """Read a parameter piece by piece.

    Args:
        parameter: the parameter. One outside of layers counts as a stack of one row.
        sources: its stored weights.
        dtype: of the weights.
        place: the parameter's placement; None: the default device.
        bits: of codes; None: numbers are not coded.
        by_layer: whether a piece is one layer; else it is the number of layers that `PIECE` bytes
            hold.
        advance: advance(nbytes) is called with the bytes that were read.

    Yields:
        The first row of each piece, and the piece: an array or codes [rows, ...].
    """
    has_layers = parameter.layers is not None
    is_code = bits is not None and is_coded(parameter.name)
    count = 1  # layers of a piece
    if has_layers and not by_layer:
        layer_bytes = max(1, math.prod(parameter.shape) * dtype.itemsize)
        count = max(1, PIECE // layer_bytes)
    for row in range(0, len(sources), count):
        part = sources[row : row + count]
        shape = (len(part), *parameter.shape)
        fill = functools.partial(_fill, part, parameter, shape, dtype)
        stack_place = _over_layers(place) if has_layers else _as_stack(place)
        piece: Any = _placed(fill, shape, dtype, stack_place)
        advance(sum(weight.nbytes for weights in part for weight in weights))
        if is_code:
            piece = code_weight(piece, bits)
            if isinstance(place, NamedSharding):
                piece = place_codes(piece, place)
        yield row, piece
        del piece  # its memory is free before the next piece is read


def _stack(pieces: Iterator, rows: int, name: str):
    """Write the pieces of all layers into one stack of `rows` rows, in the tiles of the parameter
    `name`."""
    _, piece = next(pieces)
    if jax.tree.leaves(piece)[0].shape[0] == rows:
        return piece
    places = jax.tree.map(lambda x: tiles_of(name, x, x.sharding), piece)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), piece)

    def zeros():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # The donated stack is changed in place.
    put = jax.jit(_put, donate_argnums=0, out_shardings=places)
    stack = put(jax.jit(zeros, out_shardings=places)(), piece, 0)
    for row, piece in pieces:
        stack = put(stack, piece, row)
        del piece  # as in _pieces
    return stack


def _put(stack, piece, row):
    """Put the piece of some layers into a stack, from `row` on."""

    def write(array, part):
        return jax.lax.dynamic_update_slice_in_dim(array, part, row, 0)

    return jax.tree.map(write, stack, piece)


def _placed(fill: Callable, shape: tuple[int, ...], dtype, sharding) -> jax.Array:
    """Make an array. Every device gets `fill(index)` for its own slice. Devices with the same slice
    share one call of `fill`."""
    if sharding is None:
        return jax.device_put(fill((slice(None),) * len(shape)))

    @functools.cache
    def fill_once(spans: tuple[tuple[int, int], ...]) -> np.ndarray:
        return fill(tuple(slice(*span) for span in spans))

    def of_device(index):
        # Slices cannot be keys of a cache (before Python 3.12), so pairs of numbers are.
        spans = []
        for span, size in zip(index, shape, strict=True):
            start, stop, _ = span.indices(size)
            spans.append((start, stop))
        return fill_once(tuple(spans))

    return jax.make_array_from_callback(shape, sharding, of_device, dtype=dtype)


def _over_layers(sharding):
    """Return the placement of a stack as it is. Raises UserError where it splits layers, which are
    written one after the other."""
    if isinstance(sharding, NamedSharding) and sharding.spec and sharding.spec[0] is not None:
        raise UserError(f"layers cannot be split over a mesh, as {sharding.spec} would")
    return sharding


def _as_stack(sharding):
    """Turn the placement of a parameter outside of layers into that of a stack of one row."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _fill(
    sources: Sources,
    parameter: Parameter,
    shape: tuple[int, ...],
    dtype: np.dtype,
    index: tuple[slice, ...],
) -> np.ndarray:
    """Read one device's slice of a parameter of some layers.

    Args:
        sources: the stored weights of these layers.
        shape: of the whole parameter in these layers, [layers, ...], or [layers, experts, ...].
        dtype: of the weights.
        index: the slice.

    Returns:
        The slice. Every tensor is read from disk into its place.

    Raises:
        UserError: for numbers that exceed float16's range, if that is the dtype.
    """
    by_expert = parameter.by_expert
    index = tuple(slice(*span.indices(size)) for span, size in zip(index, shape, strict=True))
    inner = index[2:] if by_expert else index[1:]  # the slice of one tensor
    if parameter.matrix:
        inner = inner[::-1]  # stored as [out, in]
    block = np.empty([span.stop - span.start for span in index], dtype)
    for layer, weights in zip(block, sources[index[0]], strict=True):
        places = [layer]
        if by_expert:
            places = layer
            weights = weights[index[1]]
        for place, weight in zip(places, weights, strict=True):
            target = place.T if parameter.matrix else place  # a view in the order of the tensor
            rows = max(1, PART // max(1, math.prod(target.shape[1:])))  # decoded at a time
            for row in range(0, len(target), rows):
                first = inner[0].start + row
                stop = min(first + rows, inner[0].stop)
                numbers = decode_slice(weight, (slice(first, stop), *inner[1:]))
                # An overflow to float16 is refused with the tensor's name, not warned of.
                with np.errstate(over="ignore"):
                    target[row : row + rows] = numbers.astype(dtype)
            if dtype == np.float16 and not np.isfinite(place).all():
                raise UserError(
                    f"{weight.file}: {weight.name!r} exceeds float16's range; load as bf16 or f32"
                )
    return block


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr once loading has taken more than two seconds. Yields
    `advance(nbytes)`."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    visible = console.is_terminal or console.is_jupyter
    bar = Progress(
        "loading weights", *columns, console=console, transient=True, disable=not visible
    )
    task = bar.add_task("", total=total)
    begun = time.monotonic()

    def advance(nbytes: int):
        if time.monotonic() - begun > _PROGRESS_AFTER_SECONDS:
            bar.start()
        bar.advance(task, nbytes)

    try:
        yield advance
    finally:
        # Stopping a bar that never showed would print an empty line.
        if bar.live.is_started:
            bar.stop()
