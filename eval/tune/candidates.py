"""The methods that tuning chooses among: what a list of names stands for, and what each costs."""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache.runs import runs_for
from kvqjax.eval.stamp import ledger_of
from kvqjax.hardware.devices import DEVICES, find_device
from kvqjax.hardware.planner import plan_memory, step_bounds
from kvqjax.methods import METHODS, Method, parse, policy, to_dict
from kvqjax.methods.keys_values import apart, joined
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.loading import Model

__all__ = [
    "WIDTHS",
    "Candidates",
    "bare",
    "bytes_by_layer",
    "fast_enough",
    "layer_bytes",
    "named",
    "sorted_out",
    "stretches",
]

WIDTHS = (1, 2, 3, 4, 6, 8)  # bits that a method is tried at where none are named
GROUPS = ("data-free", "all")
MORE = ("kivi:group=128",)  # beside every method's defaults


@dataclasses.dataclass(frozen=True)
class Candidates:
    """`parts` may stand in any layer, those that are not `whole` for its keys or values alone. `others` are taken for
    all layers or not at all (they have exceptions of their own), or as a chain with exceptions
    (kvqjax.eval.tune.chains) where their layers feed each other. All have `sinks`."""

    parts: tuple[Method, ...]
    whole: np.ndarray
    others: tuple[Method, ...]
    sinks: int

    def method(self, chosen: np.ndarray) -> Method:
        """The policy [L, 2] as a method: the most frequent candidate with exceptions."""
        names, counts = np.unique(chosen, return_counts=True)
        default = names[counts.argmax()]
        exceptions = {}
        for layers, (key, value) in stretches(chosen):
            if key == value != default:
                exceptions[layers] = bare(self.parts[key])
            elif key != value:
                both = {f"{layers}.k": key, f"{layers}.v": value}
                exceptions |= {part: bare(self.parts[c]) for part, c in both.items() if c != default}
        return policy(self.parts[default], exceptions)


def stretches(chosen: np.ndarray) -> Iterable[tuple[str, tuple[int, int]]]:
    """The layers that follow one another with equal choices in a policy [L, 2], as exceptions name them ("0-2"), and
    these choices."""
    for pair, group in itertools.groupby(range(len(chosen)), key=lambda layer: tuple(chosen[layer])):
        first, *rest = group
        yield f"{first}-{rest[-1]}" if rest else str(first), pair


def bare(method: Method) -> Method:
    """A method without sinks, which are the whole policy's."""
    return parse({name: value for name, value in to_dict(method).items() if name != "sinks"})


def _split(text: str) -> list[str]:
    """`kivi,higgs:window=32,buffer=64` is kivi and higgs:window=32,buffer=64."""
    out: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        if out and re.match(r"\w+=", item):
            out[-1] += "," + item
        elif item:
            out.append(item)
    return out


def _free(shape: KVShape) -> Iterable[str]:
    """Every method that needs nothing but the model and may stand in any layer, and variants of it."""
    for name in METHODS:
        method = METHODS[name]()
        if name == "exact" or method.overrides:
            continue
        run = runs_for(method, shape)[0]
        if apart(run.wiring) and not run.wiring.wanted():
            yield name
    yield from MORE


def _all(shape: KVShape) -> Iterable[str]:
    """Every method but the exact cache and those that are another one with exceptions of their own."""
    return [name for name in METHODS if name not in ("exact", "kivi_star")] + [*MORE]


def _at_widths(text: str, config: ModelConfig) -> list[Method]:
    """A method at the bits it names, or at every width that it has and the model admits."""
    given = parse(text)
    if "bits" not in _parameters(given) or re.search(r"bits=", text):
        return [given]
    found, reason = [], ""
    for bits in WIDTHS:
        try:
            method = parse(to_dict(given) | {"bits": bits})
            runs_for(method, config)
            found.append(method)
        except (UserError, ValueError) as error:
            reason = str(error)
    if not found:
        raise UserError(f"{text}: this model admits none of its widths: {reason}")
    return found


