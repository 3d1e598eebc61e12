"""`kvq.tune`: the mixture of methods and bits of least divergence within a budget, for one model.

1. The divergence of each candidate in one layer's keys or values alone, all else exact (`Meter`,
   one program).
2. A dynamic programme over layers as if these added up (`guess`): the first policy, and the front
   of the report.
3. Measured exchanges of the whole policy until none helps beyond noise (`climb`).
4. For each method whose layers feed each other, the same for the exceptions that it admits
   (`Chain`).
5. The report, on text that nothing above has seen.

`estimated` says what that would take on a machine that is not here.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from kvqjax._arguments import MOST_SEED, check_counts, check_fields, check_integer
from kvqjax._errors import UserError
from kvqjax._lock import held
from kvqjax.cache.artifacts import Artifact
from kvqjax.calibrate.resume import identity
from kvqjax.data.tokens import TextLike, data_or_ids, in_halves, token_ids
from kvqjax.eval.stamp import CONTEXT, Bar, ledger_of, silent
from kvqjax.eval.tune.candidates import (
    Candidates,
    Learnt,
    fast_enough,
    layer_bytes,
    learnt,
    named,
    sorted_out,
)
from kvqjax.eval.tune.measure import Meter, Subject, even_rows
from kvqjax.eval.tune.report import FRONT, report_rows
from kvqjax.eval.tune.search import PATIENCE, ROUND, Budget, Table, chosen, limit_of, read_budget
from kvqjax.eval.tune.trials import Chain, Trial, choice_of, exceptions, is_chain
from kvqjax.eval.windows import encoded_from, windows
from kvqjax.hardware.devices import DEVICES, find_device
from kvqjax.hardware.planner import plan_memory, step_bounds
from kvqjax.methods import Method
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import Model
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.step.checks import check_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """`context`: tokens of a row for which bytes are counted. Windows of `window` tokens pass
    through the cache `chunk` at a time, `batch` rows at once; predictions from position
    `scored_from` on count."""

    context: int = CONTEXT
    window: int = 512
    chunk: int = 32
    batch: int = 8
    scored_from: int = 0
    seed: int = 0

    def __post_init__(self):
        check_fields(self)
        check_counts(context=self.context, window=self.window, chunk=self.chunk, batch=self.batch)
        check_integer("scored_from", self.scored_from, 0)
        check_integer("seed", self.seed, 0, MOST_SEED)
        if self.scored_from > self.window - 2:  # the last token predicts nothing
            raise UserError(
                f"scored_from={self.scored_from} leaves nothing of windows of {self.window} tokens"
            )


class Tuned(NamedTuple):
    """`rows` are the report's: "kind" is "tuned", "single" (one candidate for all layers) or
    "front". `about` says what was measured."""

    method: Method
    artifact: Artifact | None
    rows: list[dict[str, Any]]
    about: dict[str, Any]


def needed_windows(choices: int) -> int:
    """Windows to choose by. The best of n equal choices seems better than it is by about sqrt(2 ln
    n) standard errors: with 2 ln n windows that is one standard deviation of a single window."""
    return max(4, math.ceil(2 * math.log(max(2, choices))))


# --- Methods that may be the result


class Option(NamedTuple):
    """A method that may be the result: how it is measured, and what makes its constants."""

    subject: Subject
    method: Method
    artifact: Callable[[], Artifact | None]


def best_policy(
    trial: Trial | Chain, budget: Budget, table: Table, limit: float, meter: Meter, bar: Bar
) -> Option:
    """The policy that the search over a trial's parts ends with."""
    policy = chosen(
        budget, table, limit, lambda ps: meter([trial.subject(p) for p in ps], bar("exchanges"))
    )
    return Option(trial.subject(policy), trial.method(policy), lambda: trial.artifact(policy))


def for_all_layers(
    trial: Trial, number: int, budget: Budget, limit: float, meter: Meter, context: int, bar: Bar
) -> list[Option]:
    """A method that is taken for all layers, with exceptions where its layers feed each other; none
    where it does not fit."""
    model, method, ready_model = trial.model, trial.candidates.others[number], trial.ready[number]
    if not is_chain(method, model.config.kv_shape):
        runs = ready_model.constants

        def make():
            return Artifact(method, runs, model.fingerprint, {"tuned": True}) if runs else None

        fits = ledger_of(model, method, context).bytes <= limit
        return [Option(trial.others()[number], method, make)] if fits else []
    chain = Chain(model, trial.candidates, method, ready_model)
    size = chain.bytes(context)
    if size.min((1, 2)).sum() > limit:
        return []
    table = Table(size, chain.losses(meter, bar), np.ones(len(chain.parts), bool))
    return [best_policy(chain, budget, table, limit, meter, bar)]


