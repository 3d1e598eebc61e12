"""The bundled models do what their cards say, and the trainer's forward is the library's."""

import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, with_nightly

import kvqjax as kvq
from kvqjax import UserError
from kvqjax.eval.synthetic import key_value_recall, passkey_prompt, repeated_spans
from kvqjax.model import locate
from kvqjax.model.config import ModelConfig, RopeConfig
from kvqjax.model.decoder import embed, finish, layer, logits, project
from kvqjax.model.rope import rotate
from kvqjax.model.weight_trees import init_params
from kvqjax.ops.attention import segment_attention

ROOT = Path(__file__).parents[2]
SMALL = ("mha", "mistral", "qwen2", "qwen3")
SIZES = {"demo": 12e6, "recall": 2e6} | dict.fromkeys(SMALL, 1e6)

# Our own prose, so that no third party's sentences are needed to see that a model knows English.
PROSE = """
It was late in the evening when the old man came back to the house. He had walked all the way from the town, and his
coat was wet with rain. His wife sat by the fire and waited for him. She did not speak at first, but when he had taken
off his shoes she asked him what he had seen. There was nothing to see, he said, but the road and the river, and a few
people who wanted to go home as much as he did. She smiled at that, for she had known him for many years, and she knew
that he would tell her the rest before the night was over. In the morning the sky was clear again. The children went
down to the water with their father, and he showed them how to make a small boat out of wood. They were so happy that
they forgot the time, and when they came home their mother had been looking for them for an hour. She was not angry.
She only said that the soup was cold, and that the dog had eaten the bread. Then all of them laughed, and the father
went out to the village to find some more. On his way he met the young doctor, who had just come from the city and did
not know anybody in that part of the country. They talked about the war, and about the price of the land, and the
doctor said that he had never been in a place where the people were so kind to a man whom they had not seen before.
"""


def _folder(name: str) -> Path:
    return ROOT / "tests" / "assets_models" / name if name in SMALL else locate(name)


def _ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


plain_logits = jax.jit(logits, static_argnums=2)


def _exact_answers(model, problems) -> float:
    """Share of problems whose whole answer is the greedy continuation (all prompts have one
    length)."""
    tokenizer, bos = model.tokenizer, model.config.bos_id
    rows = np.asarray(
        [[bos, *_ids(tokenizer, problem.prompt + problem.answer)] for problem in problems]
    )
    size = len(_ids(tokenizer, problems[0].answer))
    greedy = np.asarray(plain_logits(model.params, jnp.asarray(rows[:, :-1]), model.config)).argmax(
        -1
    )
    return float((greedy[:, -size:] == rows[:, -size:]).all(-1).mean())


@pytest.mark.parametrize("name", SIZES)
def test_folder_is_small_and_complete(name):
    files = {path.name: path.stat().st_size for path in _folder(name).iterdir()}
    wanted = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "MODEL_CARD.md",
    }
    assert wanted <= set(files)
    assert sum(files.values()) <= SIZES[name]


@pytest.mark.parametrize("name", SIZES)
def test_shape_serves_every_method(name):
    config = kvq.load(_folder(name)).config
    assert config.head_dim == 64
    assert config.max_position >= 1024
    assert (config.num_kv_heads < config.num_heads) == (name != "mha")
    # No token that the model lacks.
    assert len(kvq.load(_folder(name)).tokenizer) == config.vocab_size


@pytest.mark.nightly
def test_recall_answers_at_512_tokens():
    model = kvq.load("recall")
    problems = [key_value_recall(np.random.default_rng((5, seed)), 511, len) for seed in range(32)]
    assert len(problems[0].prompt) > 500
    assert _exact_answers(model, problems) >= 0.95
    # The answer is read from the stored pair and from nowhere else: without it, chance is one in a
    # hundred.
    blank = [
        p._replace(prompt=p.prompt.replace(p.prompt[-2:] + p.answer, "kk00", 1)) for p in problems
    ]
    assert _exact_answers(model, blank) <= 0.2


