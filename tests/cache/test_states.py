"""States of recurrent layers are part of a cache: every way in which rows are filled, moved,
emptied, saved, cut.

The decoder without a cache is the reference, which has no states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method, with_constants, with_nightly
from recurrent import EVEN, PARTS, UNEVEN, drawn, hybrid, recurrent
from tiny import in_form as form_of
from tiny import tokens

import kvqjax as kvq
from kvqjax import UserError, calibrate
from kvqjax.calibrate import activations
from kvqjax.calibrate.xquant import prepared
from kvqjax.model import decoder
from kvqjax.model.config import RopeConfig
from kvqjax.model.rope import positions_of_layer, rotate

LENGTH, CAPACITY, BOUND = 160, 192, 3e-4
COUNTS = (160, 77)
forward, prefill = jax.jit(kvq.forward, static_argnames="last"), jax.jit(kvq.prefill)
attend, commit = jax.jit(kvq.attend, static_argnames="within"), jax.jit(kvq.commit)
plain_logits = jax.jit(decoder.logits, static_argnums=2)


@functools.cache
def plain(layers: tuple[int, ...] = EVEN) -> np.ndarray:
    model = hybrid(layers)
    return np.asarray(plain_logits(model.params, tokens(2, LENGTH), model.config))


def in_form(model: kvq.Model, form: str) -> kvq.Model:
    return model.replace(params=form_of(model.params, form))


def filled(model: kvq.Model, method="exact", counts=COUNTS, size: int = LENGTH, seed: int = 1):
    """A cache of ragged rows, fed `size` tokens at a time."""
    text, cache = (
        tokens(len(counts), LENGTH, seed),
        kvq.init_cache(model, method, len(counts), CAPACITY),
    )
    for start in range(0, LENGTH, size):
        part = jnp.pad(text, ((0, 0), (0, size)))[:, start : start + size]
        cache = forward(model, part, jnp.clip(jnp.asarray(counts) - start, 0, size), cache)[1]
    return cache


def near(a, b, atol: float = 2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def row_of(cache, row: int):
    return jax.tree.map(lambda x: x[:, row], cache.states)


def following(model, cache) -> np.ndarray:
    """Logits of one more token of every row."""
    return np.asarray(
        forward(model, jnp.full((cache.batch, 1), 7), jnp.ones(cache.batch, jnp.int32), cache)[0]
    )


@pytest.mark.parametrize("form", ["scan", pytest.param("unroll", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "layers", [pytest.param(EVEN, marks=pytest.mark.nightly), UNEVEN], ids=["even", "uneven"]
)
@pytest.mark.parametrize("size", with_nightly([7, 64, 1], [7]))
def test_chunks_of_any_size_give_the_logits_of_the_model(size, layers, form):
    """Rows of different lengths, one of which is empty in later chunks; the last tokens one by
    one."""
    model, wanted, text = in_form(hybrid(layers), form), plain(layers), tokens(2, LENGTH)
    cache = kvq.init_cache(model, kvq.exact(sinks=3), 2, CAPACITY)
    for start in range(0, LENGTH, size):
        counts = jnp.clip(jnp.asarray(COUNTS) - 2 - start, 0, size)
        part = jnp.pad(text, ((0, 0), (0, size)))[:, start : start + size]
        logits, cache = forward(model, part, counts, cache)
        logits = np.asarray(logits)
        for row, count in enumerate(counts.tolist()):
            np.testing.assert_allclose(
                logits[row, :count], wanted[row, start : start + count], atol=BOUND
            )
    for back in (2, 1):
        place = jnp.asarray(COUNTS) - back
        logits, cache = forward(
            model, jnp.take_along_axis(text, place[:, None], 1), jnp.ones(2, jnp.int32), cache
        )
        np.testing.assert_allclose(logits[:, 0], wanted[np.arange(2), place], atol=BOUND)
    near(cache.states, filled(model).states, 5e-5)


@pytest.mark.parametrize("form", with_nightly(["scan", "switch", "unroll"], ["switch"]))
def test_an_exact_prefill_and_left_padding(form):
    model, text, counts = in_form(hybrid(UNEVEN), form), tokens(2, LENGTH), np.asarray(COUNTS)
    last, cache = prefill(
        model, text, jnp.asarray(counts), kvq.init_cache(model, "exact", 2, CAPACITY)
    )
    np.testing.assert_allclose(last, plain(UNEVEN)[np.arange(2), counts - 1], atol=BOUND)
    near(cache.states, filled(model).states)
    mask = np.arange(LENGTH)[None] >= LENGTH - counts[:, None]
    turned = jnp.stack(
        [jnp.roll(row, LENGTH - count) for row, count in zip(text, counts, strict=True)]
    )
    again = forward(model, turned, jnp.asarray(mask), kvq.init_cache(model, "exact", 2, CAPACITY))[
        1
    ]
    near(again.states, cache.states)


@pytest.mark.nightly
def test_a_long_prompt_in_chunks_of_a_prefill():
    """More tokens than an exact prefill computes at a time: the state goes from chunk to chunk."""
    model, text = hybrid(), tokens(1, 700)
    last, cache = prefill(model, text, jnp.asarray([650]), kvq.init_cache(model, "exact", 1, 704))
    wanted = plain_logits(model.params, text[:, :650], model.config)[:, -1]
    np.testing.assert_allclose(last, wanted, atol=2 * BOUND)
    step = forward(
        model, text[:, :650], jnp.asarray([650]), kvq.init_cache(model, "exact", 1, 704)
    )[1]
    near(cache.states, step.states, 5e-5)


@pytest.mark.nightly
def test_a_chunk_of_a_thousand_tokens():
    """No multiple of the tokens whose updates are put together in one; a row of another length, and
    an empty one that goes on when the others are done."""
    model, text = hybrid(UNEVEN), tokens(3, 1000, 4)
    wanted = np.asarray(plain_logits(model.params, text, model.config))
    cache, counts = kvq.init_cache(model, "exact", 3, 1088), jnp.asarray([1000, 613, 0])
    logits, cache = forward(model, text, counts, cache)
    for row, count in enumerate(counts):
        np.testing.assert_allclose(logits[row, :count], wanted[row, :count], atol=2 * BOUND)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(row_of(cache, 2)))
    later = jnp.stack([text[0], jnp.roll(text[1], -613), text[2]])
    counts = jnp.asarray([0, 387, 1000])
    before, (logits, cache) = row_of(cache, 0), forward(model, later, counts, cache)
    equal(row_of(cache, 0), before)
    np.testing.assert_allclose(logits[1, :387], wanted[1, 613:], atol=2 * BOUND)
    np.testing.assert_allclose(logits[2], wanted[2], atol=2 * BOUND)


recur = jax.jit(decoder.recur, static_argnums=4)
project, finish = (
    jax.jit(function, static_argnums=places)
    for function, places in ((decoder.project, (3, 4)), (decoder.finish, 3))
)


def next_logits(model, cache, newest):
    """Logits of one new token a row by attention in float64 over what `dense` decodes, and by the
    rule's own loop."""
    config, one = model.config, jnp.ones(cache.batch, jnp.int32)
    positions, h = cache.lengths[:, None], decoder.embed(model.params, newest, config)
    kinds = {index: ("attention", n) for n, index in enumerate(config.attention_layers)}
    kinds |= {index: ("recurrent", n) for n, index in enumerate(config.recurrent.layers)}
    for index in range(config.depth):
        kind, number = kinds[index]
        weights = decoder.layer(model.params, number, kind)
        if kind == "recurrent":
            h = recur(
                weights,
                h,
                jax.tree.map(lambda x: x[number], cache.states[0]),  # noqa: B023
                one,
                config,
            ).h
            continue
        turns = positions_of_layer(positions, config, number)
        made = project(weights, h, positions, config, number)
        k, v, valid = kvq.dense(cache, number, model)
        k = np.concatenate([k, rotate(made.k, turns, config)], 1).astype(np.float64)
        v = np.concatenate([v, made.v], 1).astype(np.float64)
        valid = np.concatenate([valid, np.ones((len(newest), 1), bool)], 1)
        k, v = (np.repeat(x, config.num_heads // x.shape[2], 2) for x in (k, v))
        scores = np.einsum("bhd,bshd->bhs", made.q[:, 0], k) * config.head_dim**-0.5
        weight = np.exp(np.where(valid[:, None], scores - scores.max(-1, keepdims=True), -np.inf))
        out = np.einsum("bhs,bshd->bhd", weight / weight.sum(-1, keepdims=True), v)
        h = finish(weights, h, jnp.asarray(out, jnp.float32)[:, None], config)
    return decoder.unembed(model.params, h, config)[:, 0]


def case(name: str) -> tuple[kvq.Model, kvq.Method]:
    changes = {field: value for field, value in PARTS.items() if field not in CASES[name][1]}
    model, method = model_and_method(name, recurrent=recurrent(), **changes)
    return with_constants(drawn(model), method), method


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    with_nightly(CASES, ["kivi2"]),
)
def test_every_method_caches_the_layers_of_attention(name):
    model, method = case(name)
    cache = kvq.init_cache(model, method, 2, 256)
    for seed, counts in enumerate(((80, 80), (80, 0), (64, 30))):
        cache = forward(model, tokens(2, 80, seed), jnp.asarray(counts), cache)[1]
    newest = tokens(2, 1, 7)
    wanted = next_logits(model, cache, newest)
    got = forward(model, newest, jnp.ones(2, jnp.int32), cache)[0][:, 0]
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, atol=5e-5 * np.abs(wanted).max())


