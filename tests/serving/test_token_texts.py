"""What answers say of single tokens, through a tokenizer of the SentencePiece kind and one over
bytes."""

import threading

import openai
import pytest
from cases import thinned, with_nightly
from served import KEY, NAME, Running, answer
from spelled import byte_level, sentencepiece, write_model

import kvqjax as kvq
from kvqjax.serving.request import TokenScore
from kvqjax.serving.token_texts import AnswerScores, Echoed, text_places

TEXT = "the old 北 house"
TEMPLATE = "{% for m in messages %}{{ m.content + '' }}\n{% endfor %}{% if add_generation_prompt %}the{% endif %}"
GREEDY = {"model": NAME, "temperature": 0}
KINDS = {"sentencepiece": sentencepiece, "byte level": byte_level}


@pytest.fixture(scope="module", params=KINDS)
def engine(request, tmp_path_factory):
    folder = write_model(
        tmp_path_factory.mktemp("model"), KINDS[request.param](), chat_template=TEMPLATE
    )
    with kvq.Engine(kvq.load(folder), "exact", rows=2, capacity=128, chunk=32, stride=4) as made:
        yield made


@pytest.fixture(scope="module")
def port(engine):
    with Running(engine, api_key=KEY) as number:
        yield number


@pytest.fixture(scope="module")
def client(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def joined(tokens):
    """The text of tokens, some of which are parts of characters."""
    parts = [
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
    ]
    return b"".join(parts)


def test_a_token_is_not_named_as_another(engine):
    """A drawn word and the same with a blank, a byte and its letter, and two parts of one
    character."""
    ids = engine.model.tokenizer.get_vocab()
    blank, word = ("▁the", "the") if "▁the" in ids else ("Ġthe", "the")
    texts = AnswerScores(engine.model, [ids["old"]])
    made = texts.completion([TokenScore(ids[blank], -0.1, {ids[blank]: -0.1, ids[word]: -3.0})])
    assert made["tokens"] == [" the"]
    assert made["top_logprobs"] == [{" the": -0.1, "the": -3.0}]
    first, second = (ids["<0xE5>"], ids["<0x8C>"]) if "<0xE5>" in ids else (ids["å"], ids["Į"])
    score = TokenScore(first, -0.2, {first: -0.2, second: -0.9})
    made = AnswerScores(engine.model, [ids["old"]]).completion([score])
    assert made["top_logprobs"] == [{"bytes:\\xe5": -0.2, "bytes:\\x8c": -0.9}]
    content = AnswerScores(engine.model, [ids["old"]]).chat([score])["content"][0]
    assert content["bytes"] == [0xE5]
    assert [entry["bytes"] for entry in content["top_logprobs"]] == [[0xE5], [0x8C]]
    if "<0x61>" in ids:  # one text, two tokens: the drawn one has it
        byte, letter = ids["<0x61>"], ids["a"]
        made = AnswerScores(engine.model, [letter]).completion(
            [TokenScore(byte, -1.0, {letter: -0.5, byte: -1.0})]
        )
        assert made["top_logprobs"] == [{f"token_id:{letter}": -0.5, "a": -1.0}]
        assert made["tokens"] == ["a"]


def test_places_are_those_of_the_text(engine):
    ids = engine.model.encode("the old 北 house")
    scores = [TokenScore(token, -1.0, {token: -1.0}) for token in ids[1:]]
    texts = AnswerScores(engine.model, ids)
    made = texts.completion(
        [TokenScore(engine.model.encode("a")[-1], -1.0, {})], Echoed(TEXT, ids, scores)
    )
    assert made["tokens"][0] == "<s>"
    assert made["text_offset"][:3] == [0, 0, 3]
    assert joined(made["tokens"][1:-1]) == TEXT.encode()
    assert made["text_offset"][-1] == len(TEXT)
    for token, place in zip(made["tokens"], made["text_offset"], strict=True):
        assert token.startswith(("<s>", "bytes:")) or (TEXT + made["tokens"][-1]).startswith(
            token, place
        )
    parts = [
        place
        for token, place in zip(made["tokens"], made["text_offset"], strict=True)
        if "bytes:" in token
    ]
    assert parts == [8, 8, 8]  # of one character


def test_bytes_of_a_chat_s_tokens_join_to_its_text(engine):
    for begin in ([], engine.model.encode("a")):
        ids = engine.model.encode(TEXT, add_special_tokens=False)
        scores = [
            TokenScore(token, -1.0, {}) for token in [*ids, engine.model.tokenizer.eos_token_id]
        ]
        content = AnswerScores(engine.model, begin).chat(scores)["content"]
        blank = " " if len(begin) > 0 and engine.model.tokenizer.get_vocab().get("▁the") else ""
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == blank + TEXT
        assert content[-1]["token"] == "</s>"


def test_places_in_a_text_that_was_changed():
    tokens = [(b"<s>", True), (b"the", False), (b" old", False), (b"<s>", True), (b" a", False)]
    assert text_places("the old a", tokens) == [0, 0, 3, 7, 7]
    assert text_places("the old<s> a", tokens) == [0, 0, 3, 7, 10]
    assert text_places(" THE the old", [(b"the", False), (b" old", False)]) == [5, 8]


# Programs of one of the two models are compiled by day.
BY_DAY = pytest.mark.parametrize("engine", with_nightly(KINDS, ["byte level"]), indirect=True)


@BY_DAY
def test_twenty_log_probabilities_are_twenty_entries(client):
    made = client.completions.create(prompt=TEXT, max_tokens=24, logprobs=20, **GREEDY).choices[0]
    scores = made.logprobs
    assert [len(top) for top in scores.top_logprobs] == [20] * len(scores.tokens)
    for token, value, top in zip(
        scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True
    ):
        assert top[token] == value
        assert max(top, key=top.get) == token  # lm-eval's rule for greedy tokens
    places = zip(scores.tokens, scores.text_offset, strict=True)
    # Single letters may be bytes of a run that is broken as a whole.
    whole = [(token, place) for token, place in places if len(token) > 1 and token.isalpha()]
    assert all(made.text.startswith(token, place) for token, place in whole)
    options = {"stream": True, "logprobs": 20, "max_tokens": 24}
    chunks = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(prompt=TEXT, **options, **GREEDY)
    ]
    assert sum((chunk.tokens for chunk in chunks if chunk), []) == scores.tokens  # noqa: RUF017
    assert sum((chunk.text_offset for chunk in chunks if chunk), []) == scores.text_offset  # noqa: RUF017


