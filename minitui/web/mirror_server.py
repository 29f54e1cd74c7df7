"""`minitui chat --web --mirror`: all tabs show the same application, for example in a classroom.

Only the presenter's tab can type. The addresses of viewers and presenter contain different tokens, which
minitui/web/site.py checks. minitui/web/mirror.py passes output from the application to the tabs.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

from engine.errors import EngineError
from minitui.web.mirror import Application, Viewer
from minitui.web.site import Site, messages, stopped

SIZE = (120, 36)  # columns, rows; the same for all viewers
LEGIBLE = "abcdefghjkmnpqrstuvwxyz23456789"  # easy to read: viewers may copy their address from a blackboard
VIEWERS_TOKEN = 10  # characters; trying all tokens takes 2,600 years at 10,000 guesses a second

# The script sets the largest font with which all columns and rows fit in the window. If a resize changes this font
# size, the page is loaded again.
FITTING = """
<script>
  const fitting = () => String(Math.max(4, Math.floor(
    Math.min(innerWidth / (COLUMNS * 0.605), (innerHeight - ROWS) / (ROWS * 1.32)))));
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("terminal").dataset.fontSize = fitting();
  });
  addEventListener("resize", () => {
    if (fitting() !== document.getElementById("terminal").dataset.fontSize) location.reload();
  });
</script>
""".replace("COLUMNS", str(SIZE[0])).replace("ROWS", str(SIZE[1]))


class MirrorSite(Site):
    """The page and sockets of a mirrored application. All sockets show the application. Only a presenter can type."""

    head = FITTING

    def __init__(self, application: Application, host: str, viewers: str, presenter: str) -> None:
        """`viewers`, `presenter`: the tokens of viewers and presenter."""
        super().__init__(host, {viewers: False, presenter: True})
        self.application = application

    async def attend(self, websocket: web.WebSocketResponse, request: web.Request, may_type: bool) -> None:
        showing = asyncio.create_task(self._show(websocket, Viewer(websocket.send_bytes, may_type)))
        try:
            async for kind, rest in messages(websocket):  # other messages of viewers are ignored; the size is fixed
                if may_type and kind == "stdin" and rest and isinstance(rest[0], str):
                    self.application.type(rest[0])
                elif may_type and kind in ("focus", "blur"):
                    self.application.send(type=kind)
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    async def _show(self, websocket: web.WebSocketResponse, viewer: Viewer) -> None:
        with contextlib.suppress(ConnectionError):
            await self.application.mirror.show(viewer)
        await websocket.close()


async def serve_mirror(
    host: str, listening: socket.socket, command: list[str], on_ready: Callable[[str, str], None]
) -> int:
    """Serve until the application ends or a signal arrives; returns the exit code.

    `on_ready` is called with the tokens of viewers and presenter.
    """
    stop = stopped()
    application = Application(command, SIZE)
    viewers = "".join(secrets.choice(LEGIBLE) for _ in range(VIEWERS_TOKEN))
    presenter = secrets.token_urlsafe(24)
    running: list[asyncio.Task[Any]] = []
    try:
        await application.start()
        running = [asyncio.create_task(application.run()), asyncio.create_task(stop.wait())]
        async with MirrorSite(application, host, viewers, presenter).serving(listening):
            on_ready(viewers, presenter)
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return 0
    except EngineError as error:
        raise EngineError(f"the application did not start: {error}") from error
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await application.stop()


def run_mirror(host: str, listening: socket.socket, command: list[str]) -> int:
    """Serve the mirrored application that `command` starts; returns the exit code. Raises EngineError."""
    from minitui.server.command import address

    port = listening.getsockname()[1]
    presenter_address = address("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)

    def ready(viewers: str, presenter: str) -> None:
        print(
            f"viewers watch at {address(host, port)}/?token={viewers}\n"
            f"you type at {presenter_address}/?token={presenter}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    return asyncio.run(serve_mirror(host, listening, command, ready))
