"""Score other libraries' caches on the windows of the results page:
`python -m benchmarks.results.engines --book FILE`.

    pip install llama-cpp-python gguf torch transformers optimum-quanto hqq    # in an environment of its own
    python -m benchmarks.results.engines --book BOOK.txt [--folder FOLDER] [--engine llama.cpp]
    [--cache q4_0] python -m benchmarks.results --page-only

Weights are those that our rows are measured with, float32. Tokens enter in the same chunks. An
engine's exact cache is scored against our exact cache, the others against the engine's own. Records
that were made under the same stamp are kept.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kvqjax
from benchmarks.hf_folders import save_params
from benchmarks.results.peers import FOLDER, PEERS, exact_of, path_of
from benchmarks.results.rows import (
    CHUNK,
    CONTEXT,
    LENGTH,
    MODEL,
    WINDOWS,
    kept,
    sha256_of,
    window_means,
    windows_of,
)
from kvqjax.data.corpora import read
from kvqjax.eval.scores import replay
from kvqjax.eval.stamp import stamp
from kvqjax.model.loading import Model

app = typer.Typer(add_completion=False)
CONSOLE = Console(stderr=True)
UNROTATED = "LLAMA_ATTN_ROT_DISABLE"  # llama.cpp's switch, read when it makes a context
PACKAGES = {
    "llama.cpp": ("llama-cpp-python",),
    "transformers": ("transformers", "torch", "optimum-quanto", "hqq"),
}
Logits = Iterator[np.ndarray]  # [LENGTH, V] of each window


def stored_bytes(value: Any) -> int:
    """Bytes of all arrays in tuples, dicts and tensors that are made of others."""
    if isinstance(value, Mapping):
        return sum(map(stored_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(stored_bytes, value))
    if hasattr(value, "__tensor_flatten__"):  # torch's protocol of tensors that hold others
        return sum(stored_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return int(getattr(value, "nbytes", 0))


def llamacpp(
    model: Model, options: dict[str, Any], folder: Path, windows: list[np.ndarray], threads: int
) -> Logits:
    """Logits of windows through a cache of llama.cpp with flash attention."""
    from benchmarks.llamacpp.peer import Peer, write_model

    path = folder / "model.gguf"
    if not path.exists():
        write_model(path, model.params, model.config)
    os.environ.pop(UNROTATED, None)
    if not options.get("rotated", True):
        os.environ[UNROTATED] = "1"
    peer = Peer(path, options["kind"], LENGTH, threads, piece=CHUNK)
    for tokens in windows:
        yield peer.logits_of_text(tokens, model.config.vocab_size)
    peer.close()


def llamacpp_sizes(model: Model, options: dict[str, Any]) -> dict[str, Any]:
    """Bits of a number by the type's blocks, which have their scales in them."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[options["kind"].upper()]]
    bits = 8 * size / numbers
    return {"bits": bits, "bits_32k": bits, "bits_32k_of_16": bits, "exact_tokens": 0}


