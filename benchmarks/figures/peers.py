"""benchmarks/peers.md: this library beside others, each pair measured in one run."""

from benchmarks.tables import read, table

HEAD = """# Beside other libraries

Written by `python -m benchmarks.figures` from `benchmarks/records`. Each table is one run, in which all took turns.
"""

LIMITS = """
The last column says that the slower ones are bound by arithmetic, not by memory. XQuant multiplies the stored latents
of each token by a matrix to have its keys (its values are summed as latents). HIGGS looks grid points up and transforms
each token's keys back, head by head, in one product; the heads are mixed in the query. CommVQ looks codebook vectors up
and adds them for each token's keys.
"""
LAYERS = 8  # of the model beside llama.cpp


def _limit(row: dict, record: dict) -> str:
    """Say what a cached token costs one layer of a step, beside what its bytes do."""
    tokens = LAYERS * row["tokens"]
    spent, least_ms = row["ms"] - row["read"], row["read"] * row["bytes"] / record["weights"]
    return f"`{row['cache']}` {1e6 * spent / tokens:.0f} ({1e6 * least_ms / tokens:.0f})"


def limits(record: dict) -> str:
    """Say what bounds the slower caches, with figures from steps after 8192 tokens."""
    rows = [row for row in record["rows"] if row["kind"] == "step" and row["tokens"] == 8192]
    lines = ",\n".join(_limit(row, record) for row in rows)
    return f"{LIMITS}\nNanoseconds that a cached token takes a layer, and, in brackets, that its bytes take:\n{lines}.\n"  # noqa: E501


def _machine(machine: dict | str) -> str:
    return machine if isinstance(machine, str) else f"{machine['processor']}, jax {machine['jax']}"


def _steps() -> str:
    record = read("decode_quantized")
    heads = [
        "cache",
        "ms a step",
        "KIVI at its bits faster by",
        "the same in groups of 64",
        "faster than exact by",
    ]
    names = ("ours_faster", "ours_faster_groups_of_64", "speed_against_exact")
    rows = [
        [
            row["cache"],
            f"{row['ms_per_step']:.1f}",
            *(f"{row[n]:.2f}" if row.get(n) else "" for n in names),
        ]
        for row in record["rows"]
    ]
    about = (
        "\n## A decode step beside transformers' QuantizedCache (`python benchmarks/decode_quantized.py`)\n\n"
        f"`demo` with {record['context']} tokens cached, float32; {_machine(record['machine'])}. Medians of\n"
        "rounds, and of each round's ratios. KIVI's steps flush as they go, transformers' never had to quantise.\n\n"
    )
    return about + table(heads, rows)


def _beside_llamacpp(row: dict, record: dict) -> list[str]:
    """Cells of one row: milliseconds, then by how much it is faster than each of what was measured
    in its rounds."""
    ms, peers = row["ms"], row["peers"]
    ratios = [
        min(peers.values()) / ms,
        peers["q4_0"] / ms if "q4_0" in peers else None,
        row["exact"] / ms,
    ]
    bound = row["read"] * (1 + row["bytes"] / record["weights"]) if "read" in row else None
    cells = [row["kind"], str(row["tokens"]), f"`{row['cache']}`", f"{ms:.1f}"]
    peer_cells = [f"{peers[name]:.1f}" if name in peers else "" for name in ("f16", "q8_0", "q4_0")]
    return [
        *cells,
        *peer_cells,
        *(f"{x:.2f}" if x else "" for x in ratios),
        f"{ms / bound:.2f}" if bound else "",
    ]


RANDOM = "A Llama of 8 layers, width 768, MLP 2048, 12 query and 4 KV heads of 64, float32 weights"
REAL = "SmolLM2-135M-Instruct (30 layers, width 576, 9 query and 3 KV heads of 64), float32 weights"


