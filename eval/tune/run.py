"""`kvq.tune`: the mixture of methods and bits of least divergence within a budget, for one model.

1. The divergence of each candidate in one layer's keys or values alone, all else exact (`Meter`, one program).
2. A dynamic programme over layers as if these added up (`guess`): the first policy, and the front of the report.
3. Measured exchanges of the whole policy until none helps beyond noise (`climb`).
4. For each method whose layers feed each other, the same for the exceptions that it admits (`Chain`).
5. The report, on text that nothing above has seen.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from kvqjax._errors import UserError
from kvqjax._lock import held
from kvqjax.cache.artifacts import Artifact
from kvqjax.calibrate.resume import identity
from kvqjax.data.tokens import TextLike, data_or_ids, in_halves, token_ids
from kvqjax.eval.measure_drift import encoded_from
from kvqjax.eval.stamp import CONTEXT
from kvqjax.eval.tune.budget import read_budget
from kvqjax.eval.tune.candidates import Candidates, fast_enough, layer_bytes, named, sorted_out
from kvqjax.eval.tune.choose import best_of, limit_of, losses, mixture, whole
from kvqjax.eval.tune.constants import Bar, Learnt, learnt
from kvqjax.eval.tune.measure import Meter
from kvqjax.eval.tune.report import report_rows
from kvqjax.eval.tune.search import Table
from kvqjax.eval.tune.trial import Trial
from kvqjax.eval.windows import windows
from kvqjax.methods import Method
from kvqjax.model.loading import Model
from kvqjax.step.doors import check_model

__all__ = ["Settings", "Tuned", "needed_windows", "tune", "tune_windows"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """`context`: tokens of a row for which bytes are counted. Windows of `window` tokens pass through the cache `chunk`
    at a time, `batch` rows at once; predictions from position `scored_from` on count."""

    context: int = CONTEXT
    window: int = 512
    chunk: int = 32
    batch: int = 8
    scored_from: int = 0
    seed: int = 0


class Tuned(NamedTuple):
    """`rows` are the report's: "kind" is "tuned", "single" (one candidate for all layers) or "front". `about` says what
    was measured."""

    method: Method
    artifact: Artifact | None
    rows: list[dict[str, Any]]
    about: dict[str, Any]


def silent(label: str):
    """A progress bar that shows nothing."""
    return lambda done: None


def needed_windows(choices: int) -> int:
    """Windows to choose by. The best of n equal choices seems better than it is by about sqrt(2 ln n) standard errors:
    with 2 ln n windows that is one standard deviation of a single window."""
    return max(4, math.ceil(2 * math.log(max(2, choices))))


def _meters(trial: Trial, parts: tuple[np.ndarray, np.ndarray], settings: Settings, out: Path | None) -> list[Meter]:
    """Of the text that is searched and of the text that is reported on."""
    found, sizes = trial.found, {"chunk": settings.chunk, "batch": settings.batch, "scored_from": settings.scored_from}
    names = list(map(str, (*found.parts, *found.others)))
    about = [trial.model.fingerprint, str(trial.model.params["embed"].dtype), repr(settings), *names]
    meters = []
    for name, part in zip(("searched", "held-out"), parts, strict=True):
        path = None if out is None else out / f"{name}.jsonl"
        meters.append(Meter(trial.model, part, **sizes, path=path, owner=identity(*about, part)))
    return meters


def tune_windows(
    model: Model,
    methods: Sequence[Method],
    budget: str | float | int,
    searched: Int[np.ndarray, "N T"],
    kept_back: Int[np.ndarray, "M T"],
    *,
    settings: Settings = Settings(),
    constants: Learnt | None = None,
    out: Path | None = None,
    bar: Bar = silent,
) -> Tuned:
    """`tune` on windows of token ids: one set to search by, the other for the report. `constants` are what the
    candidates have learnt, where any needs it."""
    found = sorted_out(list(methods), model.config)
    trial = Trial(model, found, constants or Learnt({}, ()))
    _check_length(trial, searched.shape[1], settings.chunk)
    table = Table(layer_bytes(model, found, settings.context), np.zeros((1, 2, 1)), found.whole)
    asked = read_budget(budget)
    limit = limit_of(asked, table, model, settings.context)
    search, report = _meters(trial, (searched, kept_back), settings, out)
    table = table._replace(loss=losses(trial, search, bar))
    options = [mixture(trial, asked, table, limit, search, bar)]
    for number in range(len(found.others)):
        options += whole(trial, number, asked, limit, search, settings.context, bar)
    method, artifact = best_of(options, asked, search, model, settings.context)
    rows = report_rows(trial, table, (method, artifact), report, settings.context, bar)
    about: dict[str, Any] = {"budget": asked._asdict(), "settings": dataclasses.asdict(settings), "sinks": found.sinks}
    about |= {"windows": [len(searched), len(kept_back)], "measurements": sum(len(m.known) for m in (search, report))}
    return Tuned(method, artifact, rows, about)


def _check_length(trial: Trial, length: int, chunk: int) -> None:
    """Raise UserError where windows are no whole chunks, or end before every candidate has encoded something that a
    later chunk reads: one that has not would seem to lose nothing."""
    if length % chunk:
        raise UserError(f"windows of {length} tokens do not divide into chunks of {chunk}")
    for method in (*trial.found.parts[1:], *trial.found.others):
        first = -(-encoded_from(trial.model, method, length) // chunk) * chunk
        if length <= first:
            raise UserError(
                f"windows of {length} tokens end before {method} reads what it has encoded; wanted {first + chunk}"
            )


def _cut(model: Model, parts: list[TextLike], choices: int, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Windows of the two halves of the text, drawn by the seed. Raises UserError where there are too few."""
    wanted, rng, out = needed_windows(choices), np.random.default_rng(settings.seed), []
    for part in parts:
        ids = token_ids(model, part)
        if len(ids) < wanted * settings.window:
            least = 2 * wanted * settings.window
            raise UserError(
                f"half of the text has {len(ids)} tokens; {choices} choices need {wanted} windows of {settings.window} "
                f"in each half, so a text of at least {least} tokens"
            )
        every = windows(ids, settings.window, 0)
        out.append(every[np.sort(rng.permutation(len(every))[:wanted])])
    return out[0], out[1]


