"""`kvqjax demo`: a real model answers a question about a text, through exact and compressed caches.
If that model cannot be downloaded, the bundled model continues a prompt."""

import json
import time
from pathlib import Path
from typing import Annotated

import jax
import typer

from kvqjax._files import open_text
from kvqjax._tables import table, terminal_width
from kvqjax.cache import Cache, runs_of
from kvqjax.cache.accounting import ledger
from kvqjax.cli.common import Json, methods_of, number, open_model, require_room
from kvqjax.cli.output import announce, show
from kvqjax.generation.decoding import Generated, generate
from kvqjax.methods import Method
from kvqjax.model.fetch import FETCHED, model_at_hand
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import init_cache

# --- A question to the real model ---

REAL = "smollm2"
# 1900 tokens; the fact asked for is amid it
TEXT = Path(__file__).parent.parent / "assets" / "texts" / "harbour.txt"
QUESTION = "What is the secret password of the harbour safe?"
# KIVI misreads a word of the answer with 2 bits; HIGGS does not. AQUA-KV would be nearer to the
# exact cache, but its calibration takes minutes.
ANSWERING = ("exact", "kivi:bits=4", "higgs:bits=2", "kivi:bits=2")
ANSWER_TOKENS = 32  # the answer has 17; a cache that goes astray ends soon after it
STRIDE = 4  # tokens a call: the first call compiles, and the speed is that of the others

# --- A prompt that the bundled model continues ---

BUNDLED = "demo"
# As in the everyday sentences that the bundled model has learnt
DEMO_PROMPT = "The baker came home after the rain."
LONG = 32768  # tokens of a cache in which the window hardly counts
CAPACITY = 1024  # tokens of each cache
NEW_TOKENS = 160  # of the continuation
DEMO_CACHES = ("exact", "kivi:bits=4,window=64", "kivi:bits=2,window=64")
# Drawn with one seed for all caches: a greedy choice of a model this small soon goes round in
# circles.
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 0}


