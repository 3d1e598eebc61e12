"""GGUF files written from Hugging Face checkpoints by the `gguf` package's own writer and names, for tests."""

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
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp's converter lays them for the architecture llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


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
        x = x.astype(np.float32)
        if number:
            experts.setdefault(f"{front}.experts.{rest}", {})[int(number)] = x
            continue
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name and arch == "llama":
                x = interleaved(x, config[heads])
        tensors[names.get_name(name, (".weight", ".bias"))] = x[0] if "shared_expert_gate" in name else x
    for name, matrices in experts.items():
        merged = names.get_name(name, (".weight",))
        tensors[merged] = np.stack([matrices[number] for number in range(len(matrices))])
    return config, tensors


def write_values(writer: gguf.GGUFWriter, config: dict) -> None:
    """What llama.cpp's converters write of a config."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def write_gguf(folder: Path, file: Path, kind: str = "F32", extra=lambda writer: None, change=lambda tensors: None):
    """Write a Hugging Face folder as a GGUF file.

    `kind` is the type of its matrices. `extra` adds values to the writer, `change` changes the tensors.
    """
    config, tensors = stored(folder)
    change(tensors)
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    write_values(writer, config)
    extra(writer)
    for name, x in tensors.items():
        plain = x.ndim < 2 or kind == "F32" or "ffn_gate_inp" in name
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


def write_vocabulary(writer: gguf.GGUFWriter, model: str, tokens, kinds, pre=None, merges=None, scores=None, **ids):
    """Add a tokenizer to a writer; `ids` are numbers of special tokens by their names, such as bos."""
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
