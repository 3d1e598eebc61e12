"""The notebooks' install cell: which packages pip is asked for in each runtime, and the badges that
open it."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS = "https://github.com/owner/name"


def cells(notebook: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]


def install_cell(notebook: Path) -> str:
    (cell,) = [text for text in cells(notebook) if "REPOSITORY = " in text]
    return cell.replace('REPOSITORY = ""', f'REPOSITORY = "{ADDRESS}"')


@pytest.fixture
def run_cell(monkeypatch):
    """Runs the cell in a runtime that has `packages`, `loaded` of them in memory, and where pip
    makes them `after`."""

    def run(packages: dict, after: dict | None = None, loaded=()) -> tuple[list[str], dict]:
        state, commands = dict(packages), []

        def version(name):
            if name not in state:
                raise metadata.PackageNotFoundError(name)
            return state[name]

        def pip(command, check):
            assert check
            commands.append(command)
            state.update(after or {})

        monkeypatch.setattr("importlib.util.find_spec", lambda name: state.get(name))
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(subprocess, "run", pip)
        for name in ("jax", "jaxlib", "numpy"):
            if name not in loaded:
                monkeypatch.delitem(sys.modules, name)
        names: dict = {}
        exec(compile(install_cell(NOTEBOOKS[0]), "cell", "exec"), names)
        return commands, names

    return run


OLD = {"jax": "0.7.2", "jaxlib": "0.7.2"}
NEW = {"jax": "0.12.0.1", "jaxlib": "0.12.0"}
RUNTIMES = {
    "T4 with an old JAX": (OLD | {"jax-cuda12-plugin": "0.7.2"}, "plots,gguf,cuda", []),
    "CUDA 13 with an old JAX": (OLD | {"jax-cuda13-plugin": "0.7.2"}, "plots,gguf,cuda13", []),
    "v5e with an old JAX": (OLD | {"libtpu": "0.0.21"}, "plots,gguf,tpu", []),
    "CPU with an old JAX": (OLD, "plots,gguf", []),
    "no JAX": ({}, "plots,gguf", []),
    "T4 with a new JAX": (
        NEW | {"jax-cuda12-plugin": "0.12.0"},
        "plots,gguf",
        ["jax", "jaxlib", "jax-cuda12-plugin"],
    ),
    "v5e with a new JAX": (NEW | {"libtpu": "0.0.40"}, "plots,gguf", ["jax", "jaxlib", "libtpu"]),
    "the oldest JAX that works": (
        {"jax": "0.10.2", "jaxlib": "0.10.2"},
        "plots,gguf",
        ["jax", "jaxlib"],
    ),
    "the newest that does not": ({"jax": "0.10.1", "jaxlib": "0.10.1"}, "plots,gguf", []),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_jax_and_its_plugin_stay_or_move_together(run_cell, runtime):
    packages, extras, pinned = RUNTIMES[runtime]
    (command,) = run_cell(packages)[0]
    assert command[:5] == [sys.executable, "-m", "pip", "install", "-q"]
    ours, *others = map(Requirement, command[5:])
    assert (ours.name, ours.extras, ours.url) == (
        "kvqjax",
        set(extras.split(",")),
        f"git+{ADDRESS}",
    )
    assert [str(other) for other in others] == [f"{name}=={packages[name]}" for name in pinned]


def test_the_cell_knows_what_the_package_needs(run_cell):
    """The oldest JAX is the package's, and every extra asks JAX for the plugin that was found."""
    names = run_cell({})[1]
    oldest = ".".join(map(str, names["NEEDED"]))
    assert f"jax>={oldest}" in PROJECT["dependencies"]
    for plugin, extra in names["PLUGINS"].items():
        (wanted,) = map(Requirement, PROJECT["optional-dependencies"][extra])
        assert (wanted.name, str(wanted.specifier)) == ("jax", f">={oldest}")
        (kind,) = wanted.extras
        assert kind in metadata.metadata("jax").get_all("Provides-Extra")
        brought = [text for text in metadata.requires("jax") if f'extra == "{kind}"' in text]
        assert any(Requirement(text).name == plugin for text in brought)


def test_an_installed_package_is_left_alone(run_cell):
    assert run_cell(OLD | {"kvqjax": "0.1.0"})[0] == []


@pytest.mark.parametrize(
    ("loaded", "said"), [((), ""), (("jax", "numpy"), "jax replaced while loaded: restart")]
)
def test_a_restart_is_asked_for_where_it_is_needed(run_cell, capsys, loaded, said):
    run_cell(OLD | {"numpy": "2.0.2"}, after={"jax": "0.12.0", "jaxlib": "0.12.0"}, loaded=loaded)
    out = capsys.readouterr().out
    assert out.startswith(said)
    assert bool(out) == bool(said)


def test_notebooks_share_one_install_cell():
    assert len(NOTEBOOKS) == 2
    assert len({install_cell(notebook) for notebook in NOTEBOOKS}) == 1
    for notebook in NOTEBOOKS:
        assert not any(cell.get("outputs") for cell in json.loads(notebook.read_text())["cells"])


@pytest.fixture
def published(tmp_path) -> Path:
    """A copy of what `examples/colab.py` writes to, and of the script."""
    for path in (
        *NOTEBOOKS,
        ROOT / "examples" / "colab.py",
        ROOT / "README.md",
        ROOT / "docs" / "index.md",
    ):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    return tmp_path


def point(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, folder / "examples" / "colab.py", *words], capture_output=True, text=True
    )


def test_badges_open_the_notebooks(published):
    for spelt in (
        ADDRESS,
        "git@github.com:owner/name.git",
    ):  # twice: the second run changes nothing
        assert point(published, spelt).returncode == 0
        for notebook in NOTEBOOKS:
            link = f"https://colab.research.google.com/github/owner/name/blob/main/examples/{notebook.name}"
            texts = cells(published / "examples" / notebook.name)
            assert texts[0].splitlines()[2].endswith(f"]({link})")  # below the title
            assert install_cell(notebook) in texts
        for page in ("README.md", "docs/index.md"):
            lines = (published / page).read_text().splitlines()
            (line,) = [text for text in lines if text.startswith("<!-- badge -->")]
            assert line.endswith("/owner/name/blob/main/examples/quickstart.ipynb)")
    assert point(published, "https://github.com/other/place", "stable").returncode == 0
    assert "/other/place/blob/stable/" in (published / "README.md").read_text()
    assert "owner/name" not in (published / "README.md").read_text()


def test_no_page_has_an_empty_badge():
    """Before the repository is published there is nothing that a badge could open."""
    for path in (*NOTEBOOKS, ROOT / "README.md", ROOT / "docs" / "index.md"):
        assert path.read_text().count("<!-- badge -->") == path.read_text().count(
            "<!-- badge --> [!["
        )


@pytest.mark.parametrize("words", [("https://example.org/owner/name",), ("owner",), ()])
def test_an_address_that_colab_cannot_open(published, words):
    ended = point(published, *words)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("error: ")