@pytest.mark.parametrize("name", with_nightly(SMALL, ["qwen2"]))
def test_small_models_answer_within_256_tokens(name):
    model = kvq.load(_folder(name))
    problems = [key_value_recall(np.random.default_rng((6, seed)), 249, len) for seed in range(32)]
    assert _exact_answers(model, problems) >= 0.9


def test_mistral_forgets_what_left_its_window():
    model = kvq.load(_folder("mistral"))
    problems = [
        key_value_recall(np.random.default_rng((7, seed)), 511, len, depth=0.0)
        for seed in range(16)
    ]
    assert _exact_answers(model, problems) <= 0.2


@pytest.mark.nightly
def test_qwen2_has_the_key_bias_of_qwen25():
    """|bias| at least 25 x the median distance of a key from the mean key, in every layer."""
    model = kvq.load(_folder("qwen2"))
    config, text = model.config, key_value_recall(np.random.default_rng(8), 255, len).prompt
    tokens = jnp.asarray([_ids(model.tokenizer, text)])
    positions = jnp.arange(tokens.shape[1])[None]
    mask = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    h = embed(model.params, tokens)
    for index in range(config.num_layers):
        weights = layer(model.params, index)
        projected = project(weights, h, positions, config)
        keys = np.asarray(projected.k[0])
        spread = np.median(np.linalg.norm(keys - keys.mean(0), axis=-1), axis=0)
        bias = np.linalg.norm(
            np.asarray(weights["k_bias"]).reshape(config.num_kv_heads, -1), axis=-1
        )
        assert (bias >= 25 * spread).all(), (bias, spread)
        attended = segment_attention(
            projected.q, rotate(projected.k, positions, config), projected.v, mask
        ).out
        h = finish(weights, h, attended, config)


def test_demo_beats_a_unigram_model_by_far():
    """Nats per piece on prose of ours, against add-one piece frequencies fitted on the very same
    text."""
    model = kvq.load("demo")
    tokens = np.asarray([model.config.bos_id, *_ids(model.tokenizer, " ".join(PROSE.split()))])
    table = jax.nn.log_softmax(logits(model.params, jnp.asarray(tokens[None, :-1]), model.config))[
        0
    ]
    loss = -float(np.asarray(table)[np.arange(len(tokens) - 1), tokens[1:]].mean())
    counts = np.bincount(tokens[1:], minlength=model.config.vocab_size) + 1.0
    unigram = -float(np.log(counts / counts.sum())[tokens[1:]].mean())
    assert loss < unigram - 0.5, (loss, unigram)


def test_cards_state_what_was_measured():
    for name in ("demo", "recall"):
        card = (_folder(name) / "MODEL_CARD.md").read_text()
        for needed in ("million tokens", "Apache-2.0", "256 tokens", "512 tokens", "1024 tokens"):
            assert needed in card, (name, needed)
        config = json.loads((_folder(name) / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("length", [100, 257, 512])
@pytest.mark.parametrize("make", [key_value_recall, passkey_prompt, repeated_spans])
def test_problems_fit_their_length_and_hold_their_answer(make, length):
    rng = np.random.default_rng(length)
    problem = make(rng, length, len)
    assert length - 80 < len(problem.prompt + problem.answer) <= length
    assert problem.answer in problem.prompt
    again = make(np.random.default_rng(length), length, len)
    assert again == problem


def test_too_short_a_pass_key_problem_is_refused():
    with pytest.raises(UserError, match="length=40; this problem needs at least 66 tokens"):
        passkey_prompt(np.random.default_rng(0), 40, len)


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (1.0, -1)])
def test_depth_places_the_needle(depth, place):
    problem = passkey_prompt(np.random.default_rng(0), 400, len, depth=depth)
    sentences = problem.prompt.split(". ")[:-1]
    assert problem.answer in sentences[place]
    pairs = key_value_recall(np.random.default_rng(0), 400, len, depth=depth)
    assert pairs.prompt.split(",")[:-1][place] == pairs.prompt[-2:] + pairs.answer