@BY_DAY
def test_an_echo_s_tokens_stand_where_they_say(client, engine):
    made = client.completions.create(
        prompt=TEXT, max_tokens=4, logprobs=3, echo=True, **GREEDY
    ).choices[0]
    scores = made.logprobs
    assert made.text.startswith(TEXT)
    assert len(scores.tokens) == len(engine.model.encode(TEXT)) + 4
    assert (scores.text_offset[0], scores.tokens[0], scores.token_logprobs[0]) == (0, "<s>", None)
    whole = [
        (token, place)
        for token, place in zip(scores.tokens[1:], scores.text_offset[1:], strict=True)
        if not token.startswith(("bytes:", "<"))
    ]
    assert all(made.text.startswith(token, place) for token, place in whole)
    assert len(whole) > 4


@BY_DAY
def test_a_chat_s_tokens_have_names_and_numbers(client):
    messages = [{"role": "user", "content": TEXT}]
    options = {"logprobs": True, "top_logprobs": 5, "max_tokens": 24}
    made = client.chat.completions.create(messages=messages, **options, **GREEDY).choices[0]
    content = made.logprobs.content
    assert all(len({entry.token for entry in token.top_logprobs}) == 5 for token in content)
    named = client.chat.completions.create(
        messages=messages, **options, **GREEDY, extra_body={"return_tokens_as_token_ids": True}
    )
    numbers = [token.token for token in named.choices[0].logprobs.content]
    assert all(number.startswith("token_id:") for number in numbers)
    assert [token.bytes for token in named.choices[0].logprobs.content] == [
        token.bytes for token in content
    ]


