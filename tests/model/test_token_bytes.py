"""Tokens by bytes, how many tokens a text has at least, and tokenizers that are remembered by their
files."""

import json

import numpy as np
import pytest
from spelled import byte_level, sentencepiece, write_model, write_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

import kvqjax as kvq
from kvqjax.model.token_bytes import least_tokens, token_bytes
from kvqjax.model.tokenizer import open_tokenizer
from kvqjax.model.tokenizer_calls import encoded, rendered

TALK = [{"role": "user", "content": "the old house"}]
TEXT = "the old 北 house 🙂 serves é a\ncache"


def wordpiece():
    words = ["<unk>", "the", "old", "house", "##s", "."]
    tokenizer = Tokenizer(
        models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return tokenizer


def opened(folder, tokenizer, **settings):
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, tokenizer, **settings)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return open_tokenizer(str(folder))


def in_transformers(tokenizer):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def in_python():
    """A tokenizer that transformers keeps in Python."""
    from transformers import PreTrainedTokenizer

    backend = sentencepiece()
    vocabulary = backend.get_vocab()
    pieces = {number: piece for piece, number in vocabulary.items()}

    class Pieces(PreTrainedTokenizer):
        vocab_size = len(vocabulary)

        def get_vocab(self):
            return dict(vocabulary)

        def _tokenize(self, text):
            return backend.encode(text, add_special_tokens=False).tokens

        def _convert_token_to_id(self, token):
            return vocabulary.get(token, 0)

        def _convert_id_to_token(self, index):
            return pieces[index]

        def convert_tokens_to_string(self, tokens):
            return backend.decoder.decode(tokens)

    return Pieces(unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_bytes_of_tokens_join_to_the_text(tmp_path, make, kind):
    tokenizer = opened(tmp_path, make()) if kind == "ours" else in_transformers(make())
    table = token_bytes(tokenizer)
    first, *later = encoded(tokenizer, TEXT, False)
    assert table.at_start(first) + b"".join(map(table.within, later)) == TEXT.encode()
    assert token_bytes(tokenizer) is table


@pytest.mark.parametrize("make", [lambda: in_transformers(sentencepiece()), in_python])
def test_a_word_with_its_blank_is_not_the_word(make):
    tokenizer = make()
    table, ids = token_bytes(tokenizer), tokenizer.get_vocab()
    assert (table.within(ids["▁the"]), table.within(ids["the"])) == (b" the", b"the")
    assert table.at_start(ids["▁the"]) == b"the"
    assert table.spelling(ids["▁the"]) == "▁the"
    assert table.within(ids["<0xE5>"]) == b"\xe5"
    assert table.within(ids["<s>"]) == b"<s>"


def test_parts_of_characters_and_words():
    ids = (bytes_of := byte_level()).get_vocab()
    table = token_bytes(in_transformers(bytes_of))
    assert (table.within(ids["ð"]), table.within(ids["Ł"])) == (b"\xf0", b"\x9f")
    words = token_bytes(in_transformers(wordpiece()))
    assert [words.within(n) for n in (1, 2, 4, 5)] == [b" the", b" old", b"s", b"."]
    assert words.at_start(1) == b"the"


NFC = normalizers.NFC()
UNKNOWN = models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        (lambda tokenizer: None, 7),
        (lambda tokenizer: setattr(tokenizer, "normalizer", NFC), 28),
        (lambda tokenizer: tokenizer.add_tokens(["x" * 40]), 40),
        (lambda tokenizer: tokenizer.add_tokens([AddedToken("x", lstrip=True)]), None),
        (lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Strip()), None),
        (lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Replace("aa", "a")), None),
        (
            lambda tokenizer: setattr(
                tokenizer, "normalizer", normalizers.Replace(Regex(" +"), " ")
            ),
            None,
        ),
        (
            lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
            None,
        ),
        (lambda tokenizer: setattr(tokenizer, "model", UNKNOWN), None),
    ],
)
def test_how_many_bytes_a_token_has_at_most(change, most):
    """A bound where the tokenizer loses nothing of a text, and none where it may: "Ġserves" has
    seven bytes."""
    tokenizer = byte_level()
    change(tokenizer)
    wanted = 0 if most is None else -(-10_000 // most)
    assert least_tokens(in_transformers(tokenizer), 10_000) == wanted


def test_no_composition_takes_more_bytes_than_the_bound_allows():
    # Hangul, Greek, the sign of Kelvin.
    wide = [
        "\u1112\u1161\u11ab",
        "\u2126\u0313\u0300\u0345",
        "\u212a",
    ]
    tokenizer = byte_level()
    tokenizer.normalizer = NFC
    for text in wide:
        count = len(tokenizer.encode(text * 1000, add_special_tokens=False).ids)
        assert count >= least_tokens(in_transformers(tokenizer), len(text.encode()) * 1000) > 0


def test_a_text_that_cannot_fit_is_refused_unread(tmp_path):
    model = kvq.load(write_model(tmp_path, sentencepiece()))
    with pytest.raises(
        kvq.UserError, match=r"a prompt of 400000 bytes has \d+ tokens or more, and 64 fit at most"
    ):
        kvq.generate(model, "the " * 100_000, capacity=64, max_new_tokens=2)
    with pytest.raises(kvq.UserError, match="and 256 fit at most"):
        kvq.generate(model, "the " * 100_000)
    assert len(model.encode("the " * 10, most=11)) > 10  # what may fit is encoded


# --- Remembered by its files ---


def test_a_changed_template_and_another_tokenizer_are_read(tmp_path):
    write_model(tmp_path, sentencepiece(), chat_template="A{{ messages[0].content }}")
    before = kvq.load(tmp_path)
    assert before.tokenizer is kvq.load(tmp_path).tokenizer
    assert before.tokenizer.apply_chat_template(TALK, tokenize=False) == "Athe old house"
    write_tokenizer(tmp_path, sentencepiece(), chat_template="B{{ messages[0].content }}")
    after = kvq.load(tmp_path)
    assert after.tokenizer.apply_chat_template(TALK, tokenize=False) == "Bthe old house"
    (tmp_path / "chat_template.jinja").write_text("C")
    assert kvq.load(tmp_path).tokenizer.apply_chat_template(TALK, tokenize=False) == "C"
    # A model keeps the tokenizer that it was loaded with.
    assert before.tokenizer.apply_chat_template(TALK, tokenize=False) == "Athe old house"
    words = before.encode("the old")
    write_tokenizer(tmp_path, byte_level())
    again = kvq.load(tmp_path)
    assert again.encode("the old") != words == before.encode("the old")


def test_a_tokenizer_that_was_never_read_is_not_taken_for_another(tmp_path):
    model = kvq.load(write_model(tmp_path, sentencepiece()))
    write_tokenizer(tmp_path, byte_level())
    with pytest.raises(
        kvq.UserError, match="the tokenizer's files changed since the model was loaded"
    ):
        model.encode("the old")


def test_files_that_a_tokenizer_does_not_read_change_nothing(tmp_path):
    model = kvq.load(write_model(tmp_path, sentencepiece()))
    model.tokenizer.chat_template = "mine"
    (tmp_path / "notes.json").write_text("{}")
    assert kvq.load(tmp_path).tokenizer.chat_template == "mine"


# --- What others' programs raise ---

FAILING = {
    "several": [{"name": "tool_use", "template": "A"}, {"name": "rag", "template": "B"}],
    "type": "{{ messages[0].content + 1 }}",
    "division": "{{ 1 // 0 }}",
    "raised": "{{ raise_exception('roles must\nalternate') }}",
    "attribute": "{{ none.x.y }}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "syntax": "{% for %}",
    "names": ["A"],
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_template_that_fails_is_one_line_wherever_it_is_rendered(tmp_path, kind):
    from kvqjax.data.corpora import read

    write_model(tmp_path, sentencepiece(), chat_template=FAILING[kind])
    model = kvq.load(tmp_path)
    records = tmp_path / "talk.jsonl"
    records.write_text(json.dumps({"messages": TALK}))
    calls = [
        lambda: kvq.generate(model, [TALK], chat=True),
        lambda: list(kvq.Session(model).send("the old house")),
        lambda: read(records, model=model),
        lambda: rendered(model.tokenizer, TALK, enable_thinking=object()),  # by transformers
    ]
    for call in calls:
        with pytest.raises(kvq.UserError, match="template|tokenizer") as caught:  # noqa: RUF043
            call()
        assert "\n" not in str(caught.value)


def test_a_text_that_the_tokenizer_does_not_take_is_one_line(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"the": 0}, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = opened(tmp_path, tokenizer, bos_token=None, eos_token=None, unk_token=None)
    with pytest.raises(kvq.UserError, match="the tokenizer does not encode this text: "):
        encoded(made, "the old house", True)
    assert np.asarray(encoded(made, "the the", True)).tolist() == [0, 0]
