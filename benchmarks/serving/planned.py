"""Plans many users on a chip: how many fit, and how many tokens a second they get at most.

    python -m benchmarks.serving.planned [--model llama-3.1-8b] [--context 8k] [--device h100
    --device v5e-8]

Nothing here is measured, and no weights are needed. Every user has a row that is full. The rates
are bounds: a step reads its weights and all rows once at the chip's bandwidth, or computes at its
peak, whichever takes longer.
"""

import argparse
from collections.abc import Sequence

import kvqjax as kvq
from benchmarks.tables import table

CACHES = ("exact", "kivi:bits=4", "kivi:bits=2", "higgs:bits=2")
DEVICES = ("h100", "v5e-8")
HEAD = [
    "device",
    "cache",
    "MiB a user on each",
    "users",
    "tokens a second of all, at most",
    "of each, at most",
]


def _cells(model: str, cache: str, context: str, device: str) -> list[str]:
    """Plan a cache for the largest number of users that fits."""
    users = kvq.plan(model, cache, context=context, device=device)[0]["largest_batch"]
    if not users:
        return [device, f"`{cache}`", "", "0", "", ""]
    planned = kvq.plan(model, cache, context=context, device=device, batch=users)[0]
    size, rate = planned["bytes_cache_per_device"] / users / 2**20, planned["tokens_per_second"]
    return [device, f"`{cache}`", f"{size:.0f}", str(users), f"{rate:.0f}", f"{rate / users:.0f}"]


def planned_table(
    model: str, context: str, devices: Sequence[str] = DEVICES, caches: Sequence[str] = CACHES
) -> str:
    """The table of every cache on every device."""
    return table(
        HEAD, [_cells(model, cache, context, device) for device in devices for cache in caches]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="as in `kvqjax plan`")
    parser.add_argument("--context", default="8k", help="tokens of each user")
    parser.add_argument("--device", action="append", help="as in `kvqjax plan`")
    options = parser.parse_args()
    print(planned_table(options.model, options.context, options.device or DEVICES), end="")


if __name__ == "__main__":
    main()
