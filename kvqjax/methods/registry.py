"""Every method by name, and the policies that combine them, as text, dict or JSON (kvqjax.methods.grammar)."""

import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvqjax._errors import UserError, suggest
from kvqjax._options import check_names
from kvqjax.methods.aqua_wiring import aqua
from kvqjax.methods.commvq_wiring import commvq
from kvqjax.methods.grammar import read_json, read_selector, read_text, write_selector
from kvqjax.methods.habits import meant
from kvqjax.methods.higgs_wiring import higgs
from kvqjax.methods.kivi_wiring import exact, kivi, kivi_star, uniform
from kvqjax.methods.kvquant_wiring import kvquant
from kvqjax.methods.pairs import joined
from kvqjax.methods.plugins import Methods
from kvqjax.methods.rotated_wiring import kvarn, omniscale, oscar
from kvqjax.methods.spec import LayerSpec, Method, option_text
from kvqjax.methods.turboquant_wiring import turboquant
from kvqjax.methods.xquant_cl_wiring import xquant_cl
from kvqjax.methods.xquant_wiring import xquant

__all__ = ["METHODS", "MethodLike", "parse", "parse_all", "policy", "spelled_out", "to_dict"]

Source = str | os.PathLike | Mapping[str, Any]
MethodLike = Method | Source  # whatever `parse` takes: it stands at every door that wants a method

OWN: dict[str, Callable[..., Method]] = {
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
    "omniscale": omniscale,
    "kvarn": kvarn,
    "oscar": oscar,
    "turboquant": turboquant,
}
METHODS = Methods(OWN)  # with those of other packages


def _convert(value: Any, annotation, where: str) -> Any:
    """Convert an option's value, text or plain JSON, to its annotated type."""
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
    """Read the method's name and typed options at one level of a tree, without its layers."""
    name = tree.get("method", "")
    if name not in METHODS:
        hint = meant(str(name), METHODS)
        raise UserError(f"unknown method {str(name)!r}{suggest(str(name), METHODS) if hint is None else f'; {hint}'}")
    parameters = inspect.signature(METHODS[name]).parameters
    options = {}
    for key, value in tree.items():
        if key not in ("method", "layers"):
            check_names(name, [str(key)], [*parameters, "layers"])
            options[key] = _convert(value, parameters[key].annotation, f"{name}: {key}")
    return name, options


def _tree(source: Source) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        given = f"the function {source.__name__}" if callable(source) else repr(source)
        raise UserError(f"{given} is no method; wanted its value, such as kivi(bits=2), or a policy: 'kivi:bits=2'")
    if isinstance(source, os.PathLike) or source.strip().endswith(".json"):
        return read_json(Path(source.strip() if isinstance(source, str) else source))
    return read_text(source)


def parse(source: MethodLike) -> Method:
    """Read the method that a policy describes.

    A policy is a spec string (`kivi:bits=2;0-1=exact`), a dict of the JSON form (`{"method": "kivi", "bits": 2,
    "layers": {"0-1": "exact"}}`), or the path of a .json file that holds one. A method is returned as it is: every
    function that wants a method takes all of these. Raises UserError with the nearest known name when one is
    misspelt."""
    if isinstance(source, Method):
        return source
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


def parse_all(source: MethodLike | Sequence[MethodLike]) -> list[Method]:
    """Read one policy or several. Raises UserError as `parse` does."""
    single = isinstance(source, Method | str | os.PathLike | Mapping)
    return [parse(source)] if single else [parse(policy) for policy in source]


def to_dict(method: MethodLike) -> dict[str, Any]:
    """Write a method's policy in the JSON form, which `parse` reads back."""
    tree = read_text(str(parse(method)))
    name, options = _options(tree)
    layers = {numbers: to_dict(spec) for numbers, spec in tree.get("layers", {}).items()}
    return {"method": name, **options} | ({"layers": layers} if layers else {})


def spelled_out(method: Method) -> str:
    """Write a method's policy with every option of every layer, also those at their defaults. This text is what files
    store, because a later version may have other defaults. `parse` reads it back."""
    tree = read_text(str(method))

    def one(part: Mapping[str, Any]) -> str:
        name, options = _options(part)
        every = {p.name: options.get(p.name, p.default) for p in inspect.signature(METHODS[name]).parameters.values()}
        return name + ":" + ",".join(f"{key}={option_text(value)}" for key, value in every.items())

    exceptions = [f"{numbers}={one(part)}" for numbers, part in tree.get("layers", {}).items()]
    return ";".join([one(tree), *exceptions])


def policy(default: MethodLike, overrides: Mapping[str | int, MethodLike]) -> Method:
    """`default` for every layer but those named ("3", "-1", "0-2"), which follow their own method (or what `parse`
    reads as one); "0-2.k" and "-1.v" are the keys or values of layers alone, "k" and "v" those of all. Of what is named
    twice the later entry holds. Sinks and `keep` are the default's. Where `default`'s layers feed each other (aqua,
    xquant_cl), the others take their place in the chain: see `admit` of its layer."""
    default = parse(default)
    if not overrides:
        return default
    layer, pairs, names = default.layer, dict(default.overrides), [default.name]
    for chosen, given in overrides.items():
        method, (numbers, part) = parse(given), read_selector(chosen)
        if method.overrides or method.keep:
            what = "layers" if method.overrides else "a keep"
            raise UserError(f"{method} has {what} of its own and cannot stand for layers {chosen} of {default}")
        place = functools.partial(_replaced, default.layer, part, method.layer)
        if numbers is None:
            layer, pairs = place(layer), {number: place(spec) for number, spec in pairs.items()}
        else:
            _check_ends(default, numbers, part, pairs)
            pairs |= {number: place(pairs.get(number, layer)) for number in numbers}
        names.append(f"{write_selector(numbers, part)}={method.name}")
    return dataclasses.replace(default, name=";".join(names), layer=layer, overrides=tuple(pairs.items()))


def _replaced(default: LayerSpec, part: str, new: LayerSpec, old: LayerSpec) -> LayerSpec:
    """Give `old` the keys or values of `new`; with "" for both, give `new` as `default` admits it."""
    if part:
        return joined(new, old) if part == "k" else joined(old, new)
    return getattr(default, "admit", lambda spec: spec)(new)


def _check_ends(default: Method, numbers: range, part: str, pairs: Mapping[int, LayerSpec]) -> None:
    """Raise UserError where a part's layer may be one that was counted from the other end: which other part it then has
    is known for each model only."""
    if part and any((number < 0) != (numbers[0] < 0) for number in pairs):
        raise UserError(f"{default}: layers whose keys and values are named apart must be counted from one end")
