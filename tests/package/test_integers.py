"""Whole numbers at every public door: one that is known and out of range is one line; one that a
trace hides is clipped, and the row's overflow flag is raised."""

import functools
import inspect
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.flax_bridge import ForwardPass

ROWS, NEW, CAPACITY = 2, 8, 64
SHAPE = kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
TINY = tiny()


@functools.cache
def empty(of=None):
    return kvq.init_cache(of or TINY, "exact", ROWS, CAPACITY)


@functools.cache
def held():
    return kvq.forward(TINY, tokens(ROWS, NEW), both(NEW), empty())[1]


def paged():
    return kvq.init_cache(TINY, "exact", ROWS, 600, pages=4)


def table(number):
    return jnp.full(paged().pages.shape, -1, jnp.int32).at[0, 0].set(number)


@functools.cache
def pending():
    return kvq.attend(TINY, tokens(ROWS, NEW), both(NEW), empty())[1]


@functools.cache
def heads():
    q, k, v = (
        jax.random.normal(jax.random.key(i), (ROWS, NEW, n, 16)) for i, n in enumerate((4, 2, 2))
    )
    return q, k, v


@functools.cache
def news():
    return [kvq.attend_layer(empty(SHAPE), layer, *heads(), both(NEW))[1] for layer in range(2)]


@pytest.fixture(scope="module", autouse=True)
def made_outside_jit():
    """Make what functions here keep before a trace asks for it, whichever test comes first."""
    for make in (empty, held, pending, heads, news):
        make()
    empty(SHAPE)


def attended(counts):
    return [view.attend(*heads())[1] for view in kvq.layers(empty(SHAPE), counts)]


def both(number) -> jax.Array:
    return jnp.full((ROWS,), number, jnp.int32)


def passed(layer: int, counts):
    from flax import nnx

    return ForwardPass(nnx.Cache(empty(SHAPE)), counts).attend(layer, *heads())


# The functions that take arrays of integers, or a layer or row: what they return of one bad number,
# and such numbers. The value stands in row 0 where there is one for each row.
def first(number, rest=0):
    return jnp.stack([jnp.asarray(number, jnp.int32), jnp.int32(rest)])


COUNTS = (-1, NEW + 1, 2**31 - 1)
ARRAYS = {
    ("forward", "counts"): (
        lambda x: kvq.forward(TINY, tokens(ROWS, NEW), first(x), empty())[1],
        COUNTS,
    ),
    ("prefill", "counts"): (
        lambda x: kvq.prefill(TINY, tokens(ROWS, NEW), first(x), empty())[1],
        COUNTS,
    ),
    ("attend", "counts"): (
        lambda x: kvq.commit(
            TINY, empty(), kvq.attend(TINY, tokens(ROWS, NEW), first(x), empty())[1], first(x)
        ),
        COUNTS,
    ),
    ("commit", "counts"): (lambda x: kvq.commit(TINY, empty(), pending(), first(x)), COUNTS),
    ("attend_layer", "counts"): (
        lambda x: kvq.append(
            empty(SHAPE),
            [kvq.attend_layer(empty(SHAPE), i, *heads(), first(x))[1] for i in (0, 1)],
            first(x),
        ),
        COUNTS,
    ),
    ("layers", "counts"): (lambda x: kvq.commit_layers(attended(first(x))), COUNTS),
    ("commit_layers", "counts"): (
        lambda x: kvq.commit_layers(attended(both(NEW)), first(x)),
        COUNTS,
    ),
    ("append", "counts"): (lambda x: kvq.append(empty(SHAPE), news(), first(x)), COUNTS),
    ("forward", "tokens"): (
        lambda x: kvq.forward(TINY, tokens(ROWS, NEW).at[0, 3].set(x), both(NEW), empty())[1],
        (-1, 50),
    ),
    ("prefill", "tokens"): (
        lambda x: kvq.prefill(TINY, tokens(ROWS, NEW).at[0, 3].set(x), both(NEW), empty())[1],
        (-1, 50),
    ),
    ("crop", "lengths"): (lambda x: kvq.crop(held(), first(x, NEW)), (-1, -(2**31))),
    ("drop", "start"): (lambda x: kvq.drop(held(), first(x), both(NEW)), (-1, -(2**31), NEW + 1)),
    ("drop", "stop"): (lambda x: kvq.drop(held(), both(0), first(x, NEW)), (-1, -(2**31))),
    ("concatenate", "tokens"): (
        lambda x: kvq.concatenate(
            [empty(), held()], model=TINY, tokens=[tokens(ROWS, NEW).at[0, 0].set(x)], recompute=1
        ),
        (-1, 50),
    ),
    ("gather", "rows"): (lambda x: kvq.gather(held(), first(x)), (-1, ROWS)),
    ("with_pages", "table"): (lambda x: kvq.with_pages(paged(), table(x)), (-2, 4)),
    ("insert", "rows"): (lambda x: kvq.insert(held(), x, held(), 0), (ROWS, 2**31 - 1)),
    ("insert", "other_rows"): (lambda x: kvq.insert(held(), 0, held(), x), (-1, ROWS)),
}
# What returns no cache has no flag to raise: its traced numbers are only clipped.
UNFLAGGED = {
    ("below_first", "counts"): (lambda x: kvq.below_first(empty(), first(x), NEW), COUNTS),
    ("attend", "tokens"): (
        lambda x: kvq.attend(TINY, tokens(ROWS, NEW).at[0, 3].set(x), both(NEW), empty()),
        (-1, 50),
    ),
    ("attend_layer", "layer"): (
        lambda x: kvq.attend_layer(empty(SHAPE), x, *heads(), both(NEW))[0],
        (-1, 2),
    ),
    ("copy_page", "source"): (lambda x: kvq.copy_page(paged(), x, 1), (-1, 4)),
    ("copy_page", "target"): (lambda x: kvq.copy_page(paged(), 1, x), (-1, 4)),
    ("dense", "layer"): (lambda x: kvq.dense(empty(SHAPE), x), (-1, 2)),
    ("ForwardPass.attend", "counts"): (lambda x: passed(0, first(x)), COUNTS),
}


def number(function, name, **more):
    return lambda x: function(**more, **{name: x})


GENERATE = {"model": TINY, "prompts": [[1, 2]]}
PAST = (0, -1, 2**40)
# Static numbers: what takes one, and values beside those of another type that it refuses.
STATIC = {
    ("below_first", "length"): (lambda x: kvq.below_first(empty(), both(1), x), PAST),
    ("layers", "stack"): (lambda x: kvq.layers(empty(SHAPE), both(1), stack=x), PAST),
    ("ForwardPass.positions", "length"): (lambda x: ForwardPass(None, both(1)).positions(x), PAST),
    ("ForwardPass.attend", "layer"): (lambda x: passed(x, both(NEW)), (-1, 1)),
    ("init_cache", "batch"): (lambda x: kvq.init_cache(TINY, "exact", x, 8), PAST),
    ("init_cache", "capacity"): (lambda x: kvq.init_cache(TINY, "exact", 1, x), PAST),
    ("init_cache", "pages"): (lambda x: kvq.init_cache(TINY, "exact", 1, 600, pages=x), PAST),
    ("init_cache", "page_tokens"): (
        lambda x: kvq.init_cache(TINY, "exact", 1, 600, pages=1, page_tokens=x),
        PAST,
    ),
    ("pages_needed", "tokens"): (lambda x: kvq.pages_needed(paged().layout, x), (-1, 2**40)),
    ("load", "rope_length"): (lambda x: kvq.load("demo", rope_length=x), PAST),
    ("shard", "data"): (lambda x: kvq.shard(TINY, "exact", data=x), PAST),
    ("shard", "seq"): (lambda x: kvq.shard(TINY, "exact", seq=x), PAST),
    ("shard", "model"): (lambda x: kvq.shard(TINY, "exact", model=x), PAST),
    ("join_hosts", "processes"): (lambda x: kvq.join_hosts("here:1", x, 0), PAST),
    ("join_hosts", "process"): (lambda x: kvq.join_hosts("here:1", 2, x), (-1, 2)),
    ("policy", "overrides"): (lambda x: kvq.policy("kivi", {x: "exact"}), (10_000, -10_000)),
    ("repeat", "n"): (lambda x: kvq.repeat(held(), x), PAST),
    ("resize", "capacity"): (lambda x: kvq.resize(held(), x), PAST),
    ("cut", "tokens"): (lambda x: kvq.cut(held(), x), (-1, 2**40)),
    ("join", "capacity"): (lambda x: kvq.join(*kvq.cut(held(), 4), capacity=x), PAST),
    ("concatenate", "capacity"): (
        lambda x: kvq.concatenate([empty(), held()], capacity=x),
        PAST,
    ),
    ("concatenate", "recompute"): (
        lambda x: kvq.concatenate([empty(), held()], model=TINY, recompute=x),
        (-1, 2**40),
    ),
    ("plan", "batch"): (number(kvq.plan, "batch", model=TINY.config, cache="exact"), PAST),
    **{
        ("compare", name): (number(kvq.compare, name, model=TINY, cache="exact"), values)
        for name, values in {
            **dict.fromkeys(("chunk", "window", "batch", "context", "sequences"), PAST),
            "tokens": (-1,),
            "seed": (-1, 2**40),
        }.items()
    },
    **{
        ("tune", name): (
            number(kvq.tune, name, model=TINY, texts=[1] * 64, method="higgs", bits=4),
            PAST,
        )
        for name in ("context", "runs", "kinds", "sequences", "length")
    },
    ("speculate", "draft"): (number(kvq.speculate, "draft", **GENERATE), PAST),
    ("speculate", "ngram"): (number(kvq.speculate, "ngram", **GENERATE), PAST),
    ("beam_search", "beams"): (number(kvq.beam_search, "beams", **GENERATE), (*PAST, 51)),
    ("drift", "chunk"): (
        number(kvq.eval.drift, "chunk", model=TINY, texts=[1] * 64, method="exact"),
        PAST,
    ),
    ("drift", "window"): (
        number(kvq.eval.drift, "window", model=TINY, texts=[1] * 64, method="exact"),
        PAST,
    ),
    ("drift", "bins"): (
        number(kvq.eval.drift, "bins", model=TINY, texts=[1] * 64, method="exact"),
        PAST,
    ),
    ("drift", "tokens"): (
        number(kvq.eval.drift, "tokens", model=TINY, texts=[1] * 64, method="exact"),
        (-1,),
    ),
    ("drift", "texts"): (
        lambda x: kvq.eval.drift(TINY, [1] * 31 + [x], "exact", window=16, tokens=0),
        (-1, 50),
    ),
    ("perplexity", "texts"): (
        lambda x: kvq.eval.perplexity(TINY, [1] * 31 + [x], "exact", window=16),
        (-1, 50),
    ),
    ("calibrate.run", "count"): (lambda x: kvq.calibrate.run(TINY, "kvquant", "a", count=x), PAST),
    ("calibrate.sequences", "count"): (lambda x: kvq.calibrate.sequences(TINY, "a", x, 8), PAST),
    ("calibrate.sequences", "length"): (lambda x: kvq.calibrate.sequences(TINY, "a", 1, x), PAST),
    ("calibrate.run", "length"): (
        lambda x: kvq.calibrate.run(TINY, "kvquant", "a", length=x),
        PAST,
    ),
    **{
        ("perplexity", name): (
            number(kvq.eval.perplexity, name, model=TINY, texts=[1] * 64, method="exact"),
            values,
        )
        for name, values in {
            "chunk": PAST,
            "window": PAST,
            "batch": PAST,
            "context": PAST,
            "tokens": (-1,),
        }.items()
    },
    **{
        ("retrieval", name): (number(kvq.eval.retrieval, name, model=TINY, method="exact"), values)
        for name, values in dict.fromkeys(
            ("length", "samples", "chunk", "batch", "bins"), PAST
        ).items()
    },
    ("retrieval", "seed"): (
        number(kvq.eval.retrieval, "seed", model=TINY, method="exact"),
        (-1, 2**40),
    ),
    **{
        ("copying", name): (number(kvq.eval.copying, name, model=TINY, method="exact"), values)
        for name, values in {
            **dict.fromkeys(("length", "samples", "chunk", "batch", "apart"), PAST),
            "recompute": (-1, 2**40),
            "seed": (-1, 2**40),
        }.items()
    },
    **{
        (function.__name__, name): (
            lambda x, f=function, n=name: list(f(**GENERATE, **{n: x})),
            values,
        )
        for function in (kvq.generate, kvq.stream, kvq.speculate, kvq.beam_search)
        for name, values in {
            "max_new_tokens": PAST,
            "capacity": PAST,
            "chunk": PAST,
            "stride": PAST,
            "seed": (-2, 2**40),
            "top_k": (-2, 2**40),
            "min_tokens": (-1, 65, 2**40),
            "eos_ids": ([-1], [50], "2"),
        }.items()
        if name in inspect.signature(function).parameters
    },
}
OTHER_TYPES = (1.5, "1", True, (1, 2))


