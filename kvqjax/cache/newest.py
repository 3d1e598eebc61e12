"""Encoding the one new token of every row at once, as a decode step on a GPU does for methods without a window."""

import functools

from kvqjax.cache.encoding import Schedule, at_layer, each_layer, store_fields
from kvqjax.cache.run_layout import RunLayout
from kvqjax.ops.xla_workarounds import given_to_gpus, modulo

__all__ = ["are_written_at_once", "flush_newest"]


def are_written_at_once(run: RunLayout) -> bool:
    """Say whether `flush_newest` can write all fields of a body."""
    fields = [field for codec in run.wiring.storage.codecs.values() for field in codec.fields.values()]
    return all(field.packing.scatters for field in fields)


def flush_newest(runs, states, news, schedule: Schedule, constants):
    """Do what `flush_chain` does where one new token of each row may be due: all rows' are encoded as one tile, and
    each array takes them by one scatter, which a GPU runs in place as one kernel. There is no loop whose bound is data,
    because a GPU's host decides on every turn of one."""
    due = schedule.stop > schedule.start

    def layer_step(run, new, fixed, layer, body):
        clock = run.wiring.storage.clocks[0]
        tile = {s: at_layer(new[s], layer)[:, 0] for s in clock.sources}
        payload, _, _ = run.wiring.maps.encode(at_layer(fixed, layer), tile, {})
        here, slots = run.deal.place(modulo(schedule.start, run.slots))
        here, slots = given_to_gpus((due if here is None else due & here, slots))
        put = lambda field, stored, tile: field.packing.scatter(stored, layer, slots, tile, here)  # noqa: E731
        return store_fields(run, body, clock, payload, put)

    out = []
    for run, state, new, fixed in zip(runs, states, news, constants, strict=True):
        step = functools.partial(layer_step, run, new, fixed)
        out.append((each_layer(run.count, step, state.body), state.window, new))
    return tuple(out)