SCALED = RopeConfig(
    kind="yarn", factor=4.0, original_max_position=32, attention_factor=1.14, fraction=0.25
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spec",
    with_nightly(["higgs:bits=4,window=32", "xquant:bits=4,group=32"], ["xquant:bits=4,group=32"]),
)
def test_a_scaled_rope_of_some_channels(spec):
    """Keys cached before the rope, and in the layer's input: the factor is of the channels that
    turn."""
    model = hybrid(rope=SCALED)
    model, newest = prepared(model, kvq.parse(spec)), tokens(2, 1, 7)
    cache = filled(model, spec)
    wanted = next_logits(model, cache, newest)
    got = forward(model, newest, jnp.ones(2, jnp.int32), cache)[0][:, 0]
    np.testing.assert_allclose(got, wanted, atol=5e-5 * np.abs(wanted).max())


def test_kernels_do_not_turn_some_channels_by_a_factor():
    config = hybrid().config

    def build(rope):
        return kvq.parse("higgs:bits=2").layer.build(dataclasses.replace(config, rope=rope))

    assert build(SCALED).fast.packed is None
    assert build(dataclasses.replace(SCALED, attention_factor=1.0)).fast.packed is not None


@pytest.mark.nightly
@pytest.mark.parametrize("keep", ["streaming:64"])
def test_tokens_are_evicted_and_states_remember_them(keep):
    model, method = hybrid(), f"kivi:bits=2,window=32,sinks=4,keep={keep}"
    cache, exact = filled(model, method), filled(model)
    near(jax.tree.map(lambda x: x[:1], cache.states), jax.tree.map(lambda x: x[:1], exact.states))
    last, cache = prefill(
        model, tokens(2, LENGTH), jnp.asarray(COUNTS), kvq.init_cache(model, method, 2, CAPACITY)
    )
    np.testing.assert_allclose(last, plain()[np.arange(2), np.asarray(COUNTS) - 1], atol=BOUND)
    assert np.isfinite(following(model, cache)).all()


