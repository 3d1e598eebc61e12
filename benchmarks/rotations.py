"""Methods in a rotated frame beside all others at equal bits, on the gate's shapes: one page from records.

    python -m benchmarks.rotations [--shape recall] [--windows 16]      measure what is missing, write the page
    python -m benchmarks.rotations --page                               write the page from the records alone

Rows are measured as those of `benchmarks.gate` and stand beside them on the page. Every row has encoded at least half
of its tokens. `bits at 128` are those of the codecs in Llama-3.1-8B's geometry, heads of 128 channels.
"""

import argparse
import functools
import itertools
import json
from pathlib import Path

import jax
from rich.progress import track

import kvqjax
from benchmarks.gate import KEY, LENGTH, SHAPES, key_of, measure
from benchmarks.gate import RECORD as GATE
from benchmarks.results.page import table
from benchmarks.xquant_roofline import LLAMA31_8B
from kvqjax.cache.accounting import ledger
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import allocate_cache, due

ROOT = Path(__file__).parent
RECORD, PAGE = ROOT / "records" / "rotations.json", ROOT / "rotations.md"
BEST = "higgs:bits=2,dim=4,rope=post,group=head,rotate=signs,norm=unbiased,buffer=32"
BEFORE = "higgs:bits=2,dim=4,group=head,norm=unbiased,buffer=32"  # keys before RoPE, without their bias
TWO = (
    BEST,
    BEFORE,
    "turboquant:bits=2",
    "turboquant:bits=2,norm=unbiased,sinks=4",
    "kvarn:bits=2,sinks=4",
    "omniscale:bits=2,group=128,window=0",
    "oscar:bits=2,window=0,sinks=4",
    "kivi:bits=2,group=128,window=0,rotate=hadamard",
    "kvarn:bits=2,sinks=4,floor=-0.3",
)
FOUR = ("turboquant:bits=4,norm=unbiased,sinks=4", "kvarn:bits=4,sinks=4")
MORE = {  # a key bias, and what takes it off
    "qwen2": (
        "turboquant:bits=2,centre=mean",
        f"{BEST},centre=mean",
        "kvarn:bits=2,sinks=4,centre=mean",
        "omniscale:bits=2,group=128,window=0,centre=mean",
        "oscar:bits=2,window=0,sinks=4,centre=mean",
    ),
    "recall": (
        "oscar:bits=2,window=0,sinks=4,rotate=hadamard",
        "omniscale:bits=2,window=0",
        "kvarn:bits=4,value_bits=2,sinks=4",
        "uniform:bits=4,group=32,rotate=hadamard",
    ),
}
FITTED = ("oscar", "kvquant", "commvq", "aqua", "xquant")  # what needs text or weights
BOUND_BITS, BOUND_RATIO, BOUND_KLD = 2.4, 1.01, 0.5
KIVI = "kivi:bits=2,group=128,window=0"


def rows_of(shape: str) -> list[dict]:
    """Rows to be measured on one shape, the most telling first."""
    bare = [{"cache": c, "stress": "none"} for c in (*TWO, *MORE.get(shape, ()), *FOUR)]
    stressed = [{"cache": c, "stress": "keys x8"} for c in (BEST, BEFORE, "kvarn:bits=2,sinks=4")]
    drifting = (BEST, "kvarn:bits=2,sinks=4") if shape == "recall" else ()
    long = [{"cache": c, "stress": "none", "mode": "long decode"} for c in drifting]
    return [{"shape": shape, "mode": "copy"} | row for row in bare + stressed + long]


