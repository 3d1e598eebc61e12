"""Long contexts on SmolLM2-135M-Instruct: a prompt attends to itself exactly, what comes next reads
a cache's codes.

One exact pass over a text serves all caches. It gives the input of every layer, of which keys,
values or whatever a method stores are computed and encoded without attention (`extended`). That is
what `kvqjax.prefill` stores. Then:

- continued: SPAN tokens behind each of CONTEXTS pass through the cache, and are scored against the
  exact pass.
- decode: the same for SPANS spans behind DECODED_FROM, in the first window of each text: does the
  error grow?
- retrieval: questions about lines of a text, all on one cache of that text. `needle` hides the
  lines in a book, `pairs` has no others. A question counts if the exact cache answers it.

A cache's file is written after every text, so that a run which was stopped goes on there.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich.progress import Progress

import kvqjax
from benchmarks.results import rows
from benchmarks.results.rows import CONTEXT, Texts, about_of, book_of, calibrated
from kvqjax.cache import Cache, at_layer, runs_of
from kvqjax.calibrate import sequences
from kvqjax.data.corpora import read
from kvqjax.eval.scores import negative_log_likelihood, token_scores
from kvqjax.eval.synthetic import bury, sentences_of
from kvqjax.methods import exact
from kvqjax.model import decoder
from kvqjax.model.loading import Model
from kvqjax.step.checks import run_constants
from kvqjax.step.new_cache import empty_cache, planned_layout
from kvqjax.step.prompt import exact_layer, path_of

FOLDER = rows.FOLDER / "long"
LENGTH = 8192  # tokens that the model was trained for
# Tokens that are encoded, pass through a cache, and are averaged together.
PIECE, STEP, SPAN = (
    512,
    64,
    256,
)
CONTEXTS = (1024, 4096, 7680)
ONCE = tuple((context, 1) for context in CONTEXTS)
DECODED_FROM, SPANS = 2048, 8
WINDOWS = {"WikiText-2": 2, "book": 2}
LENGTHS, QUESTIONS, DIGITS = (1024, 4096, 8192), 16, 4
ASKED = 16  # tokens of a question and its answer
TASKS = ("needle", "pairs")
PLAN = {
    "continued": [*CONTEXTS, SPAN],
    "decode": [DECODED_FROM, SPANS],
    "step": STEP,
    "retrieval": [*LENGTHS, QUESTIONS, DIGITS],
}
NUMBERS = ("nll", "kld", "agree")
EXACT = "exact"
# With their own windows: at these lengths these are a small share. Those that learn from text come
# last.
CACHES = (
    EXACT,
    "uniform:bits=4",
    "kivi:bits=4",
    "kivi:bits=2",
    "higgs:bits=4",
    "higgs:bits=2,dim=4",
    "turboquant:bits=4,sinks=4",
    "kvarn:bits=2,sinks=4",
    "xquant_cl:bits=4",
    "kvquant:bits=3",
    "commvq:bits=2",
    "klt:bits=2.0",
    "aqua:bits=2.2,backbone=klt",
)
# A calibration serves every window: the one that the rows of windows of 1024 made is taken.
CALIBRATED_AS = {"commvq:bits=2": "commvq:bits=2,window=0"}


class Passage(NamedTuple):
    """A text of at most LENGTH tokens. `questions`: ids of a question and of its answer. `spans`:
    pairs of a context and of how many spans behind it are scored."""

    name: str
    ids: np.ndarray
    questions: tuple[tuple[list[int], list[int]], ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


# --- Texts


def _words(model: Model, text: str) -> list[str]:
    """Words of the text that are one token behind a space, in the order of the alphabet."""
    plain = {
        word
        for word in text.lower().split()
        if word.isascii() and word.isalpha() and 4 <= len(word) <= 8
    }
    return sorted(word for word in plain if len(model.encode(f" {word}")) == 1)


def retrieval_passage(model: Model, task: str, length: int, text: str) -> Passage:
    """Lines "word: number" of `length` tokens in all, hidden in the text (`needle`) or without any
    (`pairs`), and QUESTIONS questions about them, spread evenly from the first line to the last for
    `pairs`."""
    rng = np.random.default_rng((length, TASKS.index(task)))

    def count(part):
        return len(model.encode(part))

    room = length - 2 * ASKED  # a question and its answer fit behind
    words = rng.permutation(_words(model, text))
    number = QUESTIONS if task == "needle" else room // count("word: 0000")
    lines = {str(word): "".join(map(str, rng.integers(0, 10, DIGITS))) for word in words[:number]}
    if task == "needle":
        needles = [f"\n{word}: {value}\n" for word, value in lines.items()]
        context = bury(rng, needles, "", "", room, count, 0.0, sentences_of(text)).prompt
    else:
        while (
            count(context := "".join(f"{word}: {value}\n" for word, value in lines.items())) > room
        ):
            lines.popitem()
    questions = []
    for place in np.linspace(0, len(lines) - 1, QUESTIONS).round().astype(int):
        word, value = list(lines.items())[place]
        ask, line = model.encode(f"\n{word}:"), model.encode(f"\n{word}: {value}")
        questions.append((ask, line[len(ask) :]))
    return Passage(
        f"{task} {length}", np.asarray(model.encode(context), np.int32), tuple(questions)
    )


def passages_of(model: Model, wikitext: str, book: str, folder: Path | None) -> list[Passage]:
    """All texts. Raises UserError for one that cannot be read."""
    data = {"WikiText-2": read(wikitext, folder=folder), "book": read(book)}
    retrieval = [
        retrieval_passage(model, task, length, data["book"].text)
        for length in LENGTHS
        for task in TASKS
    ]
    continued, decoded = [], []
    for name, count in WINDOWS.items():
        pieces = sequences(model, data[name], count, LENGTH)
        continued.append([Passage(f"{name} {i}", ids, (), ONCE) for i, ids in enumerate(pieces)])
        steps = pieces[0][: DECODED_FROM + SPANS * SPAN + 1]
        decoded.append(Passage(decode_name(name), steps, (), ((DECODED_FROM, SPANS),)))
    first, *further = zip(*continued, strict=True)
    short = sum(length <= LENGTH // 2 for length in LENGTHS) * len(TASKS)
    # A run that is stopped has something of everything.
    return [
        *retrieval[:short],
        *decoded,
        *first,
        *retrieval[short:],
        *(passage for row in further for passage in row),
    ]


def decode_name(text: str) -> str:
    """The name of the long decode of a text."""
    return f"{text}, decoded"


# --- The exact pass


def _nothing(sources, finite) -> tuple:
    """Store nothing of a layer's tokens."""
    return ()


