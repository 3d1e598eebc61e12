"""Every method by name, and the policies that combine them, as text, dict or JSON
(kvqjax.methods.grammar).

Methods of other packages are found by their entry points:

    [project.entry-points."kvqjax.methods"]
    fp4 = "their_package:fp4"                # a factory made by `kvqjax.methods.method_factory`

Policies, the command line, the ledger, the planner and `kvqjax.testing` then know them by name, as
they know ours.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kvqjax._errors import UserError, suggest
from kvqjax._files import path_of
from kvqjax._options import check_names
from kvqjax.methods.grammar import (
    NO_VALUE,
    nearest_policy,
    read_json,
    read_selector,
    read_text,
    write_selector,
)
from kvqjax.methods.keys_values import joined
from kvqjax.methods.papers.aqua import aqua
from kvqjax.methods.papers.commvq import commvq
from kvqjax.methods.papers.higgs import higgs
from kvqjax.methods.papers.kivi import exact, kivi, kivi_star, uniform
from kvqjax.methods.papers.klt import klt
from kvqjax.methods.papers.kvquant import kvquant
from kvqjax.methods.papers.rotated import kvarn, omniscale, oscar
from kvqjax.methods.papers.turboquant import turboquant
from kvqjax.methods.papers.xquant import xquant
from kvqjax.methods.papers.xquant_cl import xquant_cl
from kvqjax.methods.spec import LayerSpec, Method, option_text

GROUP = "kvqjax.methods"  # of entry points
POLICIES = Path(__file__).parents[1] / "assets" / "policies"  # shipped ones (docs/howto/choose.md)
Factory = Callable[..., Method]
Source = str | os.PathLike | Mapping[str, Any]
MethodLike = Method | Source  # any argument of `parse`; functions that want a method take it


# ---- Methods by name ----

OWN: dict[str, Factory] = {
    "exact": exact,
    "uniform": uniform,
    "kivi": kivi,
    "kivi_star": kivi_star,
    "klt": klt,
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


class Methods(Mapping):
    """Factories by name: this library's, and those of other packages. Other packages are searched
    once, and imported when one of their methods is asked for.

    Raises UserError for a method that cannot be imported, and for one that has the name of a method
    of this library."""

    def __init__(self, library: dict[str, Factory]):
        self.library = library

    @functools.cached_property
    def of_packages(self) -> dict[str, Any]:
        """The entry points of other packages' methods, by name. None is imported yet."""
        entries = {entry.name: entry for entry in entry_points(group=GROUP)}
        for name in entries.keys() & self.library.keys():
            raise UserError(
                f"{entries[name].value}: {name!r} is a method of kvqjax; name yours otherwise"
            )
        return entries

    def __getitem__(self, name: str) -> Factory:
        if name in self.library:
            return self.library[name]
        entry = self.of_packages[name]
        try:
            return entry.load()
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"method {name!r} of {entry.value} cannot be imported: {error}"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter([*self.library, *self.of_packages])

    def __len__(self) -> int:
        return len(self.library) + len(self.of_packages)


METHODS = Methods(OWN)


# ---- Reading and writing policies ----


def _convert(value: Any, annotation, where: str) -> Any:
    """Convert an option's value, text or plain JSON, to its annotated type.

    Args:
        annotation: a type, or a union of types such as `int | None`.
        where: the method and the option, for messages.

    Raises:
        UserError: for a value of another type."""
    # A comma or semicolon would end the option where a policy is written as text.
    has_separator = isinstance(value, str) and ("," in value or ";" in value)
    if has_separator or not isinstance(value, str | int | float | bool | None):
        raise UserError(f"{where}: {value!r} is not one number or word")
    text = str(value)
    if isinstance(value, bool | None):
        text = text.lower()  # as policies write them
    is_union = isinstance(annotation, types.UnionType)
    types_taken = typing.get_args(annotation) if is_union else (annotation,)
    if type(None) in types_taken and text.lower() == "none":
        return None
    kinds = [kind for kind in types_taken if kind is not type(None)]
    # `bool` would take any text for true.
    if kinds == [bool]:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UserError(f"{where}: {text!r} is not true or false")
    # The first type of a union that can read the text is meant.
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return kind(text)
    names = [kind.__name__ for kind in kinds]
    raise UserError(f"{where}: {text!r} is not of type {' or '.join(names)}")


def _is_policy(text: str) -> bool:
    """Say whether `parse` takes a text: nothing else is hinted at."""
    try:
        parse(text)
    except UserError:
        return False
    return True


def _method_hint(name: str) -> str:
    """Say what to write for an unknown method's name."""
    nearest = nearest_policy(name, METHODS)
    if nearest is not None:
        policy, words = nearest
        if _is_policy(policy):
            return f"; {words}"
    return suggest(name, METHODS)


def _bits_hint(name: str, item: str) -> str:
    """Say what to write for an option without a value: "kivi:2bit" means kivi:bits=2."""
    bits = re.fullmatch(r"(\d+)(?:-?bits?|b)?", item)
    if bits is not None:
        policy = f"{name}:bits={bits[1]}"
        if _is_policy(policy):
            return f"; write {policy}"
    return ", such as kivi:window=64"


