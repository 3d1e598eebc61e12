"""The kinds of layers in config.json: which see a window or a chunk, and which are recurrent."""

from typing import Any

from kvqjax.model.config import RecurrentConfig
from kvqjax.model.hf_families import FAMILIES, Family
from kvqjax.model.hf_fields import is_integer, read_integer, refuse

# What `layer_types` calls the kinds of layers.
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
_CHUNKED_ATTENTION = "chunked_attention"
_LINEAR_ATTENTION = "linear_attention"


def _check_types(types: Any, num_layers: int, *kinds: str) -> None:
    """Raise UserError where `layer_types` is no list of `kinds` with an entry for each layer."""
    fits = isinstance(types, list) and len(types) == num_layers
    if not fits or any(name not in kinds for name in types):
        refuse("layer_types", types, f"wanted {num_layers} of {' or '.join(kinds)}")


# --- Sliding windows, layer by layer ---


def windows_from_hf(raw: dict, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Read the sliding window, or the chunk, of each layer.

    Args:
        raw: the contents of config.json, with the family's defaults.
        architecture: the architecture, a name of `FAMILIES`.
        num_layers: how many layers have attention.

    Returns:
        The tokens that each layer sees; None: all of them.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not
            compute.
    """
    family = FAMILIES[architecture]
    if family.chunked:
        return _chunks_from_hf(raw, family, num_layers)
    window = raw.get("sliding_window")
    if family.window_switch and not raw.get("use_sliding_window"):
        window = None
    if window is not None:
        window = read_integer(raw, "sliding_window")
    if window is not None and not family.sliding_window:
        name = architecture.removesuffix("ForCausalLM")
        refuse("sliding_window", window, f"{name} attends to everything; wanted null")
    types = raw.get("layer_types")
    if types is None and window is None:
        types = [FULL_ATTENTION] * num_layers
    elif types is None:
        types = _default_types(raw, family, num_layers)
    _check_types(types, num_layers, FULL_ATTENTION, SLIDING_ATTENTION)
    if window is None and SLIDING_ATTENTION in types:
        refuse("layer_types", types, f"{SLIDING_ATTENTION} without a sliding window")
    windows = tuple(window if name == SLIDING_ATTENTION else None for name in types)
    if not family.mixed_windows and windows != (window,) * num_layers:
        refuse("layer_types", types, f"all layers of {architecture} attend alike")
    return windows


def _default_types(raw: dict, family: Family, num_layers: int) -> list[str]:
    """List the layers with a sliding window if `layer_types` is absent."""
    if family.slides is None:
        return [SLIDING_ATTENTION] * num_layers
    # transformers 5 writes the period of Gemma's layers with an underscore in front.
    edge = raw.get(f"_{family.slides_by}", raw[family.slides_by])
    if not is_integer(edge) or (edge < 1 and family.slides_by != "max_window_layers"):
        refuse(family.slides_by, edge, "wanted an integer")
    types = []
    for index in range(num_layers):
        slides = family.slides(index, edge)
        types.append(SLIDING_ATTENTION if slides else FULL_ATTENTION)
    return types


# --- Chunks, and layers without a rope ---


def layers_with_rope(raw: dict, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Read which layers turn queries and keys. `no_rope_layers`, a misnomer, has a 1 for each of
    them.

    Args:
        raw: the contents of config.json, with the family's defaults.
        num_layers: how many layers have attention.

    Returns:
        Whether each layer has a rope.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not
            compute.
    """
    if not family.chunked:
        return (True,) * num_layers
    marks = raw.get("no_rope_layers")
    if not marks:
        interval = read_integer(raw, "no_rope_layer_interval")
        marks = [int((index + 1) % interval > 0) for index in range(num_layers)]
    fits = isinstance(marks, list) and len(marks) == num_layers
    if not fits or any(mark not in (0, 1) for mark in marks):
        refuse("no_rope_layers", marks, f"wanted {num_layers} of 0 or 1")
    return tuple(bool(mark) for mark in marks)


def _chunks_from_hf(raw: dict, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Read the chunk of each layer. Without `layer_types` layers with a rope have one."""
    chunk = raw.get("attention_chunk_size")
    if chunk is not None:
        chunk = read_integer(raw, "attention_chunk_size")
    types = raw.get("layer_types")
    if types is None:
        types = [FULL_ATTENTION] * num_layers
        for index, has_rope in enumerate(layers_with_rope(raw, family, num_layers)):
            if has_rope and chunk is not None:
                types[index] = _CHUNKED_ATTENTION
    _check_types(types, num_layers, FULL_ATTENTION, _CHUNKED_ATTENTION)
    if chunk is None and _CHUNKED_ATTENTION in types:
        refuse("attention_chunk_size", None, f"wanted for layers of {_CHUNKED_ATTENTION}")
    return tuple(chunk if name == _CHUNKED_ATTENTION else None for name in types)


# --- Recurrent layers among those of attention ---

_DELTA_FIELDS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}


def recurrent_from_hf(raw: dict, num_layers: int) -> RecurrentConfig | None:
    """Read the recurrent layers: those that `layer_types` names, or all but one in
    `full_attention_interval`.

    Args:
        raw: the contents of config.json, with the family's defaults.
        num_layers: how many layers the model has.

    Returns:
        The layers and their sizes; None for a model without them.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not
            compute.
    """
    types = raw.get("layer_types")
    if types is None:
        interval = read_integer(raw, "full_attention_interval")
        types = [_LINEAR_ATTENTION] * num_layers
        # The last layer of every interval has attention.
        for index in range(interval - 1, num_layers, interval):
            types[index] = FULL_ATTENTION
    _check_types(types, num_layers, FULL_ATTENTION, _LINEAR_ATTENTION)
    layers = tuple(index for index, kind in enumerate(types) if kind == _LINEAR_ATTENTION)
    if len(layers) == num_layers:
        refuse("layer_types", types, f"without {FULL_ATTENTION} there is nothing to cache")
    sizes = {name: read_integer(raw, field) for name, field in _DELTA_FIELDS.items()}
    if sizes["value_heads"] % sizes["key_heads"]:
        refuse(
            _DELTA_FIELDS["value_heads"],
            sizes["value_heads"],
            f"wanted a multiple of linear_num_key_heads = {sizes['key_heads']}",
        )
    return RecurrentConfig(layers=layers, **sizes) if layers else None
