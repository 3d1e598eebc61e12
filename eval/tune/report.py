"""Reports a tuning on text that it has not searched: rows, a table, a picture, and the commands
that use the result."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact, read_description
from kvqjax.eval.plots import draw, title_of
from kvqjax.eval.stamp import Bar, bytes_of
from kvqjax.eval.tune.measure import Meter
from kvqjax.eval.tune.search import Table, guess
from kvqjax.eval.tune.trials import Trial
from kvqjax.methods import Method, to_dict

Row = dict[str, Any]
FLOOR = 1e-12  # nats: the exact cache's own divergence is rounding, of either sign
FRONT = 9  # budgets from the smallest policy to the largest single choice at which the report shows a policy


def line_at(rows: list[Row], bits: float) -> float | None:
    """The divergence at `bits` on the logarithmic line between the best single choices on either
    side: from the one of least divergence that fits, to the one beyond that makes the line
    steepest. None where one side is empty."""
    singles = [row for row in rows if row["kind"] == "single"]
    below = [row for row in singles if row["bits_stored"] <= bits]
    above = [row for row in singles if row["bits_stored"] > bits]
    if not below or not above:
        return None
    low = min(below, key=lambda row: row["kld"])
    slope = min(
        math.log(max(r["kld"], FLOOR) / low["kld"]) / (r["bits_stored"] - low["bits_stored"])
        for r in above
    )
    return low["kld"] * math.exp(min(slope, 0.0) * (bits - low["bits_stored"]))


def _row(trial: Trial, kind: str, method: Method, kld: np.ndarray, context: int) -> Row:
    """Divergence on held-out windows with its standard error."""
    error = kld.std(ddof=1) / len(kld) ** 0.5 if len(kld) > 1 else float("nan")
    sizes = bytes_of(trial.model, method, context)
    return {
        "kind": kind,
        "cache": str(method),
        **sizes,
        "kld": float(kld.mean()),
        "kld_error": float(error),
    }


def report_rows(
    trial: Trial,
    table: Table,
    final: tuple[Method, Artifact | None],
    meter: Meter,
    context: int,
    bar: Bar,
) -> list[Row]:
    """The chosen method through its own cache, every single choice, and the first guesses at other
    budgets."""
    layers, parts, (method, artifact) = len(table.bytes), trial.candidates.parts, final
    singles = [np.full((layers, 2), number) for number in range(len(parts))]
    low, high = (
        float(table.bytes.min((1, 2)).sum()),
        max(table.size(single) for single in singles[1:]),
    )
    front = [guess(table, low * (high / low) ** (n / (FRONT - 1))) for n in range(FRONT)]
    front = list({policy.tobytes(): policy for policy in front if policy is not None}.values())
    ready_model = trial.model.replace(constants=() if artifact is None else artifact.constants)
    subjects = [
        (f"={method}", lambda: ready_model, method),
        *map(trial.subject, [*singles, *front]),
        *trial.others(),
    ]
    methods = [
        ("tuned", method),
        *(("single", m) for m in parts),
        *(("front", trial.method(p)) for p in front),
    ]
    methods += [("single", candidate) for candidate in trial.candidates.others]
    kld = meter(subjects, bar("held-out text"))
    return [_row(trial, kind, m, x, context) for (kind, m), x in zip(methods, kld, strict=True)]


def commands(method: Method, artifact: Artifact | None, out: Path, model: str) -> list[str]:
    """How to use what `write_report` wrote."""
    cache = f"--cache {out / 'policy.json'}" + (
        f" --artifact {out / 'artifact'}" if artifact is not None else ""
    )
    return [
        f"kvqjax generate --model {model} {cache} --prompt TEXT",
        f"kvqjax eval ppl --model {model} {cache} --data FILE",
        f"kvqjax plan --model {model} --cache {out / 'policy.json'}",
    ]


def _table(rows: list[Row]) -> list[str]:
    """The rows as Markdown, by bits; the exact cache's divergence is rounding."""
    lines = ["| | bits | bytes | KL divergence (nats) | cache |", "|---|--:|--:|--:|---|"]
    for row in sorted(rows, key=lambda row: row["bits_stored"]):
        kld = f"{max(row['kld'], 0):.3g} +- {row['kld_error']:.2g}"
        lines.append(
            f"| {row['kind']} | {row['bits_stored']:.3f} | {row['bytes']} | {kld} | `{row['cache']}` |"
        )
    return lines


def markdown(
    method: Method, artifact: Artifact | None, rows: list[Row], about: dict[str, Any], out: Path
) -> str:
    """The report as a page."""
    tuned, kind, amount = rows[0], *about["budget"].values()
    line = line_at(rows, tuned["bits_stored"])
    ratio = (
        ""
        if line is None
        else f", {tuned['kld'] / line:.2f} x the logarithmic line between single methods there"
    )
    unseen = f"{about['windows'][1]} windows of {about['settings']['window']} tokens that were not searched"
    parts = [
        f"# {about['model']} within {kind} {amount:g}",
        f"`{method}`: {tuned['bits_stored']:.3f} bits a number at {about['settings']['context']} tokens; KL divergence "
        f"{tuned['kld']:.3g} +- {tuned['kld_error']:.2g} nats{ratio}. Measured on {unseen}; {about['measurements']} "
        "policies were measured in all.",
        "![KL divergence against bits](front.png)",
        "\n".join(_table(rows)),
        "```\n" + "\n".join(commands(method, artifact, out, about["model"])) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def write_report(
    method: Method, artifact: Artifact | None, rows: list[Row], about: dict[str, Any], out: Path
) -> None:
    """policy.json, the artifact, report.json, report.md and front.png in `out`; what an earlier run
    of other options wrote there is replaced."""
    try:
        if (out / "artifact").exists():
            read_description(out / "artifact", "artifact")
            shutil.rmtree(out / "artifact")
        if artifact is not None:
            artifact.save(out / "artifact")
        (out / "policy.json").write_text(
            json.dumps(to_dict(method), indent=1) + "\n", encoding="utf-8"
        )
        report = json.dumps({"policy": str(method), "rows": rows, "about": about}, indent=1)
        (out / "report.json").write_text(report + "\n", encoding="utf-8")
        (out / "report.md").write_text(
            markdown(method, artifact, rows, about, out), encoding="utf-8"
        )
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from error
    draw("tune", rows, title_of("tune", about["model"], about["data"]["name"]), out / "front.png")
