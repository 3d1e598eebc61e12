"""New ids as text: every kind of tokenizer, in every portion, whole and cut characters, and stop
strings."""

import functools
import itertools
import re

import pytest
from cases import thinned
from tiny import tiny
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

import kvqjax as kvq
from kvqjax.generation.text import Detokenizer

TEXTS = [
    "the old house stood on the hill, and it wasn't new: isn't it?",
    "she 's here ! do n't go . it ' s 3 ' 4 ; a n ' t b",
    "  two  spaces\n\nnew lines\t.",
    "d\u00e9j\u00e0 vu \u2014 \u4f60\u597d, \u4e16\u754c! \U0001f600\U0001f600 \u0e01\u0e33",
    "a real \ufffd\ufffd here, and at the end \ufffd",
    "caf\u00e9\u00e9\u00e9 x\u00e9",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _wrapped(tokenizer, **options):
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options
    )


def _sentencepiece(decoder, merges=()):
    """Words with their space, else characters, else bytes: as Llama-2's and Mistral's."""
    words = ["the", "old", "house", "hill", "it", "is", "go", "stood", "on"]
    letters = sorted(
        {letter for text in TEXTS[:3] for letter in text.replace(" ", "\u2581")} - set("\n\t")
    )
    vocabulary = [("<unk>", 0.0), *((text, -20.0) for text in BYTES)]
    vocabulary += [(f"\u2581{word}", -3.0) for word in words] + [(word, -4.0) for word in words]
    vocabulary += [(letter, -9.0) for letter in letters]
    return Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True)), decoder


def _llama2():
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer, tokenizer.decoder = _sentencepiece(decoders.Sequence(steps))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return _wrapped(tokenizer)


def _metaspace():
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    tokenizer, tokenizer.decoder = _sentencepiece(decoders.Sequence(steps))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return _wrapped(tokenizer)


