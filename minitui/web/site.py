"""The page and the websocket of `minitui chat --web`, with their access checks.

The page and its terminal come from textual-serve. As with Jupyter, the printed address contains a token, which the page
and the socket require. An open socket has all rights of the user who started minitui, including access to files. So
three checks keep other pages out:

    Host     must name the printed address; this refuses foreign domain names that resolve to this machine
    Origin   must be present when a socket is opened, and must have the same address as Host
    token    must be in the addresses of the page and of the socket. It is not in a cookie, because browsers send a
             cookie to all ports of the host

Origin and Host must have the same port. This port may differ from the port of this server, because of tunnels (ssh -L).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import WSMsgType, web

from minitui.protocol import is_loopback
from minitui.server.descriptors import most_connections
from minitui.server.origins import authority, is_allowed, is_same_origin
from minitui.web.pages import STATIC, filled, page

MAX_TYPED = 1 << 20  # bytes of one message from a browser, such as a paste
MAX_CONNECTIONS = 600  # below the usual limit of 1,024 open files
HEAD_S = 10.0  # seconds; the head of a request must arrive within this time
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEADERS = {
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

COLUMNS, ROWS = (20, 1000), (5, 500)  # minimum and maximum of each


def terminal_size(wanted: Sequence[Any]) -> tuple[int, int] | None:
    """Returns (columns, rows) clamped to the limits; None if a number is not an integer."""
    if any(type(number) is not int for number in wanted):
        return None
    columns, rows = (max(least, min(most, n)) for n, (least, most) in zip(wanted, (COLUMNS, ROWS), strict=True))
    return columns, rows


def first_size(request: web.Request) -> tuple[int, int] | None:
    """Returns the terminal's size in the address of a websocket; None if the address contains no size."""
    wanted = [request.query.get("width"), request.query.get("height")]
    return terminal_size([int(n) if n and n.isdecimal() and len(n) < 5 else n for n in wanted])


def is_served(name: str, host: str) -> bool:
    """Returns True if `name` is a valid name for a server that listens on `host`."""
    wanted = host.strip("[]").lower().removesuffix(".")
    if name == wanted or (is_loopback(name) and is_loopback(wanted)):
        return True
    if wanted not in ("0.0.0.0", "::"):
        return False
    own = socket.gethostname().lower()
    if is_loopback(name) or name in (own, own.partition(".")[0], f"{own}.local"):
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))  # safe: DNS rebinding needs a domain name
    return False


def check_link(request: web.Request, link: str) -> None:
    """Raises HTTPForbidden if the first part of the request's path is not `link`, in a time that tells nothing."""
    given = request.match_info["link"].encode("utf-8", "replace")
    if not hmac.compare_digest(given, link.encode()):
        raise web.HTTPForbidden(text="the link is wrong: open the whole address, or scan the code again")


