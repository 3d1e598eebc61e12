"""How a kernel earns its use: the comparison with kernels that are wrong, race, crash or are slow;
and where verdicts are kept, whoever else writes there."""

import json
import os
import socket
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import kvqjax as kvq
from kvqjax.kernel_checks import store
from kvqjax.kernel_checks.check import obtain
from kvqjax.kernel_checks.compare import Speed, examine, worst_error
from kvqjax.kernel_checks.store import Key, Verdict
from kvqjax.ops.attention import Partial

QUERIES = [
    jnp.asarray(np.random.default_rng(t).normal(size=(3, t, 4, 8)), jnp.float32) for t in (1, 3)
]
KEY = Key(
    "NVIDIA H100 80GB HBM3",
    "0.10.2",
    "0.10.2",
    "1.0",
    "kivi 2 bits, 8 KV heads of 128, 4 queries each",
)
FASTER, SLOWER = Speed(1.0, 2.0), Speed(2.0, 1.0)
GOOD = Verdict(outcome="faster", error=0.002, kernel_ms=1.0, plain_ms=2.0, seconds=3.0)


def plain(q) -> Partial:
    """Any function of the queries; the last row sees nothing."""
    seen = (jnp.arange(len(q)) < len(q) - 1).reshape(-1, 1, 1)
    return Partial(
        jnp.where(seen[..., None], jnp.sin(q), 0.0), jnp.where(seen, q.sum(-1), -jnp.inf)
    )


def one_query_off(q):
    found = plain(q)
    return found._replace(out=found.out.at[0, -1, 2].multiply(1.02))


def off_by(**change):
    """`plain` with its fields changed."""

    def kernel(q):
        found = plain(q)
        return found._replace(**{name: f(getattr(found, name)) for name, f in change.items()})

    return kernel


@pytest.mark.parametrize(
    "kernel",
    [
        one_query_off,
        off_by(lse=lambda x: x + 0.02),
        off_by(out=lambda x: x.at[1, 0, 0, 3].set(jnp.nan)),
        off_by(out=lambda x: x.at[-1].set(1e-3)),
        off_by(lse=lambda x: x.at[-1].set(-1e30)),
        off_by(lse=lambda x: x.at[0].set(-jnp.inf)),
        off_by(out=lambda x: x[:, :, ::-1]),
        off_by(out=lambda x: x[..., :4]),
    ],
)
def test_a_wrong_kernel_is_found(kernel):
    found = examine(kernel, plain, QUERIES, lambda: FASTER)
    assert (found.outcome, found.kernel_ms, found.plain_ms) == ("wrong", None, None)
    assert found.error > 0.01
    assert "off by" in found.note


def test_rounding_is_not_wrong():
    found = examine(off_by(out=lambda x: x * 1.003), plain, QUERIES, lambda: FASTER)
    assert found.outcome == "faster"
    assert found.error == pytest.approx(0.003, rel=1e-2)
    assert worst_error(plain(QUERIES[0]), plain(QUERIES[0])) == 0


def test_a_race_is_found():
    """Right within a percent every time, and yet another number at the third call."""
    calls = []

    def kernel(q):
        calls.append(0)
        return off_by(out=lambda x: x * (1.001 if len(calls) % 3 == 0 else 1.0))(q)

    found = examine(kernel, plain, QUERIES, lambda: FASTER)
    assert (found.outcome, found.note) == ("wrong", "results differ from call to call")


def test_a_crash_is_a_finding_and_one_of_the_plain_path_is_not():
    def crash(*_):
        raise RuntimeError("Mosaic failed to compile TPU kernel: no\nsecond line")

    found = examine(crash, plain, QUERIES, lambda: FASTER)
    assert (found.outcome, found.note) == (
        "failed",
        "RuntimeError: Mosaic failed to compile TPU kernel: no",
    )
    assert examine(plain, plain, QUERIES, crash).outcome == "failed"
    with pytest.raises(RuntimeError, match="Mosaic"):
        examine(plain, crash, QUERIES, lambda: FASTER)


def test_a_slower_kernel_is_not_used():
    found = examine(plain, plain, QUERIES, lambda: SLOWER)
    assert (found.outcome, found.kernel_ms, found.plain_ms) == (
        "slower",
        SLOWER.kernel,
        SLOWER.plain,
    )
    assert not Verdict(outcome="slower").usable
    assert Verdict(outcome="slower").sound


def test_a_verdict_comes_back(tmp_path):
    folder = tmp_path / "new" / "kernels"
    assert store.find(folder, KEY) is None
    store.keep(folder, KEY, GOOD)
    assert store.find(folder, KEY) == GOOD
    assert (len(list(folder.glob("*.json"))), store.find(folder, KEY)) == (1, GOOD)
    for field in Key._fields:  # another chip, version or form is another verdict
        assert store.find(folder, KEY._replace(**{field: "other"})) is None
    assert store.reset(folder) == 1
    assert store.find(folder, KEY) is None


