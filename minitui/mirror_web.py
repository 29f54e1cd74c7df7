"""`minitui chat --web --mirror`: one application for a class. Everybody's tab shows it; only the presenter's types.

The page and its terminal are those of textual-serve; minitui/mirror.py is what goes between. The address that the
presenter uses holds a secret, so that who knows the viewers' address can watch and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import WSMsgType, web
from jinja2 import Environment, FileSystemLoader
from textual_serve import server as textual_serve

from engine.errors import EngineError
from minitui.mirror import Application, Viewer

SIZE = (120, 36)  # columns, rows: the same for everybody
MAX_VIEWERS = 300
MAX_TYPED = 1 << 20  # bytes of one message of a browser: a paste
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# The letters become as large as the window allows for all columns and rows; a window of another size begins anew. The
# font comes from here and not from the web, for a class may have none.
FITTING = """
<style>@font-face { font-family: "Roboto Mono"; src: url(/static/fonts/RobotoMono-VariableFont_wght.ttf); }</style>
<script>
  const fitting = () => String(Math.max(4, Math.floor(
    Math.min(innerWidth / (COLUMNS * 0.605), (innerHeight - ROWS) / (ROWS * 1.32)))));
  document.addEventListener("DOMContentLoaded", () => {
    const terminal = document.getElementById("terminal");
    terminal.dataset.fontSize = fitting();
    terminal.dataset.sessionWebsocketUrl =
      (location.protocol === "https:" ? "wss:" : "ws:") + "//" + location.host + "SOCKET";
  });
  addEventListener("resize", () => {
    if (fitting() !== document.getElementById("terminal").dataset.fontSize) location.reload();
  });
</script>
</head>
"""


def page(socket_path: str, size: tuple[int, int] = SIZE) -> str:
    """textual-serve's page, for a terminal of a fixed size whose websocket is at `socket_path`."""
    templates = Environment(loader=FileSystemLoader(_part("templates")), autoescape=True)
    text = templates.get_template("app_index.html").render(
        config={"static": {"url": "/static/"}}, application={"name": "minitui"}, font_size=16, app_websocket_url=""
    )
    text = text.replace("https://fonts.googleapis.com/css?family=Roboto%20Mono", "/static/css/xterm.css")
    fitting = FITTING.replace("COLUMNS", str(size[0])).replace("ROWS", str(size[1])).replace("SOCKET", socket_path)
    return text.replace("</head>", fitting, 1)


def _part(name: str) -> Path:
    return Path(textual_serve.__file__).parent / name


class MirrorServer:
    """HTTP for viewers (/, /ws) and the presenter (/present/SECRET, /ws/SECRET)."""

    def __init__(self, application: Application, secret: str) -> None:
        self.application = application
        self._secret = secret
        self.site = web.Application()
        self.site.add_routes(
            [
                web.get("/", partial(self._page, "/ws")),
                web.get("/present/{secret}", self._presenter),
                web.get("/ws", self._watch),
                web.get("/ws/{secret}", self._watch),
                web.static("/static", _part("static")),
            ]
        )
        self._sockets: set[web.WebSocketResponse] = set()

    async def close(self) -> None:
        """Tell everybody that it is over."""
        for websocket in list(self._sockets):
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.5):
                    await websocket.close()

    async def _page(self, socket_path: str, request: web.Request) -> web.Response:
        headers = {"Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        return web.Response(text=page(socket_path), content_type="text/html", headers=headers)

    async def _presenter(self, request: web.Request) -> web.Response:
        self._check(request)
        return await self._page(f"/ws/{self._secret}", request)

    def _check(self, request: web.Request) -> bool:
        """Is this the presenter? 403 for a wrong secret, and for a page from elsewhere."""
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text=f"a page from {origin} may not watch this")
        given = request.match_info.get("secret")
        if given is not None and not hmac.compare_digest(given.encode(), self._secret.encode()):
            raise web.HTTPForbidden(text="this is not the presenter's address; / is for those who watch")
        return given is not None

    async def _watch(self, request: web.Request) -> web.WebSocketResponse:
        presenter = self._check(request)
        if len(self._sockets) >= MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_VIEWERS} watch already, and that is the limit")
        websocket = web.WebSocketResponse(heartbeat=15, compress=False, max_msg_size=MAX_TYPED)
        await websocket.prepare(request)
        self._sockets.add(websocket)
        showing = asyncio.create_task(self._show(websocket, Viewer(websocket.send_bytes, presenter)))
        try:
            async for message in websocket:
                if message.type == WSMsgType.TEXT:
                    await self._said(websocket, message.data, presenter)
        finally:
            showing.cancel()
            self._sockets.discard(websocket)
            await asyncio.gather(showing, return_exceptions=True)
        return websocket

    async def _show(self, websocket: web.WebSocketResponse, viewer: Viewer) -> None:
        with contextlib.suppress(ConnectionError):
            await self.application.mirror.show(viewer)
        await websocket.close()

    async def _said(self, websocket: web.WebSocketResponse, text: str, presenter: bool) -> None:
        """A message of a browser. Of a viewer only a ping is answered; nobody changes the size."""
        try:
            kind, *rest = json.loads(text)
        except (ValueError, TypeError):
            return
        if kind == "ping" and rest and isinstance(rest[0], str):
            await websocket.send_json(["pong", rest[0][:64]])
        elif presenter and kind == "stdin" and rest and isinstance(rest[0], str):
            self.application.type(rest[0])
        elif presenter and kind in ("focus", "blur"):
            self.application.tell(type=kind)


async def serve_mirror(listening: socket.socket, command: list[str], on_ready: Callable[[str], None]) -> int:
    """Until the application ends or a signal comes; returns the exit code. `on_ready` gets the presenter's secret."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in STOPS:
        loop.add_signal_handler(number, stop.set)
    application = Application(command, SIZE)
    secret = secrets.token_urlsafe(16)
    server = MirrorServer(application, secret)
    runner = web.AppRunner(server.site, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    running: list[asyncio.Task[Any]] = []
    try:
        await application.start()
        await web.SockSite(runner, listening).start()
        on_ready(secret)
        running = [asyncio.create_task(application.run()), asyncio.create_task(stop.wait())]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return 0
    except EngineError as error:
        raise EngineError(f"the application did not start: {error}") from error
    finally:
        await application.stop()
        await server.close()
        for task in running:
            task.cancel()
        await runner.cleanup()


def run_mirror(host: str, port: int, command: list[str]) -> int:
    """Serve the mirrored application that `command` starts; returns the exit code. Raises EngineError."""
    from minitui.server.command import address, listen

    listening = listen(host, port)
    port = listening.getsockname()[1]
    presenter = address("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)

    def ready(secret: str) -> None:
        print(
            f"minitui is mirrored at {address(host, port)} to whoever opens it, to watch\n"
            f"you type at {presenter}/present/{secret}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    listening.setblocking(False)
    return asyncio.run(serve_mirror(listening, command, ready))
