"""The candidates of one method: the same options with other bits for keys and for values."""

import inspect
import itertools
import typing

import numpy as np
from jaxtyping import Float

from kvqjax._errors import UserError
from kvqjax.cache.runs import runs_for
from kvqjax.eval.stamp import ledger_of
from kvqjax.methods import METHODS, Method, parse, to_dict
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model

BITS = ("bits", "key_bits", "value_bits")  # options that tuning chooses
WIDTHS = (1, 2, 3, 4, 6, 8)  # of methods with whole bits
# Of methods with fractional bits: how far from the budget, in quarters of a bit. Keys and values
# get equal bits. With SmolLM2-135M and klt other pairs took 2 % off the estimated loss at 2.5 bits,
# and single layers cost 400 times as much as others (2026-11-29).
STEPS = (-4, -2, -1, 0, 2, 4, 6, 8)
APART = 1  # whole bits by which keys and values of a layer differ at most


def with_bits(method: Method, keys: float | int, values: float | int) -> Method:
    """Give a method other bits."""
    rest = {name: value for name, value in to_dict(method).items() if name not in BITS}
    options = {"bits": keys} if keys == values else {"key_bits": keys, "value_bits": values}
    return parse(rest | options)


def _parameters(method: Method):
    return inspect.signature(METHODS[to_dict(method)["method"]]).parameters


def is_fractional(method: Method) -> bool:
    """Say whether the method's bits may be fractions."""
    annotation = _parameters(method)["bits"].annotation
    return float in (annotation, *typing.get_args(annotation))


def check_tuned(method: Method, config: KVShape) -> None:
    """Raise UserError for a method whose layers cannot get bits one by one."""
    name = to_dict(method)["method"]
    if "bits" not in _parameters(method):
        raise UserError(f"{name} has no bits to choose; name a method that has, such as klt")
    if any(run.wiring.chain.carry for run in runs_for(method, config)):
        raise UserError(f"{name}: its layers feed each other, so that none gets bits by itself")
    if method.overrides or method.keep:
        raise UserError(f"{method}: tuning takes one method for all layers, without a keep")


def candidates_of(method: Method, config: KVShape, bits: float | int) -> tuple[Method, ...]:
    """List the candidates for a budget of `bits` a number, those of fewest bits first. Raises
    UserError where the model admits none."""
    if is_fractional(method):
        widths = [(round(4 * bits) + step) / 4 for step in STEPS]
        pairs = [(width, width) for width in widths]
    elif {"key_bits", "value_bits"} <= set(_parameters(method)):
        combinations = itertools.product(WIDTHS, WIDTHS)
        pairs = [pair for pair in combinations if abs(pair[0] - pair[1]) <= APART]
    else:
        pairs = [(width, width) for width in WIDTHS]
    admitted, reason = [], ""
    for keys, values in sorted(pairs, key=sum):
        try:
            candidate = with_bits(method, keys, values)
            runs_for(candidate, config)
            admitted.append(candidate)
        except ValueError as error:
            reason = str(error)
    if not admitted:
        raise UserError(f"{method}: this model admits none of its widths: {reason}")
    return tuple(dict.fromkeys(admitted))


def bytes_of_layers(model: Model, method: Method, context: int) -> Float[np.ndarray, " L"]:
    """Compute the bytes of every layer of a row of `context` tokens."""
    sizes = np.zeros(model.config.num_layers)
    for entry in ledger_of(model, method, context).entries:
        first, _, last = entry.layers.partition("-")
        run = slice(int(first), int(last or first) + 1)
        if entry.role != "states":
            sizes[run] += entry.bytes / (run.stop - run.start)  # layers of a run have equal bytes
    return sizes
