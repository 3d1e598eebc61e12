"""A process that is killed while it saves prefixes leaves the older tree or the newer one, and
nothing that grows."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import artifacts
from kvqjax.serving import prefix_folder
from kvqjax.serving.prefix_folder import newest_folder, write_newest

OPTIONS = {"rows": 1, "capacity": 64, "chunk": 16, "prefixes": 4}
# Saves a tree of one more prefix each time, up to three, and says when a save has ended.
CHILD = """
import itertools, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tiny import tiny
import kvqjax as kvq
from kvqjax.serving.prefix_folder import write_newest
with kvq.Engine(tiny(), "exact", **{options}) as engine:
    for number in itertools.count(1):
        engine.submit([min(number, 3)] * 20, max_new_tokens=1, eos_ids=()).result()
        write_newest(Path(sys.argv[2]), engine.save_prefixes)
        print(number, flush=True)
"""


def ask(engine, number: int) -> int:
    """Tokens that a prompt need not read."""
    return engine.submit([number] * 20, max_new_tokens=1, eos_ids=()).result().reused_tokens


def known(folder: Path) -> set[int]:
    """Which prompts the newest tree of a folder knows."""
    with kvq.Engine(tiny(), "exact", **OPTIONS) as engine:
        count = engine.load_prefixes(newest_folder(folder))
        numbers = {number for number in (1, 2, 3) if ask(engine, number)}
        assert len(numbers) == count
    return numbers


def test_a_kill_at_any_step_of_a_save_leaves_the_older_or_the_newer_tree(tmp_path, monkeypatch):
    """What lies on the disk before and after every step of a save is what a process killed there
    leaves."""
    folder, copies = tmp_path / "prefixes", []

    def copied() -> None:
        copies.append(tmp_path / f"copy{len(copies)}")
        shutil.copytree(folder, copies[-1])

    def seen(step):
        def run(*given, **options):
            copied()
            result = step(*given, **options)
            copied()
            return result

        return run

    def saved(*given):
        """Arrays come file by file."""
        seen(artifacts_save)(*given)
        copied()
        files = list(copies[-1].glob("*.part/arrays/**/d/*"))
        assert files
        for path in files:
            path.unlink()

    def removed(path, **options):
        """Files of a folder go one after the other."""
        copied()
        (Path(path) / "description.json").unlink(missing_ok=True)
        copied()
        shutil.rmtree(path, **options)
        copied()

    with kvq.Engine(tiny(), "exact", **OPTIONS) as engine:
        ask(engine, 1)
        write_newest(folder, engine.save_prefixes)
        ask(engine, 2)
        artifacts_save = artifacts.ocp.save
        monkeypatch.setattr(artifacts.ocp, "save", saved)
        for name in ("write_text", "rename"):
            monkeypatch.setattr(Path, name, seen(getattr(Path, name)))
        for module in (artifacts, prefix_folder):
            monkeypatch.setattr(module, "shutil", SimpleNamespace(rmtree=removed))
        write_newest(folder, engine.save_prefixes)
        monkeypatch.undo()
        assert known(folder) == {1, 2}
        trees = [known(copy) for copy in copies]
        switch = trees.index({1, 2})
        assert trees == [{1}] * switch + [{1, 2}] * (len(trees) - switch)
        assert switch >= 8
        assert len(trees) - switch >= 4
        for copy in copies:  # the next save leaves one tree, whatever lay there
            write_newest(copy, engine.save_prefixes)
            assert len(list(copy.iterdir())) == 1


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no signal 9 here")
def test_a_process_that_is_killed_in_a_save(tmp_path):
    folder, tests = tmp_path / "prefixes", str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", CHILD.replace("{options}", repr(OPTIONS)), tests, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ended = int(process.stdout.readline())
        while not list(folder.glob("*.part")):
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
        ended = max([ended, *map(int, process.stdout.read().split())])
    assert process.returncode == -signal.SIGKILL
    assert known(folder) in [set(range(1, min(number, 3) + 1)) for number in (ended, ended + 1)]
    assert len(list(folder.iterdir())) <= 3
    with kvq.Engine(tiny(), "exact", **OPTIONS) as engine:
        engine.load_prefixes(newest_folder(folder))
        write_newest(folder, engine.save_prefixes)
    assert len(list(folder.iterdir())) == 1
