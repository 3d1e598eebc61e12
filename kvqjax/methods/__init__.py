"""Methods: which vectors a cache keeps, in which codec, and when they leave the window."""

from kvqjax.methods.keys_values import KeysAndValues, keys_and_values
from kvqjax.methods.layer_cache import Calibration, Chain, Clock, Cost, Fast, Maps, Storage, Wiring
from kvqjax.methods.papers.aqua import aqua
from kvqjax.methods.papers.commvq import commvq
from kvqjax.methods.papers.higgs import higgs
from kvqjax.methods.papers.kivi import exact, kivi, kivi_star, uniform
from kvqjax.methods.papers.klt import klt
from kvqjax.methods.papers.kvquant import kvquant
from kvqjax.methods.papers.rotated import kvarn, omniscale, oscar
from kvqjax.methods.papers.turboquant import turboquant
from kvqjax.methods.papers.xquant import xquant
from kvqjax.methods.papers.xquant_cl import xquant_cl
from kvqjax.methods.registry import METHODS, MethodLike, parse, policy, spelled_out, to_dict
from kvqjax.methods.spec import Keep, Method, method_factory

__all__ = [
    "METHODS",
    "Calibration",
    "Chain",
    "Clock",
    "Cost",
    "Fast",
    "Keep",
    "KeysAndValues",
    "Maps",
    "Method",
    "MethodLike",
    "Storage",
    "Wiring",
    "aqua",
    "commvq",
    "exact",
    "higgs",
    "keys_and_values",
    "kivi",
    "kivi_star",
    "klt",
    "kvarn",
    "kvquant",
    "method_factory",
    "omniscale",
    "oscar",
    "parse",
    "policy",
    "spelled_out",
    "to_dict",
    "turboquant",
    "uniform",
    "xquant",
    "xquant_cl",
]


def __dir__() -> list[str]:
    return __all__
