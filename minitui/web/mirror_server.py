"""`--web --mirror`: all tabs show the same application, for example in a classroom.

Only the presenter's tab can type, and its window sets the columns and rows. The addresses of viewers and presenter
contain different tokens, which minitui/web/site.py checks. minitui/web/mirror.py passes output from the application to
the tabs. Beside the mirror are a page for phones (minitui/web/phones.py) and the lecturer's page, with notes and
minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import sys
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from engine.errors import EngineError
from minitui.web.mirror import Application, Viewer
from minitui.web.pages import filled
from minitui.web.phones import Phones, check_origin, small_json
from minitui.web.settings import WebSettings
from minitui.web.site import Site, check_link, first_size, messages, stopped, terminal_size

SIZE = (120, 36)  # columns, rows, until a presenter's window sets them
PRESENTERS_FONT = 20  # pixels: a projector of 1920x1080 shows 158x40 cells; the browser's zoom changes them
VIEWERS_FONT = 10  # pixels, the smallest; on a phone the page is wider than the screen and can be moved


def reachable(settings: WebSettings, port: int) -> str:
    """Returns the address of this server for other machines: with the first name of --allowed-host, else with the
    address to which this machine's own traffic goes out; its host name is often unknown to phones."""
    from minitui.server.command import address

    host = settings.host
    if settings.names and not settings.names[0].startswith("*"):
        host = settings.names[0]
    elif host in ("0.0.0.0", "::"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outwards:
            outwards.connect(("192.0.2.1", 9))  # sends nothing
            host = outwards.getsockname()[0]
    return address(host, port)


class MirrorSite(Site):
    """The page and sockets of a mirrored application. All sockets show the application. Only a presenter can type."""

    def __init__(
        self, application: Application, host: str, viewers: str, presenter: str, names: Sequence[str] = (),
        link: str = "class",
    ) -> None:
        """`viewers`, `presenter`: the tokens of viewers and presenter. `names`: see Site. `link`: the phones have the
        address /LINK-VIEWERS."""
        super().__init__(host, {viewers: False, presenter: True}, names)
        self.application, self.link, self._viewers = application, f"{link}-{viewers}", viewers
        self.url = ""  # the address of this site for others
        self.phones = Phones(application.send)
        application.on_state = lambda: self.phones.published(application.state)
        self.app.add_routes(
            [
                web.get("/lecturer", self._lecturer), web.get("/lecturer/events", self._lecturer),
                web.post("/lecturer/act", self._act), web.get("/{link}", self._phone),
                web.get("/{link}/events", self._phone), web.post("/{link}/vote", self._phone),
            ]
        )
        self._sizes: dict[web.WebSocketResponse, tuple[int, int]] = {}  # of the presenter's windows

    def head(self, may_type: bool) -> str:
        if may_type:
            return filled("touch.html", largest=PRESENTERS_FONT)
        columns, rows = self.application.size
        return filled("viewer.html", columns=columns, rows=rows, smallest=VIEWERS_FONT)

    async def _phone(self, request: web.Request) -> web.StreamResponse:
        """The page of a phone, its stream and its votes."""
        check_link(request, self.link)
        if request.method == "POST":
            return await self.phones.vote(request)
        if request.path.endswith("/events"):
            return await self.phones.stream(request)
        text = filled("phone.html", screen=f"/?token={self._viewers}")
        response = web.Response(text=text, content_type="text/html")
        self.phones.welcome(request, response)
        return response

    async def _lecturer(self, request: web.Request) -> web.StreamResponse:
        """The lecturer's page and its stream."""
        if not self._may_type(request.query.get("token", "")):
            raise web.HTTPForbidden(text="this address is for viewers: the lecturer's has another token")
        if request.path.endswith("/events"):
            return await self.phones.lecturer(request)
        text = filled("lecturer.html", link=f"{self.url}/{self.link}")
        return web.Response(text=text, content_type="text/html")

    async def _act(self, request: web.Request) -> web.Response:
        """Pass a button of the lecturer's page on: {"verb": "next" or "scene", "number": of the scene, from 1}."""
        check_origin(request)
        if not self._may_type(request.query.get("token", "")):
            raise web.HTTPForbidden(text="only the lecturer may do this")
        match await small_json(request):
            case {"verb": "next" | "scene" as verb, "number": int(number)}:
                self.application.send(type="class", verb=verb, number=number)
                return web.Response(status=204)
        raise web.HTTPBadRequest(text='a button has a "verb" and a "number"')

    async def attend(self, websocket: web.WebSocketResponse, request: web.Request, may_type: bool) -> None:
        shown = self._show(websocket, Viewer(websocket.send_bytes, may_type)), self._tell(websocket, may_type)
        showing = [asyncio.create_task(work) for work in shown]
        if may_type:
            self._resize(websocket, first_size(request))
        try:
            async for kind, rest in messages(websocket):  # other messages of viewers are ignored
                match [kind, *rest]:
                    case ["stdin", str(text)] if may_type:
                        self.application.type(text)
                    case ["resize", {"width": width, "height": height}] if may_type:
                        self._resize(websocket, terminal_size([width, height]))
                    case ["focus" | "blur"] if may_type:
                        self.application.send(type=kind)
        finally:
            self._sizes.pop(websocket, None)
            self._fit()
            for task in showing:
                task.cancel()
            await asyncio.gather(*showing, return_exceptions=True)

    def _resize(self, websocket: web.WebSocketResponse, size: tuple[int, int] | None) -> None:
        if size is not None:
            self._sizes[websocket] = size
            self._fit()

    def _fit(self) -> None:
        """Give the picture the largest size that fits in all of the presenter's windows."""
        sizes = self._sizes.values() or [self.application.size]
        columns, rows = (min(numbers) for numbers in zip(*sizes, strict=True))
        if (columns, rows) != self.application.size:
            self.application.resize((columns, rows))

    async def _tell(self, websocket: web.WebSocketResponse, may_type: bool) -> None:
        """Send the page's title and keys, and a viewer the size of the picture: now and after each change."""
        told: set[str] = set()
        with contextlib.suppress(ConnectionError):
            while True:
                changed = self.application.changed
                size = "" if may_type else json.dumps(["size", *self.application.size])
                now = {size, self.application.page} - {""}
                for message in now - told:
                    await websocket.send_str(message)
                told = now
                await changed.wait()

    async def _show(self, websocket: web.WebSocketResponse, viewer: Viewer) -> None:
        with contextlib.suppress(ConnectionError):
            await self.application.mirror.show(viewer)
        await websocket.close()


async def serve_mirror(settings: WebSettings, listening: socket.socket, command: list[str]) -> int:
    """Serve the application that `command` starts, until it ends or a signal arrives; returns the exit code. Raises
    EngineError."""
    from minitui.server.command import address

    stop = stopped()
    application = Application(command, SIZE)
    viewers, presenter = settings.token, secrets.token_urlsafe(24)
    host, port = settings.host, listening.getsockname()[1]
    here = address("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)
    running: list[asyncio.Task[Any]] = []
    try:
        await application.start()
        running = [asyncio.create_task(application.run()), asyncio.create_task(stop.wait())]
        site = MirrorSite(application, host, viewers, presenter, settings.names, settings.link)
        site.url = reachable(settings, port)
        application.send(type="link", link=f"{site.url}/{site.link}")
        async with site.serving(listening):
            print(
                f"viewers watch at {site.url}/?token={viewers}\n"
                f"phones answer at {site.url}/{settings.link}-{viewers}\n"
                f"your notes are at {here}/lecturer?token={presenter}\n"
                f"you type at {here}/?token={presenter}",
                file=sys.stderr, flush=True,
            )
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await application.stop()
        if application.message:  # such as a recording that is not complete
            print(f"minitui: {application.message}", file=sys.stderr, flush=True)
        return application.returncode
    except EngineError as error:
        raise EngineError(f"the application did not start: {error}") from error
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await application.stop()
