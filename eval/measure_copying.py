"""The loss of a cache in structured text that is to be given back to the letter, such as JSON.

The answer passes through the cache behind its prompt, and every token sees what decoding one token
at a time would have shown it. Each prediction is made behind the right tokens (teacher forcing). Up
to the first wrong token this is what greedy decoding writes, so one pass gives both: the share of
tokens that are right, and where greedy decoding first goes wrong. An answer that is spelt in other
tokens counts as wrong where these begin.

The exact cache, whose divergence is 0, attends to the whole prompt whatever `chunk` is.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import MOST_SEED, check_counts, check_integer
from kvqjax._errors import UserError
from kvqjax.cache import Cache, CacheLayout
from kvqjax.cache.surgery import resize
from kvqjax.eval.measure_retrieval import encoded_problem
from kvqjax.eval.scores import tail, token_scores
from kvqjax.eval.stamp import bytes_of
from kvqjax.eval.structured import KINDS, STRUCTURED, Parts, Passage
from kvqjax.eval.windows import cache_layouts
from kvqjax.generation.loop import prefill_chunks, require_finite, shared
from kvqjax.generation.prompt_ids import padded
from kvqjax.generation.text import agreeing
from kvqjax.methods import Method, MethodLike, parse
from kvqjax.model.loading import Model
from kvqjax.step.checks import check_model
from kvqjax.step.chunks import concatenate
from kvqjax.step.forward import attend, commit
from kvqjax.step.new_cache import empty_cache
from kvqjax.step.prompt import prefill

QUESTION = 64  # tokens at the end of a prompt that are always read behind all others
STEP = 64  # tokens of an answer that pass at a time: logits of a row take 13 MB for 49152 tokens

Pairs = Sequence[tuple[Model, Method]]  # caches, and models with their constants

# --- Questions


class Question(NamedTuple):
    """A passage in a model's tokens."""

    prompt: list[int]
    answer: list[int]
    ends: np.ndarray  # characters of the answer up to the end of each of its tokens
    text: str  # of the answer
    decode: Callable[[list[int]], str]  # of the tokenizer
    parts: Parts  # of the text that are scored

    def tokens_of(self, part: tuple[int, int]) -> slice:
        """Find the tokens that hold a part, from one character up to another."""
        start, end = part
        first = np.searchsorted(self.ends, start, "right")  # it ends behind `start`
        last = np.searchsorted(self.ends, end, "left")  # it ends at `end` or behind it
        return slice(int(first), int(last) + 1)

    @property
    def scored(self) -> Bool[np.ndarray, " A"]:
        """Mark the tokens of the answer that are scored."""
        marks = np.zeros(len(self.answer), bool)
        for part in self.parts:
            marks[self.tokens_of(part)] = True
        return marks


def check_kind(kind: str) -> None:
    """Raise UserError for a kind of text that does not exist."""
    if kind not in KINDS:
        raise UserError(f"kind={kind!r}; known: {', '.join(KINDS)}")


def _spells(model: Model, text: str) -> bool:
    """Say whether the tokenizer has all characters of a text."""
    return model.tokenizer.decode(model.encode(text, False)) == text


def kinds_for(model: Model) -> tuple[str, ...]:
    """Choose the kinds whose characters the model's tokenizer has: all but "symbols", or "symbols"
    alone."""
    if _spells(model, '<a b="{0}: _, ---"/>\n'):
        return STRUCTURED
    return ("symbols",)


