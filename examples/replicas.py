"""Several `kvqjax serve` behind one address: requests that begin alike go to the same one, which keeps their beginning.

    KVQJAX_API_KEY=... kvqjax serve --model smollm2 --cache kivi:bits=4 --port 8001      # one on each host or device
    KVQJAX_API_KEY=... kvqjax serve --model smollm2 --cache kivi:bits=4 --port 8002      # as there are
    python examples/replicas.py http://127.0.0.1:8001 http://127.0.0.1:8002 --port 8000

Needs `pip install '.[serve]' httpx`. Each server shares the pages of prompts that begin alike, so a prompt is read
soonest where its beginning was read before. The first characters of a prompt choose a server by rendezvous hashing:
when one goes away, only its own prompts move. A server that has far more requests under way than the others is passed
over, and so is one that does not answer, is not ready or has a full queue.

Bodies, headers and streams pass as they are. Ray Serve, or any load balancer that can hash a part of a request, does
the same on many hosts.
"""

import argparse
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SHARED = 1024  # characters of a prompt that choose its server: a system prompt, or an example's first lines
# A server is passed over if its requests under way exceed both 1.5 times the mean and the mean plus
# 4.
FULLER = 1.5, 4
ELSEWHERE = (429, 502, 503)  # full, or not ready: another server may answer
BETWEEN_HOSTS = ("host", "connection", "content-length", "transfer-encoding", "content-encoding")


def beginning(body: bytes) -> str:
    """Return what a request's prompt begins with; "" for requests without one."""
    try:
        asked = json.loads(body)
    except ValueError:  # the server that gets it says what is wrong
        return ""
    if not isinstance(asked, dict):
        return ""
    prompt = asked.get("messages", asked.get("prompt", ""))
    return (prompt if isinstance(prompt, str) else json.dumps(prompt))[:SHARED]


class Router:
    """The servers' addresses, and how many requests each has under way."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.under_way = dict.fromkeys(addresses, 0)

    @contextlib.contextmanager
    def counted(self, address: str) -> Iterator[None]:
        """Count a request as under way at a server."""
        self.under_way[address] += 1
        try:
            yield
        finally:
            self.under_way[address] -= 1

    def order(self, prompt: str) -> list[str]:
        """List the servers in the order in which a prompt tries them."""

        def weight(address: str) -> bytes:
            return hashlib.sha256(f"{address} {prompt}".encode()).digest()

        mean = sum(self.under_way.values()) / len(self.under_way)
        most = max(FULLER[0] * mean, mean + FULLER[1])
        ranked = sorted(self.under_way, key=weight, reverse=True)
        return sorted(ranked, key=lambda address: self.under_way[address] > most)  # the order of equals stays


async def send(router: Router, client: httpx.AsyncClient, request: Request) -> Response:
    """Pass a request to the first server that takes it, and its answer back as it comes."""
    body = await request.body()
    headers = {name: value for name, value in request.headers.items() if name.lower() not in BETWEEN_HOSTS}
    last = JSONResponse({"error": {"message": "no server answers", "type": "server_error"}}, 503)
    for address in router.order(beginning(body)):
        asked = client.build_request(
            request.method, address + request.url.path, params=request.query_params, headers=headers, content=body
        )
        async with contextlib.AsyncExitStack() as open_request:
            open_request.enter_context(router.counted(address))
            try:
                answer = await client.send(asked, stream=True)
            except httpx.TransportError:
                continue
            open_request.push_async_callback(answer.aclose)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in BETWEEN_HOSTS}
            if answer.status_code not in ELSEWHERE:
                return StreamingResponse(_pieces(answer, open_request.pop_all()), answer.status_code, kept)
            last = Response(await answer.aread(), answer.status_code, kept)
    return last


async def _pieces(answer: httpx.Response, open_request: contextlib.AsyncExitStack) -> AsyncIterator[bytes]:
    """Yield an answer's pieces. A client that goes away closes this, and with it the request at the server."""
    async with open_request:
        async for piece in answer.aiter_bytes():
            yield piece


def make_app(addresses: Sequence[str]) -> Starlette:
    """Return the application of a router for servers at these addresses."""
    router = Router([address.rstrip("/") for address in addresses])

    @contextlib.asynccontextmanager
    async def life(app: Starlette):
        # Answers take as long as they take; a server that is gone is known at once.
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5)) as app.state.client:
            yield

    async def passed(request: Request) -> Response:
        return await send(router, request.app.state.client, request)

    return Starlette(routes=[Route("/{path:path}", passed, methods=["GET", "POST"])], lifespan=life)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("addresses", nargs="+", help="of the servers, as http://127.0.0.1:8001")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(make_app(options.addresses), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
