"""From the user's word on kernels to what a cache's layout says of them. A kernel is checked when a cache is made or
loaded, never while a program is traced; each process asks for a verdict once."""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from kvqjax._errors import UserError
from kvqjax._folders import user_folder
from kvqjax._version import __version__
from kvqjax.cache.state import CacheLayout
from kvqjax.model.config import KVShape
from kvqjax.pallas_kernels.choice import BY_TABLE, OFF, SPLASH, Kernels, check_name
from kvqjax.pallas_kernels.packed import target_of
from kvqjax.pallas_kernels.splash import HEAD_DIMS
from kvqjax.pallas_kernels.support import lookup
from kvqjax.parallel.sharding import Rules
from kvqjax.verdicts.examine import Attention, Speed, examine
from kvqjax.verdicts.paths import LENGTHS, by_kernel, by_plain_path, queries, speed
from kvqjax.verdicts.splash_trial import Splash, check_splash, splash_form
from kvqjax.verdicts.store import Key, Verdict, begin, died, find, keep
from kvqjax.verdicts.trial import Form, Trial, forms, make

__all__ = ["Checker", "check", "check_form", "choose", "key_of", "obtain", "over_devices", "verdict_folder"]

SIZES = (1300, 5000)  # tokens of a body, none a multiple of a tile
TIMED = 8192
COMMAND = "kvqjax doctor"
CRASHED = "an earlier check ended with its process"

Checker = Callable[[Form | Splash, str, str], Verdict]  # (form, target, the form in which the plain path stores bodies)


def verdict_folder() -> Path:
    """Where this user's verdicts are kept."""
    return user_folder("kernels")


def key_of(form: Form | Splash, chip: str) -> Key:
    """What a verdict on `form` on a chip of this name holds for."""
    return Key(chip, jax.__version__, jaxlib.__version__, __version__, form.name)


def check(
    form: Form,
    target: str,
    stored: str,
    *,
    kernel: Callable[[Trial], Attention] = by_kernel,
    timed: Callable[[Trial, Trial, int], Speed] = speed,
    sizes: tuple[int, ...] = SIZES,
) -> Verdict:
    """Try the kernel of `form` on this process's default device; `stored` is how bodies would be stored without it.
    What the plain path raises is raised: it says nothing of the kernel."""
    begun, forced, worst = time.perf_counter(), Kernels("pallas", (form.row,), "forced"), 0.0
    for tokens in sizes:
        trial = make(form, tokens, target, forced, seed=tokens)
        plain = by_plain_path(trial)
        last = tokens == sizes[-1]
        other = trial if stored == "planes" else make(form, tokens, target, OFF, stored, seed=tokens)
        other = other._replace(cache=other.cache.replace(layout=_without(other.cache.layout)))
        clock = functools.partial(timed, trial, other, TIMED) if last else lambda: Speed(0.0, 1.0)
        found = examine(kernel(trial), plain, queries(trial, LENGTHS if last else (1,)), clock)
        worst = max(worst, found.error or 0.0)
        if last or found.outcome != "faster":
            break
    seconds = time.perf_counter() - begun
    times = {} if found.speed is None or not last else {"kernel_ms": found.speed.kernel, "plain_ms": found.speed.plain}
    error = None if found.error is None else worst
    return Verdict(outcome=found.outcome, error=error, seconds=seconds, note=found.note, **times)


def check_form(form: Form | Splash, target: str, stored: str) -> Verdict:
    """Try the kernel of `form`, ours or JAX's own, on this process's default device."""
    return check_splash(form) if isinstance(form, Splash) else check(form, target, stored)


def _without(layout: CacheLayout) -> CacheLayout:
    return dataclasses.replace(layout, kernels=OFF)


def obtain(folder: Path, key: Key, run: Callable[[], Verdict], tell: Callable[[str], None]) -> Verdict | None:
    """The verdict kept in `folder`, or else the one that `run()` gives, which is kept; None, after one line through
    `tell`, where there can be none: the plain path then serves."""
    try:
        found = find(folder, key)
        if found is not None:
            return found
        found = Verdict(outcome="crashed", note=CRASHED) if died(folder, key) else _marked(folder, key, run)
        keep(folder, key, found)
    except Exception as error:  # a chip may raise anything when it goes away
        line = next(iter(str(error).splitlines()), type(error).__name__)
        tell(f"kernel for {key.form} not checked, the plain path serves: {line}")
        return None
    if not found.usable:
        why = found.note or {"slower": "slower than the plain path"}.get(found.outcome, found.outcome)
        tell(f"kernel for {key.form} is not used on {key.chip}: {why}; `{COMMAND}` shows more")
    return found


def _marked(folder: Path, key: Key, run: Callable[[], Verdict]) -> Verdict:
    """`run()`, with a marker that outlives it only if it takes the process with it."""
    marker = begin(folder, key)
    try:
        return run()
    finally:
        marker.unlink(missing_ok=True)


