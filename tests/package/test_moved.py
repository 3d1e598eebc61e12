"""Modules under their old names: importable for one version, with a warning."""

import importlib
import subprocess
import sys
import warnings

import pytest

from kvqjax import _moved


def test_an_old_name_gives_the_same_module():
    """In a fresh process, because an import keeps both names."""
    script = """if True:
        import importlib, sys, warnings, kvqjax
        warnings.simplefilter("ignore")
        forward = kvqjax.forward
        for pair in sys.argv[1:]:
            names = [f"kvqjax.{name}" for name in pair.split("=")]
            old, new = map(importlib.import_module, names)
            assert old is new and new.__spec__.name == new.__name__ == names[1], pair
        assert kvqjax.forward is forward
    """
    pairs = [f"{old}={new}" for old, new in {**_moved.MOVED, "forward": "step.forward"}.items()]
    subprocess.run([sys.executable, "-c", script, *pairs], check=True)


def test_it_is_said_what_the_new_name_is():
    sys.modules.pop("kvqjax.attention", None)
    with pytest.warns(DeprecationWarning, match=r"kvqjax\.attention is now kvqjax\.ops\.attention"):
        importlib.import_module("kvqjax.attention")


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("decoder", "init_params", "model.weight_trees"),
        ("forward", "init_cache", "step.new_cache"),
        ("sharding", "MeshSize", "parallel.mesh_size"),
    ],
)
def test_names_that_went_elsewhere_are_found_in_the_old_module(old, name, new):
    if old != "forward":
        sys.modules.pop(f"kvqjax.{old}", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"kvqjax.{old}")
    assert getattr(module, name) is getattr(importlib.import_module(f"kvqjax.{new}"), name)


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("cache", "plan", "cache.runs.runs_of"),
        ("cache.append", "window_tokens", "cache.state.window_tokens"),
        ("methods.wiring", "through_heads", "methods.summing.through_heads"),
        ("model", "Placement", "model.loading.Placement"),
    ],
)
def test_names_that_moved_out_of_modules_that_stay_warn(old, name, new):
    place, _, named = new.rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"kvqjax\.{old}\.{name} is now kvqjax\.{new}"):
        found = getattr(importlib.import_module(f"kvqjax.{old}"), name)
    assert found is getattr(importlib.import_module(f"kvqjax.{place}"), named)
    assert not hasattr(importlib.import_module(f"kvqjax.{old}"), "nothing")


def test_every_place_named_exists():
    for old, places in _moved.NAMES.items():
        assert all(importlib.import_module(f"kvqjax.{place}").__all__ for place in places), old
