"""Token eviction against a dense decoder that is told by hand which tokens each query may still see."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import body, extend, fresh
from cases import CASES, model_and_method
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax import decoder
from kvqjax.cache import CacheLayout, plan
from kvqjax.methods import Keep
from kvqjax.rope import rotate
from kvqjax.sharding import Rules, cache_layout

attend = jax.jit(kvq.attend, static_argnames=("within", "last"))
commit, forward, prefill = jax.jit(kvq.commit), jax.jit(kvq.forward), jax.jit(kvq.prefill)

SINKS, WINDOW, UNIT, BUDGET, CAPACITY, LENGTH = 3, 32, 32, 64, 512, 288
SPEC = f"exact:sinks={SINKS},window={WINDOW},keep={{}}:{BUDGET}"
# Float32: sums of at most 288 terms of size about 1 in another order, through 2 layers and the head; see
# test_cache_forward.py. Probabilities lie in [0, 1] and follow logits that are ten times sharper here.
BOUND = 1e-3


@functools.cache
def sharp() -> kvq.Model:
    """The tiny model with peaked attention, so that tokens differ in what they receive."""
    model = tiny()
    layers = model.params["layers"]
    return model.replace(params=model.params | {"layers": layers | {"q": 8 * layers["q"]}})


@jax.jit
def dense(model, text, mask):
    """Logits [T, V] of one sequence whose query t sees the tokens of mask[t], and what each query gave each token, over
    all layers and heads: [T, T]."""
    config, positions, given = model.config, jnp.arange(text.shape[0])[None], 0.0
    h = decoder.embed(model.params, text[None], config)
    for index in range(config.num_layers):
        weights = decoder.layer(model.params, index)
        projected = decoder.project(weights, h, positions, config)
        k = jnp.repeat(rotate(projected.k, positions, config)[0], config.num_heads // config.num_kv_heads, axis=1)
        v = jnp.repeat(projected.v[0], config.num_heads // config.num_kv_heads, axis=1)
        scores = jnp.einsum("thd,shd->hts", projected.q[0], k) * config.head_dim**-0.5
        share = jax.nn.softmax(jnp.where(mask[None], scores, -jnp.inf), axis=-1)
        given += share.sum(0)
        h = decoder.finish(weights, h, jnp.einsum("hts,shd->thd", share, v)[None], config)
    return decoder.unembed(model.params, h, config)[0], given


class ByHand:
    """One row: groups of (positions, mass), and the mass of every token that is not in a group."""

    def __init__(self, rule: str, text):
        self.rule, self.text, self.groups, self.recent, self.length = rule, text, [], {}, 0
        self.mask = np.tri(LENGTH, dtype=bool)

    def seen(self) -> list[int]:
        return [*range(min(SINKS, self.length)), *(p for group, _ in self.groups for p in group), *self.recent]

    def query(self, count: int, prompt: bool = False):
        """Append `count` tokens; their logits."""
        new = list(range(self.length, self.length + count))
        self.mask[new] = False
        for t in new:
            self.mask[t, [*self.seen(), *range(self.length, t + 1)]] = True
        logits, given = (np.asarray(x) for x in dense(sharp(), self.text, jnp.asarray(self.mask)))
        mass = given[new].sum(0)
        self.groups = [(group, old + mass[group].sum()) for group, old in self.groups]
        self.recent = {p: old + mass[p] for p, old in self.recent.items()}
        self.recent |= {p: mass[p] for p in new if p >= SINKS}
        self.length += count
        self.choose() if prompt else self.flush()
        return logits[new]

    def choose(self):
        """A fresh prompt: the best tokens of those that leave the window."""
        leaving = sorted(self.recent)[: max(0, (len(self.recent) - WINDOW) // UNIT * UNIT)]
        worth = self.recent.get if self.rule == "h2o" else lambda p: p
        best = sorted(sorted(leaving, key=worth)[-BUDGET:])
        lines = [best[i : i + UNIT] for i in range(0, len(best), UNIT)]
        self.groups = [(line, sum(self.recent[p] for p in line)) for line in lines]
        self.recent = {p: m for p, m in self.recent.items() if p not in leaving}

    def flush(self):
        while len(self.recent) >= WINDOW + UNIT:
            unit = sorted(self.recent)[:UNIT]
            self.groups.append((unit, sum(self.recent.pop(p) for p in unit)))
            if len(self.groups) > BUDGET // UNIT:
                worth = (lambda g: g[1]) if self.rule == "h2o" else (lambda g: max(g[0]))
                self.groups.remove(min(self.groups, key=worth))

    def crop(self, length: int):
        keep = lambda line: [p for p in line if p < length]  # noqa: E731
        self.groups = [(keep(group), mass) for group, mass in self.groups if keep(group)]
        self.recent = {p: m for p, m in self.recent.items() if p < length}
        self.length = length


def check(rows: list[ByHand], cache) -> None:
    assert cache.lengths.tolist() == [row.length for row in rows]
    for row, positions in zip(rows, np.asarray(cache.kept["positions"]), strict=True):
        assert sorted(positions[positions >= 0]) == sorted(p for group, _ in row.groups for p in group)
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


def begin(rule: str, counts=(200, 141)):
    """Two rows after an exact prefill."""
    text = tokens(2, LENGTH)
    rows = [ByHand(rule, line) for line in text]
    cache = kvq.init_cache(sharp(), kvq.parse(SPEC.format(rule)), 2, CAPACITY)
    last, cache = prefill(sharp(), text[:, :256], jnp.asarray(counts), cache)
    for row, count, got in zip(rows, counts, last, strict=True):
        np.testing.assert_allclose(got, row.query(count, prompt=True)[-1], atol=BOUND)
    check(rows, cache)
    return rows, cache


@pytest.mark.parametrize("rule", ["streaming", "h2o"])
def test_queries_see_the_kept_tokens_at_their_positions(rule):
    """Prefill, then decoding through several evictions, ragged; then a crop below evicted tokens, and on from there."""
    rows, cache = begin(rule)
    first = np.asarray(cache.kept["positions"])
    assert (first[0] != first[1]).any(), "rows choose by themselves"
    assert (np.diff(first[0]) > 1).any() == (rule == "h2o"), "heavy hitters are scattered"
    if rule == "h2o":  # what row 1 holds becomes worthless, so that newcomers win there; in row 0 they lose
        rows[1].groups = [(group, 0.0) for group, _ in rows[1].groups]
        cache = cache.replace(kept=cache.kept | {"mass": cache.kept["mass"].at[1].set(0)})
    before = np.asarray(cache.runs[0].flushed[0])
    cache = steps(rows, cache, 30)
    assert (np.asarray(cache.runs[0].flushed[0]) > before).all(), "nothing left the window: the test shows nothing"
    moved = (np.asarray(cache.kept["positions"]) != first).any(1)
    assert moved.tolist() == [rule == "streaming", True]
    lengths = [rows[0].length - 70, rows[1].length - 3]
    cache = kvq.crop(cache, jnp.asarray(lengths, jnp.int32))
    assert lengths[0] - UNIT < cache.lengths[0] <= lengths[0]
    assert cache.lengths[1] == lengths[1]
    for row, length in zip(rows, cache.lengths.tolist(), strict=True):
        row.crop(length)
    check(rows, cache)
    steps(rows, cache, 28)


@pytest.mark.parametrize("rule", ["streaming", "h2o"])
def test_chunks_evict_whole_groups(rule):
    """Through the cache 60 tokens at a time: two groups can fall due in one call, and newcomers compete."""
    text = tokens(1, LENGTH)
    row, cache = ByHand(rule, text[0]), kvq.init_cache(sharp(), kvq.parse(SPEC.format(rule)), 1, CAPACITY)
    for start in range(0, 240, 60):
        logits, cache = forward(sharp(), text[:, start : start + 60], jnp.asarray([60]), cache)
        np.testing.assert_allclose(logits[0], row.query(60), atol=BOUND)
        check([row], cache)
    groups = np.asarray(cache.kept["positions"]).reshape(-1, UNIT)
    assert (np.diff(groups, axis=1) == 1).all()


def test_surgery_carries_what_is_kept(tmp_path):
    rows, cache = begin("h2o")
    kvq.save_cache(tmp_path / "cache", cache, sharp())
    back = kvq.load_cache(tmp_path / "cache", sharp())
    assert back.layout == cache.layout
    jax.tree.map(np.testing.assert_array_equal, cache, back)
    swapped = kvq.gather(kvq.fork(cache), jnp.asarray([1, 0]))
    check(rows[::-1], swapped)
    both = kvq.insert(swapped, 0, back, 0)
    np.testing.assert_array_equal(both.kept["mass"], cache.kept["mass"][jnp.asarray([0, 0])])
    gone = kvq.evict(both, jnp.asarray([False, True]))
    check([rows[0], ByHand("h2o", rows[1].text)], gone)
    assert float(jnp.abs(gone.kept["mass"][1]).max()) == 0
    check([rows[0]], kvq.gather(gone, jnp.asarray([0])))
    steps(rows[::-1], swapped, 2)


def test_a_row_in_a_batch_chooses_as_alone():
    _, cache = begin("h2o")
    alone = kvq.init_cache(sharp(), cache.layout.method, 1, CAPACITY)
    _, alone = prefill(sharp(), tokens(2, LENGTH)[1:, :256], jnp.asarray([141]), alone)
    np.testing.assert_array_equal(cache.kept["positions"][1], alone.kept["positions"][0])
    np.testing.assert_allclose(cache.kept["mass"][1], alone.kept["mass"][0], rtol=1e-5)


def test_drafts_see_what_single_steps_see():
    """Verified in pieces of 9, groups leave and others are given up in the middle of a piece."""
    model, method, text = sharp(), kvq.parse(SPEC.format("streaming")), tokens(2, LENGTH)
    out = []
    for size in (1, 9):
        cache, logits = kvq.init_cache(model, method, 2, CAPACITY), []
        for start in range(0, 225, size):
            counts = jnp.asarray([size, size])
            got, pending = attend(model, text[:, start : start + size], counts, cache, within="step")
            cache = commit(model, cache, pending, counts)
            logits.append(np.asarray(got))
        out.append(np.concatenate(logits, 1))
    np.testing.assert_allclose(out[1], out[0], atol=BOUND)
    h2o = kvq.init_cache(model, kvq.parse(SPEC.format("h2o")), 2, CAPACITY)
    with pytest.raises(kvq.UserError, match="a draft cannot be verified at once"):
        kvq.attend(model, text[:, :9], jnp.asarray([9, 9]), h2o, within="step")


ONE_CLOCK = ("exact", "kivi2", "kivi3-sinks", "sliding-mixed", "kvquant", "commvq")
ONE_CLOCK += tuple(name for name in ("higgs", "aqua", "xquant", "xquant_cl") if name in CASES)


@pytest.mark.parametrize("name", ONE_CLOCK)
def test_every_method_stores_a_kept_token_as_it_would_without_eviction(name):
    """Filled from sources without attention: the newest groups are kept, and their words are those of the whole row."""
    model, method = model_and_method(name)
    unit = max(32, plan(fresh(name, [[0]]).layout)[0].wiring.clocks[0].unit)
    kept = dataclasses.replace(method, keep=Keep("streaming", 2 * unit))
    row, sinks = list(range(CAPACITY - 30)), method.sinks
    whole, small = fresh(name, [row]), kvq.init_cache(model, kept, 1, CAPACITY)
    for start in range(0, len(row), 150):
        small = extend(name, small, [row[start : start + 150]], 150)
    positions = np.asarray(small.kept["positions"]).reshape(2, unit)
    end = int(small.runs[0].flushed[0][0]) * unit
    assert sorted(positions[:, 0]) == [end - 2 * unit + sinks, end - unit + sinks]
    for run, ours, theirs in zip(plan(small.layout), body(small), body(whole), strict=True):
        for source, fields in ours.items():
            for field, x in fields.items():
                share = run.slots // x.shape[2]
                other = theirs[source][field]
                for slot, first in enumerate(positions[:, 0] - sinks):
                    at = np.arange(first // share, (first + unit) // share) % other.shape[2]
                    mine = x[:, 0, slot * unit // share : (slot + 1) * unit // share]
                    np.testing.assert_array_equal(mine, other[:, 0, at], f"{source}.{field}")


@pytest.mark.parametrize("spec", ["kivi:bits=2,window=32", "aqua", "exact"])
def test_bytes_are_those_of_the_budget(spec):
    """A hundred times the budget costs no more than the budget, and positions and masses are counted."""
    model = tiny()
    options = spec + ("," if ":" in spec else ":") + "keep=h2o:512"
    method, most = kvq.parse(options), 51200
    clock = plan(jax.eval_shape(lambda: kvq.init_cache(model, method, 1, 512)).layout)[0].wiring.clocks[0]
    fits = 512 + method.sinks + clock.window
    kept, whole = (
        kvq.ledger(jax.eval_shape(lambda m=m, c=c: kvq.init_cache(model, m, 2, c)))
        for m, c in ((method, most), (kvq.parse(spec), fits))
    )
    more = 2 * 4 * (512 + 512 // clock.unit + clock.window + clock.unit)
    assert kept.bytes == whole.bytes + more
    small = kvq.init_cache(model, method, 2, most)
    live = sum(array.addressable_data(0).nbytes for array in jax.tree.leaves(small))
    assert abs(kvq.ledger(small).bytes - live) <= 0.02 * live


def test_a_decode_step_updates_the_cache_in_place():
    """Temporaries stay below a tenth of it, beyond a few numbers for every token of the body."""
    model, method = tiny(), kvq.parse("kivi:bits=4,window=32,keep=h2o:16384")
    cache = jax.eval_shape(lambda: kvq.init_cache(model, method, 2, 65536))
    new = jax.ShapeDtypeStruct((2, 1), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    memory = jax.jit(kvq.forward, donate_argnums=3).lower(model, *new, cache).compile().memory_analysis()
    size = kvq.ledger(cache).bytes
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert memory.temp_size_in_bytes < 0.1 * size + 2 * 16384 * 16


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kivi:window=64,rule=published,keep=h2o:64", "cannot be evicted"),
        ("kivi:keep=h2o:16", "leave the body 32 at a time"),
        ("kivi:window=32,keep=h2o:64;0=exact", "one window and unit for all layers"),
    ],
)
def test_what_cannot_be_evicted_is_refused(spec, words):
    with pytest.raises(kvq.UserError, match=words):
        kvq.init_cache(tiny(), kvq.parse(spec), 1, CAPACITY)


def test_a_mesh_is_refused():
    rules = Rules(mesh=jax.sharding.AbstractMesh((2, 1, 1, 1), ("data", "seq", "kv", "group")))
    layout = CacheLayout(config=tiny().config, method=kvq.parse("kivi:keep=h2o:64"), capacity=CAPACITY, dtype="float32")
    with pytest.raises(kvq.UserError, match="on one device only"):
        cache_layout(rules, layout, 2)


def test_heavy_hitters_through_a_chain_of_predictors():
    """AQUA-KV with 16-bit residuals keeps what the exact cache keeps and computes what it computes."""
    model, text = sharp(), tokens(1, 300)
    out = []
    for name in ("exact:window=0", "xquant_cl:bits=16,base=0,protected=0,latent=false,accumulator=float32"):
        method = kvq.parse(f"{name},sinks=3,keep=h2o:128")
        method = (
            method if name[0] == "x" else dataclasses.replace(method, layer=dataclasses.replace(method.layer, unit=128))
        )
        cache = kvq.init_cache(model, method, 1, CAPACITY)
        logits, cache = prefill(model, text[:, :270], jnp.asarray([270]), cache)
        got = [logits]
        for t in range(270, 276):
            logits, cache = forward(model, text[:, t : t + 1], jnp.asarray([1]), cache)
            got.append(logits[:, 0])
        out.append((np.concatenate(got), np.asarray(cache.kept["positions"])))
    np.testing.assert_array_equal(out[0][1], out[1][1])
    assert (np.diff(out[0][1][0]) > 1).any()
    np.testing.assert_allclose(out[1][0], out[0][0], atol=BOUND)
