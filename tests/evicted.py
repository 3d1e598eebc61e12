"""The oracle of token eviction: a dense decoder that is told by hand which tokens each query may
still see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.model import decoder
from kvqjax.model.rope import rotate

forward, prefill = jax.jit(kvq.forward), jax.jit(kvq.prefill)

SINKS, WINDOW, UNIT, BUDGET, CAPACITY, LENGTH = 3, 32, 32, 64, 512, 288
SPEC = f"exact:sinks={SINKS},window={WINDOW},keep=streaming:{BUDGET}"
# Float32: sums of at most 288 terms of size about 1 in another order, through 2 layers and the
# head; see test_cache_forward.py. Probabilities lie in [0, 1] and follow logits that are ten times
# sharper here.
BOUND = 1e-3


@functools.cache
def sharp() -> kvq.Model:
    """The tiny model with peaked attention, so that tokens differ in what they receive."""
    model = tiny()
    layers = model.params["layers"]
    return model.replace(params=model.params | {"layers": layers | {"q": 8 * layers["q"]}})


@jax.jit
def dense(model, text, mask):
    """Logits [T, V] of one sequence whose query t sees the tokens of mask[t]."""
    config, positions = model.config, jnp.arange(text.shape[0])[None]
    h = decoder.embed(model.params, text[None], config)
    for index in range(config.num_layers):
        weights = decoder.layer(model.params, index)
        projected = decoder.project(weights, h, positions, config)
        k = jnp.repeat(
            rotate(projected.k, positions, config)[0],
            config.num_heads // config.num_kv_heads,
            axis=1,
        )
        v = jnp.repeat(projected.v[0], config.num_heads // config.num_kv_heads, axis=1)
        scores = jnp.einsum("thd,shd->hts", projected.q[0], k) * config.head_dim**-0.5
        share = jax.nn.softmax(jnp.where(mask[None], scores, -jnp.inf), axis=-1)
        h = decoder.finish(weights, h, jnp.einsum("hts,shd->thd", share, v)[None], config)
    return decoder.unembed(model.params, h, config)[0]


class ByHand:
    """One row: the groups of tokens in the body, and the tokens in the window."""

    def __init__(self, text):
        self.text, self.groups, self.recent, self.length = text, [], [], 0
        self.mask = np.tri(LENGTH, dtype=bool)

    def seen(self) -> list[int]:
        return [
            *range(min(SINKS, self.length)),
            *(p for group in self.groups for p in group),
            *self.recent,
        ]

    def query(self, count: int):
        """Append `count` tokens; their logits."""
        new = list(range(self.length, self.length + count))
        self.mask[new] = False
        for t in new:
            self.mask[t, [*self.seen(), *range(self.length, t + 1)]] = True
        logits = np.asarray(dense(sharp(), self.text, jnp.asarray(self.mask)))
        self.recent += [p for p in new if p >= SINKS]
        self.length += count
        self.flush()
        return logits[new]

    def flush(self):
        while len(self.recent) >= WINDOW + UNIT:
            self.groups.append(self.recent[:UNIT])
            self.recent = self.recent[UNIT:]
            if len(self.groups) > BUDGET // UNIT:
                self.groups.remove(min(self.groups, key=max))

    def crop(self, length: int):
        def keep(line):
            return [p for p in line if p < length]

        self.groups = [keep(group) for group in self.groups if keep(group)]
        self.recent = keep(self.recent)
        self.length = length


def check(rows: list[ByHand], cache) -> None:
    assert cache.lengths.tolist() == [row.length for row in rows]
    for row, positions in zip(rows, np.asarray(cache.kept["positions"]), strict=True):
        assert sorted(positions[positions >= 0]) == sorted(p for group in row.groups for p in group)
        assert len(positions) == BUDGET


def steps(rows: list[ByHand], cache, count: int):
    """Decode `count` tokens of every row, each against the dense decoder."""
    for _ in range(count):
        newest = jnp.stack([row.text[row.length : row.length + 1] for row in rows])
        logits, cache = forward(sharp(), newest, jnp.ones((len(rows),), jnp.int32), cache)
        for row, got in zip(rows, logits, strict=True):
            np.testing.assert_allclose(got, row.query(1), atol=BOUND)
    check(rows, cache)
    return cache


def begin(counts=(200, 141)):
    """Two rows after an exact prefill."""
    text = tokens(2, LENGTH)
    rows = [ByHand(line) for line in text]
    cache = kvq.init_cache(sharp(), kvq.parse(SPEC), 2, CAPACITY)
    last, cache = prefill(sharp(), text[:, :256], jnp.asarray(counts), cache)
    for row, count, got in zip(rows, counts, last, strict=True):
        np.testing.assert_allclose(got, row.query(count)[-1], atol=BOUND)
    check(rows, cache)
    return rows, cache
