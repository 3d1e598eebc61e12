"""Encoding the one new token of every row at once, as a decode step on a GPU does for methods without a window."""

import functools

import jax

from kvqjax.cache.encoding import Schedule, at_layer, store_tile
from kvqjax.ops.xla import cut_along

__all__ = ["flush_newest"]


def flush_newest(runs, states, news, schedule: Schedule, constants):
    """Do what `flush_chain` does where one new token of each row may be due: all rows' are encoded as one tile. There
    is no loop whose bound is data, because a GPU's host decides on every turn of one."""
    due = schedule.stop > schedule.start

    def layer_step(run, new, fixed, layer, body):
        clock = run.wiring.storage.clocks[0]
        tile = {s: at_layer(new[s], layer)[:, 0] for s in clock.sources}
        payload, _, _ = run.wiring.maps.encode(at_layer(fixed, layer), tile, {})

        def row_step(row, body):
            own = {
                source: {
                    name: cut_along(x, row, 1, 1 if fields[name].kind == "token" else 0)
                    for name, x in payload[source].items()
                }
                for source, fields in ((s, run.wiring.storage.codecs[s].fields) for s in clock.sources)
            }
            return store_tile(run, body, (layer, row), clock, schedule.start[row], own, due[row])

        return jax.lax.fori_loop(0, len(due), row_step, body)

    out = []
    for run, state, new, fixed in zip(runs, states, news, constants, strict=True):
        step = functools.partial(layer_step, run, new, fixed)
        out.append((jax.lax.fori_loop(0, run.count, step, state.body), state.window, new))
    return tuple(out)
