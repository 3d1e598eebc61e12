"""What a load takes: bytes read, seconds, and the highest memory of the process, on a checkpoint of random weights.

    python -m benchmarks.load_peak --gigabytes 3 --shard 1 --family experts FOLDER

The checkpoint is written to FOLDER in shards, unless it is there already; it is loaded in a process of its own.
"""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import jax
import ml_dtypes
import numpy as np
import typer
from safetensors.numpy import save_file

from benchmarks.hf_folders import config_to_hf
from kvqjax.cache.accounting import array_bytes
from kvqjax.model import checkpoint
from kvqjax.model.config import ExpertConfig, ModelConfig
from kvqjax.model.loading import load
from kvqjax.model.weights import parameters

GB = 10**9
HEADS = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128}
FAMILIES = {
    "dense": ModelConfig(vocab_size=32000, width=2048, mlp_width=8192, num_layers=1, **HEADS),
    "experts": ModelConfig(
        vocab_size=32000,
        width=2048,
        mlp_width=6144,
        num_layers=1,
        experts=ExpertConfig(count=16, per_token=4, width=1024),
        qk_norm=True,
        architecture="Qwen3MoeForCausalLM",
        **HEADS,
    ),
}


def config_of_size(family: str, size: float) -> ModelConfig:
    """As many layers as fill `size` bytes of bfloat16."""
    one_layer, two_layers = (
        sum(
            2 * np.prod(p.shape, dtype=int) * len(p.layers or [0])
            for p in parameters(FAMILIES[family].__class__(**fields))
        )
        for fields in (_fields(family, 1), _fields(family, 2))
    )
    return ModelConfig(**_fields(family, max(1, round((size - one_layer) / (two_layers - one_layer)) + 1)))


def _fields(family: str, layers: int) -> dict:
    config = FAMILIES[family]
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | {"num_layers": layers}


def write(folder: Path, config: ModelConfig, shard: float):
    """Shards of random bfloat16 tensors with their index."""
    folder.mkdir(parents=True)
    random, tensors, size, places, number = np.random.default_rng(0), {}, 0, {}, 0

    def flush():
        nonlocal tensors, size, number
        save_file(tensors, folder / f"model-{number:05}.safetensors")
        tensors, size, number = {}, 0, number + 1

    # Shards are filled layer by layer, as published ones are.
    names = [(row, name, p) for p in parameters(config) for row, names in enumerate(p.tensors) for name in names]
    for _, name, parameter in sorted(names, key=lambda entry: entry[0]):
        shape = parameter.shape[1:] if parameter.by_expert else parameter.shape
        shape = shape[::-1] if parameter.matrix else shape
        x = (random.random(shape, np.float32) * 0.02 - 0.01).astype(ml_dtypes.bfloat16)
        if size + x.nbytes > shard:
            flush()
        tensors[name], places[name], size = x, f"model-{number:05}.safetensors", size + x.nbytes
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))


def memory(name: str) -> int:
    """Bytes that Linux says this process holds (VmRSS) or has held at most since it began (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def measure(folder: Path, layers: str) -> dict:
    """Load in this process and look at what it took."""
    reads, genuine = [], checkpoint.read_slice

    def counted(tensor, index):
        piece = genuine(tensor, index)
        reads.append(piece.nbytes)
        return piece

    checkpoint.read_slice = counted
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    bytes_before, begun = memory("VmRSS"), time.perf_counter()
    model = jax.block_until_ready(load(folder, dtype="bf16", layers=layers))
    seconds, peak = time.perf_counter() - begun, memory("VmHWM") - bytes_before
    weights = array_bytes(model.params)
    files = list(folder.glob("*.safetensors"))
    return {
        "layers": layers,
        "weights_gb": weights / GB,
        "read_gb": sum(reads) / GB,
        "largest_shard_gb": max(file.stat().st_size for file in files) / GB,
        "peak_gb": peak / GB,
        "peak_over_weights_gb": (peak - weights) / GB,
        "seconds": seconds,
    }


def main(
    folder: Path,
    gigabytes: float = 3.0,
    shard: float = 1.0,
    family: Annotated[str, typer.Option(help=", ".join(FAMILIES))] = "experts",
    only: Annotated[str, typer.Option(help="load in this process, layers as named")] = "",
) -> None:
    """Write the checkpoint if it is absent, then load it, layers as stacks and as a list."""
    if only:
        typer.echo(
            json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in measure(folder, only).items()})
        )
        return
    if not folder.exists():
        write(folder, config_of_size(family, gigabytes * GB), shard * GB)
    for layers in ("scan", "unroll"):
        command = [sys.executable, "-m", "benchmarks.load_peak", str(folder), "--only", layers]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    typer.run(main)
