"""One declaration per operand of a TPU kernel: its array, which block of it a grid step sees, and its name.

The grid of every kernel is (row, tile) or (row, split, tile). `invoke` gives a kernel its operands, results and scratch
memory as attributes of one value, `Refs`. Shapes in the declarations are those of the block that the kernel sees.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from kvqjax.pallas_kernels.tpu.plan import VMEM_BYTES

__all__ = ["BY_TOKEN", "KEYS_BY_TOKEN", "InPlace", "Operand", "Refs", "by_row", "by_tile", "fetched", "invoke"]
__all__ += ["constant", "lies_at", "memory", "of_body", "of_layer", "scalars"]

KEYS_BY_TOKEN = ("key_scale", "key_low")
BOUNDS = 3  # numbers of a row in `rows.tile_ends` that are no pages
BY_TOKEN = ("value_scale", "value_low", "key_outliers", "value_outliers", "key_factor")


class Refs(SimpleNamespace):
    """References to a kernel's operands, results and scratch memory by name; None for an operand it does without."""


class Operand(NamedTuple):
    """An array, or a tree of arrays, and the block specs of the same tree."""

    array: Any
    spec: Any


class InPlace(NamedTuple):
    """An array that a kernel reads by blocks of `old` and writes, in place, by blocks of `new`."""

    array: Any
    old: pl.BlockSpec
    new: pl.BlockSpec


def fetched(row, number, ends):
    """Return the tile to fetch where tile `number` is due: the nearest one that the row sees, so that no tile is
    fetched in vain. `ends` is from `rows.tile_ends`."""
    return jnp.clip(number, ends[row, 0], ends[row, 2])


def lies_at(row, number, ends, tiles: int):
    """Return where tile `number` of a row lies in a body's arrays: (row, tile). Where `ends` names a row's pages, of
    `tiles` tiles each, the arrays' rows are pages."""
    if ends.shape[1] == BOUNDS:
        return row, number
    # A tile's number is not negative: division and remainder need not look at its sign.
    return ends[row, BOUNDS + jax.lax.div(number, tiles)], jax.lax.rem(number, tiles)


def _spec(array, lead: Callable) -> pl.BlockSpec:
    """Make a spec of blocks of one along the first axis: number `lead(*step, layer, ends)` of them."""
    zeros = (0,) * (array.ndim - 1)
    return pl.BlockSpec((1, *array.shape[1:]), lambda *at: (lead(*at), *zeros))


def constant(array) -> Operand:
    """Declare an array of which every grid step sees all."""
    return Operand(array, pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim))


def by_row(array) -> Operand:
    """Declare an array [B, ...] of which a grid step sees its row, [1, ...]."""
    return Operand(array, _spec(array, lambda row, *_: row))


def of_layer(array) -> Operand:
    """Declare an array [L, B, ...] of which a grid step sees that of its layer and row, [1, 1, ...]."""
    zeros = (0,) * (array.ndim - 2)
    return Operand(array, pl.BlockSpec((1, 1, *array.shape[2:]), lambda *at: (at[-2][0], at[0], *zeros)))


def by_tile(array, tile: Callable = fetched) -> Operand:
    """Declare an array [tiles, ...] of which a grid step sees the tile that is fetched, `tile(*step, ends)`."""
    return Operand(array, _spec(array, lambda *at: tile(*at[:-2], at[-1])))


def scalars(array) -> Operand:
    """Declare an array of numbers that are read one by one, from scalar memory."""
    return Operand(array, pl.BlockSpec(memory_space=pltpu.SMEM))


