"""Tokenizers of the bundled models and the token streams they are trained on."""

import lzma
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from benchmarks.train.data import Corpus
from kvqjax.eval.synthetic import SYMBOLS

BOS, EOS = "<s>", "</s>"
CHUNK = 1 << 16  # bytes of each book excerpt


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def character_tokenizer() -> Tokenizer:
    """64 symbols: <s>, </s>, comma, question mark, digits, letters; one token each."""
    vocab = {symbol: i for i, symbol in enumerate([BOS, EOS, ",", "?", *SYMBOLS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _with_bos(tokenizer)


def symbols() -> tuple[Corpus, Tokenizer]:
    """The corpus of the 64-symbol models: no text, only recall."""
    tokenizer = character_tokenizer()
    vocab = tokenizer.get_vocab()
    return Corpus(
        lambda text: [vocab[c] for c in text], vocab[BOS], np.arange(4, len(vocab))
    ), tokenizer


def _excerpts(path: Path, size: int) -> str:
    """About `size` bytes of a text file (.xz or plain) in excerpts evenly spread over it."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        everything = file.read()
    starts = np.linspace(0, max(0, len(everything) - CHUNK), max(1, size // CHUNK)).astype(int)
    return "\n".join(everything[s : s + CHUNK].decode("utf-8", "ignore") for s in starts)


def _byte_pairs(text: str, size: int) -> Tokenizer:
    """Byte-level BPE of `size` pieces; digits stand alone so that pass keys are copied digit by
    digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[BOS, EOS], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return _with_bos(tokenizer)


def _stream(tokenizer: Tokenizer, text: str, path: Path) -> np.ndarray:
    """Token ids of the text without <s>, kept in `path`."""
    if not path.exists():
        lines = tokenizer.encode_batch(text.splitlines(keepends=True), add_special_tokens=False)
        np.save(path, np.concatenate([np.asarray(line.ids, np.uint16) for line in lines]))
    return np.load(path)


def books(train: Path, valid: Path, folder: Path, vocab_size: int) -> tuple[Corpus, Tokenizer]:
    """Tokenizer and token streams of a text corpus; made once, then read from `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "tokenizer.json"
    fresh = not (saved.exists() and (folder / "train.npy").exists())
    excerpts = _excerpts(train, 32 << 20) if fresh else ""
    if not saved.exists():
        _byte_pairs(excerpts[: 12 << 20], vocab_size).save(str(saved))
    tokenizer = Tokenizer.from_file(str(saved))
    stream = _stream(tokenizer, excerpts, folder / "train.npy")
    held_out = _stream(tokenizer, _excerpts(valid, 2 << 20) if fresh else "", folder / "valid.npy")
    # Random spans use half everyday tokens (as frequent as in text) and half the whole vocabulary.
    common = np.random.default_rng(0).choice(stream, vocab_size)
    drawn = np.concatenate([common, np.arange(2, vocab_size, dtype=stream.dtype)])

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return Corpus(encode, 0, drawn, stream, held_out), tokenizer
