"""The stamp of every report, and its figures of bytes."""

import datetime
from importlib import metadata
from typing import Any

import jax

from kvqjax._timing import Bar as Bar
from kvqjax._timing import silent as silent
from kvqjax._version import __version__
from kvqjax.cache.accounting import Ledger, ledger
from kvqjax.methods import MethodLike
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import init_cache

CONTEXT = 32768  # tokens of a row for which bits and bytes are counted, where nothing else is said


def ledger_of(model: Model, method: MethodLike, capacity: int) -> Ledger:
    """The ledger of a cache of one row of `capacity` tokens on one device, which is not allocated
    for it."""
    single = model.replace(rules=None)  # one row cannot be split over a mesh
    return ledger(jax.eval_shape(lambda: init_cache(single, method, 1, capacity)))


def bytes_of(model: Model, method: MethodLike, capacity: int) -> dict[str, Any]:
    """A row's figures from that ledger: the method's own bits per value, all bits per value,
    bytes."""
    book = ledger_of(model, method, capacity)
    return {"bits_method": book.bits_method, "bits_stored": book.bits_stored, "bytes": book.bytes}


def stamp(model: Model, name: str, seed: int) -> dict[str, Any]:
    """Model, its fingerprint, how its weights are kept, versions, seed and date."""
    versions = {"kvqjax": __version__} | {
        package: metadata.version(package) for package in ("jax", "jaxlib")
    }
    about = {"model": name, "fingerprint": model.fingerprint, "weights": model.weights}
    about |= {"versions": versions, "seed": seed}
    return about | {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


def stamp_line(about: dict[str, Any]) -> str:
    """One sentence of a report's stamp: versions, fingerprint, seed, data, date."""
    versions = " ".join(f"{name} {number}" for name, number in about["versions"].items())
    data = about.get("data", {})
    source = f", data {data['name']} {data.get('sha256', '')[:12]}" if "name" in data else ""
    return (
        f"{versions}, model {about['fingerprint']}, seed {about['seed']}{source}, {about['date']}"
    )
