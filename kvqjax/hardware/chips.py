"""Chips that are not there, described to their compilers: TPU slices to libtpu, NVIDIA GPUs to
XLA's CUDA plugin."""

import math
import os
from typing import Any

from jax.experimental import topologies

from kvqjax._errors import UserError
from kvqjax.hardware.devices import DEVICES, GIB, GPUS


def slice_of(name: str, devices: int = 1) -> str:
    """Name the TPU slice of at least four chips with `devices` devices: "v5e:4x4" for 16. A v7x
    chip is two devices. GPUs are all on one host."""
    prefix, axes = DEVICES[name].torus
    if not prefix:
        return f"1x1x{devices}"
    chips = max(4, -(-devices // 2) if name == "v7x" else devices)
    shape = [1] * (axes - 2) + [2, 2]
    while math.prod(shape) < chips:
        shape = sorted([2 * shape[0], *shape[1:]])
    return f"{prefix}:{'x'.join(map(str, shape if axes == 2 or shape[0] > 1 else shape[::-1]))}"


def _gpu_text(name: str) -> str:
    """A GPU as XLA's GpuTargetConfig in text form."""
    gpu, device = GPUS[name], DEVICES[name]
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.shared,
        "threads_per_core_limit": gpu.threads,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": device.bandwidth * 10**9,
        "l2_cache_size": gpu.cache,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": int(device.memory * GIB),
        "shared_memory_per_block_optin": gpu.most_shared,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    listed = " ".join(f"{field}: {value}" for field, value in fields.items())
    major, minor = gpu.capability
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return (
        f'gpu_device_info {{ {listed} {capability} }} platform_name: "CUDA" '
        f'dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "NVIDIA {name}"'
    )


def chip_devices(name: str, count: int = 1) -> list:
    """Devices of a slice of chips that are not there, at least `count`. TPUs need libtpu, GPUs
    JAX's CUDA plugin and ptxas. Raises UserError where they cannot be described."""
    topology: dict[str, Any] = {"platform": "tpu", "topology_name": slice_of(name, count)}
    package = "libtpu"
    if name in GPUS:
        topology = {"platform": "cuda", "topology_name": "cuda", "topology": slice_of(name, count)}
        topology["target_config"], package = _gpu_text(name), "jax-cuda13-plugin jax-cuda13-pjrt"
    # libtpu reads these when it is loaded: no queries to a cloud's metadata server, no lock against
    # other processes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return list(topologies.get_topology_desc(**topology).devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"no compiler for {name} here (pip install {package}): {reason}") from error
