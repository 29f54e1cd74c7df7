"""`minitui chat --web`: each tab has its own application; all use one engine."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from engine.errors import EngineError
from minitui.web.process import WebProcess
from minitui.web.site import Site, messages, stopped

MAX_TABS = 32  # each tab has a process, which takes 100 MB
COLUMNS, ROWS = (20, 1000), (5, 500)  # minimum and maximum of each


class Tab(WebProcess):
    """The application of one tab. A slow browser slows down only its own application."""

    def __init__(self, command: list[str], size: tuple[int, int], websocket: web.WebSocketResponse) -> None:
        super().__init__(command, size)
        self._websocket = websocket

    async def handle(self, kind: bytes, data: bytes) -> None:
        if kind == b"D":
            await self._websocket.send_bytes(data)

    async def work(self) -> None:
        """Run the application, then close the socket. If the start fails, the browser shows the error."""
        try:
            await self.start()
            await self.run()
        except EngineError as error:
            await self._websocket.send_bytes(f"minitui: {error}".replace("\n", "\r\n").encode())
        await self._websocket.close()

    def resize(self, columns: int, rows: int) -> None:
        """Set the size of the application's screen."""
        self._size = (columns, rows)  # used if the process has not started yet
        self.send(type="resize", width=columns, height=rows)


class TabSite(Site):
    """Runs `command` as a separate process for every socket."""

    max_sockets = MAX_TABS

    def __init__(self, host: str, token: str, command: list[str]) -> None:
        super().__init__(host, {token: True})
        self._command = command

    async def attend(self, websocket: web.WebSocketResponse, request: web.Request, may_type: bool) -> None:
        wanted = [request.query.get("width"), request.query.get("height")]
        initial_size = _size([int(n) if n and n.isdecimal() and len(n) < 5 else n for n in wanted]) or (80, 24)
        tab = Tab(self._command, initial_size, websocket)
        working = asyncio.create_task(tab.work())
        try:
            async for kind, rest in messages(websocket):
                match [kind, *rest]:
                    case ["stdin", str(text)]:
                        tab.type(text)
                    case ["resize", {"width": width, "height": height}] if size := _size([width, height]):
                        tab.resize(*size)
                    case ["focus" | "blur"]:
                        tab.send(type=kind)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await tab.stop()


def _size(wanted: Sequence[Any]) -> tuple[int, int] | None:
    """Returns (columns, rows) clamped to the limits; None if a number is not an integer."""
    if any(type(number) is not int for number in wanted):
        return None
    columns, rows = (max(least, min(most, n)) for n, (least, most) in zip(wanted, (COLUMNS, ROWS), strict=True))
    return columns, rows


async def serve_tabs(host: str, listening: socket.socket, command: list[str], on_ready: Callable[[str], None]) -> int:
    """Serve until a signal arrives; returns the exit code. `on_ready` is called with the token."""
    stop = stopped()
    token = secrets.token_urlsafe(24)
    async with TabSite(host, token, command).serving(listening):
        on_ready(token)
        await stop.wait()
    return 0
