"""Tokenizers: of a folder's tokenizer.json or a GGUF file by the `tokenizers` library, of others by
transformers. Their chat templates are rendered as transformers renders them.

Importing transformers takes seconds, and PyTorch comes with it where it is installed. What it does
with a tokenizer.json follows from a few fields. `_read` repeats it for the kinds that it knows, and
the tests compare the two. Every other folder, and every method that `Tokenizer` lacks, goes to
transformers.
"""

import fnmatch
import functools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvqjax._errors import UserError
from kvqjax._files import FileState, open_text, read_object, states_of
from kvqjax.model.gguf_file import is_gguf
from kvqjax.model.gguf_tokenizer import QWEN_PATTERN, build_tokenizer, use_metaspace

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Names of the files that a tokenizer is read from, here or by transformers.
READ_FILES = (
    "tokenizer*", "tekken*", "vocab*", "merges*", "*.model", "*.spm", "*.tiktoken", "*.jinja", "chat_template*",
    "special_tokens_map.json", "added_tokens.json", "config.json",
)  # fmt: skip
# Threads of a server may ask for a tokenizer at once, and transformers cannot be imported by two at
# once.
_OPENING = threading.RLock()
MORE_TEMPLATES = "additional_chat_templates"  # a folder of templates by name

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Classes that transformers builds anew from the vocabulary, with the special tokens that they have
# by default.
LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
QWEN = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
# Models whose tokenizer.json transformers takes as it is, whatever class the folder names.
AS_STORED = ("mistral", "mistral3", "ministral", "ministral3", "mixtral")
# Classes that take tokenizer.json as it is. The first one stands for all of them.
PLAIN = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")

# Names of a message's reasoning, the usual one first.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Options of `apply_chat_template` that have a meaning in transformers. Any other is a variable of
# the template.
FULL_OPTIONS = frozenset({
    "documents", "chat_template", "continue_final_message", "padding", "truncation", "max_length",
    "return_tensors", "tokenizer_kwargs", "return_assistant_tokens_mask", "sanitize_control_tokens",
})  # fmt: skip


# --- The tokenizer of a folder ---


class _Parts(NamedTuple):
    """What `Tokenizer` is made of.

    Attributes:
        backend: the tokenizer of the `tokenizers` library.
        named: special tokens by their names.
        template: the chat template, or None.
        tool_template: the one for conversations with tools, where that is another; None: `template`.
    """

    backend: Any
    named: dict[str, str]
    template: str | None
    tool_template: str | None = None


class _Unknown(Exception):
    """A tokenizer that transformers reads in a way which is not repeated here."""


def _require(holds: bool) -> None:
    """Leave a folder to transformers where a condition does not hold."""
    if not holds:
        raise _Unknown


def _text_of(token: Any) -> str | None:
    """Read the text of a special token, which files give as a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    _require(text is None or isinstance(text, str))
    return text


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one. Raises UserError."""
    return read_object(path) if path.is_file() else {}


def _class_of(settings: dict[str, Any], config: dict[str, Any], stored: dict[str, Any]) -> str:
    """Name the class that transformers takes: PLAIN[0] where it uses tokenizer.json as it is.

    Args:
        settings: tokenizer_config.json.
        config: config.json.
        stored: tokenizer.json."""
    kind = config.get("model_type")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(named, str) or not isinstance(kind, str):
        raise _Unknown
    if kind in AS_STORED:
        return PLAIN[0]
    if kind == "qwen2":
        return "Qwen2Tokenizer"
    named = named.removesuffix("Fast")
    if named in PLAIN:
        return PLAIN[0]
    if named == "LlamaTokenizer":
        # Some folders of byte-level tokenizers name this class too.
        parts = json.dumps([stored.get("pre_tokenizer"), stored.get("decoder")])
        if '"ByteLevel"' in parts:
            return PLAIN[0]
    return named


def _without_defaults(part: Any) -> Any:
    """Copy a part of tokenizer.json without the fields that differ in their writing alone."""
    if isinstance(part, list):
        return [_without_defaults(item) for item in part]
    if not isinstance(part, dict):
        return part
    ignored: tuple[str, ...] = ()
    if part.get("type") == "ByteLevel":
        ignored = ("trim_offsets", "add_prefix_space")
    return {key: _without_defaults(value) for key, value in part.items() if key not in ignored}


