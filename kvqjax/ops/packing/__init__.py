"""Packings: where the numbers of a field lie in its arrays. Each has a file, and a name in
`PACKINGS`."""

from kvqjax.ops.packing.base import Packing, Rows, Stored, Tokens, convert
from kvqjax.ops.packing.heads import by_head
from kvqjax.ops.packing.planes import Columns, Lines, Planes, Stripes

__all__ = ["PACKINGS", "Packing", "Stored", "convert"]

# Each entry makes a packing of the fields of `Packing`: width, bits, group, dtype and heads.
PACKINGS = {
    "planes": Planes,
    "columns": Columns,
    "stripes": Stripes,
    "lines": Lines,
    "heads": by_head,
    "rows": Rows,
    "tokens": Tokens,
}
