"""What is left out or exchanged of each method, beside the whole of it: one table of cases.

A group's caches are compared with its first on the same windows. "books" are pieces of a text file, scored whole;
"spans" are random symbols and the same symbols again, of which the repetition, which a model can only predict from its
cache, is scored."""

from typing import Any, NamedTuple

from kvqjax.calibrate.aqua_fit import Recipe as AquaRecipe
from kvqjax.calibrate.kvquant import Recipe as KVQuantRecipe

__all__ = ["GROUPS", "SETS", "Case", "Group", "Set"]


class Set(NamedTuple):
    """Windows that groups share: so many for each of two seeds, which also draw other sequences to calibrate on."""

    model: str
    data: str
    windows: int


class Case(NamedTuple):
    """A cache, what the model's weights are kept in, and by which recipe it is calibrated (`note` names it)."""

    cache: str
    note: str = ""
    weights: str | None = None
    recipe: Any = None

    @property
    def name(self) -> str:
        return f"{self.cache} {self.note}".strip()


class Group(NamedTuple):
    title: str
    data: str  # the name of a set
    cases: list[Case]


SETS = {
    "demo": Set("demo", "books", 56),
    "recall": Set("recall", "spans", 104),
    "mha": Set("tests/assets_models/mha", "spans", 104),
}


def _group(title: str, data: str, *cases: str | Case) -> Group:
    return Group(title, data, [case if isinstance(case, Case) else Case(case) for case in cases])


def _kivi(group: int, residual: int) -> str:
    return f"kivi:bits=2,group={group},window={residual},rule=published"


def _nuq(bits: int, **options) -> str:
    return f"kvquant:bits={bits}" + "".join(f",{name}={value}" for name, value in options.items())


STAR, CL, LATENT = "kivi_star:bits={},protected=0", "xquant_cl:bits={},base=0,protected=1", "xquant:bits={},latent=true"
AXIS = "kivi:bits=2,group=32,window=0", "uniform:bits=2,group=32"  # keys per channel and per token
DENSE = _nuq(3, outliers=0)
UNWEIGHTED = Case(DENSE, "without Fisher weights", recipe=KVQuantRecipe(objective="none"))
FISHER_ONLY = Case(DENSE, "F without s^2", recipe=KVQuantRecipe(objective="fisher"))
WEIGHTS = [Case(cache, weights, weights) for weights in ("int8", "int4") for cache in ("exact", _nuq(4), _nuq(3))]

GROUPS = [
    _group("KIVI, Table 2: the axis of keys", "demo", f"k={AXIS[0]};v=exact", f"k={AXIS[1]};v=exact"),
    _group("KIVI: values per token, beside keys per channel", "demo", AXIS[0], f"k=exact;v={AXIS[0]}"),
    _group("KIVI, Table 5: group size, residual of 128", "demo", *(_kivi(group, 128) for group in (32, 64, 128))),
    _group("KIVI, Table 5: residual length, groups of 32", "demo", *(_kivi(32, size) for size in (128, 96, 64, 32))),
    _group("KVQuant, Table 11: Fisher weights", "demo", DENSE, UNWEIGHTED, FISHER_ONLY),
    _group("KVQuant, Table 10: keys before or after RoPE", "demo", DENSE, DENSE + ",rope=post"),
    _group("KVQuant, Table 12: outliers", "demo", _nuq(3), _nuq(3, outliers=0), _nuq(3, slots=8)),
    _group("KVQuant, Table 13: one sink, 2 bits", "demo", _nuq(2, outliers=0), _nuq(2, outliers=0, sinks=0), _nuq(2)),
    _group("KVQuant, Table 21: another text to calibrate on", "demo", _nuq(3), Case(_nuq(3), "made-up text")),
    _group("CommVQ: another text to calibrate on", "demo", "commvq:bits=2", Case("commvq:bits=2", "made-up text")),
    _group("KVQuant, Table 5: weights too", "demo", "exact", _nuq(4), _nuq(3), *WEIGHTS),
    _group(
        "AQUA-KV at HIGGS's bits, KIVI with more",
        "demo",
        "aqua:bits=2,first_bits=2",
        "higgs:bits=2",
        "kivi:bits=2,group=128,window=0,sinks=4",
        "kivi:bits=2,group=32,window=0,sinks=4",
    ),
    _group(
        "AQUA-KV, Table 1",
        "demo",
        "aqua:bits=2",
        "higgs:bits=2,sinks=4;0=higgs:bits=4",
        "aqua:bits=2,key_inputs=none",
        "aqua:bits=2,value_inputs=none",
        "aqua:bits=2,sinks=0",
        "aqua:bits=2,rope=post",
        Case("aqua:bits=2", "fitted on exact inputs", recipe=AquaRecipe(clean=True)),
        "aqua:bits=2,predictor=int4",
        "aqua:bits=2,predictor=low_rank,rank=64",
        "aqua:bits=2,first_bits=16",
    ),
    *(
        _group(
            f"AQUA-KV: predictors with a backbone per {axis}",
            "demo",
            f"aqua:bits=2,backbone={axis}",
            f"aqua:bits=2,backbone={axis},key_inputs=none,value_inputs=none",
        )
        for axis in ("token", "channel")
    ),
    _group("AQUA-KV at 3 bits", "demo", "aqua:bits=3", "higgs:bits=3,sinks=4;0=higgs:bits=4"),
    _group(
        "AQUA-KV, Table 3: at most 256 tokens in the body, chosen by H2O",
        "demo",
        "exact:sinks=4,keep=h2o:256",
        "aqua:bits=2,keep=h2o:256",
        "higgs:bits=2,sinks=4,keep=h2o:256;0=higgs:bits=4",
        "kivi:bits=2,group=128,window=0,sinks=4,keep=h2o:256",
    ),
    # X takes as many numbers as the model is wide: half of keys and values in recall, a quarter in mha.
    _group(
        "XQuant at KIVI*'s 2 bits",
        "recall",
        STAR.format(2),
        "xquant:bits=4",
        CL.format(4),
        LATENT.format(2),
        LATENT.format(2) + ",outliers=1",
    ),
    _group("XQuant at KIVI*'s 3 bits", "recall", STAR.format(3), LATENT.format(3)),
    _group("XQuant at KIVI*'s 4 bits", "recall", STAR.format(4), "xquant:bits=8", LATENT.format(4)),
    _group("XQuant at KIVI*'s single bit", "recall", STAR.format(1), "xquant:bits=2"),
    _group("XQuant-CL beside X, 3 bits", "recall", "xquant:bits=3,protected=1", CL.format(3)),
    _group("XQuant-CL beside X, 2 bits", "recall", "xquant:bits=2,protected=1", "xquant:bits=3", CL.format(2)),
    _group("XQuant at KIVI*'s 2 bits", "mha", STAR.format(2), "xquant:bits=8", STAR.format(3), STAR.format(4)),
    _group("XQuant at KIVI*'s single bit", "mha", STAR.format(1), "xquant:bits=4", CL.format(4)),
    _group("XQuant-CL beside X, 3 bits", "mha", "xquant:bits=3,protected=1", CL.format(3)),
    _group(
        "XQuant-CL beside X, 2 bits",
        "mha",
        "xquant:bits=2,protected=1",
        CL.format(2),
        *(CL.format(2) + option for option in (",space=residual", ",axis=channel", ",accumulator=4")),
    ),
]
