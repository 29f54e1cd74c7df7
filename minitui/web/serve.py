"""`minitui chat --web`: the application in a browser. Every tab is an application of its own, all on one engine.

Each tab's application is `minitui chat --connect`, started by minitui/web/tabs.py. It may do whatever the user may, so
that --web listens on the loopback only. With `--mirror` there is one application, which every tab watches
(minitui/web/mirror_server.py).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError, not_installed


@dataclass(frozen=True)
class WebSettings:
    """`connect`: servers elsewhere, none for an engine of our own. `options`: what applications are started with."""

    host: str = "127.0.0.1"
    port: int = 8001
    connect: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    mirror: bool = False


def run_web(settings: WebSettings, config: Any, label: str, log_file: Path) -> int:
    """Serve the application until it is told to stop; returns the exit code. Raises EngineError."""
    try:
        from minitui.web.mirror_server import run_mirror
        from minitui.web.tabs import serve_tabs
    except ImportError as error:
        raise EngineError(not_installed("the application in a browser", error, "web,serve")) from error
    from minitui.protocol import is_loopback
    from minitui.server.command import address, listen

    host, port = settings.host, settings.port
    if not settings.mirror and not is_loopback(host):
        raise EngineError(
            f"--web-host {host} would let everybody on the network who sees the address use this engine, its chats and "
            "its files: only with --mirror, where others can do no more than watch"
        )
    listening = listen(host, port)  # a port in use is said now, as a sentence
    engine = None if settings.connect else OwnServer(config, label, log_file)
    print("starting: the address follows when it answers", file=sys.stderr, flush=True)
    try:
        urls = settings.connect or ((engine.start(),) if engine else ())
        command = [sys.executable, "-m", "minitui", "chat", "--connect", ",".join(urls), *settings.options]
        if settings.mirror:
            return run_mirror(host, listening, command)

        def ready(token: str) -> None:
            url = address(host, listening.getsockname()[1])
            print(f"minitui is at {url}/?token={token}", file=sys.stderr, flush=True)

        return asyncio.run(serve_tabs(host, listening, command, ready))
    finally:
        listening.close()
        if engine is not None:
            engine.stop()


class OwnServer:
    """`minitui serve` in a thread, on a free port of the loopback. Its key, which other users of this machine do not
    know, is in MINITUI_KEY for the applications that are started."""

    def __init__(self, config: Any, label: str, log_file: Path) -> None:
        self._config, self._label, self._log_file = config, label, log_file
        self._host: Any = None
        self._error: EngineError | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> str:
        """Its address, once the model is loaded. Raises EngineError if it cannot be."""
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            raise self._error
        return str(self._host.url)

    def stop(self) -> None:
        """End it and its engine."""
        if self._host is not None:
            self._host.stop()
            self._thread.join()

    def _run(self) -> None:
        from minitui.server.command import Host
        from minitui.server.settings import Role, ServerSettings

        async def main() -> None:
            key = os.environ["MINITUI_KEY"] = secrets.token_urlsafe(24)
            settings = ServerSettings(
                port=0, keys={key: Role.CONTROL}, served_name=self._label, drain_s=0.5
            )  # fmt: skip
            self._host = Host(self._config, settings, self._log_file)
            await self._host.run(self._up.set)

        try:
            asyncio.run(main())
        except EngineError as error:
            self._error = error
        finally:
            self._up.set()