@jax.jit
def _above(model: Model, index: Int[Array, ""], h: Float[Array, "1 T E"], counts: Int[Array, " 1"]):
    """Compute the output of layer `index` by exact attention."""
    layout = planned_layout(model, exact(), 1, LENGTH)
    return exact_layer(
        model, runs_of(layout)[0], index, {}, h, counts, path_of(layout, *h.shape[:2]), _nothing
    )[1]


def layer_inputs(model: Model, ids: np.ndarray) -> np.ndarray:
    """The input of every layer and the last one's output, float32 [L + 1, T, E] (0.6 GB at 8192
    tokens). T is rounded up to whole pieces; what is behind the text means nothing."""
    tokens = jnp.asarray(np.pad(ids, (0, -len(ids) % PIECE)))[None]
    counts, h = jnp.asarray([len(ids)]), decoder.embed(model.params, tokens, model.config)
    inputs = [np.asarray(h[0])]
    for index in range(model.config.num_layers):
        h = _above(model, jnp.int32(index), h, counts)
        inputs.append(np.asarray(h[0]))
    return np.stack(inputs)


# --- Through a cache


@functools.partial(jax.jit, donate_argnames="cache")
def extended(
    model: Model, cache: Cache, inputs: Float[Array, "L 1 T E"], counts: Int[Array, " 1"]
) -> Cache:
    """Append tokens whose layers' inputs are known, without attention."""
    positions = cache.lengths[:, None] + jnp.arange(inputs.shape[2])[None]
    pending = []
    for run, constants in zip(
        runs_of(cache.layout), run_constants(model.constants, cache.layout), strict=True
    ):

        def capture(index, h, run=run, constants=constants):
            weights = decoder.layer(model.params, run.first + index)
            projected = decoder.project(weights, h, positions, model.config, run.first)
            return index + 1, run.wiring.maps.capture(
                weights, at_layer(constants, index), projected, positions
            )

        pending.append(
            jax.lax.scan(capture, jnp.int32(0), inputs[run.first : run.first + run.count])[1]
        )
    return kvqjax.commit(model, cache, tuple(pending), counts)


@functools.partial(jax.jit, donate_argnames="cache")
def followed(model: Model, cache: Cache, tokens: Int[Array, " N+1"], outputs: Float[Array, "N E"]):
    """Pass N tokens through the cache, STEP at a time, each of which sees what it would see one by
    one.

    Args:
        model: the model with the method's constants.
        cache: the cache, which is donated.
        tokens: the tokens and the one behind them.
        outputs: what the exact pass's last layer made of them.

    Returns:
        The cache, and the scores of the N predictions [N] by name.
    """

    def split(x):
        return x.reshape(-1, 1, STEP, *x.shape[1:])

    counts = jnp.full((1,), STEP, jnp.int32)

    def step(cache, piece):
        inputs, targets, h = piece
        logits, pending = kvqjax.attend(model, inputs, counts, cache, within="step")
        reference = decoder.unembed(model.params, h, model.config)
        scores = token_scores(logits, reference, targets)
        means = {name: getattr(scores, name) for name in NUMBERS}
        means["nll_exact"] = negative_log_likelihood(reference, targets)
        return kvqjax.commit(model, cache, pending, counts), means

    cache, scores = jax.lax.scan(step, cache, tuple(map(split, (tokens[:-1], tokens[1:], outputs))))
    return cache, {name: x.reshape(-1) for name, x in scores.items()}


