"""The model families that load from a Hugging Face checkpoint, by their names in config.json.

The decoder is one for all of them. A family is an entry of `FAMILIES`: what its config.json and its
tensors say otherwise than Llama's. A further family whose parts the decoder computes already is one
more entry.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

# Transformers 5 writes the count of experts there in every family.
SHARED_COUNT = "num_local_experts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """The fields of config.json in which a family describes its experts.

    Attributes:
        count: the field of the number of experts.
        width: the field of the inner width of an expert.
        shared_width: the field of the inner width of the shared expert; None: the family has none,
            or `shared_count`.
        shared_count: the field that says how many experts' widths the shared expert has.
        shared_gate: the shared expert has a router of its own.
        dense_first: the field that says how many of the first layers have an ordinary MLP.
        in_every_layer: no layer has an ordinary MLP, no model is without experts, and the scores of
            the chosen experts are always divided by their sum. The family then has no fields that
            say so, and its `mlp_width` is `width`.
        biases: the router and the experts' products have biases.
        limited: `swiglu_limit` and `swiglu_alpha` describe the experts' gate
            (`kvqjax.model.config.ExpertConfig`).
        together: a layer's experts are always one tensor. Elsewhere they may be one, and are saved
            one by one.
        inward: the matrices lie as [inputs, outputs] in that tensor. Elsewhere its shape says how
            they lie.
        interleaved: the columns of the two inner matrices alternate in that tensor; else one
            follows the other.
        sigmoid: the one expert of a token is given its input times the sigmoid of its score, and
            `moe_layers` or `interleave_moe_layer_step` say which layers have experts.
    """

    count: str
    width: str = "moe_intermediate_size"
    shared_width: str | None = None
    shared_count: str | None = None
    shared_gate: bool = True
    dense_first: str | None = None
    in_every_layer: bool = False
    biases: bool = False
    limited: bool = False
    together: bool = False
    inward: bool = False
    interleaved: bool = False
    sigmoid: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Describes how checkpoints of one architecture differ from Llama's.

    Attributes:
        model_type: the value of `model_type` that belongs to the architecture.
        defaults: what transformers' config class has where config.json lacks a field.
        qkv_bias: the projections to queries, keys and values have biases.
        qk_norm: queries and keys go through an RMSNorm before RoPE.
        sliding_window: layers may have a sliding window.
        window_switch: the window counts only where `use_sliding_window` is true.
        mixed_windows: `layer_types` may give a window to some layers alone.
        slides: whether layer `index` has a window where config.json lacks `layer_types`, as a
            function of `index` and the number in `slides_by`; None: every layer has one.
        slides_by: the field of the number that decides which layers slide.
        rope_defaults: the rope of a config.json that describes none.
        rope_by_type: sliding layers have a rope of their own.
        query_growth: the rope says how queries grow with their position.
        chunked: layers may see chunks of `attention_chunk_size` tokens, and layers without a rope
            see everything; queries of these grow with their position. QK-norm is one of the layers
            with a rope, without weights.
        paired_rope: rotary pairs lie side by side in the checkpoint.
        recurrent: layers of `layer_types` may be "linear_attention": the gated delta rule, of sizes
            that fields beginning with `linear_` give. Those of attention then turn
            `partial_rotary_factor` of a head's channels, and their output is gated.
        latent: layers have multi-head latent attention (kvqjax/model/latents.py) of sizes that
            `q_lora_rank`, `kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim`
            give.
        packed_recurrence: how recurrent layers pack their projections
            (kvqjax/model/tensor_rows.py).
        mlp_width: the field of the inner width of a layer's one MLP.
        query_scale: scores are divided by the root of `query_pre_attn_scalar`.
        output_bias: the output projection of attention has a bias.
        score_sinks: every query head has a learned logit beside the scores.
        score_softcap, logit_softcap: `attn_logit_softcapping` and `final_logit_softcapping` cap
            scores and logits.
        norm_offset: what norms add to their weights.
        post_norms: what attention and the MLP give goes through a norm too.
        activation: of the MLP (`kvqjax.model.config.ACTIVATIONS`).
        scaled_embedding: rows of the embedding are multiplied by the root of their width.
        accepted: fields that change what a model computes, with the values that this family alone
            has.
        experts: the fields that describe experts; None: every layer has one MLP.
        tensor_names: Hugging Face's names of our parameters, where they differ from Llama's; {} is
            an expert's number.
        gguf: what GGUF files call the architecture; "" where llama.cpp has none, or writes it as
            Llama's.
    """

    model_type: str
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = True
    window_switch: bool = False
    mixed_windows: bool = False
    slides: Callable[[int, int], bool] | None = None
    slides_by: str = "max_window_layers"
    rope_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_by_type: bool = False
    query_growth: bool = False
    chunked: bool = False
    paired_rope: bool = False
    recurrent: bool = False
    latent: bool = False
    packed_recurrence: bool = False
    mlp_width: str = "intermediate_size"
    query_scale: bool = False
    output_bias: bool = False
    score_sinks: bool = False
    score_softcap: bool = False
    logit_softcap: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    activation: str = "silu"
    scaled_embedding: bool = False
    accepted: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    experts: ExpertFields | None = None
    tensor_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gguf: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureFamily:
    """An architecture of pictures and text, whose config.json holds the config of its language
    part.

    Attributes:
        model_type: the value of `model_type` that belongs to the architecture.
        languages: which architecture the language part is, by the `model_type` that it may have;
            the first one where it says none.
        flat: in older config.json the language part's fields stand beside those of the whole.
        sectioned_rope: positions are triples of which every pair of channels takes one (M-RoPE,
            arXiv 2409.12191, section 2.1). Those of text are equal, so that the rope is an ordinary
            one.
        defaults: what the language part's config class has where config.json lacks a field.
        fixed: fields that the language part has regardless of config.json.
        tied_by: where `tie_word_embeddings` counts: in the "whole", in the "text" part, or in
            "either".
    """

    model_type: str
    languages: Mapping[str, str]
    flat: bool = False
    sectioned_rope: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tied_by: str = "whole"


