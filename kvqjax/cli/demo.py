"""`kvqjax demo`: one prompt through three caches."""

import json
import time
from typing import Annotated

import jax
import typer

from kvqjax.cache import runs_of
from kvqjax.cache.accounting import ledger
from kvqjax.cli.common import Json, ModelName, methods_of, number, open_model, require_room
from kvqjax.cli.output import announce, show
from kvqjax.cli.run import New
from kvqjax.generation.decoding import Generated, generate
from kvqjax.methods import Method
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import init_cache

__all__ = ["demo", "explain"]

DEMO_PROMPT = "The baker came home after the rain."  # as in the everyday sentences that the bundled model has learnt
LONG = 32768  # tokens of a cache in which the window hardly counts
DEMO_CACHES = ("exact", "kivi:bits=4,window=64", "kivi:bits=2,window=64")
# Drawn with one seed for all caches: a greedy choice of a model this small soon goes round in circles.
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 0}


def _timed(model: Model, method: Method, prompt: str, new: int, capacity: int) -> tuple[Generated, float]:
    """The continuation, and tokens per second of a second run, when everything is compiled."""
    options = {"max_new_tokens": new, "capacity": capacity, **SAMPLING}
    generate(model, [prompt], method, **options)
    start = time.perf_counter()
    result = generate(model, [prompt], method, **options)
    return result, len(result.tokens[0]) / (time.perf_counter() - start)


def explain(model: Model, method: Method, tokens: int, capacity: int) -> str:
    """Say how many of a row's `tokens` tokens are codes in its cache of `capacity`, and where its bits come from."""
    cache = jax.eval_shape(lambda: init_cache(model, method, 1, capacity))
    book, long = ledger(cache), ledger(jax.eval_shape(lambda: init_cache(model, method, 1, LONG)))
    clocks = [clock for run in runs_of(cache.layout) for clock in run.wiring.storage.clocks]
    window, unit = max(clock.window for clock in clocks), max(clock.unit for clock in clocks)
    encoded = max(0, (tokens - method.sinks - window) // unit * unit)
    return (
        f"window={window}: the newest {window} tokens stay exact. Older ones are encoded {unit} at a time: "
        f"here at least {encoded} of {tokens} tokens were read as codes.\n"
        f"bits_stored counts all bytes of a cache made for {capacity} tokens. The codes and scales of {method} have "
        f"{book.bits_method:.3g} bits a number; the window makes that {book.bits_stored:.3g}, "
        f"and in a cache for {LONG} tokens {long.bits_stored:.3g}."
    )


def demo(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="text to continue")] = DEMO_PROMPT,
    model: ModelName = "demo",
    max_new_tokens: New = 160,
    capacity: Annotated[int, number(help="tokens each cache is made for")] = 1024,
    as_json: Json = False,
) -> None:
    """Continue one prompt with the exact cache and with KIVI at 4 and 2 bits; compare text, bytes and speed."""
    loaded, rows, first = open_model(model, None), [], None
    announce(f"{max_new_tokens} new tokens with {', then '.join(DEMO_CACHES)}; each twice, for its speed")
    for method in methods_of(DEMO_CACHES):
        require_room(loaded, method, 1, capacity)
        made, speed = _timed(loaded, method, prompt, max_new_tokens, capacity)
        text, tokens = made.text, made.tokens
        book = ledger(jax.eval_shape(lambda method=method: init_cache(loaded, method, 1, capacity)))
        first = first or tokens[0]
        same = next((i for i, (a, b) in enumerate(zip(first, tokens[0], strict=False)) if a != b), len(tokens[0]))
        agree = sum(a == b for a, b in zip(first, tokens[0], strict=False)) / max(len(first), 1)
        rows.append(
            {"cache": str(method), "bytes": book.bytes, "bits_stored": book.bits_stored, "tokens_per_second": speed,
             "agreement": agree, "same_until": same, "text": text[0]}
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    _print_demo(prompt, rows, f"{model}: {max_new_tokens} new tokens through caches of {capacity} tokens")
    typer.echo(explain(loaded, method, len(loaded.encode(prompt)) + len(tokens[0]), capacity))


def _print_demo(prompt: str, rows: list[dict], title: str) -> None:
    typer.echo(f"prompt\n{prompt}")
    for row in rows:
        typer.echo(f"\n{row['cache']}\n{row['text'].strip()}")
    plain = []
    for row in rows:
        equal = f"{row['agreement']:.0%}, the first {row['same_until']}"
        plain.append({name: row[name] for name in ("cache", "bytes", "bits_stored", "tokens_per_second")})
        plain[-1]["tokens_as_exact"] = equal
    typer.echo()
    show(plain, False, title)
