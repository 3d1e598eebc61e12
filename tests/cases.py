"""The one list of cache specs that every general test of caches runs over: a new method adds itself here."""

from tiny import tiny

import kvqjax as kvq

# name -> (spec string, changes to the tiny model). Widths are tiny, so groups of channels are 32 at most.
CASES: dict[str, tuple[str, dict]] = {
    "exact": ("exact", {}),
    "kivi2": ("kivi:bits=2,window=32", {}),
    "kivi3-sinks": ("kivi:bits=3,window=0,sinks=5", {}),
    "kivi4-float32": ("kivi:bits=4,window=64,scales=float32", {}),
    "kivi8": ("kivi:bits=8,window=32", {}),
    "kivi-wide-groups": ("kivi:key_bits=2,value_bits=4,group=64,value_group=16,window=32", {}),
    "kivi-pre": ("kivi:bits=2,window=32,rope=pre", {}),
    "kivi-published": ("kivi:bits=2,window=64,rule=published", {}),
    "uniform": ("uniform:bits=4,group=32", {}),
    "mixed": ("kivi:bits=2,window=32,sinks=4;0=exact", {}),
    "sliding": ("kivi:bits=2,window=32", {"windows": (96, 96)}),
    "sliding-mixed": ("kivi:bits=4,window=32,sinks=2", {"windows": (96, None)}),
}

# A few that differ most, for tests that compile much.
FEW = ("exact", "kivi2", "kivi-published", "mixed")


def model_and_method(name: str) -> tuple[kvq.Model, kvq.Method]:
    spec, changes = CASES[name]
    return tiny(**changes), kvq.parse(spec)
