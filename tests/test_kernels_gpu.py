"""The GPU kernel's body, simulated on the CPU, against decoding everything and attending exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_simulator import install
from kernel_cases import Case, make_body, make_query, near, oracle

from kvqjax.pallas_kernels import gpu, gpu_kernel

FOUR = Case(key_bits=4, value_bits=4, key_group=128, value_group=128, kv_heads=2, head_dim=128, group=4, slots=1280)
TWO = Case(
    key_bits=2, value_bits=2, key_group=128, value_group=128, kv_heads=1, head_dim=128, group=8, length=2, slots=1536
)


def magic(half, shift: int, mask: int):
    """What the registers do, on every number by itself."""
    return jax.lax.bitcast_convert_type(((half >> jnp.uint16(shift)) & jnp.uint16(mask)) | jnp.uint16(0x4300), jnp.bfloat16)


@pytest.fixture
def simulated(monkeypatch):
    install(monkeypatch, gpu, gpu_kernel)
    monkeypatch.setattr(gpu_kernel, "_plane", lambda factors, plane: factors[:, plane].reshape(64))
    monkeypatch.setattr(gpu_kernel, "_magic", magic)
    with jax.disable_jit():
        yield


@pytest.mark.parametrize(("case", "splits"), [(FOUR, 2), (TWO, 1)], ids=str)
def test_kernel_equals_the_oracle(simulated, case, splits):
    body, key, value = make_body(case)
    q, start, stop = make_query(case)
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    got = gpu.packed_attention(q, body, 1, start, stop, case.spec, splits=splits)
    near(got, oracle(q, key, value, start, stop), key, value, q)
