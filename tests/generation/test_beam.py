"""Beam search against an exhaustive search written with the plain decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.model import decoder

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def searched(model, prompt, beams, new, penalty, eos):
    """The same search over lists, every hypothesis read from its start by the plain decoder."""
    growing, ended = [(0.0, [])], []
    read = jax.jit(
        lambda text: jax.nn.log_softmax(decoder.logits(model.params, text, model.config), -1)
    )
    for made in range(1, new + 1):
        options = []
        for total, tail in growing:
            text = prompt + tail
            padded = jnp.asarray([text + [0] * (32 - len(text))])
            log_probs = np.asarray(read(padded)[0, len(text) - 1])
            options += [(total + float(p), [*tail, t]) for t, p in enumerate(log_probs)]
        options.sort(key=lambda o: -o[0])
        best = options[: beams * (1 + len(eos))]
        ended += [(total / made**penalty, tail[:-1]) for total, tail in best if tail[-1] in eos]
        ended = sorted(ended, key=lambda o: -o[0])[:beams]
        growing = [o for o in best if o[1][-1] not in eos][:beams]
    final = ended + [(total / new**penalty, tail) for total, tail in growing]
    return sorted(final, key=lambda o: -o[0])[:beams]


@pytest.mark.parametrize(
    ("penalty", "eos"),
    [
        pytest.param(0.0, (), marks=pytest.mark.nightly),
        pytest.param(1.0, (7, 11), marks=pytest.mark.nightly),
        (0.5, (20,)),
    ],
)
def test_equals_a_search_over_lists(penalty, eos):
    model = tiny()
    out = kvq.beam_search(
        model, PROMPTS, beams=3, max_new_tokens=8, length_penalty=penalty, eos_ids=eos
    )
    for prompt, tokens, scores in zip(PROMPTS, out.tokens, out.scores, strict=True):
        wanted = searched(model, prompt, 3, 8, penalty, eos)
        np.testing.assert_allclose(scores, [s for s, _ in wanted], atol=1e-4)
        assert tokens == [t for _, t in wanted]


@pytest.mark.nightly
def test_one_beam_is_greedy_through_a_compressed_cache():
    model, method = tiny(), kvq.parse("kivi:bits=2,window=32")
    wanted = kvq.generate(model, PROMPTS, method, max_new_tokens=80).tokens
    out = kvq.beam_search(model, PROMPTS, method, beams=1, max_new_tokens=80)
    assert [tokens[0] for tokens in out.tokens] == wanted


def test_bad_input():
    with pytest.raises(kvq.UserError, match="beams=0"):
        kvq.beam_search(tiny(), PROMPTS, beams=0)