CALIBRATED = (
    "kvquant:bits=3,sinks=2",
    "commvq:bits=1,rounds=2,levels=8,hidden=16,window=32,unit=32",
    "aqua:bits=2,first_bits=16,backbone=token,group=32,buffer=32,sinks=3",
    "oscar:bits=2,window=32,sinks=4",
    "xquant:bits=4,group=32,latent=true",
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if spec.startswith("kvquant") else pytest.mark.nightly)
        for spec in CALIBRATED
    ],
)
def test_calibrations_pass_through_recurrent_layers(spec):
    """Between the layers that they fit, and before the first."""
    model, text = hybrid(), tokens(2, LENGTH)
    ready = model.with_artifact(
        calibrate.run(model, spec, np.asarray(tokens(8, 96)), count=8, length=96)
    )
    logits = forward(ready, text, jnp.asarray(COUNTS), kvq.init_cache(ready, spec, 2, CAPACITY))[0]
    # A chunk's own tokens see each other exactly.
    np.testing.assert_allclose(logits[0], plain()[0], atol=0.05)
    cached = kvq.dense(filled(model, counts=(90, 90)), 1)[0][:, :90]
    read = activations.activations(
        model.params, text[:, :90], model.config, rope="post", gradients=False
    )
    np.testing.assert_allclose(read.k[1].reshape(cached.shape), cached, atol=BOUND)


