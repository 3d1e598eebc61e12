"""safetensors <-> params pytree (names in kvqjax/model/decoder.py) without torch.

Hugging Face stores linear layers as [out, in]; ours are [in, out] and stacked over layers. Of one parameter after the
other, some layers are read at a time, on every device the slice that lies there, and written into their place in the
stack, which is donated: a load holds the weights and `PIECE` bytes, or one layer's experts, besides.
"""

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from kvqjax._errors import UserError
from kvqjax._files import read_object
from kvqjax.model.checkpoint import open_checkpoint
from kvqjax.model.config import ModelConfig
from kvqjax.model.experts import Rows
from kvqjax.model.hf_config import config_to_hf
from kvqjax.model.stored import Stored, decoded, read_scheme
from kvqjax.model.weight_codes import code_weight, place_codes
from kvqjax.model.weight_names import Parameter, experts_apart, language_part, parameters
from kvqjax.model.weight_sources import sources
from kvqjax.model.weight_tiles import as_multiplied, tiles_of
from kvqjax.model.weight_trees import Params

__all__ = ["ShardingRule", "load_params", "save_params"]

ShardingRule = Callable[[str], jax.sharding.Sharding]

_PROGRESS_AFTER_SECONDS = 2.0
PIECE = 2**28  # bytes of layers that are read before they are written into their stack


def _fill(sources: list[list[Stored]], by_expert: bool, matrix: bool, shape, dtype: np.dtype, index: tuple[slice, ...]):
    """One device's slice of some layers' parameter, [layers, ...], each tensor read from disk straight into its
    place."""
    index = tuple(slice(*s.indices(size)) for s, size in zip(index, shape, strict=True))
    inner = index[2:] if by_expert else index[1:]
    inner = inner[::-1] if matrix else inner
    block = np.empty([s.stop - s.start for s in index], dtype)
    for places, row in zip(block, sources[index[0]], strict=True):
        for place, stored in zip(places if by_expert else [places], row[index[1]] if by_expert else row, strict=True):
            piece = decoded(stored, inner)
            with np.errstate(over="ignore"):  # an overflow to float16 is refused below, with the tensor's name
                place[...] = (piece.T if matrix else piece).astype(dtype)
            if dtype == np.float16 and not np.isfinite(place).all():
                file = next(iter(stored.parts.values())).file
                raise UserError(f"{file}: {stored.name!r} exceeds float16's range; load as bf16 or f32")
    return block


def _placed(fill: Callable, shape: tuple[int, ...], dtype, sharding) -> jax.Array:
    """An array of what `fill` gives for each device's slice; devices with the same slice share one reading."""
    if sharding is None:
        return jax.device_put(fill((slice(None),) * len(shape)))
    once = functools.cache(lambda spans: fill(tuple(slice(*span) for span in spans)))
    slices = lambda index: tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))  # noqa: E731
    return jax.make_array_from_callback(shape, sharding, lambda index: once(slices(index)), dtype=dtype)


def _over_layers(sharding):
    """A stack's placement, checked: its layers are written one after the other."""
    if isinstance(sharding, NamedSharding) and sharding.spec and sharding.spec[0] is not None:
        raise UserError(f"layers cannot be split over a mesh, as {sharding.spec} would")
    return sharding


