"""Calibrated constants of candidates, and of the policies that are put together from them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax import calibrate
from kvqjax.cache.artifacts import Artifact, load_artifact
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_for
from kvqjax.data.tokens import TextLike
from kvqjax.eval.tune.candidates import Candidates
from kvqjax.methods import Method
from kvqjax.model.loading import Model

__all__ = ["Learnt", "assembled", "learnt"]

Bar = Callable[[str], Callable[[float], None]]
Runs = tuple[dict, ...]  # as `Model.constants`


class Learnt(NamedTuple):
    """`fixed`: constants {group: {name: [L, ...]}} of the parts that have some, by number. `ready`: the model with
    those of each candidate that is taken for all layers."""

    fixed: dict[int, dict]
    ready: tuple[Model, ...]


def _plan(model: Model, method: Method) -> tuple[RunLayout, ...]:
    dtype = str(model.params["embed"].dtype)
    return runs_for(method, model.config, dtype)


def _runs(model: Model, method: Method, texts: TextLike, folder: Path | None, bar: Bar) -> Runs:
    """What one method needs; kept in `folder`, where a stopped calibration goes on."""
    if not any(run.wiring.wanted() for run in _plan(model, method)):
        return ()
    if not calibrate.learns(method, model.config):
        return calibrate.xquant.constants(model.params, model.config, method)
    path = None if folder is None else folder / re.sub(r"[^a-z0-9.]+", "-", str(method).lower())
    if path is not None and path.exists():
        return model.with_artifact(load_artifact(path)).constants
    state = None if path is None else path.with_name(path.name + ".state.npz")
    update = bar(f"calibrating {method}")
    advance = lambda done, total: update(done / total)  # noqa: E731
    artifact = calibrate.run(model, method, texts, state=state, advance=advance)
    if path is not None and state is not None:
        artifact.save(path)
        state.unlink(missing_ok=True)
    return artifact.constants


def learnt(model: Model, found: Candidates, texts: TextLike, out: Path | None, bar: Bar) -> Learnt:
    """The constants of every candidate, from `texts` or from the weights."""
    folder = None if out is None else out / "calibrated"
    get = lambda method: _runs(model, method, texts, folder, bar)  # noqa: E731
    parts = {number: get(method) for number, method in enumerate(found.parts)}
    stack = lambda *x: jnp.concatenate([jnp.asarray(a) for a in x])  # noqa: E731
    fixed = {number: jax.tree.map(stack, *runs) for number, runs in parts.items() if runs}
    return Learnt(fixed, tuple(model.replace(constants=get(method)) for method in found.others))


def _of_run(run: RunLayout, policy: np.ndarray, fixed: dict[int, dict]) -> dict:
    """The constants of one run of layers: those of values from the values' candidate, others from the keys'."""
    key, value = map(int, policy[run.first])
    layers = slice(run.first, run.first + run.count)
    return {
        group: {name: fixed[value if group == "v" else key][group][name][layers] for name in names}
        for group, names in run.wiring.wanted().items()
    }


def assembled(model: Model, found: Candidates, policy: np.ndarray, fixed: dict[int, dict]) -> Artifact | None:
    """The constants that the policy's layers need, each from its candidate's; None where none does."""
    method = found.method(policy)
    constants = tuple(_of_run(run, policy, fixed) for run in _plan(model, method))
    return Artifact(method, constants, model.fingerprint, {"tuned": True}) if any(constants) else None
