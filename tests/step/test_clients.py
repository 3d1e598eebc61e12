"""Five models that other libraries' users write (examples/clients): over an exact cache they make
the tokens that they make over their own, and over compressed ones they run. Prompts are ragged,
caches are donated."""

import functools
import importlib
import itertools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly

import kvqjax as kvq

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "clients"
CLIENTS = ("nnx_model", "pure_jax", "gemma_linen", "tunix_sampler")
COMPRESSED = {
    "kivi": "kivi:bits=4,window=0",
    "higgs": "higgs:bits=4,window=0",
    "calibrated": "kvquant:bits=3",
}
# Of layer 0's keys and values, over their size.
ERROR = {
    "kivi": 0.2,
    "higgs": 0.2,
    "calibrated": 0.4,
}
COUNT = 8  # new tokens


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


@functools.cache
def client(name: str):
    """A client's module and its weights."""
    module = importlib.import_module(name)
    return module, module.make()


def prompts() -> list[list[int]]:
    return sys.modules["parts"].prompts()


@functools.cache
def exact(name: str):
    """Tokens over an exact cache, and that cache."""
    module, weights = client(name)
    return module.cached(weights, prompts(), COUNT, "exact")


def stored(cache, layer: int, constants=None):
    """Keys [B, S, K, D] as the layer gave them, values, and which tokens a next one sees."""
    keys, values, valid = kvq.dense(cache, layer, constants=constants)
    unrotated = sys.modules["parts"].rotary(
        keys, jnp.broadcast_to(-jnp.arange(keys.shape[1]), keys.shape[:2])
    )
    return [np.asarray(x) for x in (unrotated, values, valid)]


@functools.cache
def constants(name: str):
    """What `kvq.calibrate.from_tensors` makes of a client's keys and values."""
    module, cache = client(name)[0], exact(name)[1]
    # Tokens that a sliding window shows too.
    newest = np.asarray(cache.lengths)[:, None] - 1 - np.arange(20)[None]
    taken = [stored(cache, layer) for layer in range(module.SHAPE.num_layers)]
    keys, values = (
        [np.take_along_axis(x[part], newest[..., None, None], 1) for x in taken] for part in (0, 1)
    )
    return kvq.calibrate.from_tensors(
        COMPRESSED["calibrated"], module.SHAPE, keys=keys, values=values
    ).constants


@pytest.mark.parametrize("name", with_nightly(CLIENTS, ["nnx_model"]))
def test_an_exact_cache_gives_the_tokens_of_the_models_own(name):
    module, weights = client(name)
    tokens, cache = exact(name)
    assert tokens == module.plain(weights, prompts(), COUNT)
    assert len({*map(tuple, tokens)}) == len(tokens)
    ends = [len(row) + COUNT - 1 for row in prompts()]
    assert sorted(cache.lengths.tolist()) == sorted(ends)
    assert not cache.overflow.any()


def gathered(cache, module, folder, constants):
    """A cache on one device, whose tokens may have been dealt over several."""
    if cache.layout.dealt == 1:
        return cache
    kvq.save_cache(folder / "cache", cache, module.SHAPE, constants=constants)
    return kvq.load_cache(folder / "cache", module.SHAPE, constants=constants)


def run(name: str, kind: str, folder, **options):
    """Run a client over a compressed cache, and compare what layer 0 stores of the prompts with
    what it was given."""
    module, weights = client(name)
    given = {"constants": constants(name)} if kind == "calibrated" else {}
    tokens, cache = module.cached(weights, prompts(), COUNT, COMPRESSED[kind], **given, **options)
    assert np.shape(tokens) == (len(prompts()), COUNT)
    assert max(run.flushed[0].max() for run in cache.runs) > 0, "no token is encoded"
    assert kvq.ledger(cache).bits_method < 6
    cache = gathered(cache, module, folder, given.get("constants"))
    wanted, got = stored(exact(name)[1], 0), stored(cache, 0, given.get("constants"))
    prompt = np.arange(got[2].shape[1]) < np.asarray([[len(row)] for row in prompts()])
    assert got[2][prompt].all()
    for part in (0, 1):
        error = np.linalg.norm((got[part] - wanted[part])[prompt]) / np.linalg.norm(
            wanted[part][prompt]
        )
        assert 0 < error < ERROR[kind]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "name"),
    with_nightly(itertools.product(COMPRESSED, CLIENTS), [("kivi", "nnx_model")]),
)
def test_a_compressed_cache_holds_what_the_layers_gave(name, kind, tmp_path):
    run(name, kind, tmp_path)