# --- Two phases ---


@pytest.mark.parametrize("form", ["scan", pytest.param("unroll", marks=pytest.mark.nightly)])
def test_attend_leaves_the_states_and_commit_takes_what_is_accepted(form):
    model, text = in_form(hybrid(UNEVEN), form), tokens(2, LENGTH)
    cache = filled(model, counts=(100, 60))
    draft = jnp.stack([text[0, 100:106], text[1, 60:66]])
    logits, pending = attend(model, draft, jnp.asarray([6, 6]), cache, within="step")
    for row, start in enumerate((100, 60)):
        np.testing.assert_allclose(logits[row], plain(UNEVEN)[row, start : start + 6], atol=BOUND)
    equal(cache.states, filled(model, counts=(100, 60)).states)
    near(
        commit(model, cache, pending, jnp.asarray([3, 5])).states,
        filled(model, counts=(103, 65)).states,
    )
    equal(commit(model, cache, pending, jnp.asarray([0, 0])).states, cache.states)


PROMPTS = [[7, 3, 9] * 20, list(range(40))]


@pytest.mark.nightly
@pytest.mark.parametrize("drafter", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_speculation_equals_plain_decoding(drafter):
    """Drafts from the text itself and from a recurrent model, right ones and wrong ones."""
    model, method = hybrid(), "kivi:bits=2,window=32"
    wanted = kvq.generate(model, PROMPTS, method, max_new_tokens=40).tokens
    drafts = {"drafter": hybrid(UNEVEN)} if drafter else {}
    made = kvq.speculate(model, PROMPTS, method, max_new_tokens=40, draft=4, **drafts)
    assert made.tokens == wanted
    assert made.drafted > made.accepted


@pytest.mark.nightly
def test_a_drafter_that_is_the_model_is_always_right():
    made = kvq.speculate(hybrid(), PROMPTS, "exact", max_new_tokens=31, draft=5, drafter=hybrid())
    assert made.tokens == kvq.generate(hybrid(), PROMPTS, "exact", max_new_tokens=31).tokens
    assert made.rounds == 5


def test_pending_sources_of_another_shape_are_refused():
    model = hybrid()
    cache = kvq.init_cache(model, "exact", 1, 64)
    pending = kvq.attend(model, tokens(1, 4), jnp.asarray([4]), cache)[1]
    with pytest.raises(UserError, match=r"wanted a tuple of 2, a dict of sources for every run"):
        kvq.commit(model, cache, pending[:1], jnp.asarray([4]))
    wrong = (pending[0], pending[1] | {"beta": pending[1]["beta"][:, :, :3]})
    with pytest.raises(
        UserError,
        match=r"pending\[1\]\['beta'\]: shape \[4, 1, 3, 4\] given, wanted \[4, 1, T, 4\]",
    ):
        kvq.commit(model, cache, wrong, jnp.asarray([4]))


# --- Rows that move ---


def test_rows_move_with_their_states():
    model = hybrid()
    cache = filled(model)
    wanted = following(model, cache)
    for moved, rows in (
        (kvq.gather(cache, jnp.asarray([1, 0])), [1, 0]),
        (kvq.repeat(cache, 2), [0, 0, 1, 1]),
        (kvq.fork(cache), [0, 1]),
        (kvq.insert(cache, 0, cache, 1), [1, 1]),
        (kvq.resize(cache, 256), [0, 1]),
    ):
        for number, row in enumerate(rows):
            equal(row_of(moved, number), row_of(cache, row))
        if (moved.batch, moved.layout.capacity) == (
            2,
            CAPACITY,
        ):  # these need no program of their own
            np.testing.assert_allclose(following(model, moved), wanted[rows], atol=BOUND)


def test_an_evicted_row_is_a_new_row():
    """Nothing of the old text remains, and the neighbour does not notice."""
    model = hybrid()
    cache = kvq.evict(filled(model), jnp.asarray([True, False]))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(row_of(cache, 0)))
    equal(row_of(cache, 1), row_of(filled(model), 1))
    # As wide as every prompt here, so that no other program is needed.
    text, counts = tokens(2, LENGTH, 3), jnp.asarray([40, 0])
    again = forward(model, text, counts, cache)
    alone = forward(model, text, counts, kvq.init_cache(model, "exact", 2, CAPACITY))
    np.testing.assert_allclose(again[0][0, :40], alone[0][0, :40], atol=BOUND)
    near(row_of(again[1], 0), row_of(alone[1], 0))


