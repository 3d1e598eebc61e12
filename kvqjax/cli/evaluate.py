"""`kvqjax eval ppl|retrieval|copy|drift|harness|compare`: several caches side by side."""

import functools
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvqjax._arguments import whole_number
from kvqjax._errors import UserError
from kvqjax.cli.common import (
    MOST_ROWS,
    Batch,
    DataName,
    Field,
    Folder,
    PromptChunk,
    Split,
    calibrated,
    number,
    token_number,
)
from kvqjax.cli.report import Job, add_command
from kvqjax.data import read, token_ids
from kvqjax.eval.comparison import COMPARED, comparison
from kvqjax.eval.stamp import CONTEXT
from kvqjax.methods import Method
from kvqjax.model.loading import Model

app = typer.Typer(
    help="Measure the quality of caches: every token passes through them.",
    no_args_is_help=True,
    add_completion=False,
)

Context = Annotated[
    int,
    token_number(
        "--context",
        least=32,
        help="tokens of a row for which bits and bytes are counted, also as 32k",
    ),
]
Chunk = Annotated[int, number("--chunk", help="tokens that enter the cache at a time")]


ROWS = 8  # of a harness's batch, where nothing is said

_command = functools.partial(add_command, app)


def _encoded(
    model: Model, data: str, tokens: int, **options: Any
) -> tuple[np.ndarray, dict[str, Any]]:
    """Token ids of data, and what the report says of it. `options`: the other arguments of
    `kvqjax.data.read`."""
    texts = read(data, model=model, tokens=tokens, **options)
    ids = token_ids(model, texts)
    return ids, {"data": texts.about | {"tokens": len(ids)}}


@_command("demo")
def ppl(
    loaded: Model,
    seed: int,
    data: DataName = "synthetic",
    field: Field = None,
    split: Split = None,
    folder: Folder = None,
    mode: Annotated[
        list[str],
        typer.Option(
            help="loop: every token passes through the cache; prefill: the first half of a window is exact; repeatable"
        ),
    ] = ["loop"],  # noqa: B006
    windows: Annotated[str, typer.Option(help="gptq, aqua or llama-perplexity")] = "gptq",
    chunk: Annotated[
        list[int], number(help="tokens that enter the cache at a time; repeatable")
    ] = [],  # noqa: B006
    window: Annotated[
        int | None, number(least=2, help="tokens per window; default: the windows' own")
    ] = None,
    tokens: Annotated[
        int, number(least=0, help="about how many tokens in all; 0: the whole text")
    ] = 8192,
    batch: Batch = 4,
    context: Context = CONTEXT,
) -> Job:
    """Measure perplexity, KL divergence from the exact cache, and how often both put the same token
    first."""
    from kvqjax.eval.windows import check_mode, perplexity, style
    from kvqjax.eval.windows import windows as cut

    length = style(windows).length if window is None else window
    for kind in mode:
        check_mode(kind, 1, length)
    ids, about = _encoded(loaded, data, tokens, field=field, split=split, folder=folder, seed=seed)
    cut(ids, length, tokens)  # says now if the text is too short
    fixed = {"cut": windows, "window": window, "tokens": tokens, "batch": batch, "context": context}

    def evaluate(model, method, bar, kernels):
        for kind in mode:
            for size in chunk or [None]:
                update = bar(f"{method} {kind} {size or ''}")
                yield perplexity(
                    model,
                    ids,
                    method,
                    mode=kind,
                    chunk=size,
                    kernels=kernels,
                    progress=update,
                    **fixed,
                )

    read = min(tokens or len(ids), len(ids)) * len(mode) * max(1, len(chunk))
    return Job(context, evaluate, about, read, length=length)


@_command("recall")
def retrieval(
    loaded: Model,
    seed: int,
    task: Annotated[
        str, typer.Option(help="kv (stored pairs), passkey, multikey, variables or needle")
    ] = "kv",
    length: Annotated[
        list[int], token_number(least=32, help="prompt tokens, also as 4k; repeatable")
    ] = [256, 512],  # noqa: B006
    samples: Annotated[int, number(most=MOST_ROWS, help="prompts of each length")] = 16,
    depths: Annotated[int, number(help="how many spans of depth are reported")] = 4,
    chunk: PromptChunk = None,
    data: Annotated[
        str | None, typer.Option("--data", help="data whose sentences hide the needle")
    ] = None,
    field: Field = None,
    split: Split = None,
    folder: Folder = None,
) -> Job:
    """Measure which share of hidden values, pass keys or needles is found again, by prompt length
    and depth."""
    from kvqjax.eval.measure_retrieval import generator
    from kvqjax.eval.measure_retrieval import retrieval as run

    hay, about = None, {"name": "synthetic"}
    if data is not None:
        hay = read(data, field=field, split=split, folder=folder, model=loaded, seed=seed)
        about = hay.about
    generator(task, hay)  # says now if there is none
    fixed = {
        "task": task,
        "samples": samples,
        "chunk": chunk,
        "seed": seed,
        "bins": depths,
        "hay": hay,
    }

    def evaluate(model, method, bar, kernels):
        options_of_run: dict[str, Any] = fixed | {"kernels": kernels}
        return [
            run(model, method, length=size, progress=bar(f"{method} {size}"), **options_of_run)
            for size in length
        ]

    return Job(max(length), evaluate, {"data": about}, sum(length) * samples, length=max(length))


