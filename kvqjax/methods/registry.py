"""Every method by name, and the spec strings that name them: `kivi:bits=2,window=64;0-1=exact;-1=kivi:bits=4`."""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable

from kvqjax.errors import UserError
from kvqjax.methods.aqua import aqua
from kvqjax.methods.commvq import commvq
from kvqjax.methods.higgs import higgs
from kvqjax.methods.kivi import exact, kivi, kivi_star, uniform
from kvqjax.methods.kvquant import kvquant
from kvqjax.methods.spec import Method
from kvqjax.methods.xquant import xquant
from kvqjax.methods.xquant_cl import xquant_cl

__all__ = ["METHODS", "parse", "policy"]

MOST_LAYERS = 10_000  # a range is written out layer by layer before any model is known

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


def _convert(text: str, annotation, where: str):
    """Read an option's text as its annotated type."""
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


def _parse_one(text: str) -> Method:
    name, _, rest = text.strip().partition(":")
    if name not in METHODS:
        raise _unknown("method", name, METHODS)
    parameters = inspect.signature(METHODS[name]).parameters
    options = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if key not in parameters:
            raise _unknown(f"option of {name}", key, parameters)
        if not equals or key in options:
            raise UserError(
                f"{name}: {item!r} is not one option=value" if not equals else f"{name}: {key} stands twice"
            )
        options[key] = _convert(value, parameters[key].annotation, f"{name}: {key}")
    try:
        return METHODS[name](**options)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def _layer_numbers(text: str) -> range:
    """`3`, `-1` or `0-2`."""
    first, dash, last = text.strip().partition("-") if not text.strip().startswith("-") else (text, "", "")
    try:
        numbers = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise UserError(f"{text!r} is not a layer number or a range such as 0-2") from None
    if not -MOST_LAYERS < numbers.start <= numbers.stop < MOST_LAYERS:
        raise UserError(f"{text!r} is no range of layers below {MOST_LAYERS}")
    return numbers


def parse(text: str) -> Method:
    """Read a spec string: a method with options, then `;layers=method` exceptions. Raises UserError with the nearest
    known name when one is misspelt."""
    head, *exceptions = text.split(";")
    overrides = {}
    for item in exceptions:
        layers, equals, spec = item.partition("=")
        if not equals:
            raise UserError(f"{item!r} is not layers=method")
        overrides[layers.strip()] = _parse_one(spec)
    return policy(_parse_one(head), overrides)


def policy(default: Method, overrides: dict[str, Method]) -> Method:
    """`default` for every layer but those named ("3", "-1", "0-2"), which follow their own method. Sinks are the
    default's."""
    if not overrides:
        return default
    pairs = dict(default.overrides)
    for layers, method in overrides.items():
        if method.overrides:
            raise UserError(f"{method} has layers of its own and cannot stand for layers {layers} of {default}")
        pairs |= dict.fromkeys(_layer_numbers(layers), method.layer)
    name = ";".join([default.name, *(f"{layers}={method.name}" for layers, method in overrides.items())])
    return dataclasses.replace(default, name=name, overrides=tuple(pairs.items()))
