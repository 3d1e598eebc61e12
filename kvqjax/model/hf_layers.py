"""The kinds of layers in config.json: which see a window or a chunk, and which are recurrent."""

from kvqjax.model.config import RecurrentConfig
from kvqjax.model.hf_families import FAMILIES, Family
from kvqjax.model.hf_fields import is_integer, read_integer, refuse

# What `layer_types` calls the kinds of layers.
FULL_ATTENTION, SLIDING_ATTENTION, _CHUNKED_ATTENTION = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
)
_LINEAR_ATTENTION = "linear_attention"

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
    window, types = raw.get("sliding_window"), raw.get("layer_types")
    if family.window_switch and not raw.get("use_sliding_window"):
        window = None
    if window is not None:
        window = read_integer(raw, "sliding_window")
    if window is not None and not family.sliding_window:
        name = architecture.removesuffix("ForCausalLM")
        refuse("sliding_window", window, f"{name} attends to everything; wanted null")
    if types is None:
        types = (
            [FULL_ATTENTION] * num_layers
            if window is None
            else _default_types(raw, family, num_layers)
        )
    window_of = {FULL_ATTENTION: None, SLIDING_ATTENTION: window}
    fits = isinstance(types, list) and len(types) == num_layers
    if not fits or any(name not in list(window_of) for name in types):
        refuse(
            "layer_types", types, f"wanted {num_layers} of {FULL_ATTENTION} or {SLIDING_ATTENTION}"
        )
    if window is None and SLIDING_ATTENTION in types:
        refuse("layer_types", types, f"{SLIDING_ATTENTION} without a sliding window")
    windows = tuple(window_of[name] for name in types)
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
    return [
        SLIDING_ATTENTION if family.slides(index, edge) else FULL_ATTENTION
        for index in range(num_layers)
    ]


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
    if (
        not isinstance(marks, list)
        or len(marks) != num_layers
        or any(mark not in (0, 1) for mark in marks)
    ):
        refuse("no_rope_layers", marks, f"wanted {num_layers} of 0 or 1")
    return tuple(bool(mark) for mark in marks)


def _chunks_from_hf(raw: dict, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The chunk of each layer. Without `layer_types` layers with a rope have one."""
    chunk, types = raw.get("attention_chunk_size"), raw.get("layer_types")
    if chunk is not None:
        chunk = read_integer(raw, "attention_chunk_size")
    if types is None:
        roped = layers_with_rope(raw, family, num_layers)
        types = [_CHUNKED_ATTENTION if on and chunk is not None else FULL_ATTENTION for on in roped]
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(x not in (FULL_ATTENTION, _CHUNKED_ATTENTION) for x in types)
    ):
        refuse(
            "layer_types", types, f"wanted {num_layers} of {FULL_ATTENTION} or {_CHUNKED_ATTENTION}"
        )
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
        types = [
            _LINEAR_ATTENTION if (index + 1) % interval else FULL_ATTENTION
            for index in range(num_layers)
        ]
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(x not in (FULL_ATTENTION, _LINEAR_ATTENTION) for x in types)
    ):
        refuse(
            "layer_types", types, f"wanted {num_layers} of {FULL_ATTENTION} or {_LINEAR_ATTENTION}"
        )
    layers = tuple(index for index, kind in enumerate(types) if kind == _LINEAR_ATTENTION)
    if len(layers) == num_layers:
        refuse("layer_types", types, f"without {FULL_ATTENTION} there is nothing to cache")
    sizes = {name: read_integer(raw, field) for name, field in _DELTA_FIELDS.items()}
    if sizes["value_heads"] % sizes["key_heads"]:
        field = _DELTA_FIELDS["value_heads"]
        refuse(
            field,
            sizes["value_heads"],
            f"wanted a multiple of linear_num_key_heads = {sizes['key_heads']}",
        )
    return RecurrentConfig(layers=layers, **sizes) if layers else None
