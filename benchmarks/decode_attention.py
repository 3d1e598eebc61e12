"""Attention of a decode step over a long context: packed keys and values against bfloat16, all in one run.

    python benchmarks/decode_attention.py [--out benchmarks/records/decode_attention.json]
    python benchmarks/decode_attention.py --contexts 2048 --batches 1 --groups 4 --kv-heads 2 --copy-mib 64   # on a CPU

Runs on any backend, at contexts that are multiples of 1024. Packed rows are KIVI, KIVI* (keys before RoPE) and KVQuant
(signposts, without outliers) by this library's kernels on TPUs and on GPUs of the Hopper generation; elsewhere, and
where there is no kernel, computed block by block in jnp. bfloat16 is `jax.nn.dot_product_attention`, by cuDNN on GPUs,
and on Hopper also our own kernel split over tokens. Times are medians after a warm-up, each over several calls in one
program. Every result is compared with float32 in the same run; a wrong or missing one of ours fails the run. `copy` is
the share of the bandwidth of a plain copy, measured in this run too, at which a row's stored bytes are read.
"""

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvqjax._timing import copy_rate, machine, median_seconds
from kvqjax.ops.attention import blockwise_attention
from kvqjax.pallas_kernels import reference, support
from kvqjax.pallas_kernels.forms import form_of
from kvqjax.pallas_kernels.packed import target_of

sys.path.insert(0, str(Path(__file__).parent))
from packed_bodies import FORMS, HEAD_DIM, STRETCH, decoded, random_body, spec_of

WRONG = 0.03  # relative error of the output; bfloat16 probabilities and queries make it a few thousandths


class Way(NamedTuple):
    """One way to attend: its name, `call(q, *arrays)`, its arrays, and the float32 oracle on the same arrays."""

    name: str
    call: Callable
    arrays: tuple[Any, ...]
    oracle: Callable


def _target() -> str:
    return target_of(jnp.zeros(()))


def _packed(key, form: str, bits: int, batch: int, slots: int, kv_heads: int) -> Way:
    """Packed keys and values by the kernel of this device, where there is one."""
    spec = spec_of(form, bits, kv_heads, _target())
    bounds = jnp.zeros((batch, 1), jnp.int32), jnp.full((batch, 1), slots, jnp.int32)

    def oracle(q, body):
        if spec.plain:
            return reference.packed_attention(q, body, 0, *bounds, spec)
        return _blockwise(q, kv_heads, slots, lambda token: decoded(body, spec, token))

    call, kind = oracle, "reference"
    if support.lookup(form_of(spec), spec.target) is not None:
        name, kind = ("gpu", "Mosaic GPU kernel") if spec.target == "sm90" else ("tpu", "Pallas TPU kernel")
        module = importlib.import_module(f"kvqjax.pallas_kernels.{name}.packed")
        call = lambda q, body: module.packed_attention(q, body, 0, *bounds, spec)  # noqa: E731
    return Way(f"{form} {bits} bits, {kind}", call, (random_body(key, spec, batch, slots),), oracle)


