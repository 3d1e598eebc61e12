"""The methods that tuning chooses among: what a list of names stands for, what each costs, and the constants that each
needs."""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax import calibrate
from kvqjax._errors import UserError
from kvqjax.cache.artifacts import load_artifact
from kvqjax.cache.runs import runs_for
from kvqjax.data.tokens import TextLike
from kvqjax.eval.stamp import Bar, ledger_of
from kvqjax.hardware.devices import DEVICES, find_device
from kvqjax.hardware.planner import plan_memory, step_bounds
from kvqjax.methods import METHODS, Method, parse, policy, to_dict
from kvqjax.methods.keys_values import apart, joined
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.loading import Model

__all__ = [
    "WIDTHS",
    "Candidates",
    "Learnt",
    "bare",
    "bytes_by_layer",
    "fast_enough",
    "layer_bytes",
    "learnt",
    "named",
    "sorted_out",
    "stretches",
]

WIDTHS = (1, 2, 3, 4, 6, 8)  # bits that a method is tried at where none are named
GROUPS = ("data-free", "all")
VARIANTS = ("kivi:group=128",)  # beside every method's defaults


@dataclasses.dataclass(frozen=True)
class Candidates:
    """`parts` may stand in any layer, those that are not `joint` for its keys or values alone. `others` are taken for
    all layers or not at all (they have exceptions of their own), or as a chain with exceptions (`Chain` of
    kvqjax.eval.tune.trials) where their layers feed each other. All have `sinks`."""

    parts: tuple[Method, ...]
    joint: np.ndarray
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
                choices = {f"{layers}.k": key, f"{layers}.v": value}
                exceptions |= {part: bare(self.parts[c]) for part, c in choices.items() if c != default}
        return policy(self.parts[default], exceptions)


# --- Policies as exceptions


def stretches(chosen: np.ndarray) -> Iterable[tuple[str, tuple[int, int]]]:
    """The layers that follow one another with equal choices in a policy [L, 2], as exceptions name them ("0-2"), and
    these choices."""
    for pair, group in itertools.groupby(range(len(chosen)), key=lambda layer: tuple(chosen[layer])):
        first, *tail = group
        yield f"{first}-{tail[-1]}" if tail else str(first), pair


def bare(method: Method) -> Method:
    """A method without sinks, which are the whole policy's."""
    return parse({name: value for name, value in to_dict(method).items() if name != "sinks"})


# --- From a list of names to candidates


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
    yield from VARIANTS


def _all(shape: KVShape) -> Iterable[str]:
    """Every method but the exact cache and those that are another one with exceptions of their own."""
    return [name for name in METHODS if name not in ("exact", "kivi_star")] + [*VARIANTS]


def _at_widths(text: str, config: ModelConfig) -> list[Method]:
    """A method at the bits it names, or at every width that it has and the model admits."""
    method = parse(text)
    options = inspect.signature(METHODS[re.split("[:;]", method.name)[0]]).parameters
    if "bits" not in options or re.search(r"bits=", text):
        return [method]
    admitted, reason = [], ""
    for bits in WIDTHS:
        try:
            variant = parse(to_dict(method) | {"bits": bits})
            runs_for(variant, config)
            admitted.append(variant)
        except (UserError, ValueError) as error:
            reason = str(error)
    if not admitted:
        raise UserError(f"{text}: this model admits none of its widths: {reason}")
    return admitted


def named(text: str, config: ModelConfig) -> list[Method]:
    """The methods of a list such as `data-free`, `all` or `kivi,higgs:window=32`.

    Args:
        text: names of groups and policies, with commas between them.
        config: the model's.

    Returns:
        Every method once, at all the widths that the model admits where its bits are not named.

    Raises:
        UserError: an empty list, and a method that the model refuses.
    """
    items = _split(text)
    if not items:
        raise UserError(f"methods {text!r} names none; wanted {', '.join(GROUPS)}, or methods")
    texts: list[str] = []
    for item in items:
        texts += {"data-free": _free, "all": _all}[item](config.kv_shape) if item in GROUPS else [item]
    methods = [method for policy_text in dict.fromkeys(texts) for method in _at_widths(policy_text, config)]
    for method in methods:
        runs_for(method, config)
    return list(dict.fromkeys(methods))