@functools.lru_cache(maxsize=256)
def _usable(folder: Path, chip: str, form: Form | Splash, target: str, stored: str, hosts: bool) -> bool:
    """Whether the kernel may run, asked once a process; on several `hosts` what process 0 finds counts."""
    found = None
    if not hosts or jax.process_index() == 0:
        found = obtain(folder, key_of(form, chip), lambda: check_form(form, target, stored), _warn)
    usable = found is not None and found.usable
    return _from_first(usable) if hosts else usable


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=2)


def _from_first(usable: bool) -> bool:
    """Process 0's word for all."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return bool(broadcast_one_to_all(np.asarray(usable)))


def _chip_of(held: jax.Array) -> str:
    """The name of the chip that an array lies on."""
    return next(iter(held.devices())).device_kind


def _tracing() -> bool:
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _known(folder: Path, chip: str, form: Form | Splash) -> bool:
    """Whether a verdict is kept already that lets the kernel run: nothing runs while a program is traced."""
    try:
        found = find(folder, key_of(form, chip))
    except UserError:
        return False
    return found is not None and found.usable


def _forced(layout: CacheLayout, form: str | None, found: list[Form | None]) -> CacheLayout:
    """Every body by its Pallas kernel, checked or not. Raises UserError where one has none."""
    missing = [i for i, one in enumerate(found) if one is None or lookup(one.row, layout.target) == "reference"]
    if missing:
        raise UserError(
            f"kernels='pallas': no Pallas kernel reads the bodies of {layout.method} on {layout.target}; "
            "kernels='auto' takes the plain path there"
        )
    if form == "heads":
        raise UserError("kernels='pallas' reads bodies stored in planes; form='heads' has none")
    rows = tuple(dict.fromkeys(one.row for one in found if one is not None))
    return dataclasses.replace(layout, form="planes", kernels=Kernels("pallas", rows, "forced"))


CUDNN = "no cache here is read by cuDNN yet: JAX rounds its log-sum-exp to 16 bits, too few to merge by"


def _splash_only(layout: CacheLayout, form: Splash | None) -> CacheLayout:
    """Prompts and chunks by splash attention, checked or not. Raises UserError where it cannot run."""
    if form is None:
        raise UserError(
            f"kernels='splash': it runs on TPUs, with {' or '.join(map(str, HEAD_DIMS))} channels a head; here are "
            f"{layout.shape.head_dim}, for {layout.target}"
        )
    return dataclasses.replace(layout, kernels=Kernels("splash", (SPLASH,), "forced"))


def over_devices(rules: Rules, layout: CacheLayout) -> dict[str, Any]:
    """What `choose` must know of a mesh. One that is only planned with knows no processes."""
    return {"local": rules.local_layout(layout).shape, "hosts": getattr(rules.mesh, "is_multi_process", False)}


def choose(
    layout: CacheLayout,
    asked: str | Kernels,
    held: Any,
    *,
    form: str | None = None,
    local: KVShape | None = None,
    hosts: bool = False,
) -> CacheLayout:
    """The layout with its kernels chosen. `held` is an array on the chip that programs will run on, or an abstract one;
    `form` is the user's word on how bodies are stored, None leaves it open. `local` is what one device holds of the
    shape, and `hosts` whether the mesh spans several processes. Raises UserError for what cannot be forced."""
    if isinstance(asked, Kernels):
        return dataclasses.replace(layout, kernels=asked)
    check_name(asked)
    if asked == "cudnn":
        raise UserError(f"kernels='cudnn': {CUDNN}; known to run: auto, off, pallas, splash")
    shape = local or layout.shape
    splash = splash_form(layout, shape)
    if asked == "splash":
        return _splash_only(layout, splash)
    if asked == "off":
        return _without(layout)
    if asked == "auto" and layout.target == "cpu":  # spares every cache on a CPU a second plan
        return dataclasses.replace(layout, kernels=BY_TABLE)
    found = forms(dataclasses.replace(layout, shape=shape, dealt=1))
    if asked == "pallas":
        return _forced(layout, form, found)
    present = target_of(held) == layout.target
    tried: set[Form | Splash] = {
        one for one in found if one is not None and lookup(one.row, layout.target) != "reference"
    }
    tried |= set() if splash is None else {splash}
    if not present or not tried:
        return dataclasses.replace(layout, kernels=BY_TABLE)
    try:
        folder = verdict_folder()
    except UserError as error:
        _warn(f"no kernel is used: {error}")
        return dataclasses.replace(layout, kernels=Kernels("auto", (), "checked"))
    chip = _chip_of(held)
    if _tracing():
        usable = {one for one in tried if _known(folder, chip, one)}
    else:
        usable = {
            one for one in sorted(tried, key=str) if _usable(folder, chip, one, layout.target, layout.form, hosts)
        }
    rows = tuple(dict.fromkeys(one.row for one in (*found, splash) if one is not None and one in usable))
    planes = form is None and layout.form == "heads" and all(one in usable for one in found)
    kernels = Kernels("auto", rows, "checked")
    return dataclasses.replace(layout, form="planes" if planes else layout.form, kernels=kernels)
