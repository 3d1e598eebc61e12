"""How the command line starts: at once for `--help`, with the options of every command before or
after its name."""

import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import jax
import pytest
from commands import run

import kvqjax as kvq
from kvqjax.cli import environment
from kvqjax.cli.app import COMMANDS, command_of

GENERATE = ("generate", "-m", "recall", "-p", "ab12,cd34,?cd", "-n", "2")


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def fresh(script: str, *words: str, **environment: str) -> list[str]:
    """The lines that a Python process of its own prints."""
    variables = {
        name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
    }
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=variables | environment
    )
    return done.stdout.splitlines()


@pytest.mark.smoke
@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_needs_no_jax(words):
    """JAX alone takes a second to import, and the library another."""
    script = """if True:
        import sys
        from kvqjax.cli import main
        try:
            main()
        except SystemExit as ended:
            assert not ended.code
        print([name for name in ("jax", "numpy", "transformers", "torch") if name in sys.modules])
    """
    assert fresh(script, *words)[-1] == "[]"


def test_the_public_names_are_loaded_when_one_is_used():
    script = """if True:
        import sys, kvqjax as kvq
        assert "jax" not in sys.modules and kvq.__version__ and "jax" not in sys.modules
        assert kvq.UserError and "jax" in sys.modules
        assert set(kvq.__all__) <= set(dir(kvq))
        from kvqjax import *
        assert generate is kvq.generate and not hasattr(kvq, "nothing")
        assert kvq.cache.runs_of and kvq.step.forward.forward is kvq.forward
        print("done")
    """
    assert fresh(script) == ["done"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_one_s_help_begins_with(name):
    """The list is written out, so that it is shown without importing any command."""
    target = command_of(name)
    full = target.info.help if hasattr(target, "info") else inspect.getdoc(target)
    words, said = (
        " ".join(text.split()).rstrip(".").lower() for text in (full, COMMANDS[name].about)
    )
    assert said.split()[0] in words.split()[0]
    assert len(COMMANDS[name].about) < 80


@pytest.mark.parametrize("words", [("plan",), ("eval", "ppl"), ("generate",)])
def test_the_version_after_a_command(call, words):
    assert call(*words, "--version") == (0, f"kvqjax {kvq.__version__}\n", "")


@pytest.fixture
def settings():
    """JAX's settings are put back, and its cache is closed: it is opened once for each folder."""
    names = [
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    variables = {name.upper(): os.environ.get(name.upper()) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_folder_for_programs_before_or_after_the_command(call, tmp_path, place):
    option = ("--compilation-cache", str(tmp_path))
    words = (*option, *GENERATE) if place == "before" else (*GENERATE, *option)
    code, _, err = call(*words)
    assert code == 0, err
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert jax.config.jax_compilation_cache_max_size == -1


@pytest.mark.usefixtures("settings")
def test_no_programs_are_kept_on_request(call):
    code, _, err = call(*GENERATE, "--no-compilation-cache")
    assert code == 0, err
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.usefixtures("settings")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_line(call, tmp_path):
    tmp_path.chmod(0o500)
    code, _, err = call(*GENERATE, "--compilation-cache", str(tmp_path / "programs"))
    assert code == 0, err
    assert err.count("cannot be written; compiled programs are not kept") == 1


@pytest.mark.usefixtures("settings")
def test_a_file_in_the_place_of_the_folder_is_one_line(call, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = call(*GENERATE, "--compilation-cache", str(tmp_path / "file" / "programs"))
    assert code == 0, err
    assert err.count("cannot be written; compiled programs are not kept") == 1


@pytest.mark.nightly
def test_programs_are_kept_below_the_user_s_cache_folder(tmp_path):
    """Bounded in size; a folder that the user has set for JAX stays, with the user's bound."""
    script = """if True:
        import sys
        sys.argv = "kvqjax methods".split()
        from kvqjax.cli import main
        try:
            main()
        except SystemExit as ended:
            assert not ended.code
        import jax, json
        names = ["dir", "max_size"]
        print(json.dumps([getattr(jax.config, f"jax_compilation_cache_{name}") for name in names]))
    """
    folder, size = json.loads(fresh(script, XDG_CACHE_HOME=str(tmp_path))[-1])
    assert Path(folder).parent == tmp_path / "kvqjax" / "programs"
    assert size == environment.MOST_BYTES
    given = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "given")}
    assert json.loads(fresh(script, **given)[-1]) == [str(tmp_path / "given"), -1]
    (tmp_path / "file").write_text("")
    assert json.loads(fresh(script, XDG_CACHE_HOME=str(tmp_path / "file"))[-1]) == [None, -1]


def written(folder: Path, key: str, program: bytes | None, time: bytes | None) -> list[Path]:
    """The two files of a program that JAX keeps; None: a file that is not there."""
    paths = [folder / f"{key}-cache", folder / f"{key}-atime"]
    for path, content in zip(paths, (program, time), strict=True):
        if content is not None:
            path.write_bytes(content)
    return [path for path in paths if path.exists()]


TIME = (1).to_bytes(8, "little")
KEEPS = """if True:
    import warnings
    from kvqjax.cli import environment, main
    import sys
    sys.argv = "kvqjax methods".split()
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
    import jax
    jax.jit(lambda x: x * 3)(1.5)
    print(environment.program_folder())
"""


@pytest.mark.nightly
def test_what_a_killed_run_left_does_not_keep_programs_out(tmp_path):
    """A program without the time of its last use, as JAX's cache of bounded size has it, lets no
    further one in."""
    folder = Path(fresh(KEEPS, XDG_CACHE_HOME=str(tmp_path))[-1])
    kept = set(folder.iterdir())
    assert [path for path in kept if path.name.endswith("-cache")]
    sound = {path for path in kept if path.name != ".lockfile"}
    for path in sound:
        path.unlink()
    remains = [
        *written(folder, "cut", b"half", None),
        *written(folder, "alone", None, TIME),
        *written(folder, "empty", b"", TIME),
        *written(folder, "timeless", b"all", b""),
    ]
    whole = written(folder, "whole", b"all", TIME)
    fresh(KEEPS, XDG_CACHE_HOME=str(tmp_path))
    assert [path for path in remains if path.exists()] == []
    assert [path for path in (*whole, *sound) if not path.exists()] == []


@pytest.mark.nightly
def test_a_program_that_cannot_be_read_is_kept_anew(tmp_path):
    folder = Path(fresh(KEEPS, XDG_CACHE_HOME=str(tmp_path))[-1])
    programs = {path: path.read_bytes() for path in folder.glob("*-cache")}
    for path, program in programs.items():
        path.write_bytes(program[: len(program) // 2])
    for _ in range(2):
        fresh(KEEPS, XDG_CACHE_HOME=str(tmp_path))
    assert set(folder.glob("*-cache")) == programs.keys()
    # Not the very bytes: a program's compile time is among them.
    assert all(len(path.read_bytes()) > len(program) // 2 for path, program in programs.items())


def test_a_folder_to_which_nothing_can_be_written_is_one_line(tmp_path):
    folder = Path(fresh(KEEPS, XDG_CACHE_HOME=str(tmp_path))[-1])
    (folder / ".lockfile").unlink(missing_ok=True)
    (folder / ".lockfile").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KEEPS],
        capture_output=True,
        text=True,
        check=True,
        env={
            name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
        }
        | {"XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        f"warning: {folder}: programs are compiled anew, as they cannot be kept: "
    )


@pytest.mark.parametrize(
    ("system", "variables", "wanted"),
    [
        ("linux", {}, "home/.cache"),
        ("darwin", {}, "home/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "local"}, "local"),
        ("darwin", {"XDG_CACHE_HOME": "/cache"}, "/cache"),
    ],
)
def test_the_user_s_cache_folder_of_each_system(monkeypatch, system, variables, wanted):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    monkeypatch.setattr("kvqjax._folders.sys.platform", system)
    assert environment.program_folder().parent == Path(wanted) / "kvqjax" / "programs"


@pytest.mark.parametrize(
    ("plugins", "library", "files", "given", "wanted"),
    [
        ([], True, {}, {}, "cpu"),
        ([], False, {}, {}, None),
        (["xla_cuda12"], False, {}, {}, "cpu"),
        (["xla_cuda12"], True, {"dev/nvidiactl": ""}, {}, None),
        ([], True, {"sys/bus/pci/devices/0000:00:04.0/vendor": "0x1ae0\n"}, {}, None),
        ([], True, {"sys/bus/pci/devices/0000:00:04.0/vendor": "0x8086\n"}, {}, "cpu"),
        (["other"], True, {}, {}, None),
        ([], True, {}, {"JAX_PLATFORMS": "tpu"}, "tpu"),
        ([], True, {}, {"TPU_LIBRARY_PATH": "/a/libtpu.so"}, None),
    ],
)
def test_libraries_of_absent_devices_are_not_asked(
    monkeypatch, tmp_path, plugins, library, files, given, wanted
):
    """With libtpu on a machine without TPU, JAX writes five lines to stderr and waits for the
    network."""
    names = [EntryPoint(name, "a", "jax_plugins") for name in plugins]
    monkeypatch.setattr(environment, "entry_points", lambda group: names)
    monkeypatch.setattr(environment, "find_spec", lambda name: object() if library else None)
    monkeypatch.setattr(environment.sys, "platform", "linux")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    variables = dict(given)
    environment.look_for_present_devices(variables, tmp_path)
    assert variables.get("JAX_PLATFORMS") == wanted
