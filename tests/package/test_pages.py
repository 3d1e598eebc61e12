"""Pages whose code is run as it stands, each in a namespace of its own."""

import re
import warnings
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["howto/own-loop.md", "howto/conversations.md"])
def test_code_runs(page, capsys):
    code = "\n".join(BLOCK.findall((DOCS / page).read_text(encoding="utf-8")))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this model's tokenizer has no chat template")
        exec(compile(code, page, "exec"), {"__name__": page})
