"""Choose which kernels a cache may use, from the user's word and what the chip found.

A kernel is checked when a cache is made or loaded, never while a program is traced. Each process asks for a verdict
once."""

import dataclasses
import functools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.kernel_checks.check import check_either, key_of, obtain, verdict_folder
from kvqjax.kernel_checks.splash import Splash, splash_form
from kvqjax.kernel_checks.store import find
from kvqjax.kernel_checks.trial import Candidate, candidates
from kvqjax.model.config import KVShape
from kvqjax.pallas_kernels.choice import BY_TABLE, OFF, Kernels, check_name
from kvqjax.pallas_kernels.forms import SPLASH, KernelForm
from kvqjax.pallas_kernels.packed import target_of
from kvqjax.pallas_kernels.splash import HEAD_DIMS
from kvqjax.parallel.rules import Rules

__all__ = ["choose", "over_devices"]


@functools.lru_cache(maxsize=256)
def _usable(folder: Path, chip: str, candidate: Candidate | Splash, target: str, stored: str, hosts: bool) -> bool:
    """Whether the kernel may run, asked once a process. On several `hosts` the verdict of process 0 counts."""
    found = None
    if not hosts or jax.process_index() == 0:
        found = obtain(folder, key_of(candidate, chip), lambda: check_either(candidate, target, stored), _warn)
    usable = found is not None and found.usable
    return _from_first(usable) if hosts else usable


def _warn(line: str) -> None:
    """Warn the user in one line."""
    warnings.warn(line, stacklevel=2)


def _from_first(usable: bool) -> bool:
    """Return what process 0 says, on every process."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return bool(broadcast_one_to_all(np.asarray(usable)))


def _chip_of(held: jax.Array) -> str:
    """Return the name of the chip that an array lies on."""
    return next(iter(held.devices())).device_kind


def _tracing() -> bool:
    """Whether a program is being traced."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _known(folder: Path, chip: str, candidate: Candidate | Splash) -> bool:
    """Whether a verdict that lets the kernel run is kept already."""
    try:
        found = find(folder, key_of(candidate, chip))
    except UserError:
        return False
    return found is not None and found.usable


def _forms(found: Iterable[Candidate | Splash | None]) -> tuple[KernelForm, ...]:
    """List the kernel forms of candidates, each once, in their order."""
    return tuple(dict.fromkeys(one.form for one in found if one is not None and one.form is not None))


def _forced(layout: CacheLayout, form: str | None, found: list[Candidate | None]) -> CacheLayout:
    """Return the layout with the Pallas kernel of every body, checked or not. Raise UserError where one has none."""
    if None in found:
        raise UserError(
            f"kernels='pallas': no Pallas kernel reads the bodies of {layout.method} on {layout.target}; "
            "kernels='auto' takes the plain path there"
        )
    if form not in (None, "planes"):
        raise UserError(f"kernels='pallas' reads bodies stored in planes; form={form!r} has none")
    return dataclasses.replace(layout, form="planes", kernels=Kernels("pallas", _forms(found), "forced"))


CUDNN = "no cache here is read by cuDNN yet: JAX rounds its log-sum-exp to 16 bits, too few to merge by"


def _splash_only(layout: CacheLayout, form: Splash | None) -> CacheLayout:
    """Return the layout with splash attention for prompts and chunks, checked or not. Raise UserError where it cannot
    run."""
    if form is None:
        raise UserError(
            f"kernels='splash': it runs on TPUs, with {' or '.join(map(str, HEAD_DIMS))} channels a head; here are "
            f"{layout.shape.head_dim}, for {layout.target}"
        )
    return dataclasses.replace(layout, kernels=Kernels("splash", (SPLASH,), "forced"))


def _checked(layout: CacheLayout, tried: list[Candidate | Splash], chip: str, hosts: bool) -> set[Candidate | Splash]:
    """Return the candidates whose kernels this chip checked, now or before, and found right and faster."""
    try:
        folder = verdict_folder()
    except UserError as error:
        _warn(f"no kernel is used: {error}")
        return set()
    if _tracing():
        return {one for one in tried if _known(folder, chip, one)}
    in_order = sorted(set(tried), key=str)  # the same on every host
    return {one for one in in_order if _usable(folder, chip, one, layout.target, layout.form, hosts)}


def over_devices(rules: Rules, layout: CacheLayout) -> dict[str, Any]:
    """Return what `choose` must know of a mesh. A mesh that is only planned with knows no processes."""
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
    """Return the layout with its kernels chosen. `held` is an array on the chip that programs will run on, or an
    abstract one. `form` is the user's word on how bodies are stored, None leaves it open. `local` is what one device
    holds of the shape, `hosts` whether the mesh spans several processes. Raise UserError for what cannot be forced."""
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
        return dataclasses.replace(layout, kernels=OFF)
    if asked == "auto" and (layout.target == "cpu" or form == "stripes"):  # spares caches on CPUs a second plan
        return dataclasses.replace(layout, kernels=BY_TABLE)
    found = candidates(dataclasses.replace(layout, shape=shape, dealt=1))
    if asked == "pallas":
        return _forced(layout, form, found)
    tried = [one for one in (*found, splash) if one is not None]
    if target_of(held) != layout.target or not tried:
        return dataclasses.replace(layout, kernels=BY_TABLE)
    usable = _checked(layout, tried, _chip_of(held), hosts)
    planes = form is None and layout.form == "heads" and all(one in usable for one in found)
    kernels = Kernels("auto", _forms(one for one in tried if one in usable), "checked")
    return dataclasses.replace(layout, form="planes" if planes else layout.form, kernels=kernels)