@pytest.fixture
def trainer(monkeypatch):
    """Import a module of benchmarks/train, found after everything installed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return lambda name: importlib.import_module(f"benchmarks.train.{name}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fields",
    thinned(
        [
            {},
            {"qkv_bias": True},
            {"qk_norm": True, "tied_embeddings": True},
            {"sliding_window": (5, None), "num_kv_heads": 4},
        ],
        4,
    ),
    ids=["llama", "qwen2", "qwen3", "mistral"],
)
def test_training_forward_is_the_librarys(fields, trainer):
    training = trainer("model")
    shape = {
        "vocab_size": 32,
        "width": 24,
        "mlp_width": 40,
        "num_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
    }
    config = ModelConfig(**shape | {"num_kv_heads": 2, "rope": RopeConfig(theta=100.0)} | fields)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + rng.normal(0, 0.1, leaf.shape), init_params(jax.random.key(0), config)
    )
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    tokens = jnp.asarray(rng.integers(0, 32, (2, 19)))
    wanted = np.asarray(logits(params, tokens, config))
    got = np.asarray(training.training_logits(params, tokens, config)).reshape(wanted.shape)
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())
    weights = jnp.asarray(rng.random((2, 18)))
    table = np.asarray(jax.nn.log_softmax(logits(params, tokens[:, :-1], config)))
    by_hand = -(
        np.take_along_axis(table, np.asarray(tokens)[:, 1:, None], 2)[..., 0] * np.asarray(weights)
    ).sum()
    assert float(training.loss(params, tokens, weights, config)) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.nightly
def test_stopped_training_goes_on_to_the_same_weights(trainer, tmp_path):
    loop, recipes, corpora = trainer("loop"), trainer("recipes"), trainer("corpus")
    config = ModelConfig(
        vocab_size=64,
        width=16,
        mlp_width=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        tied_embeddings=True,
    )
    phases = (
        recipes.Phase(2, 8, 40, {"spans": 1.0}),
        recipes.Phase(2, 8, 48, {"spans": 0.5, "pairs": 0.5}, piece=24),
    )
    recipe = recipes.Recipe(about="", config=config, phases=phases, warmup=1)
    corpus, _ = corpora.symbols()
    whole = loop.train(recipe, corpus, tmp_path / "whole", lambda params, step: "", save_seconds=0)

    def stop(params, step):
        if step == 3:
            raise KeyboardInterrupt
        return ""

    with pytest.raises(KeyboardInterrupt):
        loop.train(recipe, corpus, tmp_path / "parts", stop, save_seconds=0)
    resumed = loop.train(
        recipe, corpus, tmp_path / "parts", lambda params, step: "", save_seconds=0
    )
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    begun = trainer("start").starting_params(recipe.seed, config, recipe.offsets)
    assert not np.array_equal(begun["embed"], whole["embed"])


def test_every_source_fills_its_sequence(trainer):
    data, recipes, corpora = trainer("data"), trainer("recipes"), trainer("corpus")
    corpus, _ = corpora.symbols()
    corpus = corpus._replace(
        text=np.arange(1000) % 64, encode=lambda text: [0 if c in " .T" else 5 for c in text]
    )
    for source in data.SOURCES:
        for length, piece in ((200, 0), (200, 150)):
            tokens, weights = data.batch(
                0, 0, recipes.Phase(1, 2, length, {source: 1.0}, piece), corpus
            )
            assert tokens.shape == (2, length + 1)
            assert weights.shape == (2, length)
            assert (tokens[:, 0] == corpus.bos).all()


def test_pairs_weigh_only_the_answers_in_full(trainer):
    data, recipes, corpora = trainer("data"), trainer("recipes"), trainer("corpus")
    corpus, tokenizer = corpora.symbols()
    (tokens,), (weights,) = data.batch(0, 0, recipes.Phase(1, 1, 120, {"pairs": 1.0}), corpus)
    text = [tokenizer.id_to_token(int(i)) for i in tokens]
    store, asked = "".join(text[1:]).split("?")
    scored = "".join(
        symbol for symbol, weight in zip(text[1:], weights, strict=True) if weight == 1
    )
    answers = "".join(item[2:] for item in asked.split(","))
    assert scored == answers
    assert all(item in store for item in asked.split(",")[:-1])
