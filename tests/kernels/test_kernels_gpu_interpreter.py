"""The GPU kernels in JAX's own interpreter for Mosaic GPU (JAX >= 0.12; its interface is private),
against the oracle.

The exact kernel runs as it is, with races looked for. For the packed one some things stand in: the
interpreter has neither products with the left operand in registers nor code on registers, so the
first is computed here, and the functions of `gpu.words` run on numpy as in tests/gpu_simulator.py.
"""

import dataclasses

import exact_bodies
import jax
import jax.numpy as jnp
import klt_bodies
import numpy as np
import pytest
from gpu_simulator import install_words, traced_packed
from kernel_cases import Case, near, oracle
from kernel_forms import case_of, inputs, name

from kvqjax.pallas_kernels.gpu import coefficients as gpu_coefficients
from kvqjax.pallas_kernels.gpu import exact as gpu_exact
from kvqjax.pallas_kernels.gpu import keys as gpu_keys
from kvqjax.pallas_kernels.gpu import klt as gpu_klt
from kvqjax.pallas_kernels.gpu import lookup as gpu_lookup
from kvqjax.pallas_kernels.gpu import packed as gpu
from kvqjax.pallas_kernels.gpu import unpack as gpu_unpack

callbacks = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(
        jax.__version_info__ < (0, 12),
        reason="JAX's GPU interpreter knows these kernels from 0.12 on",
    ),
]

CASE = Case(
    key_bits=4,
    value_bits=4,
    key_group=128,
    value_group=128,
    kv_heads=1,
    head_dim=128,
    group=4,
    slots=512,
)
SHORT = dataclasses.replace(CASE, key_group=32, value_group=32)
FORMS = [
    CASE,
    SHORT,
    case_of(4, kv_heads=1, slots=512),
    case_of(2, datatype="nuq", kv_heads=1, slots=512),
    dataclasses.replace(SHORT, key_factors=1),
    dataclasses.replace(CASE, key_factors=1, value_factors=True),
    dataclasses.replace(CASE, key_group=0, key_channels=128, datatype="nuq"),
]


def interpreted(call, **options):
    """What `call()` returns when its GPU kernels are interpreted as on an H200."""
    from jax._src.pallas.mosaic_gpu.interpret.params import (
        InterpretGPUParams,
        force_gpu_interpret_mode,
    )

    chip = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        force_gpu_interpret_mode(InterpretGPUParams(**options)),
    ):
        return jax.tree.map(np.asarray, call())


def test_exact_kernel_runs_without_races():
    """Two tiles a program, and tokens beside the body."""
    spec, q, body, key, value, start, stop = exact_bodies.make(128, 512, length=2)
    recent = exact_bodies.recent_of(spec, length=2)

    def attend():
        return gpu_exact.packed_attention(q, body, 1, start, stop, spec, recent[0], splits=2)

    got = interpreted(attend, detect_races=True)
    want = exact_bodies.oracle_with(recent, q, key, value, start, stop)
    near(got, want, key, value, q)


def product(theirs):
    """`theirs`, and products whose left operand is a value."""

    def run(**call):
        left = np.asarray(call["a_allocation_key_as_array"])
        if left.dtype != jnp.bfloat16:
            return theirs(**call)
        memory, thread = callbacks._get_shared_memory(), call["thread"]
        log = callbacks.memory.GPULoggingInfo(call["mesh_location"], thread, call["source_info"])

        def view(name):
            key = callbacks.HostAllocationKey.from_array(call[f"{name}_allocation_key_as_array"])
            return key, memory.access(
                key,
                jax.tree.map(int, callbacks._remove_noop_transforms(call[f"{name}_transforms"])),
            )

        right = memory.get_buffer_content(*view("b"), thread, logging_info=log)[0]
        acc = memory.get_buffer_content(*view("acc"), thread, logging_info=log)[0]
        total = acc + left.astype(np.float32) @ np.asarray(right).astype(np.float32)
        memory.store_buffer_content(*view("acc"), total, thread, logging_info=log)
        return call["token"]

    return run


@pytest.mark.parametrize("case", FORMS, ids=name)
def test_packed_kernel_equals_the_oracle(monkeypatch, case):
    monkeypatch.setattr(callbacks, "wgmma", product(callbacks.wgmma))
    install_words(monkeypatch, gpu_unpack, gpu_lookup, gpu_keys, packed=traced_packed)
    q, body, key, value, start, stop = inputs(case)

    def attend():
        return gpu.packed_attention(q, body, 1, start, stop, case.spec, splits=1)

    # Races are looked for where keys have numbers of their tokens.
    got = interpreted(attend, detect_races=case.key_factors > 0 or case.key_channels > 0)
    near(got, oracle(q, key, value, start, stop), key, value, q)


def test_coefficients_kernel_equals_the_oracle(monkeypatch):
    monkeypatch.setattr(callbacks, "wgmma", product(callbacks.wgmma))
    install_words(monkeypatch, gpu_coefficients, packed=traced_packed)
    spec, q, body, key, value, start, stop = klt_bodies.make(2.0)
    got = interpreted(lambda: gpu_klt.packed_attention(q, body, 1, start, stop, spec, splits=1))
    near(got, oracle(q, key, value, start, stop), key, value, q)
