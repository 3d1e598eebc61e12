"""Reader `coefficients`: a CPU's few queries on a body of coefficients (kvqjax.codecs.klt), with
tokens on the last axis, as stripes store them.

    codes -> coefficients z [R, S] of a group of heads -> keys back^T z [D, S] -> RoPE -> scores -> weights
    sum of weights * z -> after the last block: values

No value is decoded, and no coefficient without bits takes part. Tokens stay on the axis on which
they lie in memory, so that unpacking is one pass of a vector unit, and every product has long rows.

A block's tokens follow each other. So a query is turned back by the position of the block's first
token, and keys are turned as if that were 0."""

import jax
import jax.numpy as jnp

from kvqjax.cache.layout import evenly
from kvqjax.cache.view import BodyCall, Carry, body_view, codes_last, seen
from kvqjax.model.rope import turned_from_first, unrotated
from kvqjax.ops.attention import Partial, finish, folded, grouped, start

# Numbers of decoded keys of all rows together that exist at a time: 4096 tokens of SmolLM2-135M's
# 192 channels. A step of 7680 tokens takes a tenth to a third less than with half as many or
# twice as many (2 cores, 2026-11-29).
NUMBERS = 4096 * 192


def attend_by_coefficients(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body block by block. The carry is empty here."""
    view, tokens, kv_heads = call.view, call.tokens, call.kv_heads
    run, body = view.run, body_view(view, tokens)
    form = run.wiring.fast.coefficients
    assert form is not None  # or this reader would not have taken the body
    batch = call.q.shape[0]
    size = evenly(run, NUMBERS // (batch * run.shape.kv_width))
    q = call.q.astype(jnp.float32)

    def step(j, state):
        codes = codes_last(run, view.state, view.layer, body.at(j, size), size, view.pages)
        z = form.read(codes)
        positions, valid = body.places(j, size)
        first = jnp.broadcast_to(positions[:, :1], tokens.positions.shape)
        queries = grouped(unrotated(q, first, run.shape), kv_heads)  # [B, K, G, T, D]
        k = turned_from_first(form.keys(view.constants, z), run.shape)
        rows = queries.reshape(*queries.shape[:2], -1, queries.shape[4])
        scores = jnp.einsum("bkxd,bkds->bkxs", rows, k, precision="highest")

        def sums(weights):
            """Sum coefficients under weights [B, K, G, T, S]."""
            by_group = weights.reshape(batch, form.groups, -1, size)
            return form.sums(z, by_group).reshape(*queries.shape[:4], -1)

        scores = scores.reshape(*queries.shape[:4], size)
        mask = seen(view, tokens, positions, valid)
        return folded(state, scores, mask, call.ask.softcap, sums)

    unseen = start(grouped(q, kv_heads), form.width)
    partial = finish(jax.lax.fori_loop(*body.blocks(size), step, unseen))
    return partial._replace(out=form.finish(view.constants, partial.out)), carry
