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
from benchmarks.gate import KEY, LENGTH, SHAPES, STEPS, key_of, measure
from benchmarks.gate import RECORD as GATE
from benchmarks.tables import table
from benchmarks.xquant_roofline import LLAMA31_8B
from kvqjax.cache.accounting import ledger
from kvqjax.cache.layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import allocate_cache, due

ROOT = Path(__file__).parent
LONG = "long decode"
RECORD, PAGE = ROOT / "records" / "rotations.json", ROOT / "rotations.md"
KIVI = "kivi:bits=2,group=128,window=0"
BEST = "higgs:bits=2,dim=4,group=head,rope=post,buffer=32,norm=unbiased,rotate=signs"
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
AT = {  # bits -> new methods of about equal bytes
    3: (
        "higgs:bits=3,dim=2,rope=post,group=head,rotate=signs,norm=unbiased,buffer=32",
        "turboquant:bits=3,norm=unbiased,sinks=4",
        "kvarn:bits=3,sinks=4",
        "omniscale:bits=3,group=128,window=0",
        "oscar:bits=3,window=0,sinks=4",
    ),
    4: ("turboquant:bits=4,norm=unbiased,sinks=4", "kvarn:bits=4,sinks=4"),
}
AFTER_ROPE = ("turboquant", "kvarn", "omniscale", "oscar", "uniform")  # methods of keys after RoPE
CENTRED = ("turboquant:bits=2,norm=unbiased,sinks=4", BEST, *TWO[4:8])  # what has keys after RoPE
AQUA = ("aqua:bits=2,first_bits=2", "aqua:bits=2,first_bits=2,centre=mean")
OTHERS = (KIVI, "kvquant:bits=2,outliers=0.0", "higgs:bits=2", "xquant:bits=2,latent=true")
MORE = {  # a key bias, and what takes it off
    "qwen2": ("turboquant:bits=2,centre=mean", *(f"{cache},centre=mean" for cache in CENTRED)),
    "recall": (
        "oscar:bits=2,window=0,sinks=4,rotate=hadamard",
        "omniscale:bits=2,window=0",
        "kvarn:bits=4,value_bits=2,sinks=4",
        "uniform:bits=4,group=32,rotate=hadamard",
    ),
}
BIASED = ("mha", "mistral")  # no bias by nature; a QK-norm (qwen3) would scale it away
DEFAULT = ("mha", "qwen2")  # where the default, which takes a key bias off after RoPE too, stands beside centre=none
LONG_HEAD = ["cache", "", "at 32K, all in", "KLD, first 1000", "last 1000", "growth"]
LOSSES = (
    "New rows of about 2 bits that an older method of no more bits beats, here and with heads of 128 channels. "
    "XQuant's X itself is twice as large in Llama-3.1-8B as in these shapes.\n"
)
SLACK = 0.05  # bits that make no difference
FITTED = ("oscar", "kvquant", "commvq", "aqua", "xquant")  # what needs text or weights
BOUND_BITS, BOUND_RATIO, BOUND_KLD = 2.4, 1.01, 0.5


def rows_of(shape: str) -> list[dict]:
    """Rows to be measured on one shape, the most telling first; those of `benchmarks.gate` are not among them."""
    is_gate_shape = shape == "qwen2"  # where the gate has every method
    aqua = () if is_gate_shape else AQUA[:1]
    caches = {
        "none": (*TWO, *MORE.get(shape, ()), *AT[4], *aqua, *(() if is_gate_shape else OTHERS[3:])),
        "keys x8": (*TWO[:8], *aqua, *(() if is_gate_shape else OTHERS[3:])),
        "key bias": (*TWO[:8], *OTHERS, *aqua, *(f"{c},centre=mean" for c in CENTRED)) if shape in BIASED else (),
    }
    caches = {
        s: _with_centre_none(texts, shape, s) if is_gate_shape or s == "key bias" else texts
        for s, texts in caches.items()
    }
    centre = ",centre=mean" if is_gate_shape else ""
    rows = [{"cache": c, "stress": s, "mode": "copy"} for s, texts in caches.items() for c in texts]
    long = [{"cache": c + centre, "stress": "none", "mode": LONG} for c in AT[3]]
    rows = sorted(rows + long, key=lambda row: row["stress"] == "key bias")
    return [{"shape": shape} | row for row in rows]


def _with_centre_none(caches: tuple[str, ...], shape: str, stress: str) -> tuple[str, ...]:
    """Add centre=none to caches that would take a key bias off by default. On some shapes the default is kept too."""
    after_rope = [c for c in caches if "centre=" not in c and (c.startswith(AFTER_ROPE) or "rope=post" in c)]
    named = [f"{c},centre=none" if c in after_rope else c for c in caches]
    return (*named, *(after_rope if shape in DEFAULT and stress != "keys x8" else ()))


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
    """For every shape, without stress, the new data-free row that comes nearest to the bound."""
    lines = []
    for shape in SHAPES:
        row_of = {r["cache"]: r for r in rows if (r["shape"], r["stress"], r["mode"]) == (shape, "none", "copy")}
        fit = [r for r in row_of.values() if r["new"] and not r["cache"].startswith(FITTED)]
        fit = [r for r in fit if "centre=mean" not in r["cache"] and bits_at_128(r["cache"]) <= BOUND_BITS]
        if not fit or KIVI not in row_of:
            continue
        best, kivi = min(fit, key=lambda r: r["ratio"]), row_of[KIVI]
        share = best["kld"] / kivi["kld"]
        is_held = [best["ratio"] <= BOUND_RATIO, share <= BOUND_KLD]
        said = " and ".join(
            f"{name} {'held' if ok else '**missed**'}" for name, ok in zip(("perplexity", "KLD"), is_held, strict=True)
        )
        lines.append([shape, f"`{best['cache']}`", f"{best['ratio']:.4f}", f"{share:.2f}", said])
    return lines


