"""Methods of other packages, found by their entry points.

    [project.entry-points."kvqjax.methods"]
    fp4 = "their_package:fp4"                # a factory made by `kvqjax.methods.method_factory`

They then have a name like ours: for policies, the command line, the ledger, the planner and `kvqjax.testing`."""

import functools
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from kvqjax._errors import UserError

__all__ = ["Methods"]

GROUP = "kvqjax.methods"
Factory = Callable[..., Any]


class Methods(Mapping):
    """Factories by name: `own`, and those of other packages, which are looked for once and imported when asked for.
    Raises UserError where one cannot be imported, or has the name of one of ours."""

    def __init__(self, own: dict[str, Factory]):
        self.own = own

    @functools.cached_property
    def others(self) -> dict[str, Any]:
        found = {entry.name: entry for entry in entry_points(group=GROUP)}
        for name in found.keys() & self.own.keys():
            raise UserError(f"{found[name].value}: {name!r} is a method of kvqjax; name yours otherwise")
        return found

    def __getitem__(self, name: str) -> Factory:
        if name in self.own:
            return self.own[name]
        entry = self.others[name]
        try:
            return entry.load()
        except (ImportError, AttributeError) as error:
            raise UserError(f"method {name!r} of {entry.value} cannot be imported: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter([*self.own, *self.others])

    def __len__(self) -> int:
        return len(self.own) + len(self.others)