def best_of(
    options: list[Option], budget: Budget, meter: Meter, model: Model, context: int
) -> tuple[Method, Artifact | None]:
    """The option of least divergence, with its constants; of a bounded divergence, the one of
    fewest bytes."""
    kld = meter([option.subject for option in options]).mean(1)
    size = np.asarray([ledger_of(model, option.method, context).bytes for option in options])
    if budget.kind == "kld":
        best = int(np.where(kld <= budget.amount, size, np.inf).argmin())
    else:
        best = int(kld.argmin())
    return options[best].method, options[best].artifact()


# --- The two doors: texts, or windows of token ids


def _meters(
    trial: Trial, parts: tuple[np.ndarray, np.ndarray], settings: Settings, out: Path | None
) -> list[Meter]:
    """Make the meters of the text that is searched and of the text that is reported on."""
    sizes = {"chunk": settings.chunk, "batch": settings.batch, "scored_from": settings.scored_from}
    names = list(map(str, (*trial.candidates.parts, *trial.candidates.others)))
    about = [
        trial.model.fingerprint,
        str(trial.model.params["embed"].dtype),
        repr(settings),
        *names,
    ]
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
    learn: Callable[[Candidates], Learnt] = lambda _: Learnt({}, ()),
    out: Path | None = None,
    bar: Bar = silent,
) -> Tuned:
    """`tune` on windows of token ids: one set to search by, the other for the report. `learn`
    calibrates the candidates, where any needs it."""
    target, candidates = read_budget(budget), sorted_out(list(methods), model.config)
    table = Table(
        layer_bytes(model, candidates, settings.context), np.zeros((1, 2, 1)), candidates.joint
    )
    # Before anything is calibrated or measured.
    limit = limit_of(target, table, model.config, settings.context)
    _check_length(model, candidates, searched.shape[1], settings.chunk)
    trial = Trial(model, candidates, learn(candidates))
    search, report = _meters(trial, (searched, kept_back), settings, out)
    table = table._replace(loss=trial.losses(search, bar))
    options = [best_policy(trial, target, table, limit, search, bar)]
    for number in range(len(candidates.others)):
        options += for_all_layers(trial, number, target, limit, search, settings.context, bar)
    method, artifact = best_of(options, target, search, model, settings.context)
    rows = report_rows(trial, table, (method, artifact), report, settings.context, bar)
    about: dict[str, Any] = {"budget": target._asdict(), "settings": dataclasses.asdict(settings)}
    about["sinks"] = candidates.sinks
    about |= {
        "windows": [len(searched), len(kept_back)],
        "measurements": sum(len(m.known) for m in (search, report)),
    }
    return Tuned(method, artifact, rows, about)


