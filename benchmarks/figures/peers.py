"""benchmarks/peers.md: this library beside others, each pair measured in one run."""

from benchmarks.tables import read, table

__all__ = ["text"]

HEAD = """# Beside other libraries

Written by `python -m benchmarks.figures` from `benchmarks/records`. Each table is one run, in which all took turns.
"""


def _machine(found: dict | str) -> str:
    return found if isinstance(found, str) else f"{found['processor']}, jax {found['jax']}"


def _steps() -> str:
    record = read("decode_quantized")
    heads = ["cache", "ms a step", "KIVI at its bits faster by", "the same in groups of 64", "faster than exact by"]
    names = ("ours_faster", "ours_faster_groups_of_64", "speed_against_exact")
    rows = [
        [row["cache"], f"{row['ms_per_step']:.1f}", *(f"{row[n]:.2f}" if row.get(n) else "" for n in names)]
        for row in record["rows"]
    ]
    about = (
        "\n## A decode step beside transformers' QuantizedCache (`python benchmarks/decode_quantized.py`)\n\n"
        f"`demo` with {record['context']} tokens cached, float32; {_machine(record['machine'])}. Medians of\n"
        "rounds, and of each round's ratios. KIVI's steps flush as they go, transformers' never had to quantise.\n\n"
    )
    return about + table(heads, rows)


def _tokens() -> str:
    record = read("decode_speed")
    rows = [
        [name, f"{speed:.0f}", f"{record['ratio to torch'][name]:.2f}"]
        for name, speed in record["tokens per second"].items()
    ]
    about = (
        "\n## Generating text beside transformers (`python benchmarks/decode_speed.py`)\n\n"
        f"`demo`, {record['prompt tokens']} prompt and {record['new tokens']} new tokens; {record['machine']}.\n\n"
    )
    return about + table(["cache", "tokens a second", "over transformers"], rows)


def text() -> str:
    """The page."""
    return HEAD + _steps() + _tokens()
