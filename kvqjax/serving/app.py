"""The HTTP server: a starlette application over an engine, in the OpenAI protocol.

The event loop reads and writes; the engine's thread owns the device; texts are encoded in threads of their own.
"""

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvqjax._arguments import MOST_SEED
from kvqjax._errors import UserError
from kvqjax.generation.prompt_ids import encode_prompts
from kvqjax.model.tokenizer_calls import decoded
from kvqjax.serving.engine import Engine, EngineClosed, EngineFull, RequestFailed
from kvqjax.serving.protocol import (
    NotFound,
    RequestBody,
    chat_chunk,
    chat_object,
    check_api_key,
    completion_chunk,
    completion_object,
    error_object,
    models_object,
    read_chat,
    read_completion,
    usage_of,
)
from kvqjax.serving.request import Answered, Handle, ServedPiece
from kvqjax.serving.token_texts import AnswerScores
from kvqjax.serving.tokenize import detokenized, tokenized

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise UserError(f"serving needs further packages ({error.name}): pip install '.[serve]'") from error

__all__ = ["MOST_BYTES", "make_app"]

PAGE = Path(__file__).parent.parent / "assets" / "serve" / "page.html"
MOST_BYTES = 4 * 2**20  # of a body; a prompt of 128K tokens is about half a MiB of text
LOOK = 0.5  # seconds between two checks that the client is still connected
BUSY = 1  # seconds after which a client that was refused may ask again


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.kind = status, kind


