"""`kvqjax generate`: prompts continued through a cache."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvqjax._arguments import check_integer, whole_number
from kvqjax._errors import UserError
from kvqjax._tables import size
from kvqjax.cli.common import (
    MOST_HOSTS,
    Artifacts,
    Dtype,
    Json,
    Kernels,
    Mesh,
    ModelName,
    OneCache,
    PromptChunk,
    RopeLength,
    TextOnly,
    Weights,
    calibrated,
    methods_of,
    number,
    open_model,
    require_room,
    token_number,
)
from kvqjax.cli.environment import compiling_seconds
from kvqjax.cli.generate_options import read_generate_options, with_generate_options
from kvqjax.cli.output import announce, at_least, reporter
from kvqjax.cli.prompts import read_prompts
from kvqjax.generation.decoding import Generated, stream
from kvqjax.generation.decoding import generate as generate_text
from kvqjax.generation.prompt_chunks import AUTO
from kvqjax.generation.prompt_ids import continued_ids, encode_prompts, require_trained, room_of
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method
from kvqjax.model.loading import Model
from kvqjax.parallel.hosts import join_hosts, speaks

LONG = 2e12  # operations: seconds on a few cores, and measuring the rate takes 0.3 s
New = Annotated[int, number("--max-new-tokens", "-n", help="tokens to make, at most")]


def _print_stream(model: Model, prompts: list[Any], method: Method, options: dict) -> None:
    """Print the only row token by token. What a later token may still change comes with a later
    piece."""
    with compiling_seconds() as compiling:
        pieces = stream(model, prompts, method, stride=1, **options)
        for piece in pieces:
            typer.echo(piece.text[0], nl=False)
    typer.echo("")
    _announce_figures(pieces.result, sum(compiling, 0.0))


def _figures(result: Generated) -> dict[str, Any]:
    """What a generation took."""
    return {
        "seconds_to_first_token": round(result.seconds_to_first_token, 3),
        "tokens_per_second": round(result.tokens_per_second, 2),
        "cache_bytes": result.cache_bytes,
        "bits": result.bits,
    }


def _announce_figures(result: Generated, compiling: float) -> None:
    """Say on stderr what a generation took, `compiling` seconds of it for programs that are now
    kept."""
    new, fed = sum(map(len, result.tokens)), sum(result.prompt_tokens)
    announce(
        f"{fed} tokens read, first token after {result.seconds_to_first_token:.2f} s, {new} made at "
        f"{result.tokens_per_second:.1f} a second"
        f"{f' ({compiling:.1f} s of it compiling)' if compiling >= 0.1 else ''}; "
        f"cache {size(result.cache_bytes)}, {result.bits:.4g} bits a number"
    )


def _print_result(
    prompts: list[Any],
    result: Generated,
    method: Method,
    as_json: bool,
    chat: bool,
    compiling: float,
) -> None:
    if as_json:
        columns = zip(
            prompts,
            result.text,
            result.tokens,
            result.finish_reasons,
            result.prompt_tokens,
            strict=True,
        )
        rows = [
            {"prompt": p, "text": t, "tokens": len(k), "finish_reason": r, "prompt_tokens": n}
            for p, t, k, r, n in columns
        ]
        # Of all rows together.
        about = {"cache": str(method), **_figures(result), "seconds_compiling": round(compiling, 3)}
        typer.echo(json.dumps([row | about for row in rows], indent=1))
        return
    for text, prompt in zip(result.text, prompts, strict=True):
        typer.echo(text if chat else prompt + text)
    _announce_figures(result, compiling)


def _end_ids(model: Model, ends: list[str]) -> list[int] | None:
    """The tokens that --end names, by id or by text; None: the model's own."""
    ids = []
    for text in ends:
        number = whole_number(text)
        named = continued_ids(model, text) if number is None else [number]
        if len(named) != 1:
            raise UserError(
                f"--end {text!r} is {len(named)} tokens; wanted one, by its id or text; --stop takes text"
            )
        ids.append(check_integer("--end", named[0], 0, model.config.vocab_size - 1))
    return ids or None


