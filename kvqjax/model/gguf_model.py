"""The model of a GGUF file in Hugging Face's words: the fields of config.json, and its tensors by
their names there.

llama.cpp writes Llama, Mistral and Mixtral as one architecture, "llama". Its rotary embedding turns
channels that lie side by side, so rows of that architecture's queries and keys lie in another order
than Hugging Face's:

    row h * D + 2 * j + s of the file  =  row h * D + s * D / 2 + j of the checkpoint,  s = 0, 1

Where norms multiply by 1 + w (Gemma, Qwen3.5) a file has 1 + w. For recurrent layers it has
-exp(rate) in place of the rate, and value heads in another order: the first value head of every key
head, then the second of each.
"""

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from kvqjax._errors import UserError
from kvqjax.model.gguf_file import BLOCKS, Entry, Header, read_header, require_decoder
from kvqjax.model.hf_families import FAMILIES
from kvqjax.model.tensor_rows import Order

ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}

# In each of these families one published model divides scores by the root of width / heads, and not
# of a head's width: Gemma 2 and Gemma 3 of 27B. It is known by its number of layers.
_DIVIDED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}

# Frequencies of Llama 3's rotary embedding are divided by the numbers of this tensor.
_DIVISORS = "rope_freqs.weight"

# --- Fields ---