@pytest.mark.nightly
def test_a_row_joins_a_running_batch():
    model, text = hybrid(), tokens(2, LENGTH)
    running = filled(model, counts=(50, 0))
    single = forward(
        model, text[1:, :30], jnp.asarray([30]), kvq.init_cache(model, "exact", 1, 64)
    )[1]
    joined = kvq.insert(running, 1, single)
    both = jnp.stack([text[0, 50:51], text[1, 30:31]])
    logits = forward(model, both, jnp.ones(2, jnp.int32), joined)[0][:, 0]
    np.testing.assert_allclose(logits, plain()[[0, 1], [50, 30]], atol=BOUND)


@pytest.mark.nightly
def test_numbers_that_are_not_finite_stay_in_their_row():
    """In padding, in a neighbour, in a token that counts: its row's logits are NaN until it is
    evicted."""
    model = hybrid(UNEVEN)
    foul = model.replace(params=model.params | {"embed": model.params["embed"].at[49].set(jnp.nan)})
    text = jnp.where(tokens(2, 40) == 49, 48, tokens(2, 40))
    counts, empty = jnp.asarray([40, 30]), kvq.init_cache(foul, "exact", 2, CAPACITY)
    spoilt = text.at[0, 10].set(49).at[1, 30:].set(49)
    for fill in (forward, prefill):
        clean, cache = fill(foul, text, counts, empty)[1], fill(foul, spoilt, counts, empty)[1]
        near(row_of(cache, 1), row_of(clean, 1))
        assert cache.finite.tolist() == [10, 30]
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(cache.states))
        logits = following(foul, cache)
        assert np.isnan(logits[0]).all()
        np.testing.assert_allclose(logits[1], following(foul, clean)[1], atol=BOUND)
        again = kvq.evict(cache, jnp.asarray([True, False]))
        assert np.isfinite(following(foul, again)).all()
    pending = attend(foul, spoilt, counts, empty)[1]
    done = commit(foul, empty, pending, counts)
    assert done.finite.tolist() == [10, 30]
    near(done.states, cache.states)


def test_a_number_that_is_not_finite_behind_the_last_layer_of_attention_counts():
    """Only the recurrent layer at the end can see it."""
    model = hybrid(UNEVEN)
    rows = model.params["layers"]["delta_v"]
    stack = rows.stack.at[-1, 0, 0].set(jnp.inf)
    foul = model.replace(
        params=model.params
        | {"layers": model.params["layers"] | {"delta_v": rows.replace(stack=stack)}}
    )
    counts, empty = jnp.asarray([8, 8]), kvq.init_cache(foul, "exact", 2, CAPACITY)
    logits, cache = forward(foul, tokens(2, LENGTH), counts, empty)
    assert np.isnan(logits[:, :8]).all()
    assert cache.finite.tolist() == [0, 0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(cache.states))


