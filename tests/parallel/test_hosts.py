"""Two processes over loopback generate what one does."""

import json
import os
import socket
import subprocess
import sys

import pytest

import kvqjax as kvq

PROMPTS = ["ab12,cd34,ef56,?cd", "gh78,?gh"]
CACHE = "kivi:bits=8,window=32"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.nightly
def test_two_processes_generate_what_one_does(tmp_path):
    """Each has two devices; rows are split over the processes, heads within them. Process 0 alone
    prints."""
    words = [
        "--compilation-cache",
        str(tmp_path),
        "generate",
        "-m",
        "recall",
        "-c",
        CACHE,
        "-n",
        "4",
        "--json",
    ]
    words += [word for prompt in PROMPTS for word in ("-p", prompt)]
    words += [
        "--mesh",
        "data=2,model=2",
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--processes",
        "2",
    ]
    quiet = {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    command = [sys.executable, "-m", "kvqjax", *words, "--process"]
    options = {
        "env": os.environ | quiet,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    running = [subprocess.Popen([*command, str(number)], **options) for number in range(2)]
    (said, error), (silent, other) = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], error + other
    assert silent == ""
    made = [row["text"] for row in json.loads(said)]
    assert (
        made == kvq.generate(kvq.load("recall"), PROMPTS, kvq.parse(CACHE), max_new_tokens=4).text
    )
    assert any(tmp_path.iterdir()), "no compiled program was kept"


def test_wrong_numbers_are_refused():
    with pytest.raises(kvq.UserError, match="wanted host:port"):
        kvq.join_hosts("somewhere", 2, 0)
    with pytest.raises(kvq.UserError, match="process 2 of 2"):
        kvq.join_hosts("127.0.0.1:1", 2, 2)
