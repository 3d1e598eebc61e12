"""Reader `stored`: XLA computes with the codes where they lie, and nothing is decoded into memory.

Two forms of bodies allow it:

    head by head               the whole body is read in a handful of products (kvqjax/methods/direct.py), on GPUs
    words of uniform codes     sums decode one block after the other as they add it up (pallas_kernels/reference.py), on
                               CPUs"""

import functools
import math

import jax

from kvqjax.cache.layout import reads_by_heads
from kvqjax.cache.view import BodyCall, Carry, body_view, packed_view, reached, seen
from kvqjax.methods.direct import PIECE, attend_whole, scaled, slots_read
from kvqjax.ops.attention import Partial
from kvqjax.ops.xla_workarounds import cut_along
from kvqjax.pallas_kernels import reference
from kvqjax.pallas_kernels.packed import PackedSpec


def attend_stored(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body by products with all of it, or by sums over its words. The carry is empty
    here."""
    attend = _attend_by_heads if reads_by_heads(call.ask) else _attend_by_words
    return attend(call), carry


def _attend_by_heads(call: BodyCall) -> Partial:
    """Attend to a body that lies head by head. Where rows are promised to be short, only its first
    slots are read."""
    view, run = call.view, call.view.run
    slots = run.slots_here
    direct = run.wiring.fast.direct
    assert direct is not None  # or this reader would not have taken the body
    count, cut_values = slots_read(reached(view), run.block, slots)
    # Of this layer, [1, B, ..]
    body = jax.tree.map(lambda a: cut_along(a, view.layer, 1, 0), view.state.body)

    def first_slots(source, stored):
        """Cut the first `count` slots out of all fields of a source."""
        fields = run.wiring.storage.codecs[source].fields
        return {
            name: field.packing.first_slots(stored[name], slots, count)
            for name, field in fields.items()
        }

    body = body | {"k": first_slots("k", body["k"])}
    if count < slots and direct.part is not None:
        direct = direct._replace(scores=direct.part)
    mask = seen(view, call.tokens, *body_view(view, call.tokens).places(0, count))
    cut = functools.partial(first_slots, "v") if cut_values else None
    # A stored number holds the codes of one token or of two, so that a body has `slots` or half as
    # many stored rows. Pieces divide both.
    piece = math.gcd(PIECE, slots // 2)
    return attend_whole(
        scaled(call.q), body, mask, direct, call.kv_heads, piece, cut, call.ask.softcap
    )


def _attend_by_words(call: BodyCall) -> Partial:
    """Attend to a body of words of uniform codes."""
    packed, body, start, stop = packed_view(call.view, call.tokens)
    assert isinstance(packed.spec, PackedSpec)
    view, softcap = call.view, call.ask.softcap
    return reference.packed_attention(
        call.q, body, view.layer, start, stop, packed.spec, softcap, view.pages
    )
