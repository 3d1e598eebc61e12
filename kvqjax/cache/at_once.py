"""All attention of a layer by one kernel, which takes the tokens beside a body as well (sinks, window, new ones).

Otherwise XLA runs some thirty small operations a layer for those few tokens and for merging them with the body, and on
a TPU each takes as long as the keys and values of a few hundred tokens take its memory."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvqjax.cache.chunk_paths import MANY_QUERIES
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.segments import attend_parts
from kvqjax.cache.state import Run
from kvqjax.cache.view import LayerView, NewTokens, beside, seen
from kvqjax.cache.whole_body import attend_packed
from kvqjax.ops.attention import Partial, merge, total_lse
from kvqjax.pallas_kernels.dispatch import path
from kvqjax.pallas_kernels.exact import Recent, room

__all__ = ["attend_in_one", "recent_of", "seen_beside"]

MOST_BESIDE = 512  # tokens beside a body: their keys and values lie in fast memory as a whole


def _is_one_call(run: RunLayout, sinks: int, tokens: NewTokens) -> bool:
    """Say whether one kernel takes all tokens that the queries of `tokens` see in a layer of a `joint` run."""
    length, packed = tokens.positions.shape[1], run.wiring.fast.packed
    if packed is None or not run.slots or run.wraps or run.deal.parts > 1:
        return False
    if tokens.stored is not None or length >= MANY_QUERIES or sinks + run.ring + length > MOST_BESIDE:
        return False
    group = run.shape.num_heads // run.shape.num_kv_heads
    return path(packed.spec, group, run.slots, length, packed.trusted) == "tpu"


def seen_beside(view: LayerView, tokens: NewTokens) -> Int[Array, "B T N"] | None:
    """Mark which sinks, window slots and new tokens each query sees, as a kernel that takes them wants it; None where
    there is no such kernel. It is the same for all layers of a run."""
    if not view.run.joint or not _is_one_call(view.run, view.sinks, tokens):
        return None

    def padded(x, blank):
        return jnp.pad(x, ((0, 0), (0, room(x.shape[1]) - x.shape[1])), constant_values=blank)

    places, valid = zip(*beside(view, tokens), strict=True)
    positions = jnp.concatenate([padded(x, 0) for x in places], 1)
    return seen(view, tokens, positions, jnp.concatenate([padded(x, False) for x in valid], 1)).astype(jnp.int32)


def recent_of(state: Run, new: dict, visible: Int[Array, "B T N"]) -> Recent:
    """Collect the tokens beside a body of keys and values, of which queries see what is `visible`."""
    held = tuple((x["k"], x["v"]) for x in (state.sinks, state.window) if x)
    return Recent(held, (new["k"].astype(jnp.bfloat16), new["v"].astype(jnp.bfloat16)), visible)


def attend_in_one(q, view: LayerView, tokens: NewTokens, recode: bool, visible: Int[Array, "B T N"]) -> Partial:
    """Attend to all tokens of a layer by one kernel; `visible` is from `seen_beside`. Exact bodies hold what was
    encoded, so that nothing has to be shown as encoded, and nothing flows on to the next layer."""

    def merged():
        parts, *_ = attend_parts(q, view, tokens, recode, {}, {})
        return Partial(merge(*parts), total_lse(*parts))

    packed, recent = view.run.wiring.fast.packed, recent_of(view.state, view.new, visible)
    assert packed is not None  # or there was nothing `visible`
    return attend_packed(q, view, tokens, packed, merged, recent=recent)
