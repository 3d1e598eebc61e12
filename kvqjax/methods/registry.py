"""Every method by name, and the policies that combine them, as text, dict or JSON (kvqjax.methods.grammar)."""

import dataclasses
import difflib
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvqjax.errors import UserError
from kvqjax.methods.aqua import aqua
from kvqjax.methods.commvq import commvq
from kvqjax.methods.grammar import layer_numbers, read_json, read_text, write_layers
from kvqjax.methods.higgs import higgs
from kvqjax.methods.kivi import exact, kivi, kivi_star, uniform
from kvqjax.methods.kvquant import kvquant
from kvqjax.methods.spec import Method, option_text
from kvqjax.methods.xquant import xquant
from kvqjax.methods.xquant_cl import xquant_cl

__all__ = ["METHODS", "parse", "policy", "spelled_out", "to_dict"]

Source = str | os.PathLike | Mapping[str, Any]

METHODS: dict[str, Callable[..., Method]] = {
    "exact": exact,
    "uniform": uniform,
    "kivi": kivi,
    "kivi_star": kivi_star,
    "kvquant": kvquant,
    "higgs": higgs,
    "aqua": aqua,
    "commvq": commvq,
    "xquant": xquant,
    "xquant_cl": xquant_cl,
}


def _unknown(kind: str, name: str, known) -> UserError:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}")


def _convert(value: Any, annotation, where: str) -> Any:
    """An option's value, text or plain JSON, as its annotated type."""
    if not isinstance(value, str | int | float | bool | None) or (isinstance(value, str) and set(value) & set(",;")):
        raise UserError(f"{where}: {value!r} is not one number or word")
    text = str(value).lower() if isinstance(value, bool | None) else str(value)
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if type(None) in options and text.lower() == "none":
        return None
    kind = next(t for t in options if t is not type(None))
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
    else:
        try:
            return kind(text)
        except ValueError:
            pass
    raise UserError(f"{where}: {text!r} is not {'true or false' if kind is bool else f'of type {kind.__name__}'}")


def _options(tree: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Method name and typed options of one level of a tree, its layers left out."""
    name = tree.get("method", "")
    if name not in METHODS:
        raise _unknown("method", str(name), METHODS)
    parameters = inspect.signature(METHODS[name]).parameters
    options = {}
    for key, value in tree.items():
        if key not in ("method", "layers"):
            if key not in parameters:
                raise _unknown(f"option of {name}", str(key), [*parameters, "layers"])
            options[key] = _convert(value, parameters[key].annotation, f"{name}: {key}")
    return name, options


def _tree(source: Source) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, os.PathLike) or source.strip().endswith(".json"):
        return read_json(Path(source.strip() if isinstance(source, str) else source))
    return read_text(source)


def parse(source: Source) -> Method:
    """The method that a policy describes: a spec string (`kivi:bits=2;0-1=exact`), a dict of the JSON form
    (`{"method": "kivi", "bits": 2, "layers": {"0-1": "exact"}}`), or the path of a .json file that holds one.
    Raises UserError with the nearest known name when one is misspelt."""
    tree = _tree(source)
    name, options = _options(tree)
    layers = tree.get("layers", {})
    if not isinstance(layers, Mapping):
        raise UserError(f'{name}: layers={layers!r}; wanted an object such as {{"0-1": "exact"}}')
    try:
        return policy(METHODS[name](**options), layers)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def to_dict(method: Method) -> dict[str, Any]:
    """The JSON form of a method's policy, which `parse` reads back."""
    tree = read_text(str(method))
    name, options = _options(tree)
    layers = {numbers: to_dict(parse(spec)) for numbers, spec in tree.get("layers", {}).items()}
    return {"method": name, **options} | ({"layers": layers} if layers else {})


def spelled_out(method: Method) -> str:
    """The text of a method's policy with every option of every layer, also those at their defaults: what is stored,
    because a later version may have other defaults. `parse` reads it back."""
    tree = read_text(str(method))

    def one(part: Mapping[str, Any]) -> str:
        name, options = _options(part)
        every = {p.name: options.get(p.name, p.default) for p in inspect.signature(METHODS[name]).parameters.values()}
        return name + ":" + ",".join(f"{key}={option_text(value)}" for key, value in every.items())

    exceptions = [f"{numbers}={one(part)}" for numbers, part in tree.get("layers", {}).items()]
    return ";".join([one(tree), *exceptions])


def policy(default: Method, overrides: Mapping[str | int, Method | Source]) -> Method:
    """`default` for every layer but those named ("3", "-1", "0-2"), which follow their own method (or what `parse`
    reads as one); of layers named twice the later entry holds. Sinks and `keep` are the default's. Where `default`'s
    layers feed each other (aqua, xquant_cl), the others take their place in the chain: see `admit` of its layer."""
    if not overrides:
        return default
    pairs, names = dict(default.overrides), [default.name]
    admit = getattr(default.layer, "admit", lambda spec: spec)
    for layers, given in overrides.items():
        method, numbers = given if isinstance(given, Method) else parse(given), layer_numbers(layers)
        if method.overrides or method.keep:
            what = "layers" if method.overrides else "a keep"
            raise UserError(f"{method} has {what} of its own and cannot stand for layers {layers} of {default}")
        pairs |= dict.fromkeys(numbers, admit(method.layer))
        names.append(f"{write_layers(numbers)}={method.name}")
    return dataclasses.replace(default, name=";".join(names), overrides=tuple(pairs.items()))