def refusal(take, value) -> str:
    with pytest.raises(kvq.UserError) as raised:
        take(value)
    return str(raised.value)


@pytest.mark.parametrize("door", [*ARRAYS, *UNFLAGGED], ids="-".join)
def test_a_known_number_out_of_range_is_one_line(door):
    take, values = (ARRAYS | UNFLAGGED)[door]
    for value in values:
        text = refusal(take, value)
        assert door[1] in text, text
        assert str(value) in text, text
        assert "\n" not in text


@pytest.mark.parametrize("door", ARRAYS, ids="-".join)
def test_a_traced_number_out_of_range_is_clipped_and_raises_the_flag(door):
    """Of the row it stands for alone; and what the cache then holds can be attended to."""
    take, values = ARRAYS[door]
    traced = jax.jit(take)
    for value in (*values, 0):
        cache = traced(value)
        row = {"insert-rows": ROWS - 1}.get("-".join(door), 0)
        flags = [value != 0 and b == row for b in range(ROWS)]
        assert cache.overflow.tolist() == flags, (value, cache.lengths)
        assert 0 <= int(cache.lengths.min()) <= int(cache.lengths.max()) <= NEW
        assert not cache.nonfinite.any()


@pytest.mark.parametrize("door", UNFLAGGED, ids="-".join)
def test_where_there_is_no_flag_traced_numbers_are_clipped(door):
    take, values = UNFLAGGED[door]
    traced = jax.jit(take)
    for value in values:
        for leaf in jax.tree.leaves(traced(value)):
            assert bool(jnp.isfinite(leaf).all())


