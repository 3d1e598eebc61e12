"""Matrices lie in the tiles in which their chip multiplies by them, and numbers stay what they are:
on a CPU, where tiles are a note beside an array up to jax 0.10. Later releases refuse them
there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CONFIG, assert_same, random_params
from hf_folders import save_params
from jax.experimental.layout import Format, Layout

import kvqjax as kvq
from kvqjax.model import decoder, weight_trees, weights
from kvqjax.model.weight_trees import MATRICES

TALL = ((16, 128), (2, 1))


@pytest.fixture(autouse=True, scope="module")
def tiles_on_a_cpu():
    x = jnp.zeros((16, 32), jnp.bfloat16)  # less than a tile
    try:
        jax.device_put(x, Format(Layout((0, 1), tiling=TALL), x.sharding)).block_until_ready()
    except jax.errors.JaxRuntimeError:
        pytest.skip(f"jax {jax.__version__} holds no tiled arrays on a CPU")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_params(tmp_path, random_params(), CONFIG)
    monkeypatch.setattr(weight_trees, "CHIP", jax.devices()[0].device_kind)
    return tmp_path


def tiled(params) -> set[str]:
    """Names of the parameters that lie in tall tiles."""
    found = set()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        if x.format == Format(Layout(tuple(range(x.ndim)), tiling=TALL), x.sharding):
            found.add(name)
    return found


OWN = MATRICES & {
    "head",
    *(f"layers/{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")),
}


@pytest.mark.parametrize(
    ("layers", "piece"),
    [
        pytest.param("scan", 1, id="scan-layer-by-layer", marks=pytest.mark.nightly),
        pytest.param("scan", 2**28, id="scan-at-once"),
        pytest.param("unroll", 1, id="unroll-layer-by-layer"),
        pytest.param("unroll", 2**28, id="unroll-at-once", marks=pytest.mark.nightly),
    ],
)
def test_loaded_matrices_are_tiled(layers, piece, folder, monkeypatch):
    monkeypatch.setattr(weights, "PIECE", piece)
    params = weights.load_params(folder, CONFIG, jnp.bfloat16, layers=layers)
    assert tiled(params) == OWN
    assert tiled(weights.load_params(folder, CONFIG, jnp.float32, layers=layers)) == set()
    monkeypatch.setattr(weight_trees, "CHIP", "another")
    plain = weights.load_params(folder, CONFIG, jnp.bfloat16, layers=layers)
    assert tiled(plain) == set()
    assert_same(params, plain)


def test_codes_are_not_tiled_nor_what_is_tiled_already(folder):
    coded = weights.load_params(folder, CONFIG, jnp.bfloat16, bits=8)
    assert coded["layers"]["q"].codes.format.layout.tiling != TALL
    params = weights.load_params(folder, CONFIG, jnp.bfloat16)
    weight_trees.as_multiplied(params, put=lambda x, place: pytest.fail("moved again"))


def test_a_mesh_s_parts_are_tiled_and_programs_take_them_so(folder):
    model, tokens = kvq.load(folder, dtype="bf16"), jnp.asarray([[3, 4, 5, 6]], jnp.int32)
    plain = model.replace(params=jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), model.params))
    step = jax.jit(lambda params: decoder.logits(params, tokens, CONFIG))
    wanted = step(plain.params)
    assert tiled(plain.params) == set()
    np.testing.assert_array_equal(step(model.params), wanted)
    taken = step.lower(model.params).compile().input_formats[0][0]
    assert taken["layers"]["q"].layout.tiling == TALL
    spread = kvq.shard(plain, "exact", model=4)
    assert tiled(spread.params) == OWN
    found, _ = kvq.prefill(spread, tokens, jnp.asarray([4]), kvq.init_cache(spread, "exact", 1, 32))
    np.testing.assert_allclose(found, wanted[:, -1], atol=0.1 * float(np.std(wanted)))
