"""How many bytes a cache has, array by array: payload, scales, zero points, outliers, sinks,
window, bookkeeping and padding.

`ledger` takes live caches and abstract ones (`jax.eval_shape`). The planner uses abstract ones,
which need no memory.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from kvqjax._tables import Section, Table, size
from kvqjax.cache.layout import RunLayout
from kvqjax.cache.runs import most_tokens, runs_of
from kvqjax.cache.state import Cache, check_cache
from kvqjax.codecs import bits_per_value
from kvqjax.methods.roofline import flops_by_layer
from kvqjax.ops.packing.base import array_bytes, number_bits

__all__ = ["ROLES", "Entry", "Ledger", "array_bytes", "ledger"]

# What a class of stored bytes is called in print; in JSON and in Python it keeps its name.
ROLES = {
    "payload": "numbers or codes",
    "zeros": "zero points",
    "window": "exact window",
    "sinks": "exact sinks",
    "bookkeeping": "lengths and flags",
    "states": "recurrent states",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One stored field of some layers.

    Attributes:
        layers: The numbers of the layers, such as "0-15".
        source: The source whose field it is; "" for bookkeeping.
        field: The name of the field.
        role: What the bytes are (`ROLES`).
        bytes: All bytes as stored.
        padding: Those of them that hold no token even in a full cache, because bodies are whole
            blocks.
        tiled: All bytes with the padding of TPU tiles (128 lanes, 8 x 4 bytes of sublanes)."""

    layers: str
    source: str
    field: str
    role: str
    bytes: int
    padding: int
    tiled: int


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The bytes of a cache, and what follows from them.

    Attributes:
        entries: All stored fields.
        batch: The number of rows.
        capacity: The most tokens of a row.
        tokens: How many tokens all rows together have room for: `batch` times `capacity`, or as
            many as fit their pages and the exact tokens beside them.
        values: The key and value channels of one token, those of all layers together.
        bits_method: Bits per key or value number of the method alone, averaged over layers: codes,
            scales, minima and outliers, without sinks, window and padding.
        bits_exact: Bits per number of the compute dtype.
        layer_flops: The operations that each layer spends at every decode step on rematerialising
            the keys and values of one cached token.
        carry: Bytes of the carry between layers during a step, beside the cache.
        kernels: What reads the bodies."""

    entries: tuple[Entry, ...]
    batch: int
    capacity: int
    tokens: int
    values: int
    bits_method: float
    bits_exact: int
    layer_flops: tuple[int, ...]
    carry: int
    kernels: str

    @property
    def bytes(self) -> int:
        """Count all bytes of the cache."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def flops(self) -> int:
        """Count the operations per cached token and decode step, all layers."""
        return sum(self.layer_flops)

    @property
    def state_bytes(self) -> int:
        """Count the bytes of recurrent layers' states, which do not grow with the capacity."""
        return sum(entry.bytes for entry in self.entries if entry.role == "states")

    @property
    def bits_stored(self) -> float:
        """Compute the bits per key or value number that the cache has room for, with everything
        that is stored. States of recurrent layers are left out, because they hold no keys or
        values."""
        return 8 * (self.bytes - self.state_bytes) / (self.tokens * self.values)

    @property
    def exact_bytes(self) -> int:
        """Count the bytes of keys and values of `tokens` tokens in the compute dtype,
        uncompressed."""
        return self.tokens * self.values * self.bits_exact // 8

    def by_role(self) -> dict[str, int]:
        """Sum the bytes of each role. Padding is a role of its own here."""
        out: dict[str, int] = {}
        for entry in self.entries:
            out[entry.role] = out.get(entry.role, 0) + entry.bytes - entry.padding
            out["padding"] = out.get("padding", 0) + entry.padding
        return {role: size for role, size in out.items() if size}

    def table(self) -> Table:
        """Give a row for each role, and one for all: bytes, share of all bytes, bits per key or
        value number. It prints as a table; `print(ledger)` prints it too."""
        roles = [*self.by_role().items(), ("all", self.bytes)]
        numbers = self.tokens * self.values
        rows = [
            {"role": ROLES.get(role, role), "bytes": count, "share": f"{count / self.bytes:.1%}"}
            | {"bits_per_number": 8 * count / numbers}
            for role, count in roles
        ]
        batch = f"{self.batch} row{'s' * (self.batch > 1)} of {self.capacity} tokens"
        batch += f", {self.tokens} in all" if self.tokens != self.batch * self.capacity else ""
        title = f"cache of {batch}: {self.bits_stored:.4g} bits per number, {size(self.bytes)}"
        exact = f"exact, in {self.bits_exact} bits: {size(self.exact_bytes)}; the method alone: {self.bits_method:.4g} bits"  # noqa: E501
        return Table(rows, [Section(title, rows, exact)])

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_json(self) -> dict[str, Any]:
        """Give plain numbers for `--json`."""
        rows = [dataclasses.asdict(entry) for entry in self.entries]
        summary = {
            "bytes": self.bytes,
            "bytes_exact": self.exact_bytes,
            "bits_method": self.bits_method,
        }
        summary |= {"flops_per_cached_token": self.flops, "flops_by_layer": self.layer_flops}
        summary |= {"bytes_carry": self.carry, "kernels": self.kernels}
        summary |= {"bits_stored": self.bits_stored, "roles": self.by_role(), "batch": self.batch}
        return summary | {
            "capacity": self.capacity,
            "tiled": sum(e.tiled for e in self.entries),
            "entries": rows,
        }


