"""What the commands share: options, loading, checks."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from kvqjax._errors import UserError
from kvqjax._timing import memory
from kvqjax.cache.accounting import array_bytes
from kvqjax.cache.artifacts import load_artifact
from kvqjax.cli.tables import size
from kvqjax.methods import Method, parse
from kvqjax.methods.spec import calibrated_part
from kvqjax.model.hf_config import read_config
from kvqjax.model.loading import Model, load, locate
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.sharding import rules_for
from kvqjax.step.new_cache import check_constants, init_cache

__all__ = [
    "MOST_HOSTS",
    "MOST_ROWS",
    "Artifacts",
    "Batch",
    "Caches",
    "Dtype",
    "Json",
    "Kernels",
    "Mesh",
    "ModelName",
    "RopeLength",
    "Seed",
    "TextOnly",
    "Weights",
    "calibrated",
    "methods_of",
    "number",
    "require_room",
]

MOST_TOKENS, MOST_ROWS, MOST_HOSTS = 2**24, 2**16, 2**16


def number(*names: str, least: int = 1, most: int = MOST_TOKENS, **about: Any) -> Any:
    """An option whose bounds are checked before any work begins."""
    return typer.Option(*names, min=least, max=most, **about)


ModelName = Annotated[str, typer.Option("--model", "-m", help="demo, recall, a Hugging Face folder, or a hub id")]
Caches = Annotated[
    list[str], typer.Option("--cache", "-c", help="a policy: kivi:bits=2;0-1=exact, or FILE.json; repeatable")
]
Artifacts = Annotated[list[Path], typer.Option("--artifact", help="calibration of a --cache; repeatable")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="compute dtype: bfloat16, float16 or float32")]
Weights = Annotated[str | None, typer.Option("--weights", help="keep the matrices as int8 or int4 (weight only)")]
TextOnly = Annotated[bool, typer.Option("--text-only", help="leave out the vision part of a checkpoint that has one")]
RopeLength = Annotated[
    int | None, number("--rope-length", help="how long texts may become, for RoPE of the kinds dynamic and longrope")
]
Mesh = Annotated[str, typer.Option("--mesh", help="devices along data, seq and model, e.g. data=2,model=4")]
Batch = Annotated[int, number("--batch", most=MOST_ROWS, help="rows at a time")]
Seed = Annotated[int, number("--seed", least=0, most=2**32 - 1, help="of everything that is drawn")]
Kernels = Annotated[str, typer.Option("--kernels", help="auto, off, pallas, splash or cudnn: what reads the cache")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


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


def calibrated(model: Model, methods: list[Method], folders: list[Path]) -> list[tuple[Model, Method]]:
    """Pair every method with a model that holds its constants. An artifact serves every --cache of the same codecs and
    layers, whatever their sinks, windows and kept tokens; what a method derives from the weights alone (xquant) is
    computed here when there is none. Raises UserError for constants that no artifact brings."""
    from kvqjax.calibrate.xquant import prepared

    part = functools.partial(calibrated_part, config=model.config)
    artifacts = {part(a.method): a for a in map(load_artifact, folders)}
    unused = set(artifacts) - {part(method) for method in methods}
    if unused:
        raise UserError(f"--artifact for {', '.join(sorted(map(str, unused)))}, which no --cache names")
    found = [(artifacts.get(part(method)), method) for method in methods]
    pairs = [(prepared(model, m) if got is None else model.with_artifact(got), m) for got, m in found]
    for ready, method in pairs:
        check_constants(ready, method)
    if model.rules is None:
        return pairs
    place = model.rules.everywhere
    return [(m.replace(constants=jax.device_put(jax.tree.map(np.asarray, m.constants), place)), n) for m, n in pairs]


def require_room(model: Model, method: Method, batch: int, capacity: int) -> None:
    """Raise UserError for a cache that the memory cannot hold: a CPU's system would kill the process instead."""
    cache = jax.eval_shape(lambda: init_cache(model, method, batch, capacity))
    devices, limit = 1 if model.rules is None else model.rules.mesh.size, memory()
    needed = array_bytes(cache)
    if limit is not None and needed > limit * devices:
        rows = f"{batch} row{'s' * (batch > 1)} of {capacity} tokens"
        raise UserError(f"{method}: a cache of {rows} takes {size(needed)}; there are {size(limit * devices)}")
