"""Methods: which vectors a cache keeps, in which codec, and when they leave the window."""

from kvqjax.methods.aqua_wiring import aqua
from kvqjax.methods.commvq_wiring import commvq
from kvqjax.methods.higgs_wiring import higgs
from kvqjax.methods.keep import Keep
from kvqjax.methods.keys_values import KeysAndValues, keys_and_values
from kvqjax.methods.kivi_wiring import exact, kivi, kivi_star, uniform
from kvqjax.methods.kvquant_wiring import kvquant
from kvqjax.methods.maps import Maps
from kvqjax.methods.registry import METHODS, MethodLike, parse, policy, spelled_out, to_dict
from kvqjax.methods.rotated_wiring import kvarn, omniscale, oscar
from kvqjax.methods.spec import Method, method_factory
from kvqjax.methods.turboquant_wiring import turboquant
from kvqjax.methods.wiring import Calibration, Chain, Clock, Cost, Fast, Storage, Wiring
from kvqjax.methods.xquant_cl_wiring import xquant_cl
from kvqjax.methods.xquant_wiring import xquant

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
