"""Other libraries' caches on the windows of the results page: which ones, their records, and how
ours compare.

`python -m benchmarks.results.engines` measures them. A record has the fields of one of our rows,
its scores against the same engine's exact cache; an exact cache's own are against ours.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results.rows import CHUNK, CONTEXT, WINDOWS, named
from benchmarks.tables import table

FOLDER = Path(__file__).parents[1] / "records" / "peers"
TEXTS = tuple(WINDOWS)
# Engine -> cache -> what it is made by. The first is the engine's exact cache. In transformers,
# axes say along what numbers share a scale: quanto's 0 and hqq's 1 take a token's channels in a
# head, quanto's -1 a channel of 64 tokens, hqq's 0 a channel of tokens that lie far apart, in all
# heads.
PEERS: dict[str, dict[str, dict[str, Any]]] = {
    "llama.cpp": {
        "f16": {"kind": "f16"},
        "q8_0": {"kind": "q8_0"},
        "q5_1": {"kind": "q5_1"},
        "q4_0": {"kind": "q4_0"},
        "q4_0, not rotated": {"kind": "q4_0", "rotated": False},
        "q4_1": {"kind": "q4_1"},
        "q5_1, not rotated": {"kind": "q5_1", "rotated": False},
        "q5_0": {"kind": "q5_0"},
        "iq4_nl": {"kind": "iq4_nl"},
    },
    "transformers": {
        "exact": {},
        "quanto int4": {"backend": "quanto", "nbits": 4},
        "quanto int4, keys per channel": {"backend": "quanto", "nbits": 4, "axis_key": -1},
        "quanto int2": {"backend": "quanto", "nbits": 2},
        "quanto int2, keys per channel": {"backend": "quanto", "nbits": 2, "axis_key": -1},
        "hqq int4": {"backend": "hqq", "nbits": 4},
        "hqq int4, axis 1": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
        "hqq int4, values axis 1": {"backend": "hqq", "nbits": 4, "axis_key": 0, "axis_value": 1},
        "hqq int2": {"backend": "hqq", "nbits": 2},
        "hqq int2, axis 1": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
        "hqq int2, values axis 1": {"backend": "hqq", "nbits": 2, "axis_key": 0, "axis_value": 1},
        "fp8": {"backend": "fp8"},
    },
}
TITLE = "## Beside other libraries\n\n"
ABOUT = f"""\
The same float32 weights, windows and chunks through the caches of llama.cpp (flash attention) and of transformers
(`QuantizedCache`), each against its own engine's exact cache: f16 in llama.cpp, float32 in transformers. Written from
the records under `benchmarks/records/peers` (`python -m benchmarks.results.engines`).

- *at 32K*: everything stored for {CONTEXT} tokens, scales and zero points as the library keeps them. In transformers
  these have the model's dtype, as have up to 127 recent tokens (`residual_length=128`): bfloat16, as in our rows.
- After a chunk of {CHUNK} transformers has no token in full precision: it encodes all tokens anew with each chunk. A
  token attends to its own chunk exactly, as with ours. In llama.cpp it attends to codes alone, those of its own chunk
  included. That is harder, and the same as token by token.
- quanto and hqq have groups of 64. A group is a token's channels in one head by default in quanto, and with axis 1 in
  hqq. By default (axis 0) hqq's groups are numbers of one channel from all heads, of tokens far apart.
- llama.cpp rotates what its quantised caches store, unless `LLAMA_ATTN_ROT_DISABLE=1`.
- Bold: for each of theirs, our row of no more bits that is nearest to exact on {TEXTS[0]}, and the nearest without
  calibration.
