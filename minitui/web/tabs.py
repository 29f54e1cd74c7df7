"""`--web` without --mirror: each tab has its own application."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys

from aiohttp import web

from engine.errors import EngineError
from minitui.web.process import WebProcess, page_message
from minitui.web.settings import WebSettings
from minitui.web.site import Site, first_size, messages, stopped, terminal_size


class Tab(WebProcess):
    """The application of one tab. A slow browser slows down only its own application."""

    def __init__(self, command: list[str], size: tuple[int, int], websocket: web.WebSocketResponse) -> None:
        super().__init__(command, size)
        self._websocket = websocket

    async def handle(self, kind: bytes, data: bytes) -> None:
        if kind == b"D":
            await self._websocket.send_bytes(data)
        elif message := page_message(kind, data):
            await self._websocket.send_str(message)

    async def work(self) -> None:
        """Run the application, then close the socket. If the start fails, the browser shows the error."""
        try:
            await self.start()
            await self.run()
        except EngineError as error:
            await self._websocket.send_bytes(f"minitui: {error}".replace("\n", "\r\n").encode())
        await self._websocket.close()


class TabSite(Site):
    """Runs `command` as a separate process for every socket."""

    def __init__(self, settings: WebSettings, token: str, command: list[str]) -> None:
        super().__init__(settings.host, {token: True}, settings.names)
        self.max_sockets, self._command = settings.tabs, command

    async def attend(self, websocket: web.WebSocketResponse, request: web.Request, may_type: bool) -> None:
        tab = Tab(self._command, first_size(request) or (80, 24), websocket)
        working = asyncio.create_task(tab.work())
        try:
            async for kind, rest in messages(websocket):
                match [kind, *rest]:
                    case ["stdin", str(text)]:
                        tab.type(text)
                    case ["resize", {"width": width, "height": height}] if size := terminal_size([width, height]):
                        tab.resize(size)
                    case ["focus" | "blur"]:
                        tab.send(type=kind)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await tab.stop()


async def serve_tabs(settings: WebSettings, listening: socket.socket, command: list[str]) -> int:
    """Serve until a signal arrives; returns the exit code. Prints the address."""
    from minitui.server.command import address

    stop = stopped()
    token = secrets.token_urlsafe(24)
    async with TabSite(settings, token, command).serving(listening):
        url = address(settings.host, listening.getsockname()[1])
        print(f"minitui is at {url}/?token={token}", file=sys.stderr, flush=True)
        await stop.wait()
    return 0