def losses(rows: list[dict]) -> list[list[str]]:
    """For every new row of about 2 bits the older row with the least divergence, where that is less than the new row's.
    The older row has no more bits, neither here, all in, nor with heads of 128 channels."""
    lines = []
    for row in (r for r in rows if r["new"] and r["mode"] == "copy" and bits_at_128(r["cache"]) <= BOUND_BITS):
        rivals = [r for r in rows if not r["new"] and all(r[n] == row[n] for n in ("shape", "stress", "mode"))]
        fair = [
            r
            for r in rivals
            if r["bits_stored"] <= row["bits_stored"] + SLACK
            and bits_at_128(r["cache"]) <= bits_at_128(row["cache"]) + SLACK
        ]
        best = min(fair, key=lambda r: r["kld"], default=row)
        if best["kld"] < row["kld"]:
            place = f"{row['shape']}, {row['stress']}"
            lines.append([f"`{row['cache']}`", place, f"{row['kld']:.4f}", f"`{best['cache']}`", f"{best['kld']:.4f}"])
    return sorted(lines)


def page(rows: list[dict]) -> str:
    """The page from all rows, each with `new`."""
    parts = [f"# Rotated methods beside the others\n\n```\n{(__doc__ or '').strip()}\n```\n"]
    parts += [
        f"Bound: a new data-free method of at most {BOUND_BITS} bits (heads of 128 channels) with a perplexity of at "
        f"most {BOUND_RATIO} times the exact one's and at most {BOUND_KLD:g} of the KLD of `{KIVI}`. Nearest to it:\n",
        table(["shape", "cache", "ratio", "KLD over KIVI's", ""], verdict(rows)),
        _said(verdict(rows)),
    ]
    head = ["cache", "", "bits at 128", "bits here", "at 32K, all in", "perplexity ratio", "KLD", "top-1"]
    for shape, stress in itertools.product(SHAPES, ("none", "keys x8", "key bias")):
        shape_rows = [r for r in rows if (r["shape"], r["stress"], r["mode"]) == (shape, stress, "copy")]
        shape_rows.sort(key=lambda r: (round(r["bits_stored"]), r["kld"]))
        if any(r["new"] for r in shape_rows):
            parts += [f"## {shape}, stress {stress}\n", table(head, [_line(r) for r in shape_rows])]
    for shape in SHAPES:
        long = [r for r in rows if r["mode"] == LONG and r["shape"] == shape]
        if any(r["new"] for r in long):
            lines = [_long_line(r) for r in sorted(long, key=lambda r: r["last"])]
            parts += [f"## {shape}, {STEPS} steps of one token\n", table(LONG_HEAD, lines)]
    parts += ["## Where each loses\n", LOSSES, table(["cache", "where", "KLD", "less has", "KLD"], losses(rows))]
    return "\n".join(parts)


def _said(lines: list[list[str]]) -> str:
    """What the bound came to, in one sentence."""
    shapes = [line[0] for line in lines if "**missed**" not in line[-1]]
    kld = [line[0] for line in lines if "KLD held" in line[-1]]
    named = ", ".join(shapes) or "none"
    return (
        f"Both parts are held on {len(shapes)} of {len(lines)} shapes ({named}), that on the divergence on {len(kld)}. "
        "**Elsewhere the bound on the perplexity is missed**, by the ratios above.\n"
    )


def _long_line(row: dict) -> list[str]:
    numbers = [f"{row['bits_stored']:.2f}", f"{row['first']:.3g}", f"{row['last']:.3g}", f"{row['growth']:.2f}"]
    return [f"`{row['cache']}`", "**new**" * row["new"], *numbers]


def write_page() -> None:
    """The page of what is on record."""
    older_caches = (*AQUA, *OTHERS)
    rows = [
        row | {"new": path == RECORD and row["cache"] not in older_caches}
        for path in (RECORD, GATE)
        for row in _read(path)
    ]
    rows = [row for row in rows if not row["cache"].startswith("noise") or row["mode"] == "long decode"]
    PAGE.write_text(page(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    measured = _read(RECORD)
    keys = {key_of(row) for row in measured if row["windows"] == options.windows}
    lists = [rows_of(shape) for shape in options.shape or SHAPES]
    turns = (row for group in itertools.zip_longest(*lists) for row in group if row is not None)
    missing = [row for row in turns if key_of(row) not in keys]
    for row in track([] if options.page else missing, description="rotations"):
        if (share := encoded_share(row["cache"])) < 0.5:
            raise SystemExit(f"{row['cache']}: only {share:.2f} of its tokens are encoded")
        measured = [recorded for recorded in measured if key_of(recorded) != key_of(row)] + [
            measure(row, options.windows)
        ]
        text = ",\n ".join(json.dumps(line) for line in sorted(measured, key=lambda line: [line[name] for name in KEY]))
        RECORD.write_text(f"[\n {text}\n]\n", encoding="utf-8")
    write_page()
    print(PAGE)


if __name__ == "__main__":
    main()
