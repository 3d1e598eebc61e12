"""Packings: where the numbers of a field lie in its arrays. Each has a file, and a name in `PACKINGS`."""

from kvqjax.ops.packing.base import Packing, Stored, convert
from kvqjax.ops.packing.heads import by_head
from kvqjax.ops.packing.lines import Lines
from kvqjax.ops.packing.planes import Columns, Planes
from kvqjax.ops.packing.rows import Rows, Tokens
from kvqjax.ops.packing.stripes import Stripes

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
