"""The model families that load from a Hugging Face checkpoint, by their names in config.json.

The decoder is one for all of them. A family is an entry of `FAMILIES`: what its config.json and its tensors say
otherwise than Llama's. A further family whose parts the decoder computes already is one more entry.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["FAMILIES", "PICTURE_FAMILIES", "ExpertFields", "Family", "PictureFamily", "architectures_of"]

SHARED_COUNT = "num_local_experts"  # transformers 5 writes the count of experts there in every family


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """In which fields of config.json a family describes its experts.

    Attributes:
        count: the field of the number of experts.
        width: the field of the inner width of an expert.
        shared_width: the field of the inner width of the shared expert; None: the family has none.
        in_every_layer: no layer has an ordinary MLP, no model is without experts, and the scores of the chosen experts
            are always divided by their sum. The family then has no fields that say so.
    """

    count: str
    width: str = "moe_intermediate_size"
    shared_width: str | None = None
    in_every_layer: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What distinguishes the checkpoints of one architecture.

    Attributes:
        model_type: the value of `model_type` that belongs to the architecture.
        defaults: what transformers' config class has where config.json lacks a field.
        qkv_bias: the projections to queries, keys and values have biases.
        qk_norm: queries and keys go through an RMSNorm before RoPE.
        sliding_window: layers may have a sliding window.
        window_switch: the window counts only where `use_sliding_window` is true.
        mixed_windows: `layer_types` may give a window to some layers alone.
        slides: whether layer `index` has a window where config.json lacks `layer_types`, as a function of `index` and
            `max_window_layers`; None: every layer has one.
        rope_defaults: the rope of a config.json that describes none.
        query_growth: the rope says how queries grow with their position.
        experts: the fields that describe experts; None: every layer has one MLP.
        tensor_names: Hugging Face's names of our parameters, where they differ from Llama's; {} is an expert's number.
        gguf: what GGUF files call the architecture; "" where llama.cpp has none, or writes it as Llama's.
    """

    model_type: str
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = True
    window_switch: bool = False
    mixed_windows: bool = False
    slides: Callable[[int, int], bool] | None = None
    rope_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    query_growth: bool = False
    experts: ExpertFields | None = None
    tensor_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gguf: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureFamily:
    """An architecture of pictures and text, whose config.json holds the config of its language part.

    Attributes:
        model_type: the value of `model_type` that belongs to the architecture.
        language_types: the `model_type` that its language part may have; the first one where it says none.
    """

    model_type: str
    language_types: tuple[str, ...]


def _from_edge_on(index: int, edge: int) -> bool:
    return index >= edge


def _even_before_edge(index: int, edge: int) -> bool:
    return index < edge and index % 2 == 0


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        gguf="llama",
        defaults={"max_position_embeddings": 2048},
        sliding_window=False,
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        gguf="qwen2",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        qkv_bias=True,
        window_switch=True,
        mixed_windows=True,
        slides=_from_edge_on,
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        gguf="qwen3",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
        qk_norm=True,
        window_switch=True,
        mixed_windows=True,
        slides=_from_edge_on,
    ),
    "MinistralForCausalLM": Family(
        model_type="ministral",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        mixed_windows=True,
    ),
    "Ministral3ForCausalLM": Family(
        model_type="ministral3",
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        rope_defaults={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        query_growth=True,
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        experts=ExpertFields(count=SHARED_COUNT, width="intermediate_size", in_every_layer=True),
        tensor_names={
            "layers/router": "block_sparse_moe.gate.weight",
            "layers/experts_gate": "block_sparse_moe.experts.{}.w1.weight",
            "layers/experts_down": "block_sparse_moe.experts.{}.w2.weight",
            "layers/experts_up": "block_sparse_moe.experts.{}.w3.weight",
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        gguf="qwen2moe",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        qkv_bias=True,
        window_switch=True,
        mixed_windows=True,
        slides=_even_before_edge,
        experts=ExpertFields(count="num_experts", shared_width="shared_expert_intermediate_size"),
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        gguf="qwen3moe",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qk_norm=True,
        window_switch=True,
        experts=ExpertFields(count="num_experts"),
    ),
}

PICTURE_FAMILIES: dict[str, PictureFamily] = {
    "Mistral3ForConditionalGeneration": PictureFamily(
        model_type="mistral3",
        language_types=("mistral", "ministral3"),
    ),
}


def architectures_of(model_type: Any) -> list[str]:
    """Name the architectures with this `model_type`: one, or none where it is unknown."""
    return [name for name, family in FAMILIES.items() if family.model_type == model_type]
