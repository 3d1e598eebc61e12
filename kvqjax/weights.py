"""safetensors <-> params pytree (names in kvqjax/decoder.py) without torch, and the fingerprint of a checkpoint.

Hugging Face stores linear layers as [out, in]; ours are [in, out] and stacked over layers. Each device's slice is
filled from the matching slices on disk, so the host never holds more than one stacked parameter's slices.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from kvqjax.checkpoint import Checkpoint, Tensor, header_digest, open_checkpoint, read, sample, sample_digest
from kvqjax.config import ModelConfig
from kvqjax.decoder import Params, init_params
from kvqjax.errors import UserError
from kvqjax.hf_config import config_to_hf
from kvqjax.weight_codes import code_weight

__all__ = ["ShardingRule", "fingerprint", "load_params", "save_params"]

ShardingRule = Callable[[str], jax.sharding.Sharding]

# Our name -> (Hugging Face name, whether the last two axes are swapped). Names under "layers/" exist once per layer.
_NAMES = {
    "embed": ("model.embed_tokens.weight", False),
    "norm": ("model.norm.weight", False),
    "head": ("lm_head.weight", True),
    "layers/attn_norm": ("input_layernorm.weight", False),
    "layers/mlp_norm": ("post_attention_layernorm.weight", False),
    "layers/gate": ("mlp.gate_proj.weight", True),
    "layers/up": ("mlp.up_proj.weight", True),
    "layers/down": ("mlp.down_proj.weight", True),
    **{f"layers/{n}": (f"self_attn.{n}_proj.weight", True) for n in "qkvo"},
    **{f"layers/{n}_bias": (f"self_attn.{n}_proj.bias", False) for n in "qkv"},
    **{f"layers/{n}_norm": (f"self_attn.{n}_norm.weight", False) for n in "qk"},
}
_FLOATS = ("F64", "F32", "F16", "BF16")
_PROGRESS_AFTER_SECONDS = 2.0


def _sources(name: str, config: ModelConfig) -> tuple[list[str], bool]:
    """Hugging Face names behind one of our parameters, one per layer, and whether they are transposed."""
    hf_name, transposed = _NAMES[name]
    if not name.startswith("layers/"):
        return [hf_name], transposed
    return [f"model.layers.{layer}.{hf_name}" for layer in range(config.num_layers)], transposed


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our flat parameter names and their shapes, from the one place that defines them."""
    tree = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    layers = {f"layers/{name}": leaf for name, leaf in tree.pop("layers").items()}
    return {name: leaf.shape for name, leaf in (tree | layers).items()}


def _check_tensor(tensor: Tensor, wanted: tuple[int, ...]):
    if tensor.shape != wanted:
        raise UserError(f"{tensor.file}: {tensor.name!r} has shape {list(tensor.shape)}, wanted {list(wanted)}")
    if tensor.dtype not in _FLOATS:
        known = ", ".join(_FLOATS)
        raise UserError(f"{tensor.file}: {tensor.name!r} has dtype {tensor.dtype}, wanted one of {known}")


def _check_unread(checkpoint: Checkpoint, used: set[str], config: ModelConfig, folder: Path):
    """Refuse tensors that nothing would read: the model would not be the checkpoint's."""
    unread = sorted(name for name in checkpoint.keys() - used if not name.endswith("rotary_emb.inv_freq"))
    if config.tied_embeddings and "lm_head.weight" in unread:
        unread.remove("lm_head.weight")
        if sample(checkpoint["lm_head.weight"]) != sample(checkpoint["model.embed_tokens.weight"]):
            raise UserError(
                f"{folder}: tie_word_embeddings = true, but lm_head.weight differs from embed_tokens.weight"
            )
    if unread:
        raise UserError(f"{folder}: tensor {unread[0]!r} is not part of {config.architecture} ({len(unread)} such)")


def _check(checkpoint: Checkpoint, config: ModelConfig, folder: Path):
    """Refuse a checkpoint that lacks a tensor, has one of another shape or dtype, or one that nothing would read."""
    used = set()
    for name, shape in _shapes(config).items():
        hf_names, transposed = _sources(name, config)
        wanted = shape[1:] if name.startswith("layers/") else shape
        for hf_name in hf_names:
            if hf_name not in checkpoint:
                reason = "; config.json says tie_word_embeddings = false" if name == "head" else ""
                raise UserError(f"{folder}: tensor {hf_name!r} is missing{reason}")
            _check_tensor(checkpoint[hf_name], wanted[::-1] if transposed else wanted)
        used.update(hf_names)
    _check_unread(checkpoint, used, config, folder)


