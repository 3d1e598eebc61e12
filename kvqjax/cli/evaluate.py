"""`kvqjax eval ppl|retrieval|drift|harness`: several caches side by side."""

import functools
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvqjax.cli.common import MOST_ROWS, Batch, number
from kvqjax.cli.report import Job, add_command
from kvqjax.eval.corpora import read_text
from kvqjax.eval.stamp import CONTEXT
from kvqjax.model.loading import Model

__all__ = ["app"]

app = typer.Typer(
    help="Evaluate caches with the tokens really passing through them.", no_args_is_help=True, add_completion=False
)

Data = Annotated[str, typer.Option("--data", help="a UTF-8 file, wikitext2, c4, gsm8k, or 'synthetic' (our own text)")]
Folder = Annotated[Path | None, typer.Option("--folder", help="holds the data sets; default: the hub, by `datasets`")]
Context = Annotated[int, number("--context", least=32, help="tokens of a row for which bits and bytes are counted")]
Chunk = Annotated[int, number("--chunk", help="tokens that enter the cache at a time")]
PromptChunk = Annotated[
    int | None, number("--chunk", help="prompts pass through the cache N tokens at a time; default: exact prefill")
]


_command = functools.partial(add_command, app)


def _encoded(model: Model, data: str, tokens: int, seed: int, folder: Path | None) -> tuple[np.ndarray, dict[str, Any]]:
    text, about = read_text(data, tokens, seed, folder)
    return np.asarray(model.encode(text), np.int32), {"data": about}


@_command("demo")
def ppl(
    loaded: Model,
    seed: int,
    data: Data = "synthetic",
    folder: Folder = None,
    mode: Annotated[
        list[str], typer.Option(help="loop: all through the cache; prefill: first half exact; repeatable")
    ] = ["loop"],  # noqa: B006
    windows: Annotated[str, typer.Option(help="gptq, aqua or llama-perplexity")] = "gptq",
    chunk: Annotated[list[int], number(help="tokens that enter the cache at a time; repeatable")] = [],  # noqa: B006
    window: Annotated[int | None, number(least=2, help="tokens per window; default: the windows' own")] = None,
    tokens: Annotated[int, number(least=0, help="about how many tokens in all; 0: the whole text")] = 8192,
    batch: Batch = 4,
    context: Context = CONTEXT,
) -> Job:
    """Perplexity, KL divergence to the exact cache, and top-1 agreement."""
    from kvqjax.eval.measure_perplexity import check_mode, perplexity
    from kvqjax.eval.windows import style
    from kvqjax.eval.windows import windows as cut

    length = style(windows).length if window is None else window
    for kind in mode:
        check_mode(kind, 1, length)
    ids, about = _encoded(loaded, data, tokens, seed, folder)
    cut(ids, length, tokens)  # says now if the text is too short
    fixed = {"cut": windows, "window": window, "tokens": tokens, "batch": batch, "context": context}

    def evaluate(model, method, bar, kernels):
        for kind in mode:
            for size in chunk or [None]:
                update = bar(f"{method} {kind} {size or ''}")
                yield perplexity(model, ids, method, mode=kind, chunk=size, kernels=kernels, progress=update, **fixed)

    read = min(tokens or len(ids), len(ids)) * len(mode) * max(1, len(chunk))
    return Job(context, evaluate, about, read, length=length)