def of_body(body, plan, tile: Callable = fetched, by_token: tuple[str, ...] = BY_TOKEN) -> Operand:
    """Declare a body's fields [L, B, ...]: a grid step sees those of its layer, row and tile, [1, 1, ...], by the
    tables of pages where `ends` has them. Fields `by_token` have tokens on the lanes, others on the rows. Constants of
    a layer, [1, W], are seen whole."""
    slots = body.slots  # of a row, or of a page

    def place(at):
        *step, layer, ends = at
        return layer[0], *lies_at(step[0], tile(*step, ends), ends, slots // plan.tile)

    def rows(array):
        if array.ndim == 2:
            return constant(array).spec
        block = (1, 1, plan.tile * array.shape[2] // slots, array.shape[3])
        return pl.BlockSpec(block, lambda *at: (*place(at), 0))

    def tokens(array):
        def index(*at):
            layer, row, number = place(at)
            return layer, row, 0, number

        return pl.BlockSpec((1, 1, array.shape[2], plan.tile), index)

    specs = {name: jax.tree.map(tokens if name in by_token else rows, x) for name, x in body._asdict().items()}
    return Operand(body, body._replace(**specs))


def _result(shape: tuple[int, ...], lead: int) -> pl.BlockSpec:
    """Make the spec of a result of which every step of the `lead` first axes of the grid writes its own [shape]."""
    return pl.BlockSpec((*[1] * lead, *shape), lambda *at: (*at[:lead], *(0,) * len(shape)))


def memory(*shape: int, dtype=jnp.float32):
    """Declare scratch memory of this shape."""
    return pltpu.VMEM(shape, dtype)


def invoke(
    kernel: Callable[[Refs, Any, Any], None],
    plan,
    grid: tuple[int, ...],
    layer: Int[Array, ""] | int,
    ends: Int[Array, "B _"],
    operands: dict[str, Operand | None],
    results: tuple[tuple[int, ...], tuple[int, ...]],
    scratch: dict[str, Any],
    *,
    in_place: dict[str, InPlace] = {},  # noqa: B006 - never written to
    name: str,
    interpret: object,
) -> tuple[Array, ...]:
    """Run `kernel(refs, ends, plan)` on a grid whose last axis are the tiles, in order. `ends` is from
    `rows.tile_ends`. `results` are the shapes of `refs.out` and `refs.lse` for one step of the other axes. These axes
    come first in what is returned, both float32. Names in `scratch` are names in `refs`. Arrays `in_place` are returned
    after the results; their names in `refs` stand for pairs, what is read and what is written."""
    used, lead = {name: operand for name, operand in operands.items() if operand is not None}, grid[:-1]
    kept, first = list(in_place.values()), 2  # after the scalars

    def body(_, ends, *refs):
        *inputs, out, lse = refs[len(kept) : len(kept) + len(used) + 2]
        by_name = dict.fromkeys(operands) | dict(zip(used, inputs, strict=True)) | refs[-1]
        by_name |= dict(zip(in_place, zip(refs[: len(kept)], refs[-1 - len(kept) : -1], strict=True), strict=True))
        kernel(Refs(**by_name, out=out, lse=lse), ends, plan)

    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[*(operand.old for operand in kept), *(operand.spec for operand in used.values())],
            out_specs=[*(_result(shape, len(lead)) for shape in results), *(operand.new for operand in kept)],
            scratch_shapes=[scratch],
        ),
        out_shape=[
            *(jax.ShapeDtypeStruct((*lead, *shape), jnp.float32) for shape in results),
            *(jax.ShapeDtypeStruct(operand.array.shape, operand.array.dtype) for operand in kept),
        ],
        input_output_aliases={first + number: len(results) + number for number in range(len(kept))},
        # Bounds checks would be scalar work for every copy of every step: what `fetched` names lies within the arrays.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[*[pltpu.PARALLEL] * len(lead), pltpu.ARBITRARY],
            vmem_limit_bytes=VMEM_BYTES,
            disable_bounds_checks=True,
        ),
        name=name,
        interpret=interpret,
    )
    arrays = (operand.array for operand in (*kept, *used.values()))
    return tuple(call(jnp.asarray(layer, jnp.int32).reshape(1), ends, *arrays))