def auto_mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["nnx_model", "gemma_linen"])
def test_a_cache_on_an_automatic_mesh(name):
    module, weights = client(name)
    options = {"mesh": auto_mesh(), "batch_axis": "data", "head_axis": "model"}
    tokens, cache = module.cached(weights, prompts(), COUNT, "exact", **options)
    assert tokens == exact(name)[0]
    assert len(cache.runs[0].window["k"].devices()) == 4


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["exact", "kivi"])
def test_another_explicit_mesh(kind):
    module, weights = client("pure_jax")
    weights = module.make(module.meshes()[1])
    spec = COMPRESSED.get(kind, kind)
    tokens, cache = module.cached(weights, prompts(), COUNT, spec)
    assert tokens == client("pure_jax")[0].cached(client("pure_jax")[1], prompts(), COUNT, spec)[0]
    assert len(cache.lengths.devices()) == 8


@pytest.mark.nightly
def test_beams_pick_rows_of_the_cache():
    module, weights = client("tunix_sampler")
    wanted = module.plain(weights, prompts(), COUNT, beams=3)
    tokens, cache = module.cached(weights, prompts(), COUNT, "exact", beams=3)
    assert tokens == wanted != exact("tunix_sampler")[0]
    assert cache.batch == 3 * len(prompts())


@pytest.mark.parametrize(
    "name", with_nightly(["pure_jax", "gemma_linen"], ["pure_jax"])
)  # of nnx.Variable: test_flax_bridge.py
def test_a_donated_cache_is_gone(name, monkeypatch):
    """Every step takes the memory of the cache that it was given, or hands on arrays that it did
    not change."""
    module, weights = client(name)
    made = []
    init = kvq.init_cache
    monkeypatch.setattr(
        kvq, "init_cache", lambda *args, **options: made.append(init(*args, **options)) or made[-1]
    )
    kept = {id(x) for x in jax.tree.leaves(module.cached(weights, prompts(), 2, "exact")[1])}
    named = jax.tree_util.tree_leaves_with_path(made[0])
    assert [path for path, x in named if not x.is_deleted() and id(x) not in kept] == []


@pytest.mark.parametrize("name", CLIENTS)
def test_few_lines_are_ours(name):
    """Those that name anything of kvqjax, and those of the branch that takes its cache, are marked
    and counted."""
    lines = (FOLDER / f"{name}.py").read_text().split('"""', 2)[2].splitlines()
    marked = [line for line in lines if line.endswith("# kvqjax")]
    ours = r"\bkvq\.|kvqjax|CacheModule|ForwardPass|linen_cache|\btunix\.|views\[|\bviews ="
    assert [
        line
        for line in lines
        if re.search(ours, line.removesuffix("# kvqjax")) and line not in marked
    ] == []
    assert len(marked) <= (11 if name == "tunix_sampler" else 10)


def test_the_page_shows_lines_of_the_models():
    """Every line of code on the page stands in a client, and all lines of kvqjax that a client
    marks are those of the page or of its kind. The example of paged attention is run by
    test_tpu_inference.py."""
    page = (FOLDER.parents[1] / "docs" / "howto" / "clients.md").read_text()
    code = {line for name in CLIENTS for line in (FOLDER / f"{name}.py").read_text().splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shown = [
        line
        for block in blocks
        if "kvqjax.adapters.tpu_inference" not in block
        for line in block.splitlines()
    ]
    assert len(shown) > 40
    assert [line for line in shown if line not in code] == []
    for name in CLIENTS:
        marked = sum(
            line.endswith("# kvqjax") for line in (FOLDER / f"{name}.py").read_text().splitlines()
        )
        assert f"(`{name}.py`, {marked} lines)" in page.replace("\n", " ")
