"""The GPU kernel's body, simulated on the CPU, against decoding everything and attending exactly.

Bound: as for the TPU kernel (`kernel_cases.near`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_simulator import install
from kernel_cases import Case, make_body, make_query, near, oracle

from kvqjax.pallas_kernels import gpu, gpu_kernel

# A last tile that is moved back into the body; two steps for a tile, rows of two tokens that fill two tiles of columns.
FOUR = Case(key_bits=4, value_bits=4, key_group=128, value_group=128, kv_heads=1, head_dim=128, group=4, slots=768)
TWO = Case(
    key_bits=2, value_bits=2, key_group=128, value_group=128, kv_heads=1, head_dim=128, group=8, length=2, slots=1024
)


def magic(half, shift: int, mask: int):
    """What `gpu_kernel.magic_bits` does to a register, on every number by itself."""
    moved = (half >> jnp.uint16(shift)) & jnp.uint16(mask)
    return jax.lax.bitcast_convert_type(moved | jnp.uint16(0x4300), jnp.bfloat16)


@pytest.fixture
def simulated(monkeypatch):
    install(monkeypatch, gpu, gpu_kernel)
    monkeypatch.setattr(gpu_kernel, "_plane", lambda factors: factors[...].reshape(64))
    monkeypatch.setattr(gpu_kernel, "_magic", magic)


@pytest.mark.parametrize(("case", "splits"), [(FOUR, 2), (TWO, 1)], ids=str)
def test_kernel_equals_the_oracle(simulated, case, splits):
    body, key, value = make_body(case)
    q, start, stop = make_query(case)
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    want = oracle(q, key, value, start, stop)
    with jax.disable_jit():
        got = gpu.packed_attention(q, body, 1, start, stop, case.spec, splits=splits)
    near(got, want, key, value, q)
