"""Fields of config.json that stand by themselves: numbers and ids as they are read, what is
accepted, what is refused.

Every refusal is one line that names the field and its value.
"""

import json
import sys
from typing import Any, NoReturn, TypeGuard

from kvqjax._errors import UserError
from kvqjax.model.hf_families import Family

SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"

# Fields that change what a model computes, with the values that leave it as the decoder has it.
# Null is always fine.
_ACCEPTED: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
    "compression_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "alibi": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "attn_output_gate": (False,),
    "output_gate_type": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}


# --- Refusals, and numbers ---


def refuse(field: str, value: Any, reason: str) -> NoReturn:
    """Raise the one-line UserError for a field of config.json.

    Args:
        field: the field's name, with the names of the objects that it lies in.
        value: the field's value; None: it is missing.
        reason: what is wanted instead, or why the value is refused.

    Raises:
        UserError: always.
    """
    problem = "is missing" if value is None else f"= {json.dumps(value)} is not supported"
    # A field's name comes from a file and may hold a line break.
    raise UserError(" ".join(f"config.json: {field} {problem}; {reason}".split()))


def is_integer(value: Any) -> TypeGuard[int]:
    """Say whether a value of a JSON file is an integer: Python takes true and false for integers
    too."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_integer(raw: dict, field: str, prefix: str = "", most: int = 2**31 - 1) -> int:
    """Read a positive integer.

    Args:
        raw: config.json, or an object inside it.
        field: the field's name in `raw`.
        prefix: what names that object in messages, with a dot at its end.
        most: the largest integer that is accepted.

    Raises:
        UserError: for a field that is missing or something else.
    """
    value = raw.get(field)
    if not is_integer(value) or not 1 <= value <= most:
        refuse(prefix + field, value, f"wanted a positive integer of at most {most}")
    return value


def read_number(raw: dict, field: str, default: float | None = None, prefix: str = "") -> float:
    """Read a positive number.

    Args:
        raw: config.json, or an object inside it.
        field: the field's name in `raw`.
        default: the number of a field that is missing or null; None: such a field is refused.
        prefix: what names that object in messages, with a dot at its end.

    Raises:
        UserError: for a field that is missing or something else.
    """
    value = default if raw.get(field) is None else raw[field]
    # Compared with the largest float because a JSON integer can be larger than any.
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        refuse(prefix + field, value, "wanted a positive number")
    return float(value)


def read_softcap(raw: dict, field: str, has_cap: bool) -> float | None:
    """Read a cap of scores or logits.

    Args:
        field: `SCORE_CAP` or `LOGIT_CAP`.
        has_cap: whether the family computes this cap.

    Returns:
        The cap; None for a model without it.

    Raises:
        UserError: for a cap that is no positive number.
    """
    return read_number(raw, field) if has_cap and raw.get(field) is not None else None


# --- Fields that are only checked ---


def check_accepted(raw: dict, family: Family):
    """Refuse what the decoder does not compute.

    Args:
        raw: the contents of config.json, with the family's defaults.

    Raises:
        UserError: for a field that needs an unsupported computation, or for code of a checkpoint.
    """
    read = {SCORE_CAP: family.score_softcap, LOGIT_CAP: family.logit_softcap}
    for field, accepted in (_ACCEPTED | dict(family.accepted)).items():
        value = None if read.get(field) else raw.get(field)
        if field == "partial_rotary_factor" and family.recurrent:
            continue  # read with the rope
        if value is not None and value not in accepted:
            choices = " or ".join(json.dumps(choice) for choice in accepted) or "null"
            refuse(field, value, f"wanted {choices}")
    # In Llama and Qwen3 `attention_bias` also gives o_proj a bias. Qwen2 ignores it and always has
    # biases on q, k and v, but its kind with experts has a flag of its own.
    if raw.get("qkv_bias", True) is not True and family.qkv_bias:
        refuse("qkv_bias", raw["qkv_bias"], "wanted true")
    if raw.get("attention_bias") and not family.qkv_bias:
        reason = "a bias on o_proj is not computed; wanted false"
        refuse("attention_bias", raw["attention_bias"], reason)
    code = raw.get("auto_map") or {}
    if not isinstance(code, dict) or any(name.startswith("AutoModel") for name in code):
        refuse("auto_map", code, "code from a checkpoint is never run")


# --- Tokens ---


def read_eos_ids(*files: dict) -> tuple[int, ...]:
    """Read the end-of-sequence ids of config.json, then those that generation_config.json adds.

    Args:
        *files: the contents of the two files.

    Returns:
        The ids, each of them once.

    Raises:
        UserError: for ids that are no integers.
    """
    ids = []
    for raw in files:
        value = raw.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_integer(number) for number in ids):
        refuse("eos_token_id", ids, "wanted an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


def read_bos_id(raw: dict) -> int | None:
    """Read the id that texts begin with.

    Returns:
        The id; None for a model without it.

    Raises:
        UserError: for an id that is no integer.
    """
    value = raw.get("bos_token_id")
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if value is not None and not is_integer(value):
        refuse("bos_token_id", value, "wanted an integer")
    return value
