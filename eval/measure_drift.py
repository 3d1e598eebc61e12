"""Does the error grow as decoding goes on? KL divergence to the exact cache against the step number, teacher forced."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvqjax.doors import check_model
from kvqjax.eval.measure_perplexity import check_mode, score_windows
from kvqjax.eval.stamp import bytes_of
from kvqjax.eval.windows import windows
from kvqjax.methods import MethodLike, parse
from kvqjax.model import Model

__all__ = ["drift"]


def drift(
    model: Model,
    ids: Sequence[int] | np.ndarray,
    method: MethodLike,
    *,
    chunk: int = 1,
    window: int = 512,
    tokens: int = 2048,
    bins: int = 8,
    progress=lambda done: None,
) -> dict[str, Any]:
    """One row: mean KLD (nats) and negative log-likelihood in `bins` equal spans of steps of one long decode, over
    several windows of text fed `chunk` tokens at a time; `growth` is the KLD of the last span over that of the first
    compressed one (the first span in which it is not zero)."""
    check_model(model)
    method, name = parse(method), check_mode("loop", chunk, window)
    pieces = windows(ids, window, tokens)
    plain = model.replace(constants=())
    parts = []
    for number, piece in enumerate(pieces):
        got = score_windows(model, plain, jnp.asarray(piece[None]), method, chunk, 0)
        parts.append(np.stack([np.asarray(got.kld), np.asarray(got.nll), np.asarray(got.tokens)]))
        progress((number + 1) / len(pieces))
    total = np.sum(parts, axis=0)
    spans = np.array_split(total, min(bins, total.shape[1]), axis=1)
    kld = [float(span[0].sum() / span[2].sum()) for span in spans]
    first = next((value for value in kld if value > 0), 0.0)
    return {
        "cache": str(method),
        "mode": f"long-decode, {name}",
        "tokens": int(total[2].sum()),
        "steps": window,
        **bytes_of(model, method, window),
        "kld": kld,
        "nll": [float(span[1].sum() / span[2].sum()) for span in spans],
        "growth": kld[-1] / first if first else 1.0,
    }