def _tiled(array) -> int:
    """Count an array's bytes with its last two axes padded to TPU tiles: 128 lanes times 8 sublanes
    of 32 bits, each of which holds several narrower numbers."""
    bits = number_bits(array.dtype)
    rows, lanes = (1, *array.shape)[-2:]
    sublanes = 8 * max(1, 32 // bits)
    return (
        math.prod(array.shape[:-2])
        * -(-rows // sublanes)
        * sublanes
        * -(-lanes // 128)
        * 128
        * bits
        // 8
    )


def _entry(run: RunLayout, source: str, field: str, role: str, arrays, used: float = 1.0) -> Entry:
    """Make the entry of a field, stored in `arrays`. A full cache uses the share `used` of its
    bytes."""
    layers = f"{run.first}-{run.first + run.count - 1}" if run.count > 1 else str(run.first)
    size = array_bytes(arrays)
    return Entry(
        layers, source, field, role, size, size - round(size * used), sum(_tiled(a) for a in arrays)
    )


def _run_entries(run: RunLayout, state, capacity: int, sinks: int):
    """Make the entries of a run, one by one."""
    clocks = {source: clock for clock in run.wiring.storage.clocks for source in clock.sources}
    for source, fields in state.body.items():
        clock = clocks[source]
        # The most tokens of this source that the body ever holds. Of two sources with windows of
        # their own, one may encode nothing where the other does.
        encoded = max(0, (capacity - sinks - clock.window) // clock.unit * clock.unit)
        most = run.budget or min(encoded, run.slots)
        for name, stored in fields.items():
            field = run.wiring.storage.codecs[source].fields[name]
            yield _entry(run, source, name, field.role, stored, most / run.slots)
    for part in ("sinks", "window"):
        for source, array in getattr(state, part).items():
            yield _entry(run, source, part, part, [array])
    yield _entry(run, "", "flushed", "bookkeeping", state.flushed)


def _state_entries(cache: Cache) -> list[Entry]:
    """Make an entry for each part of the states of all recurrent layers. Its layers are numbered
    among all layers of the model, attention's included."""
    shape = cache.layout.shape.recurrent
    if shape is None:
        return []
    layers = (
        f"{shape.layers[0]}-{shape.layers[-1]}" if len(shape.layers) > 1 else str(shape.layers[0])
    )
    entries = []
    for name in cache.states[0]:
        arrays = [state[name] for state in cache.states]
        entries.append(
            Entry(
                layers,
                "recurrent",
                name,
                "states",
                array_bytes(arrays),
                0,
                sum(map(_tiled, arrays)),
            )
        )
    return entries


def _method_bits(runs: tuple[RunLayout, ...], values: int) -> float:
    """Count the bits that the codecs alone store per key or value channel."""
    total = sum(
        run.count * bits_per_value(codec) * codec.width
        for run in runs
        for codec in run.wiring.storage.codecs.values()
    )
    return total / values


def _carry_bytes(runs: tuple[RunLayout, ...], batch: int, dtype: str) -> int:
    """Count the bytes of the carry between layers that a decode step holds."""
    widths = {name: width for run in runs for name, width in run.wiring.chain.carry.items()}
    return (
        batch * max(run.carried for run in runs) * sum(widths.values()) * np.dtype(dtype).itemsize
    )


def ledger(cache: Cache) -> Ledger:
    """Account for every array of a cache.

    Args:
        cache: Any cache, live or abstract.

    Returns:
        The ledger, whose bytes are those of all arrays.

    Raises:
        UserError: For what is no cache."""
    check_cache(cache)
    layout, runs = cache.layout, runs_of(cache.layout)
    entries: list[Entry] = []
    for run, state in zip(runs, cache.runs, strict=True):
        entries.extend(_run_entries(run, state, layout.capacity, layout.method.sinks))
    entries.append(
        _entry(runs[0], "", "lengths", "bookkeeping", [cache.lengths, cache.overflow, cache.finite])
    )
    tables = cache.kept if cache.pages is None else {"pages": cache.pages, **cache.kept}
    entries += [_entry(runs[0], "", name, "bookkeeping", [array]) for name, array in tables.items()]
    entries += _state_entries(cache)
    values = layout.shape.num_layers * layout.shape.cached_width
    return Ledger(
        entries=tuple(entries),
        batch=cache.lengths.shape[0],
        capacity=layout.capacity,
        tokens=most_tokens(layout, cache.lengths.shape[0]),
        values=values,
        bits_method=_method_bits(runs, values),
        bits_exact=8 * jax.numpy.dtype(layout.dtype).itemsize,
        layer_flops=flops_by_layer(layout.method, layout.shape),
        carry=_carry_bytes(runs, cache.lengths.shape[0], layout.dtype),
        kernels=layout.kernels.text(layout.target),
    )
