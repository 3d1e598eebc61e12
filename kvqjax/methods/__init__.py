"""Methods: which vectors a cache keeps, in which codec, and when they leave the window."""

from kvqjax.methods.aqua_wiring import aqua
from kvqjax.methods.commvq_wiring import commvq
from kvqjax.methods.higgs_wiring import higgs
from kvqjax.methods.keep import Keep
from kvqjax.methods.kivi_wiring import exact, kivi, kivi_star, uniform
from kvqjax.methods.kvquant_wiring import kvquant
from kvqjax.methods.registry import METHODS, MethodLike, parse, policy, spelled_out, to_dict
from kvqjax.methods.rotated_wiring import kvarn, omniscale, oscar
from kvqjax.methods.spec import KeysAndValues, Method, method_factory
from kvqjax.methods.turboquant_wiring import turboquant
from kvqjax.methods.wiring import Clock, Wiring, keys_and_values
from kvqjax.methods.xquant_cl_wiring import xquant_cl
from kvqjax.methods.xquant_wiring import xquant

__all__ = [
    "METHODS",
    "Clock",
    "Keep",
    "KeysAndValues",
    "Method",
    "MethodLike",
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
