"""A method of another package has a name like ours; what is wrong with one is said in one line."""

import dataclasses
import importlib.metadata
import json
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from commands import run
from tiny import tiny

import kvqjax as kvq
from kvqjax import Method
from kvqjax.cache import runs_of
from kvqjax.cache.artifacts import Artifact
from kvqjax.codecs import Codec, Fit, Uniform
from kvqjax.methods import KeysAndValues, direct, method_factory, registry
from kvqjax.methods.registry import GROUP, Methods
from kvqjax.pallas_kernels.adapters import packed_form


@method_factory
def wide(*, bits: int = 4, window: int = 0) -> Method:
    """One scale for 64 channels of a token."""
    codec = Uniform(bits=bits, along="channels", group=32)
    return Method(name="", layer=KeysAndValues(key=codec, value=codec, window=window))


@pytest.fixture
def package(monkeypatch):
    """A package with entry points of the names and values that are given to what this returns."""
    monkeypatch.setitem(sys.modules, "their_package", types.SimpleNamespace(wide=wide))
    find = importlib.metadata.entry_points

    def install(**entries: str) -> Methods:
        made = [
            importlib.metadata.EntryPoint(name, value, GROUP) for name, value in entries.items()
        ]
        monkeypatch.setattr(
            "kvqjax.methods.registry.entry_points", lambda group: [*find(group=group), *made]
        )
        methods = Methods(registry.OWN)
        for module in ("kvqjax.methods.registry", "kvqjax.cli.info"):
            monkeypatch.setattr(f"{module}.METHODS", methods)
        return methods

    return install


def test_a_method_of_another_package_has_a_name(package, capsys, monkeypatch):
    package(wide="their_package:wide")
    assert kvq.parse("wide:bits=3;0=exact") == kvq.policy(wide(bits=3), {"0": "exact"})
    assert kvq.parse(kvq.to_dict("wide:bits=3")) == wide(bits=3)
    code, out, err = run(capsys, monkeypatch, "plan", "-m", "recall", "-c", "wide:bits=3", "--json")
    assert code == 0, err
    assert "wide:bits=3" in out
    code, out, err = run(capsys, monkeypatch, "methods", "--json")
    assert (code, "wide" in {row["method"] for row in json.loads(out)}) == (0, True), err
    made = kvq.generate(kvq.load("recall"), [[5, 6, 7]], "wide:bits=3", max_new_tokens=2)
    assert len(made.tokens[0]) == 2
    with pytest.raises(kvq.UserError, match="did you mean 'wide'"):
        kvq.parse("wid:bits=3")


