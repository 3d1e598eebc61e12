"""The launch script for several hosts on one host with virtual devices
(tests/parallel/test_hosts.py joins two)."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pod.py"


def test_pod_script_generates_on_a_mesh(capsys):
    words = [
        "--alone",
        "--model",
        "recall",
        "--cache",
        "kivi:bits=8,window=32",
        "--mesh",
        "model=2",
    ]
    runpy.run_path(str(SCRIPT))["main"](
        [*words, "--max-new-tokens", "2", "--prompt", "ab12,cd34,ef56,?cd"]
    )
    head, answer = capsys.readouterr().out.splitlines()
    assert head == "1 hosts, 8 devices, model=2"
    assert answer == "--- ab12,cd34,ef56,?cd34"
