"""The candidates of tuning: the methods that a list of names stands for, their bytes and their
calibrated constants."""

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

WIDTHS = (1, 2, 3, 4, 6, 8)  # bits at which a method is tried if none are named
GROUPS = ("data-free", "all")  # names that stand for several methods
# Candidates of both groups in addition to methods with default options.
VARIANTS = ("kivi:group=128",)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The methods among which tuning chooses. All have the same number of sinks."""

    parts: tuple[Method, ...]  # any layer may follow one of these; number 0 is the exact cache
    joint: np.ndarray  # Bool [C]: a layer follows this part with keys and values or with neither
    # Methods for all layers or none, because they have exceptions of their own, or whose layers
    # feed each other. The latter may have exceptions (`Chain` of kvqjax.eval.tune.trials).
    others: tuple[Method, ...]
    sinks: int

    def method(self, chosen: np.ndarray) -> Method:
        """Write the policy [L, 2] as a method: the most frequent candidate, with exceptions."""
        names, counts = np.unique(chosen, return_counts=True)
        default = names[counts.argmax()]
        exceptions = {}
        for layers, (key, value) in stretches(chosen):
            if key == value != default:
                exceptions[layers] = bare(self.parts[key])
            elif key != value:
                choices = {f"{layers}.k": key, f"{layers}.v": value}
                exceptions |= {
                    part: bare(self.parts[c]) for part, c in choices.items() if c != default
                }
        return policy(self.parts[default], exceptions)


# --- Policies as exceptions


def stretches(chosen: np.ndarray) -> Iterable[tuple[str, tuple[int, int]]]:
    """Group the consecutive layers of a policy [L, 2] that have the same candidates. Yields the
    layers, as exceptions name them ("0-2"), with the candidates of keys and values."""
    for pair, group in itertools.groupby(
        range(len(chosen)), key=lambda layer: tuple(chosen[layer])
    ):
        first, *tail = group
        yield f"{first}-{tail[-1]}" if tail else str(first), pair


def bare(method: Method) -> Method:
    """Give a method without its sinks. As an exception it has none: sinks belong to the whole
    policy."""
    return parse({name: value for name, value in to_dict(method).items() if name != "sinks"})


# --- From a list of names to candidates


def _split(text: str) -> list[str]:
    """Split a list of policies at its commas, except for commas between options:
    "kivi,higgs:window=32,buffer=64" is "kivi" and "higgs:window=32,buffer=64"."""
    out: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        if out and re.match(r"\w+=", item):
            out[-1] += "," + item
        elif item:
            out.append(item)
    return out


def _free(shape: KVShape) -> Iterable[str]:
    """List the methods that need no calibration and can be chosen layer by layer, keys and values
    apart."""
    for name in METHODS:
        method = METHODS[name]()
        if name == "exact" or method.overrides:
            continue
        run = runs_for(method, shape)[0]
        if apart(run.wiring) and not run.wiring.wanted():
            yield name
    yield from VARIANTS


def _all(shape: KVShape) -> Iterable[str]:
    """List all methods but the exact cache, and but kivi_star, which is kivi with exceptions."""
    return [name for name in METHODS if name not in ("exact", "kivi_star")] + [*VARIANTS]


def _at_widths(text: str, config: ModelConfig) -> list[Method]:
    """Give a policy with the bits that it names. If it names none, give it at every width that the
    model admits."""
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
    """Read a list of methods such as `data-free`, `all` or `kivi,higgs:window=32`.

    Args:
        text: names of groups and policies, with commas between them.
        config: the model's.

    Returns:
        Every method once. A policy that names no bits gives a method for each width that the model
        admits.

    Raises:
        UserError: an empty list, and a method that the model refuses.
    """
    items = _split(text)
    if not items:
        raise UserError(f"methods {text!r} names none; wanted {', '.join(GROUPS)}, or methods")
    members = {"data-free": _free, "all": _all}
    texts: list[str] = []
    for item in items:
        texts += members[item](config.kv_shape) if item in members else [item]
    methods = [
        method for policy_text in dict.fromkeys(texts) for method in _at_widths(policy_text, config)
    ]
    for method in methods:
        runs_for(method, config)  # raises an error for a method that the model refuses
    return list(dict.fromkeys(methods))


def sorted_out(methods: list[Method], config: ModelConfig) -> Candidates:
    """Sort methods into candidates, with the exact cache as the first. All get the largest number
    of sinks of any.

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
        raise UserError(
            "none of these methods can be chosen layer by layer; name one that can, such as kivi or higgs"
        )
    return Candidates(tuple(parts), np.asarray(joint), tuple(others), sinks)


