"""One cache in another storage form: layers as stacks or each by itself; bodies in planes, in lines and stripes, or
head by head. The codes are the same numbers in every form. Saved caches all have one form, `CANONICAL`."""

import dataclasses

import jax
import jax.numpy as jnp

from kvqjax._errors import UserError
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run
from kvqjax.ops import packing
from kvqjax.ops.packing import Packing, Stored

__all__ = ["CANONICAL", "convert"]

CANONICAL = {"layers": "scan", "form": "planes"}

Member = tuple[RunLayout, Run, int]  # one layer: its run, the run's state, the layer's number in it


def convert(cache: Cache, *, layers: str, form: str) -> Cache:
    """Store a cache in another form.

    Args:
        cache: any cache. Where its blocks are dealt over devices, this runs inside `shard_map`, on each device's part.
        layers: as `CacheLayout.layers`.
        form: as `CacheLayout.form`.

    Returns:
        The same cache, with these in its layout. It shares the arrays that do not change with `cache`.

    Raises:
        UserError: a dealt cache is to change its form outside `shard_map`.
    """
    layout = dataclasses.replace(cache.layout, layers=layers, form=form)
    if layout == cache.layout:
        return cache
    if layout.dealt > 1 and not layout.dealt_over and form != cache.layout.form:
        raise UserError(f"a cache whose blocks are dealt over {layout.dealt} devices changes its form on its mesh only")
    pairs = zip(runs_of(cache.layout), cache.runs, strict=True)
    members = [(run, state, index) for run, state in pairs for index in range(run.count)]
    runs = tuple(_run(run, members[run.first : run.first + run.count]) for run in runs_of(layout))
    return cache.replace(runs=runs, states=_states(cache, layers), layout=layout)


def _states(cache: Cache, layers: str) -> tuple[dict, ...]:
    """Store the states of recurrent layers as one stack, or each by itself."""
    if not cache.states or layers == cache.layout.layers:
        return cache.states
    if layers == "scan":
        return (jax.tree.map(lambda *parts: _joined(list(parts)), *cache.states),)
    assert cache.layout.shape.recurrent is not None
    count = len(cache.layout.shape.recurrent.layers)
    return tuple(_cut(cache.states[0], index, count) for index in range(count))


def _run(run: RunLayout, members: list[Member]) -> Run:
    """Make the arrays of a run whose layers are `members`."""

    def field(source: str, name: str, new: Packing) -> Stored:
        """Pack one field of all members anew, and stack the layers."""
        parts = []
        for old_run, state, index in members:
            old = old_run.wiring.storage.codecs[source].fields[name].packing
            stored = _cut(state.body[source][name], index, old_run.count)
            parts.append(_packed_anew(old, new, stored, old_run.slots_here, run.slots_here))
        # A field may be stored in several arrays. Each is stacked by itself.
        return tuple(_joined(list(layers)) for layers in zip(*parts, strict=True))

    body = {}
    for source, codec in run.wiring.storage.codecs.items() if run.slots else ():
        body[source] = {name: field(source, name, new.packing) for name, new in codec.fields.items()}
    exact = [_cut((state.sinks, state.window), index, old_run.count) for old_run, state, index in members]
    sinks, window = jax.tree.map(lambda *parts: _joined(list(parts)), *exact)
    # Layers of a run have encoded equally many units, so that the counts of the first stand for all.
    first_state = members[0][1]
    return Run(body=body, sinks=sinks, window=window, flushed=first_state.flushed)


def _packed_anew(old: Packing, new: Packing, stored: Stored, slots: int, new_slots: int) -> Stored:
    """Pack one layer's field in another way. The number of slots may change, since blocks depend on the form."""
    if old == new:
        return old.resized(stored, slots, new_slots)
    return packing.convert(old, new, stored, slots, new_slots)


def _cut(tree, index: int, count: int):
    """Cut layer `index` out of a run of `count`, as a stack of one."""
    return tree if count == 1 else jax.tree.map(lambda a: a[index : index + 1], tree)


def _joined(parts: list):
    """Stack arrays [1, ...] of layers. Of a single layer the array itself is returned, not a copy."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
