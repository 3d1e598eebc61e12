"""Strict settings for every test, set before JAX is used. Never import kvqjax here: jaxtyping's
hook must see it first.

Compiled programs are kept in .jax_cache (safe to delete), so that a second run of the suite
compiles nothing anew. Two thirds of the suite's time is compiling, so XLA is told to generate code
quickly: unoptimised, each program as one module of narrow vectors. Set XLA_FLAGS to run it
otherwise; tests/cache/test_cache_memory.py compiles as users do in any case. Whole files go to a
worker (`--dist loadfile` in the Makefile), for the tests of a file share programs.
"""

import contextlib
import ctypes
import gc
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Releases after 0.10 have no other emitters, and refuse the flag.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_prefer_vector_width=128"
    + " --xla_cpu_use_fusion_emitters=false" * version("jax").startswith("0.10."),
)

import hypothesis
import jax
import jaxtyping
import pytest
from jax._src.lru_cache import LRUCache

CACHE_FOLDER = Path(__file__).resolve().parent.parent / ".jax_cache"
# Processes that tests start keep their programs there too, not in the user's cache folder.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE_FOLDER))

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE_FOLDER))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# With a size limit the cache locks its folder, which two test workers writing at once need.
MOST_KEPT = 2**30  # bytes
jax.config.update("jax_compilation_cache_max_size", MOST_KEPT)
# To keep to the limit, JAX reads a file of every program before it writes one: with 4500 programs
# that is half a second each, a fifth of a run that begins with an empty folder. The folder is cut
# back when a run begins instead. A process that a test starts writes no such files, and where one
# is missing JAX would write nothing.
LRUCache._evict_if_needed = lambda self, *, additional_size=0: None

# Compiling makes single examples slow, and a red run must be red again: no deadline, no randomness,
# no database.
hypothesis.settings.register_profile(
    "strict", deadline=None, derandomize=True, database=None, max_examples=50
)
hypothesis.settings.load_profile("strict")

# Tracing makes many objects that stay; collecting garbage at Python's own pace took a sixteenth of
# the suite's time.
gc.set_threshold(200_000, 20, 100)


def pytest_collection_finish(session):
    """Leave what was imported and collected out of every later collection of garbage, which took
    seconds wherever a test asked for one."""
    gc.collect()
    gc.freeze()


# Every compiled program takes memory maps, of which a process may have 65 530: the compiler then
# dies.
MOST_MAPS = 30_000
MAPS = Path("/proc/self/maps")
# Bytes that a worker may hold. Programs of one file of the night's tests took 10 GiB, and two
# workers share 24.
MOST_BYTES = 4 * 2**30
PAGES = Path("/proc/self/statm")


def pytest_sessionstart(session):
    in_worker = hasattr(session.config, "workerinput")
    if not in_worker:
        _drop_unused_programs()


def pytest_runtest_teardown(item, nextitem):
    """Let go of programs before there are too many, or too large ones; those needed again come from
    the folder."""
    leaves = nextitem is None or nextitem.path != item.path
    many = leaves and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS
    if many or _held_bytes() > MOST_BYTES:
        jax.clear_caches()
        gc.collect()
        _give_back()


def _drop_unused_programs() -> None:
    """Keep those that were used last, as many as MOST_KEPT bytes hold."""
    programs = sorted(CACHE_FOLDER.glob("*-cache"), key=_last_use, reverse=True)
    kept = 0
    for program in programs:
        with contextlib.suppress(OSError):  # another run may delete it first
            kept += program.stat().st_size
            if kept > MOST_KEPT:
                program.unlink()
                _marker(program).unlink(missing_ok=True)


def _last_use(program: Path) -> float:
    for file in (_marker(program), program):
        with contextlib.suppress(OSError):
            return file.stat().st_mtime
    return 0.0


def _marker(program: Path) -> Path:
    """The file that JAX writes anew whenever it reads the program."""
    return program.with_name(program.name.removesuffix("-cache") + "-atime")


def _held_bytes() -> int:
    """Bytes of this process that lie in memory; 0 where that cannot be asked."""
    return int(PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if PAGES.exists() else 0


def _give_back() -> None:
    """Have the C library return what is free to the system, which it does not do by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture
def unchecked():
    """Without jaxtyping's check of types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
