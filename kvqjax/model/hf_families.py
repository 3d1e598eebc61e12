"""The architectures that are known, by their names in config.json, and what transformers' config classes have where a
field is absent."""

__all__ = ["DEFAULTS", "NESTED", "QKV_BIAS", "QK_NORM"]

DEFAULTS = {
    "LlamaForCausalLM": {"model_type": "llama", "max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "model_type": "mistral",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    "MinistralForCausalLM": {
        "model_type": "ministral",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Ministral3ForCausalLM": {
        "model_type": "ministral3",
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
    "MixtralForCausalLM": {
        "model_type": "mixtral",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen2MoeForCausalLM": {
        "model_type": "qwen2_moe",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
QKV_BIAS = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")
QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

# Checkpoints of pictures and text, whose config holds that of the language part.
NESTED = ("Mistral3ForConditionalGeneration",)
