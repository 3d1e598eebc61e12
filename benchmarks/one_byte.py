"""KVarN with scales and factors of one byte, as its paper counts them, beside those of 16 bits: does quality hold?

    python -m benchmarks.one_byte [--shape recall] [--windows 16]

A byte has 5 bits of exponent and 3 of mantissa, and no sign. Scales are rounded up before codes are taken, factors to
the nearest before they are divided out, so that the error is that of storing a byte; minima keep 16 bits. Bodies still
hold them in 16 bits, so that `bits` count them so: a byte each would be 0.125 less at a head_dim of 128.
"""

import argparse
import json
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from benchmarks.gate import KEY, SHAPES, key_of, measure
from kvqjax.codecs import balanced, uniform

RECORD = Path(__file__).parent / "records" / "one_byte.json"
CACHE = "kvarn:bits=2,sinks=4"
DROPPED = 23 - 3  # bits of a float32's mantissa that a byte has no room for


def byte(x: Float[Array, "*S"], up: bool) -> Float[Array, "*S"]:
    """Positive numbers to 3 bits of mantissa, up or to the nearest."""
    lift = (1 << DROPPED) - 1 if up else 1 << (DROPPED - 1)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + jnp.uint32(lift)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(~((1 << DROPPED) - 1) & 0xFFFFFFFF), jnp.float32)


def scales(x, axis: int, bits: int, dtype: str):
    """As `uniform._parameters`, with the scale of one byte."""
    low = uniform.round_toward(x.min(axis, keepdims=True), dtype, up=False)
    step = (x.max(axis, keepdims=True) - low.astype(jnp.float32)) / (2**bits - 1)
    return byte(step, up=True).astype(dtype), low


def rows(shape: str, windows: int) -> list[dict]:
    """The row with 16 bits and that with a byte, measured alike."""
    row = {"shape": shape, "cache": CACHE, "stress": "none", "mode": "copy"}
    plain = measure(row, windows)
    jax.clear_caches()
    factor = lambda x, dtype: byte(x, up=False).astype(dtype)  # noqa: E731
    with mock.patch.object(uniform, "_parameters", scales), mock.patch.object(balanced, "saturated", factor):
        found = measure(row, windows)
    jax.clear_caches()
    return [plain, found | {"cache": f"{CACHE}, scales of one byte"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--windows", type=int, default=16)
    given = parser.parse_args()
    done = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    for shape in given.shape or SHAPES:
        new = rows(shape, given.windows)
        done = [row for row in done if row["shape"] != shape] + new
        text = ",\n ".join(json.dumps(row) for row in sorted(done, key=lambda row: [row[name] for name in KEY]))
        RECORD.write_text(f"[\n {text}\n]\n", encoding="utf-8")
        for row in new:
            print(key_of(row), row["ratio"], row["kld"], flush=True)


if __name__ == "__main__":
    main()
