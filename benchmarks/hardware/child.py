"""One block of `benchmarks.hardware` in a process of its own."""

import argparse
import faulthandler
import importlib
import sys
from pathlib import Path

from benchmarks.hardware.log import Log

# Block -> module and function, which takes the log and the options. A module is loaded when its
# block runs: PyTorch and JAX would share the card's memory.
BLOCKS = {
    "environment": "ceilings:environment",
    "ceilings": "ceilings:ceilings",
    "correctness": "correctness:correctness",
    "words": "correctness:words",
    "attention": "attention:attention",
    "torch": "torch_peers:peers",
    "steps": "steps:steps",
    "kernels": "kernels:kernels",
    "kernel-steps": "kernels:kernel_steps",
    "prompts": "steps:prompts",
    "million": "steps:million",
    "text": "correctness:text",
}


def main() -> None:
    """Run the block that the command names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("block", choices=list(BLOCKS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--limit", type=float, required=True, help="seconds after which this process ends itself"
    )
    parser.add_argument("--commit", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    log = Log(options.out, options.block, options.commit, options.run, options.only)
    # Says where it hung.
    faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.stderr)
    module, function = BLOCKS[options.block].split(":")
    getattr(importlib.import_module(f"benchmarks.hardware.{module}"), function)(log, options)


if __name__ == "__main__":
    main()