# --- What candidates cost


def fast_enough(
    methods: list[Method], config: ModelConfig, context: int, device: str, slowdown: float
) -> tuple[list[Method], dict[str, float]]:
    """Choose the methods whose decode step is fast enough by the planner's cost model.

    Args:
        methods: to choose from.
        config: the model's.
        context: cached tokens of the step's row.
        device: the chip's name.
        slowdown: the largest time of a step, relative to a step with the exact cache.

    Returns:
        The methods that are fast enough, and the relative time of every method.

    Raises:
        UserError: where no method is fast enough.
    """
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
    """Compute the bytes [L, C, C] of every layer of a row of `context` tokens, by the candidates of
    keys and of values. They are inf for candidates that cannot be combined."""
    count, layers = len(candidates.parts), model.config.num_layers
    out = np.full((layers, count, count), np.inf)
    for a, key in enumerate(candidates.parts):
        for b, value in enumerate(candidates.parts):
            if a == b or not (candidates.joint[a] or candidates.joint[b]):
                spec = key.layer if a == b else joined(key.layer, value.layer)
                out[:, a, b] = bytes_by_layer(model, dataclasses.replace(key, layer=spec), context)
    return out


def bytes_by_layer(model: Model, method: Method, context: int) -> np.ndarray:
    """Compute the bytes [L] of every layer of a row of `context` tokens."""
    book, out = ledger_of(model, method, context), np.zeros(model.config.num_layers)
    for entry in book.entries:
        first, _, last = entry.layers.partition("-")
        run = slice(int(first), int(last or first) + 1)
        out[run] += entry.bytes / (run.stop - run.start)  # layers of a run have equal bytes
    return out


# --- Calibrated constants of candidates


class Learnt(NamedTuple):
    """The calibrated constants of candidates."""

    # Number of a part -> its constants {group: {name: [L, ...]}}; parts without any are left out.
    fixed: dict[int, dict]
    ready: tuple[Model, ...]  # for each of the candidates' `others`: the model with its constants


def _constants(
    model: Model, method: Method, texts: TextLike, folder: Path | None, bar: Bar
) -> tuple[dict, ...]:
    """Find the constants of one method, as `Model.constants` has them. They are kept in `folder`,
    together with the state of a calibration that was stopped, which then continues."""
    if not any(
        run.wiring.wanted()
        for run in runs_for(method, model.config, str(model.params["embed"].dtype))
    ):
        return ()
    if not calibrate.learns(method, model.config):
        return calibrate.xquant.constants(model.params, model.config, method)
    path = None if folder is None else folder / re.sub(r"[^a-z0-9.]+", "-", str(method).lower())
    if path is not None and path.exists():
        return model.with_artifact(load_artifact(path)).constants
    state = None if path is None else path.with_name(path.name + ".state.npz")
    update = bar(f"calibrating {method}")

    def advance(steps: int, total: int) -> None:
        update(steps / total)

    artifact = calibrate.run(model, method, texts, state=state, advance=advance)
    if path is not None and state is not None:
        artifact.save(path)
        state.unlink(missing_ok=True)
    return artifact.constants


def learnt(
    model: Model, candidates: Candidates, texts: TextLike, out: Path | None, bar: Bar
) -> Learnt:
    """Find the constants of every candidate, from `texts` or from the weights."""
    folder = None if out is None else out / "calibrated"

    def constants_of(method: Method) -> tuple[dict, ...]:
        return _constants(model, method, texts, folder, bar)

    def all_layers(*runs):
        """Join arrays [L_run, ...] of runs to [L, ...]."""
        return jnp.concatenate([jnp.asarray(x) for x in runs])

    by_part = {number: constants_of(method) for number, method in enumerate(candidates.parts)}
    fixed = {number: jax.tree.map(all_layers, *runs) for number, runs in by_part.items() if runs}
    ready = tuple(model.replace(constants=constants_of(method)) for method in candidates.others)
    return Learnt(fixed, ready)