def read_fields(file: Path) -> dict[str, Any]:
    """Read the model of a file as the fields of config.json.

    Returns:
        What `parse_config` takes.

    Raises:
        UserError: for an architecture or a field that is not supported, or as `read_header` does.
    """
    header = read_header(file)
    name = _architecture(header)
    family = header.text("general.architecture")

    def integer(key, default=None):
        return header.integer(f"{family}.{key}", default)

    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{file}: tensor 'token_embd.weight' is missing; this is no language model")
    width, heads = integer("embedding_length"), integer("attention.head_count")
    rotary = integer("rope.dimension_count", 0)
    head_dim = integer("attention.key_length", rotary or width // max(1, heads))
    if integer("attention.value_length", head_dim) != head_dim:
        raise UserError(
            f"{file}: values of another width than keys ({family}.attention.value_length) are not read"
        )
    fields = {
        "architectures": [name],
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "num_hidden_layers": _count_layers(header, family),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": header.number(f"{family}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": integer("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_ropes(header, family, name, rotary or head_dim),
        "bos_token_id": header.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(header),
        "sliding_window": header.values.get(f"{family}.attention.sliding_window") or None,
    }
    if rotary and (rotary != head_dim or FAMILIES[name].recurrent):
        fields["partial_rotary_factor"] = rotary / head_dim
    fields |= _scores(header, family, name, width // max(1, heads))
    fields |= _layer_kinds(header, family, name)
    experts = _experts(header, family, name)
    inner = integer("feed_forward_length", experts.get("moe_intermediate_size"))
    return fields | experts | {"intermediate_size": inner}


def _architecture(header: Header) -> str:
    """Give Hugging Face's name of the architecture."""
    family = header.text("general.architecture")
    if family not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        shown = " ".join(family.split())[:80]
        raise UserError(f"{header.file}: architecture {shown!r} is not supported; known: {names}")
    if family == "llama" and header.integer("llama.expert_count", 0):
        return "MixtralForCausalLM"
    if family == "llama" and header.integer("llama.attention.sliding_window", 0):
        return "MistralForCausalLM"
    return ARCHITECTURES[family]


def _count_layers(header: Header, family: str) -> int:
    """Count the model's layers, without those at the end that draft tokens."""
    drafting = header.integer(f"{family}.nextn_predict_layers", 0)
    return header.integer(f"{family}.block_count") - drafting


def _scores(header: Header, family: str, name: str, width: int) -> dict[str, Any]:
    """Read the scale of scores and the caps of scores and logits. `width` is the model's width /
    heads."""
    fields: dict[str, Any] = {}
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if f"{family}.{cap}" in header.values:
            fields[cap] = header.number(f"{family}.{cap}")
    if FAMILIES[name].query_scale:
        # The file does not say the divisor. Only the published model with this number of layers has
        # another one.
        head_dim = header.integer(f"{family}.attention.key_length", width)
        widest = _count_layers(header, family) == _DIVIDED_BY_WIDTH[family]
        fields["query_pre_attn_scalar"] = width if widest else head_dim
    return fields


def _layer_kinds(header: Header, family: str, name: str) -> dict[str, Any]:
    """Find the recurrent layers and their sizes, or the layers with a window."""
    kinds = FAMILIES[name]
    if kinds.recurrent:
        return _recurrence(header, family)
    if kinds.slides_by != "sliding_window_pattern":
        return {}
    fields: dict[str, Any] = {}
    key = f"{family}.attention.sliding_window"
    # A Gemma 3 without the key has no window, the others have that of their family.
    if not kinds.rope_by_type:
        fields["sliding_window"] = header.integer(key, kinds.defaults["sliding_window"])
    pattern = f"{key}_pattern"  # a mark for each layer, or a period
    if isinstance(header.values.get(pattern), np.ndarray):
        marks = header.numbers(pattern, _count_layers(header, family))
        fields["layer_types"] = _types(marks, "sliding_attention")
    elif pattern in header.values:
        fields["sliding_window_pattern"] = header.integer(pattern)
    return fields


def _types(marks: np.ndarray, kind: str) -> list[str]:
    """Name the kinds of layers as Hugging Face does: the marked ones `kind`, the others full
    attention."""
    return [kind if mark else "full_attention" for mark in marks.astype(bool)]


def _recurrence(header: Header, family: str) -> dict[str, Any]:
    """Read the recurrent layers and their sizes."""
    values = header.integer(f"{family}.ssm.time_step_rank")
    inner = header.integer(f"{family}.ssm.inner_size")
    if not values or inner % values:
        raise UserError(
            f"{header.file}: {family}.ssm.inner_size = {inner} is no multiple of its {values} heads"
        )
    fields: dict[str, Any] = {
        "linear_conv_kernel_dim": header.integer(f"{family}.ssm.conv_kernel"),
        "linear_key_head_dim": header.integer(f"{family}.ssm.state_size"),
        "linear_num_key_heads": header.integer(f"{family}.ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
        "full_attention_interval": header.integer(f"{family}.full_attention_interval", 4),
    }
    key = f"{family}.attention.recurrent_layers"
    if key in header.values:
        # Layers that draft tokens have a mark too.
        marks = header.numbers(key, header.integer(f"{family}.block_count"))
        marks = marks[: _count_layers(header, family)]
        fields["layer_types"] = _types(marks, "linear_attention")
    return fields


def _end_tokens(header: Header) -> list[int]:
    """List the tokens that end a text, a turn, or a message."""
    tokens = []
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in header.values:
            tokens.append(header.integer(key))
    return list(dict.fromkeys(tokens))  # each once


def _ropes(header: Header, family: str, name: str, turned: int) -> dict[str, Any]:
    """Read the rotary embedding of `turned` channels; in families with two, one for each type of
    layer."""
    rope = _rope(header, family, turned)
    if name == "GptOssForCausalLM" and rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as in the published models; a file does not say it
    if not FAMILIES[name].rope_by_type:
        return {"rope_parameters": rope}
    local = header.number(f"{family}.rope.freq_base_swa", 10000.0)
    ropes = {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return {"rope_parameters": ropes}


def _rope(header: Header, family: str, head_dim: int) -> dict[str, Any]:
    """Read one rotary embedding of `head_dim` channels."""
    key = f"{family}.rope."
    rope: dict[str, Any] = {"rope_theta": header.number(f"{key}freq_base", 10000.0)}
    # Files from before there were other kinds.
    linear_factor = header.number(f"{key}scale_linear", 1.0)
    kind = header.text(f"{key}scaling.type", "none" if linear_factor == 1 else "linear")
    divisors = _divisors(header, head_dim)
    if divisors is not None and kind != "none":
        raise UserError(
            f"{header.file}: {_DIVISORS} beside {key}scaling.type = {kind!r} is not supported"
        )
    if divisors is not None:
        # Divisors are the factors of longrope, the same ones for texts of any length.
        length = header.integer(f"{family}.context_length")
        rope |= {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        return rope | {
            "short_factor": divisors,
            "long_factor": divisors,
            "original_max_position_embeddings": length,
        }
    if kind == "none":
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": header.number(f"{key}scaling.factor", linear_factor)}
    if kind != "yarn":
        return rope
    length = header.integer(f"{family}.context_length")
    rope["original_max_position_embeddings"] = header.integer(
        f"{key}scaling.original_context_length", length
    )
    # Converters write the factor on cos and sin where a config has one. Another key multiplies it.
    multiple = header.number(f"{key}scaling.attn_factor", 1.0)
    stated = f"{key}scaling.yarn_attn_factor"
    if multiple != 1 or stated in header.values:
        factor = 0.1 * float(np.log(max(1.0, rope["factor"]))) + 1.0
        rope["attention_factor"] = multiple * header.number(stated, factor)
    for beta in ("beta_fast", "beta_slow"):
        if f"{key}scaling.yarn_{beta}" in header.values:
            rope[beta] = header.number(f"{key}scaling.yarn_{beta}")
    return rope


def _divisors(header: Header, head_dim: int) -> list[float] | None:
    """Give the divisor of each pair's frequency; None if all are 1."""
    entry = header.tensors.get(_DIVISORS)
    if entry is None:
        return None
    if entry.kind != "F32" or entry.shape != (head_dim // 2,):
        raise UserError(
            f"{header.file}: {_DIVISORS} is {entry.kind} {list(entry.shape)}, not F32 [{head_dim // 2}]"
        )
    divisors = np.fromfile(header.file, "<f4", head_dim // 2, offset=entry.start)
    if (divisors == 1).all():
        return None
    return divisors.tolist()


def _experts(header: Header, family: str, name: str) -> dict[str, Any]:
    """Read the fields of a mixture of experts; {} without one."""
    names = FAMILIES[name].experts
    if names is None:
        return {}
    fields: dict[str, Any] = {
        names.count: header.integer(f"{family}.expert_count"),
        "num_experts_per_tok": header.integer(f"{family}.expert_used_count"),
    }
    if names.width == "intermediate_size":
        return fields

    def width(key: str, tensor: str) -> int:
        """Read the width of an expert, or find it in a tensor, as older files have no key."""
        stored = f"blk.0.{tensor}.weight"
        entry = header.tensors.get(stored)
        if entry is None:
            return header.integer(f"{family}.{key}", None)
        if len(entry.shape) < 2:
            raise UserError(
                f"{header.file}: damaged: tensor {stored!r} has shape {list(entry.shape)}; wanted matrices"
            )
        return header.integer(f"{family}.{key}", entry.shape[-2])

    fields[names.width] = width("expert_feed_forward_length", "ffn_gate_exps")
    if names.shared_width is not None:
        fields[names.shared_width] = width("expert_shared_feed_forward_length", "ffn_gate_shexp")
    # What llama.cpp computes for each family of experts; the file does not say it.
    return fields | {
        "norm_topk_prob": family != "qwen2moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


# --- Tensors ---

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_output.bias": "self_attn.o_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    **{
        f"attn_{n}.{part}": f"self_attn.{n}_proj.{part}"
        for n in "qkv"
        for part in ("weight", "bias")
    },
    **{f"attn_{n}_norm.weight": f"self_attn.{n}_norm.weight" for n in "qk"},
    **{f"ffn_{n}.weight": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    **{
        f"ffn_{n}_shexp.weight": f"mlp.shared_expert.{n}_proj.weight"
        for n in ("gate", "up", "down")
    },
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    **{f"ffn_{n}_exps.bias": f"mlp.experts.{n}_proj_bias" for n in ("gate", "up", "down")},
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_EXPERT = {
    **{f"layers/experts_{n}": f"mlp.experts.{{}}.{n}_proj.weight" for n in ("gate", "up", "down")},
    "layers/router": "mlp.gate.weight",
    "layers/router_bias": "mlp.gate.bias",
    "layers/mlp_norm": "post_attention_layernorm.weight",
}
_OURS = {  # tensors that a family may name otherwise
    "ffn_norm.weight": "layers/mlp_norm",
    "ffn_gate_inp.weight": "layers/router",
    "ffn_gate_inp.bias": "layers/router_bias",
}
_TURNED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")


def find_tensors(file: Path) -> dict[str, Entry]:
    """Find the tensors of a file by Hugging Face's names.

    Returns:
        Every tensor. One whose name is not known keeps it. Each expert's matrix is a tensor of its
        own.

    Raises:
        UserError: for a type of tensor that is not read here, for codes where the package `gguf` is
            not installed, or as `read_fields` does.
    """
    header = read_header(file)
    fields = read_fields(file)
    family = header.text("general.architecture")
    name = fields["architectures"][0]
    has_offset = FAMILIES[name].norm_offset  # norms multiply by a weight plus 1
    tensors: dict[str, Entry] = {}
    for stored, entry in header.tensors.items():
        if stored == _DIVISORS:
            continue
        if not entry.readable:
            _refuse_type(file, stored, entry)
        if entry.kind in BLOCKS:
            require_decoder(file, entry.kind)
        front, _, suffix = stored.partition(".")
        number, _, part = suffix.partition(".")
        # Converters add the 1 to the weights of norms, except that of recurrent layers.
        if has_offset and stored.endswith("norm.weight") and part != "ssm_norm.weight":
            entry = entry._replace(undo=_less_one)
        if front != "blk" or not number.isdecimal():
            tensors[_OUTER.get(stored, stored)] = entry
            continue
        if int(number) >= fields["num_hidden_layers"]:
            continue  # a layer that drafts tokens, which is not computed here
        if family == "llama" and part in _TURNED:
            entry = entry._replace(order=Order(2, fields["head_dim"] // 2))
        if FAMILIES[name].recurrent:
            entry = _of_recurrence(fields, part, entry)
        tensors |= _layer_tensors(file, name, f"model.layers.{number}.", part, entry)
    return tensors


def _less_one(x: np.ndarray) -> np.ndarray:
    return x - 1


def _rate_of(decay: np.ndarray) -> np.ndarray:
    """Compute the logarithm of a decay, which a file holds as its negative."""
    # A damaged file gives no warning here: NaN weights show in logits.
    with np.errstate(all="ignore"):
        return np.log(-decay)


def _of_recurrence(fields: dict[str, Any], part: str, entry: Entry) -> Entry:
    """Note at a tensor of a recurrent layer what llama.cpp's converter did to it.

    Each key head serves several value heads. A checkpoint has the value heads of a key head
    together. A file has the first value head of every key head, then the second of each.
    """
    keys = fields["linear_num_key_heads"]
    values = fields["linear_num_value_heads"]
    dim = fields["linear_value_head_dim"]
    value_start = 2 * keys * fields["linear_key_head_dim"]  # behind the queries and keys
    # Where the value heads lie in each tensor that has some.
    after_keys = {"size": dim, "first": value_start}
    places = {
        "attn_qkv.weight": after_keys,
        "ssm_conv1d.weight": after_keys,
        "attn_gate.weight": {"size": dim},
        "ssm_out.weight": {"size": dim, "axis": 1},
        "ssm_alpha.weight": {},
        "ssm_beta.weight": {},
        "ssm_a": {},
        "ssm_dt.bias": {},
    }
    if part in places and keys and values % keys == 0:
        entry = entry._replace(order=Order(keys, values // keys, **places[part]))
    if part == "ssm_a":
        entry = entry._replace(undo=_rate_of)
    return entry


def _layer_tensors(file: Path, name: str, layer: str, part: str, entry: Entry) -> dict[str, Entry]:
    """Give a tensor of a layer by its name at Hugging Face; a tensor of all experts as the matrices
    of each."""
    names = _EXPERT | dict(FAMILIES[name].tensor_names)
    stem = part.removesuffix(".weight").removeprefix("ffn_")
    kind, _, expert = stem.partition("_exps" if stem.endswith("_exps") else ".")
    pattern = names.get(f"layers/experts_{kind}")
    if part == "ffn_gate_up_exps.weight" and len(entry.shape) == 3 and entry.shape[1] % 2 == 0:
        return _halves(file, name, layer, entry)
    if stem.endswith("_exps") and pattern is not None:
        if len(entry.shape) != 3 or 0 in entry.shape:
            raise UserError(
                f"{file}: {part!r} has shape {list(entry.shape)}, wanted [experts, outputs, inputs]"
            )
        count, *shape = entry.shape
        nbytes = entry.nbytes // count
        matrices = {}
        for number in range(count):
            start = entry.start + number * nbytes
            matrix = entry._replace(shape=tuple(shape), start=start, nbytes=nbytes)
            matrices[layer + pattern.format(number)] = matrix
        return matrices
    if expert.isdecimal() and pattern is not None:  # files from before all experts were one tensor
        return {layer + pattern.format(int(expert)): entry}
    if part in _OURS:
        return {layer + names[_OURS[part]]: entry}
    if part == "ffn_gate_inp_shexp.weight" and len(entry.shape) == 1:
        entry = entry._replace(shape=(1, *entry.shape))
    return {layer + _LAYER.get(part, part): entry}


def _halves(file: Path, name: str, layer: str, entry: Entry) -> dict[str, Entry]:
    """Cut the two inner matrices of all experts out of one tensor: of each expert the rows of the
    gate come first."""
    count, rows, columns = entry.shape
    nbytes = entry.nbytes // max(1, 2 * count)
    half = entry._replace(shape=(rows // 2, columns), nbytes=nbytes)
    tensors: dict[str, Entry] = {}
    start = entry.start
    for number, kind in itertools.product(range(count), ("gate", "up")):
        matrix = half._replace(start=start)
        tensors |= _layer_tensors(file, name, layer, f"ffn_{kind}.{number}.weight", matrix)
        start += nbytes
    return tensors


def _refuse_type(file: Path, name: str, entry: Entry):
    """Raise UserError for a tensor of a type that is not read, by the type's name where the package
    `gguf` knows it."""
    label = entry.kind
    number = int(label.removeprefix("type "))
    if importlib.util.find_spec("gguf") is not None:
        from gguf import GGMLQuantizationType

        kinds = {kind.value: kind.name for kind in GGMLQuantizationType}
        label = kinds.get(number, label)
    names = ", ".join(("F32", "F16", "BF16", *BLOCKS))
    raise UserError(f"{file}: tensor {name!r} is {label}, which is not read here; read are {names}")
