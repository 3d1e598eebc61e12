"""Reader `kernel`: a Pallas kernel reads the body as it is packed (pallas_kernels/), for those bodies and chips that
the table of kernels knows.

A program that was traced for a chip may be lowered for something else. `without_kernel` then takes the kernel's
place."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvqjax.cache.readers.reader import Attend, BodyCall, Carry
from kvqjax.cache.state import Run
from kvqjax.cache.view import LayerView, NewTokens, beside, packed_view, seen
from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.dispatch import packed_attention
from kvqjax.pallas_kernels.exact import Recent, room

__all__ = ["attend_by_kernel", "attend_with_recent", "recent_of"]


def attend_by_kernel(call: BodyCall, carry: Carry, without_kernel: Attend) -> tuple[Partial, Carry]:
    """Attend to the body by its kernel, or in a program that is lowered for another chip by `without_kernel`."""
    packed, body, start, stop = packed_view(call.view, call.tokens)
    arguments, pages = (call.q, body, call.view.layer, start, stop, packed.spec), row_pages(call.view)
    if call.view.run.wiring.chain.carry:
        also = pages | {"carry": carry}
        return packed_attention(*arguments, lambda: without_kernel(call, carry), packed.trusted, **also)
    return packed_attention(*arguments, lambda: without_kernel(call, carry)[0], packed.trusted, **pages), carry


def row_pages(view: LayerView) -> dict[str, Array]:
    """Give the table of pages as kernels take it, where the body lies in pages: as wide as this run's rows are long."""
    run = view.run
    if not run.page:
        return {}
    assert view.pages is not None
    return {"pages": view.pages[:, : run.slots // run.page]}


def recent_of(state: Run, new: dict[str, Array], visible: Int[Array, "B T N"]) -> Recent:
    """Collect the tokens beside a body of keys and values, of which queries see what is `visible`."""
    parts = tuple((x["k"], x["v"]) for x in (state.sinks, state.window) if x)
    return Recent(parts, (new["k"].astype(jnp.bfloat16), new["v"].astype(jnp.bfloat16)), visible)


def _visible_recent(view: LayerView, tokens: NewTokens) -> Int[Array, "B T N"]:
    """Mark which sinks, window slots and new tokens each query sees. It is the same for all layers of a run, so
    that XLA can move it out of their loop."""

    def padded(x, blank):
        return jnp.pad(x, ((0, 0), (0, room(x.shape[1]) - x.shape[1])), constant_values=blank)

    places, valid = zip(*beside(view, tokens), strict=True)
    positions = jnp.concatenate([padded(x, 0) for x in places], 1)
    return seen(view, tokens, positions, jnp.concatenate([padded(x, False) for x in valid], 1)).astype(jnp.int32)


def attend_with_recent(q, view: LayerView, tokens: NewTokens, without_kernel: Callable[[], Partial]) -> Partial:
    """Attend to all tokens of a layer by one kernel. Exact bodies hold what was encoded, so that nothing has to be
    shown as encoded, and nothing flows on to the next layer. `without_kernel()` gives the same on another chip."""
    recent = recent_of(view.state, view.new, _visible_recent(view, tokens))
    packed, body, start, stop = packed_view(view, tokens)
    arguments = q, body, view.layer, start, stop, packed.spec
    return packed_attention(*arguments, without_kernel, packed.trusted, recent=recent, **row_pages(view))
