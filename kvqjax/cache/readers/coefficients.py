"""Reader `coefficients`: few queries on a body of coefficients (kvqjax.codecs.klt).

    codes -> coefficients z of a group of heads -> keys z B + mean -> RoPE -> scores -> weights
    sum of weights * z -> after the last block: values

No value is decoded, and no coefficient without bits takes part.

*CPUs* (`attend_by_coefficients`) read block by block. Stripes store tokens on the last axis, where
they stay: unpacking is one pass of a vector unit, and every product has long rows. So z is [R, S],
and keys are B^T z, [D, S].

*GPUs* read large parts, one after the other (kvqjax/cache/readers/decoded.py). `direct_from` gives
the functions of a part. Every array is as the next product wants it, head by head: z is [G, S, R].
Without that XLA wrote keys four times and read them five times.

Tokens of a block or part follow each other. So a query is turned back by the position of the first
token, and keys are turned as if that were 0."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvqjax.cache.layout import evenly
from kvqjax.cache.view import BodyCall, Carry, body_view, codes_last, seen
from kvqjax.methods.direct import Direct, summed
from kvqjax.methods.layer_cache import Coefficients
from kvqjax.model.config import KVShape
from kvqjax.model.rope import Waves, rotate, turned_from_first, unrotated
from kvqjax.ops.attention import Partial, finish, folded, grouped, start
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla_workarounds import row_major

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
        z = form.read_last(codes)
        positions, valid = body.places(j, size)
        first = jnp.broadcast_to(positions[:, :1], tokens.positions.shape)
        queries = grouped(unrotated(q, first, run.shape), kv_heads)  # [B, K, G, T, D]
        k = turned_from_first(_keys_last(form, view.constants, z["k"], run.shape), run.shape)
        rows = queries.reshape(*queries.shape[:2], -1, queries.shape[4])
        scores = jnp.einsum("bkxd,bkds->bkxs", rows, k, precision="highest")

        def sums(weights):
            """Sum coefficients under weights [B, K, G, T, S]."""
            by_group = weights.reshape(batch, form.groups, -1, size)
            sums_by_source = [
                jnp.einsum("bgxs,bgrs->bgxr", by_group, z[source], precision="highest")
                for source in "kv"
            ]
            return jnp.concatenate(sums_by_source, -1).reshape(*queries.shape[:4], -1)

        scores = scores.reshape(*queries.shape[:4], size)
        mask = seen(view, tokens, positions, valid)
        return folded(state, scores, mask, call.ask.softcap, sums)

    unseen = start(grouped(q, kv_heads), form.width)
    partial = finish(jax.lax.fori_loop(*body.blocks(size), step, unseen))
    return partial._replace(out=form.finish(view.constants, partial.out)), carry


def _keys_last(form: Coefficients, constants, z, shape: KVShape):
    """Make keys [B, K, D, S] before RoPE of their coefficients [B, G, R, S]."""
    matrices, mean = form.keys(constants)
    back = jnp.swapaxes(matrices, 1, 2)
    # One for every row: with the axis of rows in one factor alone, XLA would give the product
    # another order of axes, and transpose it.
    back = jnp.broadcast_to(back, (len(z), *back.shape))
    k = jnp.einsum("bgwr,bgrs->bgws", back, z, precision="highest")
    k = k + mean.astype(jnp.float32)[None, :, :, None]
    return k.reshape(len(k), shape.num_kv_heads, shape.head_dim, -1)


def direct_from(
    form: Coefficients,
    constants,
    payload: Callable,
    after,
    waves: Waves | None,
    shape: KVShape,
    dtype,
) -> Direct:
    """Make the functions that score a part's keys and sum its coefficients on a GPU.

    Args:
        form: How the body holds coefficients.
        constants: Those of the layer.
        payload: `payload(after)` reads the part's codes, once `after` has been computed.
        after: What the keys' codes wait for. Those of values wait for the softmax weights.
        waves: The turns of keys, from the part's first token on; None: keys are not turned.
        shape: That of the layer.
        dtype: That of coefficients and keys."""

    def coefficients(source: str, after):
        """Read the coefficients of a source, [B, G, S, R]."""
        z = jnp.swapaxes(form.read(source, payload(after)[source]), 1, 2)
        return row_major(saturated(z, dtype))

    def keys(z):
        """Make turned keys [B, K, S, D] of their coefficients."""
        matrices, mean = form.keys(constants)
        # One for every row, as for CPUs.
        back = jnp.broadcast_to(matrices.astype(dtype), (len(z), *matrices.shape))
        k = jnp.einsum("bgsr,bgrw->bgsw", z, back, preferred_element_type=jnp.float32)
        # The product ends here: with the mean added to it, XLA would write a mean for every token.
        k = row_major(saturated(k, dtype)).astype(jnp.float32)
        k = k + mean.astype(jnp.float32)[None, :, None]
        heads = shape.num_kv_heads // form.groups  # of a group
        k = jnp.swapaxes(k.reshape(*k.shape[:3], heads, -1), 2, 3)  # [B, G, heads, S, D]
        k = k.reshape(len(k), shape.num_kv_heads, -1, shape.head_dim)
        if waves is not None:
            of_heads = Waves(*(wave[None] for wave in waves))  # [1, 1, S, P]
            k = rotate(k[:, :, :, None], of_heads, shape)[:, :, :, 0]
        return row_major(saturated(k, dtype))

    z_of_keys = coefficients("k", after)

    def scores(rows, _):
        """Compute the scores of query rows [B, K, X, D]: one plane [B, K, X, S]."""
        return [
            jnp.einsum("bkxd,bksd->bkxs", rows, keys(z_of_keys), preferred_element_type=jnp.float32)
        ]

    def values(weights, _, __, piece):
        """Sum coefficients under the weights, one plane [B, K, X, S]: [B, K, X, N]."""
        lead = weights[0].shape[:3]
        # The query rows of a group's KV heads meet the same coefficients.
        by_group = weights[0].astype(dtype).reshape(lead[0], form.groups, -1, weights[0].shape[3])
        z_of_values = coefficients("v", weights[0])
        sums = [summed(by_group, z, piece) for z in (z_of_keys, z_of_values)]
        return jnp.concatenate(sums, -1).reshape(*lead, -1)

    return Direct(scores, values)
