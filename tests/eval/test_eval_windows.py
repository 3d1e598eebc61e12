"""Windows as GPTQ's, AQUA-KV's and llama.cpp's perplexities cut them, and problems of our own
text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.eval import perplexity
from kvqjax.eval.measure_retrieval import TASKS, problems
from kvqjax.eval.synthetic import sentences_of
from kvqjax.eval.windows import STYLES, windows
from kvqjax.model import decoder

IDS = np.random.default_rng(0).integers(1, 50, 300)


def test_windows_are_disjoint_and_whole():
    np.testing.assert_array_equal(windows(IDS, 64, 0), IDS[:256].reshape(4, 64))
    assert windows(IDS, 64, 130).shape == (2, 64)
    assert windows(IDS, 64, 1).shape == (1, 64)
    with_bos = np.concatenate([[0], IDS])
    assert windows(with_bos, 64, 0, bos=0)[:, 0].tolist() == [0] * 4
    np.testing.assert_array_equal(
        windows(with_bos, 64, 0, bos=0)[:, 1:], with_bos[:256].reshape(4, 64)[:, 1:]
    )
    # Encoded without one.
    np.testing.assert_array_equal(windows(IDS, 64, 0, bos=0), windows(IDS, 64, 0))
    with pytest.raises(kvq.UserError, match="300 tokens, fewer than one window of 400"):
        windows(IDS, 400, 0)


def test_llama_perplexity_scores_the_second_half_after_a_begin_token():
    model = tiny(bos_id=0)
    ids = np.concatenate([[0], IDS])
    row = perplexity(model, ids, kvq.exact(), cut="llama-perplexity", window=64, chunk=64, tokens=0)
    cut = jnp.asarray(windows(ids, 64, 0, bos=0))
    log_p = jax.nn.log_softmax(decoder.logits(model.params, cut, model.config))
    nll = -np.take_along_axis(np.asarray(log_p)[:, :-1], np.asarray(cut)[:, 1:, None], -1)[:, 32:]
    assert row["tokens"] == nll.size == 4 * 31
    np.testing.assert_allclose(row["ppl"], np.exp(nll.mean()), rtol=1e-5)
    assert row["windows"] == "llama-perplexity 64"


def test_styles_are_the_published_ones():
    assert STYLES["aqua"][:2] == (8192, 32)
    assert STYLES["llama-perplexity"].length == 512
    with pytest.raises(kvq.UserError, match="known: gptq, aqua, llama-perplexity"):
        perplexity(tiny(), IDS, kvq.exact(), cut="other")


@pytest.mark.parametrize("task", [name for name in TASKS if name != "kv"])
def test_answers_stand_in_their_prompts(task):
    model = kvq.load("demo")
    prompts, answers = problems(model, task, 256, 3, seed=1)
    texts = [model.tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
    places = []
    for text, prompt, answer in zip(texts, prompts, answers, strict=True):
        wanted = model.tokenizer.decode(answer).strip()
        assert 200 < len(prompt) + len(answer) <= 256
        assert wanted in text
        places.append(text.index(wanted) / len(text))
    if (
        task != "variables"
    ):  # each has its own value's place; all are asked from the first to the last depth
        assert places[0] < 0.3 < places[1] < 0.7 < places[2]


def test_variables_are_handed_on_to_the_one_that_is_asked():
    model = kvq.load("demo")
    (prompt,), (answer,) = problems(model, "variables", 256, 1, seed=1)
    text = model.tokenizer.decode(prompt, skip_special_tokens=True)
    held = {}
    for part in text.split("Let ")[1:]:
        name, value = part.split(".")[0].split(" be ")
        held[name.strip()] = held.get(value.strip(), value.strip())
    asked = text.split("What is ")[1].split("?")[0].strip()
    assert held[asked] == model.tokenizer.decode(answer).strip()
    assert len(held) == 4


def test_hay_may_be_the_users_own():
    model = kvq.load("demo")
    hay = sentences_of("Owls sing at night. Owls sleep by day.")
    text = model.tokenizer.decode(problems(model, "passkey", 128, 1, seed=0, hay=hay)[0][0])
    assert text.count("Owls") > 5
    with pytest.raises(kvq.UserError, match="no sentences"):
        problems(model, "kv", 128, 1, seed=0, hay=hay)
