"""One layer's attention to an encoded body as it is stored, without a loop over its blocks: from its packed words by a
kernel, or from fields stored head by head."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvqjax.cache.state import body_tokens
from kvqjax.cache.view import LayerView, NewTokens, body_view, reached, seen
from kvqjax.codecs.kernel_form import Packed
from kvqjax.methods.direct import PIECE, Direct, attend_whole, scaled, slots_read
from kvqjax.ops.allocation import leading_slots
from kvqjax.ops.attention import Partial
from kvqjax.ops.xla import cut_along
from kvqjax.pallas_kernels.dispatch import packed_attention

__all__ = ["attend_packed", "attend_stored"]


def attend_packed(
    q,
    view: LayerView,
    tokens: NewTokens,
    packed: Packed,
    general: Callable[[], Any],
    **also: Any,
) -> Any:
    """Attend to the body straight from its packed words, by a kernel or by the plain form of uniform codes. `also`, and
    what is returned, as in `packed_attention`."""
    run = view.run
    first = run.deal.tokens(jnp.arange(0, run.slots_here, run.block)) + view.sinks
    body = packed.body(view.weights, view.constants, view.state.body, first)
    stop = jnp.broadcast_to(body_tokens(run, view.state)[:, None], tokens.positions.shape)
    if run.sliding is None:
        start = jnp.zeros_like(stop)
    else:
        start = run.deal.share(jnp.maximum(tokens.positions - run.sliding + 1 - view.sinks, 0))
    stop = run.deal.share(stop)
    return packed_attention(q, body, view.layer, start, stop, packed.spec, general, packed.trusted, **also)


def attend_stored(q, kv_heads: int, view: LayerView, tokens: NewTokens, direct: Direct) -> Partial:
    """Attend to the body as it is stored, without a loop over its blocks; where rows are short, to a first part of
    it."""
    run, slots = view.run, view.run.slots_here
    count, cut = slots_read(reached(view), run.block, slots)
    body = jax.tree.map(lambda a: cut_along(a, view.layer, 1, 0), view.state.body)

    def first(source, stored):
        fields = run.wiring.storage.codecs[source].fields
        return {name: leading_slots(field, stored[name], slots, count) for name, field in fields.items()}

    body = body | {"k": first("k", body["k"])}
    if count < slots and direct.part is not None:
        direct = direct._replace(scores=direct.part)
    mask = seen(view, tokens, *body_view(view, tokens).places(0, count))
    piece = math.gcd(PIECE, slots // 2)
    return attend_whole(scaled(q), body, mask, direct, kv_heads, piece, functools.partial(first, "v") if cut else None)
