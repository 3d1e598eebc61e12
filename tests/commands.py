"""Run the command line tool within a test."""

import sys

import pytest

from kvqjax.cli import main


def run(capsys, monkeypatch, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `kvqjax words`."""
    monkeypatch.setattr(sys, "argv", ["kvqjax", *words])
    # Pytest's own, which `main` replaces.
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err
