"""Closes connections whose request heads arrive too slowly, and sends an error if the received bytes are not HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from minitui.server.descriptors import most_connections
from minitui.server.errors import ApiError
from minitui.server.service import Service

MAX_HEAD = 64 << 10  # bytes of a request's first line and headers
MAX_CONNECTIONS = 800  # below the usual limit of 1,024 open files


class Connection(H11Protocol):
    """uvicorn's connection, with a time limit for a request's head, and errors in OpenAI's format."""

    def __init__(self, service: Service, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._service = service
        self._waiting: asyncio.TimerHandle | None = None
        self.app = self._run

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":  # others get no chunks
            scope["state"]["write"] = self._write
        await self.config.loaded_app(scope, receive, send)

    def _write(self, piece: bytes) -> bool:
        """Send the next piece of a response without a length; b"" sends nothing. h11 and the layers of ASGI would take
        most of the time of a short piece. Returns False if `send` must send it: it waits for a peer that reads too
        slowly."""
        if self.flow.write_paused or self.cycle is None or self.cycle.disconnected:
            return False
        if piece:
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn's annotation is narrower than asyncio's
        self._make_room()
        self._service.connections[self] = None
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._service.connections.pop(self, None)
        super().connection_lost(exc)
        # They lead back to this object: only the garbage collector would free it.
        self.app = self.cycle = self.scope = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def _make_room(self) -> None:
        """If the limit of connections is reached, close the oldest connections without a running request."""
        most = most_connections(MAX_CONNECTIONS)
        if len(self._service.connections) >= most:
            idle = (one for one in self._service.connections if one.cycle is None or one.cycle.response_complete)
            for connection in list(itertools.islice(idle, max(1, most // 10))):
                self._service.connections.pop(connection)
                connection.transport.close()

    def _watch_head(self) -> None:
        """Limit the time until a request's head has arrived. Between two requests, uvicorn's own limit applies."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self._service.settings.body_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if self.conn.our_state is h11.IDLE:
            self._refuse(ApiError(408, f"no request arrived within {self._service.settings.body_s:g} s"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Send an error for bytes that are not HTTP. uvicorn calls this while it handles the parser's exception."""
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            self._refuse(ApiError(431, f"the request's headers are larger than {MAX_HEAD >> 10} KiB"))
        else:
            self._refuse(ApiError(400, "this is not a valid HTTP request", code="bad_http"))

    def _refuse(self, error: ApiError) -> None:
        """Send an error, unless a response has begun, and close the connection."""
        cycle = self.cycle
        if not self.transport.is_closing() and (cycle is None or cycle.response_complete or not cycle.response_started):
            body = json.dumps(error.body).encode()
            head = f"HTTP/1.1 {error.status} \r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
            self._service.metrics.refusal(error.status)
        self.transport.close()
