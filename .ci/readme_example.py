"""Run the Python examples of Markdown pages in the current folder, those of a page in order and in
one namespace, and compare what they print with the page: `python readme_example.py README.md
docs/tutorial.md`.

A block ```text right after an example is all that it prints; there
`...` stands for anything, and blanks may differ.
"""

import contextlib
import doctest
import io
import re
import sys
from pathlib import Path

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def run_page(page: Path) -> int:
    """Run a page's examples; return how many outputs were compared. Ends with SystemExit where one
    differs."""
    text, names, compared = page.read_text(encoding="utf-8"), {"__name__": "__main__"}, 0
    examples = list(EXAMPLE.finditer(text))
    if not examples:
        sys.exit(f"{page} has no Python example")
    print(f"--- {page}: {len(examples)} examples")
    for example in examples:
        code, shown = example.groups()
        lines_before = text[: example.start(1)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * lines_before + code, page, "exec"), names)
        print(printed.getvalue(), end="")
        if shown is not None:
            if not doctest.OutputChecker().check_output(shown, printed.getvalue(), FLAGS):
                where = f"{page}, line {lines_before + 1}"
                sys.exit(
                    f"{where}: the page shows\n{shown}\nthe example prints\n{printed.getvalue()}"
                )
            compared += 1
    return compared


if __name__ == "__main__":
    sys.path.insert(0, "")  # as an interactive session in this folder would have it
    for name in sys.argv[1:]:
        run_page(Path(name))
