"""Sliding windows of a Hugging Face config, layer by layer."""

from kvqjax.model.config import ModelConfig
from kvqjax.model.hf_fields import integer, refuse

__all__ = ["windows_from_hf", "windows_to_hf"]

_MIXED = ("MinistralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM")


def _default_types(raw: dict, architecture: str, num_layers: int) -> list[str]:
    """Which layers slide where `layer_types` is absent and there is a window."""
    if not architecture.startswith("Qwen") or architecture not in _MIXED:
        return ["sliding_attention"] * num_layers
    edge = raw["max_window_layers"]
    if not isinstance(edge, int):
        refuse("max_window_layers", edge, "wanted an integer")
    if architecture == "Qwen2MoeForCausalLM":  # every other layer, as its config class has it
        slides = [index < edge and index % 2 == 0 for index in range(num_layers)]
    else:
        slides = [index >= edge for index in range(num_layers)]
    return ["sliding_attention" if one else "full_attention" for one in slides]


def windows_from_hf(raw: dict, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: all alike, or in the families of `_MIXED` by `layer_types`."""
    window, types = raw.get("sliding_window"), raw.get("layer_types")
    if architecture.startswith("Qwen") and not raw.get("use_sliding_window"):
        window = None
    if window is not None:
        window = integer(raw, "sliding_window")
    if architecture == "LlamaForCausalLM" and window is not None:
        refuse("sliding_window", window, "Llama attends to everything; wanted null")
    if types is None:
        types = ["full_attention"] * num_layers if window is None else _default_types(raw, architecture, num_layers)
    wanted = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or any(name not in list(wanted) for name in types):
        refuse("layer_types", types, f"wanted {num_layers} of full_attention or sliding_attention")
    if window is None and "sliding_attention" in types:
        refuse("layer_types", types, "sliding_attention without a sliding window")
    windows = tuple(wanted[name] for name in types)
    if architecture not in _MIXED and windows != (window,) * num_layers:
        refuse("layer_types", types, f"all layers of {architecture} attend alike")
    return windows


def windows_to_hf(config: ModelConfig) -> dict:
    """The fields of config.json for a config's windows."""
    window = next((window for window in config.windows if window is not None), None)
    raw = {"sliding_window": window}
    if config.architecture.startswith("Qwen"):
        raw |= {"use_sliding_window": window is not None}
    if config.architecture in _MIXED:
        raw |= {"layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows]}
    return raw