def _blockwise(q, kv_heads: int, slots: int, read: Callable):
    """Exact attention, `read(token)` giving keys and values of STRETCH tokens in float32."""

    def block(j, _):
        mask = jnp.ones((q.shape[0], 1, STRETCH), bool)
        return *read(j * STRETCH), mask, None

    stop = jnp.int32(slots // STRETCH)
    return blockwise_attention(q.astype(jnp.float32), kv_heads, block, jnp.int32(0), stop)[0]


def _exact(key, batch: int, slots: int, kv_heads: int) -> list[Way]:
    """bfloat16 keys and values, by the best there is for this device and by our own kernel."""
    shape = (batch, slots, kv_heads, HEAD_DIM)
    arrays = tuple(jax.random.normal(k, shape, jnp.bfloat16) for k in jax.random.split(key))

    def oracle(q, k, v):
        def read(token):
            return [jax.lax.dynamic_slice_in_dim(x, token, STRETCH, 1).astype(jnp.float32) for x in (k, v)]

        return _blockwise(q, kv_heads, slots, read)

    library = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def theirs(q, k, v):
        with jax.numpy_dtype_promotion("standard"):  # it mixes types itself
            return jax.nn.dot_product_attention(q, k, v, implementation=library)

    ways = [Way(f"bfloat16, {library}", theirs, arrays, oracle)]
    if _target() == "sm90":
        from kvqjax.pallas_kernels.gpu.exact import exact_attention

        bounds = jnp.zeros((batch, 1), jnp.int32), jnp.full((batch, 1), slots, jnp.int32)

        def ours(q, k, v):
            return exact_attention(q, *(x.reshape(1, batch, slots, -1) for x in (k, v)), 0, *bounds)

        ways.append(Way("bfloat16, our kernel", ours, arrays, oracle))
    return ways


def _output(part):
    """The output [B, T, H, D] of attention that may come with its log-sum-exp."""
    return (part.out if hasattr(part, "out") else part).astype(jnp.float32)


def _timed(way: Way, q, inner: int, repeats: int) -> tuple[float, float]:
    """Seconds of one call, and the relative error of its output. The calls of a program feed each other, so that none
    of them can be left out; a query hardly changes."""

    @jax.jit
    def chain(q, *arrays):
        step = lambda _, x: q + (1e-3 * _output(way.call(x, *arrays))).astype(q.dtype)  # noqa: E731
        return jax.lax.fori_loop(0, inner, step, q)

    got = _output(jax.jit(way.call)(q, *way.arrays))
    want = _output(jax.jit(way.oracle)(q, *way.arrays))
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    return median_seconds(lambda: chain(q, *way.arrays), repeats) / inner, error


def _rows(options, context: int, batch: int, group: int, rate: float):
    """All ways at one size, each against the faster of the bfloat16 ones."""
    forms = list(itertools.product(options.forms, options.bits))
    query, exact, *packed = jax.random.split(jax.random.key(0), 2 + len(forms))
    q = jax.random.normal(query, (batch, 1, options.kv_heads * group, HEAD_DIM), jnp.bfloat16)
    size = {"context": context, "batch": batch, "kv_heads": options.kv_heads, "group": group}
    shape, rows = (batch, context, options.kv_heads), []
    makers = [lambda: _exact(exact, *shape)]
    makers += [lambda k=k, b=b: [_packed(k, *b, *shape)] for k, b in zip(packed, forms, strict=True)]
    for way in itertools.chain.from_iterable(make() for make in makers):
        try:
            seconds, error = _timed(way, q, options.inner, options.repeats)
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as problem:
            rows.append(size | {"way": way.name, "failed": str(problem).splitlines()[0]})
            continue
        nbytes = sum(x.nbytes for x in jax.tree.leaves(way.arrays))
        speed = {"microseconds": 1e6 * seconds, "copy": nbytes / seconds / rate}
        rows.append(size | {"way": way.name, **speed, "error": error})
    exact = [row["microseconds"] for row in rows if row["way"].startswith("bfloat16") and "failed" not in row]
    for row in rows:
        if exact and "failed" not in row:
            row["speed_against_bfloat16"] = min(exact) / row["microseconds"]
    return rows


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lists = {"contexts": "8192,32768,131072,524288", "batches": "1,8", "groups": "4,8", "bits": "2,3,4"}
    for name, default in lists.items():
        parser.add_argument(f"--{name}", default=default, type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--forms", default=",".join(FORMS), type=lambda text: text.split(","))
    for name, number in {"kv-heads": 8, "repeats": 10, "inner": 16, "copy-mib": 1024}.items():
        parser.add_argument(f"--{name}", default=number, type=int)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options, wrong = _arguments(), []
    rate = copy_rate(options.copy_mib * 2**20)
    rows = []
    for context, batch, group in itertools.product(options.contexts, options.batches, options.groups):
        for row in _rows(options, context, batch, group, rate):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if not row.get("error", 1) < WRONG and row["way"] != "bfloat16, cudnn":
                wrong.append(row["way"])
    report = {"machine": machine(), "copy_bytes_per_second": rate, "rows": rows}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["machine"] | {"copy_bytes_per_second": rate}))
    if wrong:
        sys.exit(f"failed or wrong: {', '.join(sorted(set(wrong)))}")


if __name__ == "__main__":
    main()
