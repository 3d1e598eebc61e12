"""Declare the operands of TPU kernels, and call the kernels.

A declaration (`Operand`) has an operand's array and says which block of it a grid step sees. The
grid of every kernel is (row, tile) or (row, split, tile). `invoke` gives a kernel its operands,
results and scratch memory as attributes of one value, `Refs`. Shapes in the declarations are those
of the block that the kernel sees.

Functions that choose a block get the numbers of the grid step, then two arrays in scalar memory:
`layer` [1] and `ends` from `rows.tile_ends`.
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

BOUNDS = 3  # numbers of a row in `rows.tile_ends` that are no pages
# Fields of a body that have tokens on the lanes, in every form, and where keys have their scales
# per token.
BY_TOKEN = ("value_scale", "value_low", "key_outliers", "value_outliers", "key_factor")
KEYS_BY_TOKEN = ("key_scale", "key_low")


class Refs(SimpleNamespace):
    """References to a kernel's operands, results and scratch memory by name; None for an operand it
    does without."""


class Operand(NamedTuple):
    """An array, or a tree of arrays, and the block specs of the same tree."""

    array: Any
    spec: Any


def fetched(row, number, ends):
    """Return the tile to fetch where tile `number` is due: the nearest one that the row sees. A
    block that is the same as in the step before is not fetched again, so that no tile is fetched in
    vain."""
    return jnp.clip(number, ends[row, 0], ends[row, 2])


def lies_at(row, number, ends, tiles: int):
    """Return where tile `number` of a row lies in a body's arrays: (row of the arrays, tile). Where
    `ends` names the row's pages, of `tiles` tiles each, the rows of the arrays are pages."""
    if ends.shape[1] == BOUNDS:
        return row, number
    # A tile's number is not negative: division and remainder need not look at its sign.
    return ends[row, BOUNDS + jax.lax.div(number, tiles)], jax.lax.rem(number, tiles)


def _spec(array, lead: Callable) -> pl.BlockSpec:
    """Make a spec of blocks of size 1 along the first axis. `lead(*step, layer, ends)` is the
    number of the block."""
    zeros = (0,) * (array.ndim - 1)

    def index(*at):
        return lead(*at), *zeros

    return pl.BlockSpec((1, *array.shape[1:]), index)


def constant(array) -> Operand:
    """Declare an array that every grid step sees whole."""
    return Operand(array, pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim))


def by_row(array) -> Operand:
    """Declare an array [B, ...]. A grid step sees its row, [1, ...]."""
    return Operand(array, _spec(array, lambda row, *_: row))


def of_layer(array) -> Operand:
    """Declare an array [L, B, ...]. A grid step sees its layer and row, [1, 1, ...]."""
    zeros = (0,) * (array.ndim - 2)

    def index(row, *at):
        layer = at[-2]
        return layer[0], row, *zeros

    return Operand(array, pl.BlockSpec((1, 1, *array.shape[2:]), index))


def by_tile(array, tile: Callable = fetched) -> Operand:
    """Declare an array [tiles, ...]. A grid step sees the tile that is fetched, `tile(*step,
    ends)`."""

    def number(*at):
        *step, _, ends = at
        return tile(*step, ends)

    return Operand(array, _spec(array, number))


def scalars(array) -> Operand:
    """Declare an array of numbers that are read one by one, from scalar memory."""
    return Operand(array, pl.BlockSpec(memory_space=pltpu.SMEM))


def of_body(body, plan, tile: Callable = fetched, by_token: tuple[str, ...] = BY_TOKEN) -> Operand:
    """Declare a body's fields [L, B, ...]. A grid step sees its layer, row and tile, [1, 1, ...].

    Args:
        body: A named tuple of fields. Constants of a layer, [1, W], are seen whole.
        plan: Has `tile`, the tokens of a tile.
        tile: `tile(*step, ends)` is the number of the tile that is fetched.
        by_token: Names of the fields that have tokens on the lanes. Others have tokens on the rows.

    Returns:
        One operand, whose references are a named tuple like `body`."""
    slots = body.slots  # of a row, or of a page

    def place(at):
        """Find (layer, row of the arrays, tile) for a grid step."""
        *step, layer, ends = at
        row = step[0]
        return layer[0], *lies_at(row, tile(*step, ends), ends, slots // plan.tile)

    def rows(array):
        """Make the spec of a field with tokens on the rows."""
        if array.ndim == 2:
            return constant(array).spec
        # A row may hold several tokens (words, scales of groups): a tile has its share of the rows.
        block = (1, 1, plan.tile * array.shape[2] // slots, array.shape[3])
        return pl.BlockSpec(block, lambda *at: (*place(at), 0))

    def tokens(array):
        """Make the spec of a field with tokens on the lanes."""

        def index(*at):
            layer, row, number = place(at)
            return layer, row, 0, number

        return pl.BlockSpec((1, 1, array.shape[2], plan.tile), index)

    specs = {}
    for name, field in body._asdict().items():
        spec_of = tokens if name in by_token else rows
        specs[name] = jax.tree.map(spec_of, field)
    return Operand(body, body._replace(**specs))


def _result(shape: tuple[int, ...], lead: int) -> pl.BlockSpec:
    """Make the spec of a result. Every step of the `lead` first axes of the grid writes its own
    [shape]."""
    zeros = (0,) * len(shape)
    return pl.BlockSpec((*[1] * lead, *shape), lambda *at: (*at[:lead], *zeros))


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
    name: str,
    interpret: object,
) -> tuple[Array, Array]:
    """Run a kernel.

    Args:
        kernel: Called as `kernel(refs, ends, plan)` for every step of the grid.
        plan: What the kernel gets.
        grid: Its last axis are the tiles, which are worked off in order.
        ends: Which tiles the rows see, from `rows.tile_ends`.
        operands: What the kernel reads, by its name in `refs`; None: the kernel gets None.
        results: Shapes of `refs.out` and `refs.lse` for one step of the grid's other axes.
        scratch: Declarations of working memory, by its name in `refs`.
        interpret: As in `pl.pallas_call`.

    Returns:
        `out` and `lse`, float32, with all axes of the grid but the last one before the shapes in
        `results`."""
    used = {name: operand for name, operand in operands.items() if operand is not None}
    lead = grid[:-1]

    def body(_, ends, *refs):
        *inputs, out, lse, memories = refs
        # None for the operands that the kernel does without.
        by_name = dict.fromkeys(operands) | dict(zip(used, inputs, strict=True)) | memories
        kernel(Refs(**by_name, out=out, lse=lse), ends, plan)

    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[operand.spec for operand in used.values()],
            out_specs=[_result(shape, len(lead)) for shape in results],
            scratch_shapes=[scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct((*lead, *shape), jnp.float32) for shape in results],
        # All tiles that `fetched` names lie within the arrays. Bounds checks would be scalar work
        # for every copy of every step.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[*[pltpu.PARALLEL] * len(lead), pltpu.ARBITRARY],
            vmem_limit_bytes=VMEM_BYTES,
            disable_bounds_checks=True,
        ),
        name=name,
        interpret=interpret,
    )
    arrays = (operand.array for operand in used.values())
    out, lse = call(jnp.asarray(layer, jnp.int32).reshape(1), ends, *arrays)
    return out, lse
