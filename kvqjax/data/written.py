"""Calibration data that the model writes itself, for where no text is at hand.

A row begins with the token that begins texts alone, with a word of the vocabulary, or with a question
in the chat template. The model goes on by sampling, behind its end tokens too, until the row is full.
LLM-QAT (arXiv 2305.17888) and self-calibration (arXiv 2410.17170) quantise models by such data.
"""

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from kvqjax._errors import UserError
from kvqjax._folders import user_folder
from kvqjax._timing import Bar, silent
from kvqjax._version import __version__
from kvqjax.data.documents import Data, described
from kvqjax.generation.decoding import stream
from kvqjax.generation.prompt_ids import chat_text, has_chat_template, room_of
from kvqjax.model.loading import Model
from kvqjax.model.tokenizer_calls import decoded

LENGTH = 1024  # tokens of a row, where the model was trained for as many
BEGINNING = 128  # tokens that a row may begin with: system messages of chat templates take most
# Around 1 a model writes what it expects of texts. At 0.8 half of the rows of SmolLM2-135M go round
# in circles.
TEMPERATURES = (1.0, 0.9, 1.2)
# Keeps a text together at all of these, and needs no sort of the vocabulary as top-p does.
MIN_P = 0.02
LEAST_ROWS = 4  # of a short calibration, so that it sees several beginnings
ROWS = 16  # at a time, at most: an exact cache of 16 x 1024 tokens takes 2 GB with 128 KB a token
# Rows of 1024 tokens by people repeat 1 to 25 of 100 spans of four tokens; one that repeats more
# than half of them has gone round in circles for at least that long.
SPAN, LEAST_NEW = 4, 0.5
DRAWS = 1000  # from the vocabulary until a word comes; most tokens are one
ATTEMPTS = 3  # rows that are written for each that is wanted, at most
QUESTIONS = (
    "Tell me about {}.",
    "Write a story in which {} matters.",
    "Explain {} step by step.",
    "Write a short program that has to do with {}.",
    "List what one should know about {}.",
)


def variety(row: Int[np.ndarray, " T"]) -> float:
    """Say which share of a row's spans of SPAN tokens are different ones; 1 where none comes again."""
    spans = np.lib.stride_tricks.sliding_window_view(row, min(SPAN, len(row)))
    return len(np.unique(spans, axis=0)) / len(spans)


class _Beginnings:
    """Draws what rows begin with."""

    def __init__(self, model: Model, most: int):
        self._model, self._most = model, most
        self._tokenizer: Any = model.tokenizer if model.has_tokenizer else None
        begin = model.config.bos_id
        self._begin = [] if begin is None else [begin]
        self._kinds = [self._word]
        if self._begin:
            self._kinds.insert(0, lambda rng: self._begin)
        if self._tokenizer is not None and has_chat_template(model):
            self._kinds.append(self._question)

    def draw(self, rng: np.random.Generator, number: int) -> list[int]:
        """Give the ids that row `number` begins with: kinds take turns."""
        return self._kinds[number % len(self._kinds)](rng)

    def _token(self, rng: np.random.Generator) -> int:
        """Draw a token; smaller ids, which most tokenizers give to frequent words, are likelier."""
        return int(self._model.config.vocab_size * rng.random() ** 2)

    def _text(self, rng: np.random.Generator) -> str:
        """Draw a word, a number or a sign that a text may begin with."""
        for _ in range(DRAWS):
            token = self._token(rng)
            if token not in self._tokenizer.all_special_ids:
                text = decoded(self._tokenizer, [token], True)
                if text.strip() and text.isprintable() and "\ufffd" not in text:
                    return text.strip()
        raise UserError("self: the tokenizer's vocabulary has no words; calibrate on a text")

    def _word(self, rng: np.random.Generator) -> list[int]:
        """A word as the tokenizer encodes it; any token where there is no tokenizer."""
        if self._tokenizer is None:
            return [*self._begin, self._token(rng)]
        return self._model.encode(self._text(rng))

    def _question(self, rng: np.random.Generator) -> list[int]:
        """A question in the chat template; a word where the template alone is too long."""
        question = str(rng.choice(QUESTIONS)).format(self._text(rng))
        text = chat_text(self._model, [{"role": "user", "content": question}])
        ids = self._model.encode(text, add_special_tokens=False)
        return ids if len(ids) <= self._most else self._word(rng)


class Rows(NamedTuple):
    """Rows [N, T] of token ids, how many batches were written for them, and how many rows that was."""

    tokens: Int[np.ndarray, "N T"]
    batches: int
    written: int


