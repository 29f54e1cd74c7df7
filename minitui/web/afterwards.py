"""The link of a class after the class: the scenes with their steps and answers, and the recordings. Nobody can type."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from minitui.web.mirror_server import reachable
from minitui.web.pages import filled
from minitui.web.settings import WebSettings
from minitui.web.site import Site, check_link, stopped


class Afterwards(Site):
    """Serves /LINK and the recordings /LINK/0, /LINK/1 and so on."""

    def __init__(self, settings: WebSettings, title: str, scenes: list[dict[str, Any]], files: list[Path]) -> None:
        """`scenes`: of the file of a class, with the sentences of their steps as "told". `files`: the recordings."""
        super().__init__(settings.host, {}, settings.names)
        self.link, self._files = f"{settings.link}-{settings.token}", files
        names = [file.name for file in files]
        self._html = filled("afterwards.html", title=title, scenes=scenes, files=names, link=f"/{self.link}")
        self.app.add_routes([web.get("/{link}", self._scenes), web.get("/{link}/{file:[0-9]{1,4}}", self._file)])

    async def _scenes(self, request: web.Request) -> web.Response:
        check_link(request, self.link)
        return web.Response(text=self._html, content_type="text/html")

    async def _file(self, request: web.Request) -> web.FileResponse:
        check_link(request, self.link)
        number = int(request.match_info["file"])
        if number >= len(self._files) or not self._files[number].is_file():
            raise web.HTTPNotFound(text="there is no such recording")
        file = self._files[number]
        name = "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in file.name)
        return web.FileResponse(file, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def run_afterwards(
    settings: WebSettings, listening: socket.socket, title: str, scenes: list[dict[str, Any]], files: list[Path]
) -> int:
    """Serve until a signal arrives; returns the exit code."""

    async def serve() -> None:
        stop = stopped()
        site = Afterwards(settings, title, scenes, files)
        async with site.serving(listening):
            url = reachable(settings, listening.getsockname()[1])
            print(f"the class is at {url}/{site.link}", file=sys.stderr, flush=True)
            await stop.wait()

    asyncio.run(serve())
    return 0
