"""The installed package as a whole: nothing missing; in each folder shapes checked and import
direction enforced."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import types
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = SETTINGS["tool"]["setuptools"]["package-dir"]  # package name -> top-level folder


def location(package: str) -> Path:
    """Folder that `package` is imported from."""
    return Path(importlib.util.find_spec(package).submodule_search_locations[0])


@pytest.fixture
def installed():
    """Insist that tests run on what is installed: a copy in site-packages, or this checkout where
    it is editable."""
    site_packages = sysconfig.get_path("purelib")
    (distribution,) = importlib.metadata.distributions(name="kvqjax", path=[site_packages])
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    wanted = ROOT if origin.get("dir_info", {}).get("editable") else Path(site_packages)
    assert location("kvqjax") == wanted / "kvqjax", "the source tree shadows the installed package"


@pytest.mark.smoke
def test_source_checkout_runs_as_it_is():
    """In the root of a clone the source tree comes before the installed package on the path."""
    command = "import kvqjax, kvqjax.pallas_kernels, kvqjax.calibrate, kvqjax.eval as e; print(kvqjax.__file__, e.__file__)"  # noqa: E501
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONSAFEPATH", "PYTHONPATH")
    }
    result = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [
        str(ROOT / "kvqjax" / "__init__.py"),
        str(ROOT / "eval" / "__init__.py"),
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("package", FOLDERS)
def test_every_source_file_is_installed(installed, package):
    source = ROOT / FOLDERS[package]
    wanted = {
        p.relative_to(source)
        for p in source.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    missing = sorted(str(path) for path in wanted if not (location(package) / path).is_file())
    assert not missing, f"not installed from {source.name}/: {missing}"


@pytest.mark.smoke
@pytest.mark.parametrize("package", FOLDERS)
def test_no_function_hides_a_module(package):
    """`import kvqjax.methods.roofline` gives the module: no package exports another thing under a
    module's name."""
    hidden = []
    for path in sorted((ROOT / FOLDERS[package]).rglob("*.py")):
        parents, leaf = path.relative_to(ROOT / FOLDERS[package]).parent.parts, path.stem
        parent = ".".join([package, *parents])
        found = getattr(importlib.import_module(parent), leaf, None)
        if not (leaf.startswith("__") or found is None or isinstance(found, types.ModuleType)):
            hidden.append(f"{parent}.{leaf}")
    assert not hidden


@pytest.mark.smoke
def test_wrong_shape_refused_in_kvqjax(installed):
    from kvqjax.ops.attention import segment_attention

    q, kv = jnp.zeros((1, 2, 4, 8)), jnp.zeros((1, 3, 2, 8))
    mask = jnp.ones((1, 2, 3), bool)
    assert segment_attention(q, kv, kv, mask).out.shape == q.shape
    with pytest.raises(jaxtyping.TypeCheckError):
        segment_attention(q, kv, kv[:, :2], mask)


@pytest.mark.smoke
def test_wrong_shape_refused_in_pallas_kernels(installed):
    from kvqjax.pallas_kernels.tpu.rope import angles

    rates = np.linspace(0.1, 1.0, 4)
    assert angles(jnp.arange(3), rates).shape == (3, 4)
    with pytest.raises(jaxtyping.TypeCheckError, match="positions"):
        angles(jnp.zeros((1, 3), jnp.int32), rates)


@pytest.mark.smoke
def test_wrong_shape_refused_in_calibrate(installed):
    from kvqjax.calibrate.kmeans import histogram

    points, keep = jnp.linspace(-1.0, 1.0, 5), jnp.ones(5, bool)
    assert histogram(points, points, keep).energy.shape == ()
    with pytest.raises(jaxtyping.TypeCheckError, match="weight"):
        histogram(points, points[:4], keep)


@pytest.mark.smoke
def test_wrong_shape_refused_in_eval(installed):
    from kvqjax.eval.windows import score_chunk

    logits, targets = jnp.zeros((1, 3, 8)), jnp.zeros((1, 3), jnp.int32)
    assert score_chunk(logits, logits, targets, targets == 0).tokens == 3
    with pytest.raises(jaxtyping.TypeCheckError, match="reference"):
        score_chunk(logits, logits[..., :7], targets, targets == 0)


@pytest.fixture
def copy(tmp_path) -> Path:
    """The package as installed, assembled in an empty folder without its large data."""
    for package in FOLDERS:
        target = tmp_path.joinpath(*package.split("."))
        ignored = shutil.ignore_patterns("__pycache__", "assets")
        shutil.copytree(location(package), target, ignore=ignored, dirs_exist_ok=True)
    return tmp_path


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    """Run the project's import contract on the copy in `folder` (import-linter puts its working
    directory first)."""
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    arguments = [
        sys.executable,
        "-c",
        command,
        "--no-cache",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True)


def test_imports_point_one_way(copy):
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("kvqjax.model", "kvqjax.cli"),
        ("kvqjax.codecs", "kvqjax.pallas_kernels"),
        ("kvqjax.codecs", "kvqjax.model"),
        ("kvqjax.calibrate", "kvqjax.eval"),
        ("kvqjax.eval", "kvqjax.cli"),
    ],
)
def test_forbidden_import_seen(copy, module, forbidden):
    path = copy.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    path.write_text(path.read_text() + f"\nimport {forbidden}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{module} is not allowed to import {forbidden}" in result.stdout
