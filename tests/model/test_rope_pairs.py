"""Models that pair channels of a head in another way than caches do give them as they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly

import kvqjax as kvq
from kvqjax.calibrate import from_tensors
from kvqjax.calibrate.aqua import Recipe
from kvqjax.model.config import PAIRS
from kvqjax.testing import check_rope

D, TOKENS, THETA = 16, 96, 1e4
OTHERS = [(pairs, fraction) for pairs in ("front", "neighbours") for fraction in (1.0, 0.5)]


def order(pairs, fraction):
    """The channels of another model's head in the order in which caches hold them, from the
    textbook."""
    turned = round(D * fraction)
    first, second = {
        "front": (range(turned // 2), range(turned // 2, turned)),
        "neighbours": (range(0, turned, 2), range(1, turned, 2)),
    }[pairs]
    rest = np.arange(turned, D)
    return np.concatenate([first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]]).astype(
        int
    )


def shape_of(pairs, fraction, **more):
    rope = kvq.Rope(theta=THETA, pairs=pairs, fraction=fraction)
    return kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=D, rope=rope, **more)


def new_tokens(seed=0, layers=2, count=TOKENS):
    keys = jax.random.split(jax.random.key(seed), 3 * layers)
    return [
        tuple(
            jax.random.normal(keys[3 * layer + i], (2, count, heads, D))
            for i, heads in enumerate((4, 2, 2))
        )
        for layer in range(layers)
    ]


def run(shape, method, tokens, constants=None):
    """Outputs of two calls through every layer, and the cache after them."""
    cache = kvq.init_cache(shape, method, 2, 256, dtype="float32")
    outs = []
    for part in (slice(0, 64), slice(64, TOKENS)):
        news, below = [], None
        counts = jnp.full((2,), part.stop - part.start)
        for layer, (q, k, v) in enumerate(tokens):
            cut = (x[:, part] for x in (q, k, v))
            out, below = kvq.attend_layer(
                cache, layer, *cut, counts, below=below, constants=constants
            )
            news.append(below)
            outs.append(out)
        cache = kvq.append(cache, news, counts, constants=constants)
    return outs, cache


METHODS = ("kivi:bits=2,window=32", "higgs:bits=2,window=16")
BY_DAY = {("front", 0.5, 0)}
CASES = [
    pytest.param(*other, method, marks=() if (*other, number) in BY_DAY else pytest.mark.nightly)
    for other in OTHERS
    for number, method in enumerate(METHODS)
]


@pytest.mark.parametrize(("pairs", "fraction", "method"), CASES)
def test_outputs_and_words_are_those_of_channels_put_in_order_by_hand(pairs, fraction, method):
    tokens, channels = new_tokens(), order(pairs, fraction)
    by_hand = [(q[..., channels], k[..., channels], v) for q, k, v in tokens]
    outs, cache = run(shape_of(pairs, fraction), method, tokens)
    wanted, other = run(shape_of("halves", fraction), method, by_hand)
    for got, expected in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(got, expected)
    for got, expected in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(got, expected)
    (k, v, valid), (k_other, v_other, _) = (kvq.dense(made, 1) for made in (cache, other))
    np.testing.assert_array_equal(k[..., channels], k_other)  # as the other model has them
    np.testing.assert_array_equal(v, v_other)
    assert valid.sum() == 2 * TOKENS


def textbook(x, positions, pairs, fraction):
    """Another model's rotation."""
    channels, count = order(pairs, fraction), round(D * fraction)
    x, new = np.asarray(x)[..., channels], np.array(x)
    angles = np.asarray(positions)[..., None, None] * THETA ** (-np.arange(0, count, 2) / count)
    angles = np.concatenate([angles, np.zeros((*angles.shape[:-1], (D - count) // 2))], -1)
    a, b = np.split(x, 2, -1)
    turned = np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )
    new[..., channels] = turned
    return new


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("pairs", "fraction"), with_nightly(OTHERS, [("front", 0.5), ("neighbours", 1.0)])
)
def test_attention_is_that_of_the_textbook_s_rope(pairs, fraction):
    """Dense attention in float64 over keys that another model's function turned."""
    tokens, positions = new_tokens(), np.broadcast_to(np.arange(TOKENS), (2, TOKENS))
    outs, cache = run(shape_of(pairs, fraction), "exact", tokens)
    q, k, v = (np.asarray(x, np.float64) for x in tokens[1])
    q, k = (textbook(x, positions, pairs, fraction) for x in (q, k))
    k, v = (np.repeat(x, 2, 2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)
    scores = np.where(np.tril(np.ones((TOKENS, TOKENS), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    got = np.concatenate([outs[1], outs[3]], 1)
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    np.testing.assert_allclose(kvq.dense(cache, 1)[0][:, :TOKENS], k[:, :, ::2], atol=2e-5)


@pytest.mark.parametrize(("pairs", "fraction"), with_nightly(OTHERS, [("neighbours", 0.5)]))
def test_the_check_names_the_order(pairs, fraction):
    def theirs(x, positions):
        return textbook(x, positions, pairs, fraction).astype(np.float32)

    assert check_rope(shape_of(pairs, fraction), 0, theirs)
    if fraction < 1 or pairs == "neighbours":
        with pytest.raises(AssertionError, match=f"pairs='{pairs}' does, this one has 'halves'"):
            check_rope(shape_of("halves", fraction), 0, theirs)
    slower = dataclasses.replace(
        shape_of(pairs, fraction), rope=kvq.Rope(theta=5e3, pairs=pairs, fraction=fraction)
    )
    with pytest.raises(AssertionError, match=r"pair 1 turns by .* another theta"):
        check_rope(slower, 0, theirs)


@pytest.mark.nightly
def test_tensors_calibrate_in_the_order_in_which_they_come():
    pairs, fraction = "neighbours", 0.5
    channels, tokens = order(pairs, fraction), new_tokens(3, count=160)
    recipe = Recipe()
    keys, values = [k for _, k, _ in tokens], [v for _, _, v in tokens]
    given = from_tensors(
        "aqua:bits=2", shape_of(pairs, fraction), keys=keys, values=values, recipe=recipe
    )
    turned = [k[..., channels] for k in keys]
    by_hand = from_tensors(
        "aqua:bits=2", shape_of("halves", fraction), keys=turned, values=values, recipe=recipe
    )
    for got, wanted in zip(
        jax.tree.leaves(given.constants), jax.tree.leaves(by_hand.constants), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_what_cannot_be_is_one_line():
    with pytest.raises(kvq.UserError, match="pairs='odd'; known: halves, front, neighbours"):
        kvq.Rope(pairs="odd")
    ropes = tuple(kvq.Rope(pairs=pairs) for pairs in PAIRS[1:])
    with pytest.raises(kvq.UserError, match="pair channels differently"):
        kvq.KVShape(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=D, rope=ropes)
    with pytest.raises(kvq.UserError, match="weights are put in order when they load"):
        dataclasses.replace(kvq.load("demo").config, rope=kvq.Rope(pairs="neighbours"))


ROPES = {
    "kind='yarm'; known: none, default, linear": {"kind": "yarm"},
    "factor=0.0; wanted a number above 0": {"kind": "linear", "factor": 0.0},
    "attention_factor=-1.0; wanted a number above 0": {"attention_factor": -1.0},
    "factor=2.0 changes nothing in a rope of kind 'default'; name its kind": {"factor": 2.0},
    "low_freq_factor=0.0; wanted a number above 0": {
        "kind": "llama3",
        "factor": 8.0,
        "original_max_position": 64,
    },
    "original_max_position=0; it must be a whole number of at least 1": {
        "kind": "yarn",
        "factor": 4.0,
    },
    "short_factor has 0 numbers; wanted 8, one for each pair": {
        "kind": "longrope",
        "original_max_position": 64,
    },
}


@pytest.mark.parametrize("words", ROPES)
def test_a_rope_that_cannot_be_is_one_line(words):
    with pytest.raises(kvq.UserError, match=words):
        kvq.KVShape(
            num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, rope=kvq.Rope(**ROPES[words])
        )


@pytest.mark.parametrize("window", [0, -4, (8, 0)])
def test_a_sliding_window_that_shows_nothing_is_one_line(window):
    with pytest.raises(
        kvq.UserError, match=r"sliding_window=.*; it must be a whole number of at least 1"
    ):
        kvq.KVShape(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, sliding_window=window)


@pytest.mark.parametrize(
    ("window", "chunked"), [(None, True), ((16, None), True), ((16, None), (False, True))]
)
def test_a_chunk_without_a_length_is_refused(window, chunked):
    with pytest.raises(kvq.UserError, match="a chunked layer has no sliding_window, which says"):
        kvq.KVShape(
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            head_dim=16,
            sliding_window=window,
            chunked=chunked,
        )
