"""benchmarks/kernels.md: what compilers say of the attention kernels."""

from benchmarks.tables import read, table

HEAD = """# Kernels: what compilers say

Written by `python -m benchmarks.figures` from `benchmarks/records`. Everything here is compiled ahead of time and
**was not run on a chip**. `python -m kvqjax.pallas_kernels` prints which kernels are used where.

A *bundle* is what a TPU issues in a cycle; a unit that makes the others wait does not show in it.
"""
PACKED = """
## TPU kernels on packed keys and values (`python benchmarks/tpu_bundles.py --write`)

Bundles for 512 tokens of keys and values of one KV head: all, and in brackets what 512 more tokens add and what a tile
costs besides. head_dim is 128, with 8 query rows and 8 KV heads, unless a case says otherwise (`d`, `r`). `k4v2` is 4
bits for keys and 2 for values. `g` counts the tokens of a key group and, if 32, the channels of a value group. `pre` is
keys before RoPE (KIVI*), `nuq` is KVQuant, `o12` has twelve outlier slots, `omniscale` and `kvarn` have the factors of
rotated methods, `oscar` has keys per token. Cells are empty where no kernel is used (docs/methods/rotation.md says
why). As many bfloat16 keys and values take a v5e 480 cycles of its memory, a v6e 280 and a v7x 156 (half for head_dim
64): above that a kernel saves memory but no time.

"""
HOPPER = """
## Mosaic GPU kernels, Hopper (`python benchmarks/gpu_registers.py --write`)

What ptxas reports for sm_90a.

"""


def _spilled(records: dict) -> str:
    names = [
        f"{case} on {chip}"
        for chip, cases in records.items()
        for case, row in cases.items()
        if row["spills"]
    ]
    return (
        "\nVector registers are spilled by " + ", ".join(names) + ".\n"
        if names
        else "\nNo case spills a register.\n"
    )


def _by_chip(records: dict, cell) -> str:
    cases = dict.fromkeys(case for rows in records.values() for case in rows)
    rows = [
        [
            f"`{case}`",
            *(cell(record[case]) if case in record else "" for record in records.values()),
        ]
        for case in cases
    ]
    return table(["case", *records], rows) + _spilled(records)


def text() -> str:
    """The page."""
    packed, registers = read("tpu_bundles"), read("gpu_registers")
    names = ("registers", "spill_bytes", "shared_bytes", "wgmma")
    hopper = [[f"`{case}`", *(str(row[name]) for name in names)] for case, row in registers.items()]
    return "".join(
        [
            HEAD,
            PACKED,
            _by_chip(
                packed,
                lambda row: f"{row['total']:.0f} ({row['marginal']:.0f} + {row['fixed']:.0f})",
            ),
            HOPPER,
            table(
                ["case", "registers", "bytes spilled", "bytes of shared memory", "matrix products"],
                hopper,
            ),
        ]
    )
