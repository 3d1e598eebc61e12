"""Check one kernel on this process's device, and keep what was found: a verdict."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib

from kvqjax._folders import user_folder
from kvqjax._version import __version__
from kvqjax.kernel_checks.compare import Attention, Speed, examine
from kvqjax.kernel_checks.prompt_kernels import PromptKernel, check_prompt_kernel
from kvqjax.kernel_checks.store import Key, Verdict, begin, died, find, keep
from kvqjax.kernel_checks.trial import (
    LENGTHS,
    Candidate,
    Trial,
    by_kernel,
    by_plain_path,
    make,
    queries,
    speed,
)
from kvqjax.pallas_kernels.chips import family
from kvqjax.pallas_kernels.forms import OFF, Kernels

SIZES = (1300, 5000)  # tokens of a body, none a multiple of a tile
TIMED = 8192
COMMAND = "kvqjax doctor"
CRASHED = "an earlier check ended with its process"

# (candidate, target, how the plain path stores bodies) -> verdict
Checker = Callable[[Candidate | PromptKernel, str, str], Verdict]


def verdict_folder() -> Path:
    """Return the folder of this user's verdicts."""
    return user_folder("kernels")


def key_of(candidate: Candidate | PromptKernel, chip: str) -> Key:
    """Name what a verdict on `candidate` on a chip of this name holds for."""
    return Key(chip, jax.__version__, jaxlib.__version__, __version__, candidate.name)


def check(
    candidate: Candidate,
    target: str,
    stored: str,
    *,
    kernel: Callable[[Trial], Attention] = by_kernel,
    timed: Callable[[Trial, Trial, int], Speed] = speed,
    sizes: tuple[int, ...] = SIZES,
) -> Verdict:
    """Try the kernel of `candidate` on this process's default device, on bodies of several sizes,
    until one goes wrong.

    Args:
        stored: how bodies would be stored without the kernel.
        kernel: makes the attention that is tried.
        timed: measures both on the last size.
        sizes: tokens of a body, the largest one last.

    Returns:
        The verdict, with the largest error of all sizes. What the plain path raises is raised: it
        says nothing of the kernel."""
    start = time.perf_counter()
    allowed = () if candidate.form is None else (candidate.form,)
    forced = Kernels("pallas", allowed, "forced")
    worst = 0.0
    verdict = Verdict(outcome="failed", note="no size was tried")
    for tokens in sizes:
        last = tokens == sizes[-1]
        # A TPU's kernels find tiles by the table of pages too, where there is one.
        pages = family(target) == "tpu" and not last
        trial = make(candidate, tokens, target, forced, seed=tokens, pages=pages)
        plain = by_plain_path(trial)
        baseline = trial
        if stored != "planes":
            baseline = make(candidate, tokens, target, OFF, stored, seed=tokens)
        without = dataclasses.replace(baseline.cache.layout, kernels=OFF)
        baseline = baseline._replace(cache=baseline.cache.replace(layout=without))
        if last:
            lengths = LENGTHS
            clock = functools.partial(timed, trial, baseline, TIMED)
        else:  # the speed of small bodies says nothing
            lengths = (1,)
            clock = functools.partial(Speed, 0.0, 1.0)
        verdict = examine(kernel(trial), plain, queries(trial, lengths), clock)
        worst = max(worst, verdict.error or 0.0)
        if last or verdict.outcome != "faster":
            break
    error = None if verdict.error is None else worst
    return dataclasses.replace(verdict, error=error, seconds=time.perf_counter() - start)


def check_either(candidate: Candidate | PromptKernel, target: str, stored: str) -> Verdict:
    """Try the kernel of `candidate`, ours or another's, on this process's default device."""
    if isinstance(candidate, PromptKernel):
        return check_prompt_kernel(candidate)
    return check(candidate, target, stored)


def obtain(
    folder: Path, key: Key, run: Callable[[], Verdict], tell: Callable[[str], None]
) -> Verdict | None:
    """Return the verdict kept in `folder`, or else the one that `run()` gives, which is kept. Where
    there can be none, tell so in one line and return None: the plain path then serves."""
    try:
        verdict = find(folder, key)
        if verdict is not None:
            return verdict
        if died(folder, key):
            verdict = Verdict(outcome="crashed", note=CRASHED)
        else:
            verdict = _marked(folder, key, run)
        keep(folder, key, verdict)
    except Exception as error:  # a chip may raise anything when it goes away
        line = next(iter(str(error).splitlines()), type(error).__name__)
        tell(f"kernel for {key.form} not checked, the plain path serves: {line}")
        return None
    if not verdict.usable:
        reason = verdict.note
        if not reason:
            is_slower = verdict.outcome == "slower"
            reason = "slower than the plain path" if is_slower else verdict.outcome
        tell(f"kernel for {key.form} is not used on {key.chip}: {reason}; `{COMMAND}` shows more")
    return verdict


def _marked(folder: Path, key: Key, run: Callable[[], Verdict]) -> Verdict:
    """Call `run()` with a marker beside its verdict. The marker outlives it only if the check ends
    the process."""
    marker = begin(folder, key)
    try:
        return run()
    finally:
        marker.unlink(missing_ok=True)
