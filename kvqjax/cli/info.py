"""`kvqjax methods`, `kvqjax inspect` and `kvqjax plan`: what there is, what a folder holds, what a cache would take."""

import inspect as introspect
import json
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from kvqjax.artifacts import read_arrays, read_description
from kvqjax.cache.state import CacheLayout, allocate_cache
from kvqjax.cli.common import Caches, Json, ModelName, methods_of, show, size
from kvqjax.errors import UserError
from kvqjax.hf_config import read_config
from kvqjax.ledger import ledger
from kvqjax.methods import METHODS
from kvqjax.model import locate

__all__ = ["inspect", "methods", "plan"]


def methods(as_json: Json = False) -> None:
    """List the methods with their options and defaults."""
    rows: list[dict[str, Any]] = []
    for name, factory in METHODS.items():
        options = {p.name: p.default for p in introspect.signature(factory).parameters.values()}
        about = " ".join((introspect.getdoc(factory) or "").split("\n\n")[0].split())
        rows.append({"method": name, "about": about, "options": options})
    if not as_json:
        rows = [r | {"options": ", ".join(f"{k}={v}" for k, v in r["options"].items())} for r in rows]
    show(rows, as_json)


def inspect(folder: Path, as_json: Json = False) -> None:
    """Show what a calibration artifact or a saved cache holds."""
    try:
        kind = json.loads((folder / "description.json").read_text(encoding="utf-8")).get("kind", "")
    except (OSError, ValueError, AttributeError):
        raise UserError(f"{folder}: no readable description.json; not a kvqjax folder") from None
    about = read_description(folder, kind)
    arrays = read_arrays(folder)
    rows = [{"array": n, "shape": list(a.shape), "dtype": str(a.dtype), "bytes": a.nbytes} for n, a in arrays.items()]
    if as_json:
        typer.echo(json.dumps({"description": about, "arrays": rows}, indent=1))
        return
    for key, value in about.items():
        typer.echo(f"{key}: {value}")
    show(rows, False)


DEVICES = {  # usable memory in GiB and memory bandwidth in GB/s, per chip, as the vendors state them
    "v5e": (16, 820), "v5p": (95, 2765), "v6e": (32, 1640), "tpu7x": (192, 7370), "a100-40": (40, 1555),
    "a100-80": (80, 2039), "h100": (80, 3350), "h200": (141, 4800), "rtx4090": (24, 1008),
}  # fmt: skip


def _plan_row(config, method, context: int, batch: int, device: str | None, weights: int) -> dict[str, Any]:
    layout = CacheLayout(config=config, method=method, capacity=context, dtype="bfloat16")
    book = ledger(jax.eval_shape(lambda: allocate_cache(layout, batch)))
    row = {"cache": str(method), "bytes": book.bytes, "bytes_exact": book.exact_bytes, "bits_stored": book.bits_stored}
    row["bytes_weights"] = weights
    if device:
        memory, bandwidth = DEVICES[device]
        total = weights + book.bytes
        row["fits"] = f"{'yes' if total <= memory * 2**30 else 'no'} ({size(total)} of {memory} GiB)"
        row["tokens_per_second"] = batch * bandwidth * 1e9 / total
    return row


def plan(
    cache: Caches,
    model: ModelName = "demo",
    context: Annotated[int, typer.Option(help="tokens per row")] = 131072,
    batch: int = 1,
    device: Annotated[str | None, typer.Option(help=f"one of {', '.join(DEVICES)}")] = None,
    as_json: Json = False,
) -> None:
    """Bytes of caches and bf16 weights, whether they fit a device, and the bandwidth-bound tokens per second there.

    Weights and cache only: no workspace. MODEL is a bundled name, a folder, or a config.json.
    """
    if device is not None and device not in DEVICES:
        raise UserError(f"--device {device}; known: {', '.join(DEVICES)}")
    if context < 1 or batch < 1:
        raise UserError(f"--context {context} --batch {batch}; both must be at least 1")
    path = Path(model)
    config = read_config(path if path.suffix == ".json" else locate(model))
    weights = _weight_bytes(config)
    rows = [_plan_row(config, method, context, batch, device, weights) for method in methods_of(cache)]
    show(rows, as_json, f"{model}, {context} tokens x {batch}")


def _weight_bytes(config) -> int:
    """Bytes of the weights in bfloat16."""
    from kvqjax.decoder import init_params

    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config, jax.numpy.bfloat16))
    return sum(2 * leaf.size for leaf in jax.tree.leaves(shapes))
