"""What tuning gains over single methods at equal bits, on the bundled text model and the gate's shapes.

    python -m benchmarks.tune [--shape demo] [--stress none] [--budget 2.5] [--out benchmarks/records/tune.json]
    python -m benchmarks.tune --page docs/howto/tune.md

The second form writes the tables between the marks of that page from the record.

Budgets are average bits of all that is stored for 32768 tokens. The shape `mistral` sees 256 tokens and keeps no more,
so that its exact cache takes 0.8 bits a number there: its bits are of 2048 tokens, its longest row. `line` is the
divergence at the budget on the logarithmic line between the best single methods on either side, the steepest such line;
`single` the best single method that fits. Policies are searched on one set of windows, every figure is of another. The
shapes' windows are the gate's: 384 symbols, the second half of which repeats the first and is scored. Rows in the
record are not measured again.
Stress: keys' rotary pairs times 8 (outlier channels), or a key bias of length 20 on the slowest pairs (Qwen2's shape).
`cpu_seconds` are the process's own, all threads, of the search at that budget. Measurements and programs are shared by
the budgets of one model and list of methods, so the first has those of each part alone.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from benchmarks.calibrated import span_rows
from benchmarks.gate import CHUNK, LENGTH, SHAPES, STRESS, open_shape
from benchmarks.stress import under
from kvqjax._errors import UserError
from kvqjax.calibrate.resume import identity
from kvqjax.data.sentences import filler
from kvqjax.eval.scores import exact_logits
from kvqjax.eval.stamp import CONTEXT
from kvqjax.eval.tune import Settings, tune, tune_windows
from kvqjax.eval.tune.candidates import named
from kvqjax.eval.tune.measure import divergence
from kvqjax.eval.tune.report import line_at
from kvqjax.eval.tune.run import estimated
from kvqjax.methods import parse
from kvqjax.model.loading import config_of, load

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "tune.json"
BUDGETS = (2.5, 3.2, 2.3, 4.2)
LISTED = "kivi:window=0,kivi:group=128,window=0,higgs:buffer=32,uniform"
KEY = ("shape", "stress", "methods", "budget")
CONTEXTS = {"mistral": 2048}  # its longest row
WINDOWS, SCORED, SEARCHED, HELD = 16, LENGTH // 2 + 1, 5, 0  # rows, first position scored, seeds of the two sets
BOUND = 0.85


def key_of(row: dict) -> tuple:
    """What names a row."""
    return tuple(row[name] for name in KEY)


def plan() -> list[dict]:
    """The rows, those of one model together."""
    models = [("demo", "none"), *((shape, stress) for stress in STRESS for shape in SHAPES), ("qwen2", "key bias")]
    row = lambda shape, stress, methods, budget: dict(zip(KEY, (shape, stress, methods, budget), strict=True))  # noqa: E731
    return [*(row(*model, LISTED, b) for model in models for b in BUDGETS), row("demo", "none", "data-free", 2.5)]


def opened(shape: str, stress: str):
    """The model under its stress."""
    return under(load("demo") if shape == "demo" else open_shape(shape), stress)


def tuned_at(model, row: dict, out: Path):
    if row["shape"] == "demo":
        text = filler(np.random.default_rng(0), 20000)
        return tune(model, text, budget=row["budget"], methods=row["methods"], out=out)
    methods = named(row["methods"], model.config)
    searched, kept_back = (span_rows(model, WINDOWS, LENGTH, seed=seed) for seed in (SEARCHED, HELD))
    settings = Settings(context=CONTEXTS.get(row["shape"], CONTEXT), scored_from=SCORED, batch=WINDOWS)
    return tune_windows(model, methods, row["budget"], searched, kept_back, settings=settings, out=out)


def measure(row: dict, out: Path) -> dict:
    """One row with its figures."""
    begun, model = time.process_time(), opened(row["shape"], row["stress"])
    try:
        tuned = tuned_at(model, row, out)
    except UserError as error:
        return row | {"refused": str(error)}
    policy, singles = tuned.rows[0], [r for r in tuned.rows if r["kind"] == "single"]
    fitting = min((r for r in singles if r["bits_stored"] <= row["budget"]), key=lambda r: r["kld"], default=None)
    line = line_at(tuned.rows, row["budget"])
    short = lambda x: None if x is None else float(f"{x:.5g}")  # noqa: E731
    figures = {"policy": policy["cache"], "bits": short(policy["bits_stored"]), "kld": short(policy["kld"])}
    figures |= {
        "kld_error": short(policy["kld_error"]),
        "line": short(line),
        "ratio": short(line and policy["kld"] / line),
    }
    if fitting is not None:
        figures |= {"single": fitting["cache"], "single_kld": short(fitting["kld"])}
    seconds = round(time.process_time() - begun, 1)
    return row | figures | {"measurements": tuned.about["measurements"], "cpu_seconds": seconds}


def again(row: dict) -> float:
    """The divergence of a recorded row's policy on the same windows, measured again."""
    model = opened(row["shape"], row["stress"])
    windows = jnp.asarray(span_rows(model, WINDOWS, LENGTH, seed=HELD))
    reference = exact_logits(model, windows)
    return float(np.asarray(divergence(model, windows, reference, parse(row["policy"]), CHUNK, SCORED)).mean())


