"""One cache in another storage form: layers as stacks or apart, bodies in planes, in lines and stripes, or head by
head. The codes are the same numbers in every form; what is on disk has one, `CANONICAL`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvqjax._errors import UserError
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run
from kvqjax.ops.allocation import allocate
from kvqjax.ops.head_major import HALF
from kvqjax.ops.layout import Field, Stored, read, write

__all__ = ["CANONICAL", "convert"]

CANONICAL = {"layers": "scan", "form": "planes"}


@functools.partial(jax.jit, static_argnames=("old", "new", "held", "slots"))
def _rewritten(old: Field, new: Field, stored: Stored, held: int, slots: int) -> Stored:
    """Read one layer's field, [1, B, ...], of `held` slots in one form and write it in another with `slots` slots, HALF
    tokens at a time. Blocks of forms differ in size; slots that only one of them has hold no token."""
    rows, both = stored[0].shape[1], min(held, slots)
    tiles = read(old, stored, 0, 0, held)[:, :both].reshape(rows, -1, HALF, old.width)

    def put(number, out):
        row, piece = number // tiles.shape[1], number % tiles.shape[1]
        return write(new, out, (jnp.int32(0), row), piece * HALF, tiles[row, piece])

    return jax.lax.fori_loop(0, rows * tiles.shape[1], put, allocate(new, (1, rows), slots))


def _resized(field: Field, stored: Stored, held: int, slots: int) -> Stored:
    """Give one layer's field `slots` instead of `held` slots."""
    axis = field.slots_axis

    def one(x):
        more = x.shape[axis] * slots // held - x.shape[axis]
        if more < 0:
            return jax.lax.slice_in_dim(x, 0, x.shape[axis] + more, axis=axis)
        return jnp.concatenate([x, jnp.zeros_like(jax.lax.slice_in_dim(x, 0, more, axis=axis))], axis)

    return stored if slots == held else tuple(map(one, stored))


def _joined(parts: list):
    """Join [1, ...] arrays of layers to one stack; give the very array of a single layer."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _cut(tree, index: int, count: int):
    """Cut layer `index` out of a run of `count`, as a stack of one."""
    return tree if count == 1 else jax.tree.map(lambda a: a[index : index + 1], tree)


def _run(run: RunLayout, members: list[tuple[RunLayout, Run, int]]) -> Run:
    """Make the arrays of a run whose layers come from `members`: (run, state, number in it)."""

    def field(source: str, name: str, wanted: Field) -> Stored:
        parts = []
        for plan_, state, index in members:
            own = _cut(state.body[source][name], index, plan_.count)
            has = plan_.wiring.storage.codecs[source].fields[name]
            change = _resized if has == wanted else functools.partial(_rewritten, new=wanted)
            parts.append(change(has, stored=own, held=plan_.slots_here, slots=run.slots_here))
        return tuple(map(_joined, map(list, zip(*parts, strict=True))))

    body = {s: {n: field(s, n, f) for n, f in codec.fields.items()} for s, codec in run.wiring.storage.codecs.items()}
    exact = [_cut((state.sinks, state.window), index, plan_.count) for plan_, state, index in members]
    sinks, window = jax.tree.map(lambda *parts: _joined(list(parts)), *exact)
    return Run(body=body if run.slots else {}, sinks=sinks, window=window, flushed=members[0][1].flushed)


def convert(cache: Cache, *, layers: str, form: str) -> Cache:
    """Hold the same cache's layers and bodies otherwise (`CacheLayout.layers`, `.form`); arrays that do not change are
    shared with it. A cache that is dealt over devices changes its form inside `shard_map`, each device its own part;
    raises UserError elsewhere."""
    layout = dataclasses.replace(cache.layout, layers=layers, form=form)
    if layout == cache.layout:
        return cache
    if layout.dealt > 1 and not layout.dealt_over and form != cache.layout.form:
        raise UserError(f"a cache whose blocks are dealt over {layout.dealt} devices changes its form on its mesh only")
    pairs = zip(runs_of(cache.layout), cache.runs, strict=True)
    held = [(run, state, index) for run, state in pairs for index in range(run.count)]
    runs = tuple(_run(run, held[run.first : run.first + run.count]) for run in runs_of(layout))
    return cache.replace(runs=runs, layout=layout)
