"""The decoder through a cache: chunks, ragged rows and exact prefill against the plain decoder;
drafts against single steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GENERAL, model_and_method, thinned, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.model import decoder

attend = jax.jit(kvq.attend, static_argnames=("within", "last"))
commit, forward, prefill = (
    jax.jit(kvq.commit),
    jax.jit(kvq.forward, static_argnames="last"),
    jax.jit(kvq.prefill),
)

plain_logits = jax.jit(decoder.logits, static_argnums=2)

# Float32 throughout: sums of at most 160 terms of size about 1 in another order, through 2 layers
# and the head. 160 eps = 2e-5 for one sum; the factor 10 is for what follows it.
BOUND = 2e-4
LENGTH = 160
COUNTS = (160, 77)


@functools.cache
def plain(**changes):
    model = tiny(**changes)
    return np.asarray(plain_logits(model.params, tokens(2, LENGTH), model.config))


def through(model, method, size: int, within: str):
    """Logits of two rows of COUNTS tokens, `size` at a time: [2, LENGTH, V]; entries past a row's
    count mean nothing."""
    cache, out, text = kvq.init_cache(model, method, 2, 256), [], tokens(2, LENGTH)
    text = jnp.pad(text, ((0, 0), (0, -LENGTH % size)))
    for start in range(0, LENGTH, size):
        counts = jnp.clip(jnp.asarray(COUNTS) - start, 0, size)
        logits, pending = attend(model, text[:, start : start + size], counts, cache, within=within)
        cache = commit(model, cache, pending, counts)
        out.append(np.asarray(logits))
    return np.concatenate(out, 1)[:, :LENGTH], cache


@pytest.mark.parametrize("windows", [pytest.param(None, marks=pytest.mark.nightly), (40, None)])
@pytest.mark.parametrize("size", thinned([7, 64], 2))
def test_exact_cache_in_chunks_is_the_plain_decoder(size, windows):
    got, _ = through(tiny(sliding_window=windows), kvq.exact(sinks=3), size, "chunk")
    for row, count in enumerate(COUNTS):
        np.testing.assert_allclose(
            got[row, :count], plain(sliding_window=windows)[row, :count], atol=BOUND
        )


@pytest.mark.parametrize("windows", [pytest.param(None, marks=pytest.mark.nightly), (40, None)])
def test_exact_prefill_is_the_plain_decoder(windows):
    """And generation goes on from it as from the chunks."""
    model, counts = tiny(sliding_window=windows), jnp.asarray(COUNTS)
    last, cache = prefill(
        model, tokens(2, LENGTH), counts, kvq.init_cache(model, kvq.exact(), 2, 256)
    )
    for row, count in enumerate(COUNTS):
        np.testing.assert_allclose(
            last[row], plain(sliding_window=windows)[row, count - 1], atol=BOUND
        )
    assert cache.lengths.tolist() == list(COUNTS)


@pytest.mark.parametrize(
    "name",
    [
        "kivi2",
        pytest.param("kivi-pre", marks=pytest.mark.nightly),
        pytest.param("kivi-published", marks=pytest.mark.nightly),
        pytest.param("mixed", marks=pytest.mark.nightly),
        pytest.param("sliding-mixed", marks=pytest.mark.nightly),
        pytest.param("kvquant", marks=pytest.mark.nightly),
    ],
)
def test_drafts_see_what_single_steps_see(name):
    """`within="step"` in pieces of 9 equals one token at a time, through several flushes inside a
    piece."""
    model, method = model_and_method(name)
    single, one = through(model, method, 1, "chunk")
    drafted, other = through(model, method, 9, "step")
    assert min(int(f.max()) for run in one.runs for f in run.flushed) > 1
    jax.tree.map(
        np.testing.assert_array_equal,
        [r.flushed for r in one.runs],
        [r.flushed for r in other.runs],
    )
    for row, count in enumerate(COUNTS):
        np.testing.assert_allclose(drafted[row, :count], single[row, :count], atol=BOUND)
    rough, _ = through(model, method, 9, "chunk")
    assert np.abs(rough[0] - single[0]).max() > 10 * BOUND, (
        "the test cannot tell the two modes apart"
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    with_nightly((name for name in GENERAL if name.startswith("kivi")), ["kivi-pre"]),
)
def test_a_row_in_a_batch_is_the_row_alone(name):
    model, method = model_and_method(name)
    text, counts = tokens(2, LENGTH), jnp.asarray(COUNTS)
    both, _ = forward(model, text, counts, kvq.init_cache(model, method, 2, 256), last=True)
    for row in range(2):
        alone = kvq.init_cache(model, method, 1, 256)
        single, _ = forward(model, text[row : row + 1], counts[row : row + 1], alone, last=True)
        np.testing.assert_allclose(both[row], single[0], atol=BOUND)
