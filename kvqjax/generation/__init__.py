"""Generating text: sampling, streaming, beams, speculation."""

from kvqjax.generation.decoding import generate, stream

__all__ = ["generate", "stream"]


def __dir__() -> list[str]:
    return __all__
