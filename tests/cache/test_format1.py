"""Folders of format 1, which left out options at their defaults, are read with the defaults of their time.

They were written before `centre="auto"` was any method's default (tests/data/format1: a cache of `biased`, an artifact,
and the logits that both gave then)."""

import json
from pathlib import Path

import numpy as np
import pytest
from biased import biased, filled, logits

import kvqjax as kvq
from kvqjax.cache.artifacts import FORMAT, Artifact
from kvqjax.methods import spelled_out

FOLDER = Path(__file__).parents[1] / "data" / "format1"
CACHE, ARTIFACT = "higgs:bits=3,group=head,buffer=32", "aqua:bits=3,first_bits=3,group=32,buffer=32"


def close(found, name: str) -> None:
    with np.load(FOLDER / "logits.npz") as stored:
        np.testing.assert_allclose(found, stored[name], atol=1e-2 * np.abs(stored[name]).max())


def description(folder: Path) -> dict:
    return json.loads((folder / "description.json").read_text())


def test_a_cache_decodes_as_it_was_encoded():
    """Its words are of keys with their bias, its text is that of a method which takes the bias off today."""
    assert (description(FOLDER / "cache")["format"], description(FOLDER / "cache")["method"]) == (1, CACHE)
    cache = kvq.load_cache(FOLDER / "cache", biased())
    assert cache.layout.method == kvq.parse(CACHE + ",centre=none") != kvq.parse(CACHE)
    close(logits(biased(), cache), "cache")


def test_an_artifact_is_of_the_method_it_was_fitted_for():
    assert (description(FOLDER / "artifact")["format"], description(FOLDER / "artifact")["method"]) == (1, ARTIFACT)
    artifact = kvq.load_artifact(FOLDER / "artifact")
    assert artifact.method == kvq.parse(ARTIFACT + ",centre=none") != kvq.parse(ARTIFACT)
    model = biased().with_artifact(artifact)
    close(logits(model, filled(model, artifact.method)), "artifact")


@pytest.mark.parametrize("text", ["kivi:bits=2,window=32;0=higgs:bits=4", "aqua:bits=2;1=exact", "exact"])
def test_layers_of_their_own_have_the_defaults_of_then_too(text, tmp_path):
    folder = tmp_path / "old"
    Artifact(kvq.exact(), (), "", {}).save(folder)
    old = description(folder) | {"format": 1, "method": text}
    (folder / "description.json").write_text(json.dumps(old))
    then = text.replace("higgs:bits=4", "higgs:bits=4,centre=none").replace("aqua:bits=2", "aqua:bits=2,centre=none")
    assert kvq.load_artifact(folder).method == kvq.parse(then)


def test_format_2_stores_every_option(tmp_path):
    method = kvq.parse(CACHE)
    Artifact(method, (), "", {}).save(tmp_path / "artifact")
    kvq.save_cache(tmp_path / "cache", kvq.init_cache(biased(), method, 1, 64), biased())
    for name in ("artifact", "cache"):
        about = description(tmp_path / name)
        assert (about["format"], about["method"]) == (FORMAT, spelled_out(method)) == (2, about["method"])
        assert "centre=auto" in about["method"]
    assert kvq.load_artifact(tmp_path / "artifact").method == method
    assert str(kvq.load_cache(tmp_path / "cache", biased()).layout.method) == CACHE
