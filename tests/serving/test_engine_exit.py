"""A program that leaves an engine open ends with its own exit code."""

import subprocess
import sys
from pathlib import Path

import pytest
from cases import with_nightly

TESTS = Path(__file__).resolve().parent.parent
BEGIN = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import jax
jax.config.update("jax_num_cpu_devices", 1)
from tiny import tiny
import kvqjax as kvq
engine = kvq.Engine(tiny(), rows=2, capacity=64)
handle = engine.submit([1, 2, 3], max_new_tokens=60, eos_ids=())
"""
# While a program is being compiled, and later, while tokens are made.
MOMENTS = {"compiling": "", "computing": "next(iter(handle))"}


def ended(end: str) -> subprocess.CompletedProcess:
    script = f"{BEGIN}\n{end}"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.nightly
@pytest.mark.parametrize("moment", with_nightly(MOMENTS, ["compiling"]))
def test_an_open_engine_leaves_the_exit_code_of_a_program_alone(moment):
    done = ended(f"{MOMENTS[moment]}\nprint('end')")
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.nightly
def test_an_open_engine_leaves_the_exception_of_a_program_alone():
    done = ended("raise ValueError('mine')")
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "terminate called" not in done.stderr


def test_a_thread_that_is_waited_for_gets_its_whole_answer():
    end = """
import threading
threading.Thread(target=lambda: print(len(handle.result().tokens))).start()
"""
    done = ended(end)
    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr
