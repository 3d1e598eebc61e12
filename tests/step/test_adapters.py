"""Caches behind other libraries' interfaces (kvqjax/adapters): tunix's sampler, and an engine of
JetStream's. Tokens over them are those of test_clients.py; here is what the interfaces ask for
besides, with one of our models."""

import ast
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.adapters import jetstream, tunix
from kvqjax.adapters.jetstream import CachedEngine

CLIENTS = Path(__file__).resolve().parents[2] / "examples" / "clients"
SHAPE = kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rope=kvq.Rope())
SPEC = "kivi:bits=4,window=0"
LONGEST, CAPACITY = 48, 64


def step(model, ids, counts, cache):
    return kvq.forward(model, ids, counts, cache, last=True)


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def engine(model):
    return CachedEngine(
        step,
        model,
        SPEC,
        slots=2,
        capacity=CAPACITY,
        max_prefill_length=LONGEST,
        load=lambda: model,
    )


def prefilled(engine, model, count: int, seed: int = 1, **options):
    ids = np.zeros(LONGEST, np.int32)
    ids[:count] = tokens(1, count, seed)[0]
    return engine.prefill(params=model, padded_tokens=ids, true_length=count, **options)


def test_an_engine_gives_the_tokens_of_generate(engine, model):
    """Two prompts that join one after the other; slots that are free make no valid token."""
    state, made = engine.init_decode_state(), {0: [], 1: []}
    for slot, count in ((1, 40), (0, 33)):
        prefix, first = prefilled(engine, model, count, slot)
        state = engine.insert(prefix, state, slot)
        made[slot].append(int(first.convert_to_numpy().get_result_at_slot(0).tokens[0, 0]))
        for _ in range(3):
            state, results = engine.generate(model, state)
            results.copy_to_host_async()
            data = [results.convert_to_numpy().get_result_at_slot(number) for number in (0, 1)]
            assert [int(x.valid[0, 0]) for x in data] == [
                int(bool(made[number])) for number in (0, 1)
            ]
            for number in (0, 1):
                if made[number]:
                    assert int(data[number].lengths[0]) == len(made[number])
                    made[number].append(int(data[number].tokens[0, 0]))
    for slot, count in ((1, 40), (0, 33)):
        prompt = tokens(1, count, slot)
        wanted = kvq.generate(model, prompt, kvq.parse(SPEC), max_new_tokens=len(made[slot]))
        assert made[slot] == wanted.tokens[0]


def test_a_prefix_goes_on_and_stays(engine, model):
    """A prompt in two calls is the prompt in one: its arrays and its next token; the first part may
    go on again."""
    whole, first = prefilled(engine, model, 40)
    head, _ = prefilled(engine, model, 32)
    rest = np.zeros(16, np.int32)
    rest[:8] = tokens(1, 40)[0, 32:]
    for _ in range(2):
        prefix, token = engine.prefill(
            params=model, existing_prefix=head, padded_tokens=rest, true_length=8
        )
        np.testing.assert_array_equal(token.data, first.data)
        np.testing.assert_array_equal(
            engine._unpacked(prefix).lengths, engine._unpacked(whole).lengths
        )


def test_a_sampler_of_the_caller_s(engine, model):
    def least(logits):
        return logits.argmin(-1)

    prefix, first = prefilled(engine, model, 40, sampler=least)
    assert int(first.data[0, 0]) != int(prefilled(engine, model, 40)[1].data[0, 0])
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    state, results = engine.generate(model, state, sampler=least)
    assert int(results.data[0, 0]) == int(state.token[0])


def test_a_slot_that_is_full_ends(engine, model):
    state = engine.insert(prefilled(engine, model, LONGEST)[0], engine.init_decode_state(), 0)
    valid = []
    for _ in range(CAPACITY - LONGEST + 2):
        state, results = engine.generate(model, state)
        valid.append(int(results.data[0, 1]))
    assert valid == [1] * (CAPACITY - LONGEST) + [0, 0]
    assert not state.cache.overflow.any()


def test_an_engine_says_what_it_is(engine, model):
    assert (engine.max_concurrent_decodes, engine.samples_per_slot, engine.max_prefill_length) == (
        2,
        1,
        LONGEST,
    )
    assert engine.load_params() is model
    assert engine.mesh.size == 1
    assert engine.colocated_cpus is None
    assert engine.free_resource(0) is None


ENGINE = {  # jetstream/engine/engine_api.py of JetStream, a revision whose prefill takes a sampler
    "prefill": ["params", "existing_prefix", "padded_tokens", "true_length", "sampler"],
    "generate": ["params", "decode_state", "sampler"],
    "insert": ["prefix", "decode_state", "slot"],
    "free_resource": ["slot"],
    "load_params": ["args", "kwargs"],
    "get_prefix_destination_sharding": [],
    "get_tokenizer": [],
    "build_tokenizer": ["metadata"],
    "init_decode_state": ["args", "kwargs"],
}
PROPERTIES = {
    "max_concurrent_decodes",
    "samples_per_slot",
    "max_prefill_length",
    "mesh",
    "colocated_cpus",
}


def test_an_engine_has_the_names_of_the_interface():
    for name, wanted in ENGINE.items():
        assert list(inspect.signature(getattr(CachedEngine, name)).parameters)[1:] == wanted
    assert all(
        isinstance(inspect.getattr_static(CachedEngine, name), property) for name in PROPERTIES
    )
    public = {name for name in vars(CachedEngine) if not name.startswith("_")}
    assert public == {*ENGINE, *PROPERTIES}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e, m: e.insert(prefilled(e, m, 8)[0], e.init_decode_state(), 2), "slot"),
        (lambda e, m: prefilled(e, m, 0), "true_length"),
        (
            lambda e, m: e.prefill(
                params=m, padded_tokens=np.zeros((1, 8), np.int32), true_length=8
            ),
            "padded_tokens",
        ),
        (
            lambda e, m: e.prefill(params=m, padded_tokens=np.zeros(64, np.int32), true_length=60),
            "longer than max_pre",
        ),
        (lambda e, m: e.get_tokenizer(), "without tokenizer="),
        (
            lambda e, m: CachedEngine(step, m, SPEC, slots=1, capacity=8, max_prefill_length=9),
            "more than capacity",
        ),
        (
            lambda e, m: CachedEngine(step, m, SPEC, slots=0, capacity=8, max_prefill_length=8),
            "slots",
        ),
        (
            lambda e, m: CachedEngine(
                step, m, "exact", slots=1, capacity=64, max_prefill_length=48
            ).insert(prefilled(e, m, 8)[0], e.init_decode_state(), 0),
            "the prefix is of an engine of another method",
        ),
    ],
)
def test_wrong_use_of_an_engine_is_one_line(engine, model, call, message):
    with pytest.raises(kvq.UserError, match=message):
        call(engine, model)


def test_an_engine_without_load_says_so():
    engine = CachedEngine(step, SHAPE, SPEC, slots=1, capacity=8, max_prefill_length=8)
    with pytest.raises(kvq.UserError, match="without load="):
        engine.load_params()


def rows_first(spec: str, batch: int = 3):
    return tunix.init_cache(SHAPE, spec, batch, CAPACITY, jnp.float32)


def mask(valid):
    causal = jnp.arange(CAPACITY)[None] <= jnp.arange(valid.shape[1])[:, None]
    return jnp.pad(valid, ((0, 0), (0, CAPACITY - valid.shape[1])))[:, None] & causal[None]


@pytest.mark.parametrize("spec", ["exact", SPEC])
def test_a_sampler_s_cache_has_rows_in_front_and_picks_them(spec):
    """Rows that are repeated and picked along the first axis of every array are those that `repeat`
    and `gather` give, and left padding is what a mask of valid tokens says."""
    q, k, v = (
        jax.random.normal(jax.random.key(i), (3, 40, n, 16)) for i, n in enumerate((4, 2, 2))
    )
    valid = jnp.arange(40)[None] >= jnp.asarray([[0], [7], [30]])

    @jax.jit
    def filled(cache):
        views = tunix.layers(cache, mask(valid))
        for name in views:
            views[name] = views[name].attend(q, k, v)[1]
        return tunix.commit_layers(views)

    cache = filled(rows_first(spec))
    assert all(x.shape[0] == 3 for x in jax.tree.leaves(cache))
    assert cache.cache.lengths.tolist() == [40, 33, 10]
    picked = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0)[jnp.asarray([5, 0, 3])], cache)
    wanted = kvq.gather(kvq.repeat(cache.cache, 2), jnp.asarray([5, 0, 3]))
    jax.tree.map(np.testing.assert_array_equal, picked.cache, wanted)
    jax.tree.map(np.testing.assert_array_equal, tunix.SamplerCache.of(cache.cache), cache)


def test_wrong_use_of_a_sampler_s_cache_is_one_line():
    cache, seen = rows_first("exact"), mask(jnp.ones((3, 4), bool))
    with pytest.raises(kvq.UserError, match="is no cache for tunix's sampler"):
        tunix.layers(cache.cache, seen)
    with pytest.raises(kvq.UserError, match="attention_mask is"):
        tunix.layers(cache, seen[:, 0])
    with pytest.raises(kvq.UserError, match="no view of layer_1"):
        tunix.commit_layers({"layer_0": 1, "layer_2": 2})
    with pytest.raises(kvq.UserError, match="has not attended"):
        tunix.commit_layers(tunix.layers(cache, seen))


@pytest.mark.filterwarnings(
    "ignore"
)  # tunix and what it imports warn; the sampler donates what beams cannot use
@pytest.mark.parametrize("beams", [None, 3], ids=["greedy", "beams"])
def test_tunix_s_own_sampler(beams, monkeypatch):
    """The sampler of google-tunix, where it is installed, over the model of examples/clients."""
    sampler = pytest.importorskip("tunix.generate.sampler", reason="google-tunix is not installed")
    monkeypatch.syspath_prepend(CLIENTS)
    import parts
    import tunix_sampler as client

    class Tokenizer:
        encode = staticmethod(lambda text, **_: [int(word) for word in text.split()])
        decode = staticmethod(lambda ids, **_: " ".join(map(str, ids)))
        bos_id = staticmethod(lambda: None)
        eos_id = staticmethod(lambda: parts.END)
        pad_id = staticmethod(lambda: parts.PAD)

    config = sampler.CacheConfig(
        cache_size=parts.CAPACITY, num_layers=2, num_kv_heads=2, head_dim=16
    )
    texts, made = [" ".join(map(str, row)) for row in parts.prompts()], {}
    for spec in (None, "exact", SPEC):
        run = sampler.Sampler(client.make(spec), Tokenizer(), config)
        out = run(
            texts, max_generation_steps=8, max_prompt_length=132, beam_size=beams, eos_tokens=[99]
        )
        made[spec] = [list(map(int, row)) for row in out.tokens]
    assert made["exact"] == made[None]
    assert len(made[SPEC]) == len(texts)


def test_no_adapter_imports_the_other_library():
    for module in (jetstream, tunix):
        nodes = [*ast.walk(ast.parse(inspect.getsource(module)))]
        names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        assert "jax" in names
        assert not {name.partition(".")[0] for name in names} & {"jetstream", "tunix"}
