"""Write benchmarks/kernels.md and peers.md from the records: `python -m benchmarks.figures`.

What measures or compiles anew is named above each table.
"""

import argparse
from pathlib import Path

from benchmarks.figures import kernels, peers

PAGES = {"kernels": kernels, "peers": peers}


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, page in PAGES.items():
        Path(__file__).parents[1].joinpath(f"{name}.md").write_text(page.text(), encoding="utf-8")


if __name__ == "__main__":
    main()
