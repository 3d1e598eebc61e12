"""Two runs into one folder: the second says who holds it; a run that was killed holds nothing; no
leftovers."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import run

import kvqjax as kvq
from kvqjax._lock import held
from kvqjax.cache.artifacts import Artifact
from kvqjax.calibrate import resume

HOLDER = """
import sys, threading
from pathlib import Path
from kvqjax._lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    threading.Event().wait(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds `tmp_path / "run"`."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_run_is_told_who_holds_the_folder(holder, tmp_path, capsys, monkeypatch):
    words = ["calibrate", "-m", "recall", "-c", "kvquant:bits=3", "--out", str(tmp_path / "run")]
    code, out, err = run(capsys, monkeypatch, *words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert f"is being written by process {holder.pid} on " in err
    with pytest.raises(kvq.UserError, match=f"process {holder.pid}"):
        resume.stepped({"done": np.int64(0)}, 1, dict, tmp_path / "run", "owner")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run.lock").exists()
    with held(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_holds_its_report(tmp_path, capsys, monkeypatch):
    with held(tmp_path / "ppl.json"):
        code, out, err = run(
            capsys, monkeypatch, "eval", "ppl", "-c", "exact", "--out", str(tmp_path)
        )
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert f"process {os.getpid()}" in err


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr("kvqjax.calibrate.resume.np.savez", full)
    with pytest.raises(kvq.UserError, match="No space left"):
        resume.save_state(tmp_path / "state.npz", "owner", [np.ones(2)])
    monkeypatch.setattr("kvqjax.cache.artifacts.ocp.save", full)
    with pytest.raises(kvq.UserError, match="No space left"):
        Artifact(kvq.kivi(), ({"k": {"low": np.ones(2)}},), "").save(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing_half_written(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvqjax.calibrate.resume.np.savez", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resume.save_state(tmp_path / "state.npz", "owner", [np.ones(2)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["picture", "picture.docx", "absent/picture.png", "."])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_model_is_loaded(
    name, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    words = ["eval", "drift", "-m", "/nowhere", "-c", "exact", "--plot", name]
    code, out, err = run(capsys, monkeypatch, *words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"error: {Path(name)}: ")