"""
LINE = """\
The line through theirs joins those that no other of theirs beats in bits and divergence, straight in the logarithm of
the divergence. """
# What README's table shows: caches of each library. Those of "kvqjax" are rows of the results.
README = {
    "llama.cpp": ("q8_0", "q4_0"),
    "transformers": ("quanto int4", "quanto int2, keys per channel"),
    "kvqjax": (
        "higgs:bits=4",
        "kivi:bits=4,group=64,window=0",
        "kivi:bits=2,window=0",
        "smollm2-2.5-free.json",
        "higgs:bits=2,dim=4,centre=block,norm=unbiased",
        "kvquant:bits=3",
        "xquant:bits=4",
        "aqua:bits=2.2,backbone=klt",
        "aqua:bits=2",
        "klt:bits=2.2",
        "klt:bits=2.0",
        "commvq:bits=2,window=0",
    ),
}


def exact_of(engine: str) -> str:
    """The name of an engine's exact cache."""
    return next(iter(PEERS[engine]))


def path_of(engine: str, cache: str) -> Path:
    """The file of a record."""
    return named(FOLDER, f"{engine} {cache}")


def stored() -> list[dict[str, Any]]:
    """Records on disk, in the order of PEERS."""
    paths = [path_of(engine, cache) for engine, caches in PEERS.items() for cache in caches]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def missing() -> list[str]:
    """Engines' caches without a record, as the page names them."""
    pairs = [(engine, cache) for engine, caches in PEERS.items() for cache in caches]
    return [f"`{engine} {cache}`" for engine, cache in pairs if not path_of(engine, cache).exists()]


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (bits, divergence) that no other one beats in both, by bits."""
    points_kept: list[tuple[float, float]] = []
    for bits, divergence in sorted(points):
        if not points_kept or divergence < points_kept[-1][1]:
            points_kept.append((bits, divergence))
    return points_kept


def beats(point: tuple[float, float], points: list[tuple[float, float]]) -> bool | None:
    """Whether a point (bits, divergence) lies below the line through the front of other points.

    The line is straight in the logarithm of the divergence. It is level beyond its right end, and
    ends at its first point on the left.

    Args:
        point: bits and divergence.
        points: the other points. The line goes through those on their front.

    Returns:
        Whether the point lies below. None where it lies left of the line, and not below the line's
        first point.
    """
    bits, divergence = np.asarray(front(points)).T
    below = bool(point[1] < np.exp(np.interp(point[0], bits, np.log(divergence))))
    return None if point[0] < bits[0] and not below else below


def nearest(
    ours: dict[str, dict[str, Any]], theirs: list[dict[str, Any]], text: str
) -> list[dict[str, Any]]:
    """Of ours that take no more bits than a cache of theirs, the one of the least divergence on a
    text; likewise of those that need no calibration. For every cache of theirs, each once."""

    def divergence(row):
        return float(np.mean(row["by_window"][text]["kld"]))

    chosen: dict[str, dict[str, Any]] = {}
    for peer in theirs:
        fitting = [row for row in ours.values() if _bits(row) <= _bits(peer)]
        for rows in (fitting, [row for row in fitting if not row["calibration_seconds"]]):
            if rows:
                best = min(rows, key=divergence)
                chosen[best["cache"]] = best
    return list(chosen.values())


def _mean(row: dict[str, Any], text: str, name: str) -> float:
    return float(np.mean(row["by_window"][text][name]))


def _cells(row: dict[str, Any], scores: Callable[[dict[str, Any], str], list[str]]) -> list[str]:
    """A row of theirs, or, in bold, one of ours that stands beside them."""
    is_peer = "engine" in row
    name = [row["engine"], row["cache"]] if is_peer else ["**kvqjax**", f"**`{row['cache']}`**"]
    bits = f"{_bits(row):.2f}"
    calibrated = "yes" if not is_peer and row["calibration_seconds"] else ""
    return [*name, bits, *(cell for text in TEXTS for cell in scores(row, text)), calibrated]


def _bits(row: dict[str, Any]) -> float:
    """Bits of a number at 32K tokens in a model of bfloat16."""
    return row["bits_32k_of_16"] if "engine" in row else row["bits_32k"]


def verdict(ours: dict[str, dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """Say which of our rows lie below the line through theirs on both texts."""
    rows = [row for cache, row in ours.items() if cache != "exact"]
    lines = {text: [(_bits(row), _mean(row, text, "kld")) for row in theirs] for text in TEXTS}
    below, unplaced, above = [], [], []
    for row in rows:
        verdicts = [beats((_bits(row), _mean(row, text, "kld")), lines[text]) for text in TEXTS]
        (above if False in verdicts else unplaced if None in verdicts else below).append(row)
    plain = sum(not row["calibration_seconds"] for row in below)

    def names(group):
        return ", ".join(f"`{row['cache']}`" for row in group) or "none"

    return (
        f"{len(below)} of our {len(rows)} rows are below it on both texts, {plain} of them without calibration. "
        f"Not below it on one text or both: {names(above)}. "
        f"Of fewer bits than any of theirs, and farther from exact than the line's left end: {names(unplaced)}."
    )


def _agreement(exact: list[dict[str, Any]]) -> str:
    """Say how far the engines' exact caches are from ours, and what they are."""

    def loss(row, name):
        return f"{np.exp(_mean(row, TEXTS[0], name)):.6g}"

    distances = [
        f"that of {row['engine']} is at most {max(_mean(row, text, 'kld') for text in TEXTS):.1g} nats from ours, its "
        f"perplexity on {TEXTS[0]} {loss(row, 'nll')} where ours is {loss(row, 'nll_exact')}"
        for row in exact
    ]
    versions = {key: value for row in exact for key, value in row["about"]["versions"].items()}
    said = "; ".join(f"{key} {value}" for key, value in versions.items())
    return f"Exact caches agree: {'; '.join(distances)}. Versions: {said}.\n"


