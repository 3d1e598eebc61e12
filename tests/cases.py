"""The one list of cache specs that every general test of caches runs over: a new method adds itself
here.

A calibrated method gets made-up constants of the shapes it asks for: valid, random, and quick to
have.
"""

import functools
from collections.abc import Collection, Iterable

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.calibrate.xquant import prepared
from kvqjax.kernel_checks.trial import made_up

# name -> (spec string, changes to the tiny model). Widths are tiny, so groups of channels are 32 at
# most.
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
    "sliding": ("kivi:bits=2,window=32", {"sliding_window": 96}),
    "sliding-mixed": ("kivi:bits=4,window=32,sinks=2", {"sliding_window": (96, None)}),
    "kivi-rotated": ("kivi:bits=2,window=32,sinks=4,rotate=signs", {}),
    "omniscale": ("omniscale:bits=2,group=32,value_group=16,window=32", {}),
    "kvarn": ("kvarn:bits=2,group=32,sinks=3", {}),
    "kvarn4": ("kvarn:bits=4,group=64,sinks=0,rotate=none", {}),
    "oscar": ("oscar:bits=2,window=32,sinks=4", {}),
    "turboquant": ("turboquant:bits=3", {}),
    "higgs-block": ("higgs:bits=2,dim=4,centre=block,sinks=2", {}),
    "kvquant": ("kvquant:bits=3,sinks=2", {}),
    "klt": ("klt:bits=2,buffer=32,sinks=3", {}),
    "klt-own": ("klt:bits=2,heads=own,buffer=32,sinks=3", {}),
    "commvq": ("commvq:bits=1,rounds=2,levels=8,hidden=16,window=32,unit=32", {}),
    "aqua": ("aqua:bits=2,first_bits=16,backbone=token,group=32,buffer=32,sinks=3", {}),
    "aqua-klt": ("aqua:bits=2,first_bits=16,backbone=klt,buffer=32,sinks=3", {}),
    "xquant-latents": ("xquant:bits=2,group=32,latent=true,outliers=1,sinks=2", {}),
    "xquant-cl": ("xquant_cl:bits=3,group=32,base=0,protected=1,latent=true", {}),
}

# For tests of what every cache goes through: without those that differ from others in the numbers
# of a codec alone (its bits, groups, the dtype of scales), or that put together what two others
# have (a rotation; a window in all layers; predictors and transforms; a number per channel of a
# block of tokens beside a codec of single tokens).
SAME = (
    "kivi4-float32",
    "kivi8",
    "kivi-wide-groups",
    "sliding",
    "kivi-rotated",
    "kvarn4",
    "higgs-block",
    "aqua-klt",
)
GENERAL = tuple(name for name in CASES if name not in SAME)

# One of every family.
CORE = ("exact", "kivi2", "mixed", "sliding-mixed", "kvquant", "commvq", "aqua", "xquant-cl")

# Half of these: the tests of general behaviour run over them with every change, and over the others
# nightly.
HALF = ("kivi2", "sliding-mixed", "kvquant", "aqua")

# A few that differ most, for tests that compile much.
FEW = ("exact", "kivi2", "kivi-published", "mixed")


def with_nightly(values: Iterable, often: Collection = HALF) -> list:
    """Parameters of a test: the values that are in `often`, and the others marked nightly. A tuple
    is the values of several parameters."""
    return [
        pytest.param(*_as_tuple(value), marks=() if value in often else pytest.mark.nightly)
        for value in values
    ]


def thinned(values: Iterable, every: int) -> list:
    """Parameters of a test, of which the first of every `every` run with every change, the others
    nightly."""
    parameters = [
        value if isinstance(value, type(pytest.param())) else pytest.param(*_as_tuple(value))
        for value in values
    ]
    return [
        parameter
        if number % every == 0
        else parameter._replace(marks=[*parameter.marks, pytest.mark.nightly])
        for number, parameter in enumerate(parameters)
    ]


def _as_tuple(value) -> tuple:
    return value if type(value) is tuple else (value,)


def _constants(model: kvq.Model, method: kvq.Method) -> tuple[dict, ...]:
    random = np.random.default_rng(0)

    def array(name: str, shape: tuple[int, ...]):
        return jnp.asarray(made_up(name, shape, random), jnp.float32)

    runs = runs_of(kvq.init_cache(model, method, 1, 1).layout)
    return tuple(
        {
            group: {name: array(name, (run.count, *shape)) for name, shape in names.items()}
            for group, names in run.wiring.wanted().items()
        }
        for run in runs
    )


def with_constants(model: kvq.Model, method: kvq.Method) -> kvq.Model:
    """The model with the method's constants: made up, or those that follow from its weights."""
    from_weights = prepared(model.replace(constants=()), method)
    return (
        from_weights
        if from_weights.constants
        else model.replace(constants=_constants(model, method))
    )


@functools.cache
def model_and_method(name: str, **more) -> tuple[kvq.Model, kvq.Method]:
    spec, changes = CASES[name]
    model, method = tiny(**changes, **more), kvq.parse(spec)
    return with_constants(model, method), method
