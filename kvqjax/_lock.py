"""One writer for a file or folder at a time."""

import datetime
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvqjax._errors import UserError, unwritten

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None


def _acquired(lock: Path, path: Path) -> int:
    """Descriptor of the lock file, which is ours from now on. The system frees it when the process
    ends, however."""
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace").strip() or "another process"
            os.close(file)
            raise UserError(
                f"{path} is being written by {holder}; wait for its end, or choose another place"
            ) from None
        # The holder before us may have removed the file before we locked it: then our lock excludes
        # no other run.
        if lock.exists() and os.path.samestat(os.fstat(file), lock.stat()):
            return file
        os.close(file)


@contextmanager
def held(path: Path | None) -> Iterator[None]:
    """Keep `path` (None: nothing) to this process, by a file `path`.lock beside it that is gone
    afterwards. Raises UserError with the holder's name where another process has it, or where
    nothing can be written."""
    if path is None:
        yield
        return
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _acquired(lock, path)
    except OSError as error:
        raise unwritten(path, error) from error
    try:
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        os.truncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()}, since {since}\n".encode())
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(file)
