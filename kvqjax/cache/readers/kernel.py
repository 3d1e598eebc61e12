"""Reader `kernel`: a Pallas kernel (pallas_kernels/) reads the body as it is packed.
`python -m kvqjax.pallas_kernels` prints which bodies and chips there are kernels for.

A program may be traced for a chip with a kernel and then lowered for another platform, such as a
CPU that stands in for a TPU. Callers give a function that attends without the kernel. The lowered
program contains one of the two."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvqjax.cache.state import Run
from kvqjax.cache.view import (
    Attend,
    BodyCall,
    Carry,
    LayerView,
    NewTokens,
    beside,
    packed_view,
    seen,
)
from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.dispatch import packed_attention
from kvqjax.pallas_kernels.exact import Recent, room


def attend_by_kernel(call: BodyCall, carry: Carry, without_kernel: Attend) -> tuple[Partial, Carry]:
    """Attend to the body by its kernel.

    Args:
        carry: Empty. No kernel reads layers that feed each other.
        without_kernel: Attends in programs that are lowered for another platform.

    Returns:
        (attention to the body, the carry)."""
    packed, body, start, stop = packed_view(call.view, call.tokens)
    arguments = call.q, body, call.view.layer, start, stop, packed.spec
    partial = packed_attention(
        *arguments,
        lambda: without_kernel(call, carry)[0],
        packed.trusted,
        **row_pages(call.view),
    )
    return partial, carry


def row_pages(view: LayerView) -> dict[str, Array]:
    """Give the argument `pages` of a kernel: the table of pages, where the body lies in pages; else
    no argument."""
    run = view.run
    if not run.page:
        return {}
    assert view.pages is not None
    # The table serves all runs. It may be wider than the rows of this one are long.
    return {"pages": view.pages[:, : run.slots // run.page]}


def recent_of(state: Run, new: dict[str, Array], visible: Int[Array, "B T N"]) -> Recent:
    """Collect the tokens beside a body: sinks, window and new tokens, as the kernel of exact bodies
    takes them.

    Args:
        state: The arrays of the layer's run.
        new: The keys "k" and values "v" of the new tokens, [B, T, W].
        visible: Which of these tokens each query sees (`_visible_recent`).

    Returns:
        The tokens. Sinks and window keep their axis of layers."""
    parts = tuple((x["k"], x["v"]) for x in (state.sinks, state.window) if x)
    return Recent(parts, (new["k"].astype(jnp.bfloat16), new["v"].astype(jnp.bfloat16)), visible)


def _visible_recent(view: LayerView, tokens: NewTokens) -> Int[Array, "B T N"]:
    """Mark which sinks, window slots and new tokens each query sees, 1 or 0.

    Each of the three is padded to as many tokens as the kernel gives it (`room`). The mask is the
    same for all layers of a run, so that XLA can move it out of their loop."""

    def padded(x, blank):
        return jnp.pad(x, ((0, 0), (0, room(x.shape[1]) - x.shape[1])), constant_values=blank)

    places, valid = zip(*beside(view, tokens), strict=True)
    positions = jnp.concatenate([padded(x, 0) for x in places], 1)
    return seen(
        view, tokens, positions, jnp.concatenate([padded(x, False) for x in valid], 1)
    ).astype(jnp.int32)


def attend_with_recent(
    q, view: LayerView, tokens: NewTokens, without_kernel: Callable[[], Partial]
) -> Partial:
    """Attend to all tokens of a layer by one kernel, which reads exact bodies.

    An exact body holds the very vectors that were encoded, so that no query needs to be shown a
    token as encoded. Nothing flows between layers.

    Args:
        q: The queries [B, T, H, D], rotated by RoPE, and not yet multiplied by D^-1/2.
        without_kernel: Attends to the same tokens in programs that are lowered for another
            platform.

    Returns:
        Attention to all tokens."""
    recent = recent_of(view.state, view.new, _visible_recent(view, tokens))
    packed, body, start, stop = packed_view(view, tokens)
    arguments = q, body, view.layer, start, stop, packed.spec
    return packed_attention(
        *arguments, without_kernel, packed.trusted, recent=recent, **row_pages(view)
    )
