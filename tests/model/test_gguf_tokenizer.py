"""Tokenizers of GGUF files: token for token those of the model's own tokenizer, and of
transformers' reading of the same file where that is the model's own."""

import dataclasses
import json

import pytest
from checkpoints import random_params
from hf_folders import save_params
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

gguf = pytest.importorskip("gguf", reason="needs the package gguf, of the extra of the same name")

from gguf_files import write_gguf, write_vocabulary  # noqa: E402

import kvqjax as kvq  # noqa: E402
from kvqjax.model.config import ModelConfig  # noqa: E402
from kvqjax.model.gguf_tokenizer import (  # noqa: E402
    LLAMA3_PATTERN,
    O200K_PATTERN,
    QWEN35_PATTERN,
    QWEN_PATTERN,
    TEKKEN_PATTERN,
)
from kvqjax.model.tokenizer import open_tokenizer  # noqa: E402

CONTROL, USER, BYTE = 3, 4, 6
SENTENCE = "the old man and the sea were old and the man's house is at the sea 1234 don't won't Zürich 北京 🙂 naïve"
TRAINED = " ".join([SENTENCE, "  two  spaces", "HOUSE House don'T"] * 20)
TEXTS = [
    "",
    " ",
    "the old house",
    "  two spaces,  tabs\tand\nlines\n\n end ",
    "Zürich 北京 🙂 \ufb01 \u00a0 ½ 12345 man1234",
    "<|im_start|>user\nthe man<|im_end|> don't <think> DON'T HouseHOUSE",
    "unseen: ĳ ж \U0001d54f <0x41> a/b//c\n",
]
# Where digits stand behind several spaces, and characters that are not composed.
HARD = ["the  5  12\n\n 34", "Zu\u0308rich e\u0301"]
CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{{ eos_token }}"  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose files differ by their tokenizers alone."""
    config = ModelConfig(
        vocab_size=700,
        width=16,
        mlp_width=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
    )
    path = tmp_path_factory.mktemp("plain") / "hf"
    for name in ("Llama", "Qwen2"):
        kind = dataclasses.replace(
            config, architecture=f"{name}ForCausalLM", qkv_bias=name == "Qwen2"
        )
        save_params(path / name, random_params(kind), kind)
    return path


def byte_level(split=None, digits=False, composed=False) -> Tokenizer:
    """A model's own tokenizer of the byte-level kind, with 3 control tokens and one of the
    user's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if composed else None
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Sequence(steps),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TRAINED], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(CHAT)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def of_tokenizer(tokenizer: Tokenizer, pre: str | None, **values):
    """What a converter writes of a byte-level tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    kinds = [CONTROL if token in CHAT else USER if token == "<think>" else 1 for token in tokens]
    ids = {"eos": tokenizer.token_to_id("<|im_end|>"), "bos": tokenizer.token_to_id("<|im_start|>")}

    def extra(writer):
        write_vocabulary(writer, "gpt2", tokens, kinds, pre=pre, merges=merges, **ids)
        writer.add_chat_template(TEMPLATE)
        for key, value in values.items():
            getattr(writer, f"add_add_{key}_token")(value)

    return extra


KINDS = {
    "llama-bpe": ({"split": LLAMA3_PATTERN}, "Llama"),
    "qwen2": ({"split": QWEN_PATTERN, "composed": True}, "Qwen2"),
    "qwen35": ({"split": QWEN35_PATTERN, "composed": True}, "Qwen2"),
    "gpt-4o": ({"split": O200K_PATTERN}, "Llama"),
    "smollm": ({"digits": True}, "Llama"),
    "tekken": ({"split": TEKKEN_PATTERN}, "Llama"),
    "default": ({}, "Llama"),
    None: ({"split": QWEN_PATTERN, "composed": True}, "Qwen2"),
}


@pytest.mark.parametrize("pre", KINDS)
def test_byte_level(pre, folder, tmp_path):
    parts, family = KINDS[pre]
    wanted = byte_level(**parts)
    extra = of_tokenizer(wanted, pre, bos=False)
    tokenizer = open_tokenizer(
        str(write_gguf(folder / family, tmp_path / "model.gguf", extra=extra))
    )
    for text in TEXTS + HARD:
        ids = tokenizer.encode(text)
        assert ids == wanted.encode(text).ids, text
        assert tokenizer.decode(ids) == wanted.decode(ids, skip_special_tokens=False)
    assert tokenizer.special_tokens_map == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.decode(tokenizer.encode(TEXTS[5]), skip_special_tokens=True).startswith(
        "user\nthe man don't <think>"
    )


