"""All commands. A command's module, and JAX with it, is imported when the command runs: `--help`
answers at once."""

import copy
import importlib
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from kvqjax._version import __version__
from kvqjax.cli.environment import keep_programs, keep_programs_by_default

HELP = {"help_option_names": ["-h", "--help"]}


class Command(NamedTuple):
    """Where a command lies: `name` of the module kvqjax.cli.`module`, a function or a group of
    commands. `about` is the first paragraph of its help."""

    module: str
    name: str
    about: str


COMMANDS = {
    "generate": Command(
        "run", "generate", "Continue one or more prompts through a compressed cache."
    ),
    "chat": Command(
        "chat", "chat", "Talk with a model; its compressed cache stays from turn to turn."
    ),
    "serve": Command(
        "serve", "serve", "Serve a model in the OpenAI protocol, many requests at a time."
    ),
    "demo": Command(
        "demo", "demo", "Ask a real model about a text, through exact and compressed caches."
    ),
    "eval": Command(
        "evaluate", "app", "Measure the quality of caches: every token passes through them."
    ),
    "calibrate": Command("calibrate", "calibrate", "Calibrate a method for a model."),
    "tune": Command("tune", "tune", "Give each layer the bits with which attention loses least."),
    "bench": Command(
        "bench", "bench", "Time decode steps, against the exact cache in the same run."
    ),
    "methods": Command(
        "info", "methods", "List the methods: bits, what they need, options and defaults."
    ),
    "inspect": Command(
        "info", "inspect", "Show what a calibration artifact or a saved cache holds."
    ),
    "plan": Command(
        "plan", "plan", "Say whether a model and its cache fit a device, and how fast they can be."
    ),
    "fetch": Command(
        "fetch", "fetch", "Bring a real model into the user's cache folder: SmolLM2-135M-Instruct."
    ),
    "doctor": Command(
        "doctor", "doctor", "Check this installation and every kernel that concerns this chip."
    ),
}


def command_of(name: str) -> Any:
    """The function or the typer group behind a command."""
    place = COMMANDS[name]
    return getattr(importlib.import_module(f"kvqjax.cli.{place.module}"), place.name)


def _paragraphs(text: str) -> str:
    """Help without the line breaks of docstrings, which typer keeps: a paragraph fills the
    terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _accept(command: Any, options: list[Any]) -> None:
    """Let a command, and every command of a group, take the options that all commands share."""
    command.help = _paragraphs(command.help or "")
    for child in getattr(command, "commands", {}).values():
        _accept(child, options)
    if not hasattr(command, "commands"):
        command.params = [*command.params, *options]


class _Later(TyperCommand):
    """A command by its name and help alone. It becomes the real one when its arguments are read."""

    def make_context(self, info_name, args, parent=None, **extra):
        assert self.name is not None
        assert parent is not None
        target = command_of(self.name)
        if not isinstance(target, typer.Typer):
            function, target = target, typer.Typer(add_completion=False)
            target.command(self.name)(function)
        command = typer.main.get_command(target)
        shared = [copy.copy(option) for option in parent.command.params]
        for option in shared:
            option.expose_value = False  # the option's callback is all that it does
        _accept(command, shared)
        return command.make_context(info_name, args, parent=parent, **extra)


class _Commands(TyperGroup):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.commands = {name: _Later(name, help=place.about) for name, place in COMMANDS.items()}


app = typer.Typer(
    name="kvqjax",
    cls=_Commands,
    help="Compress the KV cache of large language models: generate, chat, serve, evaluate, plan, calibrate.",
    no_args_is_help=True,
    add_completion=False,
    context_settings=HELP,
    pretty_exceptions_enable=False,
)


def _print_version(flag: bool) -> bool:
    if flag:
        typer.echo(f"kvqjax {__version__}")
        raise typer.Exit
    return flag


def _keep_in(folder: Path | None) -> Path | None:
    if folder is not None:
        keep_programs(folder)
    return folder


def _keep_none(flag: bool) -> bool:
    if flag:
        keep_programs(None)
    return flag


def _shared(*names: str, **about: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Options of every command", **about)


@app.callback()
def options(
    version: Annotated[
        bool,
        _shared(
            "--version", callback=_print_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
    compilation_cache: Annotated[
        Path | None,
        _shared(
            "--compilation-cache",
            callback=_keep_in,
            help="keep compiled programs here, not in the user's cache",
        ),
    ] = None,
    no_compilation_cache: Annotated[
        bool,
        _shared("--no-compilation-cache", callback=_keep_none, help="keep no compiled programs"),
    ] = False,
) -> None:
    """The options of every command stand before its name or after it."""
    if compilation_cache is None and not no_compilation_cache:
        keep_programs_by_default()
