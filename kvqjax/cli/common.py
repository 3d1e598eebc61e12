"""What the commands share: options, loading, checks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from kvqjax._arguments import MOST_SEED
from kvqjax._errors import UserError
from kvqjax._options import token_count
from kvqjax._tables import size
from kvqjax._timing import memory
from kvqjax.cache.accounting import array_bytes
from kvqjax.cli.habits import shell_line
from kvqjax.methods import Method, parse
from kvqjax.model.hf_config import read_config
from kvqjax.model.loading import Model, load, locate
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.sharding import rules_for
from kvqjax.step.new_cache import init_cache

MOST_TOKENS, MOST_ROWS, MOST_HOSTS = 2**24, 2**16, 2**16


def number(
    *names: str, least: float | int = 1, most: float | int = MOST_TOKENS, **about: Any
) -> Any:
    """An option whose bounds are checked before any work begins."""
    return typer.Option(*names, min=least, max=most, **about)


def token_number(*names: str, least: int = 1, most: int = MOST_TOKENS, **about: Any) -> Any:
    """An option that counts tokens: `number`, also as 128k or 1m."""

    def read(text: str | int) -> int:
        try:
            return token_count(text, least, most)
        except UserError as error:
            raise typer.BadParameter(shell_line(error)) from error

    return typer.Option(*names, min=least, max=most, parser=read, metavar="TOKENS", **about)


ModelName = Annotated[
    str,
    typer.Option("--model", "-m", help="demo, recall, smollm2, a folder, FILE.gguf, or a hub id"),
]
Caches = Annotated[
    list[str],
    typer.Option(
        "--cache", "-c", help="a policy such as kivi:bits=2;0-1=exact, or FILE.json; repeatable"
    ),
]
Artifacts = Annotated[
    list[Path],
    typer.Option(
        "--artifact", help="the folder that `kvqjax calibrate` wrote for a --cache; repeatable"
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="compute dtype: bfloat16, float16 or float32")
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", help="int8 or int4: keep the weight matrices in 8 or 4 bits"),
]
TextOnly = Annotated[
    bool, typer.Option("--text-only", help="leave out the vision part of a checkpoint that has one")
]
RopeLength = Annotated[
    int | None,
    number(
        "--rope-length",
        help="how long texts may become, for RoPE of the kinds dynamic and longrope",
    ),
]
DataName = Annotated[
    str,
    typer.Option(
        "--data",
        help="a file (text, .json, .jsonl, .parquet, .csv; .gz), a folder of these or of `datasets`, owner/name of the "
        "hub, wikitext2, c4, gsm8k, 'self' (what the model writes), or 'synthetic' (our own text)",
    ),
]
Field = Annotated[
    str | None,
    typer.Option("--field", help="of records; default: text, prompt, messages, conversations"),
]
Split = Annotated[str | None, typer.Option("--split", help="of a data set that has several")]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="holds wikitext2, c4, gsm8k; default: the hub, by `datasets`"),
]
Mesh = Annotated[
    str, typer.Option("--mesh", help="devices along data, seq and model, e.g. data=2,model=4")
]
Batch = Annotated[int, number("--batch", most=MOST_ROWS, help="rows at a time")]
Seed = Annotated[int, number("--seed", least=0, most=MOST_SEED, help="seed of all random numbers")]
Kernels = Annotated[
    str,
    typer.Option(
        "--kernels",
        help="what reads the cache: auto (kernels that passed a check), off, pallas, splash, cudnn",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]

# Of the commands that make text.
OneCache = Annotated[
    str, typer.Option("--cache", "-c", help="a method, e.g. kivi:bits=2,window=64")
]
PromptChunk = Annotated[
    int | None,
    number(
        "--chunk", help="prompts pass through the cache, N tokens at a time; default: exact prefill"
    ),
]


def methods_of(texts: Iterable[str]) -> list[Method]:
    """Parse every --cache."""
    return [parse(text) for text in texts]


def open_model(
    name: str,
    dtype: str | None,
    weights: str | None = None,
    method: Method | None = None,
    mesh: str = "",
    text_only: bool = False,
    rope_length: int | None = None,
) -> Model:
    """Load a model, for caches of `method` on a mesh if one is named."""
    about = {"dtype": dtype, "weights": weights, "text_only": text_only, "rope_length": rope_length}
    if not mesh or method is None:
        return load(name, **about)
    rules = rules_for(read_config(locate(name)), method, MeshSize.parse(mesh))
    return load(name, sharding=rules, **about)


def calibrated(
    model: Model, methods: list[Method], folders: list[Path]
) -> list[tuple[Model, Method]]:
    """Pair every --cache with a model that holds its constants, from its --artifact where it needs
    one."""
    from kvqjax.calibrate import with_constants

    return with_constants(model, methods, folders)


def require_room(model: Model, method: Method, batch: int, capacity: int) -> None:
    """Raise UserError for a cache that the memory cannot hold: a CPU's system would kill the
    process instead."""
    cache = jax.eval_shape(lambda: init_cache(model, method, batch, capacity))
    devices, limit = 1 if model.rules is None else model.rules.mesh.size, memory()
    cache_bytes = array_bytes(cache)
    if limit is not None and cache_bytes > limit * devices:
        rows = f"{batch} row{'s' * (batch > 1)} of {capacity} tokens"
        raise UserError(
            f"{method}: a cache of {rows} takes {size(cache_bytes)}; there are {size(limit * devices)}"
        )
