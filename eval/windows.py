"""Which tokens of a text are scored together: the windows of GPTQ's, AQUA-KV's and llama.cpp's perplexities."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvqjax._errors import UserError

__all__ = ["STYLES", "Style", "style", "windows"]


class Style(NamedTuple):
    """Defaults of one way to cut a text. All windows are disjoint and the last partial one is dropped.

    length: tokens per window; chunk: tokens that enter the cache at a time; half: only the second half of each window
    is scored; bos: every window starts with the begin token, where the text itself was encoded with one.
    """

    length: int
    chunk: int
    half: bool = False
    bos: bool = False


# gptq: GPTQ's script, as KVQuant and most papers use it (with windows of 2048). aqua: AQUA-KV's, 8192 tokens in steps
# of 32 through the cache. llama-perplexity: llama.cpp's tool of that name.
STYLES = {"gptq": Style(512, 32), "aqua": Style(8192, 32), "llama-perplexity": Style(512, 32, half=True, bos=True)}


def style(name: str) -> Style:
    """A style by name. Raises UserError for one that does not exist."""
    if name not in STYLES:
        raise UserError(f"windows={name!r}; known: {', '.join(STYLES)}")
    return STYLES[name]


def windows(ids: Sequence[int] | np.ndarray, length: int, tokens: int, bos: int | None = None) -> np.ndarray:
    """Windows [N, length] of a text's ids, about `tokens` ids in all (0: the whole text). `bos` replaces the first id
    of every window if the text begins with it."""
    count = min(len(ids), max(tokens or len(ids), length)) // length
    if count == 0:
        raise UserError(f"the text has {len(ids)} tokens, fewer than one window of {length}")
    out = np.array(ids[: count * length], np.int32).reshape(count, length)
    if bos is not None and out[0, 0] == bos:
        out[:, 0] = bos
    return out