def held_at(rows: list[dict], budget: float) -> list[str]:
    """Shapes without stress whose policy at this budget is at most BOUND times the line."""
    plain = [row for row in rows if (row["stress"], row["budget"]) == ("none", budget) and row["shape"] in SHAPES]
    return [row["shape"] for row in plain if row.get("ratio") is not None and row["ratio"] <= BOUND]


def cell(row: dict) -> str:
    """A row's ratio to the line and its divergence, or why there is none."""
    if "refused" in row:
        return "refused"
    ratio = "no line" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"{ratio} ({row['kld']:.2g})"


def tables(rows: list[dict]) -> str:
    """The record as Markdown: a line for each model under its stress, a column for each budget."""
    lines = [f"| model | stress | {' | '.join(f'{budget} bits' for budget in sorted(BUDGETS))} |"]
    lines.append("|---|---|" + "--:|" * len(BUDGETS))
    cells = {key_of(row): cell(row) for row in rows}
    for shape, stress, methods in sorted({key[:-1] for key in cells}):
        name = shape + ", data-free" * (methods == "data-free")
        figures = [cells.get((shape, stress, methods, budget), "") for budget in sorted(BUDGETS)]
        lines.append(f"| {name} | {stress} | {' | '.join(figures)} |")
    lines.append("")
    for budget in (2.5, 3.2):
        shapes = held_at(rows, budget)
        share = f"{len(shapes)} of the {len(SHAPES)} shapes"
        lines.append(f"At {budget} bits {share} are at most {BOUND} x the line: {', '.join(shapes)}.")
    searches = sorted({key_of(row)[:3] for row in rows if "cpu_seconds" in row})
    spent = {s: sum(row.get("cpu_seconds", 0) for row in rows if key_of(row)[:3] == s) for s in searches}
    top = max(spent, key=lambda s: spent[s])
    lines.append(
        f"The budgets of a model together took at most {spent[top] / 60:.1f} minutes of CPU time ({top[0]}); on idle "
        "cores a search takes less time than that."
    )
    return "\n".join(lines)


def write_page(page: Path, rows: list[dict]) -> None:
    """The tables between the page's marks, and the cost of a large model."""
    costs = [
        estimated(config_of("llama-3.1-8b"), "data-free", *at, Settings()) for at in (("h100", ""), ("v5e", "model=8"))
    ]
    head = "| device | mesh | candidates | forward passes | tokens | hours at the bound | GiB on a device |"
    cost = [head, "|---|---|--:|--:|--:|--:|--:|"]
    for row in costs:
        size = f"{row['forward_passes']} | {row['tokens']} | {row['hours']:.2f} | {row['bytes'] / 2**30:.1f}"
        cost.append(f"| {row['device']} | {row['mesh'] or 'one chip'} | {row['candidates']} | {size} |")
    text = page.read_text(encoding="utf-8")
    for mark, block in {"record": tables(rows), "cost": "\n".join(cost)}.items():
        before, tail = text.split(f"<!-- {mark} -->\n")
        after = tail.split(f"<!-- end of {mark} -->\n")[1]
        text = f"{before}<!-- {mark} -->\n{block}\n<!-- end of {mark} -->\n{after}"
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=("demo", *SHAPES))
    parser.add_argument("--stress", action="append", choices=(*STRESS, "key bias"))
    parser.add_argument("--budget", action="append", type=float, choices=BUDGETS)
    parser.add_argument("--page", type=Path, help="write the record's tables into this page and end")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    rows = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
    if options.page is not None:
        write_page(options.page, rows)
        return
    measured = {key_of(row) for row in rows}
    choices = {name: getattr(options, name) for name in ("shape", "stress", "budget")}
    meant = lambda row: all(values is None or row[name] in values for name, values in choices.items())  # noqa: E731
    missing = [row for row in plan() if meant(row) and key_of(row) not in measured]
    with tempfile.TemporaryDirectory() as folder:
        for row in track(missing, description="tune"):
            place = Path(folder) / identity(*key_of(row)[:-1])
            if not place.exists():
                jax.clear_caches()
            place.mkdir(exist_ok=True)
            rows.append(measure(row, place))
            print(json.dumps(rows[-1]), flush=True)
            text = ",\n ".join(json.dumps(line) for line in sorted(rows, key=key_of))
            options.out.write_text(f"[\n {text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
