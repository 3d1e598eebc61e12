"""A prompt attends to itself alike on every path: blocks, a GPU's large tiles, all queries at once
as by cuDNN, splash attention in the interpreter."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import model_and_method, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import runs
from kvqjax.cache.readers import tiles
from kvqjax.pallas_kernels.forms import CUDNN, Kernels
from kvqjax.step import forward
from kvqjax.step import prompt as prefill
from kvqjax.step.prompt import Path, path_of


def prefilled(patch, path: Path, changes: dict, counts: list[int], length: int):
    model = tiny(head_dim=64, **changes)
    cache = kvq.init_cache(model, "kivi:bits=4,window=32,sinks=2", len(counts), length)
    patch.setattr(prefill, "path_of", lambda *_, **__: path)
    run = jax.jit(lambda *arguments: prefill._prefill(*arguments))
    logits, cache = run(model, cache, tokens(len(counts), length), jnp.asarray(counts))
    return logits, cache


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sliding", "kernels"),
    with_nightly(
        itertools.product([(None, 70), (9, 200)], ["tiles", "cudnn", "interpret"]),
        [((9, 200), "tiles")],
    ),
)
def test_paths_agree(monkeypatch, kernels, sliding):
    """On ragged and padded rows, one of them empty, with and without sliding windows, which are
    shorter than a part of a chunk, than a chunk, and longer: 384 tokens are three chunks."""
    monkeypatch.setattr("kvqjax.step.prompt.TILES", 1)  # up to three chunks' keys a tile
    arguments = {"sliding_window": sliding}, [300, 0, 129], 300
    wanted, held = prefilled(monkeypatch, Path("off", 64), *arguments)
    logits, cache = prefilled(monkeypatch, Path(kernels, 128), *arguments)
    np.testing.assert_allclose(logits[::2], wanted[::2], atol=1e-5)
    np.testing.assert_array_equal(cache.lengths, held.lengths)
    for run, other in zip(cache.runs, held.runs, strict=True):
        for name, x in run.window.items():
            np.testing.assert_allclose(x, other.window[name], atol=1e-5)


def test_not_finite_tokens_stay_in_their_rows(monkeypatch):
    model = tiny(head_dim=64)
    spoilt = model.replace(
        params=model.params | {"embed": model.params["embed"].at[7].set(jnp.nan)}
    )
    for path in (Path("tiles", 128), Path("cudnn", 128), Path("interpret", 128)):
        monkeypatch.setattr(prefill, "path_of", lambda *_, path=path, **__: path)
        prompt = jnp.full((2, 128), 3, jnp.int32).at[0, 5].set(7)
        cache = kvq.init_cache(spoilt, "exact", 2, 128)
        logits, cache = jax.jit(lambda *a: prefill._prefill(*a))(
            spoilt, cache, prompt, jnp.full((2,), 128)
        )
        assert np.isnan(logits[0]).all()
        assert np.isfinite(logits[1]).all()
        np.testing.assert_array_equal(cache.finite, [5, 128])


def test_the_chip_and_the_length_choose_the_path():
    layout = kvq.init_cache(tiny(head_dim=128), "exact", 1, 64).layout

    def on(target):
        return dataclasses.replace(layout, target=target)

    assert path_of(on("cpu"), 1, 32768) == Path("off", 512)
    assert path_of(on("sm90"), 1, 32768) == Path("tiles", 4096)
    assert path_of(on("sm90"), 1, 4608) == Path("tiles", 2560)  # no more padding than there must be
    assert path_of(on("sm90"), 512, 32768) == Path("tiles", 512)  # as memory allows
    # Of a program that is compiled elsewhere cuDNN is no part; a check on the chip itself lets it
    # in.
    found = dataclasses.replace(on("sm90"), kernels=Kernels("auto", (CUDNN,), "checked"))
    assert path_of(found, 512, 32768) == Path("cudnn", 4096)
    assert path_of(found, 1, 32768, score_sinks=True) == Path("tiles", 4096)
    capped = dataclasses.replace(found, shape=dataclasses.replace(found.shape, softcap=30.0))
    assert path_of(capped, 1, 32768) == Path("off", 512)
    assert path_of(on("v6e"), 1, 32768) == Path("splash", 1024)
    assert path_of(on("v6e"), 1, 1536) == Path("splash", 1024)
    assert path_of(on("v6e"), 1, 256) == Path("off", 256)
    other = kvq.init_cache(tiny(head_dim=48), "exact", 1, 64).layout
    assert path_of(dataclasses.replace(other, target="v6e"), 1, 32768) == Path("off", 512)


@pytest.mark.parametrize(
    ("name", "kernels"),
    with_nightly(
        itertools.product(["kivi4-float32", "kvquant", "sliding", "aqua"], ["tiles", "interpret"]),
        [("sliding", "interpret")],
    ),
)
def test_chunks_agree(monkeypatch, kernels, name):
    """A chunk on a body that is read in large blocks, of which the last begins within the one
    before it where nothing flows from layer to layer, and attended to by splash attention: as in
    small blocks. One row's chunk is padded."""
    model, method = model_and_method(name, head_dim=64)
    held, length, new = [2900, 1500, 3], 128, [128, 100, 128]
    cache = kvq.init_cache(model, method, 3, 3200)
    prompt = tokens(3, 3000)
    _, cache = kvq.prefill(model, prompt, jnp.asarray(held), cache)
    arguments = model, cache, tokens(3, length, seed=2), jnp.asarray(new, jnp.int32)
    wanted, _ = kvq.attend(*(arguments[0], *arguments[2:], arguments[1]))
    monkeypatch.setattr(runs, "tiles_of", lambda layout: kernels)
    runs._runs_of.cache_clear()
    monkeypatch.setattr(tiles, "DECODED", 3 * 2048)
    monkeypatch.setattr(tiles, "SCORES", 4 * 3 * 4 * length * 2048)
    found, _ = jax.jit(lambda *a: forward._attend(*a, within="chunk", last=False))(*arguments)
    runs._runs_of.cache_clear()
    for row, count in enumerate(new):
        # KIVI's plain path folds scales into queries, so it rounds otherwise: 2e-5 were seen.
        np.testing.assert_allclose(found[row, :count], wanted[row, :count], atol=4e-5)
