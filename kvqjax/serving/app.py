"""The HTTP server: a starlette application over an engine, in the OpenAI protocol.

The event loop reads and writes; the engine's thread owns the device; texts are encoded in threads
of their own.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvqjax._arguments import MOST_SEED
from kvqjax._errors import TooLong, UserError
from kvqjax.generation.prompt_ids import encode_prompts, too_long
from kvqjax.model.tokenizer_calls import decoded
from kvqjax.serving.engine import Engine, EngineClosed
from kvqjax.serving.protocol import (
    RequestBody,
    chat_chunk,
    chat_object,
    chat_reason,
    check_api_key,
    completion_chunk,
    completion_object,
    error_object,
    models_object,
    not_served,
    read_chat,
    read_completion,
    usage_of,
)
from kvqjax.serving.refusals import Refused, refusal_of
from kvqjax.serving.request import Answered, Handle, ServedPiece
from kvqjax.serving.token_texts import AnswerScores
from kvqjax.serving.tokenize import detokenized, tokenized
from kvqjax.serving.tool_forms import AnswerReader
from kvqjax.serving.tools import (
    answer_options,
    answer_reader,
    chat_ids,
    deltas_of,
    ids_before_turns,
)

try:
    from prometheus_client import CONTENT_TYPE_LATEST
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from kvqjax.serving.metrics import Metrics
except ImportError as error:
    raise UserError(
        f"serving needs further packages ({error.name}): pip install '.[serve]'"
    ) from error

PAGE = Path(__file__).parent.parent / "assets" / "serve" / "page.html"
MOST_BYTES = 4 * 2**20  # of a body; a prompt of 128K tokens is about half a MiB of text
LOOK = 0.5  # seconds between two checks that the client is still connected
BODY_SECONDS = 60  # until all of a body has come: MOST_BYTES at 70 KB a second
ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#24c"/>'
    b'<path d="M3 4h10M3 8h6M3 12h3" stroke="#fff" stroke-width="2"/></svg>'
)


def make_app(
    engine: Engine,
    name: str,
    *,
    api_key: str | None = None,
    most_bytes: int = MOST_BYTES,
    at_end: Callable[[], None] = lambda: None,
    beyond_trained: bool = False,
    origins: Sequence[str] = (),
) -> Starlette:
    """Make the application that serves an engine; the engine is closed with it.

    Args:
        engine: serves the requests.
        name: of the model, as clients write it.
        api_key: what clients have to send as `Authorization: Bearer KEY`; None: nothing.
        most_bytes: the largest body that is read.
        at_end: called when the engine is closed. Code after uvicorn's loop is no place for it:
            signals end the process before that runs.
        beyond_trained: let requests have more tokens than the model was trained for, as in
            `kvqjax.generate`.
        origins: of web pages elsewhere that may use the server, as "https://example.org"; "*": all.

    Returns:
        An ASGI application with /v1/models, /v1/completions, /v1/chat/completions, /tokenize,
        /detokenize, /health, /ready, /metrics and, as /, a page to chat.

    Raises:
        UserError: packages of the extra `serve` are missing, or no client can send the key.
    """
    check_api_key(api_key)
    server = _Server(engine, name, api_key, most_bytes, beyond_trained)

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
        Route("/favicon.ico", server.icon),
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
    handlers = {
        Refused: _refusal,
        UserError: _refusal,
        HTTPException: _no_such_path,
        Exception: _refusal,
    }
    about: dict[str, Any] = {
        "allow_origins": origins,
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["*"],
    }
    middleware = [Middleware(CORSMiddleware, **about)] if origins else []
    return Starlette(
        routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware
    )


async def _refusal(_: Request, error: Exception) -> Response:
    """Answer an error. After a fault of the server starlette raises it again: its log has the
    traceback."""
    refusal = refusal_of(error)
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


async def _no_such_path(request: Request, error: Exception) -> Response:
    """Answer a path, or a method of a path, that is not served."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not served here: {error.detail}"
    return JSONResponse(
        error_object(message, "invalid_request_error", error.status_code),
        error.status_code,
        error.headers,
    )