def _announce_long(
    model: Model,
    prompts: list[Any],
    chat: bool,
    new: int,
    capacity: int | None,
    beyond_trained: bool,
) -> None:
    """Say how long prompts take at least, where that may be seconds. Raises UserError for those
    that are too long."""
    most = room_of(model, capacity, beyond_trained)
    counts = [len(ids) for ids in encode_prompts(model, prompts, chat, most=most)]
    require_trained(model, counts, new, beyond_trained)
    work = sum(prompt_operations(model.config, 0, count) for count in counts)
    if work > LONG and speaks():
        announce(f"prompts of {sum(counts)} tokens: {at_least(work)}")


def _keep_stdout_ours() -> None:
    """Send what libraries write to file descriptor 1 to stderr: gloo reports its connections
    there."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(stdout, "w")


@with_generate_options
def generate(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]", help="text to continue")
    ] = None,
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="the same as an option; repeatable")
    ] = [],  # noqa: B006
    file: Annotated[
        list[Path],
        typer.Option(
            "--file", "-f", help="a file whose text is one prompt; - is standard input; repeatable"
        ),
    ] = [],  # noqa: B006
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="a file with a prompt a line; .jsonl: strings, prompt or messages"
        ),
    ] = None,
    model: ModelName = "demo",
    cache: OneCache = "exact",
    artifact: Artifacts = [],  # noqa: B006
    max_new_tokens: New = 64,
    capacity: Annotated[
        int | None,
        token_number(help="most tokens a row may hold, also as 32k; default: what is needed"),
    ] = None,
    chunk: PromptChunk = None,
    in_chunks: Annotated[
        bool,
        typer.Option("--in-chunks", help="like --chunk, with N chosen for the chip and its memory"),
    ] = False,
    end: Annotated[
        list[str],
        typer.Option(
            help="end at this token, an id or its text, not at the model's own; repeatable"
        ),
    ] = [],  # noqa: B006
    chat: Annotated[
        bool, typer.Option("--chat", help="put the prompt through the chat template")
    ] = False,
    show_stream: Annotated[bool, typer.Option("--stream", help="print text as it is made")] = False,
    kernels: Kernels = "auto",
    dtype: Dtype = None,
    weights: Weights = None,
    text_only: TextOnly = False,
    rope_length: RopeLength = None,
    mesh: Mesh = "",
    coordinator: Annotated[
        str, typer.Option(help="host:port of process 0, for several hosts")
    ] = "",
    processes: Annotated[int, number(most=MOST_HOSTS, help="how many hosts run this command")] = 1,
    process: Annotated[
        int, number(least=0, most=MOST_HOSTS, help="which of them this is; 0 prints")
    ] = 0,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Continue one or more prompts through a compressed cache, on one device or on a mesh of
    them."""
    method = methods_of([cache])[0]
    prompts, chat = read_prompts(words or [], prompt, file, prompts_file, chat)
    generate_options = read_generate_options(options)
    if in_chunks and chunk is not None:
        raise UserError("--in-chunks and --chunk exclude each other")
    if show_stream and as_json:
        raise UserError("--stream and --json exclude each other")
    if show_stream and len(prompts) != 1:
        raise UserError(f"--stream shows one prompt, {len(prompts)} were given")
    if not coordinator and (processes, process) != (1, 0):
        raise UserError("--processes and --process need --coordinator, the address of process 0")
    if coordinator:
        _keep_stdout_ours()
        join_hosts(coordinator, processes, process)
    plain = open_model(model, dtype, weights, method, mesh, text_only, rope_length)
    loaded = calibrated(plain, [method], artifact)[0][0]
    generate_options |= {
        "max_new_tokens": max_new_tokens, "capacity": capacity, "chunk": AUTO if in_chunks else chunk,
        "eos_ids": _end_ids(loaded, end), "chat": chat, "kernels": kernels,
        "progress": reporter("prompt") if speaks() else None,
    }  # fmt: skip
    require_room(loaded, method, len(prompts), capacity or max_new_tokens)
    _announce_long(
        loaded, prompts, chat, max_new_tokens, capacity, generate_options["beyond_trained"]
    )
    if show_stream:
        _print_stream(loaded, prompts, method, generate_options)
        return
    with compiling_seconds() as compiling:
        result = generate_text(loaded, prompts, method, **generate_options)
    if speaks():
        _print_result(prompts, result, method, as_json, chat, sum(compiling, 0.0))
