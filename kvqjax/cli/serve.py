"""`kvqjax serve`: the OpenAI protocol over HTTP."""

import asyncio
import copy
import functools
import json
import logging
import os
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from kvqjax._errors import UserError
from kvqjax._files import made_folder
from kvqjax._options import byte_count
from kvqjax._tables import size
from kvqjax.cli.common import (
    Artifacts,
    Dtype,
    Kernels,
    Mesh,
    ModelName,
    OneCache,
    RopeLength,
    TextOnly,
    Weights,
    calibrated,
    methods_of,
    number,
    open_model,
    token_number,
)
from kvqjax.cli.generate_options import BEYOND_TRAINED
from kvqjax.cli.habits import shell_line
from kvqjax.cli.output import announce
from kvqjax.cli.stopping import end_stopped, say_at_once
from kvqjax.generation.prompt_ids import PLAIN_CHAT, has_chat_template
from kvqjax.model.loading import Model
from kvqjax.serving.engine import CHUNK, MOST_BYTES, MOST_STRIDE, PREFIXES, QUEUE, STRIDE, Engine
from kvqjax.serving.prefix_folder import newest_folder, write_newest
from kvqjax.serving.protocol import check_api_key

API_KEY = "KVQJAX_API_KEY"  # environment variable: an option would be seen in the list of processes
GRACE = 10  # seconds that answers under way get at a shutdown
CUT = 30  # seconds after that until connections are cut
ENDING = (
    f"ending: answers get {GRACE} seconds, and a program that is being compiled is waited for; "
    "Ctrl-C (again) ends at once"
)


def _pool(text: str | int) -> int:
    try:
        return byte_count(text, 1, MOST_BYTES)
    except UserError as error:
        raise typer.BadParameter(shell_line(error)) from error


def serve(
    model: ModelName = "demo",
    cache: OneCache = "exact",
    artifact: Artifacts = [],  # noqa: B006
    host: Annotated[
        str, typer.Option(help="address to listen at; 0.0.0.0: every network of this machine")
    ] = "127.0.0.1",
    port: Annotated[int, number("--port", least=0, most=65535, help="0: any that is free")] = 8000,
    rows: Annotated[
        int | None, number("--rows", most=2**16, help="requests answered at a time; default: 8")
    ] = None,
    capacity: Annotated[
        int | None,
        token_number(
            least=2,
            help="tokens of a request, prompt and answer; default: 4096, or what the model has",
        ),
    ] = None,
    pool: Annotated[
        int | None,
        typer.Option(
            "--pool",
            parser=_pool,
            min=1,
            max=MOST_BYTES,
            metavar="BYTES",
            help="memory for the cache, as 2G; default: as much as --rows full rows take",
        ),
    ] = None,
    chunk: Annotated[
        int, number("--chunk", help="tokens of a prompt that are read between two strides")
    ] = CHUNK,
    stride: Annotated[
        int, number("--stride", most=MOST_STRIDE, help="tokens of a piece of a stream")
    ] = STRIDE,
    queue: Annotated[
        int, number("--queue", help="requests that may wait; a further one is refused")
    ] = QUEUE,
    prefixes: Annotated[
        int,
        number(
            "--prefixes",
            least=0,
            most=2**16,
            help="memory for what prompts begin with, in full rows; 0: none",
        ),
    ] = PREFIXES,
    prefix_folder: Annotated[
        Path | None,
        typer.Option(
            help="read what prompts begin with from here at the start, and write it here at the end"
        ),
    ] = None,
    allow_origin: Annotated[
        list[str],
        typer.Option(help="a web page's origin that may use the server, or *; repeatable"),
    ] = [],  # noqa: B006
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="a line on stderr for each request")
    ] = False,
    beyond_trained: Annotated[bool, typer.Option("--beyond-trained", help=BEYOND_TRAINED)] = False,
    context_shift: Annotated[
        bool,
        typer.Option(
            "--context-shift",
            help="answers go on in a full row: its oldest text leaves behind the system message",
        ),
    ] = False,
    served_name: Annotated[
        str | None, typer.Option(help="the model's name for clients; default: --model")
    ] = None,
    mesh: Mesh = "",
    kernels: Kernels = "auto",
    dtype: Dtype = None,
    weights: Weights = None,
    text_only: TextOnly = False,
    rope_length: RopeLength = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="say where and what is served as a line of JSON")
    ] = False,
) -> None:
    """Serve a model in the OpenAI protocol, many requests at a time through one compressed cache.

    /v1/completions, /v1/chat/completions, /v1/models, /health, /ready, /metrics, and / to chat in a
    browser. With the environment variable KVQJAX_API_KEY, clients have to send that key."""
    uvicorn, make_app = _packages()
    if not host:  # to the system that is every network
        raise UserError(
            "--host '' names no address; 127.0.0.1 is this machine alone, 0.0.0.0 every network"
        )
    api_key = os.environ.get(API_KEY) or None
    check_api_key(api_key)
    if API_KEY in os.environ and api_key is None:
        announce(f"{API_KEY} is empty: clients need no key")
    if prefix_folder is not None:
        made_folder(prefix_folder)  # the server would say at its end that it cannot be written
    method = methods_of([cache])[0]
    loaded = calibrated(
        open_model(model, dtype, weights, method, mesh, text_only, rope_length), [method], artifact
    )[0][0]
    capacity = _trained_capacity(loaded, capacity, beyond_trained)
    options = {
        "capacity": capacity,
        "chunk": chunk,
        "stride": stride,
        "queue": queue,
        "prefixes": prefixes,
        "context_shift": context_shift,
    }
    engine = Engine(loaded, method, rows=rows, pool_bytes=pool, kernels=kernels, **options)
    name = served_name or (Path(model).name if Path(model).exists() else model)
    stats, loaded_prefixes = engine.stats(), _load_prefixes(engine, prefix_folder)
    ending = functools.partial(_save_prefixes, engine, prefix_folder)
    doors = {"beyond_trained": beyond_trained, "origins": allow_origin}
    app = make_app(engine, name, api_key=api_key, at_end=ending, **doors)
    server = _server(uvicorn, app, engine, log_requests)
    try:
        with _listening(host, port) as door:
            shown = f"[{host}]" if ":" in host else host  # as an address of IPv6 stands in a URL
            address = f"http://{shown}:{door.getsockname()[1]}/v1"
            if as_json:
                about = {
                    "address": address,
                    "model": name,
                    "cache": str(method),
                    "rows": stats.rows,
                }
                about |= {
                    "capacity": stats.capacity,
                    "bytes": stats.cache_bytes,
                    "bits": stats.bits,
                }
                print(json.dumps(about), flush=True)
            announce(
                f"{name} through {method}: {stats.rows} rows of {stats.capacity} tokens, {size(stats.cache_bytes)}, "
                f"{stats.bits:.4g} bits a number"
            )
            if loaded_prefixes:
                announce(f"{loaded_prefixes} beginnings of prompts are known from {prefix_folder}")
            announce(f"{address}, and / in a browser; /ready says when all is compiled")
            if not has_chat_template(loaded):
                announce(PLAIN_CHAT)
            server.run([door])
    finally:
        engine.close()


