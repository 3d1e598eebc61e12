"""Public functions called outside jit, again and again: nothing is compiled anew, and the process
keeps its size."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import model_and_method
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax import KVShape

METHOD = kvq.parse("kivi:bits=2,window=32,sinks=2")
ROWS, LENGTH, CALLS = 2, 48, 8
# Policies and their text; nothing of theirs is an array. `join_hosts` runs once in a process,
# `fetch` brings files.
NO_ARRAYS = {"fetch", "join_hosts", "parse", "policy", "to_dict"} | {
    m.__name__ for m in kvq.METHODS.values()
}
PROGRAMS = [0]


def _count(name: str, seconds: float, **_):
    PROGRAMS[0] += name.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


def memory_maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def counts(number: int):
    return jnp.asarray([LENGTH - number % 7, 30 + number % 5], jnp.int32)


def filled(model):
    return kvq.forward(
        model, tokens(ROWS, LENGTH), counts(0), kvq.init_cache(model, METHOD, ROWS, 512)
    )[1]


def on_caches(model) -> dict:
    """Functions of a model and its caches, which run on a mesh too; called with the call's
    number."""
    cache, blank = filled(model), kvq.init_cache(model, METHOD, ROWS, 512)
    sources = kvq.attend(model, tokens(ROWS, LENGTH), counts(0), cache)[1]
    return {
        "init_cache": lambda n: kvq.init_cache(model, METHOD, ROWS, 512),
        "forward": lambda n: kvq.forward(
            model, tokens(ROWS, LENGTH, n), counts(n), cache, last=True
        ),
        "attend": lambda n: kvq.attend(
            model, tokens(ROWS, LENGTH, n), counts(n), cache, within="step"
        ),
        "commit": lambda n: kvq.commit(model, cache, sources, counts(n)),
        "prefill": lambda n: kvq.prefill(model, tokens(ROWS, LENGTH, n), counts(n), blank),
        "crop": lambda n: kvq.crop(cache, counts(n) - n),
        "evict": lambda n: kvq.evict(cache, jnp.asarray([n % 2 == 0, True])),
        "fork": lambda n: kvq.fork(cache),
        "ledger": lambda n: kvq.ledger(cache).bytes,
        "generate": lambda n: (
            kvq.generate(model, [[1, n], [n]], METHOD, max_new_tokens=9, temperature=n / 9).tokens
        ),
        "stream": lambda n: [
            part.tokens for part in kvq.stream(model, [[n, 2], [3]], METHOD, max_new_tokens=20)
        ],
    }


def on_one_device(tmp_path: Path) -> dict:
    """The rest: what is written for one device, or reads and writes folders."""
    model, number = tiny(), itertools.count()
    cache, folder = filled(model), tmp_path / "cache"
    kvq.save_cache(folder, cache, model)
    recall, xquant = kvq.load("recall"), model_and_method("xquant-latents")
    kvq.calibrate.run(*xquant).save(tmp_path / "artifact")
    shape = KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    layers = kvq.init_cache(shape, "kivi:bits=2,window=32", ROWS, 512)
    q, k, v = (jnp.ones((ROWS, LENGTH, heads, 16)) for heads in (4, 2, 2))
    new = [kvq.attend_layer(layers, layer, q, k, v, counts(0))[1] for layer in range(2)]
    views = [view.attend(q, k, v)[1] for view in kvq.layers(layers, counts(0))]
    halves = kvq.cut(cache, 2)
    paged = kvq.init_cache(shape, "kivi:bits=2,window=32", ROWS, 512, pages=8)
    table = np.full(paged.pages.shape, -1, np.int32)
    return {
        "attend_layer": lambda n: kvq.attend_layer(layers, n % 2, q, k, v, counts(n)),
        "append": lambda n: kvq.append(layers, new, counts(n)),
        "layers": lambda n: kvq.layers(layers, counts(n), stack=LENGTH),
        "commit_layers": lambda n: kvq.commit_layers(views, counts(n)),
        "dense": lambda n: kvq.dense(cache, n % 2, model),
        "below_first": lambda n: kvq.below_first(layers, counts(n), LENGTH),
        "gather": lambda n: kvq.gather(cache, jnp.asarray([n % 2, 0, 1])),
        "insert": lambda n: kvq.insert(cache, n % 2, cache, 1),
        "repeat": lambda n: kvq.repeat(cache, 2),
        "resize": lambda n: kvq.resize(cache, 600),
        "row_axes": lambda n: kvq.row_axes(cache),
        "snapshot": lambda n: kvq.snapshot(cache),
        "with_pages": lambda n: kvq.with_pages(paged, table),
        "without_pages": lambda n: kvq.without_pages(paged),
        "copy_page": lambda n: kvq.copy_page(kvq.fork(paged), n % 2, 2 + n % 2),
        "pages_needed": lambda n: kvq.pages_needed(paged.layout, 100 * (n % 5)),
        "cut": lambda n: kvq.cut(cache, 2 + n % 2),
        "join": lambda n: kvq.join(*halves),
        "speculate": lambda n: kvq.speculate(model, [[1, n], [n]], METHOD, max_new_tokens=9).tokens,
        "beam_search": lambda n: (
            kvq.beam_search(model, [[1, n], [n]], METHOD, max_new_tokens=9).tokens
        ),
        "save_cache": lambda n: kvq.save_cache(tmp_path / str(next(number)), cache, model),
        "load_cache": lambda n: kvq.load_cache(folder, model),
        "load": lambda n: kvq.load("recall"),
        "load_artifact": lambda n: kvq.load_artifact(tmp_path / "artifact"),
        "shard": lambda n: kvq.shard(model, METHOD, data=2),
        "calibrate": lambda n: kvq.calibrate.run(*xquant),
        "eval": lambda n: kvq.eval.perplexity(
            recall, np.full(256, n), METHOD, tokens=128, window=64, chunk=32
        ),
        "compare": lambda n: kvq.compare(recall, "kivi:bits=2", TEXT, tokens=256, window=96),
        "plan": lambda n: kvq.plan("llama-3.1-8b", "kivi:bits=2", context=n * 1024),
        "tune": lambda n: kvq.tune(
            recall, TEXT * 2, method="kivi:window=0", bits=3.0, sequences=1, length=96
        ),
    }


TEXT = "ab12 cd34 " * 120


def check(name: str, call, calls: int = CALLS) -> None:
    """The first calls may compile what they need; the others find it."""
    for number in (1, 2):
        jax.block_until_ready(call(number))
    before, maps = PROGRAMS[0], memory_maps()
    for number in range(3, 3 + calls):
        jax.block_until_ready(call(number))
    assert PROGRAMS[0] == before, f"{name}: {PROGRAMS[0] - before} programs in {calls} calls"
    assert memory_maps() - maps < 2 * calls, (
        f"{name}: {memory_maps() - maps} memory maps in {calls} calls"
    )


@pytest.mark.nightly
def test_on_one_device(tmp_path):
    calls = on_caches(tiny()) | on_one_device(tmp_path)
    functions = {
        name
        for name in kvq.__all__
        if callable(getattr(kvq, name)) or name in ("calibrate", "eval")
    }
    classes = {name for name in kvq.__all__ if isinstance(getattr(kvq, name), type)}
    assert set(calls) == functions - classes - NO_ARRAYS
    for name, call in calls.items():
        check(name, call, 2 if name == "tune" else CALLS)  # a search is itself many calls


def test_on_a_mesh():
    calls = on_caches(kvq.shard(tiny(), METHOD, data=2, seq=2))
    for name in ("init_cache", "forward", "crop"):
        check(name, calls[name])