def _from_edge_on(index: int, edge: int) -> bool:
    return index >= edge


def _even_before_edge(index: int, edge: int) -> bool:
    return index < edge and index % 2 == 0


def _all_but_every(index: int, period: int) -> bool:
    return (index + 1) % period > 0


_GEMMA: dict[str, Any] = {  # what Gemma 2 and 3 have in common
    "mixed_windows": True,
    "slides": _all_but_every,
    "slides_by": "sliding_window_pattern",
    "query_scale": True,
    "logit_softcap": True,
    "norm_offset": 1.0,
    "post_norms": True,
    "activation": "gelu_tanh",
    "scaled_embedding": True,
    "accepted": {
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False,),
    },
    "tensor_names": {
        "layers/attn_post_norm": "post_attention_layernorm.weight",
        "layers/mlp_norm": "pre_feedforward_layernorm.weight",
        "layers/mlp_post_norm": "post_feedforward_layernorm.weight",
    },
}
_GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}

_RECURRENT: dict[str, Any] = {  # what Qwen3-Next and Qwen3.5 have in common
    "qk_norm": True,
    "sliding_window": False,
    "recurrent": True,
    "norm_offset": 1.0,
    "accepted": {"attn_output_gate": (True,), "output_gate_type": ("silu", "swish")},
}
_RECURRENT_DEFAULTS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        gguf="llama",
        defaults={"max_position_embeddings": 2048},
        sliding_window=False,
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
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
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
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
    "Mistral4ForCausalLM": Family(
        model_type="mistral4",
        defaults={
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "max_position_embeddings": 1048576,
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        sliding_window=False,
        rope_defaults={
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        query_growth=True,
        latent=True,
        accepted={
            "rope_interleave": (True,),
            "routed_scaling_factor": (1,),
            "n_group": (1,),
            "topk_group": (1,),
        },
        experts=ExpertFields(
            count="n_routed_experts",
            shared_count="n_shared_experts",
            shared_gate=False,
            dense_first="first_k_dense_replace",
            together=True,
        ),
        tensor_names={
            "layers/q_latent": "self_attn.q_a_proj.weight",
            "layers/q_latent_norm": "self_attn.q_a_layernorm.weight",
            "layers/q": "self_attn.q_b_proj.weight",
            **{f"layers/{n}": "self_attn.kv_a_proj_with_mqa.weight" for n in "kv"},
            "layers/latent_norm": "self_attn.kv_a_layernorm.weight",
            **{f"layers/{n}_up": "self_attn.kv_b_proj.weight" for n in "kv"},
            **{
                f"layers/shared_{n}": f"mlp.shared_experts.{n}_proj.weight"
                for n in ("gate", "up", "down")
            },
        },
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
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        gguf="gemma2",
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        score_softcap=True,
        **_GEMMA,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        gguf="gemma3",
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        qk_norm=True,
        rope_by_type=True,
        **_GEMMA,
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        gguf="gpt-oss",
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
        qkv_bias=True,
        output_bias=True,
        score_sinks=True,
        mixed_windows=True,
        slides=_all_but_every,
        slides_by="sliding_window_pattern",
        rope_defaults={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        accepted={"attention_bias": (True,)},
        experts=ExpertFields(
            count=SHARED_COUNT,
            width="intermediate_size",
            in_every_layer=True,
            biases=True,
            limited=True,
            together=True,
            inward=True,
            interleaved=True,
        ),
        tensor_names={
            "layers/router": "mlp.router.weight",
            "layers/router_bias": "mlp.router.bias",
            "layers/score_sinks": "self_attn.sinks",
        },
    ),
    "Llama4ForCausalLM": Family(
        model_type="llama4_text",
        defaults={
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        sliding_window=False,
        mixed_windows=True,
        chunked=True,
        paired_rope=True,
        mlp_width="intermediate_size_mlp",
        accepted={"use_qk_norm": (False, True)},
        experts=ExpertFields(
            count=SHARED_COUNT,
            width="intermediate_size",
            shared_width="intermediate_size",
            shared_gate=False,
            together=True,
            inward=True,
            sigmoid=True,
        ),
        tensor_names={
            "layers/router": "feed_forward.router.weight",
            **{f"layers/{n}": f"feed_forward.{n}_proj.weight" for n in ("gate", "up", "down")},
            **{
                f"layers/experts_{n}": f"feed_forward.experts.{{}}.{n}_proj.weight"
                for n in ("gate", "up", "down")
            },
            **{
                f"layers/shared_{n}": f"feed_forward.shared_expert.{n}_proj.weight"
                for n in ("gate", "up", "down")
            },
        },
    ),
}

FAMILIES |= {
    "Qwen3NextForCausalLM": Family(
        model_type="qwen3_next",
        defaults=_RECURRENT_DEFAULTS
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        packed_recurrence=True,
        experts=ExpertFields(count="num_experts", shared_width="shared_expert_intermediate_size"),
        tensor_names={
            **{f"layers/delta_{n}": "linear_attn.in_proj_qkvz.weight" for n in "qkvz"},
            **{f"layers/delta_{n}": "linear_attn.in_proj_ba.weight" for n in "ab"},
        },
        **_RECURRENT,
    ),
    "Qwen3_5ForCausalLM": Family(
        model_type="qwen3_5_text",
        gguf="qwen35",
        defaults=_RECURRENT_DEFAULTS
        | {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
        **_RECURRENT,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        model_type="qwen3_5_moe_text",
        gguf="qwen35moe",
        defaults=_RECURRENT_DEFAULTS
        | {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        mlp_width="moe_intermediate_size",
        experts=ExpertFields(
            count="num_experts", shared_width="shared_expert_intermediate_size", in_every_layer=True
        ),
        **_RECURRENT,
    ),
}

# Neither has a sliding window of its own; one that a config.json names beside `use_sliding_window`
# = false is idle.
_QWEN2_VL = {
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
}
_QWEN3_VL = {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "max_position_embeddings": 128000}

PICTURE_FAMILIES: dict[str, PictureFamily] = {
    "Mistral3ForConditionalGeneration": PictureFamily(
        model_type="mistral3",
        languages={
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
        tied_by="text",
    ),
    "Qwen2VLForConditionalGeneration": PictureFamily(
        model_type="qwen2_vl",
        languages={"qwen2_vl_text": "Qwen2ForCausalLM"},
        flat=True,
        sectioned_rope=True,
        defaults=_QWEN2_VL,
        tied_by="either",
    ),
    "Qwen2_5_VLForConditionalGeneration": PictureFamily(
        model_type="qwen2_5_vl",
        languages={"qwen2_5_vl_text": "Qwen2ForCausalLM"},
        flat=True,
        sectioned_rope=True,
        defaults=_QWEN2_VL,
        tied_by="either",
    ),
    "Qwen3VLForConditionalGeneration": PictureFamily(
        model_type="qwen3_vl",
        languages={"qwen3_vl_text": "Qwen3ForCausalLM"},
        sectioned_rope=True,
        defaults=_QWEN3_VL,
    ),
    "Qwen3VLMoeForConditionalGeneration": PictureFamily(
        model_type="qwen3_vl_moe",
        languages={"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        sectioned_rope=True,
        defaults=_QWEN3_VL
        | {
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        fixed={"norm_topk_prob": True},  # the family has no field that says so
    ),
    "Llama4ForConditionalGeneration": PictureFamily(
        model_type="llama4",
        languages={"llama4_text": "Llama4ForCausalLM"},
    ),
    "Qwen3_5ForConditionalGeneration": PictureFamily(
        model_type="qwen3_5",
        languages={"qwen3_5_text": "Qwen3_5ForCausalLM"},
        sectioned_rope=True,
    ),
    "Qwen3_5MoeForConditionalGeneration": PictureFamily(
        model_type="qwen3_5_moe",
        languages={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        sectioned_rope=True,
    ),
    "Gemma3ForConditionalGeneration": PictureFamily(
        model_type="gemma3",
        languages={"gemma3_text": "Gemma3ForCausalLM"},
    ),
}


def architectures_of(model_type: Any) -> list[str]:
    """Name the architectures with this `model_type`: one, or none where it is unknown."""
    return [name for name, family in FAMILIES.items() if family.model_type == model_type]
