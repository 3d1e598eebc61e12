"""Chips that are not there, described to their compilers: TPU slices to libtpu, NVIDIA GPUs to XLA's CUDA plugin."""

import math
import os
from typing import Any, NamedTuple

from jax.experimental import topologies

from kvqjax._errors import UserError
from kvqjax.hardware.devices import DEVICES, GIB

__all__ = ["chip_devices", "slice_of", "target_name"]


class Gpu(NamedTuple):
    """What XLA asks of a GPU: compute capability, multiprocessors, float32 units and resident threads of each, bytes of
    shared memory each has and one block may take, bytes of second-level cache, clock in GHz; and our kernels' target.
    """

    capability: tuple[int, int]
    cores: int
    units: int
    threads: int
    shared: int
    most_shared: int
    cache: int
    clock: float
    target: str


_A100 = Gpu((8, 0), 108, 64, 2048, 167936, 166912, 41943040, 1.41, "sm80")
_HOPPER = Gpu((9, 0), 132, 128, 2048, 233472, 232448, 52428800, 1.98, "sm90")
GPUS = {
    "t4": Gpu((7, 5), 40, 64, 1024, 65536, 65536, 4194304, 1.59, "sm75"),
    "a10g": Gpu((8, 6), 80, 128, 1536, 102400, 101376, 6291456, 1.71, "sm86"),
    "l4": Gpu((8, 9), 58, 128, 1536, 102400, 101376, 50331648, 2.04, "sm89"),
    "l40s": Gpu((8, 9), 142, 128, 1536, 102400, 101376, 100663296, 2.52, "sm89"),
    "a100-40": _A100,
    "a100-80": _A100,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": Gpu((10, 0), 148, 128, 2048, 233472, 232448, 132120576, 1.97, "sm100"),
    "rtx3090": Gpu((8, 6), 82, 128, 1536, 102400, 101376, 6291456, 1.695, "sm86"),
    "rtx4090": Gpu((8, 9), 128, 128, 1536, 102400, 101376, 75497472, 2.52, "sm89"),
}


def target_name(chip: str) -> str:
    """What attention kernels and forms of storage call a chip of `DEVICES`; "cpu" is what runs everywhere."""
    return GPUS[chip].target if chip in GPUS else {"v4": "cpu"}.get(chip, chip)


def slice_of(name: str, devices: int = 1) -> str:
    """The TPU slice of at least four chips that has so many devices: "v5e:4x4" for 16. A v7x chip is two devices. Of
    GPUs, as many on one host."""
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
    """Devices of a slice of chips that are not there, at least `count`. TPUs need libtpu, GPUs JAX's CUDA plugin and
    ptxas. Raises UserError where they cannot be described."""
    topology: dict[str, Any] = {"platform": "tpu", "topology_name": slice_of(name, count)}
    package = "libtpu"
    if name in GPUS:
        topology = {"platform": "cuda", "topology_name": "cuda", "topology": slice_of(name, count)}
        topology["target_config"], package = _gpu_text(name), "jax-cuda13-plugin jax-cuda13-pjrt"
    # libtpu reads these when it is loaded: no queries to a cloud's metadata server, no lock against other processes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return list(topologies.get_topology_desc(**topology).devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"no compiler for {name} here (pip install {package}): {reason}") from error
