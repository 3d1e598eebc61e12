"""What the command line sets for JAX: before it is imported, which kinds of devices it looks for,
and where compiled programs are kept from one run to the next."""

import hashlib
import os
import platform
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from kvqjax._errors import UserError
from kvqjax._folders import user_folder

GOOGLE = "0x1ae0"  # the PCI vendor of TPUs
# NVIDIA's, a Jetson's, Windows' through WSL, AMD's.
GPUS = (
    "dev/nvidiactl",
    "dev/nvmap",
    "dev/dxg",
    "dev/kfd",
)
# How their names begin; others are for devices that are not looked for here.
GPU_PLUGINS = (
    "xla_cuda",
    "xla_rocm",
)
_bounded: set[Path] = set()  # folders of programs that are ours
_troubles: set[Path] = set()  # folders of which a line was said
# JAX keeps two files of a program, KEY-cache and KEY-atime.
OTHER_FILE = {"cache": "atime", "atime": "cache"}
LOCKED_SECONDS = 5  # that another run may take to write a program
# A run of `generate` with the bundled model keeps 0.4 MiB on a CPU, larger models more.
MOST_BYTES = 2 * 2**30


# --- Devices


def _has_tpu(root: Path) -> bool:
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(file.read_text(errors="replace").strip() == GOOGLE for file in vendors)


def look_for_present_devices(
    environment: MutableMapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Have JAX use the CPU where a machine has no GPU or TPU but JAX's libraries for them are
    installed: these would search for a device, say on stderr that there is none, and ask the
    network for one, which takes half a minute.

    Args:
        environment: variables; nothing is set where JAX_PLATFORMS or PJRT's own ones say what is
            wanted.
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
    """What tells this processor from others that may share the user's home: a program that XLA
    compiled for one may use instructions which another has not."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    flags = sorted(
        {line for line in lines if line.lower().startswith(("flags", "features", "model name"))}
    )
    about = "\n".join([platform.machine(), platform.processor(), *flags])
    return hashlib.sha256(about.encode()).hexdigest()[:8]


def program_folder() -> Path:
    """The folder below the user's cache folder that keeps programs for this processor. Raises
    UserError for a user without a home."""
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
        folder: where; None keeps none. A folder that cannot be written is no error: one line says
            so, and programs are compiled anew each time.
        most_bytes: of all programs in the folder; those used least recently go first. -1: no limit.
    """
    if folder is not None and not _writable(folder.absolute()):
        print(
            f"warning: {folder} cannot be written; compiled programs are not kept", file=sys.stderr
        )
        folder = None
    if folder is None:
        most_bytes = -1
    elif most_bytes >= 0:
        _bounded.add(folder)
        _clear_remains(folder)
    _set("JAX_COMPILATION_CACHE_DIR", None if folder is None else str(folder))
    _set("JAX_COMPILATION_CACHE_MAX_SIZE", most_bytes)
    # Many small programs take a second together.
    _set("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 0.0)


def keep_programs_by_default() -> None:
    """Keep compiled programs in the user's cache folder, at most MOST_BYTES of them. A folder that
    was set for JAX stays as it is."""
    jax = sys.modules.get("jax")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or (
        jax and jax.config.jax_compilation_cache_dir is not None
    ):
        return
    try:
        folder = program_folder()
    except UserError:
        return
    keep_programs(folder, MOST_BYTES)


def _clear_remains(folder: Path) -> None:
    """Delete what a run that was killed left in a folder of bounded size.

    JAX writes a program as KEY-cache, then KEY-atime, and none of them at once. With a program that
    lacks its second file JAX keeps no further programs, and a file that is cut stays for ever."""
    if not folder.is_dir():
        return
    from filelock import FileLock

    try:
        with FileLock(
            folder / ".lockfile", timeout=LOCKED_SECONDS
        ):  # JAX's: another run may write just now
            names = [name for name in os.listdir(folder) if name.endswith(("-cache", "-atime"))]
            sizes = {name: (folder / name).stat().st_size for name in names}
            for name, size in sizes.items():
                key, _, kind = name.rpartition("-")
                if not (size and sizes.get(f"{key}-{OTHER_FILE[kind]}")):
                    (folder / name).unlink()
    except OSError as error:  # Timeout is one too
        _say_trouble(folder, f"{type(error).__name__}: {error}")


def trouble_with_programs(text: str) -> bool:
    """Deal with a warning of JAX's about the programs that are kept.

    A program that cannot be read is deleted, so that it is kept anew. Of anything else one line is
    said: a full disk, or another run that holds the folder, costs time and no results.

    Args:
        text: of the warning.

    Returns:
        Whether the warning is about these.
    """
    beginning, _, rest = text.partition(" persistent compilation cache entry for ")
    if beginning not in ("Error reading", "Error writing"):
        return False
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", ""))
    reason = rest.partition(": ")[2]
    is_damaged = beginning == "Error reading" and not reason.startswith("Timeout")
    if not (is_damaged and folder in _bounded and _dropped_last_read(folder)):
        _say_trouble(folder, reason)
    return True


def _dropped_last_read(folder: Path) -> bool:
    """Delete the program of a bounded folder that was read last, by its KEY-atime. False where
    there is none."""
    try:
        times = sorted(folder.glob("*-atime"), key=lambda path: path.stat().st_mtime_ns)
        if not times:
            return False
        program = times[-1].with_name(times[-1].name.removesuffix("-atime") + "-cache")
        program.unlink(missing_ok=True)
        times[-1].unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _say_trouble(folder: Path, reason: str) -> None:
    if folder not in _troubles:
        _troubles.add(folder)
        why = " ".join(reason.split())
        print(
            f"warning: {folder}: programs are compiled anew, as they cannot be kept: {why}",
            file=sys.stderr,
        )


@contextmanager
def compiling_seconds() -> Iterator[list[float]]:
    """Yields a list that gets the seconds of every compilation, or of reading a program that was
    kept."""
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
