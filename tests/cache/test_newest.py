"""Writing one token of every row by scatters, beside writing it row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly

from kvqjax.ops.layout import Field
from kvqjax.ops.packing.base import split_bits

ROWS, SLOTS, WIDTH = 4, 2048, 48
FIELDS = {
    "codes": Field(kind="codes", width=WIDTH, bits=3, role="payload"),
    "columns": Field(kind="codes", form="columns", width=WIDTH, bits=6, role="payload"),
    "numbers": Field(kind="token", width=3, role="scales"),
    "bits": Field(kind="token", width=5, role="outliers", dtype="uint16"),
}


def held(field: Field) -> tuple:
    """Two layers' arrays with random bits in all places."""
    rng = np.random.default_rng(0)
    if not field.packed:
        return (
            jnp.asarray(rng.integers(0, 2**14, (2, ROWS, field.width, SLOTS), dtype=np.uint16)),
        )
    shapes = [(2, ROWS, SLOTS * bits // 32, WIDTH) for bits in split_bits(field.bits)]
    words = [rng.integers(0, 2**32, shape, dtype=np.uint32) for shape in shapes]
    return tuple(jnp.asarray(x.swapaxes(2, 3) if field.form == "columns" else x) for x in words)


@pytest.mark.parametrize("name", with_nightly(FIELDS, FIELDS.keys() - {"codes"}))
def test_one_token_of_every_row_is_written_as_row_by_row(name):
    """Tokens in other planes, words and blocks of each row; a row that is not wanted keeps all its
    bits, and so does the other layer."""
    field = FIELDS[name]
    rng, stored = np.random.default_rng(1), held(field)
    slots, wanted = jnp.asarray([5, 1023, 700, SLOTS - 1]), jnp.asarray([True, True, False, True])
    if field.packed:
        tile = jnp.asarray(rng.integers(0, 2**field.bits, (ROWS, WIDTH), dtype=np.int32))
    elif field.dtype == "uint16":
        tile = jnp.asarray(rng.integers(0, 2**16, (field.width, ROWS), dtype=np.uint16))
    else:
        tile = jnp.asarray(rng.standard_normal((field.width, ROWS)), jnp.bfloat16)
    found, before = (
        jax.jit(field.packing.scatter)(stored, jnp.int32(1), slots, tile, wanted),
        stored,
    )
    for row in range(ROWS):
        own = tile[row : row + 1] if field.packed else tile[:, row : row + 1]
        stored = field.packing.write(stored, (1, row), slots[row], own, wanted[row])
    for mine, other, old in zip(found, stored, before, strict=True):
        np.testing.assert_array_equal(mine, other)
        assert (np.asarray(mine[1, [0, 1, 3]]) != np.asarray(old[1, [0, 1, 3]])).any((1, 2)).all()
