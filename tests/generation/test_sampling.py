"""Which tokens may come next: the sets that transformers' processors leave, over a grid of all
options."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.generation.options import GenerateOptions
from kvqjax.generation.sampling import History, drawn_from, make_sampling, sample

VOCAB = 37
RNG = np.random.default_rng(0)
LOGITS = np.stack(
    [
        RNG.normal(size=VOCAB) * 3,
        np.where(RNG.random(VOCAB) < 0.5, -np.inf, RNG.normal(size=VOCAB)),
        np.round(RNG.normal(size=VOCAB)),  # ties, at the top too
        np.zeros(VOCAB),
        np.where(np.arange(VOCAB) == 5, 0.0, -np.inf),
        RNG.normal(size=VOCAB) * 60,
    ]
).astype(np.float32)
DISTINCT = [0, 1, 4, 5]  # the rows without ties
SEEN = np.asarray([[1, 5, 7, 7]] * len(LOGITS))
GRID = {
    "temperature": (1e-6, 0.3, 1.7, 1e4),
    "top_k": (0, 1, 2, 9, 1000),
    "top_p": (1.0, 0.93, 0.52, 1e-9),
    "min_p": (0.0, 0.07, 0.6, 1.0),
    "repetition_penalty": (1.0, 1.3),
}
survivors = jax.jit(
    lambda logits, history, sampling: jnp.isfinite(drawn_from(logits, history, sampling))
)


def theirs(torch, processors, *, temperature, top_k, top_p, min_p, repetition_penalty):
    """What transformers leaves, in its order; an option that is switched off has no processor."""
    steps = [
        repetition_penalty != 1 and processors.RepetitionPenaltyLogitsProcessor(repetition_penalty),
        processors.TemperatureLogitsWarper(temperature),
        top_k and processors.TopKLogitsWarper(top_k),
        top_p < 1 and processors.TopPLogitsWarper(top_p),
        min_p and processors.MinPLogitsWarper(min_p),
    ]
    scores = torch.from_numpy(LOGITS.copy())
    for step in filter(None, steps):
        scores = step(torch.from_numpy(SEEN), scores)
    return torch.isfinite(scores).numpy()


def ordered(left):
    """The logits left in every row, in order."""
    return np.sort(np.where(left, LOGITS, -np.inf), axis=1)


def test_the_tokens_left_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    seen = np.zeros(LOGITS.shape, bool)
    np.put_along_axis(seen, SEEN, True, axis=1)
    history = History(seen, np.zeros(seen.shape, np.int32))
    sizes = set()
    for values in itertools.product(*GRID.values()):
        options = dict(zip(GRID, values, strict=True))
        left = np.asarray(survivors(LOGITS, history, make_sampling(GenerateOptions(**options))))
        wanted = theirs(torch, processors, **options)
        np.testing.assert_array_equal(left[DISTINCT], wanted[DISTINCT], err_msg=str(options))
        # Which of equal tokens top-p leaves is chance in transformers, for its sort is not stable.
        np.testing.assert_array_equal(left.sum(1), wanted.sum(1), err_msg=str(options))
        if options["repetition_penalty"] == 1:
            np.testing.assert_array_equal(ordered(left), ordered(wanted), err_msg=str(options))
        sizes |= set(left.sum(1).tolist())
    assert len(sizes) > 20


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"top_k": 2, "top_p": 0.6}, {0, 1}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 0.8, "min_p": 0.4}, {0, 1}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"temperature": 0.25, "top_p": 0.6}, {0}),
        ({"temperature": 1e-300}, {0}),
        ({"top_k": 2**31 - 1}, {0, 1, 2, 3}),
    ],
)
def test_each_option_is_of_what_the_ones_before_it_left(options, left):
    logits = jnp.log(jnp.asarray([[0.4, 0.35, 0.15, 0.1]]))
    sampling = make_sampling(GenerateOptions(**({"temperature": 1.0} | options)))
    scores = drawn_from(logits, None, sampling)
    assert not np.isnan(scores).any()
    assert set(np.flatnonzero(scores[0] > -1e6).tolist()) == left
    draw = jax.jit(jax.vmap(lambda key: sample(key, logits, None, sampling)[0]))
    assert set(np.asarray(draw(jax.random.split(jax.random.key(0), 400))).tolist()) == left
