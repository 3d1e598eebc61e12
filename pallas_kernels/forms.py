"""Kernel forms: which kernel reads which body.

A form names one kernel. All that is known of the kernel is found by its form: its row of the table
(`support`), whether a cache may use it (`choice`), its verdicts (`kvqjax.kernel_checks`) and its
recorded bundles. The constants below are the shapes with which kernels were compiled; other shapes
have no form.

`Kernels` says which kernels a cache's programs may use: a static value, part of the cache's
layout."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from kvqjax._errors import UserError
from kvqjax.pallas_kernels.chips import LANES
from kvqjax.pallas_kernels.exact import ExactSpec
from kvqjax.pallas_kernels.higgs import HiggsSpec
from kvqjax.pallas_kernels.klt import KltSpec
from kvqjax.pallas_kernels.packed import PackedSpec

Spec = PackedSpec | HiggsSpec | KltSpec | ExactSpec

EXACT = 16  # bits of keys and values that are not coded
EXACT_HEAD_DIMS = 64, 128, 256  # of exact bodies
MOST_SLOTS = 12  # outliers of a token's keys, or of its values
KLT_HEAD_DIM = 128
HIGGS_SHAPES = (8, 128, 1024), (8, 64, 512)  # KV heads, head_dim, channels that share a scale


@dataclasses.dataclass(frozen=True)
class KernelForm:
    """Name one kernel form. `str` gives the printed name.

    Attributes:
        key_bits: Bits of a key's codes per channel; EXACT where keys are not coded.
        value_bits: Bits of a value's codes likewise.
        head_dim: Channels of a head.
        group: Groups of uniform codes (KIVI, OScaR, KVarN). 128: key groups of 128 tokens, value
            groups of one head's channels. 32: key groups of 32 tokens, value groups of 32 channels.
            The groups of OSCAR and TurboQuant are a head's channels, whatever this says.
        outliers: Whether KVQuant keeps outliers."""

    method: str
    key_bits: int = EXACT
    value_bits: int = EXACT
    head_dim: int = 128
    group: int = 128
    outliers: bool = False

    def __str__(self) -> str:
        words = [self.method]
        if self.key_bits != self.value_bits:
            words.append(f"{self.key_bits} and {self.value_bits} bits")
        elif self.key_bits != EXACT:
            words.append(f"{self.key_bits} bits")
        parts = [" ".join(words)]
        if self.head_dim != 128:
            parts.append(f"head_dim {self.head_dim}")
        if self.group != 128:
            parts.append(f"groups of {self.group}")
        if self.outliers:
            parts.append("outliers")
        return ", ".join(parts)


# Kernels of other libraries, which attend to exact keys and values of a prompt and read no body.
SPLASH = KernelForm("splash")  # JAX's, for prompts and chunks on TPUs
CUDNN = KernelForm("cudnn")  # NVIDIA's, for prompts on GPUs


def _packed_form(spec: PackedSpec) -> KernelForm | None:
    bits = spec.key_bits, spec.value_bits
    # A key group of 0: scales that hold for all tokens, or per token.
    groups = (
        spec.key_group,
        spec.value_group,
    )
    if spec.scales != "bfloat16" or max(spec.key_slots, spec.value_slots) > MOST_SLOTS:
        return None
    outliers = spec.key_slots > 0 or spec.value_slots > 0
    factors, no_factors = (spec.key_factors, spec.value_factors), (0, False)
    if spec.key_channels:
        by_head = groups == (0, spec.head_dim) and spec.key_channels == spec.head_dim
        fits = spec.rope is None and factors == no_factors and by_head and not outliers
        method = "oscar" if spec.minima else "turboquant"
        return KernelForm(method, *bits, spec.head_dim) if fits else None
    if spec.datatype == "nuq":
        fits = spec.rope is not None and groups == (0, spec.width)
        return KernelForm("kvquant", *bits, spec.head_dim, outliers=outliers) if fits else None
    if factors == no_factors:
        method = "kivi" if spec.rope is None else "kivi_star"
    elif spec.rope is None and factors in ((1, False), (spec.kv_heads, True)):
        method = "kvarn" if spec.value_factors else "omniscale"
    else:
        return None
    if groups == (32, 32):
        return KernelForm(method, *bits, spec.head_dim, 32)
    return KernelForm(method, *bits, spec.head_dim) if groups == (128, spec.head_dim) else None


def _higgs_form(spec: HiggsSpec) -> KernelForm | None:
    # A code stands for two channels.
    shape, bits = (
        (spec.kv_heads, spec.head_dim, spec.group),
        spec.key_bits // 2,
    )
    fits = spec.key_bits == spec.value_bits and spec.scales == "bfloat16" and shape in HIGGS_SHAPES
    return KernelForm("higgs", bits, bits, spec.head_dim) if fits else None


def _exact_form(spec: ExactSpec) -> KernelForm | None:
    fits = spec.dtype == "bfloat16" and spec.head_dim in EXACT_HEAD_DIMS and spec.width % LANES == 0
    return KernelForm("exact", head_dim=spec.head_dim) if fits else None


def _klt_form(spec: KltSpec) -> KernelForm | None:
    # One kernel for all numbers of bits: which levels there are is part of a verdict's name.
    return KernelForm("klt", head_dim=spec.head_dim) if spec.head_dim == KLT_HEAD_DIM else None


MAKERS: dict[type, Callable[[Any], KernelForm | None]] = {
    PackedSpec: _packed_form,
    HiggsSpec: _higgs_form,
    KltSpec: _klt_form,
    ExactSpec: _exact_form,
}


def form_of(spec: Spec) -> KernelForm | None:
    """Return the kernel form that reads bodies of `spec`; None where no kernel was written for
    them."""
    return MAKERS[type(spec)](spec)


KERNELS = ("auto", "off", "splash", "cudnn", "pallas")


class Kernels(NamedTuple):
    """Which kernels may run, and why.

    Attributes:
        asked: What the user asked for, one of KERNELS.
        forms: The kernel forms that may run, SPLASH and CUDNN among them; None: those that the
            table trusts.
        basis: Why these: "table" (none was checked), "checked" (on this very chip), "forced" or
            "off"."""

    asked: str = "auto"
    forms: tuple[KernelForm, ...] | None = None
    basis: str = "table"

    def allow(self, form: KernelForm | None) -> bool:
        """Say whether the kernel of a form may run."""
        return self.forms is None or form in self.forms

    def text(self, target: str) -> str:
        """Say in one phrase what was asked, what runs on `target`, and why."""
        if self.forms is None:
            reason = (
                "there are none for it"
                if target == "cpu"
                else "the table's word, not checked on a chip"
            )
            return f"kernels {self.asked} for {target} ({reason})"
        ours = [str(form) for form in self.forms if form not in (SPLASH, CUDNN)]
        runs = []
        if ours:
            runs.append(f"Pallas for {', '.join(ours)}")
        if SPLASH in self.forms:
            runs.append("splash for chunks")
        if CUDNN in self.forms:
            runs.append("cuDNN for prompts")
        return f"kernels {self.asked}: " + (
            f"{', '.join(runs)} ({self.basis})" if runs else "plain path"
        )


BY_TABLE = Kernels()
OFF = Kernels("off", (), "off")


def check_name(kernels: str) -> None:
    """Raise UserError for a word that `kernels=` does not know."""
    if kernels not in KERNELS:
        raise UserError(f"kernels={kernels!r}; known: {', '.join(KERNELS)}")