class _Server:
    """The endpoints. `warming` is the task that compiles the engine's programs."""

    def __init__(
        self, engine: Engine, name: str, api_key: str | None, most_bytes: int, beyond_trained: bool
    ):
        self.warming: asyncio.Task | None = None
        self._engine, self._name, self._api_key, self._most_bytes = (
            engine,
            name,
            api_key,
            most_bytes,
        )
        self._created = int(time.time())
        self._beyond_trained = beyond_trained
        trained = None if beyond_trained else engine.model.config.trained_length
        # Of a prompt and its answer.
        self._most_tokens = min(engine.capacity, trained or engine.capacity)
        self._metrics = Metrics(engine)

    async def warm(self) -> None:
        await asyncio.to_thread(self._engine.warm)

    # --- Endpoints that the model does not answer ---

    async def page(self, _: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def icon(self, _: Request) -> Response:
        return Response(ICON, media_type="image/svg+xml")

    async def health(self, _: Request) -> Response:
        """Answer 200 while requests can be answered; 503 once the engine has failed, for only a
        restart helps."""
        if self._engine.fault is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": f"failed: {type(self._engine.fault).__name__}"}, 503)

    async def ready(self, _: Request) -> Response:
        """Answer 200 once every program is compiled, before 503."""
        warm = self.warming is not None and self.warming.done() and self.warming.exception() is None
        return JSONResponse({"status": "ready" if warm else "compiling"}, 200 if warm else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        models = models_object(self._name, self._created, self._most_tokens)
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse(models)
        if name != self._name:
            raise not_served(name, self._name)
        return JSONResponse(models["data"][0])

    # --- Endpoints that the model answers ---

    async def completions(self, request: Request) -> Response:
        body = read_completion(await self._body(request), self._name)
        if body.stream and (body.echo or body.new_tokens == 0):
            option = "echo" if body.echo else "max_tokens=0"
            raise Refused(
                400,
                f"{option} is not served as a stream; leave one of them out",
                param=option.partition("=")[0],
            )
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
        tellers, readers = self._tellers(body, handles), self._readers(body, handles)
        return JSONResponse(chat_object(number, self._name, body, answers, tellers, readers))

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
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.strip().encode(), self._api_key.encode()
        ):
            raise Refused(401, "wrong or missing API key", "authentication_error")

    async def _body(self, request: Request) -> bytes:
        """Read a body. One that is too large is refused before all of it is read."""
        self._check_key(request)
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > self._most_bytes:
                        raise Refused(413, f"the body has more than {self._most_bytes} bytes")
                    parts.append(part)
        except ClientDisconnect:
            raise Refused(499, "the client has gone") from None
        except TimeoutError:
            raise Refused(408, f"the body did not come within {BODY_SECONDS} seconds") from None
        return b"".join(parts)

    async def _submitted(
        self, body: RequestBody
    ) -> tuple[list[tuple[str, Sequence[int]]], list[Handle]]:
        """Submit a request for every choice: (text and ids of its prompt, its handle). Where one is
        refused, all are given up."""
        return await asyncio.to_thread(self._submit, body)

    def _submit(self, body: RequestBody) -> tuple[list[tuple[str, Sequence[int]]], list[Handle]]:
        count = len(body.prompts) * body.choices
        if count > self._engine.queue:  # 429 would say that it helps to ask again
            parameter = "n" if body.choices > 1 else body.prompt_field
            cause = (
                f"{count} answers are asked for at once; at most {self._engine.queue} may wait here"
            )
            raise UserError(cause, parameter=parameter)
        encoded = [self._encode(body, prompt) for prompt in body.prompts]
        handles: list[Handle] = []
        texts: list[tuple[str, Sequence[int]]] = []
        try:
            for prompt, ids in zip(body.prompts, encoded, strict=True):
                max_new_tokens = self._new_tokens(body, len(ids))
                options = dict(body.options)
                if body.chat:
                    options |= answer_options(self._engine.model, body.use, options, ids)
                first_tokens = self._first_tokens(body, prompt, ids)
                for choice in range(body.choices):
                    options["seed"] = _seed_of(body.options["seed"], choice)
                    options["beyond_trained"] = self._beyond_trained
                    options["keep_first"] = first_tokens
                    submitted = self._engine.submit(ids, max_new_tokens=max_new_tokens, **options)
                    handles.append(submitted)
                    texts.append((prompt if isinstance(prompt, str) else self._text(ids), ids))
        except UserError as error:
            _give_up(handles)
            if error.parameter == "grammar" and body.use.tools:
                error.parameter = "tools"
            if isinstance(error, TooLong):
                error.parameter = (
                    body.prompt_field if error.prompt >= error.most else body.length_field
                )
            raise
        return texts, handles

    def _encode(self, body: RequestBody, prompt: Any) -> list[int]:
        """Give the ids of a prompt."""
        try:
            if body.chat:
                return chat_ids(self._engine.model, prompt, body.use, body.end, self._most_tokens)
            return encode_prompts(self._engine.model, [prompt], most=self._most_tokens)[0]
        except UserError as error:
            error.parameter = error.parameter or body.prompt_field
            raise

    def _first_tokens(self, body: RequestBody, prompt: Any, ids: Sequence[int]) -> int | None:
        """Count the first ids of a prompt that never leave its row; None: the engine's default."""
        if not body.chat or not self._engine.context_shift:
            return None
        return ids_before_turns(self._engine.model, prompt, body.use, body.end, ids)

    def _new_tokens(self, body: RequestBody, prompt: int) -> int:
        """Choose the number of an answer's tokens. An answer of 0 tokens makes one, which
        `completions` leaves out."""
        if body.new_tokens is not None:
            return max(1, body.new_tokens)
        longest = self._most_tokens
        if prompt >= longest:
            raise too_long(prompt, 1, longest, f"do not fit a row of {longest}")
        return longest - prompt

    def _tellers(self, body: RequestBody, handles: list[Handle]) -> list[AnswerScores]:
        """Make what says of every answer's tokens what they are."""
        model = self._engine.model
        return [
            AnswerScores(model, handle.request.prompt, body.tokens_by_number) for handle in handles
        ]

    def _readers(self, body: RequestBody, handles: list[Handle]) -> list[AnswerReader]:
        """Make what takes every answer of a chat apart."""
        about = (self._engine.model, body.use, body.options)
        return [answer_reader(*about, handle.request.prompt) for handle in handles]

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
                    raise Refused(499, "the client has gone")
            await future
        finally:
            _give_up(handles)
            future.cancel()
            # asyncio logs a cancelled gather whose error is never retrieved, with its traceback.
            await asyncio.gather(future, return_exceptions=True)
        self._metrics.observe(handles)
        return [handle.result() for handle in handles]

    def _streamed(self, events: AsyncIterator[dict[str, Any]], handles: list[Handle]) -> Response:
        """Send events as they come."""

        async def lines() -> AsyncIterator[str]:
            try:
                async for event in events:
                    yield f"data: {json.dumps(event)}\n\n"
                yield "data: [DONE]\n\n"
                self._metrics.observe(handles)
            except Exception as error:  # the status has been sent already
                yield f"data: {json.dumps(refusal_of(error).body)}\n\n"
                if not isinstance(error, UserError):
                    raise  # for the server's log

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return _EventStream(handles, lines(), media_type="text/event-stream", headers=headers)

    async def _completion_events(self, number: str, body: RequestBody, handles: list[Handle]):
        tellers, blank = self._tellers(body, handles), _blank_usage(body)
        async for index, piece, reason in _merged(handles):
            scores = tellers[index].completion(piece.scores) if body.scores else None
            yield completion_chunk(number, self._name, index, piece.text, reason, scores) | blank
        if body.usage:
            yield completion_chunk(number, self._name, 0, "") | self._used(body, handles)

    async def _chat_events(self, number: str, body: RequestBody, handles: list[Handle]):
        blank = _blank_usage(body)
        tellers, readers = self._tellers(body, handles), self._readers(body, handles)
        for index, reader in enumerate(readers):
            first = {"role": "assistant", "content": "" if reader.is_plain else None}
            yield chat_chunk(number, self._name, index, first) | blank
        async for index, piece, reason in _merged(handles):
            reader = readers[index]
            parts = reader.feed(piece.text) if reason is None else reader.finish()
            scores = tellers[index].chat(piece.scores) if body.scores else None
            deltas = list(deltas_of(reader, parts))
            if reason is not None or not deltas:
                # The last one, or one that says that tokens have come.
                deltas.append({"content": ""} if piece.tokens and reader.is_plain else {})
            for place, delta in enumerate(deltas):
                is_last = place == len(deltas) - 1
                ended = chat_reason(reader, reason) if reason is not None and is_last else None
                yield chat_chunk(number, self._name, index, delta, ended, scores) | blank
                scores = None
        if body.usage:
            yield chat_chunk(number, self._name, 0, {}) | self._used(body, handles)

    def _used(self, body: RequestBody, handles: list[Handle]) -> dict[str, Any]:
        """Give the last event of a stream: no choices, and the count of tokens."""
        return {
            "choices": [],
            "usage": usage_of([handle.result() for handle in handles], body.choices),
        }


class _EventStream(StreamingResponse):
    """A stream of answers' events. Answers that have not ended with it are given up, whatever ended
    it: a client that goes away before the first event leaves a generator that never runs, and so
    has no end of its own."""

    def __init__(self, handles: Sequence[Handle], *arguments, **options):
        super().__init__(*arguments, **options)
        self._handles = handles

    async def __call__(self, *arguments) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            _give_up(self._handles)


def _blank_usage(body: RequestBody) -> dict[str, None]:
    """Give what the other events of a stream that ends with its usage say of it, as in the
    protocol."""
    return {"usage": None} if body.usage else {}


def _seed_of(seed: int | None, choice: int) -> int:
    """Choose the seed of an answer. Without a client's, every answer of a request draws for
    itself."""
    # The engine takes no more.
    return secrets.randbits(31) if seed is None else (seed + choice) % (MOST_SEED + 1)


def _give_up(handles: Iterable[Handle]) -> None:
    for handle in handles:
        if not handle.ended:
            handle.abort()


def _without_tokens(answer: Answered) -> Answered:
    return Answered(
        **(vars(answer) | {"text": "", "tokens": [], "scores": [], "finish_reason": "length"})
    )


async def _pieces(handle: Handle) -> AsyncIterator[ServedPiece]:
    """Give the pieces of an answer. Raises EngineClosed where the server ends before the first:
    nothing is lost then if the client asks again, and an empty answer would look like one."""
    async for piece in handle:
        yield piece
    answer = handle.result()
    if answer.finish_reason == "aborted" and not answer.tokens:
        raise EngineClosed("the server ended before this answer began")


async def _ended(handle: Handle) -> None:
    async for _ in _pieces(handle):
        pass


async def _merged(handles: list[Handle]) -> AsyncIterator[tuple[int, ServedPiece, str | None]]:
    """Give the pieces of several answers as they come. After the last piece of an answer comes an
    empty one with the reason why it ended."""
    pieces: asyncio.Queue[tuple[int, ServedPiece, str | None] | Exception] = asyncio.Queue()

    async def follow(index: int, handle: Handle) -> None:
        try:
            async for piece in _pieces(handle):
                await pieces.put((index, piece, None))
            await pieces.put((index, ServedPiece("", [], []), handle.result().finish_reason))
        except (
            Exception
        ) as error:  # a fault of the engine too: whoever reads the pieces would wait for ever
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
