"""All commands. The modules behind them are imported when a command runs, so that `--help` answers at once."""

import inspect
from pathlib import Path
from typing import Annotated

import typer

from kvqjax._version import __version__
from kvqjax.cli import bench, calibrate, compare, demo, doctor, info, plan, run, tune

__all__ = ["app"]

app = typer.Typer(
    name="kvqjax",
    help="Compress the KV cache of Llama, Mistral and Qwen models: generate, evaluate, plan, calibrate.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"kvqjax {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
    compilation_cache: Annotated[Path | None, typer.Option(help="keep compiled programs in this folder")] = None,
) -> None:
    """Options of every command stand before its name."""
    if compilation_cache is not None:
        import jax

        jax.config.update("jax_compilation_cache_dir", str(compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


app.command()(run.generate)
app.command()(demo.demo)
app.add_typer(compare.app, name="eval")
app.command()(calibrate.calibrate)
app.command()(tune.tune)
app.command()(bench.bench)
app.command()(info.methods)
app.command()(info.inspect)
app.command()(plan.plan)
app.command()(doctor.doctor)

# Typer keeps the line breaks of docstrings. Here a paragraph of help is one line, which fills the terminal's width.
for registered in (*app.registered_commands, *compare.app.registered_commands):
    text = inspect.cleandoc(registered.help or registered.callback.__doc__ or "") if registered.callback else ""
    registered.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
