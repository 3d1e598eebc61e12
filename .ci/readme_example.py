"""Run the Python examples of Markdown pages in the current folder, those of a page in order and in one namespace:
`python readme_example.py README.md docs/tutorial.md`."""

import re
import sys
from pathlib import Path

sys.path.insert(0, "")  # as an interactive session in this folder would have it
for page in sys.argv[1:]:
    blocks = re.findall(r"^```python\n(.*?)^```", Path(page).read_text(), re.DOTALL | re.MULTILINE)
    if not blocks:
        sys.exit(f"{page} has no Python example")
    print(f"--- {page}: {len(blocks)} examples")
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "__main__"})
