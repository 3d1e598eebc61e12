"""Time of encoding 4096 tokens x 1024 channels by KVQuant, beside the authors' torch simulation in the same run.

    python benchmarks/kvquant_encode.py [--official simquant_module_quantizer.py] [--tokens 4096] [--width 1024]

The file is `quant/kvquant/simquant_module_quantizer.py` of github.com/SqueezeAILab/KVQuant at commit 57a2383; without
it only our times are printed. Its functions quantise and dequantise at once, ours stop at codes and outliers, so our
decoding is timed too and the ratio is that of the round trip. Runs alternate and the least of the repeats counts:
wall time, and the process's CPU time over all threads, which other load on the machine disturbs less.
"""

import argparse
import importlib.util
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from kvqjax.codecs.nuq import Nuq


def data(tokens: int, width: int) -> np.ndarray:
    """Signed, low rank plus noise, an offset per channel, a few large channels and spikes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(tokens, 16)) @ rng.normal(size=(16, width)) + rng.normal(size=(tokens, width))
    x = x * np.where(rng.random(width) < 0.02, 8, 1) + rng.normal(size=width)
    return np.where(rng.random(x.shape) < 0.001, 10 * x, x).astype(np.float32)


def ours(x: np.ndarray, bits: int) -> dict:
    """Round trip and encoding of keys and values, compiled."""
    upper, lower = (jnp.asarray(np.percentile(x, p, axis=0).astype(np.float32)) for p in (99.5, 0.5))
    constants = {"upper": upper, "lower": lower, "signposts": jnp.linspace(-0.95, 0.95, 2**bits)}
    array, runs = jnp.asarray(x), {}
    for name, per in (("keys", "channel"), ("values", "token")):
        codec = Nuq(bits=bits, per=per, outliers=0.01).build(x.shape[1])
        encode = jax.jit(codec.encode)
        both = jax.jit(lambda c, a, codec=codec: codec.decode(c, codec.encode(c, a)))
        runs[name, "encode"] = lambda encode=encode: jax.block_until_ready(encode(constants, array))
        runs[name, "round trip"] = lambda both=both: jax.block_until_ready(both(constants, array))
    return runs


def official(path: str, x: np.ndarray, bits: int) -> dict:
    """The released simulation's round trip of keys and values."""
    import torch

    if importlib.util.find_spec("sklearn") is None:  # imported by the file, not used by what is timed
        sys.modules["sklearn"] = types.ModuleType("sklearn")
        sys.modules["sklearn.cluster"] = types.ModuleType("sklearn.cluster")
        sys.modules["sklearn.cluster"].KMeans = None
    spec = importlib.util.spec_from_file_location("official", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    array, table = torch.from_numpy(x), [np.linspace(-0.95, 0.95, 2**bits, dtype=np.float32)[:, None]]
    upper, lower = (torch.from_numpy(np.percentile(x, p, axis=0).astype(np.float32)) for p in (99.5, 0.5))

    def keys():
        mask = module.get_outliers(array, channel=0, outlier_threshold_upper=upper, outlier_threshold_lower=lower)
        return module.quant_fn_nuq_recon(
            array, bits=bits, qchannel=0, include_sparse=True, outlier_mask=mask, maxval=upper, minval=lower, lut=table
        )

    def values():
        mask = module.get_outliers_dynamic(array, channel=-1, thresh=0.99)
        return module.quant_fn_nuq_recon(
            array, bits=bits, qchannel=-1, dynamicquantization=True, include_sparse=True, outlier_mask=mask, lut=table
        )

    return {("keys", "released"): keys, ("values", "released"): values}


def least(runs: dict, repeats: int) -> dict:
    """Least wall and CPU seconds of each function, the functions taking turns; the first round only warms up."""
    best = dict.fromkeys(runs, (np.inf, np.inf))
    for turn in range(repeats + 1):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            if turn:
                best[name] = tuple(map(min, best[name], spent))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--official")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    x = data(options.tokens, options.width)
    runs = ours(x, options.bits) | (official(options.official, x, options.bits) if options.official else {})
    best = least(runs, options.repeats)
    table = Table(
        "", "what", "wall ms", "CPU ms", "released / this (wall)", title=f"{x.shape}, {options.bits} bits, 1 %"
    )
    for (name, what), (wall, cpu) in sorted(best.items()):
        ratio = best[name, "released"][0] / wall if (name, "released") in best else np.nan
        table.add_row(name, what, f"{wall * 1e3:.1f}", f"{cpu * 1e3:.1f}", f"{ratio:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