def make_app(
    engine: Engine,
    name: str,
    *,
    api_key: str | None = None,
    most_bytes: int = MOST_BYTES,
    at_end: Callable[[], None] = lambda: None,
) -> Starlette:
    """Make the application that serves an engine; the engine is closed with it.

    Args:
        engine: serves the requests.
        name: of the model, as clients write it.
        api_key: what clients have to send as `Authorization: Bearer KEY`; None: nothing.
        most_bytes: the largest body that is read.
        at_end: called when the engine is closed. Code after uvicorn's loop is no place for it: signals end the process
            before that runs.

    Returns:
        An ASGI application with /v1/models, /v1/completions, /v1/chat/completions, /tokenize, /detokenize, /health,
        /ready, /metrics and, as /, a page to chat.

    Raises:
        UserError: packages of the extra `serve` are missing, or no client can send the key.
    """
    check_api_key(api_key)
    server = _Server(engine, name, api_key, most_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        server.warming = asyncio.create_task(server.warm())
        try:
            yield
        finally:
            await asyncio.to_thread(engine.close)
            await asyncio.gather(server.warming, return_exceptions=True)
            await asyncio.to_thread(at_end)

    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route("/metrics", server.metrics),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    handlers = {_Refused: _refusal, UserError: _refusal, HTTPException: _no_such_path, Exception: _fault}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _refusal(_: Request, error: Exception) -> Response:
    """Answer what a client can mend."""
    status, kind, headers = 400, "invalid_request_error", {}
    if isinstance(error, _Refused):
        status, kind = error.status, error.kind
    elif isinstance(error, NotFound):
        status = 404
    elif isinstance(error, EngineFull):
        status, kind, headers = 429, "rate_limit_error", {"Retry-After": str(BUSY)}
    elif isinstance(error, EngineClosed | RequestFailed):
        status, kind = (503 if isinstance(error, EngineClosed) else 500), "server_error"
    return JSONResponse(error_object(str(error), kind, status), status, headers)


async def _no_such_path(request: Request, error: Exception) -> Response:
    """Answer a path, or a method of a path, that is not served."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not served here: {error.detail}"
    return JSONResponse(
        error_object(message, "invalid_request_error", error.status_code), error.status_code, error.headers
    )


async def _fault(_: Request, error: Exception) -> Response:
    """Answer what is wrong with the server. The traceback goes to its log, for starlette raises the error again."""
    return JSONResponse(error_object(_fault_text(error), "server_error", 500), 500)


def _fault_text(error: Exception) -> str:
    return f"the server failed: {type(error).__name__}"


class _Server:
    """The endpoints. `warming` is the task that compiles the engine's programs."""

    def __init__(self, engine: Engine, name: str, api_key: str | None, most_bytes: int):
        self.warming: asyncio.Task | None = None
        self._engine, self._name, self._api_key, self._most_bytes = engine, name, api_key, most_bytes
        self._created = int(time.time())
        self._registry = CollectorRegistry()
        self._registry.register(_Counts(engine))

    async def warm(self) -> None:
        await asyncio.to_thread(self._engine.warm)

    # --- Endpoints that the model does not answer ---

    async def page(self, _: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def health(self, _: Request) -> Response:
        """Answer 200 while requests can be answered; 503 once the engine has failed, for only a restart helps."""
        if self._engine.fault is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": f"failed: {type(self._engine.fault).__name__}"}, 503)

    async def ready(self, _: Request) -> Response:
        """Answer 200 once every program is compiled, before 503."""
        warm = self.warming is not None and self.warming.done() and self.warming.exception() is None
        return JSONResponse({"status": "ready" if warm else "compiling"}, 200 if warm else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        models = models_object(self._name, self._created, self._engine.capacity)
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse(models)
        if name != self._name:
            raise NotFound(f"model {name!r} is not served here; this server has {self._name!r}")
        return JSONResponse(models["data"][0])

    # --- Endpoints that the model answers ---

    async def completions(self, request: Request) -> Response:
        body = read_completion(await self._body(request), self._name)
        if body.stream and (body.echo or body.new_tokens == 0):
            option = "echo" if body.echo else "max_tokens=0"
            raise _Refused(400, f"{option} is not served as a stream; leave one of them out")
        prompts, handles = await self._submitted(body)
        number = f"cmpl-{uuid.uuid4().hex}"
        if body.stream:
            return self._streamed(self._completion_events(number, body, handles), handles)
        answers = await self._answers(request, handles)
        if body.new_tokens == 0:  # the scores of a prompt alone
            answers = [_without_tokens(answer) for answer in answers]
        tellers = self._tellers(body, handles)
        return JSONResponse(completion_object(number, self._name, body, answers, prompts, tellers))

    async def chat(self, request: Request) -> Response:
        body = read_chat(await self._body(request), self._name)
        _, handles = await self._submitted(body)
        number = f"chatcmpl-{uuid.uuid4().hex}"
        if body.stream:
            return self._streamed(self._chat_events(number, body, handles), handles)
        answers = await self._answers(request, handles)
        return JSONResponse(chat_object(number, self._name, body, answers, self._tellers(body, handles)))

    async def tokenize(self, request: Request) -> Response:
        raw = await self._body(request)
        return JSONResponse(await asyncio.to_thread(tokenized, self._engine, self._name, raw))

    async def detokenize(self, request: Request) -> Response:
        raw = await self._body(request)
        return JSONResponse(await asyncio.to_thread(detokenized, self._engine, self._name, raw))

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # In constant time: how long a comparison takes must not tell how much of a key is right.
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._api_key.encode()):
            raise _Refused(401, "wrong or missing API key", "authentication_error")

    async def _body(self, request: Request) -> bytes:
        """Read a body. One that is too large is refused before all of it is read."""
        self._check_key(request)
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > self._most_bytes:
                    raise _Refused(413, f"the body has more than {self._most_bytes} bytes")
                parts.append(part)
        except ClientDisconnect:
            raise _Refused(499, "the client has gone") from None
        return b"".join(parts)

    async def _submitted(self, body: RequestBody) -> tuple[list[tuple[str, Sequence[int]]], list[Handle]]:
        """Submit a request for every choice: (text and ids of its prompt, its handle). Where one is refused, all are
        given up."""
        return await asyncio.to_thread(self._submit, body)

    def _submit(self, body: RequestBody) -> tuple[list[tuple[str, Sequence[int]]], list[Handle]]:
        options = dict(body.options)
        chat = options.pop("chat", False)
        count = len(body.prompts) * body.choices
        if count > self._engine.queue:  # 429 would say that it helps to ask again
            raise UserError(f"{count} answers are asked for at once; at most {self._engine.queue} may wait here")
        model, most = self._engine.model, self._engine.capacity
        encoded = [encode_prompts(model, [prompt], chat, most=most)[0] for prompt in body.prompts]
        handles: list[Handle] = []
        texts: list[tuple[str, Sequence[int]]] = []
        try:
            for prompt, ids in zip(body.prompts, encoded, strict=True):
                max_new_tokens = self._new_tokens(body, len(ids))
                for choice in range(body.choices):
                    seed = (options["seed"] + choice) % (MOST_SEED + 1)  # the engine takes no more
                    submitted = self._engine.submit(ids, max_new_tokens=max_new_tokens, **(options | {"seed": seed}))
                    handles.append(submitted)
                    texts.append((prompt if isinstance(prompt, str) else self._text(ids), ids))
        except UserError:
            _give_up(handles)
            raise
        return texts, handles

    def _new_tokens(self, body: RequestBody, prompt: int) -> int:
        """Choose the number of an answer's tokens. An answer of 0 tokens makes one, which `completions` leaves out."""
        if body.new_tokens is not None:
            return max(1, body.new_tokens)
        trained = self._engine.model.config.trained_length
        longest = min(self._engine.capacity, trained or self._engine.capacity)
        if prompt >= longest:
            raise UserError(f"a prompt of {prompt} tokens leaves no room for an answer in a row of {longest}")
        return longest - prompt

    def _tellers(self, body: RequestBody, handles: list[Handle]) -> list[AnswerScores]:
        """Make what says of every answer's tokens what they are."""
        model = self._engine.model
        return [AnswerScores(model, handle.request.prompt, body.tokens_by_number) for handle in handles]

    def _text(self, ids: Sequence[int]) -> str:
        """Give the text of a prompt."""
        model = self._engine.model
        return decoded(model.tokenizer, ids, True) if model.has_tokenizer else ""

    async def _answers(self, request: Request, handles: list[Handle]) -> list[Answered]:
        """Wait for every answer. Once the client has gone, the requests are given up."""
        future = asyncio.gather(*(_ended(handle) for handle in handles))
        try:
            while not (await asyncio.wait([future], timeout=LOOK))[0]:
                if await request.is_disconnected():
                    raise _Refused(499, "the client has gone")
            await future
        finally:
            _give_up(handles)
            future.cancel()
            # asyncio logs a cancelled gather whose error is never retrieved, with its traceback.
            await asyncio.gather(future, return_exceptions=True)
        return [handle.result() for handle in handles]

    def _streamed(self, events: AsyncIterator[dict[str, Any]], handles: list[Handle]) -> Response:
        """Send events as they come."""

        async def lines() -> AsyncIterator[str]:
            try:
                async for event in events:
                    yield f"data: {json.dumps(event)}\n\n"
                yield "data: [DONE]\n\n"
            except Exception as error:  # the status has been sent already
                text = str(error) if isinstance(error, UserError) else _fault_text(error)
                yield f"data: {json.dumps(error_object(text, 'server_error', 500))}\n\n"
                if not isinstance(error, UserError):
                    raise  # for the server's log

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return _EventStream(handles, lines(), media_type="text/event-stream", headers=headers)

    async def _completion_events(self, number: str, body: RequestBody, handles: list[Handle]):
        tellers = self._tellers(body, handles)
        async for index, piece, reason in _merged(handles):
            scores = tellers[index].completion(piece.scores) if body.scores else None
            yield completion_chunk(number, self._name, index, piece.text, reason, scores)
        if body.usage:
            yield completion_chunk(number, self._name, 0, "") | self._used(handles)

    async def _chat_events(self, number: str, body: RequestBody, handles: list[Handle]):
        for index in range(len(handles)):
            yield chat_chunk(number, self._name, index, {"role": "assistant", "content": ""})
        tellers = self._tellers(body, handles)
        async for index, piece, reason in _merged(handles):
            scores = tellers[index].chat(piece.scores) if body.scores else None
            delta = {"content": piece.text} if piece.text or piece.tokens else {}
            yield chat_chunk(number, self._name, index, delta, reason, scores)
        if body.usage:
            yield chat_chunk(number, self._name, 0, {}) | self._used(handles)

    def _used(self, handles: list[Handle]) -> dict[str, Any]:
        """Give the last event of a stream: no choices, and the count of tokens."""
        return {"choices": [], "usage": usage_of([handle.result() for handle in handles])}


class _EventStream(StreamingResponse):
    """A stream of answers' events. Answers that have not ended with it are given up, whatever ended it: a client that
    goes away before the first event leaves a generator that never runs, and so has no end of its own."""

    def __init__(self, handles: Sequence[Handle], *arguments, **options):
        super().__init__(*arguments, **options)
        self._handles = handles

    async def __call__(self, *arguments) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            _give_up(self._handles)


def _give_up(handles: Iterable[Handle]) -> None:
    for handle in handles:
        if not handle.ended:
            handle.abort()


def _without_tokens(answer: Answered) -> Answered:
    return Answered(**(vars(answer) | {"text": "", "tokens": [], "scores": [], "finish_reason": "length"}))


async def _pieces(handle: Handle) -> AsyncIterator[ServedPiece]:
    """Give the pieces of an answer. Raises EngineClosed where the server ends before the first: nothing is lost then if
    the client asks again, and an empty answer would look like one."""
    async for piece in handle:
        yield piece
    answer = handle.result()
    if answer.finish_reason == "aborted" and not answer.tokens:
        raise EngineClosed("the server ended before this answer began")


async def _ended(handle: Handle) -> None:
    async for _ in _pieces(handle):
        pass


async def _merged(handles: list[Handle]) -> AsyncIterator[tuple[int, ServedPiece, str | None]]:
    """Give the pieces of several answers as they come. After the last piece of an answer comes an empty one with the
    reason why it ended."""
    pieces: asyncio.Queue[tuple[int, ServedPiece, str | None] | Exception] = asyncio.Queue()

    async def follow(index: int, handle: Handle) -> None:
        try:
            async for piece in _pieces(handle):
                await pieces.put((index, piece, None))
            await pieces.put((index, ServedPiece("", [], []), handle.result().finish_reason))
        except Exception as error:  # a fault of the engine too: whoever reads the pieces would wait for ever
            await pieces.put(error)

    tasks = [asyncio.create_task(follow(*pair)) for pair in enumerate(handles)]
    try:
        open_count = len(handles)
        while open_count:
            entry = await pieces.get()
            if isinstance(entry, Exception):
                raise entry
            yield entry
            open_count -= entry[2] is not None
    finally:
        for task in tasks:
            task.cancel()


# What /metrics says of the fields of `Engine.stats`.
GAUGES = {
    "running": "requests whose answer is being made",
    "waiting": "requests that wait for a row",
    "rows": "requests that can be answered at a time",
    "cache_bytes": "bytes of the cache",
    "pages": "pages of the cache",
    "pages_free": "pages that no row has",
    "pages_shared": "pages that several rows or kept prefixes have",
    "prefixes": "beginnings of prompts that are kept",
}
COUNTERS = {
    "requests": "requests that have ended",
    "aborted": "requests that were given up",
    "failed": "requests that ended with an error",
    "prompt_tokens": "tokens of prompts that were fed",
    "reused_tokens": "tokens of prompts that were kept from earlier ones",
    "tokens": "tokens that were made",
    "preempted": "times that a request made way for others",
}


class _Counts:
    """What /metrics says, read from the engine when it is asked."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self):
        stats = self._engine.stats()
        for field, text in GAUGES.items():
            yield GaugeMetricFamily(f"kvqjax_{field}", text, value=getattr(stats, field))
        # "bits" alone would not say of what.
        text = "bits of the cache per number of a key or value"
        yield GaugeMetricFamily("kvqjax_cache_bits", text, value=stats.bits)
        for field, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvqjax_{field}", text, value=getattr(stats, field))