def _put(stack, piece, row):
    """A stack with some layers' piece from `row` on."""
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, row, 0), stack, piece)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Progress bar on stderr that appears only when loading takes over two seconds; yields `advance(nbytes)`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("loading weights", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    shown = console.is_terminal or console.is_jupyter
    bar = Progress(*columns, console=console, transient=True, disable=not shown)
    task, begun = bar.add_task("", total=total), time.monotonic()

    def advance(nbytes: int):
        if time.monotonic() - begun > _PROGRESS_AFTER_SECONDS:
            bar.start()
        bar.advance(task, nbytes)

    try:
        yield advance
    finally:
        if bar.live.is_started:  # stopping a bar that never showed would print an empty line
            bar.stop()


def load_params(
    folder: str | Path,
    config: ModelConfig,
    dtype=jnp.float32,
    sharding: ShardingRule | None = None,
    bits: int | None = None,
    *,
    layers: str = "scan",
    text_only: bool = False,
) -> Params:
    """Params pytree of a Hugging Face folder in `dtype`, its layers as stacks ("scan") or a list ("unroll").

    `sharding(name)` gives each parameter's placement; names are those of the pytree joined by "/", such as "embed" or
    "layers/q" (axes as in kvqjax/model/decoder.py, [L, in, out]). None: everything on the default device.
    `bits` 8 or 4 stores the layers' matrices as codes (kvqjax/model/weight_codes.py), made layer by layer. FP8, GPTQ
    and AWQ matrices are decoded (kvqjax/model/stored.py). `text_only` leaves out a vision part.
    Raises UserError for a missing folder, file or tensor, a wrong shape, a truncated or foreign file.
    """
    folder, dtype = Path(folder).expanduser(), np.dtype(dtype)
    checkpoint = experts_apart(language_part(open_checkpoint(folder), folder, text_only), config)
    file = folder / "config.json"
    found_in = sources(checkpoint, config, read_scheme(read_object(file)) if file.exists() else None, folder)
    found: dict[str, Any] = {"layers": {}}
    apart: list[dict] = [{} for _ in range(config.num_layers)]
    with _progress(sum(x.nbytes for rows in found_in.values() for row in rows for x in row)) as advance:
        for parameter in parameters(config):
            name, place = parameter.name.removeprefix("layers/"), sharding and sharding(parameter.name)
            pieces = _pieces(parameter, found_in[parameter.name], dtype, place, bits, layers == "unroll", advance)
            if parameter.layers is None:
                found[name] = next(piece for _, piece in pieces)[0]
            elif layers == "unroll":
                for row, piece in pieces:
                    apart[parameter.layers[row]][name] = jax.tree.map(lambda a: a[0], piece)
            else:
                stack = _stacked(pieces, len(parameter.layers), parameter.name)
                found["layers"][name] = Rows(stack, parameter.layers) if parameter.rows else stack
    return as_multiplied(found | ({"layers": apart} if layers == "unroll" else {}))


def _stacked(pieces: Iterator, rows: int, name: str):
    """All layers' pieces as one stack, which each is written into in place, in the tiles of the parameter `name`."""
    _, piece = next(pieces)
    if jax.tree.leaves(piece)[0].shape[0] == rows:
        return piece
    places = jax.tree.map(lambda x: tiles_of(name, x, x.sharding), piece)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), piece)
    empty = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
    put = jax.jit(_put, donate_argnums=0, out_shardings=places)
    stack = put(jax.jit(empty, out_shardings=places)(), piece, 0)
    for row, piece in pieces:
        stack = put(stack, piece, row)
        del piece
    return stack


def _pieces(parameter: Parameter, sources, dtype: np.dtype, place, bits: int | None, single: bool, advance: Callable):
    """(first row, array or codes [layers, ...]) of as many layers at a time as `PIECE` bytes hold, or of every one."""
    layered = parameter.layers is not None
    coded = bits is not None and layered and parameter.matrix and not parameter.name.endswith("router")
    count = 1 if single or not layered else max(1, PIECE // max(1, math.prod(parameter.shape) * dtype.itemsize))
    for row in range(0, len(sources), count):
        part = sources[row : row + count]
        shape = (len(part), *parameter.shape)
        fill = functools.partial(_fill, part, parameter.by_expert, parameter.matrix, shape, dtype)
        piece: Any = _placed(fill, shape, dtype, _over_layers(place) if layered else _as_stack(place))
        advance(sum(x.nbytes for stored in part for x in stored))
        if coded:
            piece = code_weight(piece, bits)
            piece = place_codes(piece, place) if isinstance(place, NamedSharding) else piece
        yield row, piece
        del piece


def _as_stack(sharding):
    """The placement of a parameter that no layer has, as that of a stack of one."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def save_params(folder: str | Path, params: Params, config: ModelConfig):
    """Write config.json and model.safetensors in the Hugging Face layout, in the dtype of the params."""
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for parameter in parameters(config):
        layered = parameter.layers is not None
        value = params["layers"][parameter.name.removeprefix("layers/")] if layered else params[parameter.name]
        value = np.asarray(value.stack if isinstance(value, Rows) else value)
        for names, own in zip(parameter.tensors, value if layered else [value], strict=True):
            for name, matrix in zip(names, own if parameter.by_expert else [own], strict=True):
                tensors[name] = np.ascontiguousarray(matrix.T if parameter.matrix else matrix)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_hf(config), indent=1) + "\n", encoding="utf-8")