def _byte_level(clean=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _wrapped(tokenizer, clean_up_tokenization_spaces=clean)


def _wordpiece(clean, decoder_cleans=False):
    words = [
        "the",
        "old",
        "house",
        "stood",
        "on",
        "hill",
        "it",
        "is",
        "isn",
        "she",
        "here",
        "do",
        "go",
        "n",
        "t",
        "s",
    ]
    letters = sorted({letter for text in TEXTS for letter in text if not letter.isspace()})
    vocabulary = [
        "[UNK]",
        *dict.fromkeys([*words, *letters, *(f"##{letter}" for letter in letters)]),
    ]
    tokenizer = Tokenizer(
        models.WordPiece(
            {text: number for number, text in enumerate(vocabulary)}, unk_token="[UNK]"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=decoder_cleans)
    return _wrapped(tokenizer, clean_up_tokenization_spaces=clean)


MAKERS = {
    "llama2": _llama2,
    "metaspace": _metaspace,
    "byte_level": _byte_level,
    "byte_level_with_the_flag": functools.partial(_byte_level, True),
    "wordpiece": functools.partial(_wordpiece, False),
    "wordpiece_cleaned": functools.partial(_wordpiece, True),
    "wordpiece_cleaned_by_its_decoder": functools.partial(_wordpiece, False, True),
}
FALLBACK = ("llama2", "metaspace")


@functools.cache
def tokenizer_of(kind):
    return MAKERS[kind]()


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decoded(tokenizer, ids):
    # None: as the tokenizer says.
    clean = type(tokenizer.backend_tokenizer.model).__name__ != "BPE" and None
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=clean)


def shared(first, second):
    """How many characters two texts begin with in common."""
    return len(
        list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    )


def answer(tokenizer, prompt, ids, portion=1, stop=()):
    """(pieces, the detokenizer) for ids that come in portions."""
    row = Detokenizer(tokenizer, prompt, stop)
    pieces = [row.extend(ids[start : start + portion]) for start in range(0, len(ids), portion)]
    return [*pieces, row.finish()], row


@pytest.mark.parametrize("kind", thinned(MAKERS, 2))
def test_the_answer_is_the_text_of_both_without_the_prompt(kind):
    tokenizer = tokenizer_of(kind)
    compared = 0
    for ids in (ids_of(tokenizer, text) for text in TEXTS):
        for place in range(len(ids)):
            prompt, new = [tokenizer.bos_token_id, *ids[:place]], ids[place:]
            whole = decoded(tokenizer, prompt + new)
            # What the answer changes of the prompt's end is the answer's: a space before a full
            # stop, or a character not yet whole. With byte fallback its bytes break the bytes
            # before them too.
            cuts = range(4 if kind in FALLBACK else 1)
            before = [decoded(tokenizer, prompt[: len(prompt) - cut]) for cut in cuts]
            if "\ufffd" in whole and len(before) > 1 and not whole.startswith(before[0]):
                continue  # cut within a U+FFFD, which cannot be told from a broken character
            kept = next((text for text in before if whole.startswith(text)), before[0])
            wanted = whole[shared(whole, kept) :]
            for portion in (1, 3, 1000):
                pieces, row = answer(tokenizer, prompt, new, portion)
                assert row.text == "".join(pieces) == wanted, (prompt, new)
                assert row.ids == new
            compared += 1
    assert compared > 90


@pytest.mark.parametrize("kind", MAKERS)
def test_streamed_text_is_never_taken_back(kind):
    tokenizer = tokenizer_of(kind)
    for text in TEXTS:
        row, ids, shown = (
            Detokenizer(tokenizer, [tokenizer.bos_token_id]),
            ids_of(tokenizer, text),
            "",
        )
        for token in ids:
            shown += row.extend([token])
            assert decoded(tokenizer, ids).startswith(shown)


def test_a_first_word_keeps_its_space_behind_a_prompt():
    tokenizer = tokenizer_of("llama2")
    the, old, house = ids_of(tokenizer, "the old house")
    assert tokenizer.decode([house]) == "house"
    assert answer(tokenizer, [the, old], [house])[1].text == " house"
    assert answer(tokenizer, [tokenizer.bos_token_id], [the, old])[1].text == "the old"
    # A special token between changes nothing, for it has no text.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert answer(tokenizer, [the, old, end], [end, house, end])[1].text == " house"


@pytest.mark.parametrize("kind", ["llama2", "metaspace", "byte_level"])
def test_a_character_is_shown_when_it_is_whole_or_at_the_end(kind):
    tokenizer = tokenizer_of(kind)
    prompt = ids_of(tokenizer, "the old")
    bytes_of = ids_of(tokenizer, "the\U00010348")[len(ids_of(tokenizer, "the")) :]
    assert len(bytes_of) == 4
    pieces, row = answer(tokenizer, prompt, bytes_of * 2)
    assert pieces == ["", "", "", "\U00010348"] * 2 + [""]
    cut = bytes_of + bytes_of[:2]  # ends inside its second character
    pieces, row = answer(tokenizer, prompt, cut)
    assert pieces[:6] == ["", "", "", "\U00010348", "", ""]
    assert set(pieces[6]) == {"\ufffd"}
    assert row.text == "".join(pieces)
    # Bytes that never become a character are shown, and cost no more than others.
    pieces, row = answer(tokenizer, prompt, bytes_of[1:2] * 3000 + ids_of(tokenizer, "house"))
    assert row.text.replace(" ", "") == "\ufffd" * 3000 + "house"
    assert "".join(pieces[:3000]) == "\ufffd" * 2997


class Counted:
    """A tokenizer that notes how many ids it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, []

    def decode(self, ids, **options):
        self.decoded.append(len(ids))
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("kind", ["llama2", "byte_level"])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_step_decodes_few_ids_however_long_the_text(kind, stop):
    tokenizer = Counted(tokenizer_of(kind))
    for text in (TEXTS[0], TEXTS[3], TEXTS[4]):
        ids = ids_of(tokenizer.tokenizer, text) * 20
        row = Detokenizer(tokenizer, ids[:7], stop)
        tokenizer.decoded.clear()
        for token in ids:
            row.extend([token])
        assert max(tokenizer.decoded) < 40
        assert len(tokenizer.decoded) < 4 * len(ids)


# (stop strings, new text, what is left of it, the number of its ids kept or None for all)
STOPS = [
    (["house"], "the old house stood", "the old ", 3),
    (["d h"], "the old house stood", "the ol", None),
    (["stood", "old"], "the old house stood", "the ", 2),
    (["e old h", "old"], "the old house", "the ", 2),
    (["xyz"], "the old house", "the old house", 3),
]


def test_stop_strings_within_and_across_tokens():
    tokenizer = tokenizer_of("llama2")
    prompt = ids_of(tokenizer, "it is the")
    for stop, text, left, count in STOPS:
        ids = ids_of(tokenizer, text)
        for portion in (1, 2, 100):
            pieces, row = answer(tokenizer, prompt, ids, portion, stop)
            assert row.text == "".join(pieces) == f" {left}", (stop, text)
            assert row.stopped == (left != text)
            # The ids end with the token that completes the stop string.
            assert count is None or row.ids == ids[:count]
            assert row.ids == ids[: len(row.ids)]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_stop_string_ends_the_text_at_the_first_token_that_completes_it(kind):
    tokenizer = tokenizer_of(kind)
    prompt, ids = ids_of(tokenizer, "it is"), ids_of(tokenizer, TEXTS[0])
    plain = answer(tokenizer, prompt, ids)[1].text
    for start in range(0, len(plain) - 4, 3):
        stop = plain[start : start + 4]
        place = plain.find(stop)
        pieces, row = answer(tokenizer, prompt, ids, 1, [stop])
        assert row.text == "".join(pieces) == plain[:place]
        assert row.stopped
        assert stop in answer(tokenizer, prompt, row.ids)[1].text
        assert stop not in answer(tokenizer, prompt, row.ids[:-1])[1].text
        assert answer(tokenizer, prompt, ids, 7, [stop])[1].ids == row.ids


def test_what_may_begin_a_stop_string_is_held_back():
    tokenizer = tokenizer_of("byte_level")
    row = Detokenizer(tokenizer, ids_of(tokenizer, "it"), ["END", "E!!"])
    pieces = [
        row.extend(ids_of(tokenizer, letter)) for letter in ["a", "E", "N", "x", "E", "!", "!"]
    ]
    assert pieces == ["a", "", "", "ENx", "", "", ""]
    assert (row.stopped, row.text, row.extend(ids_of(tokenizer, "b")), row.finish()) == (
        True,
        "aENx",
        "",
        "",
    )
    row = Detokenizer(tokenizer, ids_of(tokenizer, "it"), "END")
    assert (row.extend(ids_of(tokenizer, "EN")), row.finish(), row.text) == ("", "EN", "EN")


def test_a_prompt_does_not_begin_a_stop_string():
    tokenizer = tokenizer_of("byte_level")
    row = Detokenizer(tokenizer, ids_of(tokenizer, "a\nUs"), ["\nUser:"])
    assert row.extend(ids_of(tokenizer, "er: yes\nUser: no")) == "er: yes"
    assert row.stopped


@pytest.mark.parametrize("kind", ["llama2", "byte_level", "wordpiece_cleaned"])
def test_a_special_token_is_a_stop_string_by_its_text(kind):
    tokenizer = tokenizer_of(kind)
    start, end = (tokenizer.convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|im_end|>"))
    prompt, old, house = (ids_of(tokenizer, text) for text in ("it is the", "old", "house"))
    ids = [*old, start, *house, end, *old]
    plain, before = (answer(tokenizer, prompt, new)[1].text for new in (ids, ids[: -1 - len(old)]))
    for portion in (1, 2, 100):
        for stop, left, count in [
            ("<|im_end|>", before, len(ids) - len(old)),
            ("house<|im_end|>", before.removesuffix("house"), len(ids) - len(old)),
            ("old<|im_start|>", plain[: plain.index("old")], len(old) + 1),
            ("<|im_start|><|im_start|>", plain, len(ids)),
            ("im_end", plain, len(ids)),
            ("<|im_start|>x", plain, len(ids)),
        ]:
            pieces, row = answer(tokenizer, prompt, ids, portion, [stop])
            assert (row.text, "".join(pieces), row.ids) == (left, left, ids[:count]), stop


@pytest.mark.parametrize("kind", ["llama2", "byte_level", "wordpiece_cleaned"])
def test_a_special_token_that_is_shown_stands_in_the_text(kind):
    tokenizer = tokenizer_of(kind)
    start, end = (tokenizer.convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|im_end|>"))
    prompt, old, house = (ids_of(tokenizer, text) for text in ("it is the", "old", "house"))
    ids = [*old, start, start, *house, end, *old]
    for portion in (1, 2, 100):
        row = Detokenizer(tokenizer, prompt, shown=[start])
        portions = [ids[place : place + portion] for place in range(0, len(ids), portion)]
        pieces = [*map(row.extend, portions), row.finish()]
        assert "".join(pieces) == row.text
        before, between, after = row.text.split("<|im_start|>")
        assert (before.strip(), between) == ("old", "")
        assert re.fullmatch(r" ?house ?old", after)
        row = Detokenizer(tokenizer, prompt, ["start|>"], shown=[start])
        assert "".join(map(row.extend, portions)) == f"{before}<|im_"
        assert row.stopped


def test_a_character_that_a_shown_token_cuts_is_none():
    tokenizer = tokenizer_of("byte_level")
    (start,) = tokenizer.convert_tokens_to_ids(["<|im_start|>"])
    first, *rest = ids_of(tokenizer, "\u1234")
    row = Detokenizer(tokenizer, [], shown=[start])
    text = row.extend([first, start, *rest]) + row.finish()
    assert re.fullmatch(r"\ufffd<\|im_start\|>\ufffd+", text)


def test_what_cannot_be_a_stop_string_is_refused():
    with pytest.raises(kvq.UserError, match="empty stop string"):
        Detokenizer(tokenizer_of("llama2"), [1], ["a", ""])
    with pytest.raises(kvq.UserError, match="takes the ids of tokens"):
        Detokenizer(tokenizer_of("llama2"), [1], [7])
    with pytest.raises(kvq.UserError, match="need a tokenizer"):
        Detokenizer(None, [1], "a")
    row = Detokenizer(None, [1])
    assert (row.extend([3, 4]), row.finish(), row.text, row.ids) == ("", "", "", [3, 4])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with Llama-2's kind of tokenizer."""
    folder = tmp_path_factory.mktemp("llama2")
    tokenizer_of("llama2").save_pretrained(folder)
    return tiny(vocab_size=320).replace(folder=str(folder))


def test_generated_text_goes_on_from_its_prompt(model):
    tokenizer = model.tokenizer
    prompts = [ids_of(tokenizer, "the old"), ids_of(tokenizer, "it is d\u00e9j")]
    out = kvq.generate(model, prompts, max_new_tokens=24, eos_ids=())
    for prompt, ids, text in zip(prompts, out.tokens, out.text, strict=True):
        assert text == answer(tokenizer, prompt, ids, 24)[1].text
    pieces = [
        part.text for part in kvq.stream(model, prompts, max_new_tokens=24, eos_ids=(), stride=1)
    ]
    assert ["".join(row) for row in zip(*pieces, strict=True)] == out.text
    stop = out.text[0][4:7]
    cut = kvq.generate(model, prompts[:1], max_new_tokens=24, eos_ids=(), stop=stop)
    assert cut.text[0] == out.text[0][: out.text[0].index(stop)]
    assert cut.tokens[0] == out.tokens[0][: len(cut.tokens[0])]
