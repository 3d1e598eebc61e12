"""All commands. The modules behind them are imported when a command runs, so that `--help` answers at once."""

import typer

from kvqjax.cli import bench, calibrate, evaluate, info, run

__all__ = ["app"]

app = typer.Typer(
    name="kvqjax",
    help="Compress the KV cache of Llama, Mistral and Qwen models: generate, evaluate, plan, calibrate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run.generate)
app.command()(run.demo)
app.add_typer(evaluate.app, name="eval")
app.command()(calibrate.calibrate)
app.command()(bench.bench)
app.command()(info.methods)
app.command()(info.inspect)
app.command()(info.plan)
