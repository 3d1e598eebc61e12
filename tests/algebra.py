"""Filling caches from made-up sources and looking at what they hold, for the tests of the cache's
algebra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import model_and_method

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.model.rope import inverse_frequencies

CAPACITY = 512
PAD = 200  # tokens of one append: one program for every chunk size
BAD = (np.nan, np.inf, -np.inf)

append = jax.jit(kvq.commit)


@functools.cache
def empty(name: str, rows: int, capacity: int = CAPACITY):
    model, method = model_and_method(name)
    return kvq.init_cache(model, method, rows, capacity)


@functools.cache
def pool(name: str, size: int = CAPACITY) -> tuple[dict[str, np.ndarray], ...]:
    """Per run {source: [L, size, W]}: what token number i of the pool looks like. Signed, with
    channels that are large or sit on an offset, and now and then an outlier."""
    out = []
    for number, run in enumerate(runs_of(empty(name, 1).layout)):
        random, made = np.random.default_rng(number), {}
        for source, width in run.wiring.storage.sources.items():
            x = random.normal(size=(run.count, size, width)) * np.exp(random.normal(size=width))
            x += 4 * random.normal(size=width) + 20 * (
                random.random((run.count, size, width)) < 0.003
            )
            made[source] = x.astype(np.float32)
        out.append(made)
    return tuple(out)


def pending(
    name: str, rows: list[list[int]], length: int = PAD, broken: dict[int, int] | None = None
):
    """Sources of each row's pool tokens; what pads them to `length`, and token `broken[row]`, is
    not finite."""
    index, bad = np.zeros((len(rows), length), np.int32), np.ones((len(rows), length), bool)
    for line, marks, tokens in zip(index, bad, rows, strict=True):
        line[: len(tokens)], marks[: len(tokens)] = tokens, False
    for row, token in (broken or {}).items():
        bad[row, token] = True

    def taken(x):
        x = x[:, index]
        x[:, bad] = np.resize(np.asarray(BAD, np.float32), (bad.sum(), x.shape[-1]))
        return jnp.asarray(x)

    return tuple({source: taken(x) for source, x in run.items()} for run in pool(name))


def extend(
    name: str, cache, rows: list[list[int]], length: int = PAD, broken: dict[int, int] | None = None
):
    """Append each row's pool tokens, at most `length` of them, number `broken[row]` of a row as not
    finite."""
    model, counts = (
        model_and_method(name)[0],
        jnp.asarray([len(tokens) for tokens in rows], jnp.int32),
    )
    return append(model, cache, pending(name, rows, length, broken), counts)


def fresh(name: str, rows: list[list[int]]):
    """The rows encoded from nothing, in steps of PAD."""
    cache = empty(name, len(rows))
    for start in range(0, max(len(tokens) for tokens in rows), PAD):
        cache = extend(name, cache, [tokens[start : start + PAD] for tokens in rows])
    return cache


@functools.partial(jax.jit, static_argnames=("layout", "number"))
def _stored(body, layout, number: int):
    """Every field of a run, unpacked: {source: {field: [L, B, tokens or groups, lanes]}}."""
    run = runs_of(layout)[number]

    def one(source, name):
        field = run.wiring.storage.codecs[source].fields[name]
        layers = [
            field.packing.read(body[source][name], jnp.int32(i), jnp.int32(0), run.slots)
            for i in range(run.count)
        ]
        x = jnp.stack(layers)
        return x.swapaxes(2, 3) if field.kind == "token" else x

    return {source: {name: one(source, name) for name in fields} for source, fields in body.items()}


def body(cache) -> list[dict]:
    """Per run what the body stores, unpacked: {source: {field: [L, B, tokens or groups,
    lanes]}}."""
    states = enumerate(cache.runs)
    return [
        jax.tree.map(np.asarray, _stored(s.body, cache.layout, i)) if s.body else {}
        for i, s in states
    ]


def all_finite(cache) -> bool:
    """Whether every number that the cache holds is finite, in dead slots too."""
    exact = [
        x for state in cache.runs for part in (state.sinks, state.window) for x in part.values()
    ]
    numbers = []
    for run, fields in zip(runs_of(cache.layout), body(cache), strict=True):
        for source, stored in fields.items():
            codec = run.wiring.storage.codecs[source]
            numbers += [
                x
                for name, x in stored.items()
                if codec.fields[name].dtype in ("bfloat16", "float32")
            ]
    return all(
        np.isfinite(np.asarray(x, np.float32)).all()
        for x in [*exact, *numbers, *cache.kept.values()]
    )


def encoded(cache) -> list[dict[str, np.ndarray]]:
    """Per run and source how many body tokens each row has encoded: [B]."""
    return [
        {
            s: np.asarray(f) * clock.unit
            for clock, f in zip(run.wiring.storage.clocks, state.flushed, strict=True)
            for s in clock.sources
        }
        for run, state in zip(runs_of(cache.layout), cache.runs, strict=True)
    ]


def same_words(cache, row: int, other, other_row: int) -> int:
    """Assert that two rows store equal words wherever both have encoded; returns how many tokens
    that were, at most."""
    most, runs = 0, runs_of(cache.layout)
    for run, ours, theirs, e, f in zip(
        runs, body(cache), body(other), encoded(cache), encoded(other), strict=True
    ):
        for source, fields in ours.items():
            tokens = min(e[source][row], f[source][other_row], run.slots)
            most = max(most, tokens)
            for name, x in fields.items():
                size = -(-tokens * x.shape[2] // run.slots)
                a, b = x[:, row, :size], theirs[source][name][:, other_row, :size]
                np.testing.assert_array_equal(
                    a.view(np.uint8), b.view(np.uint8), f"{source}.{name} row {row}"
                )
    return most


def check_row(name: str, cache, row: int, tokens: list[int]) -> None:
    """Assert that a row holds these pool tokens: exactly in sinks and window, and in the body as a
    fresh encode does."""
    assert int(cache.lengths[row]) == len(tokens)
    sinks = cache.layout.method.sinks
    held = len(tokens) - sinks
    for run, state, counts, source in zip(
        runs_of(cache.layout), cache.runs, encoded(cache), pool(name), strict=True
    ):
        oldest = min(int(c[row]) for c in counts.values())
        assert held - oldest <= run.ring or held <= 0
        assert all(int(c[row]) <= max(held, 0) for c in counts.values())
        for key, vectors in source.items():
            few = min(sinks, len(tokens))
            if sinks:
                np.testing.assert_array_equal(
                    np.asarray(state.sinks[key])[:, row, :few], vectors[:, tokens[:few]]
                )
            # A source encoded before its partner stands in the window as reconstructed: that is the
            # body's matter.
            exact = np.arange(int(counts[key][row]), max(held, 0))
            if len(exact):
                got = np.asarray(state.window[key])[:, row, exact % run.ring]
                np.testing.assert_array_equal(got, vectors[:, np.asarray(tokens)[exact + sinks]])
    # Tokens appended after the row's own make the fresh encode get at least as far.
    ahead = max(
        clock.window + clock.unit
        for run in runs_of(cache.layout)
        for clock in run.wiring.storage.clocks
    )
    if held > 0 and len(tokens) + ahead <= CAPACITY:
        same_words(cache, row, fresh(name, [tokens + [0] * ahead]), 0)


def turned_by_hand(keys: np.ndarray, distance: int, shape) -> np.ndarray:
    """Keys [n, K, D], turned back by a distance in float64."""
    angles = -distance * inverse_frequencies(shape).astype(np.float64)
    first, second = np.split(keys.astype(np.float64), 2, axis=-1)
    turn = np.exp(1j * angles)
    out = (first + 1j * second) * turn
    return np.concatenate([out.real, out.imag], -1)
