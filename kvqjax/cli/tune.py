"""`kvqjax tune`: bits by layer for a method, where attention loses least by them."""

import time
from pathlib import Path
from typing import Annotated

import typer

from kvqjax._files import made_folder
from kvqjax.cli.common import (
    DataName,
    Dtype,
    Field,
    Folder,
    Json,
    ModelName,
    Seed,
    Split,
    Weights,
    methods_of,
    number,
    open_model,
)
from kvqjax.cli.evaluate import Context
from kvqjax.cli.output import announce, duration, progress_bar, show
from kvqjax.data import read
from kvqjax.eval.tune import tune as search
from kvqjax.eval.tune import write_report
from kvqjax.eval.tune.allotment import KINDS, RUNS
from kvqjax.eval.tune.candidates import check_tuned
from kvqjax.eval.tune.run import CHECKED, LEARNT, LENGTH, MOST_BITS, SCORED, Tuned

SHOWN = ("kind", "cache", "bits_stored", "kld", "ppl", "ppl_exact")


def tune(
    method: Annotated[
        str, typer.Option("--method", help="a method without bits, e.g. klt:heads=own")
    ],
    bits: Annotated[
        float,
        number(
            least=0.1, most=MOST_BITS, help="the most bits of a number, with everything counted"
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="the folder of policy, artifact and report")],
    model: ModelName = "demo",
    data: DataName = "synthetic",
    field: Field = None,
    split: Split = None,
    folder: Folder = None,
    context: Context = 32768,
    runs: Annotated[
        int, number(help="the most groups of neighbouring layers of equal bits")
    ] = RUNS,
    kinds: Annotated[int, number(help="the most different bits among them")] = KINDS,
    sequences: Annotated[int, number(help="that candidates are calibrated on")] = LEARNT,
    length: Annotated[int, number(help="tokens of each")] = LENGTH,
    seed: Seed = 0,
    dtype: Dtype = None,
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Give each layer the bits with which attention loses least, within a budget.

    The policy is checked in the loop beside equal bits in all layers, on text that was not used
    before. If the command is stopped, the same command continues."""
    (parsed,) = methods_of([method])
    loaded, start = open_model(model, dtype, weights), time.monotonic()
    check_tuned(parsed, loaded.config)
    made_folder(out)
    with progress_bar() as bar:
        announce(
            f"tuning {parsed} for {model} to {bits:g} bits; if this is stopped, the same command goes on"
        )
        token_limit = 2 * max((sequences + SCORED) * length, CHECKED)
        texts = read(
            data,
            field=field,
            split=split,
            folder=folder,
            model=loaded,
            tokens=token_limit,
            seed=seed,
            bar=bar,
        )
        tuned = search(
            loaded,
            texts,
            method=parsed,
            bits=bits,
            context=context,
            runs=runs,
            kinds=kinds,
            sequences=sequences,
            length=length,
            out=out,
            bar=bar,
        )
    write_report(tuned, out)
    if as_json:
        typer.echo((out / "report.json").read_text(encoding="utf-8").rstrip())
        return
    show(
        [{name: row[name] for name in SHOWN} for row in tuned.rows],
        False,
        f"{model} at {bits:g} bits, text that was not used before",
    )
    spent = duration(time.monotonic() - start)
    typer.echo(
        "\n".join([f"{out}: {tuned.method}, after {spent}. To use it:", *_uses(tuned, out, model)])
    )


def _uses(tuned: Tuned, out: Path, model: str) -> list[str]:
    """Commands that use the result."""
    cache = f"--cache {out / 'policy.json'}"
    calibrated = cache if tuned.artifact is None else f"{cache} --artifact {out / 'artifact'}"
    return [
        f"kvqjax generate --model {model} {calibrated} --prompt TEXT",
        f"kvqjax eval ppl --model {model} {calibrated} --data FILE",
        f"kvqjax plan --model {model} {cache}",
    ]
