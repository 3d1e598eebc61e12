"""Does the error grow as decoding goes on? KL divergence to the exact cache against the step number, teacher forced."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax._arguments import check_counts, check_integer
from kvqjax.cache import runs_of
from kvqjax.data.tokens import TextLike, token_ids
from kvqjax.eval.measure_perplexity import cache_layouts, check_mode, score_windows
from kvqjax.eval.scores import ROUNDING
from kvqjax.eval.stamp import bytes_of
from kvqjax.eval.windows import windows
from kvqjax.methods import Method, MethodLike, parse
from kvqjax.model.loading import Model
from kvqjax.step.doors import check_model
from kvqjax.step.new_cache import init_cache

__all__ = ["drift", "encoded_from", "growth"]


def encoded_from(model: Model, method: Method, capacity: int) -> int:
    """The first step that attends to encoded tokens in every layer: until then sinks and windows hold all."""
    cache = jax.eval_shape(lambda: init_cache(model.replace(rules=None), method, 1, capacity))
    clocks = [clock for run in runs_of(cache.layout) for clock in run.wiring.storage.clocks]
    return method.sinks + max(clock.window + clock.unit for clock in clocks)


def growth(kld: list[float], starts: list[int], encoded: int) -> float | None:
    """The last span's KLD over that of the first span that begins at step `encoded` or later; None where no earlier
    span does, or where there is only rounding."""
    first = next((value for value, start in zip(kld[:-1], starts, strict=False) if start >= encoded), 0.0)
    return kld[-1] / first if first > ROUNDING else None


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
    progress=lambda done: None,
) -> dict[str, Any]:
    """One row for `texts`, which are as in `perplexity`: mean KLD (nats) and negative log-likelihood in `bins` equal
    spans of steps of one long decode, over
    several windows of text fed `chunk` tokens at a time; `growth` is the KLD of the last span over that of the first in
    which every step attends to encoded tokens (None: there is none but the last, or nothing is lost)."""
    check_model(model)
    check_counts(chunk=chunk, window=window, bins=bins)
    check_integer("tokens", tokens, 0)
    method, name = parse(method), check_mode("loop", chunk, window)
    pieces = windows(token_ids(model, texts), window, tokens)
    plain = model.replace(constants=())
    layouts, parts = cache_layouts(model, plain, method, 1, pieces.shape[1], kernels), []
    for number, piece in enumerate(pieces):
        got = score_windows(model, plain, jnp.asarray(piece[None]), layouts, chunk, 0)
        parts.append(np.stack([np.asarray(got.kld), np.asarray(got.nll), np.asarray(got.tokens)]))
        progress((number + 1) / len(pieces))
    total = np.sum(parts, axis=0)
    total = total[:, total[2] > 0]  # a window's last token predicts nothing
    spans = np.array_split(total, min(bins, total.shape[1]), axis=1)
    starts = [int(part[0]) * chunk for part in np.array_split(np.arange(total.shape[1]), len(spans))]
    kld = [float(span[0].sum() / span[2].sum()) for span in spans]
    return {
        "cache": str(method),
        "mode": f"long-decode, {name}",
        "tokens": int(total[2].sum()),
        "steps": window,
        **bytes_of(model, method, window),
        "kld": kld,
        "nll": [float(span[1].sum() / span[2].sum()) for span in spans],
        "growth": growth(kld, starts, encoded_from(model, method, window)),
    }