@jax.jit
def _choices(
    model: Model, cache: Cache, tokens: Int[Array, "1 T"], counts: Int[Array, " 1"]
) -> Int[Array, " T"]:
    """The likeliest token after each of `tokens`, which the cache does not keep."""
    return kvqjax.attend(model, tokens, counts, cache)[0][0].argmax(-1)


def answered(model: Model, cache: Cache, question: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding gives the whole answer: each of its tokens is the likeliest behind
    those before it."""
    ids = [*question, *answer]
    tokens = jnp.asarray(np.pad(ids, (0, ASKED - len(ids))))[None]
    choices = np.asarray(_choices(model, cache, tokens, jnp.asarray([len(ids)])))
    return choices[len(question) - 1 : len(ids) - 1].tolist() == answer


def _filled(model: Model, cache: Cache, inputs: np.ndarray, start: int, end: int) -> Cache:
    """Append the tokens from `start` to `end` of a passage, a piece at a time."""
    for first in range(start, end, PIECE):
        piece = jnp.asarray(inputs[:-1, None, first : first + PIECE])
        cache = extended(model, cache, piece, jnp.asarray([min(PIECE, end - first)]))
    return cache


def _spans(
    model: Model, cache: Cache, passage: Passage, inputs: np.ndarray, start: int, count: int
) -> dict:
    """Means over `count` spans behind `start` tokens, which the cache holds."""
    means: dict[str, list[float]] = {}
    for first in range(start, start + count * SPAN, SPAN):
        tokens, outputs = passage.ids[first : first + SPAN + 1], inputs[-1, first : first + SPAN]
        cache, scores = followed(model, cache, jnp.asarray(tokens), jnp.asarray(outputs))
        for name, x in scores.items():
            means.setdefault(name, []).append(float(f"{np.asarray(x, np.float64).mean():.7g}"))
    return means


def measure(model: Model, method: kvqjax.Method, passage: Passage, inputs: np.ndarray) -> Any:
    """One cache on one passage: which questions it answers, or means of the spans behind each
    context."""
    cache, filled = empty_cache(model, planned_layout(model, method, 1, LENGTH), 1), 0
    if passage.questions:
        cache = _filled(model, cache, inputs, 0, len(passage.ids))
        return [answered(model, cache, *question) for question in passage.questions]
    spans = {}
    for context, count in passage.spans:
        cache, filled = _filled(model, cache, inputs, filled, context), context
        spans[str(context)] = _spans(model, kvqjax.fork(cache), passage, inputs, context, count)
    return spans


# --- Rows


def path_of_long(cache: str) -> Path:
    """The file of a cache."""
    return FOLDER / rows.path_of(cache).name


def row_of(model: Model, cache: str, about: dict[str, Any]) -> dict[str, Any]:
    """The row on disk if it has the same stamp, else one without measurements."""
    path = path_of_long(cache)
    row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if row and row["about"] == about:
        return row
    bits = {
        str(size): book_of(model, kvqjax.parse(cache), size).bits_stored
        for size in (*CONTEXTS, CONTEXT)
    }
    return {"cache": cache, "bits_at": bits, "parts": {}, "about": about}


def run_long(
    model: Model, texts: Texts, passages: list[Passage], caches: list[str], bar: Progress
) -> None:
    """Measure what is missing of every cache on every passage."""
    about = about_of(model, texts) | {"plan": PLAN}
    rows_by_cache = {cache: row_of(model, cache, about) for cache in caches}

    def missing(passage: Passage) -> list[str]:
        """The caches to be measured on a passage. The exact one's spans are what others are
        compared with."""
        scored = [cache for cache in caches if passage.questions or cache != EXACT]
        return [cache for cache in scored if passage.name not in rows_by_cache[cache]["parts"]]

    todo = [passage for passage in passages if missing(passage)]
    task = bar.add_task("long contexts", total=sum(len(missing(passage)) for passage in todo))
    FOLDER.mkdir(parents=True, exist_ok=True)
    model_for: Callable[[str], Model] = functools.cache(lambda cache: _ready(model, texts, cache))
    for passage in todo:
        bar.update(task, description=f"{passage.name}: exact pass")
        inputs = layer_inputs(model, passage.ids)
        for cache in missing(passage):
            bar.update(task, description=f"{passage.name}: {cache}")
            row = rows_by_cache[cache]
            row["parts"][passage.name] = measure(
                model_for(cache), kvqjax.parse(cache), passage, inputs
            )
            path_of_long(cache).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            bar.advance(task)


def _ready(model: Model, texts: Texts, cache: str) -> Model:
    """The model with the constants of a cache."""
    return calibrated(model, kvqjax.parse(CALIBRATED_AS.get(cache, cache)), texts)[0]