def llamacpp(record: dict, options: str = "", model: str = RANDOM) -> str:
    """A section on llama.cpp, of what `python -m benchmarks.llamacpp --out` wrote with these
    options."""
    heads = [
        "",
        "tokens",
        "cache",
        "ms",
        "f16",
        "q8_0",
        "q4_0",
        "faster than the fastest by",
        "than q4_0 by",
    ]
    heads += ["than our exact by", "time of its bytes, times"]
    rows = [_beside_llamacpp(row, record) for row in record["rows"]]
    about = (
        f"\n## A decode step {'and a prompt ' if not options else ''}beside llama.cpp "
        f"(`python -m benchmarks.llamacpp{options}`)\n\n{model};\n"
        f"{_machine(record['machine'])}, llama-cpp-python {record['llama-cpp-python']} with flash attention.\n"
        "Each row is one run, in which our cache, our exact one and llama.cpp's caches took turns (their milliseconds\n"
        "in the middle). The last column divides the step by the time that its weights and its cache take to be read\n"
        "once, at the rate at which XLA added up the weights in the same rounds.\n\n"
    )
    return about + table(heads, rows)


SERVING_HEAD = [
    "cache",
    "bits, all-in",
    "rows running",
    "tokens a second",
    "requests a second",
    "first token, median s",
    "95 % s",
    "later token, median ms",
    "prompt tokens reused",
    "pages shared",
    "made way",
]


def _serving_cells(row: dict) -> list[str]:
    """Cells of one row of `python -m benchmarks.serving`. A figure that was not counted is left
    blank."""

    def said(value, form):
        return "" if value is None else f"{value:{form}}"

    cells = [f"`{row['cache']}`", f"{row['bits']:.2f}", said(row["running"], ".1f")]
    cells += [f"{row['tokens_per_second']:.1f}", f"{row['requests_per_second']:.2f}"]
    cells += [f"{row['first_token_median_s']:.1f}", f"{row['first_token_95_s']:.1f}"]
    cells += [
        said(row["token_median_ms"], ".0f"),
        str(row["reused_tokens"]),
        said(row["pages_shared"], "d"),
    ]
    return [*cells, str(row["preempted"])]


def served_table(rows: list[dict]) -> str:
    """The table of one run of `python -m benchmarks.serving`, and under it the caches that the
    engine refused."""
    refused = [
        f"\nRefused: `{row['cache']}`, {row['refused']}.\n" for row in rows if "refused" in row
    ]
    served = [_serving_cells(row) for row in rows if "refused" not in row]
    return "".join([table(SERVING_HEAD, served), *refused])


def _workload(about: dict) -> str:
    """Say what all rows of one run served."""
    arrival = f"{about['rate']} a second at random times" if about["rate"] else "all at once"
    return (
        f"\n{about['requests']} requests, {arrival}; half begin with the same {about['prefix']} tokens; prompts of 100 "
        f"to {about['longest']} tokens\nbeside it, answers of 50 to {about['answer']} (`--skew {about['skew']:g}`); "
        f"{about['pool'] / 2**20:.0f} MiB of cache, at most {about['rows']} rows of\n{about['capacity']} tokens.\n\n"
    )


def serving(record: dict) -> str:
    """The section on many users, of what `python -m benchmarks.serving --out` wrote."""
    versions = ", ".join(
        f"{name} {version}" for name, version in sorted(record["versions"].items())
    )
    about = (
        "\n## Many users at equal memory (`python -m benchmarks.serving`)\n\n"
        f"SmolLM2-135M-Instruct in float32; {_machine(record['machine'])};\n{versions}. Every cache has the same "
        "bytes, all that a row keeps\nbeside its codes included. Prompts are fed 512 tokens at a time between steps of "
        "rows that run. llama.cpp is\ndriven through its library as its server drives it, with each request's cells "
        "reserved and the common prefix held\nonce. transformers' pages are float32. Pages shared are the most at a "
        "time. With `--skew` above 1 long prompts\nand answers are rarer than on an even logarithmic scale.\n"
    )
    for run in record["runs"]:
        about += _workload(run["about"]) + served_table(run["rows"])
    return about


def text() -> str:
    """The page."""
    record = read("llamacpp")
    real = llamacpp(read("llamacpp_smollm2"), " --model smollm2", REAL)
    return HEAD + real + llamacpp(record) + limits(record) + _steps() + serving(read("serving"))