def said() -> dict[str, str]:
    """What every static door says of a number out of range or of another type; "" where it says
    nothing."""
    texts = {}
    for (function, name), (take, values) in STATIC.items():
        for value in (
            *values,
            *(x for x in OTHER_TYPES if name not in ("overrides", "ids", "eos_ids")),
        ):
            try:
                take(value)
                text = ""
            except kvq.UserError as error:
                text = str(error)
            except Exception as error:
                text = f"{type(error).__name__}\n{error}"
            texts[f"{function} {name} {value!r}"] = text
    return texts


def test_a_static_number_of_another_type_or_range_is_one_line():
    """In a process without jaxtyping's check of types, as a user's is."""
    places = [str(Path(__file__).parent), *sys.path]
    script = f"import sys; sys.path[:0] = {places!r}; import json, test_integers as t; print(json.dumps(t.said()))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    texts = json.loads(ended.stdout.splitlines()[-1])
    assert len(texts) > 250
    wrong = {call: text for call, text in texts.items() if not text or "\n" in text}
    assert not wrong


def test_every_integer_argument_has_a_row():
    """Of public functions; the methods' own have a table of their own
    (tests/methods/test_factories.py)."""
    exempt = {*kvq.METHODS, "KVShape", "Rope", "Method", "Model"}
    modules = {"": kvq, "calibrate.": kvq.calibrate}
    public = {
        f"{lead}{name}": getattr(module, name)
        for lead, module in modules.items()
        for name in module.__all__
    }
    public |= {name: getattr(kvq.eval, name) for name in kvq.eval.__all__}
    wanted = {
        (name, p.name)
        for name, function in public.items()
        if callable(function) and name not in exempt and not isinstance(function, type)
        for p in inspect.signature(function).parameters.values()
        if "Int[" in str(p.annotation)
        or "int" in str(p.annotation).replace("print", "").split("[")[0]
    }
    assert wanted - {*ARRAYS, *UNFLAGGED, *STATIC} == {
        ("tune", "bits"),
        ("plan", "context"),
        ("plan", "memory"),
        ("plan", "memory_fraction"),
    }
