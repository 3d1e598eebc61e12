"""The launch script for several hosts, run by one host with virtual devices (tests/test_hosts.py joins two)."""

import runpy
from pathlib import Path

import kvqjax as kvq

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "pod.py"
PROMPTS = ["ab12,cd34,ef56,?cd", "gh78,?gh"]


def test_pod_script_generates_what_one_device_does(capsys):
    words = ["--alone", "--model", "recall", "--cache", "kivi:bits=8,window=32", "--mesh", "data=2,model=2"]
    words += ["--max-new-tokens", "4", *(word for prompt in PROMPTS for word in ("--prompt", prompt))]
    runpy.run_path(str(SCRIPT))["main"](words)
    method = kvq.parse("kivi:bits=8,window=32")
    wanted = kvq.generate(kvq.load("recall"), PROMPTS, method, max_new_tokens=4).text
    said = capsys.readouterr().out
    assert [f"--- {prompt}{text}" in said for prompt, text in zip(PROMPTS, wanted, strict=True)] == [True, True]