def _trained_capacity(model: Model, capacity: int | None, beyond_trained: bool) -> int | None:
    """Cut the tokens of a row to what requests may have: memory for more would never be used."""
    trained = model.config.trained_length
    if capacity is None or trained is None or capacity <= trained or beyond_trained:
        return capacity
    announce(
        f"rows have {trained} tokens, for which this model was trained, not {capacity}; --beyond-trained allows more"
    )
    return trained


def _load_prefixes(engine: Engine, folder: Path | None) -> int:
    """Load what an earlier server kept. What is of no use here, or cannot be read, is no reason not
    to serve."""
    newest = None if folder is None else newest_folder(folder)
    if newest is None:
        return 0
    try:
        return engine.load_prefixes(newest)
    except UserError as error:
        announce(f"prompts are read anew: {shell_line(error)}")
        return 0


def _save_prefixes(engine: Engine, folder: Path | None) -> None:
    """Save what prompts began with, for the next server. The last thing that a server does has
    nobody to answer to, so that what goes wrong is a line."""
    if folder is not None and engine.fault is None:
        try:
            write_newest(folder, engine.save_prefixes)
        except UserError as error:
            announce(f"what prompts began with is lost: {shell_line(error)}")


def _listening(host: str, port: int) -> socket.socket:
    """Open the door before anything is said of it: port 0 is any that is free."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"{host}:{port}: {error.strerror}") from error


def _server(uvicorn: Any, app: Any, engine: Engine, log_requests: bool) -> Any:
    """Make uvicorn's server for an application over an engine. Answers under way at a shutdown get
    GRACE seconds. Then the engine ends them with what they have: uvicorn would cut their
    connections, and log a traceback for each. A second Ctrl-C ends the process at once."""

    async def end_answers() -> None:
        await asyncio.sleep(GRACE)
        await asyncio.to_thread(engine.close)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit and sig == signal.SIGINT:
                end_stopped()
            is_first = not self.should_exit
            # Before the line is written: a second Ctrl-C may come while it is.
            super().handle_exit(sig, frame)
            if is_first:
                say_at_once(ENDING)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            ending = asyncio.create_task(end_answers())
            await super().shutdown(sockets)
            ending.cancel()

    from kvqjax.serving.deadlines import ImpatientProtocol

    options = {
        "http": ImpatientProtocol,
        "log_level": "warning",
        "timeout_graceful_shutdown": GRACE + CUT,
    }
    settings = uvicorn.Config(app, **options, log_config=_log_settings(uvicorn))
    if log_requests:  # uvicorn has one level for all that it logs
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return Server(settings)


def _log_settings(uvicorn: Any) -> dict[str, Any]:
    """Make uvicorn's settings of its log: a request's line has the time and goes to stderr, for
    stdout may be JSON."""
    settings = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    settings["formatters"]["access"]["fmt"] = (
        '%(asctime)s %(client_addr)s "%(request_line)s" %(status_code)s'
    )
    settings["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return settings


def _packages():
    """Import what the extra `serve` brings: uvicorn, and the application that needs starlette."""
    try:
        import uvicorn
    except ImportError as error:
        raise UserError(
            f"serving needs further packages ({error.name}): pip install '.[serve]'"
        ) from error
    from kvqjax.serving.app import make_app

    return uvicorn, make_app
