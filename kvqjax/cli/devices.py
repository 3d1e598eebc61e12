"""Which kinds of devices JAX shall look for, set before it is imported."""

import os
import sys
from collections.abc import MutableMapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

__all__ = ["look_for_present_devices"]

GOOGLE = "0x1ae0"  # the PCI vendor of TPUs
GPUS = ("dev/nvidiactl", "dev/nvmap", "dev/dxg", "dev/kfd")  # NVIDIA's, a Jetson's, Windows' through WSL, AMD's
OURS = ("xla_cuda", "xla_rocm")  # plugins of GPUs begin so; others are for devices that are not looked for here


def _has_tpu(root: Path) -> bool:
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(file.read_text(errors="replace").strip() == GOOGLE for file in vendors)


def look_for_present_devices(environment: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Have JAX use the CPU where a machine has no GPU or TPU but JAX's libraries for them are installed: these would
    search for a device, say on stderr that there is none, and ask the network for one, which takes half a minute.

    Args:
        environment: variables; nothing is set where JAX_PLATFORMS or PJRT's own ones say what is wanted.
        root: the machine's file system.
    """
    if sys.platform != "linux" or any(
        name.startswith(("JAX_PLATFORM", "PJRT_", "TPU_LIBRARY")) for name in environment
    ):
        return
    plugins = [plugin.name for plugin in entry_points(group="jax_plugins")]
    gpus = [name for name in plugins if name.startswith(OURS)]
    if len(gpus) < len(plugins) or not (gpus or find_spec("libtpu")):
        return
    try:
        present = any((root / name).exists() for name in GPUS) or _has_tpu(root)
    except OSError:
        return
    if not present:
        environment["JAX_PLATFORMS"] = "cpu"