def test_one_that_cannot_be_used_is_named(package):
    package(lost="no_such_package:lost")
    with pytest.raises(
        kvq.UserError, match="method 'lost' of no_such_package:lost cannot be imported"
    ):
        kvq.parse("lost")
    assert kvq.parse("kivi:bits=2") == kvq.kivi(bits=2)
    package(kivi="their_package:wide")
    with pytest.raises(kvq.UserError, match="is a method of kvqjax"):
        kvq.parse("kivy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gained:
    """Their codec: uniform codes of numbers over a calibrated gain, with a kernel and XLA forms
    that exist already."""

    inner: Uniform
    needs: bool = True

    def build(self, width: int) -> Codec:
        inner = self.inner.build(width)
        if not self.needs:
            return inner

        def encode(constants, x):
            return inner.encode({}, x / constants["gain"][0])

        def decode(constants, tile):
            return inner.decode({}, tile) * constants["gain"][0]

        return inner._replace(
            encode=encode, decode=decode, needs={"gain": (1,)}, fit=Fit("their_package.fitting")
        )

    def packed(self, value, rope, shape):
        return None if self.needs else packed_form(self.inner, value.inner, rope, shape)

    def scores(self, shape):
        return None if self.needs else direct.key_form(self.inner, shape)

    def values(self, shape):
        return None if self.needs else direct.value_form(self.inner, shape)


@method_factory
def gained(*, bits: int = 4, needs: bool = True) -> Method:
    """Uniform codes over a calibrated gain."""
    key, value = (
        Gained(inner=Uniform(bits=bits, along=along), needs=needs)
        for along in ("tokens", "channels")
    )
    return Method(name="", layer=KeysAndValues(key=key, value=value, window=32))


DEFAULTS = {
    "DEFAULT_SEQUENCES": 2,
    "DEFAULT_LENGTH": 32,
    "work": lambda model, method, count, length: 1.0,
}


def _calibrate(model, method, tokens, *, state=None, advance=lambda done, total: None) -> Artifact:
    advance(1, 1)
    gain = jnp.full((model.config.num_layers, 1), float(len(tokens)))
    return Artifact(
        method,
        ({"k": {"gain": gain}, "v": {"gain": gain}},),
        model.fingerprint,
        {"their": "report"},
    )


@pytest.fixture
def theirs(package, monkeypatch):
    """Their package with a codec that is calibrated by a module of theirs."""
    fitting = types.ModuleType("their_package.fitting")
    vars(fitting).update(DEFAULTS, calibrate=_calibrate)
    monkeypatch.setitem(
        sys.modules, "their_package", types.SimpleNamespace(gained=gained, fitting=fitting)
    )
    monkeypatch.setitem(sys.modules, "their_package.fitting", fitting)
    return package(gained="their_package:gained")


@pytest.mark.nightly
def test_a_calibrated_codec_of_another_package(theirs, capsys, monkeypatch, tmp_path):
    """Named, listed, calibrated and used from the command line; what calibrates it is found by its
    codec's `fit`."""
    code, out, err = run(capsys, monkeypatch, "methods", "--json")
    assert ("gained", "text") in [(row["method"], row["needs"]) for row in json.loads(out)], err
    folder, choice = str(tmp_path / "made"), ("-m", "recall", "-c", "gained:bits=4")
    code, out, err = run(capsys, monkeypatch, "calibrate", *choice, "--out", folder)
    assert code == 0, err
    artifact = kvq.load_artifact(folder)
    assert (str(artifact.method), artifact.about["their"]) == ("gained:bits=4", "report")
    ready = kvq.load("recall").with_artifact(artifact)
    assert len(kvq.generate(ready, [[5, 6, 7]], "gained:bits=4", max_new_tokens=2).tokens[0]) == 2
    monkeypatch.delitem(sys.modules, "their_package.fitting")
    code, out, err = run(capsys, monkeypatch, "calibrate", *choice, "--out", folder + "2")
    assert code == 2
    assert (
        "their_package.fitting, which a method names for its calibration, cannot be imported" in err
    )


def test_constants_that_nothing_finds_are_named():
    model, key = tiny(), Uniform(bits=4, along="channels", group=16)
    layer = KeysAndValues(key=_Bare(inner=key), value=key)
    with pytest.raises(kvq.UserError, match="has constants, and no `fit`"):
        kvq.calibrate.run(model, Method(name="bare", layer=layer), "text")


class _Bare(Gained):
    def build(self, width: int) -> Codec:
        return super().build(width)._replace(fit=None)


@pytest.mark.nightly
def test_a_codec_of_another_package_names_its_fast_path(theirs):
    """Kernels and XLA's forms are asked of the codec's spec; logits are those of the codec it
    stands for."""
    model, methods = (
        tiny(head_dim=128, num_layers=1),
        ("gained:needs=false", "kivi:bits=4,window=32"),
    )
    forms = {"packed": "planes", "direct": "heads"}
    for name, form in forms.items():
        caches = [kvq.init_cache(model, method, 1, 128, form=form) for method in methods]
        theirs_, ours = (getattr(runs_of(cache.layout)[0].wiring.fast, name) for cache in caches)
        assert theirs_ is not None
        assert name == "direct" or theirs_ == ours
    tokens, logits = jnp.asarray(np.arange(64)[None] % 50), []
    for cache in caches:  # head by head
        cache = kvq.forward(model, tokens, jnp.asarray([64]), cache)[1]
        logits.append(np.asarray(kvq.forward(model, tokens[:, :1], jnp.asarray([1]), cache)[0]))
    np.testing.assert_array_equal(*logits)
