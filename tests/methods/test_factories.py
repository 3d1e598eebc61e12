"""Options of every method, and fields of every public description: a value of another type or out
of range is one line that names it, a UserError as promised."""

import dataclasses
import functools
import inspect

import jax
import jaxtyping
import numpy as np
import pytest
from cases import with_nightly

import kvqjax as kvq
from kvqjax.codecs import Uniform
from kvqjax.methods import Keep, KeysAndValues
from kvqjax.model.config import ExpertConfig, ModelConfig
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.sharding import rules_for

SHAPE = kvq.KVShape(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, rope=kvq.Rope(), width=64
)
NAN, INFINITY = float("nan"), float("inf")
KEEP = "wanted a rule (streaming) and a count of tokens, such as streaming:512"
WRONG = (
    "2",
    2.5,
    None,
    (2, 3),
    -1,
    0,
    10**30,
    2**31 - 1,
    NAN,
    INFINITY,
    True,
    [2],
    {},
    b"2",
    object(),
    "none",
)
OPTIONS = [
    (name, option)
    for name, make in kvq.METHODS.items()
    for option in inspect.signature(make).parameters
]
# By day every option by its first method.
BY_DAY = {option: name for name, option in reversed(OPTIONS)}


@pytest.fixture(autouse=True, scope="module")
def _as_a_user_runs_it():
    """Without jaxtyping's check of types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def refused(make) -> str | None:
    """The one line with which a call is refused; None where it is not."""
    text = None
    try:
        make()
    except kvq.UserError as error:
        text = str(error)
    assert "\n" not in (text or "")
    return text


@pytest.mark.parametrize(
    ("name", "option"),
    with_nightly(OPTIONS, [(name, option) for option, name in BY_DAY.items()]),
    ids=map("-".join, OPTIONS),
)
def test_a_value_is_refused_in_one_line_or_makes_a_cache(name, option):
    """What a factory takes, a cache of a model takes, or says in one line why it cannot."""
    make, annotation = (
        kvq.METHODS[name],
        inspect.signature(kvq.METHODS[name]).parameters[option].annotation,
    )
    for value in WRONG:
        text = refused(lambda v=value: make(**{option: v}))
        if text is None:
            allowed = str(annotation)
            kind = type(value).__name__.replace("NoneType", "None")
            assert kind in allowed or (kind == "int" and "float" in allowed), (
                f"{option}={value!r} was taken"
            )
            method = make(**{option: value})
            refused(lambda m=method: jax.eval_shape(lambda: kvq.init_cache(SHAPE, m, 1, 300)))
        else:
            assert text.startswith(f"{name}: "), text


def test_a_line_says_what_is_wanted():
    lines = {
        "kivi: bits='2'; wanted a whole number": lambda: kvq.kivi(bits="2"),
        "kivi: bits=2.0; wanted a whole number": lambda: kvq.kivi(bits=2.0),
        "kivi: key_bits=2.5; wanted a whole number or None": lambda: kvq.kivi(key_bits=2.5),
        "kivi: bits=True; wanted a whole number": lambda: kvq.kivi(bits=True),
        "kivi: window=(1, 2); wanted a whole number": lambda: kvq.kivi(window=(1, 2)),
        f"kivi: sinks={10**12}; wanted a whole number of at most 2147483647": lambda: kvq.kivi(
            sinks=10**12
        ),
        "kivi: sinks=-1; it must be a whole number of at least 0": lambda: kvq.kivi(sinks=-1),
        "kivi: bits=7; uniform codes have 1, 2, 3, 4, 5, 6 or 8 bits": lambda: kvq.kivi(bits=7),
        "higgs: seed=-1; it must be a whole number of at least 0": lambda: kvq.higgs(seed=-1),
        "turboquant: seed=-1; it must be a whole number of at least 0": lambda: kvq.turboquant(
            seed=-1
        ),
        "higgs: no grid of 7 bits in 1 dimensions; known: dim=1 with bits=2 or 3 or 4; dim=2 with bits=2 or 3 or 4; "
        "dim=4 with bits=2 or 3; dim=6 with bits=2": lambda: kvq.higgs(bits=7, dim=1),
        "commvq: levels=0; a power of two from 2 to 256": lambda: kvq.commvq(levels=0),
        "commvq: bits=5; value codes have 1 to 4 bits per channel": lambda: kvq.commvq(bits=5),
        "commvq: hidden=-1; it must be a whole number of at least 0": lambda: kvq.commvq(hidden=-1),
        "kivi_star: protected=-1 first layers; wanted a count from 0 to 4096": lambda: (
            kvq.kivi_star(protected=-1)
        ),
        "kivi: rope=None; wanted a word": lambda: kvq.kivi(rope=None),
        "kvquant: outliers=nan; wanted a number that is finite": lambda: kvq.kvquant(outliers=NAN),
        f"kivi: keep is 5; {KEEP}": lambda: kvq.kivi(keep=5),
        "KVShape: head_dim=(32, 64); wanted a whole number": lambda: dataclasses.replace(
            SHAPE, head_dim=(32, 64)
        ),
        "num_layers=0; it must be a whole number of at least 1": lambda: dataclasses.replace(
            SHAPE, num_layers=0
        ),
    }
    assert {wanted: refused(make) for wanted, make in lines.items()} == {
        wanted: wanted for wanted in lines
    }


def test_a_number_beyond_what_a_model_s_vectors_have_is_one_line():
    """The transform of 100000 channels is a matrix of 10 GB."""
    for text, message in (
        ("higgs:group=100000", "group=100000; a vector has 64 channels"),
        (
            "kvquant:slots=100",
            "slots=100: 100 outliers in a width of 64 channels; at least 2 must be none",
        ),
    ):
        method = kvq.parse(text)
        assert message in refused(
            lambda m=method: jax.eval_shape(lambda: kvq.init_cache(SHAPE, m, 1, 300))
        )


def test_zero_is_no_default():
    """An option that follows another where it is None: 0 bits are refused and not those of the
    other."""
    assert (
        refused(lambda: kvq.kivi(key_bits=0))
        == "kivi: bits=0; uniform codes have 1, 2, 3, 4, 5, 6 or 8 bits"
    )
    assert (
        refused(lambda: kvq.kivi(value_group=0)) == "kivi: group=0; a group has at least 1 channel"
    )


def test_numbers_of_numpy_are_numbers():
    assert kvq.kivi(bits=np.int64(2), window=np.int32(64)) == kvq.kivi(bits=2, window=64)
    assert str(kvq.kvquant(outliers=np.float32(0.5) / 32)) == str(kvq.kvquant(outliers=0.015625))


LAYER = KeysAndValues(key=Uniform(bits=2, along="tokens"), value=Uniform(bits=2, along="channels"))
DESCRIPTIONS = {
    "KVShape": SHAPE,
    "Rope": kvq.Rope(),
    "Method": kvq.Method(name="own", layer=LAYER),
    "Keep": Keep("streaming", 32),
    "MeshSize": MeshSize(),
    "Uniform": Uniform(bits=2, along="tokens"),
    "ExpertConfig": ExpertConfig(count=4, per_token=2, width=8),
    "ModelConfig": ModelConfig(
        vocab_size=50,
        width=32,
        mlp_width=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    ),
}
FIELDS = [
    (name, field.name) for name, held in DESCRIPTIONS.items() for field in dataclasses.fields(held)
]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=map("-".join, FIELDS))
def test_a_field_of_another_type_is_one_line(name, field):
    """Or is taken and stays comparable: no description can be made that cannot be hashed."""
    for value in WRONG:
        make = functools.partial(dataclasses.replace, DESCRIPTIONS[name], **{field: value})
        if refused(make) is None:
            assert hash(make()) == hash(make())
            assert make() == make()


def test_rules_are_asked_for_in_numbers():
    text = refused(lambda: rules_for(SHAPE, "kivi", MeshSize(model="2")))
    assert text == "MeshSize: model='2'; wanted a whole number"
