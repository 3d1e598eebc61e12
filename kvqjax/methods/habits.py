"""What users of other libraries write for a cache, and the policy here that comes nearest to it."""

import re
from collections.abc import Collection

__all__ = ["meant"]

_EXACT = "exact"
# Codes of 32 numbers of a token that share a scale and a minimum of 16 bits each: a bit a number beside the code.
_EIGHT, _SIX, _FIVE, _FOUR = (f"uniform:bits={bits},group=32 ({bits + 1} bits a number)" for bits in (8, 6, 5, 4))
_GENERAL = "kivi:bits={}"

# llama.cpp's types of a cache, vLLM's and SGLang's dtypes, transformers' implementations and back ends.
_OTHERS = {
    **dict.fromkeys(("f32", "f16", "bf16", "fp16", "fp32", "float16", "bfloat16", "float32", "auto", "none"), _EXACT),
    **dict.fromkeys(("dynamic", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window"), _EXACT),
    **dict.fromkeys(("q8_0", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "int8", "float8", "8bit"), _EIGHT),
    **dict.fromkeys(("q4_0", "q4_1", "iq4_nl", "int4", "fp4", "nf4", "nvfp4", "mxfp4", "4bit"), _FOUR),
    **dict.fromkeys(("q5_0", "q5_1"), _FIVE),
    **dict.fromkeys(("q6_k",), _SIX),
    **dict.fromkeys(("q2_k", "int2", "2bit"), _GENERAL.format(2)),
    **dict.fromkeys(("q3_k", "int3", "3bit"), _GENERAL.format(3)),
    **dict.fromkeys(("quantized", "quanto", "hqq"), _GENERAL.format(4)),
}


def meant(name: str, known: Collection[str]) -> str | None:
    """The policy that an unknown method's name stands for.

    Args:
        name: what was written in the place of a method.
        known: the names of methods.

    Returns:
        What to write, as the end of a message; None where nothing is known of it.
    """
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    plain = plain.replace("*", "_star").replace("aqua_kv", "aqua").replace("kv_cache_", "")
    if plain in known:
        return f"names of methods are in lower case: write {plain}" if plain == name.lower() else f"write {plain}"
    if plain in _OTHERS:
        policy = _OTHERS[plain]
        return "write exact (the compute dtype: --dtype)" if policy == _EXACT else f"the nearest here is {policy}"
    bits = re.fullmatch(r"([a-z_]*?)_?(\d+)_?(?:bits?|b)?", plain)
    if bits is not None and (bits[1] in known or not bits[1]):
        return f"write {bits[1] or 'kivi'}:bits={bits[2]}"
    return None
