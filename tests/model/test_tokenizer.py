"""Tokenizers read by the `tokenizers` library alone are those of transformers, text for text and id
for id."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import kvqjax as kvq
from kvqjax.model import locate
from kvqjax.model import tokenizer as subject

ROOT = Path(__file__).resolve().parents[1]
SENTENCE = "the old man and the sea were old and the man's house is at the sea 1234 don't won't Zürich 北京 🙂 naïve"
WORDS = SENTENCE.split()
TEXT = " ".join(WORDS * 20)
TEXTS = [
    "",
    " ",
    "the old house",
    "  two spaces,  tabs\tand\nlines\n\n end ",
    "Zürich 北京 🙂 e\u0301 \ufb01 \u00a0 ½",
    "<s>the</s> old<|im_start|>user\nthe man<|im_end|> x <pad> [INST] don't",
    "unseen: ĳ ж \U0001d54f \x00 <0x41>",
]
FIELDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHAT = ["<|im_start|>", "<|im_end|>"]


def byte_level(normalizer=None, split=None):
    """Byte-level BPE as of Llama 3 and of Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    regex = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*regex, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet)
    )
    return tokenizer


def with_bos(made, bos="<s>"):
    made.post_processor = processors.TemplateProcessing(
        f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return made


def llama3():
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>", *CHAT])
    tokenizer.add_tokens([AddedToken("house", lstrip=True)])
    return with_bos(tokenizer)


def qwen():
    tokenizer = byte_level(normalizers.NFC(), subject.QWEN_PATTERN)
    tokenizer.add_special_tokens(["<|endoftext|>", *CHAT])
    return tokenizer


def sentencepiece():
    """BPE with byte fallback as of Llama 2, its space put before by a normalizer."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *dict.fromkeys("▁" + TEXT),
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=200))
    trained = json.loads(tokenizer.to_str())["model"]
    merges = [
        tuple(pair) if isinstance(pair, list) else tuple(pair.split(" "))
        for pair in trained["merges"]
    ]
    names = dict.fromkeys([*pieces, *trained["vocab"], *("".join(pair) for pair in merges)])
    vocab = {piece: number for number, piece in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *CHAT])
    return with_bos(tokenizer)


def unigram():
    scores = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((piece, -3.0) for piece in dict.fromkeys("".join(WORDS))),
        ("▁the", -1.0),
    ]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>", *CHAT])
    return with_bos(tokenizer)


def wordpiece():
    vocab = {
        word: number
        for number, word in enumerate(dict.fromkeys(["<unk>", *WORDS, "##s", ".", "'", "s"]))
    }
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tokenizer


def truncating():
    """What trainers leave in tokenizer.json."""
    tokenizer = llama3()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, pad_token="</s>", pad_id=tokenizer.token_to_id("</s>"))
    return tokenizer


# name -> the tokenizer, model_type, tokenizer_config.json
KINDS = {
    "llama 3": (llama3, "llama", {"tokenizer_class": "PreTrainedTokenizerFast", **FIELDS}),
    "llama 3, named Llama": (llama3, "llama", {"tokenizer_class": "LlamaTokenizerFast", **FIELDS}),
    "cleaned up": (
        llama3,
        "llama",
        {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": True},
    ),
    "truncating": (truncating, "llama", {"tokenizer_class": "PreTrainedTokenizerFast", **FIELDS}),
    "add_bos_token": (
        llama3,
        "llama",
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False},
    ),
    "other tokens": (
        llama3,
        "llama",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
            "pad_token": None,
            "image_token": "<|im_start|>",
            "additional_special_tokens": CHAT,
        },
    ),
    "llama 2": (sentencepiece, "llama", {"tokenizer_class": "LlamaTokenizer", **FIELDS}),
    "llama 2, legacy": (
        sentencepiece,
        "llama",
        {"tokenizer_class": "LlamaTokenizer", "legacy": True, **FIELDS},
    ),
    "llama 2, no prefix": (
        sentencepiece,
        "llama",
        {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
    ),
    "mistral": (
        sentencepiece,
        "mistral",
        {"tokenizer_class": "LlamaTokenizer", "legacy": False, **FIELDS},
    ),
    "mixtral": (sentencepiece, "mixtral", {"tokenizer_class": "LlamaTokenizerFast", **FIELDS}),
    "qwen 2": (
        qwen,
        "qwen2",
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None},
    ),
    "qwen 2, named Llama": (qwen, "qwen2", {"tokenizer_class": "LlamaTokenizerFast"}),
    "qwen 3": (
        qwen,
        "qwen3",
        {"tokenizer_class": "Qwen2Tokenizer", "additional_special_tokens": CHAT},
    ),
    "qwen 3 experts": (qwen, "qwen3_moe", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "unigram": (unigram, "llama", {"tokenizer_class": "PreTrainedTokenizerFast", **FIELDS}),
    "wordpiece": (wordpiece, "llama", {"tokenizer_class": "PreTrainedTokenizerFast", **FIELDS}),
}
# What transformers reads in a way of its own.
OTHERS = {
    "wordpiece, cleaned up": (
        wordpiece,
        "llama",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True},
    ),
    "a token that tokenizer.json lacks": (
        llama3,
        "llama",
        {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<new>"},
    ),
    "other flags": (
        llama3,
        "llama",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {"330": {"content": "<s>", "lstrip": True, "special": True}},
        },
    ),
    "qwen of other parts": (
        llama3,
        "qwen2",
        {"tokenizer_class": "PreTrainedTokenizerFast", **FIELDS},
    ),
    "a class of its own": (llama3, "llama", {"tokenizer_class": "GPT2Tokenizer"}),
}
FOLDERS = {
    **{name: locate(name) for name in ("demo", "recall")},
    **{name: ROOT / "assets_models" / name for name in ("mha", "mistral", "qwen3")},
}


def write(folder, kind):
    make, model_type, settings = kind
    make().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module", params=[*KINDS, *FOLDERS])
def pair(request, tmp_path_factory):
    """(ours, transformers') of one folder."""
    tokenizer = request.param in KINDS
    folder = FOLDERS.get(request.param) or write(
        tmp_path_factory.mktemp("tokenizer"), KINDS[request.param]
    )
    ours = subject.open_tokenizer(str(folder))
    assert isinstance(ours, subject.Tokenizer), tokenizer
    return ours, subject._transformers(str(folder))


def test_ids_and_texts(pair):
    ours, theirs = pair
    for text in TEXTS:
        for special in (True, False):
            wanted = theirs(text, add_special_tokens=special)
            got = ours(text, add_special_tokens=special)
            assert (
                got["input_ids"]
                == wanted["input_ids"]
                == ours.encode(text, add_special_tokens=special)
            ), text
            assert got.attention_mask == wanted["attention_mask"]
            for skip in (True, False):
                assert ours.decode(got.input_ids, skip) == theirs.decode(
                    got.input_ids, skip_special_tokens=skip
                ), text
    assert ours(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]
    rows = [[5, 6, 7], [8]]
    assert ours.decode(rows) == ours.batch_decode(rows) == theirs.batch_decode(rows)
    assert (
        ours.decode(7)
        == ours.decode(np.int32(7))
        == ours.decode(np.asarray([7]))
        == theirs.decode([7])
    )
    assert ours._substitute is None  # nothing of this needed transformers


def test_tokens(pair):
    ours, theirs = pair
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (len(ours), ours.get_vocab()) == (len(theirs), theirs.get_vocab())
    assert set(ours.all_special_ids) >= set(theirs.all_special_ids)
    for name in subject.NAMED:
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    assert ours.chat_template is None
    assert ours._substitute is None


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_repeated_goes_to_transformers(tmp_path, kind):
    tokenizer = subject.open_tokenizer(str(write(tmp_path, OTHERS[kind])))
    assert not isinstance(tokenizer, subject.Tokenizer)
    assert tokenizer("the old house")["input_ids"]


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "a block a line": "{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m.content }}\n  {% endif %}\n"
    "{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{% endfor %}{{ n.k }}",
    "date": "{{ strftime_now('%Y') }}{{ tools | tojson if tools is not none else 'none' }}{{ documents is defined }}",
    "own option": "{{ messages[-1].content }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.content is defined }}"
    "{% endfor %}",
    "python": "{{ messages[0]['content'].split(' ')[-1].upper() }}"
    "{{ messages | selectattr('role', 'eq', 'user') | list | length }}",
}
TALK = [
    {"role": "system", "content": "Zürich <b>&\n"},
    {"role": "user", "content": " the old man ", "name": None},
    {"role": "assistant", "content": "sea", "reasoning": "why"},
    {"role": "user", "content": "and?"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates(tmp_path, name):
    make, model_type, settings = KINDS["llama 3"]
    folder = write(tmp_path, (make, model_type, settings | {"chat_template": TEMPLATES[name]}))
    ours, theirs = subject.open_tokenizer(str(folder)), subject._transformers(str(folder))
    tools = [{"type": "function", "function": {"name": "sea"}}]
    for options in (
        {},
        {"add_generation_prompt": True},
        {"enable_thinking": False},
        {"tools": tools},
    ):
        got = ours.apply_chat_template(TALK, tokenize=False, **options)
        assert got == theirs.apply_chat_template(TALK, tokenize=False, **options)
    wanted = theirs.apply_chat_template(TALK)["input_ids"]
    assert (
        ours.apply_chat_template(TALK)["input_ids"]
        == wanted
        == ours.apply_chat_template(TALK, return_dict=False)
    )
    assert ours._substitute is None
    assert "20" in datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses these messages: roles must alternate",
        ),
        ("{% for %}", "cannot be read: line 1"),
        ("{{ messages[0].content.nothing.more }}", "refuses these messages: "),
        ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "refuses these messages: "),
    ],
)
def test_a_template_s_refusal_is_one_line(tmp_path, template, message):
    make, model_type, settings = KINDS["llama 3"]
    folder = write(tmp_path, (make, model_type, settings | {"chat_template": template}))
    with pytest.raises(kvq.UserError, match=message):
        subject.open_tokenizer(str(folder)).apply_chat_template(TALK, tokenize=False)


