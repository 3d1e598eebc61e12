"""Ctrl-C ends every command with exit code 130 and one word, wherever it meets the command."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvqjax.cli import stopping


def test_ctrl_c_prints_one_word():
    """A signal to the process as a terminal would send it, while a calibration of many sequences
    runs."""
    script = """
import os, signal, sys, threading
from kvqjax.cli import main
from kvqjax.cli import calibrate as command
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
def run(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)
import kvqjax.calibrate
kvqjax.calibrate.run = run
sys.argv = "kvqjax calibrate -m recall -c kvquant:bits=3 --out never-made".split()
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "stopped"
    assert "Traceback" not in done.stderr


SWALLOWED = {  # where Ctrl-C may meet the code of others, and what becomes of it there
    "a callback that may raise nothing": """
class Deaf:
    def __del__(self):
        raise KeyboardInterrupt
def command(**_):
    Deaf()
    threading.Event().wait(60)
""",
    "an import": """
def command(**_):
    import swallows
    threading.Event().wait(60)
""",
}


SWALLOWS = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize("place", SWALLOWED)
def test_ctrl_c_stops_where_a_library_swallows_it(place, tmp_path):
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    script = f"""
import signal, sys, threading
sys.path.insert(0, {str(tmp_path)!r})
import kvqjax.cli.app
from kvqjax.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
{SWALLOWED[place]}
kvqjax.cli.app.app = command
sys.argv = ["kvqjax", "methods"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (130, "stopped\n")


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="the system does not say what a thread waits for"
)
def test_ctrl_c_in_the_compiler_says_what_is_waited_for_and_a_second_one_ends():
    """The compiler comes back to Python after a while only: here a lock of C's that nobody
    frees."""
    script = """
import ctypes, signal, sys, threading
from pathlib import Path
import kvqjax.cli.app
from kvqjax.cli import main, stopping
signal.signal(signal.SIGINT, signal.default_int_handler)
stopping.PATIENCE = 0.01
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
def tell(state=Path(f"/proc/self/task/{threading.get_native_id()}/syscall")):
    while hex(ctypes.addressof(lock)) not in state.read_text().split():
        pass
    print("waits", flush=True)
def command(**_):
    threading.Thread(target=tell, daemon=True).start()
    for _ in range(2):
        libc.pthread_mutex_lock(lock)
kvqjax.cli.app.app = command
sys.argv = ["kvqjax", "methods"]
main()
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == f"{stopping.WAITING}\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == "stopped\n"
