"""The model of a GGUF file in Hugging Face's words: the fields of config.json, and its tensors by their names there.

llama.cpp writes Llama, Mistral and Mixtral as one architecture, "llama". Its rotary embedding turns channels that lie
side by side, so rows of that architecture's queries and keys lie in another order than Hugging Face's:

    row h * D + 2 * j + s of the file  =  row h * D + s * D / 2 + j of the checkpoint,  s = 0, 1
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from kvqjax._errors import UserError
from kvqjax.model.gguf_file import BLOCKS, Entry, Header, read_header, require_decoder
from kvqjax.model.hf_families import FAMILIES

__all__ = ["find_tensors", "read_fields"]

ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}

# Frequencies of Llama 3's rotary embedding are divided by the numbers of this tensor.
_DIVISORS = "rope_freqs.weight"

# --- Fields ---


def read_fields(file: Path) -> dict[str, Any]:
    """Read the model of a file as the fields of config.json.

    Args:
        file: the file.

    Returns:
        What `parse_config` takes.

    Raises:
        UserError: for an architecture or a field that is not supported, or as `read_header` does.
    """
    header = read_header(file)
    name = _architecture(header)
    family = header.text("general.architecture")
    integer = lambda key, default=None: header.integer(f"{family}.{key}", default)  # noqa: E731
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{file}: tensor 'token_embd.weight' is missing; this is no language model")
    width, heads = integer("embedding_length"), integer("attention.head_count")
    rotary = integer("rope.dimension_count", 0)
    head_dim = integer("attention.key_length", rotary or width // max(1, heads))
    if integer("attention.value_length", head_dim) != head_dim:
        raise UserError(f"{file}: values of another width than keys ({family}.attention.value_length) are not read")
    fields = {
        "architectures": [name],
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": header.number(f"{family}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": integer("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header, family, head_dim),
        "bos_token_id": header.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(header),
        "sliding_window": header.values.get(f"{family}.attention.sliding_window") or None,
    }
    if rotary and rotary != head_dim:
        fields["partial_rotary_factor"] = rotary / head_dim
    experts = _experts(header, family, name)
    inner = integer("feed_forward_length", experts.get("moe_intermediate_size"))
    return fields | experts | {"intermediate_size": inner}


def _architecture(header: Header) -> str:
    """Hugging Face's name of the architecture."""
    family = header.text("general.architecture")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        shown = " ".join(family.split())[:80]
        raise UserError(f"{header.file}: architecture {shown!r} is not supported; known: {known}")
    if family == "llama" and header.integer("llama.expert_count", 0):
        return "MixtralForCausalLM"
    if family == "llama" and header.integer("llama.attention.sliding_window", 0):
        return "MistralForCausalLM"
    return ARCHITECTURES[family]