def sorted_out(methods: list[Method], config: ModelConfig) -> Candidates:
    """The methods, and the exact cache, with one number of sinks for all: the largest of theirs.

    Raises:
        UserError: where no method can be chosen layer by layer.
    """
    sinks = max((method.sinks for method in methods), default=0)
    lossy = (method for method in methods if method.name.partition(":")[0] != "exact")
    parts, joint, others = [], [], []
    for method in (parse("exact"), *lossy):
        variant = parse(to_dict(method) | {"sinks": sinks})
        wiring = runs_for(variant, config)[0].wiring
        if variant.overrides or variant.keep or wiring.chain.carry:
            others.append(variant)
        else:
            parts.append(variant)
            joint.append(not apart(wiring))
    if len(parts) < 2:
        raise UserError("none of these methods can be chosen layer by layer; name one that can, such as kivi or higgs")
    return Candidates(tuple(parts), np.asarray(joint), tuple(others), sinks)


# --- What candidates cost


def fast_enough(
    methods: list[Method], config: ModelConfig, context: int, device: str, slowdown: float
) -> tuple[list[Method], dict[str, float]]:
    """Methods whose decode step at a full context takes at most `slowdown` times the exact cache's by the planner's
    cost model, and the ratio of every method."""
    chip = DEVICES[find_device(device).name]

    def seconds(method: Method) -> float:
        planned = plan_memory(config, method, context, 1)
        return max(step_bounds(planned, config, context, 1, chip))

    exact = seconds(parse("exact"))
    ratios = {str(method): seconds(method) / exact for method in methods}
    fast = [method for method in methods if ratios[str(method)] <= slowdown]
    if not fast:
        least = min(ratios.values())
        raise UserError(
            f"on {device} no method's decode step is estimated at {slowdown:g} times the exact cache's or less; the "
            f"fastest takes {least:.3g} times as long"
        )
    return fast, ratios


def layer_bytes(model: Model, candidates: Candidates, context: int) -> np.ndarray:
    """Bytes [L, C, C] of every layer of a row of `context` tokens, keys by the first candidate and values by the
    second; inf where they cannot stand together."""
    count, layers = len(candidates.parts), model.config.num_layers
    out = np.full((layers, count, count), np.inf)
    for a, key in enumerate(candidates.parts):
        for b, value in enumerate(candidates.parts):
            if a == b or not (candidates.joint[a] or candidates.joint[b]):
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


# --- Calibrated constants of candidates


class Learnt(NamedTuple):
    """`fixed`: constants {group: {name: [L, ...]}} of the parts that have some, by number. `ready`: the model with
    those of each candidate that is taken for all layers."""

    fixed: dict[int, dict]
    ready: tuple[Model, ...]


def _constants(model: Model, method: Method, texts: TextLike, folder: Path | None, bar: Bar) -> tuple[dict, ...]:
    """What one method needs, as `Model.constants`; kept in `folder`, where a stopped calibration goes on."""
    if not any(run.wiring.wanted() for run in runs_for(method, model.config, str(model.params["embed"].dtype))):
        return ()
    if not calibrate.learns(method, model.config):
        return calibrate.xquant.constants(model.params, model.config, method)
    path = None if folder is None else folder / re.sub(r"[^a-z0-9.]+", "-", str(method).lower())
    if path is not None and path.exists():
        return model.with_artifact(load_artifact(path)).constants
    state = None if path is None else path.with_name(path.name + ".state.npz")
    update = bar(f"calibrating {method}")
    advance = lambda steps, total: update(steps / total)  # noqa: E731
    artifact = calibrate.run(model, method, texts, state=state, advance=advance)
    if path is not None and state is not None:
        artifact.save(path)
        state.unlink(missing_ok=True)
    return artifact.constants


def learnt(model: Model, candidates: Candidates, texts: TextLike, out: Path | None, bar: Bar) -> Learnt:
    """The constants of every candidate, from `texts` or from the weights."""
    folder = None if out is None else out / "calibrated"
    needs = lambda method: _constants(model, method, texts, folder, bar)  # noqa: E731
    parts = {number: needs(method) for number, method in enumerate(candidates.parts)}
    layers = lambda *runs: jnp.concatenate([jnp.asarray(x) for x in runs])  # noqa: E731
    fixed = {number: jax.tree.map(layers, *runs) for number, runs in parts.items() if runs}
    return Learnt(fixed, tuple(model.replace(constants=needs(method)) for method in candidates.others))