def demo(
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", help="question about the text; for other models: text to continue"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="smollm2 answers, any other continues; default: smollm2, or else the bundled demo",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        number(
            "--max-new-tokens", "-n", help="of an answer; default: 32, and 160 of a continuation"
        ),
    ] = None,
    capacity: Annotated[
        int | None,
        number(
            help="tokens each cache is made for; default: what is needed, and 1024 for a continuation"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a real model about a text, through exact and compressed caches.

    The model, SmolLM2-135M-Instruct, is fetched first (98 MB, Apache-2.0). Answers, bytes and speed
    are compared. If the model cannot be downloaded, or with --model demo, the bundled model
    continues a prompt instead.
    """
    if model is None:
        model = model_at_hand(REAL, BUNDLED, tell=announce)
    if model == REAL:
        question = QUESTION if prompt is None else prompt
        # The text's length decides on the capacity, where none is given.
        _answer(question, max_new_tokens or ANSWER_TOKENS, capacity, as_json)
    else:
        beginning = DEMO_PROMPT if prompt is None else prompt
        new = max_new_tokens or NEW_TOKENS
        _continue(model, beginning, new, capacity or CAPACITY, as_json)


# --- A question to the real model ---


def _answer(question: str, new: int, capacity: int | None, as_json: bool) -> None:
    """Ask for a fact of `TEXT` through every cache of `ANSWERING`."""
    loaded = open_model(REAL, None)
    text = open_text(TEXT)
    words = len(text.split())
    message = {"role": "user", "content": f"{text}\n\n{question}"}
    announce(f"a question about {TEXT.name}, {words} words, through {', then '.join(ANSWERING)}")
    rows = []
    tokens = 0  # of the prompt
    room = 0  # tokens that a cache is made for; both are the same for all methods
    for method in methods_of(ANSWERING):
        result = generate(
            loaded,
            [[message]],
            method,
            chat=True,
            max_new_tokens=new,
            capacity=capacity,
            stride=STRIDE,
        )
        rows.append(
            {"cache": str(method), "bits": result.bits, "bytes": result.cache_bytes,
             "tokens_per_second": result.tokens_per_second, "answer": result.text[0].strip()}
        )  # fmt: skip
        tokens = result.prompt_tokens[0]
        room = result.cache.layout.capacity
    title = f"{FETCHED[REAL].title} reads a text and a question, {tokens} tokens: {question}"
    note = (
        f"bits: of a number of a key or value, scales and the exact window included. bytes: of a cache made for {room} "
        f"tokens. tokens per second: of the answer, after the text was read. The text: {TEXT}"
    )
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    # Equal answers stand in every row, and not once below the table.
    lines = table(rows, terminal_width(), title, note, alike=False)
    typer.echo("\n".join(lines))


# --- A prompt that the bundled model continues ---


def _timed(
    model: Model, method: Method, prompt: str, new: int, capacity: int
) -> tuple[Generated, float]:
    """Continue a prompt twice: the first run compiles.

    Returns:
        (the continuation, tokens per second of the second run)."""
    options = {"max_new_tokens": new, "capacity": capacity, **SAMPLING}
    generate(model, [prompt], method, **options)
    start = time.perf_counter()
    result = generate(model, [prompt], method, **options)
    seconds = time.perf_counter() - start
    return result, len(result.tokens[0]) / seconds


def _described(model: Model, method: Method, capacity: int) -> Cache:
    """Describe a cache of one row by the shapes of its arrays, without allocating them."""
    return jax.eval_shape(lambda: init_cache(model, method, 1, capacity))


def explain(model: Model, method: Method, tokens: int, capacity: int) -> str:
    """Say how many of a row's `tokens` tokens are codes in its cache of `capacity`, and where its
    bits come from."""
    cache = _described(model, method, capacity)
    book = ledger(cache)
    long_book = ledger(_described(model, method, LONG))
    clocks = []
    for run in runs_of(cache.layout):
        clocks += run.wiring.storage.clocks
    window = max(clock.window for clock in clocks)
    unit = max(clock.unit for clock in clocks)
    encoded = max(0, (tokens - method.sinks - window) // unit * unit)
    return (
        f"window={window}: the newest {window} tokens stay exact. Older ones are encoded {unit} at a time: "
        f"here at least {encoded} of {tokens} tokens were read as codes.\n"
        f"bits_stored counts all bytes of a cache made for {capacity} tokens. The codes and scales of {method} have "
        f"{book.bits_method:.3g} bits a number; the window makes that {book.bits_stored:.3g}, "
        f"and in a cache for {LONG} tokens {long_book.bits_stored:.3g}."
    )


def _continue(model: str, prompt: str, max_new_tokens: int, capacity: int, as_json: bool) -> None:
    """Continue one prompt with the exact cache and with KIVI at 4 and 2 bits."""
    loaded = open_model(model, None)
    announce(
        f"{max_new_tokens} new tokens with {', then '.join(DEMO_CACHES)}; each twice, for its speed"
    )
    rows = []
    exact: list[int] = []  # the tokens of the first cache, which is exact
    new = 0  # tokens of the last continuation
    for method in methods_of(DEMO_CACHES):
        require_room(loaded, method, 1, capacity)
        result, speed = _timed(loaded, method, prompt, max_new_tokens, capacity)
        tokens = result.tokens[0]
        new = len(tokens)
        exact = exact or tokens
        book = ledger(_described(loaded, method, capacity))
        agreement, same_until = _agreement(exact, tokens)
        rows.append(
            {"cache": str(method), "bytes": book.bytes, "bits_stored": book.bits_stored, "tokens_per_second": speed,
             "agreement": agreement, "same_until": same_until, "text": result.text[0]}
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    title = f"{model}: {max_new_tokens} new tokens through caches of {capacity} tokens"
    _print_demo(prompt, rows, title)
    row_tokens = len(loaded.encode(prompt)) + new
    typer.echo(explain(loaded, method, row_tokens, capacity))


def _agreement(exact: list[int], tokens: list[int]) -> tuple[float, int]:
    """Compare a continuation with that of the exact cache, token by token.

    Returns:
        (the share of the exact tokens that it has in their places, how many agree before the first
        that does not)."""
    # One of the two may have ended earlier.
    equal = [a == b for a, b in zip(exact, tokens, strict=False)]
    agreement = sum(equal) / max(len(exact), 1)
    same_until = equal.index(False) if False in equal else len(tokens)
    return agreement, same_until


def _print_demo(prompt: str, rows: list[dict], title: str) -> None:
    """Print the prompt, every cache's text, and a table of their figures."""
    typer.echo(f"prompt\n{prompt}")
    for row in rows:
        typer.echo(f"\n{row['cache']}\n{row['text'].strip()}")
    figures = []
    for row in rows:
        shown = {name: row[name] for name in ("cache", "bytes", "bits_stored", "tokens_per_second")}
        shown["tokens_as_exact"] = f"{row['agreement']:.0%}, the first {row['same_until']}"
        figures.append(shown)
    typer.echo()
    show(figures, False, title)
