"""`kvq.tune`: bits by layer for one method, where attention loses least by them.

1. The method with other bits for keys and values: the candidates (kvqjax.eval.tune.candidates).
2. What each loses in each layer, in one pass over the layers (kvqjax.eval.tune.scoring).
3. The allotment of least loss within the budget, in few runs (kvqjax.eval.tune.allotment).
4. The policy in the loop beside the method with equal bits everywhere, on text that nothing above
   has seen. The better of the two is the result.
"""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvqjax import calibrate
from kvqjax._arguments import check_counts
from kvqjax._errors import UserError
from kvqjax._files import made_folder
from kvqjax._lock import held
from kvqjax.cache.artifacts import Artifact, read_description
from kvqjax.data.tokens import TextLike, data_or_ids
from kvqjax.eval.comparison import Comparison, comparison
from kvqjax.eval.stamp import CONTEXT, Bar, ledger_of, silent
from kvqjax.eval.tune.allotment import KINDS, RUNS, allotted, stretches
from kvqjax.eval.tune.candidates import (
    bytes_of_layers,
    candidates_of,
    check_tuned,
    is_fractional,
    with_bits,
)
from kvqjax.eval.tune.scoring import Scores, scored
from kvqjax.eval.windows import encoded_from
from kvqjax.methods import Method, MethodLike, parse, policy, to_dict
from kvqjax.model.loading import Model
from kvqjax.step.checks import check_model

# Sequences that candidates are calibrated and scored on.
LEARNT, SCORED, LENGTH = 16, 4, 1024
CHECKED = 8192  # tokens that pass through the loop; the second half of every window is scored
# Chunks of a window: a chunk sees itself exactly, so that few of them would show no loss.
CHUNKS = 8
MOST_BITS = 16
FRACTION = 64  # fractional bits of a whole cache are tried in steps of 1/64


class Tuned(NamedTuple):
    """`rows` are those of `kvqjax.compare`, with "kind": "tuned", and "uniform" for equal bits in
    all layers. `about` says what was measured, and each layer's estimated losses."""

    method: Method
    artifact: Artifact | None
    rows: list[dict[str, Any]]
    about: dict[str, Any]