def test_tokens_beyond_the_capacity_leave_the_states():
    model, text = hybrid(), tokens(1, 40)
    cache = forward(model, text[:, :30], jnp.asarray([30]), kvq.init_cache(model, "exact", 1, 32))[
        1
    ]
    full = forward(model, text[:, 30:], jnp.asarray([10]), cache)[1]
    assert full.lengths.tolist() == [32]
    assert full.overflow.tolist() == [True]
    near(full.states, forward(model, text[:, 30:], jnp.asarray([2]), cache)[1].states)


# --- Cutting back ---


def test_a_crop_goes_to_nothing_or_to_a_snapshot():
    model, text = hybrid(), tokens(2, LENGTH)
    cache = filled(model, counts=(36, 70))
    kept = kvq.snapshot(cache)
    longer = forward(
        model, jnp.stack([text[0, 36:40], text[1, 70:74]]), jnp.asarray([4, 4]), cache
    )[1]
    with pytest.raises(
        UserError,
        match=r"row 1: recurrent layers remember all of its 74 tokens and cannot go back to 7",
    ):
        kvq.crop(longer, jnp.asarray([40, 72]))
    with pytest.raises(UserError, match="cannot go back to 37"):
        kvq.crop(longer, jnp.asarray([37, 74]), snapshot=kept)
    equal(kvq.crop(longer, jnp.asarray([40, 90])).states, longer.states)
    back = kvq.crop(longer, kept.lengths, snapshot=kept)
    equal(back.states, cache.states)
    np.testing.assert_allclose(following(model, back), following(model, cache), atol=BOUND)
    mixed = kvq.crop(longer, jnp.asarray([0, 70]), snapshot=kept)
    assert mixed.lengths.tolist() == [0, 70]
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(row_of(mixed, 0)))
    equal(row_of(mixed, 1), row_of(cache, 1))
    hidden = jax.jit(kvq.crop)(longer, jnp.asarray([40, 72]))
    assert (hidden.lengths.tolist(), hidden.overflow.tolist()) == ([40, 0], [False, True])
    with pytest.raises(UserError, match="snapshot is of another cache"):
        kvq.crop(longer, kept.lengths, snapshot=kvq.snapshot(kvq.repeat(cache, 2)))


def test_what_would_part_tokens_from_states_is_refused():
    model = hybrid()
    cache = filled(model)
    with pytest.raises(UserError, match="cut: recurrent layers remember all tokens at once"):
        kvq.cut(cache, 64)
    with pytest.raises(UserError, match="append: this cache also holds the states"):
        kvq.append(cache, [{}, {}], jnp.asarray([1, 1]))
    with pytest.raises(UserError, match="layers: this cache also holds the states"):
        kvq.layers(cache, jnp.asarray([1, 1]))


# --- Files and meshes ---


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [{"data": 2, "model": 2}, {"seq": 4, "model": 2}], ids=str)
def test_a_mesh_computes_the_same_and_rows_are_saved_and_read_on_others(mesh, tmp_path):
    model, counts, method = hybrid(UNEVEN), jnp.asarray(COUNTS) - 1, "kivi:bits=4,window=32"
    split, text, wanted = kvq.shard(model, method, **mesh), tokens(2, LENGTH), plain(UNEVEN)
    last, cache = prefill(split, text, counts, kvq.init_cache(split, method, 2, CAPACITY))
    np.testing.assert_allclose(last, wanted[np.arange(2), counts - 1], atol=BOUND)
    single = prefill(model, text, counts, kvq.init_cache(model, method, 2, CAPACITY))[1]
    near(jax.device_get(cache.states), single.states)
    newest = jnp.take_along_axis(text, counts[:, None], 1)
    logits = forward(model, newest, jnp.ones(2, jnp.int32), single)[0]
    got, after = forward(split, newest, jnp.ones(2, jnp.int32), cache)
    np.testing.assert_allclose(got, logits, atol=BOUND)
    pending = kvq.attend(split, newest, jnp.ones(2, jnp.int32), cache)[1]
    near(
        jax.device_get(kvq.commit(split, cache, pending, jnp.ones(2, jnp.int32)).states),
        after.states,
    )
    kvq.save_cache(tmp_path / "split", cache, split)
    kvq.save_cache(tmp_path / "single", single, model)
    other = kvq.shard(model, method, data=2)
    for folder, reader in (("split", model), ("split", other), ("single", split)):
        read = kvq.load_cache(tmp_path / folder, reader)
        np.testing.assert_allclose(
            forward(reader, newest, jnp.ones(2, jnp.int32), read)[0], logits, atol=BOUND
        )


