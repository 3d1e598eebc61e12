"""The two written forms of a policy, the tree that both are read into, and the names that other
libraries have for caches. The registry checks names and values.

text   kivi:key_bits=4,window=64;0-1=exact
JSON   {"method": "kivi", "key_bits": 4, "window": 64, "layers": {"0-1": "exact"}}
tree   the JSON form; a layer's entry may be a text of its own

An exception names layers ("0-1"), the keys or values of layers ("0-1.k", "-1.v"), or those of every
layer ("k", "v"); the text "k=higgs:bits=3;v=kivi:bits=2" is "kivi:bits=2;k=higgs:bits=3".
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvqjax import _files as files
from kvqjax._errors import UserError

# Bound of layer numbers. A range is expanded to a list of layers before a model, and its number of
# layers, is known.
MOST_LAYERS = 10_000
NO_VALUE = object()  # in a tree, of an option without "=": the registry refuses it


# ---- Text and JSON ----


def _read_method(text: str) -> dict[str, Any]:
    """Read one level of a tree: `method:option=value,...`."""
    name, _, options = text.strip().partition(":")
    tree: dict[str, Any] = {"method": name}
    for part in options.split(","):
        item = part.strip()
        if not item:
            continue
        key, equals, value = item.partition("=")
        if key in tree:
            raise UserError(f"{name}: {key} stands twice")
        tree[key] = value if equals else NO_VALUE
    return tree


def _split(text: str) -> tuple[str, list[str]]:
    """Split a spec string into the method of all layers and its exceptions. In "k=...;v=..." the
    method of values is the method of all layers, and the method of keys is the first exception."""
    default, *exceptions = text.split(";")
    if not re.match(r"\s*[kv]\s*=", default):
        return default, exceptions
    pairs = re.findall(r"(?:^|;)\s*([kv])\s*=([^;]*)", text)
    parts = dict(pairs)
    if len(pairs) > len(parts):
        raise UserError(f"{text!r} names the keys or the values twice")
    if set(parts) != {"k", "v"}:
        raise UserError(f"{default!r} names no method for the other part; wanted k=METHOD;v=METHOD")
    of_layers = [item for item in exceptions if not re.match(r"\s*[kv]\s*=", item)]
    return parts["v"], [f"k={parts['k']}", *of_layers]


def read_text(text: str) -> dict[str, Any]:
    """Read the tree of a spec string: a method with options, then `;layers=method` exceptions."""
    default, exceptions = _split(text)
    tree = _read_method(default)
    layers = {}
    for item in exceptions:
        numbers, equals, spec = item.partition("=")
        if not equals:
            raise UserError(f"{item!r} is not layers=method")
        selector = numbers.strip()
        if selector in layers:
            raise UserError(f"layers {selector} stand twice")
        layers[selector] = _read_method(spec)
    if layers:
        tree["layers"] = layers
    return tree


def read_json(path: Path) -> dict[str, Any]:
    """Read the tree of a JSON file. Raises UserError with the place of a syntax error."""
    tree = files.read_json(path)
    if not isinstance(tree, dict):
        raise UserError(f'{path}: wanted an object such as {{"method": "kivi", "bits": 2}}')
    return tree


# ---- Layers and parts that an exception names ----


def layer_numbers(text: str | int) -> range:
    """Read the numbers of some layers: `3`, `-1`, `0-2` or `-4--2`, both ends included. Raises
    UserError for other texts."""
    numbers = re.fullmatch(r"\s*(-?\d{1,18})\s*(?:-\s*(-?\d{1,18})\s*)?", str(text))
    if numbers is None:
        raise UserError(f"{text!r} is not a layer number or a range such as 0-2")
    first = int(numbers[1])
    last = first if numbers[2] is None else int(numbers[2])
    # From the end to the start: the range would depend on how many layers a model has.
    if last < first or first < 0 <= last:
        raise UserError(f"{text!r} is an empty range of layers")
    if not -MOST_LAYERS < first <= last < MOST_LAYERS:
        raise UserError(f"{text!r} is no range of layers below {MOST_LAYERS}")
    return range(first, last + 1)


def read_selector(text: str | int) -> tuple[range | None, str]:
    """Read the (layers, part) that an exception names. Layers are None for all of them; the part is
    "k", "v", or "" for both."""
    selector = str(text).strip()
    if selector in ("k", "v"):
        return None, selector
    layers, dot, part = str(text).rpartition(".")
    if not dot:
        return layer_numbers(text), ""
    part = part.strip()
    if part not in ("k", "v"):
        raise UserError(f"{text!r} is neither the keys (.k) nor the values (.v) of layers")
    return layer_numbers(layers), part


def write_selector(numbers: range | None, part: str) -> str:
    """Write the text that `read_selector` reads."""
    if numbers is None:
        return part
    layers = str(numbers[0])
    if len(numbers) > 1:
        layers += f"-{numbers[-1]}"
    if part:
        layers += f".{part}"
    return layers


# ---- What other libraries name a cache, and the policy here that comes nearest to it ----

_EXACT = "exact"
# 32 numbers of a token share a scale and a minimum of 16 bits each, which is one more bit a number.
_EIGHT, _SIX, _FIVE, _FOUR = (
    f"uniform:bits={bits},group=32 ({bits + 1} bits a number)" for bits in (8, 6, 5, 4)
)
_GENERAL = "kivi:bits={}"

# llama.cpp's types of a cache, vLLM's and SGLang's dtypes, transformers' implementations and back
# ends.
_HABITS = {
    **dict.fromkeys(
        ("f32", "f16", "bf16", "fp16", "fp32", "float16", "bfloat16", "float32", "auto", "none"),
        _EXACT,
    ),
    **dict.fromkeys(
        ("dynamic", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window"), _EXACT
    ),
    **dict.fromkeys(
        ("q8_0", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "int8", "float8", "8bit"), _EIGHT
    ),
    **dict.fromkeys(
        ("q4_0", "q4_1", "iq4_nl", "int4", "fp4", "nf4", "nvfp4", "mxfp4", "4bit"), _FOUR
    ),
    **dict.fromkeys(("q5_0", "q5_1"), _FIVE),
    **dict.fromkeys(("q6_k",), _SIX),
    **dict.fromkeys(("q2_k", "int2", "2bit"), _GENERAL.format(2)),
    **dict.fromkeys(("q3_k", "int3", "3bit"), _GENERAL.format(3)),
    **dict.fromkeys(("quantized", "quanto", "hqq"), _GENERAL.format(4)),
}


def nearest_policy(name: str, methods: Collection[str]) -> tuple[str, str] | None:
    """Say which policy an unknown method's name stands for.

    Args:
        name: what was written in the place of a method.
        methods: the names of methods.

    Returns:
        (the policy, which may not exist; what to write, as the end of a message). None for a name
        that no other library has.
    """
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    plain = plain.replace("*", "_star").replace("aqua_kv", "aqua").replace("kv_cache_", "")
    if plain in methods:
        hint = f"write {plain}"
        if plain == name.lower():  # nothing else was wrong
            hint = f"names of methods are in lower case: {hint}"
        return plain, hint
    if plain in _HABITS:
        nearest = _HABITS[plain]
        if nearest == _EXACT:
            return _EXACT, "write exact (numbers of the compute dtype)"
        policy = nearest.split(" ")[0]  # what follows says what it costs
        return policy, f"the nearest here is {nearest}"
    # "kivi2", "kivi_4bit", or "2bit" alone.
    bits = re.fullmatch(r"([a-z_]*?)_?(\d+)_?(?:bits?|b)?", plain)
    if bits is None or (bits[1] and bits[1] not in methods):
        return None
    policy = f"{bits[1] or 'kivi'}:bits={bits[2]}"
    return policy, f"write {policy}"
