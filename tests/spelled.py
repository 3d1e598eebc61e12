"""A small random model in a folder, with a tokenizer of SentencePiece's kind or one over bytes."""

import json
from pathlib import Path

from checkpoints import random_params
from hf_folders import save_params
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from kvqjax.model.config import ModelConfig

WORDS = ["the", "model", "serves", "a", "cache", "house", "old"]
LETTERS = sorted(set("".join(WORDS)) | set("▁.\n"))
NAMES = ["<unk>", "<s>", "</s>"]


def _merges(pieces: list[str]) -> list[tuple[str, str]]:
    """Each piece of its beginning and its last character."""
    pairs = [(piece[:count], piece[count]) for piece in pieces for count in range(1, len(piece))]
    return list(dict.fromkeys(pairs))


def sentencepiece() -> Tokenizer:
    """BPE with byte fallback, as of Llama 2: "▁the" and "the" are two tokens."""
    merges = _merges(WORDS) + [("▁", word) for word in WORDS]
    letters = [letter for letter in LETTERS if letter != "\n"]
    every = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = dict.fromkeys(
        [*NAMES, *every, *letters, *(left + right for left, right in merges)]
    )
    numbers = {piece: number for number, piece in enumerate(vocabulary)}
    model = models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return _named(tokenizer)


def byte_level() -> Tokenizer:
    """BPE over bytes, as of Llama 3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(WORDS) + [("Ġ", word) for word in WORDS]
    vocabulary = dict.fromkeys([*NAMES, *alphabet, *(left + right for left, right in merges)])
    numbers = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(numbers, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _named(tokenizer)


def _named(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(NAMES)
    ids = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=ids)
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, **settings) -> Path:
    """Write a random model of one layer with a tokenizer and its `settings`."""
    sizes = {
        "width": 16,
        "mlp_width": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    config = ModelConfig(vocab_size=tokenizer.get_vocab_size(), max_position=256, **sizes)
    save_params(folder, random_params(config), config)
    write_tokenizer(folder, tokenizer, **settings)
    return folder


def write_tokenizer(folder: Path, tokenizer: Tokenizer, **settings) -> None:
    """Write a tokenizer's files."""
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
