"""Methods: which vectors a cache keeps, in which codec, and when they leave the window."""

from kvqjax.methods.aqua import aqua
from kvqjax.methods.commvq import commvq
from kvqjax.methods.higgs import higgs
from kvqjax.methods.keep import Keep
from kvqjax.methods.kivi import exact, kivi, kivi_star, uniform
from kvqjax.methods.kvquant import kvquant
from kvqjax.methods.registry import METHODS, parse, policy, spelled_out, to_dict
from kvqjax.methods.spec import KeysAndValues, Method, method_factory
from kvqjax.methods.wiring import Clock, Wiring, keys_and_values
from kvqjax.methods.xquant import xquant
from kvqjax.methods.xquant_cl import xquant_cl

__all__ = [
    "METHODS",
    "Clock",
    "Keep",
    "KeysAndValues",
    "Method",
    "Wiring",
    "aqua",
    "commvq",
    "exact",
    "higgs",
    "keys_and_values",
    "kivi",
    "kivi_star",
    "kvquant",
    "method_factory",
    "parse",
    "policy",
    "spelled_out",
    "to_dict",
    "uniform",
    "xquant",
    "xquant_cl",
]