def test_templates_in_files_of_their_own(tmp_path):
    make, model_type, settings = KINDS["llama 3"]
    several = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    folder = write(tmp_path, (make, model_type, settings | {"chat_template": several}))
    tokenizer = subject.open_tokenizer(str(folder))
    theirs = subject._transformers(str(folder))
    for tools, wanted in ((None, "A"), ([{"type": "function"}], "B")):
        assert tokenizer.apply_chat_template(TALK, tokenize=False, tools=tools) == wanted
        assert theirs.apply_chat_template(TALK, tokenize=False, tools=tools) == wanted
        assert tokenizer.get_chat_template(tools=tools) == wanted
    (folder / "chat_template.jinja").write_text("C{{ messages[0].role }}")
    tokenizer = subject.open_tokenizer(str(folder))
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == "Csystem"


def test_what_the_library_lacks_comes_from_transformers(tmp_path):
    tokenizer = subject.open_tokenizer(str(write(tmp_path, KINDS["llama 3"])))
    assert tokenizer("the", return_tensors="np")["input_ids"].shape[0] == 1
    assert tokenizer._substitute is not None
    assert tokenizer.convert_ids_to_tokens([1]) == tokenizer._substitute.convert_ids_to_tokens([1])
    again = subject.Tokenizer(str(tmp_path), subject._read(tmp_path))
    again.pad_token = "</s>"
    assert again.pad_token_id == tokenizer.eos_token_id
    with pytest.raises(AttributeError, match="nothing"):
        _ = again.nothing


@pytest.mark.smoke
def test_generating_imports_neither_transformers_nor_torch():
    script = """if True:
        import sys
        sys.argv = "kvqjax generate -m recall -p ab12,cd34,?cd -n 2".split()
        from kvqjax.cli import main
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, ended
        print([name for name in ("torch", "transformers", "datasets", "matplotlib") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done
