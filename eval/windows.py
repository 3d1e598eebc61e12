"""The loss of quality by a cache, on a text that is cut into windows: perplexity, KL divergence and
top-1 agreement, over all tokens (`perplexity`) or along the steps of a long decode (`drift`).

All tokens are written to the cache and read from it, in one of two modes, which every report names:

- loop: every token enters the cache in chunks of N tokens. Later chunks see earlier ones
  compressed.
- prefill: the first half of each window attends exactly, as a prompt in most papers. The second
  half enters in chunks of N tokens, and is scored alone.

The exact cache gets the same chunks, so `ppl_exact` is of the same tokens and positions.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_counts, check_integer
from kvqjax._errors import UserError
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.data.tokens import TextLike, token_ids
from kvqjax.eval.scores import ROUNDING, negative_log_likelihood, tail, through, token_scores
from kvqjax.eval.stamp import CONTEXT, bytes_of
from kvqjax.methods import Method, MethodLike, exact, parse
from kvqjax.model.loading import Model
from kvqjax.step.checks import check_model
from kvqjax.step.new_cache import empty_cache, init_cache, planned_layout
from kvqjax.step.prompt import prefill

# --- Cutting a text into windows


class Style(NamedTuple):
    """Defaults of one way to cut a text. All windows are disjoint and the last partial one is
    dropped."""

    length: int  # tokens of a window
    chunk: int  # tokens that enter the cache at a time
    half: bool = False  # only the second half of each window is scored
    bos: bool = False  # every window starts with the begin token, if the text was encoded with one


# gptq: GPTQ's script, as KVQuant and most papers use it (with windows of 2048). aqua: AQUA-KV's,
# 8192 tokens in steps of 32 through the cache. llama-perplexity: llama.cpp's tool of that name.
STYLES = {
    "gptq": Style(512, 32),
    "aqua": Style(8192, 32),
    "llama-perplexity": Style(512, 32, half=True, bos=True),
}


def style(name: str) -> Style:
    """Find a style by name. Raises UserError for one that does not exist."""
    if name not in STYLES:
        raise UserError(f"windows={name!r}; known: {', '.join(STYLES)}")
    return STYLES[name]


def windows(
    ids: Sequence[int] | np.ndarray, length: int, tokens: int, bos: int | None = None
) -> np.ndarray:
    """Cut a text into windows.

    Args:
        ids: of the text.
        length: tokens of a window.
        tokens: about how many tokens are used; 0: all.
        bos: the begin token, if every window starts with it. It replaces the first token of each
            window, but only in a text that begins with it.

    Returns:
        Windows [N, length].

    Raises:
        UserError: for a text that is shorter than one window.
    """
    used = min(len(ids), max(tokens or len(ids), length))
    count = used // length
    if count == 0:
        raise UserError(f"the text has {len(ids)} tokens, fewer than one window of {length}")
    out = np.array(ids[: count * length], np.int32).reshape(count, length)
    if bos is not None and out[0, 0] == bos:
        out[:, 0] = bos
    return out


# --- Scoring windows


# Stands for the divergence of a token that does not count: rounding makes none as negative.
NOT_SCORED = -1.0


class Sums(NamedTuple):
    """Sums over scored tokens, and the divergence of each."""

    nll: Float[Array, ""]  # negative log-likelihood with the compressed cache, in nats
    nll_exact: Float[Array, ""]  # with the exact cache
    kld: Float[Array, ""]  # KL(exact || compressed), in nats
    top1: Float[Array, ""]  # tokens at which both caches have the same most likely token
    tokens: Float[Array, ""]  # number of scored tokens
    klds: Float[Array, "B T"]  # of each token, NOT_SCORED where it does not count


def score_chunk(
    logits: Float[Array, "B T V"],
    reference: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Sums:
    """Score T predictions of each row.

    Args:
        logits: with the compressed cache.
        reference: logits with the exact cache.
        targets: the tokens that follow.
        valid: marks the predictions that count.

    Returns:
        The sums over these predictions.
    """
    scores = token_scores(logits, reference, targets)
    weight = valid.astype(jnp.float32)

    def total(x: Array) -> Array:
        return (x.astype(jnp.float32) * weight).sum()

    exact_nll = negative_log_likelihood(reference, targets)
    return Sums(
        total(scores.nll),
        total(exact_nll),
        total(scores.kld),
        total(scores.agree),
        weight.sum(),
        jnp.where(valid, scores.kld, NOT_SCORED),
    )


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
    """Score a batch of windows.

    Args:
        model: with the method's constants.
        reference: the model without constants, since the exact cache takes none.
        batch: the windows.
        layouts: of the compressed and the exact cache (`cache_layouts`).
        chunk: tokens that enter the caches at a time.
        exact_prefix: first tokens of a window that are prefilled exactly, and not scored.
        scored_from: the first position that is scored.

    Returns:
        The sums, one entry per chunk.
    """
    rows = len(batch)
    models = (model, reference)
    caches = []
    for each, layout in zip(models, layouts, strict=True):
        caches.append(empty_cache(each, layout, rows))
    if exact_prefix:
        lengths = jnp.full((rows,), exact_prefix, jnp.int32)
        for number, each in enumerate(models):
            _, caches[number] = prefill(each, batch[:, :exact_prefix], lengths, caches[number])
    tokens = batch[:, exact_prefix:]
    counts = jnp.full((rows,), tokens.shape[1], jnp.int32)

    def score(logits, targets, valid):
        return score_chunk(logits[0], logits[1], targets, valid)

    first_scored = max(0, scored_from - exact_prefix)
    return through(models, tuple(caches), tokens, counts, chunk, score, first_scored)


def cache_layouts(
    model: Model, reference: Model, method: Method, rows: int, length: int, kernels: str
) -> tuple[CacheLayout, CacheLayout]:
    """Plan the layouts of the cache of `method` and of the exact cache. `kernels` other than "off"
    apply to the first one only."""
    exact_kernels = "off" if kernels == "off" else "auto"
    coded = planned_layout(model, method, rows, length, kernels=kernels)
    uncoded = planned_layout(reference, exact(), rows, length, kernels=exact_kernels)
    return coded, uncoded


def check_mode(mode: str, chunk: int, window: int) -> str:
    """Give the name of a mode in reports. Raises UserError for a mode that does not exist, and for
    too few tokens."""
    if mode not in ("loop", "prefill"):
        raise UserError(f"mode={mode!r}; known: loop, prefill")
    least = 3 if mode == "prefill" else 2  # a token that is scored needs one before it in its half
    if chunk < 1 or window < least:
        raise UserError(
            f"chunk={chunk} and window={window}; at least 1 and {least} tokens are needed"
        )
    if mode == "prefill":
        return f"prefill-exact-chunk{chunk}"
    return f"in-the-loop-chunk{chunk}"


# --- Over all tokens


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
    progress=lambda fraction: None,
) -> dict[str, Any]:
    """Measure perplexity with the cache and with the exact one, and the divergence between them.

    Args:
        model: the model, with the method's constants.
        texts: a text, a list of them, the path of a file or a folder, data of `kvqjax.data.read`,
            or token ids.
        method: the cache's.
        mode: "loop" or "prefill" (kvqjax/eval/windows.py).
        cut: how the text is cut into windows: "gptq", "aqua" or "llama-perplexity".
        chunk: tokens that enter the cache at a time; None: the cut's own.
        window: tokens of a window; None: the cut's own.
        tokens: about how many tokens of the text are used; 0: all.
        batch: windows at a time.
        context: tokens of the row for which `bits_stored` and `bytes` are computed. In a row as
            short as a window, exact tokens (sinks, window) would take most of the bytes.
        kernels: as in `init_cache`.
        progress: `progress(fraction)` is called as batches finish.

    Returns:
        A row of the report. `kld` is the mean KL divergence in nats from the exact cache's
        distribution, `kld_p999` the one that 99.9 % of the positions stay below, `top1` the share
        of positions at which both caches put the same token first.

    Raises:
        UserError: texts that cannot be read or are too short, options that do not exist.
    """
    check_model(model)
    check_counts(chunk=chunk, window=window, batch=batch, context=context)
    check_integer("tokens", tokens, 0)
    method = parse(method)
    chosen = style(cut)
    if chunk is None:
        chunk = chosen.chunk
    if window is None:
        window = chosen.length
    name = check_mode(mode, chunk, window)
    if chosen.half and window < 3:
        raise UserError(
            f"window={window}; of windows cut as {cut} the second half is scored: wanted 3 tokens at least"
        )
    bos = model.config.bos_id if chosen.bos else None
    pieces = windows(token_ids(model, texts), window, tokens, bos)
    prefix = window // 2 if mode == "prefill" else 0
    scored_from = window // 2 if chosen.half else 0
    plain = model.replace(constants=())
    parts = []  # of each batch, all sums of `Sums`
    klds = []
    for start in range(0, len(pieces), batch):
        piece = jnp.asarray(pieces[start : start + batch])
        layouts = cache_layouts(model, plain, method, piece.shape[0], piece.shape[1], kernels)
        sums = score_windows(model, plain, piece, layouts, min(chunk, window), prefix, scored_from)
        parts.append([float(part.sum()) for part in sums[:-1]])
        klds.append(np.ravel(sums.klds))
        progress(min(1.0, (start + batch) / len(pieces)))
    nll, nll_exact, kld, top1, count = np.sum(parts, axis=0)
    window_klds = np.concatenate(klds)
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
        "kld_p999": tail(window_klds[window_klds > NOT_SCORED]),
        "top1": float(top1 / count),
    }


# --- Along the steps of a decode


def encoded_from(model: Model, method: Method, capacity: int) -> int:
    """Find the first step that attends to encoded tokens in every layer. Before it, sinks and
    windows hold all tokens of some layer."""
    cache = jax.eval_shape(lambda: init_cache(model.replace(rules=None), method, 1, capacity))
    stays = []  # tokens that a clock keeps exact at most
    for run in runs_of(cache.layout):
        stays += [clock.window + clock.unit for clock in run.wiring.storage.clocks]
    return method.sinks + max(stays)


def growth(kld: list[float], starts: list[int], encoded: int) -> float | None:
    """Compute the divergence of the last span relative to the first span with encoded tokens alone.

    Args:
        kld: of every span.
        starts: the first step of every span.
        encoded: the step of `encoded_from`.

    Returns:
        The ratio. None if no span before the last one begins at `encoded` or later, or if that
        span's divergence is only rounding.
    """
    first = 0.0
    for value, start in zip(kld[:-1], starts, strict=False):
        if start >= encoded:
            first = value
            break
    return kld[-1] / first if first > ROUNDING else None


def check_drift(chunk: int, window: int) -> str:
    """Give the name under which reports carry a drift. Raises UserError for a chunk that holds more
    than the whole decode: its tokens would see each other exactly, however long it is."""
    name = check_mode("loop", chunk, window)
    if chunk > window:
        raise UserError(
            f"chunk={chunk} is more than all {window} steps; say a smaller chunk or a longer window"
        )
    return f"long-decode, {name}"


def drift(
    model: Model,
    texts: TextLike,
    method: MethodLike,
    *,
    chunk: int = 1,
    window: int = 512,
    tokens: int = 2048,
    bins: int = 8,
    kernels: str = "auto",
    progress=lambda fraction: None,
) -> dict[str, Any]:
    """Measure the KL divergence from the exact cache along the steps of a decode: whether the error
    grows. The text's tokens are fed, not the model's predictions (teacher forcing).

    Args:
        model: the model, with the method's constants.
        texts: as for `perplexity`.
        method: the cache's.
        chunk: tokens that enter the cache at a time.
        window: steps of a decode.
        tokens: about how many tokens of the text are used; 0: all.
        bins: equal spans of steps over which means are taken.
        kernels: as in `init_cache`.
        progress: `progress(fraction)` is called as windows finish.

    Returns:
        A row of the report: `kld` and `nll` (nats) in every span. `growth` is the KLD of the last
        span divided by that of the first span in which every step attends to encoded tokens. It is
        None if that is the last span, or if nothing is lost.

    Raises:
        UserError: texts that cannot be read or are too short, options that do not exist.
    """
    check_model(model)
    check_counts(chunk=chunk, window=window, bins=bins)
    check_integer("tokens", tokens, 0)
    method = parse(method)
    name = check_drift(chunk, window)
    pieces = windows(token_ids(model, texts), window, tokens)
    plain = model.replace(constants=())
    layouts = cache_layouts(model, plain, method, 1, pieces.shape[1], kernels)
    parts = []
    for number, piece in enumerate(pieces):
        sums = score_windows(model, plain, jnp.asarray(piece[None]), layouts, chunk, 0)
        of_window = [np.asarray(x) for x in (sums.kld, sums.nll, sums.tokens)]
        parts.append(np.stack(of_window))
        progress((number + 1) / len(pieces))
    total = np.sum(parts, axis=0)  # [3, chunks]: sums of KLD, of NLL and of tokens over all windows
    total = total[:, total[2] > 0]  # a window's last token predicts nothing
    spans = np.array_split(total, min(bins, total.shape[1]), axis=1)
    numbers = np.array_split(np.arange(total.shape[1]), len(spans))  # of each span's chunks
    starts = [int(part[0]) * chunk for part in numbers]
    kld = [float(span[0].sum() / span[2].sum()) for span in spans]
    nll = [float(span[1].sum() / span[2].sum()) for span in spans]
    return {
        "cache": str(method),
        "mode": name,
        "tokens": int(total[2].sum()),
        "steps": window,
        **bytes_of(model, method, window),
        "kld": kld,
        "nll": nll,
        "growth": growth(kld, starts, encoded_from(model, method, window)),
    }