def _end_tokens(header: Header) -> list[int]:
    """Tokens that end a text, a turn, or a message."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(header.integer(key) for key in keys if key in header.values))


def _rope(header: Header, family: str, head_dim: int) -> dict[str, Any]:
    """The rotary embedding."""
    key = f"{family}.rope."
    rope: dict[str, Any] = {"rope_theta": header.number(f"{key}freq_base", 10000.0)}
    older = header.number(f"{key}scale_linear", 1.0)  # before there were other kinds
    kind = header.text(f"{key}scaling.type", "none" if older == 1 else "linear")
    divisors = _divisors(header, head_dim)
    if divisors is not None and kind != "none":
        raise UserError(f"{header.file}: {_DIVISORS} beside {key}scaling.type = {kind!r} is not supported")
    if divisors is not None:
        # Divisors are the factors of longrope, the same ones for texts of any length.
        length = header.integer(f"{family}.context_length")
        rope |= {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        return rope | {"short_factor": divisors, "long_factor": divisors, "original_max_position_embeddings": length}
    if kind == "none":
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": header.number(f"{key}scaling.factor", older)}
    if kind != "yarn":
        return rope
    length = header.integer(f"{family}.context_length")
    rope["original_max_position_embeddings"] = header.integer(f"{key}scaling.original_context_length", length)
    # llama.cpp multiplies yarn's own factor on cos and sin by this one.
    names = (f"{key}scaling.attn_factor", f"{key}scaling.yarn_attn_factor")
    multiple = header.number(names[0], header.number(names[1], 1.0))
    if multiple != 1:
        rope["attention_factor"] = multiple * (0.1 * float(np.log(max(1.0, rope["factor"]))) + 1.0)
    for beta in ("beta_fast", "beta_slow"):
        if f"{key}scaling.yarn_{beta}" in header.values:
            rope[beta] = header.number(f"{key}scaling.yarn_{beta}")
    return rope


def _divisors(header: Header, head_dim: int) -> list[float] | None:
    """What each pair's frequency is divided by; None where that is 1 for all."""
    entry = header.tensors.get(_DIVISORS)
    if entry is None:
        return None
    if entry.kind != "F32" or entry.shape != (head_dim // 2,):
        raise UserError(f"{header.file}: {_DIVISORS} is {entry.kind} {list(entry.shape)}, not F32 [{head_dim // 2}]")
    divisors = np.fromfile(header.file, "<f4", head_dim // 2, offset=entry.start)
    return None if (divisors == 1).all() else divisors.tolist()


def _experts(header: Header, family: str, name: str) -> dict[str, Any]:
    """Fields of a mixture of experts; {} without one."""
    names = FAMILIES[name].experts
    if names is None:
        return {}
    fields: dict[str, Any] = {
        names.count: header.integer(f"{family}.expert_count"),
        "num_experts_per_tok": header.integer(f"{family}.expert_used_count"),
    }
    if names.in_every_layer:
        return fields

    def width(key: str, tensor: str) -> int:
        entry = header.tensors.get(f"blk.0.{tensor}.weight")  # older files say the width in no other place
        return header.integer(f"{family}.{key}", None if entry is None else entry.shape[-2])

    fields[names.width] = width("expert_feed_forward_length", "ffn_gate_exps")
    if names.shared_width is not None:
        fields[names.shared_width] = width("expert_shared_feed_forward_length", "ffn_gate_shexp")
    # What llama.cpp computes for each of the two; the file does not say it.
    return fields | {"norm_topk_prob": family == "qwen3moe", "decoder_sparse_step": 1, "mlp_only_layers": []}


# --- Tensors ---

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    **{f"attn_{n}.{part}": f"self_attn.{n}_proj.{part}" for n in "qkv" for part in ("weight", "bias")},
    **{f"attn_{n}_norm.weight": f"self_attn.{n}_norm.weight" for n in "qk"},
    **{f"ffn_{n}.weight": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    **{f"ffn_{n}_shexp.weight": f"mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")},
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
}
_EXPERT = {
    **{f"layers/experts_{n}": f"mlp.experts.{{}}.{n}_proj.weight" for n in ("gate", "up", "down")},
    "layers/router": "mlp.gate.weight",
}
_TURNED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")


def find_tensors(file: Path) -> dict[str, Entry]:
    """Find the tensors of a file by Hugging Face's names.

    Args:
        file: the file.

    Returns:
        Every tensor. One whose name is not known keeps it. Each expert's matrix is a tensor of its own.

    Raises:
        UserError: for a type of tensor that is not read here, for codes where the package `gguf` is not installed, or
            as `read_fields` does.
    """
    header, fields = read_header(file), read_fields(file)
    family, name = header.text("general.architecture"), fields["architectures"][0]
    tensors: dict[str, Entry] = {}
    for stored, entry in header.tensors.items():
        if stored == _DIVISORS:
            continue
        if not entry.readable:
            _refuse_type(file, stored, entry)
        if entry.kind in BLOCKS:
            require_decoder(file, entry.kind)
        front, _, rest = stored.partition(".")
        number, _, part = rest.partition(".")
        if front != "blk" or not number.isdecimal():
            tensors[_OUTER.get(stored, stored)] = entry
            continue
        if family == "llama" and part in _TURNED:
            entry = entry._replace(head_dim=fields["head_dim"])
        tensors |= _layer_tensors(file, name, f"model.layers.{number}.", part, entry)
    return tensors


def _layer_tensors(file: Path, name: str, layer: str, part: str, entry: Entry) -> dict[str, Entry]:
    """One tensor of a layer by its name there; a tensor of all experts as the matrices of each."""
    names = _EXPERT | dict(FAMILIES[name].tensor_names)
    stem = part.removesuffix(".weight").removeprefix("ffn_")
    kind, _, expert = stem.partition("_exps" if stem.endswith("_exps") else ".")
    pattern = names.get(f"layers/experts_{kind}")
    if stem.endswith("_exps") and pattern is not None:
        if len(entry.shape) != 3 or 0 in entry.shape:
            raise UserError(f"{file}: {part!r} has shape {list(entry.shape)}, wanted [experts, outputs, inputs]")
        nbytes = entry.nbytes // entry.shape[0]
        return {
            layer + pattern.format(number): entry._replace(
                shape=entry.shape[1:], start=entry.start + number * nbytes, nbytes=nbytes
            )
            for number in range(entry.shape[0])
        }
    if expert.isdecimal() and pattern is not None:  # files from before all experts were one tensor
        return {layer + pattern.format(int(expert)): entry}
    if part == "ffn_gate_inp.weight":
        return {layer + names["layers/router"]: entry}
    if part == "ffn_gate_inp_shexp.weight" and len(entry.shape) == 1:
        entry = entry._replace(shape=(1, *entry.shape))
    return {layer + _LAYER.get(part, part): entry}


def _refuse_type(file: Path, name: str, entry: Entry):
    label, number = entry.kind, int(entry.kind.removeprefix("type "))
    if importlib.util.find_spec("gguf") is not None:
        from gguf import GGMLQuantizationType

        kinds = {kind.value: kind.name for kind in GGMLQuantizationType}
        label = kinds.get(number, label)
    known = ", ".join(("F32", "F16", "BF16", *BLOCKS))
    raise UserError(f"{file}: tensor {name!r} is {label}, which is not read here; read are {known}")