def _token_ends(model: Model, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Count the characters of an answer up to the end of each token."""
    ids = [*prompt, *answer]
    decode = model.tokenizer.decode
    sizes = []
    for place in range(len(prompt), len(ids)):
        # Some decoders leave out a blank before their first token, so each token is decoded behind
        # others.
        first = max(0, place - 4)
        before = decode(ids[first:place])
        sizes.append(len(decode(ids[first : place + 1])) - len(before))
    return np.cumsum(sizes)


def question(model: Model, passage: Passage, kind: str) -> Question:
    """Encode a passage. Raises UserError for a tokenizer that lacks some of its characters."""
    text = passage.problem.answer
    if not _spells(model, text):
        raise UserError(
            f"kind={kind!r}: this tokenizer lacks some of the characters; "
            "kind='symbols' has letters and digits alone"
        )
    prompt, answer = encoded_problem(model, passage.problem, kind)
    ends = _token_ends(model, prompt, answer)
    return Question(prompt, answer, ends, text, model.tokenizer.decode, passage.parts)


def questions(model: Model, kind: str, length: int, samples: int, seed: int) -> list[Question]:
    """Draw `samples` questions, each of at most `length` tokens with its answer. Raises UserError
    for a kind that does not exist or does not fit."""
    check_kind(kind)
    rng = np.random.default_rng(seed)

    def count(text: str) -> int:
        return len(model.encode(text))

    drawn = []
    for _ in range(samples):
        passage = KINDS[kind](rng, length, count)
        drawn.append(question(model, passage, kind))
    return drawn


# --- Answers


class Predicted(NamedTuple):
    """Predictions of the tokens of an answer: the likeliest tokens with the cache and with the
    exact one, and the divergence of each prediction in nats."""

    best: Int[np.ndarray, " A"]
    best_exact: Int[np.ndarray, " A"]
    kld: Float[np.ndarray, " A"]


@functools.partial(jax.jit, donate_argnames="cache")
def _passed(
    model: Model, cache: Cache, tokens: Int[Array, "B T"], counts: Int[Array, " B"]
) -> tuple[Cache, Float[Array, "B T V"]]:
    """Pass tokens of answers through a cache. Each sees what decoding would have shown it."""
    logits, pending = attend(model, tokens, counts, cache, within="step")
    return commit(model, cache, pending, counts), logits


@jax.jit
def _best_and_kld(
    logits: Float[Array, "B T V"], reference: Float[Array, "B T V"], targets: Int[Array, "B T"]
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    return logits.argmax(-1), token_scores(logits, reference, targets).kld


class Entry(NamedTuple):
    """How prompts enter a cache.

    Attributes:
        chunk: None: a prompt attends exactly; N: it passes through the cache N tokens at a time.
        apart: N: stretches of N tokens are read alone and put behind each other, all but the end of
            the prompt, which sees them all. None: the prompt is read as one text.
        recompute: how many first tokens of such a stretch are read anew.
    """

    chunk: int | None = None
    apart: int | None = None
    recompute: int = 0

    @property
    def mode(self) -> str:
        """Name it in reports."""
        if self.apart is not None:
            return f"apart{self.apart}-recompute{self.recompute}"
        return "prefill-exact" if self.chunk is None else f"in-the-loop-chunk{self.chunk}"


def check_entry(entry: Entry, length: int) -> None:
    """Raise UserError for numbers that cannot be, with texts of `length` tokens."""
    if entry.apart is None:
        if entry.recompute:
            raise UserError(
                f"recompute={entry.recompute} is of texts that are read apart; add apart"
            )
        return
    if entry.chunk is not None:
        raise UserError("texts that are read apart attend exactly; leave out chunk or apart")
    if entry.recompute >= entry.apart:
        raise UserError(f"recompute={entry.recompute}; wanted less than apart={entry.apart}")
    if entry.apart + QUESTION > length:
        raise UserError(
            f"apart={entry.apart}: of {length} tokens the last {QUESTION} and more are read behind "
            "all others"
        )


def _filled(
    model: Model, layout: CacheLayout, prompts: np.ndarray, counts: np.ndarray, entry: Entry
) -> Cache:
    """Make a cache that holds the prompts."""
    if entry.apart is not None:
        return _put_together(model, layout, prompts, counts, entry)
    cache = empty_cache(model, layout, len(prompts))
    if entry.chunk is None:
        tokens, lengths = shared(model, (prompts, counts))
        return prefill(model, tokens, lengths, cache)[1]
    return prefill_chunks(model, prompts, counts, cache, min(entry.chunk, prompts.shape[1]))[1]


def _put_together(
    model: Model, layout: CacheLayout, prompts: np.ndarray, counts: np.ndarray, entry: Entry
) -> Cache:
    """Read stretches of the prompts alone, and put them behind each other. The end of a prompt,
    where the question is, is read behind all of them."""
    assert entry.apart is not None
    size = entry.apart
    stretches = np.maximum(counts - QUESTION, 0) // size  # of every row
    if not stretches.any():
        return _filled(model, layout, prompts, counts, Entry())
    small = dataclasses.replace(layout, capacity=size)
    texts = []
    caches = []
    for number in range(int(stretches.max())):
        text = prompts[:, number * size : (number + 1) * size]
        counts_here = np.where(number < stretches, size, 0).astype(np.int32)
        tokens, lengths = shared(model, (text, counts_here))
        # Rows that have fewer stretches stay as they are.
        _, cache = prefill(model, tokens, lengths, empty_cache(model, small, len(prompts)))
        caches.append(cache)
        texts.append(tokens)
    first = resize(caches[0], layout.capacity)
    # One after the other, so that one program serves all of them.
    for text, cache in zip(texts[1:], caches[1:], strict=True):
        first = concatenate([first, cache], model=model, tokens=[text], recompute=entry.recompute)
    # The rest of each row: where a row has fewer tokens than others, any token fills it up.
    start = stretches * size
    index = start[:, None] + np.arange(size + QUESTION)
    index = np.minimum(index, prompts.shape[1] - 1)
    rest = np.take_along_axis(prompts, index, 1)
    tokens, lengths = shared(model, (rest, counts - start))
    cache, _ = _passed(model, first, tokens, lengths)
    return cache


def predictions(
    pairs: Pairs,
    batch: list[Question],
    length: int,
    entry: Entry,
    kernels: str = "auto",
) -> list[list[Predicted]]:
    """Predict the answers of a batch of questions, each of at most `length` tokens, through several
    caches beside one exact cache. Options are those of `copying`."""
    rows = len(batch)
    # A prompt's last token predicts the first one of the answer.
    prompts = padded([part.prompt[:-1] for part in batch], length)
    sizes = np.asarray([len(part.prompt) - 1 for part in batch], np.int32)
    plain = pairs[0][0].replace(constants=())
    layouts = []
    for model, method in pairs:
        layouts.append(cache_layouts(model, plain, method, rows, length, kernels))
    caches = []
    for (model, _), (coded_layout, _) in zip(pairs, layouts, strict=True):
        caches.append(_filled(model, coded_layout, prompts, sizes, entry))
    _, exact_layout = layouts[0]  # the same for all
    reference = _filled(plain, exact_layout, prompts, sizes, Entry())
    # Tokens pass STEP at a time, so rows have room for a last step that is not full.
    inputs = padded([[part.prompt[-1], *part.answer[:-1]] for part in batch], length + STEP)
    targets = padded([part.answer for part in batch], length + STEP)
    counts = np.asarray([len(part.answer) for part in batch], np.int32)
    best_exact = []
    best: list[list] = [[] for _ in pairs]
    klds: list[list] = [[] for _ in pairs]
    for start in range(0, int(counts.max()), STEP):
        place = slice(start, start + STEP)
        counts_here = np.clip(counts - start, 0, STEP)
        tokens, wanted, new = shared(plain, (inputs[:, place], targets[:, place], counts_here))
        reference, expected = _passed(plain, reference, tokens, new)
        best_exact.append(np.asarray(expected.argmax(-1)))
        for number, (model, _) in enumerate(pairs):
            caches[number], logits = _passed(model, caches[number], tokens, new)
            likeliest, kld = _best_and_kld(logits, expected, wanted)
            best[number].append(np.asarray(likeliest))
            klds[number].append(np.asarray(kld))
    for cache in caches:
        require_finite(cache)
    of_exact = np.concatenate(best_exact, axis=1)
    of_caches = []
    for number in range(len(pairs)):
        of_cache = np.concatenate(best[number], axis=1)
        kld = np.concatenate(klds[number], axis=1)
        answers = []
        for row, count in enumerate(counts):
            answers.append(
                Predicted(of_cache[row, :count], of_exact[row, :count], kld[row, :count])
            )
        of_caches.append(answers)
    return of_caches


class Answered(NamedTuple):
    """How one answer was given back: the share of its scored characters before the first wrong one,
    and which tokens and parts are right."""

    first_wrong: float
    tokens: Bool[np.ndarray, " N"]
    parts: Bool[np.ndarray, " P"]


def scored(asked: Question, best: Int[np.ndarray, " A"]) -> Answered:
    """Score predicted tokens of an answer."""
    marks = asked.scored
    right = best == np.asarray(asked.answer)
    parts = np.asarray([right[asked.tokens_of(part)].all() for part in asked.parts])
    wrong = np.flatnonzero(marks & ~right)
    place = len(asked.text)  # of the first wrong character
    if wrong.size:
        first = wrong[0]
        written = asked.decode([*asked.answer[:first], int(best[first])])
        place = agreeing(written, asked.text)
    before = 0
    characters = 0
    for start, end in asked.parts:
        before += min(max(place - start, 0), end - start)
        characters += end - start
    return Answered(before / characters, right[marks], parts)


def copying(
    model: Model,
    method: MethodLike,
    *,
    kind: str = "json",
    length: int = 1024,
    samples: int = 4,
    chunk: int | None = None,
    apart: int | None = None,
    recompute: int = 0,
    seed: int = 0,
    batch: int = 4,
    kernels: str = "auto",
    progress=lambda fraction: None,
) -> dict[str, Any]:
    """Measure how much of a structured text is given back to the letter, and the divergence from
    the exact cache over the answers.

    Args:
        model: the model, with the method's constants.
        method: the cache's.
        kind: "json" or "xml" (a document, which the prompt has twice), "fields" (two fields of each
            of some records of a JSON document), "chain" (ten calls found in a log, each with the
            result of the one before as its argument), or "symbols" (letters and digits at random,
            once, for models without the other characters).
        length: tokens of a text, answer included.
        samples: how many texts.
        chunk: None: the prompt attends exactly; N: it passes through the cache N tokens at a time.
        apart: N: stretches of N tokens of the prompt are read alone and put behind each other by
            `kvqjax.concatenate`; the end of the prompt, of 64 tokens and more, sees them all. Only
            the exact cache beside it still reads the prompt as one text.
        recompute: how many first tokens of such a stretch are read anew.
        seed: of the texts.
        batch: texts at a time.
        kernels: as in `init_cache`.
        progress: `progress(fraction)` is called as batches finish.

    Returns:
        A row of the report. `exact` is the share of answers without a wrong character,
            `first_wrong` the median share of an answer before the first wrong character of greedy
            decoding. With the right text before each token, `right` is the share of tokens that are
            right, `right_exact` that share with the exact cache, and `parts` the share of records,
            fields, arguments and results, or spans of symbols that are right throughout. `kld` and
            `kld_p999` are those of `perplexity`.

    Raises:
        UserError: a kind that does not exist, texts that do not fit, a model without a tokenizer,
            or one whose tokenizer lacks characters.
    """
    check_model(model)
    (row,) = copies(
        [(model, parse(method))],
        kind=kind,
        length=length,
        samples=samples,
        entry=Entry(chunk, apart, recompute),
        seed=seed,
        batch=batch,
        kernels=kernels,
        progress=progress,
    )
    return row


def copies(
    pairs: Pairs,
    *,
    kind: str,
    length: int,
    samples: int,
    entry: Entry,
    seed: int,
    batch: int,
    kernels: str,
    progress: Callable[[float], None],
) -> list[dict[str, Any]]:
    """Measure several caches on the same texts, with one pass of the exact cache for all.
    Arguments, rows and errors are those of `copying`."""
    check_counts(length=length, samples=samples, chunk=entry.chunk, batch=batch, apart=entry.apart)
    check_integer("recompute", entry.recompute, 0)
    check_entry(entry, length)
    check_integer("seed", seed, 0, MOST_SEED)
    drawn = questions(pairs[0][0], kind, length, samples, seed)
    predicted: list[list[Predicted]] = [[] for _ in pairs]
    for start in range(0, samples, batch):
        part = drawn[start : start + batch]
        answers = predictions(pairs, part, length, entry, kernels)
        for rows, new in zip(predicted, answers, strict=True):
            rows += new
        progress(min(1.0, (start + batch) / samples))
    about = {"mode": entry.mode, "kind": kind, "length": length, "samples": samples}
    report = []
    for (model, method), rows in zip(pairs, predicted, strict=True):
        sizes = bytes_of(model, method, length)
        report.append({"cache": str(method), **about, **sizes, **_figures(drawn, rows)})
    return report


def _figures(asked: Sequence[Question], predicted: Sequence[Predicted]) -> dict[str, float]:
    """Compute the figures of a row of the report."""
    answers = []
    answers_exact = []
    klds = []
    for part, row in zip(asked, predicted, strict=True):
        answers.append(scored(part, row.best))
        answers_exact.append(scored(part, row.best_exact))
        klds.append(row.kld[part.scored])
    all_klds = np.concatenate(klds)
    return {
        "exact": float(np.mean([answer.tokens.all() for answer in answers])),
        "first_wrong": float(np.median([answer.first_wrong for answer in answers])),
        "right": float(np.concatenate([answer.tokens for answer in answers]).mean()),
        "right_exact": float(np.concatenate([answer.tokens for answer in answers_exact]).mean()),
        "parts": float(np.concatenate([answer.parts for answer in answers]).mean()),
        "kld": float(all_klds.mean()),
        "kld_p999": tail(all_klds),
    }