class Site:
    """Serves the page at /?token=TOKEN and its websocket at /ws/TOKEN. Subclasses handle each socket in `attend`."""

    max_sockets = 300  # limit of open sockets that may type; the same limit applies to those that may not

    def __init__(self, host: str, tokens: Mapping[str, bool], names: Sequence[str] = ()) -> None:
        """`host`: the address on which the server listens. `tokens`: token -> True if its bearer may type. `names`:
        more names of this server, as of --allowed-host."""
        self._host, self._tokens, self._names = host, tokens, names
        self._sockets: dict[web.WebSocketResponse, bool] = {}  # socket -> True if its user may type
        self._busy: set[Any] = set()  # connections with a running request
        self.app = web.Application(middlewares=[self._around])
        self.app.on_response_prepare.append(_add_headers)
        self.app.add_routes(
            [web.get("/", self._page), web.get("/ws/{token}", self._socket), web.static("/static", STATIC)]
        )

    def head(self, may_type: bool) -> str:
        """Returns what the page's head contains for this user, such as the script that chooses the font."""
        return filled("touch.html", largest=16)

    async def attend(self, websocket: web.WebSocketResponse, request: web.Request, may_type: bool) -> None:
        """Serve one socket until it closes."""
        raise NotImplementedError

    @web.middleware
    async def _around(self, request: web.Request, handler: Callable[..., Awaitable[Any]]) -> Any:
        self._busy.add(request.protocol)
        try:
            hosts = request.headers.getall("Host", [])
            found = authority(hosts[0]) if len(hosts) == 1 else None
            if found is None:
                raise web.HTTPBadRequest(text="the Host header is not an address")
            if not is_served(found[0], self._host) and not is_allowed(found[0], self._names):
                raise web.HTTPForbidden(
                    text=f"the Host header says {found[0]}, which is not the printed address: add --allowed-host"
                )
            return await handler(request)
        finally:
            self._busy.discard(request.protocol)

    def _may_type(self, token: str) -> bool:
        """Returns True if the bearer of `token` may type. Raises HTTPForbidden for an unknown token."""
        given = token.encode("utf-8", "replace")
        allowed = [may for known, may in self._tokens.items() if hmac.compare_digest(given, known.encode())]
        if not allowed:
            raise web.HTTPForbidden(text="the token is missing or wrong: open the whole address that minitui printed")
        return allowed[0]

    async def _page(self, request: web.Request) -> web.Response:
        token = request.query.get("token", "")
        return web.Response(text=page(f"/ws/{token}", self.head(self._may_type(token))), content_type="text/html")

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        origins = request.headers.getall("Origin", [])
        if len(origins) != 1 or not is_same_origin(origins[0], request.headers["Host"]):
            raise web.HTTPForbidden(text="only a page of this address may open the socket")
        may_type = self._may_type(request.match_info["token"])
        # Viewers do not count towards the presenter's limit.
        if list(self._sockets.values()).count(may_type) >= self.max_sockets:
            raise web.HTTPServiceUnavailable(text=f"{self.max_sockets} tabs are open already, which is the limit")
        websocket = web.WebSocketResponse(heartbeat=15, compress=False, max_msg_size=MAX_TYPED)
        self._sockets[websocket] = may_type
        try:
            await websocket.prepare(request)
            await self.attend(websocket, request, may_type)
        finally:
            self._sockets.pop(websocket, None)
        return websocket

    async def close(self) -> None:
        """Close all sockets."""
        closing = (asyncio.wait_for(websocket.close(), 0.5) for websocket in list(self._sockets))
        await asyncio.gather(*closing, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def serving(self, listening: socket.socket) -> Any:
        """Serve on this listening socket until the `async with` block ends."""
        quiet = logging.getLogger("minitui.web.serve")
        quiet.propagate = False  # addresses contain tokens, and invalid requests must not reach the terminal
        quiet.addHandler(logging.NullHandler())
        runner = web.AppRunner(self.app, access_log=None, logger=quiet, keepalive_timeout=HEAD_S, shutdown_timeout=1.0)
        await runner.setup()

        def connect() -> asyncio.BaseProtocol:
            """Accept a connection. At the limit, close the oldest connections without a running request."""
            assert runner.server is not None
            connections, most = runner.server.connections, most_connections(MAX_CONNECTIONS)
            if len(connections) >= most:
                idle = [connection for connection in connections if connection not in self._busy]
                for connection in idle[: max(1, most // 10)]:
                    connection.force_close()
            return runner.server()

        server = await asyncio.get_running_loop().create_server(connect, sock=listening)
        try:
            yield
        finally:
            server.close()
            await self.close()
            await runner.cleanup()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


async def messages(websocket: web.WebSocketResponse) -> Any:
    """Yields a browser's messages as (kind, arguments). Answers pings and ignores invalid messages."""
    async for message in websocket:
        if message.type != WSMsgType.TEXT:
            continue
        try:
            kind, *rest = json.loads(message.data)
        except (ValueError, TypeError, RecursionError):
            continue
        if kind == "ping" and rest and isinstance(rest[0], str):
            await websocket.send_json(["pong", rest[0][:64]])
        elif isinstance(kind, str):
            yield kind, rest


def stopped() -> asyncio.Event:
    """Returns an event that is set when SIGINT, SIGTERM or SIGHUP arrives."""
    event = asyncio.Event()
    for number in STOPS:
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event
