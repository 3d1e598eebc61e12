"""Examples, their outputs and commands in README and the documentation work as printed, and the
files and functions that they name exist."""

import inspect
import itertools
import pkgutil
import re
import runpy
import shlex
import tomllib
import warnings
from pathlib import Path

import jax
import pytest
from cases import with_nightly
from commands import run

import kvqjax as kvq
from kvqjax.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Words that make a command of README short, behind its own: the command begins with -> what is
# added.
SHORTER = {
    "generate": ["--max-new-tokens", "2"],
    "eval ppl": ["--window", "96", "--tokens", "96"],
    "eval retrieval": ["--samples", "2"],
    "eval compare": [
        "--window",
        "96",
        "--tokens",
        "96",
        "--sequences",
        "1",
        "--context",
        "4096",
        "--store",
        "kept",
    ],
    "eval drift": ["--window", "96", "--tokens", "96", "--chunk", "32"],
    "calibrate": ["--sequences", "1", "--length", "128"],
}
# Commands that are only parsed here, and why.
PARSED = {
    "eval harness": "needs the network",
    "plan --model llama-3.1-70b": "compiles a large model for a minute; tests/hardware does it with a small one",
    "fetch": "needs the network; tests/model/test_fetch.py does it with a file of its own",
    "chat": "reads from a terminal; tests/cli/test_cli_chat.py talks with it",
    "serve": "serves until it is ended; tests/serving does it",
    "doctor": "compiles every kernel's plain path; tests/hardware runs it",
}

# Commands that run at night only: the tests of the command line go the same ways by day.
AT_NIGHT = {
    "eval ppl": "reads a corpus through three caches",
    "eval retrieval": "asks at two lengths",
    "eval copy": "copies symbols through two caches",
    "eval compare": "compares four caches",
    "eval drift": "as eval ppl, by position",
    "calibrate --cache higgs:bits=3,centre=mean": "another recipe runs by day",
    "plan --model llama-3.1-8b": "tests/hardware/test_plan.py asks for such a plan",
}


def commands(page: Path) -> list[str]:
    """The `kvqjax` commands in a page's shell blocks, as printed, without comments."""
    blocks = [
        body
        for language, body in BLOCK.findall(page.read_text(encoding="utf-8"))
        if language in ("", "sh", "bash")
    ]
    return [line for body in blocks for line in body.splitlines() if line.startswith("kvqjax ")]


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


def begins(words: list[str], table: dict) -> str | None:
    """The key of the table that a command begins with."""
    return next((key for key in table if words[: len(key.split())] == key.split()), None)


def parse(words: list[str]) -> None:
    """Let the command's own parser read the words, and run nothing."""
    from typer.main import get_command

    context = get_command(app).make_context("kvqjax", list(words))
    while hasattr(context.command, "resolve_command"):
        name, command, rest = context.command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, rest, parent=context)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where README's commands run one after the other: some use what earlier ones wrote."""
    return tmp_path_factory.mktemp("readme")


def runs_at_night(command: str) -> bool:
    words = words_of(command)
    return begins(words, AT_NIGHT) is not None or "--mesh" in words


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.nightly if runs_at_night(command) else ())
        for command in commands(README)
    ],
)
def test_a_command_of_readme(capsys, monkeypatch, folder, command):
    monkeypatch.chdir(folder)
    words = words_of(command)
    parse(words)
    if begins(words, PARSED):
        return
    if "--mesh" in words and words[0] == "generate":
        assert jax.device_count() >= 4
    code, out, err = run(capsys, monkeypatch, *words, *SHORTER.get(begins(words, SHORTER), []))
    assert code == 0, err
    assert out
    for option in ("--plot", "--out"):
        assert option not in words or (folder / words[words.index(option) + 1]).exists()


def test_commands_of_all_pages_are_read_by_the_parser():
    """Names such as MODEL stand for a file or a folder, which the parser does not open."""
    refused = []
    for page in PAGES:
        for command in commands(page):
            try:
                parse(words_of(command))
            except Exception as error:
                refused.append((page.name, command, str(error)))
    assert refused == []


def test_files_that_pages_name_exist():
    """Paths that begin with a folder of the repository."""
    folders = "kvqjax|pallas_kernels|calibrate|eval|benchmarks|tests|examples|docs"
    ending = "py|md|json|jsonl|csv|ipynb|svg|png"
    named = re.compile(rf"(?<![\w/.-])(?:{folders})/[\w./-]*\w\.(?:{ending})\b")
    mapped = re.compile("^kvqjax/(?=pallas_kernels/|calibrate/|eval/)")
    absent = {
        (page.name, path)
        for page in PAGES
        for path in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / mapped.sub("", path)).exists() and not (page.parent / path).exists()
    }
    assert absent == set()


