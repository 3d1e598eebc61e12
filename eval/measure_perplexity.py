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
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_counts, check_integer
from kvqjax._errors import UserError
from kvqjax.cache import CacheLayout
from kvqjax.data.tokens import TextLike, token_ids
from kvqjax.eval.scores import negative_log_likelihood, token_scores
from kvqjax.eval.stamp import CONTEXT, bytes_of
from kvqjax.eval.through import through
from kvqjax.eval.windows import style, windows
from kvqjax.methods import Method, MethodLike, exact, parse
from kvqjax.model.loading import Model
from kvqjax.step.doors import check_model
from kvqjax.step.new_cache import empty_cache, planned_layout
from kvqjax.step.prefill import prefill

__all__ = ["Sums", "cache_layouts", "check_mode", "perplexity", "score_chunk", "score_windows"]


class Sums(NamedTuple):
    """Sums over scored tokens: negative log-likelihoods with both caches (nats), KL(exact || cache), agreements,
    count."""

    nll: Float[Array, ""]
    nll_exact: Float[Array, ""]
    kld: Float[Array, ""]
    top1: Float[Array, ""]
    tokens: Float[Array, ""]


def score_chunk(
    logits: Float[Array, "B T V"],
    reference: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Sums:
    """Score T predictions of each row; `valid` marks those that count."""
    scores, weight = token_scores(logits, reference, targets), valid.astype(jnp.float32)
    total = lambda x: (x.astype(jnp.float32) * weight).sum()  # noqa: E731
    exact_nll = negative_log_likelihood(reference, targets)
    return Sums(total(scores.nll), total(exact_nll), total(scores.kld), total(scores.agree), weight.sum())


@functools.partial(jax.jit, static_argnames=("layouts", "chunk", "exact_prefix", "scored_from"))
def score_windows(
    model: Model,
    reference: Model,
    batch: Int[Array, "B T"],
    layouts: tuple[CacheLayout, CacheLayout],
    chunk: int,
    exact_prefix: int,
    scored_from: int = 0,
) -> Sums:
    """Sums over a batch of windows, one entry per chunk. The first `exact_prefix` tokens are prefilled exactly;
    predictions made there or at positions before `scored_from` are not scored. `reference` is the model without the
    method's constants: the exact cache takes none. `layouts` are those of both caches (`cache_layouts`)."""
    rows, models = len(batch), (model, reference)
    caches = tuple(empty_cache(m, layout, rows) for m, layout in zip(models, layouts, strict=True))
    if exact_prefix:
        start = jnp.full((rows,), exact_prefix, jnp.int32)
        caches = tuple(prefill(m, batch[:, :exact_prefix], start, c)[1] for m, c in zip(models, caches, strict=True))
    rest = batch[:, exact_prefix:]
    counts = jnp.full((rows,), rest.shape[1], jnp.int32)
    score = lambda logits, targets, valid: score_chunk(logits[0], logits[1], targets, valid)  # noqa: E731
    return through(models, caches, rest, counts, chunk, score, max(0, scored_from - exact_prefix))


def cache_layouts(
    model: Model, reference: Model, method: Method, rows: int, length: int, kernels: str
) -> tuple[CacheLayout, CacheLayout]:
    """Of the cache of `method`, and of the exact one beside it, on which nothing is forced."""
    beside = "off" if kernels == "off" else "auto"
    own = planned_layout(model, method, rows, length, kernels=kernels)
    return own, planned_layout(reference, exact(), rows, length, kernels=beside)


def check_mode(mode: str, chunk: int, window: int) -> str:
    """The name under which reports carry this mode. Raises UserError for one that does not exist."""
    if mode not in ("loop", "prefill"):
        raise UserError(f"mode={mode!r}; known: loop, prefill")
    if chunk < 1 or window < 2:
        raise UserError(f"chunk={chunk} and window={window}; at least 1 and 2 tokens are needed")
    return f"prefill-exact-chunk{chunk}" if mode == "prefill" else f"in-the-loop-chunk{chunk}"


def perplexity(
    model: Model,
    texts: TextLike,
    method: MethodLike,
    *,
    mode: str = "loop",
    cut: str = "gptq",
    chunk: int | None = None,
    window: int | None = None,
    tokens: int = 8192,
    batch: int = 4,
    context: int = CONTEXT,
    kernels: str = "auto",
    progress=lambda done: None,
) -> dict[str, Any]:
    """One row of the report. texts: a text, a list of them, the path of a file or a folder, data of `kvqjax.data.read`,
    or token ids; about `tokens` tokens of it are used (0: all). cut: how it is cut
    into windows (kvqjax/eval/windows.py); chunk and window (tokens) override that style's. kernels: as in `init_cache`.
    `progress(fraction)` is
    called as batches finish. `kld` is the mean KL divergence in nats from the exact cache's distribution, `top1` the
    share of positions at which both caches put the same token first. `bits_stored` and `bytes` are the ledger's for
    one row of `context` tokens: a window is so short that what stays exact would decide."""
    check_model(model)
    check_counts(chunk=chunk, window=window, batch=batch, context=context)
    check_integer("tokens", tokens, 0)
    method, chosen = parse(method), style(cut)
    chunk, window = (chosen.chunk if chunk is None else chunk), (chosen.length if window is None else window)
    name = check_mode(mode, chunk, window)
    pieces = windows(token_ids(model, texts), window, tokens, model.config.bos_id if chosen.bos else None)
    prefix = window // 2 if mode == "prefill" else 0
    scored_from = window // 2 if chosen.half else 0
    plain, parts = model.replace(constants=()), []
    for start in range(0, len(pieces), batch):
        piece = jnp.asarray(pieces[start : start + batch])
        layouts = cache_layouts(model, plain, method, piece.shape[0], piece.shape[1], kernels)
        got = score_windows(model, plain, piece, layouts, min(chunk, window), prefix, scored_from)
        parts.append([float(part.sum()) for part in got])
        progress(min(1.0, (start + batch) / len(pieces)))
    nll, nll_exact, kld, top1, count = np.sum(parts, axis=0)
    return {
        "cache": str(method),
        "mode": name,
        "windows": f"{cut} {window}",
        "tokens": int(count),
        "context": context,
        **bytes_of(model, method, context),
        "ppl": float(np.exp(nll / count)),
        "ppl_exact": float(np.exp(nll_exact / count)),
        "kld": float(kld / count),
        "top1": float(top1 / count),
    }
