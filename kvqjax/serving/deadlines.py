"""Time limits for requests that come slowly or never whole: a connection that says nothing, headers
without an end."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# From a connection, or from the first byte of a further request, to the end of its headers.
HEAD_SECONDS = 20


class ImpatientProtocol(AutoHTTPProtocol):
    """uvicorn's protocol, which closes a connection whose headers do not come in time. uvicorn
    itself limits only how long a connection may rest between two requests."""

    transport: asyncio.Transport
    cycle: Any  # the newest request; None before the first
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        resting = self._resting()
        super().data_received(data)
        if not self._resting():
            self._stop_waiting()
        elif resting and self._deadline is None:
            self._await_head()

    def _resting(self) -> bool:
        """Say whether no request is under way: none has come, or the last one is answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