def test_python_names_on_pages_exist():
    """Dotted names below kvq or kvqjax, such as `kvqjax.testing.check_rope`."""
    dotted = re.compile(r"\b(?:kvqjax|kvq)((?:\.[A-Za-z_]\w*)+)")
    absent = set()
    for page in PAGES:
        for name in dotted.findall(page.read_text(encoding="utf-8")):
            if name.rpartition(".")[2] in ("json", "py", "md"):
                continue
            try:
                pkgutil.resolve_name(f"kvqjax{name}")
            except kvq.UserError:
                continue  # the name is there, and needs a package that is not installed
            except (ImportError, AttributeError) as error:
                absent.add((page.name, name, str(error)))
    assert absent == set()


def test_extras_that_are_named_can_be_installed():
    """In pages and in messages: pip only warns of an extra that a package lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = set(project["optional-dependencies"])
    folders = ("kvqjax", "pallas_kernels", "calibrate", "eval", "examples")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = re.compile(r"(?:'\.|\bkvqjax)\[([a-z0-9,]+)\]")
    unknown = {
        (path.name, extra)
        for path in [*PAGES, ROOT / "CONTRIBUTING.md", *sources]
        for extras in named.findall(path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
        if extra not in known
    }
    assert unknown == set()


def test_commands_read_nothing_that_is_not_there():
    """No command of README names a file that no earlier one writes."""
    written = set()
    for words in map(words_of, commands(README)):
        options = dict(itertools.pairwise(words))
        assert options.get("--data", "synthetic") == "synthetic"
        assert options.get("--artifact") in {None, *written}
        written |= {options[name] for name in ("--out", "--plot") if name in options}


# By day .ci/run runs the tutorial on the wheel.
@pytest.mark.parametrize(
    "page", ["README.md", pytest.param("docs/tutorial.md", marks=pytest.mark.nightly)]
)
def test_examples_print_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page = runpy.run_path(str(ROOT / ".ci" / "readme_example.py"))["run_page"]
    compared = run_page(ROOT / page)
    assert compared >= (5 if page == "docs/tutorial.md" else 0)


@pytest.mark.parametrize(
    "page",
    with_nightly(
        ["howto/own-loop.md", "howto/conversations.md", "howto/own-model.md"], ["howto/own-loop.md"]
    ),
)
def test_code_of_a_page_runs(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jax.clear_caches()  # a page counts the programs of its own loop; another page's are of the same functions
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    code = "\n".join(body for language, body in blocks if language == "python")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this model's tokenizer has no chat template")
        exec(compile(code, page, "exec"), {"__name__": page})


def test_an_output_that_differs_is_said(tmp_path):
    run_page = runpy.run_path(str(ROOT / ".ci" / "readme_example.py"))["run_page"]
    page = tmp_path / "page.md"
    for shown, ends in (("1 2", False), ("1 ...", False), ("1 3", True)):
        page.write_text(f"```python\nprint(1, 2)\n```\n\n```text\n{shown}\n```\n")
        if ends:
            with pytest.raises(SystemExit, match="line 2"):
                run_page(page)
        else:
            assert run_page(page) == 1


def _belongs_to(module, member) -> bool:
    """Whether a page that describes the module describes this member: what is imported there is
    described where it comes from, unless the module names it as its own."""
    names = getattr(module, "__all__", ())
    is_named = any(getattr(module, name) is member for name in names)
    return is_named or getattr(member, "__module__", None) == module.__name__


def test_every_public_name_is_in_the_reference():
    """By itself, or with all names of its module."""
    pages = [
        page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md")
    ]
    paths = re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE)
    described = {id(pkgutil.resolve_name(path)) for path in paths}
    for path in paths:
        module = pkgutil.resolve_name(path)
        if inspect.ismodule(module):
            described |= {
                id(member)
                for name, member in vars(module).items()
                if not name.startswith("_") and _belongs_to(module, member)
            }
    names = [name for name in kvq.__all__ if callable(getattr(kvq, name))]
    assert [name for name in names if id(getattr(kvq, name)) not in described] == []


def test_nothing_is_installed_by_a_name_that_no_registry_has():
    """kvqjax is installed from a clone or a repository's address."""
    sources = [
        path
        for name in ("kvqjax", "eval", "calibrate", "examples")
        for path in (ROOT / name).rglob("*.*")
    ]
    for path in [*PAGES, *(path for path in sources if path.suffix in (".py", ".ipynb"))]:
        for line in path.read_text(encoding="utf-8").splitlines():
            if "pip install" in line:
                assert "kvqjax" not in line.partition("pip install")[2] or "@ git+" in line, line
