"""The two written forms of a policy and the tree between them; names and values are checked by the registry.

text   kivi:key_bits=4,window=64;0-1=exact
JSON   {"method": "kivi", "key_bits": 4, "window": 64, "layers": {"0-1": "exact"}}
tree   the JSON form; a layer's entry may be a text of its own

An exception names layers ("0-1"), the keys or values of layers ("0-1.k", "-1.v"), or those of every layer ("k", "v");
the text "k=higgs:bits=3;v=kivi:bits=2" is "kivi:bits=2;k=higgs:bits=3".
"""

import re
from pathlib import Path
from typing import Any

from kvqjax import _files as files
from kvqjax._errors import UserError

__all__ = ["layer_numbers", "read_json", "read_selector", "read_text", "write_selector"]

MOST_LAYERS = 10_000  # a range is written out layer by layer before any model is known


def _read_one(text: str) -> dict[str, Any]:
    name, _, rest = text.strip().partition(":")
    tree: dict[str, Any] = {"method": name}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            bits = re.fullmatch(r"(\d+)(?:-?bits?|b)?", item)
            hint = f"; write {name}:bits={bits[1]}" if bits else f", such as {name}:window=64"
            raise UserError(f"{name}: {item!r} is not one option=value{hint}")
        if key in tree:
            raise UserError(f"{name}: {key} stands twice")
        tree[key] = value
    return tree


def read_text(text: str) -> dict[str, Any]:
    """Read the tree of a spec string: a method with options, then `;layers=method` exceptions."""
    head, *exceptions = text.split(";")
    parts = dict(re.findall(r"(?:^|;)\s*([kv])\s*=([^;]*)", text))
    if re.match(r"\s*[kv]\s*=", head):
        if set(parts) != {"k", "v"}:
            raise UserError(f"{head!r} names no method for the other part; wanted k=METHOD;v=METHOD")
        others = [item for item in exceptions if not re.match(r"\s*[kv]\s*=", item)]
        head, exceptions = parts["v"], [f"k={parts['k']}", *others]
    tree, layers = _read_one(head), {}
    for item in exceptions:
        numbers, equals, spec = item.partition("=")
        if not equals:
            raise UserError(f"{item!r} is not layers=method")
        if numbers.strip() in layers:
            raise UserError(f"layers {numbers.strip()} stand twice")
        layers[numbers.strip()] = _read_one(spec)
    return tree | ({"layers": layers} if layers else {})


def read_json(path: Path) -> dict[str, Any]:
    """Read the tree of a JSON file. Raises UserError with the place of a syntax error."""
    tree = files.read_json(path)
    if not isinstance(tree, dict):
        raise UserError(f'{path}: wanted an object such as {{"method": "kivi", "bits": 2}}')
    return tree


def layer_numbers(text: str | int) -> range:
    """Read `3`, `-1`, `0-2` or `-4--2`, both ends included."""
    found = re.fullmatch(r"\s*(-?\d+)\s*(?:-\s*(-?\d+)\s*)?", str(text))
    if found is None:
        raise UserError(f"{text!r} is not a layer number or a range such as 0-2")
    first = int(found[1])
    last = first if found[2] is None else int(found[2])
    if last < first or first < 0 <= last:
        raise UserError(f"{text!r} is an empty range of layers")
    if not -MOST_LAYERS < first <= last < MOST_LAYERS:
        raise UserError(f"{text!r} is no range of layers below {MOST_LAYERS}")
    return range(first, last + 1)


def read_selector(text: str | int) -> tuple[range | None, str]:
    """Read the (layers, part) that an exception names. Layers are None for all of them; the part is "k", "v", or "" for
    both."""
    layers, dot, part = str(text).rpartition(".")
    if str(text).strip() in ("k", "v"):
        return None, str(text).strip()
    if dot and part.strip() not in ("k", "v"):
        raise UserError(f"{text!r} is neither the keys (.k) nor the values (.v) of layers")
    return layer_numbers(layers if dot else text), part.strip() if dot else ""


def write_selector(numbers: range | None, part: str) -> str:
    """Write the text that `read_selector` reads."""
    if numbers is None:
        return part
    layers = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    return f"{layers}.{part}" if part else layers