def quantized(
    model: Model, options: dict[str, Any], folder: Path, windows: list[np.ndarray], threads: int
) -> Logits:
    """Logits of windows through a cache of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache

    torch.set_num_threads(threads)
    if not (folder / "config.json").exists():
        save_params(folder, model.params, model.config)
    torch_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for tokens in windows:
        cache = (
            QuantizedCache(config=torch_model.config, **options)
            if options
            else DynamicCache(config=torch_model.config)
        )
        ids = torch.tensor(tokens[None], dtype=torch.long)
        with torch.no_grad():
            parts = [
                torch_model(ids[:, start : start + CHUNK], cache=cache, use_cache=True)
                .logits[0]
                .numpy()
                for start in range(0, LENGTH, CHUNK)
            ]
        yield np.concatenate(parts)


def head_bits(options: dict[str, Any], dim: int, dtype: Any) -> tuple[float, float, int]:
    """Bits of a number of codes alone, bits of all that transformers' cache stores of CONTEXT
    tokens of a head, and the largest number of tokens that it keeps in full precision."""
    import torch
    from transformers import LlamaConfig, QuantizedCache

    layer = QuantizedCache(config=LlamaConfig(num_hidden_layers=1), **options).layers[0]
    exact = max(getattr(layer, "residual_length", 0) - 1, 0)  # one token more, and all are encoded
    encoded = (CONTEXT - exact) // 64 * 64  # groups of 64 tokens
    for count in (encoded, exact):
        if count:
            layer.update(
                *torch.randn((2, 1, 1, count, dim), generator=torch.Generator().manual_seed(0)).to(
                    dtype
                )
            )
    codes = stored_bytes((layer._quantized_keys, layer._quantized_values))
    everything = codes + stored_bytes((layer.keys, layer.values))
    return 4 * codes / (dim * encoded), 4 * everything / (dim * (encoded + exact)), exact


def quantized_sizes(model: Model, options: dict[str, Any]) -> dict[str, Any]:
    """Bits of a number in a model of float32 and in one of bfloat16."""
    import torch

    if not options:
        return {"bits": 32.0, "bits_32k": 32.0, "bits_32k_of_16": 16.0, "exact_tokens": CONTEXT}
    sizes = [
        head_bits(options, model.config.head_dim, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    (bits, all_in, exact), (_, of_16, _) = sizes
    return {"bits": bits, "bits_32k": all_in, "bits_32k_of_16": of_16, "exact_tokens": exact}


ENGINES: dict[str, tuple[Callable[..., Logits], Callable[..., dict[str, Any]]]] = {
    "llama.cpp": (llamacpp, llamacpp_sizes),
    "transformers": (quantized, quantized_sizes),
}


def exact_logits_of(model: Model, windows: list[np.ndarray]) -> Logits:
    """Logits of windows through our exact cache."""
    exact = kvqjax.parse("exact")
    for tokens in windows:
        yield np.asarray(
            replay(model.replace(constants=()), jnp.asarray(tokens[None]), exact, CHUNK)[0]
        )


def scored(
    logits: Logits, reference: Logits | list[np.ndarray], windows: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Means by window of every text."""
    rows = iter(zip(logits, reference, strict=True))
    means: dict[str, Any] = {}
    for name, pieces in windows.items():
        for tokens in pieces:
            through_cache, exact = (jnp.asarray(x[None], jnp.float32) for x in next(rows))
            for key, values in window_means(
                through_cache, exact, jnp.asarray(tokens[None])
            ).items():
                means.setdefault(name, {}).setdefault(key, []).extend(values)
    return means


def measure(
    model: Model,
    engine: str,
    caches: list[str],
    windows: dict,
    about: dict,
    threads: int,
    bar: Progress,
):
    """Write the record of every cache of an engine that has none under the same stamp."""
    todo = [name for name in caches if kept(path_of(engine, name), about) is None]
    task = bar.add_task(engine, total=len(caches), completed=len(caches) - len(todo))
    logits_of, sizes_of = ENGINES[engine]
    flat = [tokens for pieces in windows.values() for tokens in pieces]
    with tempfile.TemporaryDirectory() as folder:

        def through(name):
            return logits_of(model, PEERS[engine][name], Path(folder), flat, threads)

        exact = list(through(exact_of(engine))) if todo else []
        for name in todo:
            bar.update(task, description=f"{engine} {name}")
            pair = (
                (exact, exact_logits_of(model, flat))
                if name == exact_of(engine)
                else (through(name), exact)
            )
            row = {"engine": engine, "cache": name} | sizes_of(model, PEERS[engine][name])
            row |= {"by_window": scored(*pair, windows), "about": about}
            path_of(engine, name).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            bar.advance(task)


@app.command()
def main(
    book: Annotated[str, typer.Option(help="the second text, a file")],
    wikitext: Annotated[
        str, typer.Option(help="WikiText-2's test part: its name, or a file")
    ] = "wikitext2",
    folder: Annotated[
        Path | None, typer.Option(help="where wikitext2 is, if not on the hub")
    ] = None,
    engine: Annotated[list[str], typer.Option(help="only these; repeatable")] = list(PEERS),  # noqa: B006
    cache: Annotated[
        list[str], typer.Option(help="only these of the engines' caches; repeatable")
    ] = [],  # noqa: B006
    threads: Annotated[int, typer.Option(help="of the engines")] = os.cpu_count() or 1,
) -> None:
    """Measure what is missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = kvqjax.load(MODEL)
    data = {"WikiText-2": read(wikitext, folder=folder), "book": read(book)}
    windows = windows_of(model, data)
    plan = {"length": LENGTH, "chunk": CHUNK, "windows": WINDOWS}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=CONSOLE) as bar:
        for name in engine:
            about = {
                key: value
                for key, value in stamp(model, MODEL, 0).items()
                if key not in ("date", "seed")
            }
            about["versions"] |= {package: metadata.version(package) for package in PACKAGES[name]}
            about |= {"plan": plan, "data": sha256_of(data)}
            caches = [peer for peer in PEERS[name] if not cache or peer in cache]
            measure(model, name, caches, windows, about, threads, bar)


if __name__ == "__main__":
    app()
