"""A saved cache comes back bit for bit, and only for what wrote it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import check_row, extend, fresh
from cases import FEW, model_and_method, with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax.model.config import RopeConfig
from kvqjax.step import persist


@pytest.mark.parametrize("name", with_nightly(FEW, ["kivi2"]))
def test_comes_back(name, tmp_path):
    model, _ = model_and_method(name)
    cache = fresh(name, [list(range(150)), list(range(33))])
    kvq.save_cache(tmp_path / "cache", cache, model)
    back = kvq.load_cache(tmp_path / "cache", model)
    assert back.layout == cache.layout
    jax.tree.map(np.testing.assert_array_equal, cache, back)
    check_row(name, extend(name, back, [[1, 2], [3] * 40]), 1, list(range(33)) + [3] * 40)


def test_digests_differ_by_the_length_of_a_rope():
    config = tiny(rope=RopeConfig(theta=500.0)).config
    longer = dataclasses.replace(config.rope, kind="dynamic", factor=2.0, original_max_position=64)
    ropes = [config.rope, *(longer.for_length(n) for n in (64, 128, 256))]
    assert len({persist._digest(tiny(rope=rope).config.kv_shape) for rope in ropes}) == 4


def test_refused_by_another_model(tmp_path):
    model, _ = model_and_method("kivi2")
    kvq.save_cache(tmp_path / "cache", fresh("kivi2", [list(range(50))]), model)
    others = {
        "config": tiny(rope=dataclasses.replace(model.config.rope, theta=1e6)),
        "fingerprint": dataclasses.replace(model, fingerprint="weights=1234"),
        "constants": dataclasses.replace(model, constants=({"k": {"scale": jnp.ones((2, 4))}},)),
    }
    for field, other in others.items():
        with pytest.raises(kvq.UserError, match=f"another {field}"):
            kvq.load_cache(tmp_path / "cache", other)
    with pytest.raises(kvq.UserError, match="exists already"):
        kvq.save_cache(tmp_path / "cache", fresh("kivi2", [list(range(50))]), model)


def test_damage_is_named(tmp_path):
    model, _ = model_and_method("kivi2")
    kvq.save_cache(tmp_path / "cache", fresh("kivi2", [list(range(50))]), model)
    path = tmp_path / "cache" / "description.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"capacity": 1024}))
    with pytest.raises(kvq.UserError, match="should be"):
        kvq.load_cache(tmp_path / "cache", model)


def test_a_cache_of_a_shape_comes_back_for_its_shape_and_constants(tmp_path):
    """Saved and loaded without a model: by KVShape and, where there are any, an artifact's
    constants."""
    model, _ = model_and_method("kivi2")
    shape, cache = model.config.kv_shape, fresh("kivi2", [list(range(150)), list(range(33))])
    cache = cache.replace(layout=dataclasses.replace(cache.layout, shape=shape.alone))
    constants = ({"k": {"mean": np.ones((2, 32), np.float32)}},)
    for name, own in (("plain", None), ("calibrated", constants)):
        kvq.save_cache(tmp_path / name, cache, shape, constants=own)
        back = kvq.load_cache(tmp_path / name, shape, constants=own)
        assert back.layout == cache.layout
        jax.tree.map(np.testing.assert_array_equal, cache, back)
    other = dataclasses.replace(shape, rope=None)
    with pytest.raises(kvq.UserError, match="another config"):
        kvq.load_cache(tmp_path / "plain", other)
    with pytest.raises(kvq.UserError, match="another constants"):
        kvq.load_cache(tmp_path / "calibrated", shape)
    with pytest.raises(kvq.UserError, match="cache of another shape"):
        kvq.save_cache(tmp_path / "wrong", cache, other)
    with pytest.raises(kvq.UserError, match="another fingerprint"):
        kvq.load_cache(tmp_path / "plain", model)
    path = tmp_path / "plain" / "description.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "complex64"}))
    with pytest.raises(kvq.UserError, match="dtype 'complex64' is unknown"):
        kvq.load_cache(tmp_path / "plain", shape)