def _fill(tensors: list[Tensor], transposed: bool, shape: tuple[int, ...], dtype: np.dtype, index: tuple[slice, ...]):
    """One device's slice of a parameter, each layer read from disk straight into its place."""
    stacked = len(shape) > len(tensors[0].shape)
    index = tuple(slice(*s.indices(size)) for s, size in zip(index, shape, strict=True))
    inner = index[1:] if stacked else index
    inner = inner[::-1] if transposed else inner
    block = np.empty([s.stop - s.start for s in index], dtype)
    layers = tensors[index[0]] if stacked else tensors
    for place, tensor in zip(block if stacked else [block], layers, strict=True):
        piece = read(tensor, inner)
        with np.errstate(over="ignore"):  # an overflow to float16 is refused below, with the tensor's name
            place[...] = (piece.T if transposed else piece).astype(dtype)
    if dtype == np.float16 and not np.isfinite(block).all():
        raise UserError(f"{tensors[0].file}: {tensors[0].name!r} exceeds float16's range; load as bf16 or f32")
    return block


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
) -> Params:
    """Params pytree of a Hugging Face folder in `dtype`.

    `sharding(name)` gives each parameter's placement; names are those of the pytree joined by "/", such as "embed" or
    "layers/q" (axes as in kvqjax/decoder.py, [L, in, out]). None: everything on the default device.
    `bits` 8 or 4 stores the layers' matrices as codes (kvqjax/weight_codes.py), one stacked matrix after the other: no
    second one exists in `dtype` at that time.
    Raises UserError for a missing folder, file or tensor, a wrong shape, a truncated or foreign file.
    """
    folder, dtype = Path(folder).expanduser(), np.dtype(dtype)
    checkpoint = open_checkpoint(folder)
    _check(checkpoint, config, folder)
    flat = {}
    with _progress(sum(tensor.nbytes for tensor in checkpoint.values())) as advance:
        for name, shape in _shapes(config).items():
            hf_names, transposed = _sources(name, config)
            tensors = [checkpoint[hf_name] for hf_name in hf_names]

            def fill(index, tensors=tensors, transposed=transposed, shape=shape):
                return _fill(tensors, transposed, shape, dtype, index)

            if sharding is None:
                array = jax.device_put(fill((slice(None),) * len(shape)))
            else:
                array = jax.make_array_from_callback(shape, sharding(name), fill, dtype=dtype)
            matrix = bits is not None and transposed and name.startswith("layers/")
            flat[name] = code_weight(array, bits) if matrix else array
            advance(sum(tensor.nbytes for tensor in tensors))
    layers = {name.removeprefix("layers/"): flat.pop(name) for name in list(flat) if name.startswith("layers/")}
    return flat | {"layers": layers}


def save_params(folder: str | Path, params: Params, config: ModelConfig):
    """Write config.json and model.safetensors in the Hugging Face layout, in the dtype of the params."""
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name in _shapes(config):
        hf_names, transposed = _sources(name, config)
        layered = name.startswith("layers/")
        value = np.asarray(params["layers"][name.removeprefix("layers/")] if layered else params[name])
        for hf_name, matrix in zip(hf_names, value if layered else [value], strict=True):
            tensors[hf_name] = np.ascontiguousarray(matrix.T if transposed else matrix)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_hf(config), indent=1) + "\n", encoding="utf-8")


def _non_default(record) -> dict:
    """Fields of a dataclass that differ from their defaults, so that a field added later changes no digest."""
    fields = {f.name: (getattr(record, f.name), f.default) for f in dataclasses.fields(record)}
    return {name: value for name, (value, default) in fields.items() if value != default}


UNCALIBRATED = ("eos_ids", "bos_id", "sliding_window")


def fingerprint(folder: str | Path, config: ModelConfig) -> str:
    """What an artifact was calibrated on, as "config=...,headers=...,samples=...": a mismatch can be named by its part.

    The special token ids are left out: an edited generation config changes nothing that is calibrated.
    """
    checkpoint = open_checkpoint(folder)
    fields = {name: value for name, value in _non_default(config).items() if name not in UNCALIBRATED}
    fields["windows"] = config.windows  # as fingerprints have named it from the start
    text = json.dumps(fields, sort_keys=True, default=_non_default)
    parts = {
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "headers": header_digest(checkpoint),
        "samples": sample_digest(checkpoint),
    }
    return ",".join(f"{name}={digest[:16]}" for name, digest in parts.items())