def tune(
    model: Model,
    texts: TextLike,
    *,
    budget: str | float | int,
    methods: str = "data-free",
    device: str | None = None,
    slowdown: float = 1.0,
    out: Path | None = None,
    settings: Settings = Settings(),
    bar: Bar = silent,
) -> Tuned:
    """The policy of least KL divergence within `budget`: average bits of all that is stored for a row of
    `settings.context` tokens (2.5), bytes ("8GiB"), or the fewest bytes of a divergence of at most so many nats
    ("kld=0.01").

    `methods` is a list such as "kivi,higgs:window=32" ("data-free": all that need no calibration; "all"); one without
    bits is tried at all its widths. Windows, sinks and groups are theirs; the most sinks of any serve all. With
    `device`, methods whose decode step is estimated at more than `slowdown` times bf16's are left out. The first half
    of the text is searched (and calibrated) on, the second decides the report. `out` keeps every measurement, so that a
    stopped run continues. Raises UserError for a budget that cannot be met and for a text too short."""
    check_model(model)
    given, ratios = named(methods, model.config), {}
    settings = dataclasses.replace(settings, window=min(settings.window, model.config.max_position))
    if device is not None:
        given, ratios = fast_enough(given, model.config, settings.context, device, slowdown)
    found: Candidates = sorted_out(given, model.config)
    read_budget(budget)
    first, second = in_halves(data_or_ids(model, texts))
    choices = 2 * model.config.num_layers * len(found.parts)
    searched, kept_back = _cut(model, [first, second], choices, settings)
    with held(None if out is None else out / "tune"):
        constants = learnt(model, found, first, out, bar)
        options = {"settings": settings, "constants": constants, "out": out, "bar": bar}
        tuned = tune_windows(model, given, budget, searched, kept_back, **options)
    return tuned._replace(about=tuned.about | {"methods": methods, "device": device, "slowdown": ratios})
