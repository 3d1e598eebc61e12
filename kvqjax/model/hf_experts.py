"""Mixtures of experts in a Hugging Face config: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from kvqjax._errors import UserError
from kvqjax.model.config import ExpertConfig, ModelConfig
from kvqjax.model.hf_fields import integer, refuse

__all__ = ["experts_from_hf", "experts_to_hf"]

_LOCAL = "num_local_experts"  # transformers 5 writes it for Qwen3 too
_COUNTS = {  # where each family writes how many experts there are
    "MixtralForCausalLM": _LOCAL,
    "Qwen2MoeForCausalLM": "num_experts",
    "Qwen3MoeForCausalLM": "num_experts",
}
_WIDTH, _SHARED = "moe_intermediate_size", "shared_expert_intermediate_size"


def _dense_layers(raw: dict, num_layers: int) -> tuple[int, ...]:
    """Layers without experts: those named, and those that the step leaves out."""
    named, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step", 1)
    if not isinstance(named, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in named):
        refuse("mlp_only_layers", named, "wanted a list of layer numbers")
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        refuse("decoder_sparse_step", step, "wanted a positive integer")
    return tuple(index for index in range(num_layers) if index in named or (index + 1) % step)


def experts_from_hf(raw: dict, architecture: str, num_layers: int) -> ExpertConfig | None:
    """The experts of a config.json; None for a family, or a model, without them."""
    field = _COUNTS.get(architecture)
    field = _LOCAL if field and raw.get(_LOCAL) is not None else field
    if field is None or (architecture != "MixtralForCausalLM" and raw.get(field) == 0):
        return None
    sizes = {"count": integer(raw, field), "per_token": integer(raw, "num_experts_per_tok")}
    if sizes["per_token"] > sizes["count"]:
        refuse("num_experts_per_tok", sizes["per_token"], f"there are {sizes['count']} experts")
    if architecture == "MixtralForCausalLM":
        return ExpertConfig(width=integer(raw, "intermediate_size"), **sizes)
    dense = _dense_layers(raw, num_layers)
    if len(dense) == num_layers:
        return None
    shared = integer(raw, _SHARED) if architecture == "Qwen2MoeForCausalLM" else 0
    normalised = bool(raw.get("norm_topk_prob", False))
    own = {"shared_width": shared, "normalised": normalised, "dense_layers": dense}
    return ExpertConfig(width=integer(raw, _WIDTH), **sizes, **own)


def experts_to_hf(config: ModelConfig) -> dict:
    """The fields of config.json for a config's experts. Raises UserError for a family that has no such experts."""
    found, field = config.experts, _COUNTS.get(config.architecture)
    if found is None:
        return {} if field is None else {field: 0}
    fits = {
        "MixtralForCausalLM": found.normalised and not found.dense_layers and config.mlp_width == found.width,
        "Qwen2MoeForCausalLM": found.shared_width > 0,
    }
    shared = found.shared_width > 0 and config.architecture != "Qwen2MoeForCausalLM"
    if field is None or shared or not fits.get(config.architecture, True):
        raise UserError(f"{config.architecture} has no experts like {found}")
    raw = {field: found.count, "num_experts_per_tok": found.per_token}
    if field == _LOCAL:
        return raw
    raw |= {_WIDTH: found.width, "norm_topk_prob": found.normalised, "mlp_only_layers": list(found.dense_layers)}
    return raw | {"decoder_sparse_step": 1} | ({_SHARED: found.shared_width} if found.shared_width else {})