def _options(tree: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Read the method's name and typed options at one level of a tree, without its layers."""
    name = str(tree.get("method", ""))  # JSON may hold anything there
    if name not in METHODS:
        if len(name) > 80:  # a text in the place of a policy: it says itself what it is
            raise UserError(
                f"unknown method {name[:40]!r}...: wanted a policy such as 'kivi:bits=2', got a text"
            )
        raise UserError(f"unknown method {name!r}{_method_hint(name)}")
    parameters = inspect.signature(METHODS[name]).parameters
    options = {}
    for key, value in tree.items():
        if value is NO_VALUE:
            raise UserError(f"{name}: {key!r} is not one option=value{_bits_hint(name, str(key))}")
        if key not in ("method", "layers"):
            check_names(name, [str(key)], [*parameters, "layers"])
            options[key] = _convert(value, parameters[key].annotation, f"{name}: {key}")
    return name, options


def _tree(source: Source) -> Mapping[str, Any]:
    """Read a policy in any of its forms as a dict of the JSON form. Raises UserError for what is
    none, and for files that cannot be read."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        description = repr(source)
        if callable(source):  # a factory that was not called
            description = f"the function {source.__name__}"
        raise UserError(
            f"{description} is no method; wanted its value, such as kivi(bits=2), or a policy: 'kivi:bits=2'"
        )
    if isinstance(source, str):
        text = source.strip()
        if not text.endswith(".json"):
            return read_text(source)
        path = path_of(text)
    else:
        path = path_of(source)
    shipped = POLICIES / path.name
    # The current folder comes first: a user's own file may have any name.
    is_bare_name = path == Path(path.name)
    if is_bare_name and not path.exists() and shipped.exists():
        return read_json(shipped)
    return read_json(path)


def parse(source: MethodLike) -> Method:
    """Read the method that a policy describes.

    Args:
        source: a spec string (`kivi:bits=2;0-1=exact`), a dict of the JSON form (`{"method":
            "kivi", "bits": 2, "layers": {"0-1": "exact"}}`), the path of a .json file that holds
            such a dict, the name of one that is shipped (kvqjax/assets/policies:
            "smollm2-2.5.json"), or a method. Every function that takes a method takes all of these.

    Returns:
        The method. A `source` that is a method is returned as it is.

    Raises:
        UserError: for a text that is no policy. For a misspelt name the message has the nearest
            known name.
    """
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
    if isinstance(source, Method | str | os.PathLike | Mapping):
        return [parse(source)]
    return [parse(policy) for policy in source]


def to_dict(method: MethodLike) -> dict[str, Any]:
    """Write a method's policy in the JSON form, which `parse` reads back."""
    tree = read_text(str(parse(method)))
    name, options = _options(tree)
    written: dict[str, Any] = {"method": name, **options}
    layers = {numbers: to_dict(spec) for numbers, spec in tree.get("layers", {}).items()}
    if layers:
        written["layers"] = layers
    return written


def spelled_out(method: Method) -> str:
    """Write a method's policy with every option of every layer, also those at their defaults. Files
    store this text, because a later version may have other defaults. `parse` reads it back."""
    tree = read_text(str(method))
    parts = [_in_full(tree)]
    for numbers, part in tree.get("layers", {}).items():
        parts.append(f"{numbers}={_in_full(part)}")
    return ";".join(parts)


def _in_full(tree: Mapping[str, Any]) -> str:
    """Write one level of a tree, without its layers, with every option of its method."""
    name, options = _options(tree)
    written = []
    for parameter in inspect.signature(METHODS[name]).parameters.values():
        value = options.get(parameter.name, parameter.default)
        written.append(f"{parameter.name}={option_text(value)}")
    return f"{name}:{','.join(written)}"


def policy(default: MethodLike, overrides: Mapping[str | int, MethodLike]) -> Method:
    """Combine methods, layer by layer.

    Args:
        default: the method of all layers that `overrides` does not name. Sinks and `keep` are its
            own.
        overrides: methods by the layers that they apply to ("3", "-1", "0-2"). "0-2.k" and "-1.v"
            name the keys or the values of layers alone, "k" and "v" those of all layers. If two
            entries name a layer, the later one holds. In a method whose layers feed each other
            (aqua, xquant_cl) the layer's `admit` says how another method's layer takes a place in
            the chain.

    Returns:
        The method, named after `default` and all overrides.

    Raises:
        UserError: for layers that cannot be read, and methods that cannot stand for single layers.
    """
    default = parse(default)
    if not overrides:
        return default
    layer = default.layer  # of the layers that have no number in `specs`
    specs = dict(default.overrides)  # by the layer's number
    names = [default.name]
    for selector, source in overrides.items():
        method = parse(source)
        numbers, part = read_selector(selector)
        if method.overrides or method.keep:
            cause = "layers" if method.overrides else "a keep"
            raise UserError(
                f"{method} has {cause} of its own and cannot stand for layers {selector} of {default}"
            )
        replaced = functools.partial(_replaced, default.layer, part, method.layer)
        if numbers is None:
            layer = replaced(layer)
            specs = {number: replaced(spec) for number, spec in specs.items()}
        else:
            _check_ends(default, numbers, part, specs)
            for number in numbers:
                specs[number] = replaced(specs.get(number, layer))
        names.append(f"{write_selector(numbers, part)}={method.name}")
    return dataclasses.replace(
        default, name=";".join(names), layer=layer, overrides=tuple(specs.items())
    )


def _replaced(default: LayerSpec, part: str, new: LayerSpec, old: LayerSpec) -> LayerSpec:
    """Give `old` the keys ("k") or values ("v") of `new`. For part "", give `new` as `default`
    admits it."""
    if part == "k":
        return joined(new, old)
    if part == "v":
        return joined(old, new)
    admit = getattr(default, "admit", None)
    if admit is None:
        return new
    return admit(new)


def _check_ends(default: Method, numbers: range, part: str, specs: Mapping[int, LayerSpec]) -> None:
    """Raise UserError where layers whose keys or values are named apart are counted from both ends.
    Numbers from both ends may mean the same layer in one model and not in another, so its other
    part would depend on the model."""
    if not part:
        return
    from_end = numbers[0] < 0
    if any((number < 0) != from_end for number in specs):
        raise UserError(
            f"{default}: layers whose keys and values are named apart must be counted from one end"
        )
