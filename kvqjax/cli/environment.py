"""What the command line sets for JAX: before it is imported, which kinds of devices it shall look for; where compiled
programs are kept from one run to the next; how Ctrl-C ends a process with JAX's threads in it."""

import hashlib
import os
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from kvqjax._errors import UserError
from kvqjax._folders import user_folder

__all__ = [
    "MOST_BYTES",
    "compiling_seconds",
    "end_stopped",
    "ending_at_once",
    "keep_programs",
    "keep_programs_by_default",
    "look_for_present_devices",
    "program_folder",
]

GOOGLE = "0x1ae0"  # the PCI vendor of TPUs
GPUS = ("dev/nvidiactl", "dev/nvmap", "dev/dxg", "dev/kfd")  # NVIDIA's, a Jetson's, Windows' through WSL, AMD's
GPU_PLUGINS = ("xla_cuda", "xla_rocm")  # how their names begin; others are for devices that are not looked for here
MOST_BYTES = 2 * 2**30  # a run of `generate` with the bundled model keeps 0.4 MiB on a CPU, larger models more


# --- Devices


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
    gpus = [name for name in plugins if name.startswith(GPU_PLUGINS)]
    if len(gpus) < len(plugins) or not (gpus or find_spec("libtpu")):
        return
    try:
        present = any((root / name).exists() for name in GPUS) or _has_tpu(root)
    except OSError:
        return
    if not present:
        environment["JAX_PLATFORMS"] = "cpu"


# --- Compiled programs


def _processor() -> str:
    """What tells this processor from others that may share the user's home: a program that XLA compiled for one may use
    instructions which another has not."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    flags = sorted({line for line in lines if line.lower().startswith(("flags", "features", "model name"))})
    about = "\n".join([platform.machine(), platform.processor(), *flags])
    return hashlib.sha256(about.encode()).hexdigest()[:8]


def program_folder() -> Path:
    """The folder below the user's cache folder that keeps programs for this processor. Raises UserError for a user
    without a home."""
    return user_folder("programs") / _processor()


def _writable(folder: Path) -> bool:
    """Say whether JAX can make `folder` and write to it. Makes nothing."""
    present = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return present is not None and present.is_dir() and os.access(present, os.W_OK | os.X_OK)


def _set(name: str, value: object) -> None:
    """Set an option of JAX, which may be imported later or be imported already."""
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(name.lower(), value)


def keep_programs(folder: Path | None, most_bytes: int = -1) -> None:
    """Keep the programs that this process compiles.

    Args:
        folder: where; None keeps none. A folder that cannot be written is no error: one line says so, and programs are
            compiled anew each time.
        most_bytes: of all programs in the folder; those used least recently go first. -1: no limit.
    """
    if folder is not None and not _writable(folder.absolute()):
        print(f"warning: {folder} cannot be written; compiled programs are not kept", file=sys.stderr)
        folder = None
    _set("JAX_COMPILATION_CACHE_DIR", None if folder is None else str(folder))
    _set("JAX_COMPILATION_CACHE_MAX_SIZE", most_bytes)
    _set("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 0.0)  # many small programs take a second together
    # A full disk, or another run that holds the folder, costs programs and no results.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry", UserWarning)


def keep_programs_by_default() -> None:
    """Keep compiled programs in the user's cache folder, at most MOST_BYTES of them. A folder that was set for JAX
    stays as it is, and nothing is said where the user's cannot be written."""
    jax = sys.modules.get("jax")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or (jax and jax.config.jax_compilation_cache_dir is not None):
        return
    try:
        folder = program_folder()
    except UserError:
        return
    if _writable(folder):
        keep_programs(folder, MOST_BYTES)


@contextmanager
def compiling_seconds() -> Iterator[list[float]]:
    """Yields a list that gets the seconds of every compilation, or of reading a program that was kept."""
    from jax import monitoring

    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        monitoring.unregister_event_duration_listener(listen)


# --- Ctrl-C


def end_stopped() -> NoReturn:
    """Say "stopped" and end the process with exit code 130, at once: threads of JAX that still compute crash where
    Python takes its own end."""
    with suppress(OSError):  # a pipe that nobody reads any more
        sys.stdout.flush()
    print("stopped", file=sys.stderr, flush=True)
    os._exit(130)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process while modules are imported. Nothing is lost then, and libraries that are interrupted
    in their import make other errors of it."""
    handler, in_main = signal.getsignal(signal.SIGINT), threading.current_thread() is threading.main_thread()
    if handler is not signal.default_int_handler or not in_main:  # ignored, another program's, or not ours to set
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: end_stopped())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
