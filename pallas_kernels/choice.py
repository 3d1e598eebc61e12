"""The kernels that a cache's programs may use: a static value, part of the cache's layout."""

from typing import NamedTuple

from kvqjax._errors import UserError
from kvqjax.pallas_kernels.forms import CUDNN, SPLASH, KernelForm

__all__ = ["BY_TABLE", "KERNELS", "OFF", "Kernels", "check_name"]

KERNELS = ("auto", "off", "splash", "cudnn", "pallas")


class Kernels(NamedTuple):
    """The kernels that may run, and the reason.

    Attributes:
        asked: What the user asked for, one of KERNELS.
        forms: The kernel forms that may run, SPLASH and CUDNN among them; None: those that the table trusts.
        basis: Why these: "table" (none was checked), "checked" (on this very chip), "forced" or "off"."""

    asked: str = "auto"
    forms: tuple[KernelForm, ...] | None = None
    basis: str = "table"

    def allow(self, form: KernelForm | None) -> bool:
        """Say whether the kernel of a form may run."""
        return self.forms is None or form in self.forms

    def text(self, target: str) -> str:
        """Say in one phrase what was asked, what runs on `target`, and why."""
        if self.forms is None:
            reason = "there are none for it" if target == "cpu" else "the table's word, not checked on a chip"
            return f"kernels {self.asked} for {target} ({reason})"
        ours = [str(form) for form in self.forms if form not in (SPLASH, CUDNN)]
        runs = []
        if ours:
            runs.append(f"Pallas for {', '.join(ours)}")
        if SPLASH in self.forms:
            runs.append("splash for chunks")
        if CUDNN in self.forms:
            runs.append("cuDNN for prompts")
        return f"kernels {self.asked}: " + (f"{', '.join(runs)} ({self.basis})" if runs else "plain path")


BY_TABLE = Kernels()
OFF = Kernels("off", (), "off")


def check_name(kernels: str) -> None:
    """Raise UserError for a word that `kernels=` does not know."""
    if kernels not in KERNELS:
        raise UserError(f"kernels={kernels!r}; known: {', '.join(KERNELS)}")
