"""GGUF files written from Hugging Face checkpoints by the `gguf` package's own writer and names,
for tests."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp's converter lays them for the architecture llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def converted(name: str, x: np.ndarray, config: dict) -> np.ndarray:
    """A tensor of a family whose converter does more than to rename: norms of 1 + weight, decays,
    heads of values."""
    kind = config["model_type"]
    if not kind.startswith(("gemma", "qwen3_5")):
        return x
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return x + 1
    if "linear_attn" not in name:
        return x
    x = x.squeeze(1) if "conv1d" in name else x
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, before = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]
    # [key heads, value heads of each, channels] -> [value heads of each, key heads, channels]
    order = np.arange(values * dim).reshape(keys, values // keys, dim).swapaxes(0, 1).reshape(-1)
    heads = np.arange(values).reshape(keys, values // keys).swapaxes(0, 1).reshape(-1)
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([x[:before], x[before:][order]])
    if "out_proj" in name:
        return x[:, order]
    if "in_proj_z" in name:
        return x[order]
    if "norm" in name:
        return x
    return -np.exp(x[heads]) if "A_log" in name else x[heads]


def of_gpt_oss(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """Tensors of gpt-oss's attention sinks and experts as its converter names them and lays them
    out."""
    if name.endswith("sinks"):
        return {f"{name}.weight": x}
    front, _, part = name.partition(".experts.")
    part, bias, _ = part.partition("_bias")
    x = x if bias else x.swapaxes(1, 2)  # [experts, inputs, outputs] -> [experts, outputs, inputs]
    pieces = (
        {"gate_proj": x[:, ::2], "up_proj": x[:, 1::2]} if part == "gate_up_proj" else {part: x}
    )
    return {
        f"{front}.experts.{key}.{'bias' if bias else 'weight'}": piece
        for key, piece in pieces.items()
    }


def stored(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The fields and the tensors, as float32 and by llama.cpp's names, of a Hugging Face folder."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, x in load_file(folder / "model.safetensors").items():
        front, _, rest = name.partition(".experts.")
        number, _, rest = rest.partition(".")
        x = converted(name, x.astype(np.float32), config)
        if arch == "gpt-oss" and ("experts" in name or name.endswith("sinks")):
            for part, y in of_gpt_oss(name, x).items():
                tensors[names.get_name(part, (".weight", ".bias"))] = np.ascontiguousarray(y)
            continue
        if number:
            experts.setdefault(f"{front}.experts.{rest}", {})[int(number)] = x
            continue
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name and arch == "llama":
                x = interleaved(x, config[heads])
        name = name.replace(".dt_bias", ".dt_proj.bias")
        tensors[names.get_name(name, (".weight", ".bias"))] = (
            x[0] if "shared_expert_gate" in name else x
        )
    for name, matrices in experts.items():
        merged = names.get_name(name, (".weight",))
        tensors[merged] = np.stack([matrices[number] for number in range(len(matrices))])
    return config, tensors


def rope_of(config: dict) -> dict:
    """The rope of the layers that see all tokens, or of all layers. The bundled models have the
    older spelling."""
    ropes = config.get("rope_parameters")
    if ropes is None:
        return {"rope_type": "default", "rope_theta": config["rope_theta"]} | (
            config["rope_scaling"] or {}
        )
    return ropes.get("full_attention") or ropes.get("sliding_attention") or ropes


def write_values(writer: gguf.GGUFWriter, config: dict) -> None:
    """What llama.cpp's converters write of a config."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = rope_of(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config["model_type"] not in ("gemma2", "gemma3_text", "gpt_oss"):
        writer.add_rope_dimension_count(
            int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        )
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def write_layer_kinds(writer: gguf.GGUFWriter, config: dict) -> None:
    """What the converters write of recurrent layers, caps and ropes that are scaled."""
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(
            config["linear_value_head_dim"] * config["linear_num_value_heads"]
        )
        recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    rope = rope_of(config)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def write_gguf(
    folder: Path,
    file: Path,
    kind: str = "F32",
    extra=lambda writer: None,
    change=lambda tensors: None,
):
    """Write a Hugging Face folder as a GGUF file.

    `kind` is the type of its matrices. `extra` adds values to the writer, `change` changes the
    tensors.
    """
    config, tensors = stored(folder)
    change(tensors)
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    write_values(writer, config)
    write_layer_kinds(writer, config)
    extra(writer)
    for name, x in tensors.items():
        plain = x.ndim < 2 or kind == "F32" or "ffn_gate_inp" in name or "conv1d" in name
        if plain:
            writer.add_tensor(name, x)
        else:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(x, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_vocabulary(
    writer: gguf.GGUFWriter, model: str, tokens, kinds, pre=None, merges=None, scores=None, **ids
):
    """Add a tokenizer to a writer; `ids` are numbers of special tokens by their names, such as
    bos."""
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for name, number in ids.items():
        getattr(writer, f"add_{name}_token_id")(number)
