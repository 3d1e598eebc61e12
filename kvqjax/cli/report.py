"""The one loop behind every `kvqjax eval` command: caches side by side, as a table, JSON, a file or
a picture."""

import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvqjax._errors import UserError
from kvqjax._lock import held
from kvqjax._timing import Bar
from kvqjax.cli.common import (
    Artifacts,
    Caches,
    Dtype,
    Json,
    Kernels,
    ModelName,
    RopeLength,
    Seed,
    TextOnly,
    Weights,
    calibrated,
    methods_of,
    open_model,
    require_room,
)
from kvqjax.cli.output import announce, at_least, progress_bar, show
from kvqjax.eval.plots import check_picture, draw, title_of
from kvqjax.eval.stamp import ledger_of, stamp, stamp_line
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method
from kvqjax.model.loading import Model


def _with_artifacts(
    model: Model, methods: list[Method], folders: list[Path], bar: Bar
) -> list[tuple[Model, Method]]:
    return calibrated(model, methods, folders)


class Job(NamedTuple):
    """What one command does with a cache.

    Attributes:
        capacity: tokens of the cache that the ledger is made for.
        evaluate: `evaluate(model, method, bar, kernels)` gives the cache's rows of the report.
        about: is added to the report's stamp.
        tokens: about how many tokens pass through a cache (0: not known).
        ready: `ready(model, methods, artifacts, bar)` pairs every method with a model that holds
            its constants.
        warn: `warn(rows)` is what the report says before anything else ("": nothing).
        length: tokens of the longest text that passes through."""

    capacity: int
    evaluate: Callable[[Model, Method, Bar, str], Iterable[dict[str, Any]]]
    about: dict[str, Any]
    tokens: int
    ready: Callable[[Model, list[Method], list[Path], Bar], list[tuple[Model, Method]]] = (
        _with_artifacts
    )
    warn: Callable[[list[dict[str, Any]]], str] = lambda rows: ""
    length: int = 0


def _options(
    cache: Caches,
    artifact: Artifacts = [],  # noqa: B006
    seed: Seed = 0,
    kernels: Kernels = "auto",
    dtype: Dtype = None,
    weights: Weights = None,
    text_only: TextOnly = False,
    rope_length: RopeLength = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="also write the report to this folder")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="also draw the report into this PNG")
    ] = None,
    as_json: Json = False,
) -> None:
    """The options of every command, which `add_command` adds to its own."""


def _write(path: Path, report: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def _plan(name: str, model: str, tokens: int, loaded: Model, methods: list[Method]) -> str:
    """What is about to be done, and how long it takes at least where that is known."""
    title = f"{name} of {model} through {', then '.join(map(str, methods))}"
    if not tokens:
        return title
    # Attention to other tokens comes on top.
    operations = tokens * prompt_operations(loaded.config, 0, 1)
    return f"{title}: {tokens} tokens each; {at_least(len(methods) * operations)}"


def _beyond(loaded: Model, length: int) -> str:
    """What is to be said of texts that are longer than those that the model was trained for."""
    most = loaded.config.trained_length
    if most is None or length <= most:
        return ""
    return f"texts of {length} tokens go beyond the {most} that this model was trained for"


def _evaluate(
    name: str,
    prepare,
    options: dict,
    model: str,
    cache,
    artifact,
    seed,
    kernels,
    dtype,
    weights,
    text_only,
    rope_length,
    out,
    plot,
    as_json,
) -> None:
    """Every cache through one command: its rows as a table or JSON, as a file, as a picture; all
    with the stamp."""
    if plot is not None:
        check_picture(plot)
    file = None if out is None else out / f"{name}.json"
    with held(file):
        methods, rows, roles = methods_of(cache), [], {}
        loaded = open_model(model, dtype, weights, text_only=text_only, rope_length=rope_length)
        job = prepare(loaded, seed, **options)
        beyond = _beyond(loaded, job.length)
        with progress_bar() as bar:
            pairs = job.ready(loaded, methods, artifact, bar)
            for ready_model, method in pairs:
                require_room(ready_model, method, 1, job.capacity)
            announce(_plan(name, model, job.tokens, loaded, methods))
            if beyond:
                announce(beyond)
            for ready_model, method in pairs:
                rows += job.evaluate(ready_model, method, bar, kernels)
                roles[str(method)] = ledger_of(ready_model, method, job.capacity).by_role()
        about = (
            stamp(loaded, model, seed)
            | job.about
            | {"ledger": {"capacity": job.capacity, "bytes": roles}}
        )
        about |= {"beyond_trained": beyond} if beyond else {}
        if warning := job.warn(rows):
            about = {"warning": warning} | about
            # Standard output of --json is JSON alone.
            typer.echo(f"warning: {warning}", err=as_json)
        if file is not None:  # first, for a pipe that standard output goes into may be closed
            _write(file, {"about": about, "rows": rows})
        show(rows, as_json, f"{name}, {model}", about, stamp_line(about))
        if plot is not None:
            draw(name, rows, title_of(name, model, job.about.get("data", {}).get("name")), plot)
            typer.echo(f"picture: {plot}", err=True)


def add_command(app: typer.Typer, default: str, **defaults: Any):
    """Register `prepare(model, seed, **own options) -> Job` as a command of `app`, `default` its
    model: the common options are added to its own, with other `defaults` where given."""

    def register(prepare: Callable[..., Job]):
        command_parameters = list(inspect.signature(prepare).parameters.values())[2:]
        name = inspect.Parameter(
            "model", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=ModelName
        )
        common = inspect.signature(_options).parameters
        common = {key: p.replace(default=defaults.get(key, p.default)) for key, p in common.items()}

        def command(**values: Any) -> None:
            command_values = {
                parameter.name: values.pop(parameter.name) for parameter in command_parameters
            }
            _evaluate(prepare.__name__, prepare, command_values, **values)

        parameters = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in (*command_parameters, *common.values())
        ]
        command.__dict__["__signature__"] = inspect.Signature([name, *parameters])
        app.command(prepare.__name__, help=prepare.__doc__)(command)
        return prepare

    return register
