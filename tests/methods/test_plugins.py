"""A method of another package has a name like ours; what is wrong with one is said in one line."""

import importlib.metadata
import json
import sys
import types

import pytest
from commands import run

import kvqjax as kvq
from kvqjax.codecs import Uniform
from kvqjax.methods import KeysAndValues, Method, method_factory, registry
from kvqjax.methods.plugins import GROUP, Methods


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
        made = [importlib.metadata.EntryPoint(name, value, GROUP) for name, value in entries.items()]
        monkeypatch.setattr("kvqjax.methods.plugins.entry_points", lambda group: [*find(group=group), *made])
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
    with pytest.raises(kvq.UserError, match="method 'lost' of no_such_package:lost cannot be imported"):
        kvq.parse("lost")
    assert kvq.parse("kivi:bits=2") == kvq.kivi(bits=2)
    package(kivi="their_package:wide")
    with pytest.raises(kvq.UserError, match="is a method of kvqjax"):
        kvq.parse("kivy")