def section(
    ours: dict[str, dict[str, Any]], scores: Callable[[dict[str, Any], str], list[str]]
) -> str:
    """The section of the page: theirs with our nearest rows by bits, and how ours lie to the line
    through theirs.

    Args:
        ours: our rows by cache.
        scores: gives the cells of a row's scores on a text.

    Returns:
        The section.
    """
    records = stored()
    exact = [row for row in records if row["cache"] == exact_of(row["engine"])]
    theirs = [row for row in records if row not in exact]
    if not theirs:
        return TITLE + "Not run yet.\n"
    shown = sorted([*theirs, *nearest(ours, theirs, TEXTS[0])], key=lambda row: -_bits(row))
    numbers = [f"{text}, {name}" for text in TEXTS for name in ("ratio", "KLD", "top-1")]
    head = ["library", "cache", "at 32K", *numbers, "calibrated"]
    parts = [TITLE + ABOUT, _agreement(exact), table(head, [_cells(row, scores) for row in shown])]
    parts += [f"Not run: {', '.join(missing())}.\n"] if missing() else []
    parts.append(f"{LINE}{verdict(ours, theirs)}\n")
    return "\n".join(parts)


def readme_table(
    ours: dict[str, dict[str, Any]], scores: Callable[[dict[str, Any], str], list[str]]
) -> str:
    """README's table: caches of all libraries by their bits.

    Args:
        ours: our rows by cache.
        scores: gives the cells of a row's scores on a text.

    Returns:
        A Markdown table. Its figures are of the first text.
    """
    rows = [
        (library, _row_of(library, cache, ours))
        for library, caches in README.items()
        for cache in caches
    ]
    rows.sort(key=lambda pair: -_bits(pair[1]))
    lines = []
    for library, row in rows:
        ratio, divergence, _ = scores(row, TEXTS[0])
        cache = f"`{row['cache']}`" if library == "kvqjax" else row["cache"]
        learnt = "yes" if row["calibration_seconds"] else ""
        lines.append([library, cache, f"{_bits(row):.2f}", divergence, ratio, learnt])
    return table(
        [
            "library",
            "cache",
            "bits per number",
            "KL divergence",
            "perplexity over exact",
            "calibrated",
        ],
        lines,
    )


def _row_of(library: str, cache: str, ours: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The record of a library's cache."""
    if library == "kvqjax":
        return ours[cache]
    return json.loads(path_of(library, cache).read_text(encoding="utf-8")) | {
        "calibration_seconds": 0
    }
