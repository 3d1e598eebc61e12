"""All commands. The modules behind them are imported when a command runs, so that `--help` answers at once."""

from pathlib import Path
from typing import Annotated

import typer

from kvqjax.cli import bench, calibrate, compare, info, run

__all__ = ["app"]

app = typer.Typer(
    name="kvqjax",
    help="Compress the KV cache of Llama, Mistral and Qwen models: generate, evaluate, plan, calibrate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    compilation_cache: Annotated[Path | None, typer.Option(help="keep compiled programs in this folder")] = None,
) -> None:
    """Options of every command stand before its name."""
    if compilation_cache is not None:
        import jax

        jax.config.update("jax_compilation_cache_dir", str(compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


app.command()(run.generate)
app.command()(run.demo)
app.add_typer(compare.app, name="eval")
app.command()(calibrate.calibrate)
app.command()(bench.bench)
app.command()(info.methods)
app.command()(info.inspect)
app.command()(info.plan)