def _parameters(method: Method) -> Any:
    return inspect.signature(METHODS[re.split("[:;]", method.name)[0]]).parameters


def named(text: str, config: ModelConfig) -> list[Method]:
    """The methods of a list such as `data-free`, `all` or `kivi,higgs:window=32`. Raises UserError for one that the
    model refuses."""
    items = _split(text)
    if not items:
        raise UserError(f"methods {text!r} names none; wanted {', '.join(GROUPS)}, or methods")
    wanted: list[str] = []
    for item in items:
        wanted += {"data-free": _free, "all": _all}[item](config.kv_shape) if item in GROUPS else [item]
    methods = [method for one in dict.fromkeys(wanted) for method in _at_widths(one, config)]
    for method in methods:
        runs_for(method, config)
    return list(dict.fromkeys(methods))


def sorted_out(methods: list[Method], config: ModelConfig) -> Candidates:
    """The methods, and the exact cache, with one number of sinks for all: the largest of theirs."""
    sinks = max((method.sinks for method in methods), default=0)
    given = [parse("exact"), *(m for m in methods if m.name.partition(":")[0] != "exact")]
    given = [parse(to_dict(method) | {"sinks": sinks}) for method in given]
    runs = [runs_for(m, config) for m in given]
    alone = [not (m.overrides or m.keep or r[0].wiring.chain.carry) for m, r in zip(given, runs, strict=True)]
    parts = [method for method, ok in zip(given, alone, strict=True) if ok]
    whole = [not apart(r[0].wiring) for r, ok in zip(runs, alone, strict=True) if ok]
    others = [method for method, ok in zip(given, alone, strict=True) if not ok]
    if len(parts) < 2:
        raise UserError("none of these methods can be chosen layer by layer; name one that can, such as kivi or higgs")
    return Candidates(tuple(parts), np.asarray(whole), tuple(others), sinks)


def fast_enough(
    methods: list[Method], config: ModelConfig, context: int, device: str, slowdown: float
) -> tuple[list[Method], dict[str, float]]:
    """Methods whose decode step at a full context takes at most `slowdown` times the exact cache's by the planner's
    cost model, and the ratio of every method."""
    chip = DEVICES[find_device(device).name]

    def seconds(method: Method) -> float:
        found = plan_memory(config, method, context, 1)
        return max(step_bounds(found, config, context, 1, chip))

    exact = seconds(parse("exact"))
    ratios = {str(method): seconds(method) / exact for method in methods}
    kept = [method for method in methods if ratios[str(method)] <= slowdown]
    if not kept:
        least = min(ratios.values())
        raise UserError(
            f"on {device} no method's decode step is estimated at {slowdown:g} times the exact cache's or less; the "
            f"fastest takes {least:.3g} times as long"
        )
    return kept, ratios


def layer_bytes(model: Model, found: Candidates, context: int) -> np.ndarray:
    """Bytes [L, C, C] of every layer of a row of `context` tokens, keys by the first candidate and values by the
    second; inf where they cannot stand together."""
    count, layers = len(found.parts), model.config.num_layers
    out = np.full((layers, count, count), np.inf)
    for a, key in enumerate(found.parts):
        for b, value in enumerate(found.parts):
            if a == b or not (found.whole[a] or found.whole[b]):
                spec = key.layer if a == b else joined(key.layer, value.layer)
                out[:, a, b] = bytes_by_layer(model, dataclasses.replace(key, layer=spec), context)
    return out


def bytes_by_layer(model: Model, method: Method, context: int) -> np.ndarray:
    """Bytes of every layer of a row of `context` tokens."""
    book, out = ledger_of(model, method, context), np.zeros(model.config.num_layers)
    for entry in book.entries:
        first, _, last = entry.layers.partition("-")
        run = slice(int(first), int(last or first) + 1)
        out[run] += entry.bytes / (run.stop - run.start)
    return out
