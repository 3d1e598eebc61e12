"""benchmarks/ablations.md from the records alone."""

import json
from pathlib import Path

import kvqjax as kvq
from benchmarks.ablations.cases import GROUPS, SETS, Group
from benchmarks.ablations.paired import WINDOW, compare, stored_bits
from benchmarks.tables import table
from kvqjax.methods.roofline import flops_per_token

__all__ = ["PAGE", "path_of", "text"]

HERE = Path(__file__).parents[1]
PAGE = HERE / "ablations.md"
HEAD = f"""# Ablations: each method beside itself with a part left out or exchanged

Written by `python -m benchmarks.ablations` (`make results`) from `benchmarks/records/ablations`. Mode: in the loop,
every token through the cache in chunks of 32, windows of {WINDOW}. Two seeds draw other windows and other sequences to
calibrate on, of a text that is not scored. *Loss* and *KLD* are nats a token. The differences are to the first cache of
a table, on the same windows, with their paired standard error over batches of 8 windows. *Bits* are those of the codecs
for a key or value channel. *Operations* is what a step computes anew from the cache at {WINDOW} tokens.

`demo` reads books that it was not trained on. `recall` and `mha` repeat random symbols, and the repetition is scored.
These models have two or three layers; a paper's order that depends on outlier channels or on depth need not show here.
"""
COLUMNS = ("cache", "bits", "loss", "exact", "difference", "KLD", "difference", "top-1", "million operations")


def path_of(name: str) -> Path:
    return HERE / "records" / "ablations" / f"{name}.json"


def _cells(model, case, figures: dict, first: bool) -> list[str]:
    gaps = [f"{figures[name]:+.4f} ± {figures[f'{name}_error']:.4f}" for name in ("against_first", "kl_against_first")]
    gaps = ["", ""] if first else gaps
    method = kvq.parse(case.cache)
    flops = flops_per_token(method, model.config) * WINDOW / 1e6
    label = f"`{case.cache}`" + f", {case.note}" * bool(case.note)
    return [
        label,
        f"{stored_bits(model, method):.3f}",
        f"{figures['nats']:.4f}",
        f"{figures['exact']:.4f}",
        gaps[0],
        f"{figures['kl']:.4f}",
        gaps[1],
        f"{figures['top1']:.4f}",
        f"{flops:.0f}" if flops else "",
    ]


def _section(group: Group, rows: dict, model) -> str:
    cases = [case for case in group.cases if case.name in rows]
    sums = {case.name: [batch for seed in rows[case.name]["sums"] for batch in seed] for case in cases}
    first = cases[0].name if cases else ""
    body = [_cells(model, case, compare(sums[case.name], sums[first]), case.name == first) for case in cases]
    return f"\n## {group.title} (`{Path(SETS[group.data].model).name}`)\n\n" + (
        table(COLUMNS, body) if body else "Not measured yet.\n"
    )


def text() -> str:
    """The whole page."""
    parts = [HEAD]
    models = {name: kvq.load(kind.model) for name, kind in SETS.items()}
    rows = {}
    for name in SETS:
        record = json.loads(path_of(name).read_text()) if path_of(name).exists() else {"rows": {}}
        rows[name] = record["rows"]
    return "".join([*parts, *(_section(group, rows[group.data], models[group.data]) for group in GROUPS)])