def tune(
    model: Model,
    texts: TextLike,
    *,
    method: MethodLike,
    bits: float | int,
    context: int = CONTEXT,
    runs: int = RUNS,
    kinds: int = KINDS,
    sequences: int = LEARNT,
    length: int = LENGTH,
    out: Path | None = None,
    bar: Bar = silent,
) -> Tuned:
    """Give each layer the bits with which attention loses least, within a budget.

    The first half of the text is learnt from and scored on, the second half decides whether the
    policy is better in the loop than equal bits in all layers.

    Args:
        model: the model.
        texts: a text, data or token ids, as for `kvqjax.compare`.
        method: the method without bits, such as "klt:heads=own" or "higgs:dim=4".
        bits: the most bits of a number with everything counted, for a row of `context` tokens.
        context: tokens of the row for which bytes are counted.
        runs: the most groups of neighbouring layers that have the same bits.
        kinds: the most different bits among them.
        sequences: how many candidates are calibrated on.
        length: tokens of a sequence, at most the model's context.
        out: a folder that keeps scores and calibrations, so that a stopped run continues.
        bar: `bar(label)` is called before every step and gives a function that is told the step's
            progress, 0 to 1.

    Returns:
        The policy, its constants where it needs any, and its row in the loop beside that of equal
        bits.

    Raises:
        UserError: a method whose layers cannot get bits one by one, a budget that none meets, and a
            text too short.
    """
    check_model(model)
    check_counts(context=context, runs=runs, kinds=kinds, sequences=sequences, length=length)
    method, bits = parse(method), _checked_bits(bits)
    check_tuned(method, model.config)
    candidates = candidates_of(method, model.config, bits)
    sizes = np.stack([bytes_of_layers(model, c, context) for c in candidates], 1)
    limit = bits / 8 * _numbers(model, candidates[0], context)
    least = bits * sizes.min(1).sum() / limit
    if least > bits:
        name = to_dict(method)["method"]
        raise UserError(
            f"bits={bits:g} is below what {name} reaches: {least:.3f} with everything counted"
        )
    length = min(length, model.config.max_position)
    if length <= (first := encoded_from(model, method, length)):
        raise UserError(
            f"sequences of {length} tokens end before {method} reads what it has encoded; wanted "
            f"more than {first}"
        )
    job = comparison(
        model,
        data_or_ids(model, texts),
        chunk=max(1, length // CHUNKS),
        window=length,
        tokens=CHECKED,
        context=context,
        sequences=sequences,
        store=None if out is None else made_folder(out) / "calibrated",
    )
    with held(None if out is None else out / "tune"):
        scores = _scores(job, candidates, sequences, length, out, bar)
        losses = scores.losses(_yardstick(candidates))
        chosen = allotted(losses, sizes, limit, runs, kinds)
        assert chosen is not None  # the smallest candidate fits
        options = {
            "tuned": _policy(candidates, chosen),
            "uniform": _uniform(model, method, candidates, losses, sizes, bits, context),
        }
        calibrated = job.ready(list(options.values()), [], bar)
        rows = [
            {"kind": kind} | job.row(*pair, "auto", bar(str(pair[1])))
            for kind, pair in zip(options, calibrated, strict=True)
        ]
    best = int(np.argmin([row["kld"] for row in rows]))
    ready_model, final = calibrated[best]
    artifact = None
    if calibrate.learns(final, model.config):
        artifact = Artifact(final, ready_model.constants, model.fingerprint, {"tuned": True})
    estimated = float(losses[np.arange(len(chosen)), chosen].sum())
    about = {"bits": bits, "method": str(method), "context": context, "data": job.about}
    about |= {"estimated": estimated, "layers": _layers(candidates, chosen, losses)}
    return Tuned(final, artifact, rows, about)


def _checked_bits(bits: Any) -> float:
    """Give a budget of bits. Raises UserError for one that no number has."""
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits <= MOST_BITS:
        raise UserError(f"bits={bits}; wanted a number above 0, and at most {MOST_BITS}")
    return float(bits)


def _numbers(model: Model, method: Method, context: int) -> int:
    """Count the numbers of keys and values of a row."""
    book = ledger_of(model, method, context)
    return book.tokens * book.values


def _yardstick(candidates: tuple[Method, ...]) -> int:
    """Choose the candidate in the middle: what others lose is estimated from it."""
    return len(candidates) // 2


def _scores(
    job: Comparison,
    candidates: tuple[Method, ...],
    count: int,
    length: int,
    out: Path | None,
    bar: Bar,
) -> Scores:
    """Score candidates on the first sequences of the text. Calibrations read the same ones."""
    ids = calibrate.sequences(job.model, job.learnt, count + SCORED, length)
    least = 2 * (SCORED + 1) * length
    if len(ids) <= SCORED:
        raise UserError(f"the text is too short to tune by; wanted {least} tokens at least")
    update = bar(f"scoring {len(candidates)} candidates in every layer")
    return scored(
        job.model,
        candidates,
        _yardstick(candidates),
        ids[:-SCORED],
        ids[-SCORED:],
        state=None if out is None else out / "scores.npz",
        advance=lambda steps, total: update(steps / total),
    )


def _policy(candidates: tuple[Method, ...], chosen: np.ndarray) -> Method:
    """Write a choice as a method: its most frequent candidate, and exceptions without sinks, which
    belong to the whole policy."""
    numbers, counts = np.unique(chosen, return_counts=True)
    default = int(numbers[counts.argmax()])

    def bare(method: Method) -> Method:
        return parse({name: x for name, x in to_dict(method).items() if name != "sinks"})

    exceptions: dict[str | int, MethodLike] = {
        f"{first}-{last}" if last > first else str(first): bare(candidates[number])
        for first, last, number in stretches(chosen)
        if number != default
    }
    return policy(candidates[default], exceptions)


def _uniform(
    model: Model,
    method: Method,
    candidates: tuple[Method, ...],
    losses: np.ndarray,
    sizes: np.ndarray,
    bits: float,
    context: int,
) -> Method:
    """Give the best of what has the same bits in all layers: the candidate of least loss that fits,
    or as many fractional bits as fit."""
    limit = bits / 8 * _numbers(model, candidates[0], context)
    if is_fractional(method):
        for step in range(int(bits * FRACTION), 0, -1):
            with contextlib.suppress(UserError):
                uniform = with_bits(method, step / FRACTION, step / FRACTION)
                if bytes_of_layers(model, uniform, context).sum() <= limit:
                    return uniform
    fitting = np.where(sizes.sum(0) <= limit, losses.sum(0), np.inf)
    return candidates[int(fitting.argmin())]


def _layers(
    candidates: tuple[Method, ...], chosen: np.ndarray, losses: np.ndarray
) -> list[dict[str, Any]]:
    """Describe what each layer got, and what every candidate is estimated to lose there."""
    names = [str(candidate) for candidate in candidates]
    return [
        {
            "layer": layer,
            "cache": names[number],
            "losses": dict(zip(names, map(float, row), strict=True)),
        }
        for layer, (number, row) in enumerate(zip(chosen, losses, strict=True))
    ]


def write_report(tuned: Tuned, out: Path) -> None:
    """Write policy.json, the artifact and report.json into `out`, and delete what an earlier run of
    other options left there. Raises UserError where nothing can be written."""
    try:
        if (out / "artifact").exists():
            read_description(out / "artifact", "artifact")
            shutil.rmtree(out / "artifact")
        if tuned.artifact is not None:
            tuned.artifact.save(out / "artifact")
        written = json.dumps(to_dict(tuned.method), indent=1)
        (out / "policy.json").write_text(written + "\n", encoding="utf-8")
        report = {"policy": str(tuned.method), "rows": tuned.rows, "about": tuned.about}
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from error
