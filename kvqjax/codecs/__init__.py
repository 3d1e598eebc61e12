"""Codecs: how one kind of vector is stored in few bits."""

from kvqjax.codecs.base import Codec, bits_per_value
from kvqjax.codecs.exact import Exact
from kvqjax.codecs.uniform import Uniform

__all__ = ["Codec", "Exact", "Uniform", "bits_per_value"]