def encoded_share(cache: str) -> float:
    """Which part of a window's tokens its cache has encoded at its end."""
    method = kvqjax.parse(cache)
    layout = kvqjax.init_cache(kvqjax.load("recall"), method, 1, LENGTH).layout
    clock = runs_of(layout)[len(runs_of(layout)) // 2].wiring.storage.clocks[0]
    return int(due(clock, LENGTH - method.sinks, 0)) * clock.unit / LENGTH


@functools.cache
def bits_at_128(cache: str) -> float:
    """Bits of the codecs in Llama-3.1-8B's geometry, whose heads have 128 channels."""
    shape = LLAMA31_8B.kv_shape
    layout = CacheLayout(shape=shape, method=kvqjax.parse(cache), capacity=1024, dtype="bfloat16")
    return ledger(jax.eval_shape(lambda: allocate_cache(layout, 1))).bits_method


def _read(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _line(row: dict) -> list[str]:
    new = (row["new"] and "**new**, ") or ""
    needs = "calibrated" if row["cache"].startswith(FITTED) or "centre=mean" in row["cache"] else "data-free"
    numbers = [f"{bits_at_128(row['cache']):.3f}", f"{row['bits']:.3f}", f"{row['bits_stored']:.2f}"]
    return [
        f"`{row['cache']}`",
        new + needs,
        *numbers,
        f"{row['ratio']:.4f}",
        f"{row['kld']:.4f}",
        f"{row['top1']:.4f}",
    ]


def verdict(rows: list[dict]) -> list[str]:
    """Of every shape, without stress, the new data-free row that comes nearest to the bound."""
    lines = []
    for shape in SHAPES:
        own = {r["cache"]: r for r in rows if (r["shape"], r["stress"], r["mode"]) == (shape, "none", "copy")}
        fit = [r for r in own.values() if r["new"] and not r["cache"].startswith(FITTED)]
        fit = [r for r in fit if "centre=mean" not in r["cache"] and bits_at_128(r["cache"]) <= BOUND_BITS]
        if not fit or KIVI not in own:
            continue
        best, kivi = min(fit, key=lambda r: r["ratio"]), own[KIVI]
        share = best["kld"] / kivi["kld"]
        held = [best["ratio"] <= BOUND_RATIO, share <= BOUND_KLD]
        said = " and ".join(
            f"{name} {'held' if ok else '**missed**'}" for name, ok in zip(("perplexity", "KLD"), held, strict=True)
        )
        lines.append([shape, f"`{best['cache']}`", f"{best['ratio']:.4f}", f"{share:.2f}", said])
    return lines


def page(rows: list[dict]) -> str:
    """The page from all rows, each with `new`."""
    parts = [f"# Rotated methods beside the others\n\n```\n{(__doc__ or '').strip()}\n```\n"]
    parts += [
        f"Bound: a new data-free method of at most {BOUND_BITS} bits (heads of 128 channels) with a perplexity of at "
        f"most {BOUND_RATIO} times the exact one's and at most {BOUND_KLD:g} of the KLD of `{KIVI}`. Nearest to it:\n",
        table(["shape", "cache", "ratio", "KLD over KIVI's", ""], verdict(rows)),
    ]
    head = ["cache", "", "bits at 128", "bits here", "at 32K, all in", "perplexity ratio", "KLD", "top-1"]
    for shape in SHAPES:
        for stress in ("none", "keys x8"):
            own = [r for r in rows if (r["shape"], r["stress"], r["mode"]) == (shape, stress, "copy")]
            own.sort(key=lambda r: (round(r["bits_stored"]), r["kld"]))
            if any(r["new"] for r in own):
                parts += [f"## {shape}, stress {stress}\n", table(head, [_line(r) for r in own])]
    long = [r for r in rows if r["mode"] == "long decode" and r["shape"] == "recall"]
    if any(r["new"] for r in long):
        lines = [[f"`{r['cache']}`", f"{r['first']:.3g}", f"{r['last']:.3g}", f"{r['growth']:.2f}"] for r in long]
        parts += ["## recall, 2048 steps of one token\n", table(["cache", "KLD, first 1000", "last", "growth"], lines)]
    return "\n".join(parts)


def write_page() -> None:
    """The page of what is on record."""
    rows = [row | {"new": path == RECORD} for path in (RECORD, GATE) for row in _read(path)]
    rows = [row for row in rows if not row["cache"].startswith("noise") or row["mode"] == "long decode"]
    PAGE.write_text(page(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    done = _read(RECORD)
    known = {key_of(row) for row in done if row["windows"] == given.windows}
    lists = [rows_of(shape) for shape in given.shape or SHAPES]
    turns = (row for some in itertools.zip_longest(*lists) for row in some if row is not None)
    wanted = [row for row in turns if key_of(row) not in known]
    for row in track([] if given.page else wanted, description="rotations"):
        if (share := encoded_share(row["cache"])) < 0.5:
            raise SystemExit(f"{row['cache']}: only {share:.2f} of its tokens are encoded")
        done = [old for old in done if key_of(old) != key_of(row)] + [measure(row, given.windows)]
        text = ",\n ".join(json.dumps(line) for line in sorted(done, key=lambda line: [line[name] for name in KEY]))
        RECORD.write_text(f"[\n {text}\n]\n", encoding="utf-8")
    write_page()
    print(PAGE)


if __name__ == "__main__":
    main()