def test_a_mesh_must_divide_the_heads():
    with pytest.raises(UserError, match="2 key heads of recurrent layers"):
        kvq.shard(hybrid(), "exact", model=4)


def test_a_saved_cache_comes_back_in_either_form(tmp_path):
    stacks, apart = hybrid(), in_form(hybrid(), "unroll")
    cache = filled(stacks)
    assert len(cache.states) == 1
    kvq.save_cache(tmp_path / "stacks", cache, stacks)
    listed = kvq.load_cache(tmp_path / "stacks", apart)
    assert len(listed.states) == 4
    equal(jax.tree.map(lambda *x: jnp.concatenate(x), *listed.states), cache.states[0])
    equal(kvq.load_cache(tmp_path / "stacks", stacks).states, cache.states)
    kvq.save_cache(tmp_path / "list", listed, apart)
    equal(kvq.load_cache(tmp_path / "list", apart).states, listed.states)
    back = kvq.load_cache(tmp_path / "list", stacks)
    equal(back.states, cache.states)


# --- Text, and what it weighs ---


def test_an_engine_gives_what_generate_gives():
    model, prompts, options = (
        hybrid(),
        [[1, 2, 3], [4] * 40, [5, 6], [3, 1] * 16],
        {"eos_ids": (), "max_new_tokens": 12},
    )
    with kvq.Engine(model, "kivi:bits=4,window=32", rows=2, capacity=128, chunk=32) as engine:
        answers = [
            handle.result().tokens
            for handle in [engine.submit(prompt, **options) for prompt in prompts]
        ]
        again = engine.submit(prompts[3], **options).result().tokens
    for answer, prompt in zip(answers, prompts, strict=True):
        alone = kvq.generate(
            model, [prompt], "kivi:bits=4,window=32", chunk=32, capacity=128, **options
        )
        assert answer == alone.tokens[0]
    assert again == answers[3]


@pytest.mark.nightly
def test_greedy_text_goes_on_from_a_cache():
    model, prompts = hybrid(), [[1, 2, 3] * 9, [4, 5]]
    whole = kvq.generate(model, prompts, "exact", max_new_tokens=24, eos_ids=())
    first = kvq.generate(model, prompts, "exact", max_new_tokens=11, eos_ids=(), capacity=128)
    more = kvq.generate(
        model,
        [[tokens[-1]] for tokens in whole.tokens],
        cache=first.cache,
        max_new_tokens=3,
        eos_ids=(),
    )
    assert first.tokens == [tokens[:11] for tokens in whole.tokens]
    assert all(len(tokens) == 3 for tokens in more.tokens)
    text = np.asarray([[*prompts[0], *whole.tokens[0]]])
    logits = plain_logits(model.params, jnp.asarray(text), model.config)[
        0, len(prompts[0]) - 1 : -1
    ]
    assert logits.argmax(-1).tolist() == whole.tokens[0]


def test_the_ledger_counts_states_apart():
    model = hybrid()
    cache, other = (kvq.init_cache(model, "exact", 3, capacity) for capacity in (64, 128))
    book, states = kvq.ledger(cache), sum(x.nbytes for x in jax.tree.leaves(cache.states))
    assert book.bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert book.by_role()["states"] == book.state_bytes == states == kvq.ledger(other).state_bytes
    # Rows, layers, bytes, convolution, matrices.
    assert states == 3 * 4 * 4 * (3 * (16 + 16 + 48) + 4 * 8 * 12)
    assert book.bits_stored == 8 * (book.bytes - states) / book.values / 3 / 64
    assert "recurrent states" in str(book)
    assert "4 recurrent layers: delta float32[4,3,4,8,12]" in repr(cache)
