"""A mesh of eight devices computes what one does: every method on rows x sequence x model, and what
XLA sends."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import _constants, thinned, with_nightly
from greedy import reference
from meshes import CAPACITY, LENGTHS, NEW, TOKENS, pending
from tiny import tiny

import kvqjax as kvq
from kvqjax import ledger
from kvqjax.cache import runs_of
from kvqjax.cache.layout import Deal
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.rules import shares_heads
from kvqjax.parallel.sharding import rules_for

ALL = {"data": 2, "seq": 2, "model": 2}
# method -> (changes to the tiny model, whether keys and values are split over KV heads). 16
# channels are one head.
CELLS: dict[str, tuple[dict, bool]] = {
    "exact": ({}, True),
    "kivi:key_bits=2,value_bits=4,value_group=16,window=32,sinks=3": ({}, True),
    "kivi:bits=4,value_group=16,window=32;0=exact": ({"sliding_window": 300}, True),
    "kivi:bits=4,value_group=16,window=64,rule=published": ({}, True),
    "kivi_star:bits=4,protected=1": ({}, False),
    "uniform:bits=4,group=32": ({}, False),
    "oscar:bits=4,window=32,sinks=3": ({}, True),  # a rotation of every head's own
    "omniscale:bits=4,value_group=16,window=32": ({}, False),  # one norm of all heads
    "kvquant:bits=4,sinks=2": ({}, False),
    "higgs:bits=4,group=head,buffer=32": ({}, True),
    "higgs:bits=4,group=width,buffer=32": ({}, False),
    "aqua:bits=4,buffer=32": ({}, False),
    "commvq:bits=2,rounds=2,levels=16,hidden=16,window=32,unit=32": ({}, False),
    "xquant:bits=4,group=32": ({}, False),
    "xquant_cl:bits=4,group=32,base=0,protected=1": ({}, False),
}
OFTEN = ("kivi:key_bits=2,value_bits=4,value_group=16,window=32,sinks=3", "aqua:bits=4,buffer=32")


def model_of(spec: str) -> tuple[kvq.Model, kvq.Method]:
    method, model = kvq.parse(spec), tiny(**CELLS[spec][0])
    return model.replace(constants=_constants(model, method)), method


@jax.jit
def filled_logits(model, cache, sources, tokens):
    counts = jnp.asarray(LENGTHS, jnp.int32)
    cache = kvq.commit(model, cache, sources, counts)
    return kvq.attend(model, tokens, jnp.full_like(counts, NEW), cache)[0]


def both(spec: str, sizes: dict, capacity: int = CAPACITY):
    """Logits on one device and on the mesh, for caches filled with the same sources."""
    model, method = model_of(spec)
    sources = pending(kvq.init_cache(model, method, 2, CAPACITY))
    spread = kvq.shard(model, method, **sizes)
    return [
        np.asarray(filled_logits(m, kvq.init_cache(m, method, 2, capacity), sources, TOKENS))
        for m in (model, spread)
    ]


def bound(logits, length: int = max(LENGTHS)) -> float:
    """Equal words are read (the sources are equal); what differs is the order of sums. Reordering a
    sum of n terms moves it by at most n eps of the sum of sizes; the terms of all sums a logit
    passes through are added."""
    config = tiny().config
    terms = (
        config.num_layers * (length + 2 * config.width + config.mlp_width + config.query_width)
        + config.width
    )
    return float(np.finfo(np.float32).eps * terms * np.abs(logits).max())


@pytest.mark.parametrize(
    "spec", with_nightly(CELLS, ["kivi:key_bits=2,value_bits=4,value_group=16,window=32,sinks=3"])
)
def test_every_method_on_rows_sequence_and_model(spec):
    alone, spread = both(spec, ALL)
    limit = bound(alone)
    assert np.abs(alone - spread).max() < limit
    best = np.sort(alone, axis=-1)
    clear = best[..., -1] - best[..., -2] > 2 * limit
    np.testing.assert_array_equal(alone.argmax(-1)[clear], spread.argmax(-1)[clear])


@pytest.mark.nightly
def test_stripes_on_rows_sequence_and_model():
    """Values in stripes and keys in lines, of a body that is long enough for them."""
    spec = "kivi:key_bits=2,value_bits=4,value_group=16,window=32,sinks=3"
    (run,) = runs_of(kvq.init_cache(model_of(spec)[0], spec, 1, 4096).layout)
    assert run.wiring.storage.codecs["v"].fields["codes"].form == "stripes"
    alone, spread = both(spec, ALL, 4096)
    assert np.abs(alone - spread).max() < bound(alone)


SHORT = jnp.asarray(np.random.default_rng(1).integers(0, 50, (2, 12)), jnp.int32)
step = jax.jit(kvq.forward)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", thinned(["kvquant:bits=4,sinks=2", "xquant:bits=4,group=32"], 2))
def test_few_tokens(spec):
    """Keys and values of the step itself and of the step before, of which a long body would drown
    an error."""
    model, method = model_of(spec)
    counts, logits = jnp.full((2,), SHORT.shape[1], jnp.int32), []
    for m in (model, kvq.shard(model, method, **ALL)):
        first, cache = step(m, SHORT, counts, kvq.init_cache(m, method, 2, 512))
        logits.append(np.stack([first, step(m, SHORT[::-1], counts, cache)[0]]))
    assert np.abs(logits[0] - logits[1]).max() < bound(logits[0], 2 * SHORT.shape[1])


@pytest.mark.parametrize("spec", thinned(CELLS, 3))
def test_what_is_split_over_heads(spec):
    model, method = model_of(spec)
    rules = rules_for(model.config, method, MeshSize(**ALL))
    assert bool(rules.kv_heads) == CELLS[spec][1]
    model = kvq.shard(model, method, **ALL)
    columns = model.params["layers"]["k"].addressable_data(0).shape[-1]
    assert columns == model.config.kv_width // (1 if spec.startswith("xquant") else 2)
    cache = kvq.init_cache(model, method, 2, CAPACITY)
    here = sum(
        x.addressable_data(0).nbytes for state in cache.runs for x in jax.tree.leaves(state.body)
    )
    whole = sum(x.nbytes for state in cache.runs for x in jax.tree.leaves(state.body))
    assert here * 8 == whole  # rows, sequence and heads (or tokens again) each halve it


@pytest.mark.nightly
def test_devices_that_outnumber_kv_heads_share_their_tokens():
    """Four devices, two KV heads: the whole pipeline, and tokens as one device makes them."""
    prompts = [list(range(40)), [7, 3, 9]]
    spread = kvq.shard(tiny(), kvq.exact(), data=2, model=4)
    assert spread.rules.size(spread.rules.kv_heads) == spread.rules.size(spread.rules.sequence) == 2
    made = kvq.generate(spread, prompts, max_new_tokens=8, capacity=600).tokens
    for prompt, tokens in zip(prompts, made, strict=True):
        want, margin = reference(tiny(), prompt, 8)
        assert margin > 1e-4
        assert tokens == want


def compiled_step(spec: str, capacity: int):
    model, method = model_of(spec)
    model = kvq.shard(model, method, **ALL)
    cache = kvq.init_cache(model, method, 2, capacity)
    step = jax.jit(kvq.forward, static_argnames="last", donate_argnames="cache")
    return step.lower(
        model, TOKENS[:, :1], jnp.ones(2, jnp.int32), cache, last=True
    ).compile(), cache


def collectives(text: str) -> dict[int, list[str]]:
    """Names of collectives by how many while loops they stand in."""
    bodies, inside = {}, ""
    for line in text.splitlines():
        start = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if start:
            inside = "entry" if start[1] else start[2]
            bodies[inside] = ([], [])
        elif inside:
            bodies[inside][0].extend(
                re.findall(r"= .*? (all-[\w\-]+|reduce-scatter|collective-[\w\-]+)\(", line)
            )
            bodies[inside][1].extend(
                (name, 1 if "body=" in line else 0)
                for name in re.findall(
                    r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line
                )
            )
    depths: dict[int, list[str]] = {}
    queue = [("entry", 0)]
    for name, depth in queue:
        found, called = bodies[name]
        depths.setdefault(depth, []).extend(found)
        queue += [(other, depth + more) for other, more in called if other in bodies]
    return {depth: sorted(names) for depth, names in depths.items() if names}


def test_only_the_merge_is_sent_inside_attention():
    """Heads are split: two sums over `width` per layer, and the merge over `seq` (its maximum, then
    output and denominator)."""
    compiled, _ = compiled_step(
        "kivi:key_bits=2,value_bits=4,value_group=16,window=32,sinks=3", CAPACITY
    )
    found = collectives(compiled.as_text())
    assert set(found) == {0, 1}, found  # nothing inside the loop over blocks
    assert set(found[1]) == {"all-reduce"}
    assert 4 <= len(found[1]) <= 5  # XLA may or may not combine output and denominator
    # The embedding rows, and how many new tokens are finite everywhere.
    assert found[0] == ["all-reduce"] * 2


def test_what_is_not_finite_on_one_device_is_seen_on_all():
    """One channel of one KV head of the last layer: nothing carries it to the other devices by
    itself."""
    model, method = model_of("exact")
    spread = kvq.shard(model, method, **ALL)
    cache = kvq.init_cache(spread, method, 2, 512)
    sources = tuple({name: jnp.ones((2, 2, 4, 32)) for name in "kv"} for _ in cache.runs)
    sources[-1]["k"] = sources[-1]["k"].at[-1, 0, 2, 31].set(-jnp.inf)
    cache = jax.jit(kvq.commit)(spread, cache, sources, jnp.full(2, 4))
    assert cache.nonfinite.tolist() == [True, False]
    parts = [(part.index, part.data.tolist()) for part in cache.finite.addressable_shards]
    assert all(data == [[2], [4]][index[0].start or 0] for index, data in parts), parts
    logits = np.asarray(step(spread, TOKENS, jnp.full(2, 2), cache)[0])
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()


def test_no_second_cache_on_a_device():
    compiled, cache = compiled_step("higgs:bits=4,group=head,buffer=32", 65536)
    memory, size = compiled.memory_analysis(), ledger(cache).bytes / 8
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert memory.temp_size_in_bytes < 0.3 * size


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_dealing_is_a_partition(parts):
    """Every token lies on one device, where it is found again, and counts add up."""
    deal = [Deal(parts, 4, ("x",)) for _ in range(parts)]
    mesh = jax.make_mesh((parts,), ("x",))

    def seen(total):
        token = jnp.arange(48)
        mine, local = jax.vmap(deal[0].place)(token)
        mine = jnp.ones(48, bool) if mine is None else mine
        back = jnp.where(mine, deal[0].tokens(local) == token, True)
        return mine[None], back[None], deal[0].share(total)[None]

    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(seen, mesh=mesh, in_specs=spec(), out_specs=spec("x"), check_vma=False)
    for total in (0, 1, 4, 23, 48):
        mine, back, count = map(np.asarray, jax.jit(run)(jnp.int32(total)))
        assert (mine.sum(0) == 1).all()
        assert back.all()
        np.testing.assert_array_equal(count, mine[:, :total].sum(1))


def test_what_cannot_be_split_is_refused():
    config = tiny().config
    for sizes, message in [
        ({"model": 3}, "mesh model=3 must divide 4 heads"),
        ({"data": 16}, "wants 16 devices"),
    ]:
        with pytest.raises(kvq.UserError, match=message):
            rules_for(config, kvq.exact(), MeshSize(**sizes))
    with pytest.raises(kvq.UserError, match="mesh 'rows=2'"):
        MeshSize.parse("rows=2")
    model = kvq.shard(tiny(), kvq.exact(), data=2, model=2)
    with pytest.raises(kvq.UserError, match="aqua:bits=2 mixes KV heads"):
        kvq.init_cache(model, kvq.parse("aqua"), 2, 512)
    with pytest.raises(kvq.UserError, match="3 rows cannot be split over 2"):
        kvq.generate(model, [[1], [2], [3]], max_new_tokens=1)
    assert not shares_heads(kvq.init_cache(tiny(), kvq.parse("uniform:group=32"), 1, 64).layout, 2)