@pytest.mark.parametrize(
    ("pre", "family"), [("llama-bpe", "Llama"), ("qwen2", "Qwen2"), ("default", "Llama")]
)
def test_byte_level_as_transformers_reads_the_file(pre, family, folder, tmp_path):
    pytest.importorskip("torch", reason="transformers reads GGUF files by torch")
    transformers = pytest.importorskip("transformers")
    extra = of_tokenizer(byte_level(**KINDS[pre][0]), pre, bos=False)
    file = write_gguf(folder / family, tmp_path / "model.gguf", extra=extra)
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name),
        open_tokenizer(str(file)),
    )
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    messages = [{"role": "user", "content": "the old man"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(
        messages, tokenize=False
    )


def sentencepiece():
    """Pieces, their kinds and scores, as of Llama 2; merged pieces are the likelier the shorter
    they are."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, CONTROL, CONTROL, *[BYTE] * 256]
    words = dict.fromkeys(
        f"▁{word}"[:end] for word in SENTENCE.split() for end in range(2, 1 + len(word) + 1)
    )
    merged = [*sorted(words, key=len), "se", "sea", "ea", "▁▁", "▁▁▁▁"]
    normal = dict.fromkeys([*merged, *"▁".join(SENTENCE.split())])
    pieces += [*normal, "<|im_start|>"]
    return (
        pieces,
        [*kinds, *[1] * len(normal), USER],
        [0.0] * 259 + [-float(n) for n in range(len(normal) + 1)],
    )


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix, folder, tmp_path):
    pytest.importorskip("torch", reason="transformers reads GGUF files by torch")
    transformers = pytest.importorskip("transformers")
    pieces, kinds, scores = sentencepiece()

    def extra(writer):
        write_vocabulary(writer, "llama", pieces, kinds, scores=scores, bos=1, eos=2, unk=0)
        if not prefix:
            writer.add_add_space_prefix(False)

    file = write_gguf(folder / "Llama", tmp_path / "model.gguf", extra=extra)
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name),
        open_tokenizer(str(file)),
    )
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids[0] == 1
        if prefix:  # which transformers does not read from the file
            assert ids == theirs.encode(text), text
            assert ours.decode(ids) == theirs.decode(ids)
        else:
            assert ours.decode(ids, skip_special_tokens=True) == text
    first = ours.encode("old")[1]
    assert pieces[first].startswith("▁" if prefix else "o")


def test_first_and_last_tokens(folder, tmp_path):
    """As the file says; a Llama 3 file that says nothing begins texts, a Qwen file does not."""
    made = byte_level()
    bos, eos = made.token_to_id("<|im_start|>"), made.token_to_id("<|im_end|>")

    def ids(number, pre, **values):
        file = write_gguf(
            folder / "Llama", tmp_path / f"{number}.gguf", extra=of_tokenizer(made, pre, **values)
        )
        return open_tokenizer(str(file)).encode("old")

    plain = ids(0, "qwen2")
    assert ids(1, "llama-bpe") == [bos, *plain]
    assert ids(2, "llama-bpe", bos=False) == plain
    assert ids(3, "default", bos=True, eos=True) == [bos, *plain, eos]


def test_what_the_tokenizer_lacks_comes_from_transformers(folder, tmp_path):
    """Options of transformers' tokenizers, of the same parts and without PyTorch."""
    file = write_gguf(
        folder / "Llama", tmp_path / "model.gguf", extra=of_tokenizer(byte_level(), "default")
    )
    tokenizer = kvq.load(file).tokenizer
    wanted = tokenizer.encode("the old man")
    cut = tokenizer("the old man", truncation=True, max_length=2)["input_ids"]
    assert cut == wanted[:2]
    assert tokenizer.eos_token == "<|im_end|>"


WRONG = {
    "none": (lambda writer: None, "no tokenizer in this file; pass token ids"),
    "kind": (
        lambda w: write_vocabulary(w, "t5", ["a"], [1]),
        "tokenizer.ggml.model = 't5' is not read here",
    ),
    "split": (
        lambda w: write_vocabulary(w, "gpt2", ["a"], [1], pre="bloom", merges=["a a"]),
        "tokenizer.ggml.pre = 'bloom' is not known; known: gpt-2",
    ),
    "twice": (
        lambda w: write_vocabulary(w, "gpt2", ["a", "a"], [1, 1], merges=["a a"]),
        "has a token twice",
    ),
    "merges": (
        lambda w: write_vocabulary(w, "gpt2", ["a"], [1], merges=["aa"]),
        "'aa' in tokenizer.ggml.merges is no pair of",
    ),
    "absent": (
        lambda w: write_vocabulary(w, "gpt2", ["a"], [1], merges=["a b"]),
        "'a b' in tokenizer.ggml.merges is no pair of",
    ),
    "scores": (
        lambda w: write_vocabulary(w, "llama", ["a", "b"], [1, 1], scores=[0.0]),
        "wanted a list of 2 numbers",
    ),
    "id": (
        lambda w: write_vocabulary(w, "gpt2", ["a", "b", "ab"], [1] * 3, merges=["a b"], eos=9),
        "eos_token is 9 of 3 tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tokenizers(name, folder, tmp_path):
    """One line, when the tokenizer is asked for: the weights load, and take token ids."""
    extra, message = WRONG[name]
    model = kvq.load(write_gguf(folder / "Llama", tmp_path / "model.gguf", extra=extra))
    assert model.has_tokenizer == (name != "none")
    with pytest.raises(kvq.UserError, match=message) as refused:
        model.encode("a")
    assert "\n" not in str(refused.value)
