"""Measures this library on a GPU, the most valuable figures first, within a time limit.

    python -m benchmarks.hardware --out DIR --minutes 8 [--blocks ceilings,steps] [--only PART]
    [--tiny]

Nothing is installed, nothing is downloaded: a machine without network is enough, and the source
tree. Every block is a process of its own with a time limit. One that hangs is killed; one that dies
is followed by another that goes on behind the item that did it. No block begins later than
`--minutes`, and none runs longer than an eighth more. The same command with the same `--out` goes
on: what has a figure of this commit is not measured again, what failed is.

DIR gets rows.jsonl (a line an item), page.md (tables, written after every block), errors.txt
(tracebacks), log.txt (what the blocks printed), profiles.jsonl (kernels by name and time) and two
compiled steps. The last thing printed is a short table. `--tiny` is a dry run with small sizes,
also on a CPU.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.hardware.log import Log, read_rows
from benchmarks.hardware.page import short_table, write_page

ROOT = Path(__file__).parents[2]
HARD = 1.125  # of the minutes: nothing runs longer
TRIES = 3  # processes for one block
LOG_BYTES = 200_000  # kept of a block's output
ON_CPU = 4  # times as long is given to a dry run


class Block(NamedTuple):
    """A block's name, the seconds that it may take, and those without which it is not begun. The
    seconds are what an H100 with 16 cores took, and a half more."""

    name: str
    limit: int
    least: int


PLAN = (
    Block("environment", 30, 5),
    Block("ceilings", 45, 10),
    Block("correctness", 90, 20),
    Block("words", 70, 15),
    Block("attention", 200, 25),
    Block("torch", 40, 10),
    Block("steps", 230, 45),
    Block("kernels", 120, 20),
    Block("kernel-steps", 120, 30),
    Block("prompts", 90, 25),
    Block("million", 70, 25),
    Block("text", 50, 15),
)


def environment(gpu: bool) -> dict[str, str]:
    """Make what children inherit: one folder of compiled programs, and the platforms there are."""
    cache = Path(".jax_cache/hardware").resolve()
    cache.mkdir(parents=True, exist_ok=True)
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    settings |= {
        "JAX_PLATFORMS": "cuda,cpu" if gpu else "cpu",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
    }
    settings |= {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "1"}
    # Also where the parent was found by other means: a child finds this folder and the library
    # beside it.
    return (
        os.environ
        | settings
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    )


def has_gpu() -> bool:
    """Say whether there is an NVIDIA device, or its driver's tool answers."""
    if Path("/dev/nvidiactl").exists():
        return True
    tool = shutil.which("nvidia-smi")
    try:
        return (
            tool is not None
            and not subprocess.run([tool, "-L"], capture_output=True, timeout=20).returncode
        )
    except subprocess.TimeoutExpired:
        return False


def kill(child: subprocess.Popen) -> None:
    """End a child and what it started, whether or not it answers."""
    for word, patience in ((signal.SIGTERM, 2), (signal.SIGKILL, 5)):
        try:
            os.killpg(child.pid, word)
            child.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_child(command: list[str], seconds: float, gpu: bool, log: Path, title: str) -> str:
    """Run a block's process for at most `seconds`; "done", "late" or "died (code)". Its output goes
    to `log`."""
    with tempfile.TemporaryFile() as output:
        begun = time.monotonic()
        child = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(gpu), process_group=0
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill(child)
        output.seek(max(0, output.seek(0, os.SEEK_END) - LOG_BYTES))
        with log.open("ab") as file:
            file.write(f"--- {title}\n".encode() + output.read() + b"\n")
    is_late = code is None or time.monotonic() - begun > seconds - 2.5
    return "done" if code == 0 else "late" if is_late else f"died ({code})"


def run_block(block: Block, hard: float, options: argparse.Namespace, gpu: bool) -> str:
    """Run a block, again behind an item that ended its process, until its limit or the run's hard
    end."""
    end, state = min(hard, time.monotonic() + block.limit * (1 if gpu else ON_CPU)), "late"
    for _ in range(TRIES):
        seconds_left = end - time.monotonic()
        if seconds_left < 3:
            break
        command = [
            sys.executable,
            "-m",
            "benchmarks.hardware.child",
            block.name,
            "--out",
            str(options.out),
        ]
        command += [
            "--limit",
            str(max(1.0, seconds_left - 2)),
            "--commit",
            options.commit,
            "--run",
            options.run,
        ]
        command += [word for part in options.only for word in ("--only", part)]
        state = run_child(
            command + ["--tiny"] * options.tiny,
            seconds_left,
            gpu,
            options.out / "log.txt",
            block.name,
        )
        if not state.startswith("died"):
            break
    return state


def close(block: Block, options: argparse.Namespace, state: str) -> None:
    """Write a row for what a block left open, and for a block that ended without one."""
    log = Log(options.out, block.name, options.commit, options.run)
    if state != "done" or not [
        row for row in read_rows(options.out, options.commit) if row["block"] == block.name
    ]:
        log.write(
            {"item": "(block)", "state": "failed" if state != "done" else "empty", "short": state}
        )


def run_blocks(options: argparse.Namespace) -> None:
    """Run the blocks in order of worth."""
    begun, gpu = time.monotonic(), has_gpu()
    soft, hard = begun + 60 * options.minutes, begun + 60 * options.minutes * HARD - 5
    for block in [b for b in PLAN if not options.blocks or b.name in options.blocks]:
        seconds_left, started = soft - time.monotonic(), time.monotonic()
        if seconds_left < block.least:
            state = "dropped"
            log = Log(options.out, block.name, options.commit, options.run)
            log.write({"item": "(block)", "state": state, "short": "no time left"})
        else:
            state = run_block(block, hard, options, gpu)
            close(block, options, state)
        write_page(options.out, options.commit)
        print(f"{block.name}: {state}, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{time.monotonic() - begun:.0f} s in all")


def _commit() -> str:
    """Return the commit of the source tree; "unknown" outside a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
            or "unknown"
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for rows, page, errors and logs"
    )
    parser.add_argument("--minutes", type=float, default=8, help="no block begins later")
    parser.add_argument(
        "--blocks",
        type=lambda text: text.split(","),
        default=[],
        help=", ".join(b.name for b in PLAN),
    )
    parser.add_argument(
        "--commit", default="", help="what the measured tree is, where git cannot say"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="of each block the items whose name has this part",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes: a dry run")
    options = parser.parse_args(arguments)
    if unknown := set(options.blocks) - {block.name for block in PLAN}:
        parser.error(
            f"no block {', '.join(sorted(unknown))}; there are {', '.join(b.name for b in PLAN)}"
        )
    options.out, options.commit = (
        options.out.resolve(),
        (options.commit or _commit()) + "-tiny" * options.tiny,
    )
    options.run = f"{time.time():.0f}"
    options.out.mkdir(parents=True, exist_ok=True)
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run_blocks(options)
    finally:
        signal.signal(signal.SIGTERM, handler)
        write_page(options.out, options.commit)
        print(short_table(options.out, options.commit), flush=True)


if __name__ == "__main__":
    main()