@_command("recall")
def retrieval(
    loaded: Model,
    seed: int,
    task: Annotated[str, typer.Option(help="kv (stored pairs), passkey, multikey, variables or needle")] = "kv",
    length: Annotated[list[int], number(least=32, help="prompt tokens; repeatable")] = [256, 512],  # noqa: B006
    samples: Annotated[int, number(most=MOST_ROWS, help="prompts of each length")] = 16,
    depths: Annotated[int, number(help="spans of depth that are reported apart")] = 4,
    chunk: PromptChunk = None,
    data: Annotated[str | None, typer.Option("--data", help="a UTF-8 file whose sentences hide the needle")] = None,
) -> Job:
    """Share of stored values, pass keys and needles that are answered right, by length and depth."""
    from kvqjax.eval.measure_retrieval import generator
    from kvqjax.eval.measure_retrieval import retrieval as run
    from kvqjax.eval.synthetic import sentences_of

    text, about = (None, {"name": "synthetic"}) if data is None else read_text(data, 0, seed)
    hay = None if text is None else sentences_of(text)
    generator(task, hay)  # says now if there is none
    fixed = {"task": task, "samples": samples, "chunk": chunk, "seed": seed, "bins": depths, "hay": hay}

    def evaluate(model, method, bar, kernels):
        given: dict[str, Any] = fixed | {"kernels": kernels}
        return [run(model, method, length=size, progress=bar(f"{method} {size}"), **given) for size in length]

    return Job(max(length), evaluate, {"data": about}, sum(length) * samples, length=max(length))


@_command("demo")
def drift(
    loaded: Model,
    seed: int,
    data: Data = "synthetic",
    folder: Folder = None,
    chunk: Chunk = 1,
    window: Annotated[int, number(least=2, help="decode steps")] = 512,
    tokens: Annotated[int, number(help="about how many tokens in all")] = 2048,
    bins: Annotated[int, number(help="spans of steps that are reported apart")] = 8,
) -> Job:
    """KL divergence against the number of decoding steps."""
    from kvqjax.eval.measure_drift import drift as run
    from kvqjax.eval.windows import windows

    ids, about = _encoded(loaded, data, tokens, seed, folder)
    windows(ids, window, tokens)  # says now if the text is too short
    fixed = {"chunk": chunk, "window": window, "tokens": tokens, "bins": bins}

    def evaluate(model, method, bar, kernels):
        return [run(model, ids, method, kernels=kernels, progress=bar(str(method)), **fixed)]

    return Job(window, evaluate, about, min(tokens, len(ids)), length=window)


@_command("demo")
def harness(
    loaded: Model,
    seed: int,
    task: Annotated[list[str], typer.Option(help="a task or group of lm-evaluation-harness; repeatable")],
    include: Annotated[Path | None, typer.Option(help="a folder with YAML files of more tasks")] = None,
    shots: Annotated[
        int | None, number(least=0, most=1000, help="worked examples; default: the task's own number")
    ] = None,
    samples: Annotated[int | None, number(help="of every task; default: all")] = None,
    limit: Annotated[int | None, number(least=2, help="longest text in tokens; default: the model's positions")] = None,
    cut: Annotated[str, typer.Option(help="where a longer text is cut: left or middle")] = "left",
    chunk: Annotated[
        int | None, number(help="tokens that enter the cache at a time; default: prompts exactly, scored texts by 32")
    ] = None,
    batch: Batch = 8,
    chat: Annotated[bool, typer.Option("--chat", help="put prompts through the chat template")] = False,
    metadata: Annotated[str, typer.Option(help="JSON for tasks that make their data, as lm-eval's own option")] = "{}",
) -> Job:
    """Tasks of lm-evaluation-harness, scored with the tokens passing through the cache."""
    from kvqjax.eval.harness import CacheLM, run_harness
    from kvqjax.eval.stamp import bytes_of

    length = limit or loaded.config.max_position
    options = {"shots": shots, "limit": samples, "seed": seed, "include": include, "chat": chat, "metadata": metadata}

    def evaluate(model, method, bar, kernels):
        update, sizes = bar(str(method)), bytes_of(model, method, length)
        given = {"chunk": chunk, "batch": batch, "max_length": length, "cut": cut, "kernels": kernels}
        rows = run_harness(CacheLM(model, method, **given), task, **options)
        update(1.0)
        return [row | sizes for row in rows]

    return Job(length, evaluate, {"data": {"name": "lm-evaluation-harness"}, "tasks": task}, 0, length=length)