def _check_length(model: Model, candidates: Candidates, length: int, chunk: int) -> None:
    """Raise UserError where windows are no whole chunks, or end before every candidate has encoded
    something that a later chunk reads: one that has not would seem to lose nothing."""
    if length % chunk:
        raise UserError(f"windows of {length} tokens do not divide into chunks of {chunk}")
    for method in (*candidates.parts[1:], *candidates.others):
        first = -(-encoded_from(model, method, length) // chunk) * chunk
        if length <= first:
            raise UserError(
                f"windows of {length} tokens end before {method} reads what it has encoded; wanted {first + chunk}"
            )


def _cut(
    model: Model, parts: list[TextLike], choices: int, settings: Settings
) -> tuple[np.ndarray, np.ndarray]:
    """Windows of the two halves of the text, drawn by the seed. Raises UserError where there are
    too few."""
    count, rng, out = needed_windows(choices), np.random.default_rng(settings.seed), []
    for part in parts:
        ids = token_ids(model, part)
        if len(ids) < count * settings.window:
            least = 2 * count * settings.window
            raise UserError(
                f"half of the text has {len(ids)} tokens; {choices} choices need {count} windows of {settings.window} "
                f"in each half, so a text of at least {least} tokens"
            )
        all_windows = windows(ids, settings.window, 0)
        out.append(all_windows[np.sort(rng.permutation(len(all_windows))[:count])])
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
    """The policy of least KL divergence within a budget. The first half of the text is searched
    (and calibrated) on, the second decides the report.

    Args:
        model: the model.
        texts: a text, data or token ids, as for `kvqjax.eval.perplexity`.
        budget: average bits of all that is stored for a row of `settings.context` tokens (2.5),
            bytes ("8GiB"), or the fewest bytes with at most this divergence in nats ("kld=0.01").
        methods: a list such as "kivi,higgs:window=32", "data-free" (all that need no calibration)
            or "all". A method without bits is tried at all its widths. Windows, sinks and groups
            are theirs; the most sinks of any serve all.
        device: leaves out methods whose decode step there is estimated at more than `slowdown`
            times bf16's.
        slowdown: the longest step, in steps of the exact cache.
        out: a folder that keeps every measurement, so that a stopped run continues.
        settings: how windows are cut, scored and counted.
        bar: `bar(label)` is called before every step and gives a function that is told the step's
            progress, 0 to 1.

    Returns:
        The method, its constants where it needs any, and the rows of the report.

    Raises:
        UserError: a budget that cannot be met, and a text too short.
    """
    check_model(model)
    offered, ratios = named(methods, model.config), {}
    settings = dataclasses.replace(settings, window=min(settings.window, model.config.max_position))
    if device is not None:
        offered, ratios = fast_enough(offered, model.config, settings.context, device, slowdown)
    candidates = sorted_out(offered, model.config)
    read_budget(budget)  # says now what is wrong with it
    first, second = in_halves(data_or_ids(model, texts))
    choices = 2 * model.config.num_layers * len(candidates.parts)
    searched, kept_back = _cut(model, [first, second], choices, settings)

    def learn(candidates: Candidates) -> Learnt:
        return learnt(model, candidates, first, out, bar)

    with held(None if out is None else out / "tune"):
        tuned = tune_windows(
            model,
            offered,
            budget,
            searched,
            kept_back,
            settings=settings,
            learn=learn,
            out=out,
            bar=bar,
        )
    return tuned._replace(
        about=tuned.about | {"methods": methods, "device": device, "slowdown": ratios}
    )


# --- What it would take elsewhere


def estimated(
    config: ModelConfig, methods: str, device: str, mesh: str, settings: Settings
) -> dict[str, Any]:
    """Measurements, forward passes, tokens and hours that `tune` would take, by the planner's cost
    model.

    Every chunk of every measurement reads a device's weights and what the cache holds of its rows
    once, and computes its part at the dense 16-bit peak: the larger of the two is its time, a bound
    that real programs miss by their own factor. The estimate counts one round of exchanges per
    layer, and the rounds that end the search, for the mixture and for every chain. `bytes` on a
    device include the logits of the exact pass and of one chunk. Compilation, calibration and the
    report's own caches are left out."""
    candidates, sizes = sorted_out(named(methods, config), config), MeshSize.parse(mesh)
    layers, count = config.num_layers, len(candidates.parts)
    singles = layers * sum(1 if joint else 2 for joint in candidates.joint[1:])
    chains = [method for method in candidates.others if is_chain(method, config.kv_shape)]
    changed = sum(
        1 + layers * len(exceptions(candidates, chain, config.kv_shape)) for chain in chains
    )
    rounds = (1 + len(chains)) * (layers + PATIENCE)
    reported = 1 + count + FRONT + len(candidates.others)
    least = needed_windows(2 * layers * count)
    rows = even_rows(least, settings.batch, sizes.data)
    batches = math.ceil(least / rows)
    # Once for each call: the parts alone, every round, the report.
    exact = batches * (2 + len(chains) + rounds)
    passes = (singles + changed + ROUND * rounds + reported) * batches + exact
    steps = passes * math.ceil(settings.window / settings.chunk)
    chip = DEVICES[find_device(device).name]
    planned = plan_memory(config, choice_of(candidates), settings.window, rows, sizes)
    reading, computing = step_bounds(planned, config, settings.window, rows, chip, sizes)
    seconds = steps * max(reading, computing * settings.chunk)
    logits = 4 * rows * config.vocab_size * (settings.window + settings.chunk) // sizes.model
    return {
        "device": device,
        "mesh": mesh,
        "candidates": count,
        "parts_alone": singles,
        "exceptions": changed,
        "exchanges": ROUND * rounds,
        "forward_passes": passes,
        "tokens": passes * rows * settings.window,
        "hours": seconds / 3600,
        "bound_by": "bandwidth" if reading >= computing * settings.chunk else "compute",
        "bytes": planned.total + logits,
    }
