"""Choose which kernels a cache may use, from the user's word and what the chip found.

A kernel is checked when a cache is made or loaded, never while a program is traced. Each process
asks for a verdict once."""

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
from kvqjax.cache.layout import CacheLayout
from kvqjax.kernel_checks.check import check_either, key_of, obtain, verdict_folder
from kvqjax.kernel_checks.prompt_kernels import MOST_CUDNN, PromptKernel, prompt_kernel
from kvqjax.kernel_checks.store import find
from kvqjax.kernel_checks.trial import Candidate, candidates
from kvqjax.model.config import KVShape
from kvqjax.pallas_kernels.chips import target_of
from kvqjax.pallas_kernels.forms import (
    BY_TABLE,
    CUDNN,
    OFF,
    SPLASH,
    KernelForm,
    Kernels,
    check_name,
)
from kvqjax.pallas_kernels.splash import HEAD_DIMS
from kvqjax.parallel.rules import Rules


@functools.lru_cache(maxsize=256)
def _usable(
    folder: Path,
    chip: str,
    candidate: Candidate | PromptKernel,
    target: str,
    stored: str,
    hosts: bool,
) -> bool:
    """Say whether the kernel may run, asked once a process. On several `hosts` the verdict of
    process 0 counts."""
    verdict = None
    if not hosts or jax.process_index() == 0:
        verdict = obtain(
            folder, key_of(candidate, chip), lambda: check_either(candidate, target, stored), _warn
        )
    usable = verdict is not None and verdict.usable
    return _from_first(usable) if hosts else usable


def _warn(line: str) -> None:
    """Warn the user in one line."""
    warnings.warn(line, stacklevel=2)


def _from_first(usable: bool) -> bool:
    """Return what process 0 says, on every process."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return bool(broadcast_one_to_all(np.asarray(usable)))


def _chip_of(array: jax.Array) -> str:
    """Return the name of the chip that an array lies on."""
    return next(iter(array.devices())).device_kind


def _tracing() -> bool:
    """Say whether a program is being traced."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _has_verdict(folder: Path, chip: str, candidate: Candidate | PromptKernel) -> bool:
    """Say whether a verdict that lets the kernel run is kept already."""
    try:
        verdict = find(folder, key_of(candidate, chip))
    except UserError:
        return False
    return verdict is not None and verdict.usable


def _forms(kernels: Iterable[Candidate | PromptKernel | None]) -> tuple[KernelForm, ...]:
    """List the kernel forms of candidates, each once, in their order."""
    return tuple(
        dict.fromkeys(
            kernel.form for kernel in kernels if kernel is not None and kernel.form is not None
        )
    )


def _forced(layout: CacheLayout, form: str | None, readers: list[Candidate | None]) -> CacheLayout:
    """Return the layout with the Pallas kernel of every body, checked or not. Raise UserError where
    one has none."""
    if None in readers:
        raise UserError(
            f"kernels='pallas': no Pallas kernel reads the bodies of {layout.method} on {layout.target}; "
            "kernels='auto' takes the plain path there"
        )
    if form not in (None, "planes"):
        raise UserError(f"kernels='pallas' reads bodies stored in planes; form={form!r} has none")
    return dataclasses.replace(
        layout, form="planes", kernels=Kernels("pallas", _forms(readers), "forced")
    )


WHERE = {
    SPLASH: f"on TPUs, with {' or '.join(map(str, HEAD_DIMS))} channels a head",
    CUDNN: f"on GPUs from compute capability 8.0 on, in bfloat16, with up to {MOST_CUDNN} channels a head",
}


def _prompts_only(
    layout: CacheLayout, form: KernelForm, kernel: PromptKernel | None
) -> CacheLayout:
    """Return the layout with the kernel `form` for prompts, checked or not, and none for decode
    steps. Raise UserError where it cannot run."""
    if kernel is None or kernel.form != form:
        raise UserError(
            f"kernels='{form}': it runs {WHERE[form]}; here: {layout.shape.head_dim} channels in {layout.dtype}, "
            f"for {layout.target}"
        )
    return dataclasses.replace(layout, kernels=Kernels(str(form), (form,), "forced"))


def _checked(
    layout: CacheLayout, tried: list[Candidate | PromptKernel], chip: str, hosts: bool
) -> set[Candidate | PromptKernel]:
    """Return the candidates whose kernels this chip checked, now or before, and found right and
    faster."""
    try:
        folder = verdict_folder()
    except UserError as error:
        _warn(f"no kernel is used: {error}")
        return set()
    if _tracing():
        return {candidate for candidate in tried if _has_verdict(folder, chip, candidate)}
    in_order = sorted(set(tried), key=str)  # the same on every host
    return {
        candidate
        for candidate in in_order
        if _usable(folder, chip, candidate, layout.target, layout.form, hosts)
    }


def over_devices(rules: Rules, layout: CacheLayout) -> dict[str, Any]:
    """Return what `choose` must know of a mesh. A mesh that is only planned with knows no
    processes."""
    return {
        "local": rules.local_layout(layout).shape,
        "hosts": getattr(rules.mesh, "is_multi_process", False),
    }


def choose(
    layout: CacheLayout,
    request: str | Kernels,
    array: Any,
    *,
    form: str | None = None,
    local: KVShape | None = None,
    hosts: bool = False,
) -> CacheLayout:
    """Choose the kernels of a layout.

    Args:
        layout: The layout, without its kernels.
        request: The user's word: a name such as "auto", or kernels that were chosen before.
        array: An array on the chip that programs will run on, or an abstract one.
        form: The user's word on how bodies are stored; None leaves it open.
        local: What one device holds of the shape; None: all of it.
        hosts: Whether the mesh spans several processes.

    Returns:
        The layout with its kernels.

    Raises:
        UserError: The request cannot be forced here."""
    if isinstance(request, Kernels):
        return dataclasses.replace(layout, kernels=request)
    check_name(request)
    shape = local or layout.shape
    for_prompts = prompt_kernel(layout, shape)
    if request in ("splash", "cudnn"):
        return _prompts_only(layout, SPLASH if request == "splash" else CUDNN, for_prompts)
    if request == "off":
        return dataclasses.replace(layout, kernels=OFF)
    if request == "auto" and (
        layout.target == "cpu" or form == "stripes"
    ):  # spares caches on CPUs a second plan
        return dataclasses.replace(layout, kernels=BY_TABLE)
    readers = candidates(dataclasses.replace(layout, shape=shape, dealt=1))
    if request == "pallas":
        return _forced(layout, form, readers)
    tried = [candidate for candidate in (*readers, for_prompts) if candidate is not None]
    if target_of(array) != layout.target or not tried:
        return dataclasses.replace(layout, kernels=BY_TABLE)
    usable = _checked(layout, tried, _chip_of(array), hosts)
    planes = (
        form is None
        and layout.form == "heads"
        and all(candidate in usable for candidate in readers)
    )
    # A form runs where all its bodies passed: bodies of one form may differ in their levels.
    refused = {candidate.form for candidate in tried if candidate not in usable}
    right = [candidate for candidate in tried if candidate.form not in refused]
    kernels = Kernels("auto", _forms(right), "checked")
    return dataclasses.replace(layout, form="planes" if planes else layout.form, kernels=kernels)
