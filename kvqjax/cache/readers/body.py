"""Attention to one layer's encoded body, by the reader that the table chooses (kvqjax/cache/reading.py)."""

from kvqjax.cache.readers.blocks import attend_by_blocks
from kvqjax.cache.readers.decoded import attend_decoded
from kvqjax.cache.readers.kernel import attend_by_kernel
from kvqjax.cache.readers.reader import Attend, BodyCall, Carry
from kvqjax.cache.readers.stored import attend_stored
from kvqjax.cache.readers.tiles import attend_in_tiles
from kvqjax.cache.reading import Ask, reader_of, reader_without_kernel, shared_values
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.ops.attention import Partial

__all__ = ["ask_of", "attend_body"]


def _attend_without_kernel(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    return ATTEND[reader_without_kernel(call.ask)](call, carry)


ATTEND: dict[str, Attend] = {
    "kernel": lambda call, carry: attend_by_kernel(call, carry, _attend_without_kernel),
    "stored": attend_stored,
    "decoded": attend_decoded,
    "tiles": attend_in_tiles,
    "blocks": attend_by_blocks,
}


def ask_of(q, view: LayerView, tokens: NewTokens, softcap: float | None = None) -> Ask:
    """Say what is known of a layer's attention to its body."""
    dtype = next(iter(view.new.values())).dtype.name
    return Ask(view.run, *q.shape[:2], evicted=tokens.stored is not None, softcap=softcap, dtype=dtype)


def attend_body(
    q, view: LayerView, tokens: NewTokens, carry: Carry, softcap: float | None = None
) -> tuple[Partial, Carry]:
    """Attend to the encoded tokens of one layer that lie here.

    Args:
        q: [B, T, H, D] queries with their rotation, and without the D^-1/2.
        carry: What the layer below reconstructed of every body token, [B, slots_here, W] per name; this layer's takes
            its place in what is returned."""
    ask = ask_of(q, view, tokens, softcap)
    shared = shared_values(ask)
    frame = view.run.wiring.maps.frame
    if frame is not None:  # once for all of the body, here and at the end
        q = frame.queries(view.constants, q)
    partial, carry = ATTEND[reader_of(ask)](BodyCall(ask, q, view, tokens, shared), carry)
    if shared is not None:
        partial = partial._replace(out=shared.finish(view.weights, view.constants, partial.out))
    if frame is not None:
        partial = partial._replace(out=frame.outputs(view.constants, partial.out))
    return partial, carry
