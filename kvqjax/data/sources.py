"""Where published data sets come from: a folder in their official format, or the hub, through `datasets`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvqjax._errors import UserError
from kvqjax.data.records import read_records

__all__ = ["Source", "find", "records"]


class Source(NamedTuple):
    """Describe one file of a data set. name: what messages call it; files: names under which a local folder may hold
    it; where: how to get it, for the message when it is missing; hub: arguments of `datasets.load_dataset`."""

    name: str
    files: tuple[str, ...]
    where: str
    hub: dict[str, Any]


def find(source: Source, folder: Path | None) -> Path | None:
    """Find the file in `folder` or in the subfolder of it that bears the data set's name; None where it is not."""
    places = [folder, folder / source.name] if folder else []
    found = (place / name for place in places for name in source.files)
    return next((path for path in found if path.is_file()), None)


def _from_hub(source: Source) -> Iterator[dict[str, Any]]:
    hint = f"put {source.files[0]} into a folder and name it with --folder ({source.where})"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"{source.name}: pip install datasets to load it from the hub, or {hint}") from error
    try:
        return iter(load_dataset(**source.hub))
    # The library raises its own, the hub client's and the system's errors; all of them mean "not to be had".
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{source.name}: the hub did not give it ({reason}); {hint}") from error


def records(source: Source, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Records of the local file if `folder` is given, else of the hub. Raises UserError with what to download and
    where to put it."""
    if folder is None:
        yield from _from_hub(source)
        return
    path = find(source, folder)
    if path is None:
        names = " or ".join(source.files)
        raise UserError(f"{folder}: {names} is not there; get it from {source.where} and put it there")
    yield from (record.value for record in read_records(path, lambda names, where: names))
