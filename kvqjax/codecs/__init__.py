"""Codecs: how one kind of vector is stored in few bits."""

from kvqjax.codecs.base import Codec, CodecSpec, Fit, bits_per_value
from kvqjax.codecs.centring import CENTRES, BlockCentred, Centred, centred
from kvqjax.codecs.exact import Exact
from kvqjax.codecs.uniform import Uniform

__all__ = [
    "CENTRES",
    "BlockCentred",
    "Centred",
    "Codec",
    "CodecSpec",
    "Exact",
    "Fit",
    "Uniform",
    "bits_per_value",
    "centred",
]


def __dir__() -> list[str]:
    return __all__