def _sizes(model: Model, tokens: int) -> tuple[int, int]:
    """How many tokens a row begins with at most, and how many it has."""
    room = room_of(model, None, False) or LENGTH + BEGINNING
    beginning = min(BEGINNING, room // 3)
    share = -(-tokens // LEAST_ROWS)
    return beginning, min(LENGTH, room - beginning, max(2 * beginning, share))


def _batch(
    model: Model,
    sizes: tuple[int, int],
    seed: int,
    number: int,
    row_numbers: range,
    progress: Callable[[float], None],
) -> Int[np.ndarray, "N T"]:
    """Write one batch of rows, all of one temperature."""
    most, length = sizes
    rng = np.random.default_rng((seed, number))
    beginnings = _Beginnings(model, most)
    prompts = [beginnings.draw(rng, row) for row in row_numbers]
    new = length - min(map(len, prompts))
    pieces = stream(
        model,
        prompts,
        max_new_tokens=new,
        capacity=most + length,
        seed=int(rng.integers(1 << 32)),
        temperature=TEMPERATURES[number % len(TEMPERATURES)],
        min_p=MIN_P,
        ignore_eos=True,
    )
    tokens_written = 0
    for piece in pieces:
        tokens_written += len(piece.tokens[0])
        progress(tokens_written / new)
    rows = [
        [*prompt, *ids][:length] for prompt, ids in zip(prompts, pieces.result.tokens, strict=True)
    ]
    return np.asarray(rows, np.int32)


def _file(model: Model, sizes: tuple[int, int], seed: int, count: int) -> Path | None:
    """The file that keeps the rows from one run to the next; None for a model that has no
    fingerprint, and for a user without a home."""
    if not model.fingerprint:
        return None
    dtype = str(model.params["norm"].dtype)
    recipe = (TEMPERATURES, MIN_P, SPAN, LEAST_NEW, QUESTIONS)
    about = [__version__, model.fingerprint, model.weights, dtype, seed, count, sizes, recipe]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    try:
        return user_folder("texts") / f"{digest}.npz"
    except UserError:
        return None


def _read(file: Path | None, length: int) -> Rows:
    """Read the rows that an earlier run kept: none where the file is missing or broken."""
    nothing = Rows(np.zeros((0, length), np.int32), 0, 0)
    if file is None or not file.is_file():
        return nothing
    try:
        with np.load(file, allow_pickle=False) as stored:
            rows = Rows(stored["tokens"], int(stored["batches"]), int(stored["written"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return nothing
    return rows


def _keep(file: Path | None, rows: Rows) -> None:
    """Replace the file at once. A folder that cannot be written only means that rows are not kept."""
    if file is None:
        return
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            np.savez(stream, **rows._asdict())
        os.replace(part, file)


def rows(
    model: Model,
    tokens: int,
    seed: int = 0,
    bar: Bar = silent,
) -> Int[np.ndarray, "N T"]:
    """Let a model write.

    The rows that were written are kept in the user's cache folder after every batch. A run that was
    killed goes on there, and another method's calibration finds the rows finished.

    Args:
        model: that writes. Its tokenizer is used for beginnings, where it has one.
        tokens: how many are wanted at least.
        seed: of all draws: the same model, seed and tokens give the same rows.
        bar: `bar(label)` is called before anything is written, and gives a function that is told
            which part is done.

    Returns:
        Token ids. A row has LENGTH tokens, or fewer where the model was trained for fewer.

    Raises:
        UserError: most rows go round in circles, or the model's numbers are not finite.
    """
    sizes = _sizes(model, tokens)
    length = sizes[1]
    count = -(-tokens // length)
    at_once = min(ROWS, -(-count // len(TEMPERATURES)))
    file = _file(model, sizes, seed, count)
    done = _read(file, length)
    if len(done.tokens) >= count:
        return done.tokens
    progress = bar("writing the text")
    while (missing := count - len(done.tokens)) > 0:
        if done.written >= ATTEMPTS * count:
            bad = done.written - len(done.tokens)
            cause = f"self: {bad} of {done.written} rows that this model wrote go round in circles"
            raise UserError(f"{cause}; calibrate on a text")
        size, written = min(at_once, missing), done.written

        def tell(fraction: float, size: int = size, written: int = written) -> None:
            progress((written + fraction * size) / max(count, written + size))

        numbers = range(written, written + size)
        batch = _batch(model, sizes, seed, done.batches, numbers, tell)
        good = [row for row in batch if variety(row) >= LEAST_NEW]
        done = Rows(
            np.concatenate([done.tokens, *(row[None] for row in good)]),
            done.batches + 1,
            written + size,
        )
        _keep(file, done)
    return done.tokens


def written(
    model: Model,
    tokens: int,
    seed: int = 0,
    bar: Bar = silent,
) -> Data:
    """Let a model write, and give the rows as documents with their tokens. There is no text where
    the model has no tokenizer. Arguments and errors are those of `rows`."""
    ids = rows(model, tokens, seed, bar)
    about = {"name": "self", "seed": seed, "rows": len(ids), "tokens": ids.size}
    if not model.has_tokenizer:
        about["sha256"] = hashlib.sha256(ids.tobytes()).hexdigest()
        return Data((), about, ids.reshape(-1))
    documents = [decoded(model.tokenizer, row.tolist(), True) for row in ids]
    data = described("self", documents)
    return Data(data.documents, data.about | about, ids.reshape(-1))