@BY_DAY
def test_tokens_by_their_numbers(client, engine):
    wanted = engine.submit(TEXT, max_new_tokens=6, scores=2).result()
    body = {"return_tokens_as_token_ids": True}
    made = client.completions.create(
        prompt=TEXT, max_tokens=6, logprobs=2, extra_body=body, **GREEDY
    )
    assert made.choices[0].logprobs.tokens == [f"token_id:{token}" for token in wanted.tokens]
    assert [set(top) for top in made.choices[0].logprobs.top_logprobs] == [
        {f"token_id:{token}" for token in score.likeliest} for score in wanted.scores
    ]


def test_texts_as_tokens_and_back(port, engine):
    ids = engine.model.encode(TEXT)
    status, made = answer(port, "/tokenize", {"model": NAME, "prompt": TEXT})
    assert (status, made) == (
        200,
        {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None},
    )
    plain = answer(
        port, "/tokenize", {"prompt": TEXT, "add_special_tokens": False, "return_token_strs": True}
    )[1]
    spelled = engine.model.tokenizer.get_vocab()
    assert plain["tokens"] == ids[1:] == [spelled[token] for token in plain["token_strs"]]
    messages = [{"role": "user", "content": "the"}]
    for ends, wanted in ((True, "the\nthe"), (False, "the\n")):
        chat = answer(port, "/tokenize", {"messages": messages, "add_generation_prompt": ends})[1]
        assert chat["tokens"] == engine.model.encode(wanted, add_special_tokens=False)
    assert answer(port, "/detokenize", {"tokens": ids}) == (
        200,
        {"prompt": engine.model.tokenizer.decode(ids)},
    )
    assert answer(port, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {}, 400, "prompt is missing"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt is a list"),
        ("/tokenize", {"prompt": "a", "nothing": 1}, 400, "unknown field 'nothing'"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "not served here"),
        ("/tokenize", {"messages": [{"role": "user", "content": None}]}, 400, "message 0"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens is a "),
        ("/detokenize", {"tokens": [True]}, 400, "tokens are missing"),
        ("/detokenize", {"tokens": [10**9]}, 400, "token id outside"),
        ("/detokenize", {"tokens": [-1]}, 400, "token id outside"),
        ("/v1/completions", {"prompt": "the " * 100_000}, 400, "tokens or more, and 128 fit at most"),
        ("/v1/completions", {"prompt": "a", "return_tokens_as_token_ids": 1}, 400, "is a whole number"),
    ],
)  # fmt: skip
def test_what_is_no_text(port, path, body, status, message):
    got, made = answer(port, path, body)
    assert (got, message in made["error"]["message"]) == (status, True), made
    assert answer(port, path, body, key=None)[0] == 401


@pytest.mark.parametrize(
    "template",
    thinned(
        [[{"name": "rag", "template": "A"}], "{{ 1 // 0 }}", "{{ messages[0].content + 1 }}"], 2
    ),
)
def test_a_template_that_fails_is_400(tmp_path, template):
    folder = write_model(tmp_path, byte_level(), chat_template=template)
    engine = kvq.Engine(kvq.load(folder), "exact", rows=2, capacity=128, chunk=32, stride=4)
    body = {"messages": [{"role": "user", "content": "the"}]}
    with Running(engine) as port:
        for path in ("/v1/chat/completions", "/tokenize"):
            status, made = answer(port, path, body, key=None)
            assert (status, "chat template" in made["error"]["message"]) == (400, True), made


def test_a_prompt_that_is_encoded_for_long_holds_up_no_other(port, engine, monkeypatch):
    """The first prompt's encoding ends when the second one has been answered."""
    begun, answered = threading.Event(), threading.Event()
    plain = type(engine.model).encode

    def encode(model, text, *arguments, **options):
        if text == "the house":
            begun.set()
            assert answered.wait(60)
        return plain(model, text, *arguments, **options)

    monkeypatch.setattr(type(engine.model), "encode", encode)
    results = []

    def ask():
        return results.append(
            answer(port, "/v1/completions", {"prompt": "the house", "max_tokens": 2})
        )

    slow = threading.Thread(target=ask)
    slow.start()
    assert begun.wait(60)
    assert answer(port, "/v1/completions", {"prompt": "the", "max_tokens": 2})[0] == 200
    answered.set()
    slow.join()
    assert results[0][0] == 200
