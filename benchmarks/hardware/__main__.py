"""All that this library wants to know of an accelerator, in order of worth, within the minutes there are.

    python -m benchmarks.hardware --minutes 40 --out DIR      # on an H100, H200, A100 or a TPU
    python -m benchmarks.hardware --minutes 5 --out DIR --tiny

Every figure is written as it is measured; the same command goes on where it was stopped or killed. DIR/page.md has the
tables and pictures, DIR/log.jsonl every figure.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.hardware.log import Log
from benchmarks.hardware.page import write_page
from benchmarks.hardware.stages import FULL, TINY, items
from kvqjax._timing import machine
from kvqjax._version import __version__

Items = Iterable[tuple[str, str, Callable[[], list[dict[str, Any]]]]]


def run(work: Items, log: Log, seconds: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Measure what is new until the time is up; how many items are left."""
    end, left = clock() + seconds, 0
    for stage, item, measure in work:
        state = log.state(item)
        if state == "new" and clock() < end:
            log.run(stage, item, measure)
            state = log.state(item)
            print(f"{item}: {state}", flush=True)
        left += state == "new"
    return left


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40, help="no item begins later")
    parser.add_argument("--out", type=Path, required=True, help="folder for the log, the page and its pictures")
    parser.add_argument("--tiny", action="store_true", help="sizes that take a CPU seconds")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    here = {name: value for name, value in machine().items() if name != "date"}
    log = Log(options.out / "log.jsonl", here | {"kvqjax": __version__, "sizes": "tiny" if options.tiny else "full"})
    print(f"{jax.device_count()} x {here['device']}; {options.out}", flush=True)
    left = run(items(TINY if options.tiny else FULL), log, 60 * options.minutes)
    print(f"{write_page(options.out, log, left)}: {left} items left")


if __name__ == "__main__":
    main()