def changed(**values) -> str:
    data = {
        "format": 1,
        "about": KEY._asdict(),
        "outcome": "faster",
        "error": 0.0,
        "kernel_ms": 1,
        "plain_ms": 2,
    }
    return json.dumps(data | {"seconds": 1, "note": ""} | values)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "\x00\xff", changed(format=2), changed(outcome="great"), changed(error="small"),
     changed(error=True), changed(note=None), changed(about=KEY._replace(jax="0.9")._asdict()), changed(about=1)],
)  # fmt: skip
def test_garbage_is_checked_anew(tmp_path, text):
    store.keep(tmp_path, KEY, GOOD)
    (path,) = tmp_path.glob("*.json")
    path.write_text(text, encoding="utf-8")
    lines = []
    assert obtain(tmp_path, KEY, lambda: GOOD, lines.append) == GOOD
    assert store.find(tmp_path, KEY) == GOOD
    assert not lines
    # The same file is read where nothing is wrong with it.
    path.write_text(changed(), encoding="utf-8")
    assert store.find(tmp_path, KEY).usable


def never():
    raise AssertionError("checked although it must not be")


def test_a_file_of_another_user_is_not_believed(tmp_path, monkeypatch):
    store.keep(tmp_path, KEY, GOOD)
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    lines = []
    assert obtain(tmp_path, KEY, never, lines.append) is None
    assert len(lines) == 1
    assert "belongs to another user" in lines[0]
    assert "the plain path serves" in lines[0]
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_nothing_is_checked_where_nothing_can_be_kept(tmp_path):
    """A crash would come back with every process. (A read-only folder does not stop root, a file in
    its place does.)"""
    (tmp_path / "cache").write_text("")
    lines = []
    assert obtain(tmp_path / "cache" / "kernels", KEY, never, lines.append) is None
    assert len(lines) == 1
    assert "cannot be" in lines[0]


def test_a_chip_that_disappears_loses_nothing(tmp_path):
    def gone():
        raise RuntimeError("device lost\nmore")

    lines = []
    assert obtain(tmp_path, KEY, gone, lines.append) is None
    assert lines == [f"kernel for {KEY.form} not checked, the plain path serves: device lost"]
    assert not list(tmp_path.iterdir())


def test_the_user_is_told_once_of_a_kernel_that_is_not_used(tmp_path):
    lines, bad = [], Verdict(outcome="wrong", error=0.3, note="a query of 1 is off by 30.00%")
    assert obtain(tmp_path, KEY, lambda: bad, lines.append) == bad
    assert obtain(tmp_path, KEY, never, lines.append) == bad
    assert len(lines) == 1
    assert all(part in lines[0] for part in (KEY.form, KEY.chip, "30.00%", "kvqjax doctor"))


def marker(folder, process: int, since: float, host: str | None = None):
    path = store.begin(folder, KEY)
    path.write_text(
        json.dumps({"host": host or socket.gethostname(), "process": process, "time": since})
    )


def test_a_check_that_killed_its_process_is_not_repeated(tmp_path):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom kvqjax.kernel_checks import store\n"
        "store.begin(Path(sys.argv[1]), store.Key(*sys.argv[2:]))\nos.abort()"
    )
    dead = subprocess.run([sys.executable, "-c", code, str(tmp_path), *KEY], capture_output=True)
    assert dead.returncode < 0
    lines = []
    found = obtain(tmp_path, KEY, never, lines.append)
    assert found.outcome == "crashed"
    assert "ended with its process" in lines[0]
    assert store.find(tmp_path, KEY) == found
    assert not list(tmp_path.glob("*.begun-*"))


def test_a_check_under_way_elsewhere_is_no_crash(tmp_path):
    marker(tmp_path, os.getppid(), time.time())
    assert not store.died(tmp_path, KEY)
    marker(tmp_path, 1, time.time(), host="another")
    assert not store.died(tmp_path, KEY)
    assert obtain(tmp_path, KEY, lambda: GOOD, never) == GOOD
    marker(tmp_path, os.getppid(), time.time() - 2 * store.LONGEST)  # another process by now
    assert store.died(tmp_path, KEY)


WRITER = """
import pathlib, sys
from kvqjax.kernel_checks.store import Key, Verdict, keep
folder, number, *key = sys.argv[1:]
for _ in range(50):
    verdict = Verdict(outcome="faster", error=float(number), note="x" * 5000 * int(number))
    keep(pathlib.Path(folder), Key(*key), verdict)
"""


def test_processes_that_write_at_once_leave_whole_files(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number), *KEY]) for number in (1, 2)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        found = store.find(tmp_path, KEY)
        if found is not None:
            seen.add(found.error)
        assert all(
            json.loads(path.read_text())["about"] == KEY._asdict()
            for path in tmp_path.glob("*.json")
        )
    assert all(writer.returncode == 0 for writer in writers)
    assert seen <= {1.0, 2.0}
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_no_home_is_one_line(monkeypatch):
    from pathlib import Path

    from kvqjax.kernel_checks.check import verdict_folder

    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(kvq.UserError, match="XDG_CACHE_HOME"):
        verdict_folder()
