"""Published tables: figures of the papers, and which of our rows stands for each.

Labels and numbers are the papers'; `lower` says whether less is better there. Ours are perplexities
throughout. XQuant's table of X itself is not here: SmolLM2 has grouped queries, and XQuant caches
latents there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Paper(NamedTuple):
    """`rows`: (the paper's label, its bits or size, its figure, our cache or None for one that we
    have no row for)."""

    source: str
    about: str
    measure: str
    lower: bool
    rows: tuple[tuple[str, str, float, str | None], ...]


PAPERS = (
    Paper(
        "KIVI, Table 1",
        "Llama-2-13B, groups of 32; here of 64, the longest that fit",
        "CoQA",
        False,
        (
            ("16 bit", "16", 66.37, "exact"),
            ("4 bit, keys and values per token", "4", 66.48, "uniform:bits=4"),
            ("2 bit, keys and values per token", "2", 52.93, "uniform:bits=2"),
            (
                "2 bit, keys per channel, values per token",
                "2",
                63.53,
                "kivi:bits=2,group=64,window=0",
            ),
        ),
    ),
    Paper(
        "KVQuant, Table 1",
        "LLaMA-7B, WikiText-2; one sink for all",
        "perplexity",
        True,
        (
            ("baseline", "16", 5.68, "exact"),
            ("ATOM-4bit (per token, groups of 128)", "4", 5.77, "uniform:bits=4"),
            ("KVQuant-4bit", "4", 5.72, "kvquant:bits=4,outliers=0.0"),
            ("KVQuant-4bit-1%", "4.3", 5.69, "kvquant:bits=4"),
            ("ATOM-3bit", "3", 6.17, "uniform:bits=3"),
            ("KVQuant-3bit", "3", 5.87, "kvquant:bits=3,outliers=0.0"),
            ("KVQuant-3bit-1%", "3.3", 5.75, "kvquant:bits=3"),
            ("ATOM-2bit", "2", 37.37, "uniform:bits=2"),
            ("KVQuant-2bit", "2", 7.23, "kvquant:bits=2,outliers=0.0"),
            ("KVQuant-2bit-1%", "2.3", 6.01, "kvquant:bits=2"),
        ),
    ),
    Paper(
        "CommVQ, Table 1",
        "LLaMA-3.1-8B-Instruct, LongBench; KVQuant's figure by the text (2.63 below CommVQ-2)",
        "average score",
        False,
        (
            ("KVQuant-2 (1 %)", "2.33", 45.35, "kvquant:bits=2"),
            ("CommVQ-2", "2.00", 47.98, "commvq:bits=2,window=0"),
            ("CommVQ-1", "1.03", 44.94, "commvq:bits=1,window=0"),
        ),
    ),
    Paper(
        "CommVQ, Table 4",
        "Llama-2-7B, LongBench; KIVI in groups of 32",
        "average score",
        False,
        (
            ("FP16", "16", 48.43, "exact"),
            ("KIVI", "3.00", 47.14, "kivi:bits=2,window=0"),
            ("CommVQ", "2.00", 47.27, "commvq:bits=2,window=0"),
        ),
    ),
    Paper(
        "AQUA-KV, Table 1",
        "Llama 3.2 3B, WikiText-2",
        "perplexity",
        True,
        (
            ("uncompressed", "16", 6.98, "exact"),
            ("KIVI-2b-gs128-r128", "2.25", 9.33, "kivi:bits=2,group=64,window=0"),
            ("KVQuant-2b-s1%", "2.33", 9.43, "kvquant:bits=2"),
            ("HIGGS-2b-gs1024", "2.02", 7.47, "higgs:bits=2"),
            ("AQUA-KV (HIGGS), first layer 4 bit", "2.16", 7.03, "aqua:bits=2"),
            ("AQUA-KV (HIGGS), first layer 2 bit", "2.09", 7.05, "aqua:bits=2,first_bits=2"),
        ),
    ),
    Paper(
        "XQuant, Table 1, latents",
        "Llama-3.1-8B, WikiText-2",
        "perplexity",
        True,
        (
            ("baseline", "1.00", 6.24, "exact"),
            ("KIVI*-4bit", "0.27", 6.31, "kivi_star:bits=4,protected=0"),
            ("XQuant-4bit", "0.27", 6.28, "xquant:bits=4"),
            ("KIVI*-3bit", "0.20", 6.59, "kivi_star:bits=3,protected=0"),
            ("XQuant-3bit", "0.20", 6.43, "xquant:bits=3"),
            ("KIVI*-2bit", "0.14", 9.95, "kivi_star:bits=2,protected=0"),
            ("XQuant-2bit", "0.14", 7.74, "xquant:bits=2"),
        ),
    ),
)


def disagreements(paper: Paper, ours: dict[str, Sequence[float]]) -> list[tuple[str, str]]:
    """Pairs (better, worse) by the paper's figures that stand the other way round by ours: a mean
    over windows for each cache, lower is better. A difference counts beyond twice its standard
    error, windows being paired."""
    sign = 1 if paper.lower else -1
    rows = [
        (label, sign * value, np.asarray(ours[cache]))
        for label, _, value, cache in paper.rows
        if cache in ours
    ]
    return [
        (a, b)
        for a, figure_a, values_a in rows
        for b, figure_b, values_b in rows
        if figure_a < figure_b and beyond(values_a - values_b)
    ]


def beyond(differences: np.ndarray) -> bool:
    """Whether the mean is above zero by more than two standard errors."""
    return bool(differences.mean() > 2 * differences.std(ddof=1) / len(differences) ** 0.5)
