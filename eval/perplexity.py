"""Perplexity, KL divergence and top-1 agreement with the tokens really passing through the cache.

Modes (every report names its mode):
- loop: every token passes through the cache in chunks of N; later chunks see earlier ones compressed.
- prefill: the first half of each window attends exactly (the papers' prefill); the second half passes through in
  chunks of N and only it is scored.

The exact cache runs beside the compressed one on the same chunks, so `ppl_exact` has the same tokens and positions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax.errors import UserError
from kvqjax.forward import forward, init_cache, prefill
from kvqjax.ledger import ledger
from kvqjax.methods import Method, exact
from kvqjax.model import Model

__all__ = ["Sums", "check_mode", "perplexity", "score_chunk", "score_windows", "windows"]


class Sums(NamedTuple):
    """Sums over scored tokens: negative log-likelihoods with both caches (nats), KL(exact || cache), agreements,
    count."""

    nll: Float[Array, ""]
    nll_exact: Float[Array, ""]
    kld: Float[Array, ""]
    top1: Float[Array, ""]
    tokens: Float[Array, ""]


def windows(ids: np.ndarray, length: int, tokens: int) -> np.ndarray:
    """Non-overlapping windows of `length` ids, the last partial one dropped, about `tokens` ids in all (GPTQ's way)."""
    count = min(len(ids), max(tokens, length)) // length
    if count == 0:
        raise UserError(f"the text has {len(ids)} tokens, fewer than one window of {length}")
    return np.asarray(ids[: count * length], np.int32).reshape(count, length)


def score_chunk(
    logits: Float[Array, "B T V"], reference: Float[Array, "B T V"], targets: Int[Array, "B T"], valid: Array
) -> Sums:
    """Score T predictions of each row; `valid` [B, T] marks those that count."""
    log_p, log_r = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    weight = valid.astype(jnp.float32)

    def nll(x):
        return -(jnp.take_along_axis(x, targets[..., None], -1)[..., 0] * weight).sum()

    kld = (jnp.exp(log_r) * (log_r - log_p)).sum(-1)
    agree = (logits.argmax(-1) == reference.argmax(-1)).astype(jnp.float32)
    return Sums(nll(log_p), nll(log_r), (kld * weight).sum(), (agree * weight).sum(), weight.sum())


@functools.partial(jax.jit, static_argnames=("method", "chunk", "exact_prefix"))
def score_windows(
    model: Model, reference: Model, batch: Int[Array, "B W"], method: Method, chunk: int, exact_prefix: int
):
    """Sums over a batch of windows, one entry per chunk; the first `exact_prefix` tokens are prefilled exactly and not
    scored. `reference` is the model without the method's constants: the exact cache takes none."""
    rows, length = batch.shape
    full = jnp.full((rows,), chunk, jnp.int32)
    caches = (init_cache(model, method, rows, length), init_cache(reference, exact(), rows, length))
    if exact_prefix:
        start = jnp.full((rows,), exact_prefix, jnp.int32)
        caches = tuple(
            prefill(m, batch[:, :exact_prefix], start, c)[1] for m, c in zip((model, reference), caches, strict=True)
        )
    rest = batch[:, exact_prefix:]
    steps = -(-rest.shape[1] // chunk)
    inputs = jnp.pad(rest, ((0, 0), (0, steps * chunk - rest.shape[1])))
    targets = jnp.pad(rest[:, 1:], ((0, 0), (0, steps * chunk - rest.shape[1] + 1)))
    valid = jnp.arange(steps * chunk)[None] < jnp.full((rows, 1), rest.shape[1] - 1)
    split = lambda x: jnp.moveaxis(x.reshape(rows, steps, chunk), 1, 0)  # noqa: E731

    def step(caches, piece):
        tokens, goal, counted, number = piece
        counts = jnp.minimum(full, rest.shape[1] - number * chunk)
        logits, cache = forward(model, tokens, counts, caches[0])
        wanted, plain = forward(reference, tokens, counts, caches[1])
        return (cache, plain), score_chunk(logits, wanted, goal, counted)

    pieces = (split(inputs), split(targets), split(valid), jnp.arange(steps, dtype=jnp.int32))
    return jax.lax.scan(step, caches, pieces)[1]


def check_mode(mode: str, chunk: int, window: int) -> str:
    """The name under which reports carry this mode. Raises UserError for one that does not exist."""
    if mode not in ("loop", "prefill"):
        raise UserError(f"mode={mode!r}; known: loop, prefill")
    if chunk < 1 or window < 2:
        raise UserError(f"chunk={chunk} and window={window}; at least 1 and 2 tokens are needed")
    return f"prefill-exact-chunk{chunk}" if mode == "prefill" else f"in-the-loop-chunk{chunk}"


def perplexity(
    model: Model,
    ids: np.ndarray,
    method: Method,
    *,
    mode: str = "loop",
    chunk: int = 32,
    window: int = 512,
    tokens: int = 8192,
    batch: int = 4,
    progress=lambda done: None,
) -> dict[str, Any]:
    """One row of the report. ids: token ids of the text. window: tokens per window. `progress(fraction)` is called as
    batches finish. `kld` is the mean KL divergence in nats from the exact cache's distribution, `top1` the share of
    positions at which both caches put the same token first. `bits_stored` and `bytes` are the ledger's for one
    window."""
    name = check_mode(mode, chunk, window)
    pieces = windows(ids, window, tokens)
    plain = model.replace(constants=())
    prefix = window // 2 if mode == "prefill" else 0
    parts = []
    for start in range(0, len(pieces), batch):
        got = score_windows(
            model, plain, jnp.asarray(pieces[start : start + batch]), method, min(chunk, window), prefix
        )
        parts.append([float(part.sum()) for part in got])
        progress(min(1.0, (start + batch) / len(pieces)))
    nll, nll_exact, kld, top1, count = np.sum(parts, axis=0)
    book = ledger(jax.eval_shape(lambda: init_cache(model, method, 1, window)))
    return {
        "cache": str(method),
        "mode": name,
        "tokens": int(count),
        "bits_method": book.bits_method,
        "bits_stored": book.bits_stored,
        "bytes": book.bytes,
        "ppl": float(np.exp(nll / count)),
        "ppl_exact": float(np.exp(nll_exact / count)),
        "kld": float(kld / count),
        "top1": float(top1 / count),
    }
