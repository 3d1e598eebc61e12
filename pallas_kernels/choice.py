"""Which kernels a cache's programs may use: a static value, part of the cache's layout."""

from typing import NamedTuple

from kvqjax._errors import UserError
from kvqjax.pallas_kernels.forms import CUDNN, SPLASH, KernelForm

__all__ = ["BY_TABLE", "KERNELS", "OFF", "Kernels", "check_name"]

KERNELS = ("auto", "off", "splash", "cudnn", "pallas")


class Kernels(NamedTuple):
    """Say which kernels may run, and why. `asked` is the user's word. `forms` are the kernel forms that may run, SPLASH
    and CUDNN among them; None leaves it to the table. `basis` is "table" (not checked), "checked" (on this very chip),
    "forced" or "off"."""

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
        runs = [f"Pallas for {', '.join(ours)}"] * bool(ours)
        runs += ["splash for chunks"] * (SPLASH in self.forms) + ["cuDNN for prompts"] * (CUDNN in self.forms)
        return f"kernels {self.asked}: " + (f"{', '.join(runs)} ({self.basis})" if runs else "plain path")


BY_TABLE = Kernels()
OFF = Kernels("off", (), "off")


def check_name(kernels: str) -> None:
    """Raise UserError for a word that `kernels=` does not know."""
    if kernels not in KERNELS:
        raise UserError(f"kernels={kernels!r}; known: {', '.join(KERNELS)}")