@_command("recall")
def copy(
    loaded: Model,
    seed: int,
    kind: Annotated[
        list[str],
        typer.Option(
            help="json, xml, fields, chain, or symbols; repeatable; default: by the tokenizer"
        ),
    ] = [],  # noqa: B006
    length: Annotated[
        list[int],
        token_number(least=32, help="tokens of a text and its answer, also as 4k; repeatable"),
    ] = [1024],  # noqa: B006
    samples: Annotated[int, number(most=MOST_ROWS, help="texts of each kind and length")] = 4,
    chunk: Annotated[
        list[int],
        number(
            help="prompts pass through the cache, N tokens at a time; default: exact prefill; repeatable"
        ),
    ] = [],  # noqa: B006
    apart: Annotated[
        int | None,
        token_number(
            least=32,
            help="stretches of N tokens are read alone and put behind each other, also as 1k",
        ),
    ] = None,
    recompute: Annotated[
        list[int],
        number(least=0, help="first tokens of such a stretch that are read anew; repeatable"),
    ] = [],  # noqa: B006
    batch: Batch = 4,
) -> Job:
    """Measure how much of JSON, XML, fields and arguments of calls is given back to the letter."""
    from kvqjax.eval.measure_copying import Entry, check_entry, copies, kinds_for, questions

    kinds = kind or kinds_for(loaded)
    runs = [(size, name) for size in length for name in kinds]
    entries = [Entry(by, apart, first) for by in chunk or [None] for first in recompute or [0]]
    for size, name in runs:
        questions(loaded, name, size, 1, seed)  # says now if there are none
        for entry in entries:
            check_entry(entry, size)
    fixed = {"samples": samples, "seed": seed, "batch": batch}
    pairs: list[tuple[Model, Method]] = []
    rows: list[dict[str, Any]] = []  # of all caches: they share the passes of the exact one

    def ready(model, methods, folders, bar):
        pairs.extend(calibrated(model, methods, folders))
        return pairs

    def measure(bar, kernels):
        for size, name in runs:
            for entry in entries:
                update = bar(f"{name} {size} {entry.mode}")
                options: dict[str, Any] = fixed | {"entry": entry, "kernels": kernels}
                rows.extend(copies(pairs, kind=name, length=size, progress=update, **options))

    def evaluate(model, method, bar, kernels):
        if not rows:
            measure(bar, kernels)
        return [row for row in rows if row["cache"] == str(method)]

    tokens = sum(length) * len(kinds) * samples * len(entries)
    about = {"data": {"name": "synthetic"}}
    return Job(max(length), evaluate, about, tokens, ready, length=max(length))


@_command("demo")
def drift(
    loaded: Model,
    seed: int,
    data: DataName = "synthetic",
    field: Field = None,
    split: Split = None,
    folder: Folder = None,
    chunk: Chunk = 1,
    window: Annotated[int, number(least=2, help="decode steps")] = 512,
    tokens: Annotated[int, number(help="about how many tokens in all")] = 2048,
    bins: Annotated[int, number(help="how many spans of steps are reported")] = 8,
) -> Job:
    """Measure how the KL divergence from the exact cache grows with the number of decoding
    steps."""
    from kvqjax.eval.windows import check_drift, windows
    from kvqjax.eval.windows import drift as run

    check_drift(chunk, window)
    ids, about = _encoded(loaded, data, tokens, field=field, split=split, folder=folder, seed=seed)
    windows(ids, window, tokens)  # says now if the text is too short
    fixed = {"chunk": chunk, "window": window, "tokens": tokens, "bins": bins}

    def evaluate(model, method, bar, kernels):
        return [run(model, ids, method, kernels=kernels, progress=bar(str(method)), **fixed)]

    return Job(window, evaluate, about, min(tokens, len(ids)), length=window)


def _rows_at_once(text: str) -> int:
    """The harness's batch size: a number, or "auto", which it lets a model choose."""
    if text.partition(":")[0] == "auto":
        return ROWS
    rows = whole_number(text) or 0
    if not 1 <= rows <= MOST_ROWS:
        raise UserError(f"--batch {text!r}; wanted a whole number from 1 to {MOST_ROWS}, or auto")
    return rows


