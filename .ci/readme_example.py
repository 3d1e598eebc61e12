"""Run the first Python example of a README in the current folder: `python readme_example.py README.md`."""

import re
import sys
from pathlib import Path

match = re.search(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(), re.DOTALL | re.MULTILINE)
if match is None:
    sys.exit(f"{sys.argv[1]} has no Python example")
sys.path.insert(0, "")  # as an interactive session in this folder would have it
exec(compile(match[1], "README example", "exec"), {"__name__": "__main__"})