def _is_qwen(stored: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Say whether tokenizer.json holds what transformers builds for Qwen's tokenizers."""
    split = {
        "type": "Split",
        "pattern": {"Regex": QWEN_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    pre_tokenizer = {
        "type": "Sequence",
        "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}],
    }
    model = stored.get("model", {})
    unwanted = (
        "dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges",
        "continuing_subword_prefix", "end_of_word_suffix",
    )  # fmt: skip
    steps = (stored.get("pre_tokenizer") or {}).get("pretokenizers", [])
    prefixes = [step.get("add_prefix_space") for step in steps]
    return (
        model.get("type") == "BPE"
        and not any(model.get(key) for key in unwanted)
        and not any(prefixes)
        and not settings.get("add_prefix_space")
        and stored.get("normalizer") == {"type": "NFC"}
        and _without_defaults(stored.get("pre_tokenizer")) == pre_tokenizer
        and (stored.get("decoder") or {}).get("type") == "ByteLevel"
    )


def _build_llama(backend: Any, stored: dict[str, Any], settings: dict[str, Any]) -> None:
    """Give a tokenizer of SentencePiece's kind the parts that transformers gives it in place of the
    stored ones."""
    model = stored.get("model", {})
    _require(model.get("type") == "BPE")
    _require(bool(model.get("byte_fallback")) and bool(model.get("fuse_unk")))
    _require(not model.get("dropout") and not model.get("ignore_merges"))
    # A character that is no token is spelled in bytes, each of which must be one.
    vocabulary = model.get("vocab", {})
    _require(all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)))
    prefix = settings.get("add_prefix_space")  # absent: true
    if prefix is not None and not prefix:
        scheme = "never"
    elif settings.get("legacy"):
        scheme = "always"  # also behind a special token
    else:
        scheme = "first"
    use_metaspace(backend, scheme)


def _named_tokens(
    folder: Path, settings: dict[str, Any], defaults: dict[str, str]
) -> dict[str, str]:
    """Read the special tokens by their names, as the files of a folder give them.

    Args:
        settings: tokenizer_config.json.
        defaults: what the tokenizer's class has by default.

    Returns:
        The tokens, those with a usual name first."""
    tokens = {**defaults, **settings}
    # Older folders have the tokens in a file of their own.
    if "added_tokens_decoder" not in settings:
        tokens |= _json(folder / "special_tokens_map.json")
    names = [name for name in tokens if name.endswith("_token") and name not in NAMED]
    texts = {}
    for name in (*NAMED, *names):
        token = tokens.get(name)
        text = _text_of(token) if isinstance(token, str | dict) else None
        if text is not None:
            texts[name] = text
    return texts


def _check_added(backend: Any, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Refuse tokens that transformers would add to those of tokenizer.json, or change."""
    stored = backend.get_added_tokens_decoder()
    special = {token.content for token in stored.values() if token.special}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    _require(isinstance(extra, list))
    wanted = {*named.values(), *map(_text_of, extra)}
    _require(wanted <= special)
    settings_of_tokens = settings.get("added_tokens_decoder") or {}
    for number, fields in settings_of_tokens.items():
        token = stored.get(int(number))
        _require(token is not None and isinstance(fields, dict))
        for field, value in fields.items():
            if field != "__type":  # names transformers' class, and says nothing of the token
                _require(getattr(token, field) == value)


def _templates(folder: Path, settings: dict[str, Any]) -> tuple[str | None, str | None]:
    """Read a folder's chat template: of chat_template.jinja, else of tokenizer_config.json.

    Returns:
        (the template, the one for conversations with tools where that is another). Of several
        templates by name these are the default one and "tool_use"."""
    _require(not (folder / MORE_TEMPLATES).exists())
    _require(not list(folder.glob("chat_template_*.jinja")))
    file = folder / "chat_template.jinja"
    template = open_text(file) if file.is_file() else settings.get("chat_template")
    if template is None:  # some exporters write the template as processors have it
        template = _json(folder / "chat_template.json").get("chat_template")
    tool_template = None
    if isinstance(template, list):
        by_name = {item["name"]: item["template"] for item in template}
        template, tool_template = by_name.get("default"), by_name.get("tool_use")
        _require(template is not None)
    _require(template is None or isinstance(template, str))
    _require(tool_template is None or isinstance(tool_template, str))
    return template, tool_template


def _read(folder: Path) -> _Parts:
    """Read a folder's tokenizer. Raises _Unknown where transformers is needed, UserError for
    damaged files."""
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    _require(file.is_file() and not (folder / "tekken.json").exists())
    settings = _json(folder / "tokenizer_config.json")
    config = _json(folder / "config.json")
    stored = _json(file)
    for setting in ("auto_map", "split_special_tokens", "fix_mistral_regex"):
        _require(not settings.get(setting))
    kind = _class_of(settings, config, stored)
    _require(kind in (PLAIN[0], "LlamaTokenizer", "Qwen2Tokenizer"))
    # Where it is not BPE's, transformers changes the decoded text.
    if settings.get("clean_up_tokenization_spaces"):
        _require(stored.get("model", {}).get("type") == "BPE")
    if kind == "Qwen2Tokenizer":
        _require(_is_qwen(stored, settings))
    try:
        # The library's own reader refuses a byte-order mark.
        backend = Backend.from_str(open_text(file))
    except Exception as error:  # the library raises Exception itself
        raise UserError(f"{folder}: the tokenizer cannot be read: {error}") from error
    if kind == "LlamaTokenizer":
        _build_llama(backend, stored, settings)
    backend.no_truncation()
    backend.no_padding()
    defaults = {"LlamaTokenizer": LLAMA, "Qwen2Tokenizer": QWEN}.get(kind, {})
    padding = stored.get("padding")
    if padding:
        defaults = {"pad_token": padding["pad_token"], **defaults}
    named = _named_tokens(folder, settings, defaults)
    _check_added(backend, settings, named)
    template, tool_template = _templates(folder, settings)
    return _Parts(backend, named, template, tool_template)


def _transformers(folder: str) -> Any:
    """Open the tokenizer of transformers. For a GGUF file it is made of the parts that are built
    here. Raises UserError for a folder that transformers cannot read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if is_gguf(Path(folder)):
        backend, named, template = build_tokenizer(Path(folder))
        options = {"clean_up_tokenization_spaces": False, "model_max_length": 10**12, **named}
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **options)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        # The system's errors, transformers' own, and those of `tokenizers`, which raises Exception
        # itself.
        raise UserError(f"{folder}: the tokenizer cannot be read: {_reason(error)}") from error
    # Whole texts are encoded here; the cache's capacity is what is checked.
    tokenizer.model_max_length = 10**12
    template = Path(folder) / "chat_template.jinja"
    processor = Path(folder) / "chat_template.json"
    if isinstance(tokenizer.chat_template, str) and template.is_file():
        # transformers would keep a byte-order mark in every prompt.
        tokenizer.chat_template = open_text(template)
    elif tokenizer.chat_template is None and processor.is_file():
        tokenizer.chat_template = read_object(processor).get("chat_template")
    return tokenizer


def _reason(error: Exception) -> str:
    """Write a foreign error on one line, of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


# --- Chat templates ---


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the assistant wrote. The text is what
    stands inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Write JSON in a template. Jinja's own filter escapes what HTML would misread."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Make the environment that all templates run in. A checkpoint's template is a stranger's code:
    it runs in Jinja's sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json

    def format_now(format):
        return datetime.now().strftime(format)

    helpers: dict[str, Any] = {"raise_exception": _raise, "strftime_now": format_now}
    environment.globals.update(helpers)
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.lru_cache(maxsize=16)
def template_variables(source: str) -> frozenset[str]:
    """Find the variables that a chat template reads; none of one that cannot be read."""
    try:
        parsed = _environment().parse(source)
        return frozenset(meta.find_undeclared_variables(parsed))
    except jinja2.TemplateError:
        return frozenset()


def _is_plain(value: Any) -> bool:
    """Say whether a value is made of JSON's types alone, so that a template may see it."""
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _are_messages(conversation: Any) -> bool:
    """Say whether a conversation is a list of messages of JSON's types alone."""
    if not isinstance(conversation, list) or not conversation:
        return False
    return _is_plain(conversation) and all(type(message) is dict for message in conversation)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message without its empty fields, its reasoning under each name that templates
    read."""
    fields = {key: value for key, value in message.items() if value is not None}
    for name in REASONING:
        if name in fields:
            reasoning = fields[name]
            return {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _render(source: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Render a chat template of messages and variables of JSON's types alone.

    A template that refuses the conversation, or is in error, is refused with its own message or the
    place of its error.
    """
    context = {"tools": None, "documents": None} | variables
    try:
        conversation = [_message(message) for message in messages]
        return _compiled(source).render(messages=conversation, **context)
    except jinja2.TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
        raise UserError(f"the chat template cannot be read: {reason}") from error
    except Exception as error:  # jinja's, and whatever the template's expressions raise
        raise UserError(f"the chat template refuses these messages: {_reason(error)}") from error


# --- What users hold ---


class _Encoded(dict):
    """What calling a tokenizer gives: `input_ids` and `attention_mask`, by key or as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _numbers(ids: Any) -> Any:
    """Turn token ids, which may be arrays of any library, into an int or into lists."""
    if not isinstance(ids, list | tuple):
        return np.asarray(ids).tolist()
    return [int(item) if np.ndim(item) == 0 else _numbers(item) for item in ids]


class Tokenizer:
    """A tokenizer with the calls of a Hugging Face tokenizer.

    `tokenizer(text)["input_ids"]`, `encode`, `decode`, `batch_decode`, `apply_chat_template`,
    `chat_template`, the special tokens (`eos_token`, `eos_token_id` and the like), `len` and
    `get_vocab` need the `tokenizers` library alone. The first other attribute or option loads
    transformers' tokenizer of the same folder, which answers everything from then on. So does an
    attribute that is set.
    """

    def __init__(self, folder: str, parts: _Parts, files: tuple[FileState, ...] = ()):
        # Attributes that are set go to the substitute (`__setattr__`), but these do not.
        vars(self).update(_folder=folder, _parts=parts, _files=files, _substitute=None)

    def _take_substitute(self) -> Any:
        """Load transformers' tokenizer of the folder, which answers from now on."""
        with _OPENING:
            if self._substitute is None:
                if self._files:
                    _check_unchanged(self._folder, self._files)
                vars(self)["_substitute"] = _transformers(self._folder)
            return self._substitute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_folder", "_parts", "_files", "_substitute"):
            raise AttributeError(name)  # of an object that is being copied
        if self._substitute is None:
            stem = name.removesuffix("_id")
            if stem in NAMED or stem in self._parts.named:
                token = self._parts.named.get(stem)
                if name == stem or token is None:
                    return token
                return self._parts.backend.token_to_id(token)
        return getattr(self._take_substitute(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._take_substitute(), name, value)

    def __len__(self) -> int:
        if self._substitute is not None:
            return len(self._substitute)
        return self._parts.backend.get_vocab_size()

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        name = Path(self._folder).name
        return f"Tokenizer({name}: {len(self)} tokens, {self.special_tokens_map})"

    def __call__(
        self, text: Any, *arguments: Any, add_special_tokens: bool = True, **options: Any
    ) -> Any:
        """Encode a text, or a list of texts.

        Args:
            text: a string or a list of strings.
            arguments: further arguments, for transformers' tokenizer.
            add_special_tokens: put the tokenizer's own tokens around the text, as models were
                trained.
            options: further options, for transformers' tokenizer.

        Returns:
            `input_ids` and `attention_mask`, of each text for a list.
        """
        texts = [text] if isinstance(text, str) else text
        readable = isinstance(texts, list) and all(isinstance(item, str) for item in texts)
        if self._substitute is not None or arguments or options or not readable:
            return self._take_substitute()(
                text, *arguments, add_special_tokens=add_special_tokens, **options
            )
        backend = self._parts.backend
        # Texts are not padded to one length, so that every mask is ones.
        if isinstance(text, list):
            encoded = backend.encode_batch(text, add_special_tokens=add_special_tokens)
            rows = [item.ids for item in encoded]
            return _Encoded(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])
        ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        return _Encoded(input_ids=ids, attention_mask=[1] * len(ids))

    def encode(
        self, text: Any, *arguments: Any, add_special_tokens: bool = True, **options: Any
    ) -> list[int]:
        """Encode a text: its token ids."""
        if self._substitute is not None or arguments or options or not isinstance(text, str):
            return self._take_substitute().encode(
                text, *arguments, add_special_tokens=add_special_tokens, **options
            )
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Decode token ids: an id, a list or an array of them, to a text. A list of lists gives a
        list of texts."""
        if self._substitute is not None or any(options.values()):
            return self._take_substitute().decode(
                token_ids, skip_special_tokens=skip_special_tokens, **options
            )
        decode = functools.partial(
            self._parts.backend.decode, skip_special_tokens=skip_special_tokens
        )
        ids = _numbers(token_ids)
        if not isinstance(ids, list):
            return decode([ids])
        if ids and isinstance(ids[0], list):
            return [decode(row) for row in ids]
        return decode(ids)

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        """Decode rows of token ids, to a text each."""
        return [self.decode(row, skip_special_tokens, **options) for row in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Give the id of every token, by the token."""
        if self._substitute is not None:
            return self._substitute.get_vocab()
        return self._parts.backend.get_vocab()

    @property
    def backend_tokenizer(self) -> Any:
        """The object of the `tokenizers` library."""
        if self._substitute is not None:
            return self._substitute.backend_tokenizer
        return self._parts.backend

    @property
    def chat_template(self) -> Any:
        """The folder's chat template, or None."""
        if self._substitute is not None:
            return self._substitute.chat_template
        return self._parts.template

    @chat_template.setter
    def chat_template(self, value: Any) -> None:
        self._take_substitute().chat_template = value

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """Choose the template that renders a conversation.

        Args:
            chat_template: for transformers' tokenizer.
            tools: of the conversation, for which a folder may have a template of its own.

        Raises:
            ValueError: there is none.
        """
        if self._substitute is not None or chat_template is not None:
            return self._take_substitute().get_chat_template(chat_template, tools)
        template = self._parts.template
        if tools is not None and self._parts.tool_template is not None:
            template = self._parts.tool_template
        if template is None:
            raise UserError("this tokenizer has no chat template")
        return template

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by their names, such as eos_token."""
        if self._substitute is not None:
            return self._substitute.special_tokens_map
        return dict(self._parts.named)

    @property
    def all_special_tokens(self) -> list[str]:
        """Every special token."""
        if self._substitute is not None:
            return self._substitute.all_special_tokens
        added = self._parts.backend.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        # Each once, those with a name first.
        return list(dict.fromkeys([*self._parts.named.values(), *special]))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return [self.backend_tokenizer.token_to_id(token) for token in self.all_special_tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """Write a conversation as the model was trained to read it.

        Args:
            conversation: messages with a `role` and a `content`.
            add_generation_prompt: end with what begins the assistant's answer.
            tokenize: give token ids instead of the text.
            return_dict: give the ids as `__call__` does, not as a list.
            options: the template's own variables, such as tools (of JSON's types) and
                enable_thinking. Those that have a meaning in transformers go to its tokenizer.

        Returns:
            The text, or its token ids.

        Raises:
            UserError: for a conversation that the template refuses.
        """
        # A template is rendered here if its messages and options are plain.
        readable = _are_messages(conversation) and _is_plain(options)
        readable = readable and not FULL_OPTIONS & options.keys()
        if self._substitute is not None or not readable or not isinstance(self.chat_template, str):
            options |= {"add_generation_prompt": add_generation_prompt, "tokenize": tokenize}
            return self._take_substitute().apply_chat_template(
                conversation, return_dict=return_dict, **options
            )
        variables = self.special_tokens_map | options
        variables["add_generation_prompt"] = add_generation_prompt
        template = self.get_chat_template(tools=options.get("tools"))
        text = _render(template, conversation, **variables)
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]


def tokenizer_files(folder: str) -> tuple[FileState, ...]:
    """Find the files that a tokenizer is read from.

    Args:
        folder: the folder, or a GGUF file.

    Returns:
        Their states. () for a folder that is absent or has no tokenizer.
    """
    path = Path(folder)
    try:
        if is_gguf(path):
            return states_of([path])
        if not any((path / name).exists() for name in TOKENIZER_FILES):
            return ()
        files = [path / name for name in sorted(os.listdir(path)) if _is_read(name)]
        files += sorted((path / MORE_TEMPLATES).glob("*.jinja"))
        return states_of(files)
    except (OSError, ValueError):  # a ValueError is a path with a NUL in it
        return ()


def _is_read(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in READ_FILES)


def _check_unchanged(folder: str, files: tuple[FileState, ...]) -> None:
    """Raise UserError where the files of a tokenizer are others than they were."""
    if tokenizer_files(folder) != files:
        raise UserError(
            f"{folder}: the tokenizer's files changed since the model was loaded; load the model again"
        )


def open_tokenizer(folder: str, files: tuple[FileState, ...] = ()) -> Any:
    """Open the tokenizer of a model's folder. It is read once, and anew when its files have
    changed.

    Args:
        folder: the folder, or a GGUF file.
        files: what `tokenizer_files` gave when the model was loaded: a model keeps its tokenizer
            when another one is put in its place. (): the files of now.

    Returns:
        A `Tokenizer`, or transformers' own where the folder needs it.

    Raises:
        UserError: for a folder without a tokenizer, with a damaged one, or with other files than
            `files`.
    """
    with _OPENING:
        return _open_once(folder, files or tokenizer_files(folder))


@functools.lru_cache(maxsize=8)
def _open_once(folder: str, files: tuple[FileState, ...]) -> Any:
    """Open a tokenizer, whose files are a part of the key: files that changed are read anew."""
    if files:
        _check_unchanged(folder, files)
    if is_gguf(Path(folder)):
        return Tokenizer(folder, _Parts(*build_tokenizer(Path(folder))), files)
    if not files:
        raise UserError(f"{folder}: no tokenizer ({', '.join(TOKENIZER_FILES)}) in this folder")
    try:
        return Tokenizer(folder, _read(Path(folder)), files)
    except UserError:
        raise
    except Exception:  # _Unknown, and what fields of other types than usual raise
        return _transformers(folder)
