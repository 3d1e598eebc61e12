"""Which kernels a cache's programs may use: a static value, part of the cache's layout."""

from typing import NamedTuple

from kvqjax._errors import UserError

__all__ = ["BY_TABLE", "KERNELS", "OFF", "SPLASH", "Kernels", "check_name"]

SPLASH = "splash"  # the row of JAX's own kernel, for prompts and chunks on TPUs
KERNELS = ("auto", "off", "splash", "cudnn", "pallas")


class Kernels(NamedTuple):
    """`asked` is the user's word. `rows` are the rows of `support` whose kernels may run, and SPLASH; None leaves it to
    the table. `basis` says why: "table" (not checked), "checked" (on this very chip), "forced" or "off"."""

    asked: str = "auto"
    rows: tuple[str, ...] | None = None
    basis: str = "table"

    def text(self, target: str) -> str:
        """One phrase for people: what was asked, what runs on `target`, and why."""
        if self.rows is None:
            why = "there are none for it" if target == "cpu" else "the table's word, not checked on a chip"
            return f"kernels {self.asked} for {target} ({why})"
        ours = [row for row in self.rows if row != SPLASH]
        runs = [f"Pallas for {', '.join(ours)}"] * bool(ours) + ["splash for chunks"] * (SPLASH in self.rows)
        return f"kernels {self.asked}: " + (f"{', '.join(runs)} ({self.basis})" if runs else "plain path")


BY_TABLE = Kernels()
OFF = Kernels("off", (), "off")


def check_name(kernels: str) -> None:
    """Raise UserError for a word that `kernels=` does not know."""
    if kernels not in KERNELS:
        raise UserError(f"kernels={kernels!r}; known: {', '.join(KERNELS)}")
