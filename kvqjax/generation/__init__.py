"""Generating text: sampling, streaming, beams, speculation."""

from kvqjax.generation.decoding import generate, stream

__all__ = ["generate", "stream"]