@_command("demo")
def harness(
    loaded: Model,
    seed: int,
    task: Annotated[
        list[str],
        typer.Option(
            "--tasks",
            "--task",
            "-t",
            help="tasks or groups of lm-evaluation-harness: a,b; repeatable",
        ),
    ],
    include: Annotated[
        Path | None,
        typer.Option(
            "--include",
            "--include-path",
            "--include_path",
            help="a folder with YAML files of more tasks",
        ),
    ] = None,
    shots: Annotated[
        int | None,
        number(
            "--shots",
            "--num-fewshot",
            "--num_fewshot",
            "-f",
            least=0,
            most=1000,
            help="worked examples; default: the task's own number",
        ),
    ] = None,
    limit: Annotated[
        float | None,
        number(
            "--limit",
            "-L",
            least=0,
            help="samples of every task, or below 1 a share of them; default: all",
        ),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option("--samples", "-E", help='JSON, which samples: {"gsm8k": [0, 1, 2]}'),
    ] = None,
    max_length: Annotated[
        int | None,
        number(
            "--max-length",
            "--max_length",
            least=2,
            help="longest text in tokens; default: the model's positions",
        ),
    ] = None,
    cut: Annotated[str, typer.Option(help="where a longer text is cut: left or middle")] = "left",
    chunk: Annotated[
        int | None,
        number(
            help="tokens that enter the cache at a time; default: prompts exactly, scored texts by 32"
        ),
    ] = None,
    batch: Annotated[
        str,
        typer.Option(
            "--batch", "--batch-size", "--batch_size", "-b", help="rows at a time, or auto"
        ),
    ] = str(ROWS),
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            "--apply-chat-template",
            "--apply_chat_template",
            help="put prompts through the chat template",
        ),
    ] = False,
    metadata: Annotated[
        list[str], typer.Option(help="JSON or key=value for tasks that make their data; repeatable")
    ] = [],  # noqa: B006
) -> Job:
    """Run tasks of lm-evaluation-harness with all tokens passing through the cache. Options that
    lm-eval has too mean what they mean there."""
    from kvqjax.eval.harness import CacheLM, cut_warning, read_metadata, read_samples, run_harness
    from kvqjax.eval.stamp import bytes_of

    length, rows_at_once = max_length or loaded.config.max_position, _rows_at_once(batch)
    tasks = [name.strip() for names in task for name in names.split(",") if name.strip()]
    options: dict[str, Any] = {
        "shots": shots,
        "limit": limit,
        "samples": read_samples(samples),
        "seed": seed,
    }
    options |= {"include": include, "chat": chat, "metadata": read_metadata(metadata)}

    def evaluate(model, method, bar, kernels):
        update, sizes = bar(str(method)), bytes_of(model, method, length)
        options_of_run = {
            "chunk": chunk,
            "batch": rows_at_once,
            "max_length": length,
            "cut": cut,
            "kernels": kernels,
        }
        rows = run_harness(CacheLM(model, method, **options_of_run), tasks, **options)
        update(1.0)
        return [row | sizes for row in rows]

    about = {
        "data": {"name": "lm-evaluation-harness"},
        "tasks": tasks,
        "limit": limit,
        "samples": options["samples"],
    }
    about = {name: value for name, value in about.items() if value is not None}
    return Job(
        length, evaluate, about, 0, warn=lambda rows: cut_warning(rows, length), length=length
    )


@_command("demo", cache=list(COMPARED), plot=Path("compare.png"))
def compare(
    loaded: Model,
    seed: int,
    data: DataName = "synthetic",
    field: Field = None,
    split: Split = None,
    folder: Folder = None,
    chunk: Chunk = 32,
    window: Annotated[
        int | None,
        number(least=2, help="tokens per window; default: 1024, or the model's positions"),
    ] = None,
    tokens: Annotated[
        int, number(least=0, help="about how many tokens are scored or precede them; 0: all")
    ] = 8192,
    batch: Batch = 4,
    context: Context = CONTEXT,
    sequences: Annotated[
        int | None, number(help="to calibrate with; default: the method's recipe")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="keeps calibrations; default: the user's cache folder")
    ] = None,
) -> Job:
    """Compare several methods by bits and KL divergence, as a table and a picture; calibrates those
    that need it.

    Methods learn from the first half of the text. Of each window of the second half, the second
    half is scored: by then caches hold more than what stays exact. `kvq.compare` gives the same
    rows in Python."""
    job = comparison(
        loaded,
        data,
        field=field,
        split=split,
        folder=folder,
        seed=seed,
        chunk=chunk,
        window=window,
        tokens=tokens,
        batch=batch,
        context=context,
        sequences=sequences,
        store=store,
    )

    def evaluate(model, method, bar, kernels):
        return [job.row(model, method, kernels, bar(str(method)))]

    def ready(model, methods, folders, bar):
        return job.ready(methods, folders, bar)

    return Job(context, evaluate, {"data": job.about}, job.scored, ready, length=job.window)
