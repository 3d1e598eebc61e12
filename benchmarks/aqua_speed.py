"""Encode throughput of HIGGS on this machine, and of the authors' torch code beside it where a checkout is given.

    python -m benchmarks.aqua_speed [--aquakv FOLDER] [--width 1024] [--tokens 512] [--repeats 5] [--record FILE]

FOLDER is a checkout of github.com/goodevening13/aquakv (e744183). Its CUDA transform is replaced by a torch product
with the same Hadamard matrix, and its unused import of quanto by an empty module. The two run in turn; the best of
`repeats` counts.
"""

import argparse
import json
import os
import platform
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax.codecs.hadamard import hadamard
from kvqjax.codecs.higgs import Higgs

SETTINGS = ((2, 2), (3, 2), (4, 2), (2, 4))  # bits, dimensions: those that the authors' 8-bit indices can hold


def ours(x: np.ndarray, bits: int, dim: int):
    """A function that encodes x once."""
    codec = Higgs(bits=bits, dim=dim, dtype="float32").build(x.shape[1])
    encode, data = jax.jit(lambda x: codec.encode({}, x)), jnp.asarray(x)
    return lambda: jax.block_until_ready(encode(data))


def theirs(folder: Path, x: np.ndarray, bits: int, dim: int):
    """The same with the authors' quantiser."""
    import torch

    def transform(x, scale=1.0):
        matrix = torch.from_numpy(hadamard(x.shape[-1]).astype(np.float32)).to(x.dtype)
        return x @ matrix * scale

    quanto = types.SimpleNamespace(MaxOptimizer=None, qint2=None, qint4=None, quantize_weight=None)
    sys.modules.setdefault("fast_hadamard_transform", types.SimpleNamespace(hadamard_transform=transform))
    sys.modules.setdefault("optimum", types.ModuleType("optimum"))
    sys.modules.setdefault("optimum.quanto", quanto)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    from aquakv import quantizers

    torch.set_grad_enabled(False)
    width, data = x.shape[1], torch.from_numpy(x)
    made = quantizers.HiggsQuantizer(min(1024, width), dim, 2 ** (bits * dim), channel_size=width)
    return lambda: made.quantize(data)


def best(functions: list, repeats: int) -> list[float]:
    """Best seconds of each function, all run in turn so that a busy machine slows them alike."""
    times = [[] for _ in functions]
    for _ in range(repeats + 1):
        for kept, function in zip(times, functions, strict=True):
            start = time.perf_counter()
            function()
            kept.append(time.perf_counter() - start)
    return [min(kept[1:]) for kept in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aquakv", type=Path)
    for name, value in (("width", 1024), ("tokens", 512), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    rows = []
    x = np.random.default_rng(0).normal(size=(given.tokens, given.width)).astype(np.float32)
    for bits, dim in SETTINGS:
        functions = [ours(x, bits, dim)] + ([theirs(given.aquakv, x, bits, dim)] if given.aquakv else [])
        rates = [x.size / seconds / 1e6 for seconds in best(functions, given.repeats)]
        row = {"bits": bits, "dim": dim, "million_values_per_second": round(rates[0], 2)}
        if given.aquakv:
            row |= {"authors": round(rates[1], 2), "ratio": round(rates[0] / rates[1], 2)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if given.record:
        machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} core(s), jax {jax.__version__}"
        about = {"machine": machine, "width": given.width, "tokens": given.tokens, "repeats": given.repeats}
        given.record.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
