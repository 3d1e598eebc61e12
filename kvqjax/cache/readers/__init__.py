"""How attention reads an encoded body: a file for each reader (kvqjax/cache/reading.py chooses one)."""

from kvqjax.cache.readers.body import ask_of, attend_body

__all__ = ["ask_of", "attend_body"]
