"""`--web`: the application in a browser. Each tab has its own application; all tabs of `minitui chat` use one engine.

A tab's application is a process of the same command without --web (minitui/web/tabs.py). This process has all rights of
the user, so --web listens on the loopback address only. With --mirror, all tabs watch one application
(minitui/web/mirror_server.py).
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

from engine.errors import EngineError, not_installed
from minitui.web.settings import WebSettings


def run_web(settings: WebSettings, engine: OwnServer | None = None) -> int:
    """Serve the application until a signal arrives; returns the exit code. `engine`: the server that all applications
    use. Raises EngineError."""
    try:
        from minitui.web.mirror_server import serve_mirror
        from minitui.web.tabs import serve_tabs
    except ImportError as error:
        raise EngineError(not_installed("the application in a browser", error, "web,serve")) from error
    from minitui.protocol import is_loopback
    from minitui.server.command import listen

    host, port = settings.host, settings.port
    if not settings.mirror and not is_loopback(host):
        raise EngineError(
            f"--web-host {host} would give others on the network access to this engine, the chats and your files: "
            "add --mirror, with which others can only watch"
        )
    listening = listen(host, port)  # reports a port in use before the engine starts
    print("starting; the address will be printed here", file=sys.stderr, flush=True)
    try:
        command = [sys.executable, "-m", "minitui", *settings.words]
        if engine is not None:
            command += ["--connect", engine.start()]
        serve = serve_mirror if settings.mirror else serve_tabs
        return asyncio.run(serve(settings, listening, command))
    finally:
        listening.close()
        if engine is not None:
            engine.stop()


class OwnServer:
    """Runs `minitui serve` in a thread, on a free port of the loopback address. The server requires this key, so other
    users of this machine have no access."""

    def __init__(self, config: Any, label: str, log_file: Path, key: str) -> None:
        self._config, self._label, self._log_file, self._key = config, label, log_file, key
        self._host: Any = None
        self._error: EngineError | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> str:
        """Start the server; returns its address when the model is loaded. Raises EngineError."""
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            raise self._error
        return str(self._host.url)

    def stop(self) -> None:
        """End the server and its engine."""
        if self._host is not None:
            self._host.stop()
            self._thread.join()

    def _run(self) -> None:
        from minitui.server.command import Host
        from minitui.server.settings import Role, ServerSettings

        async def main() -> None:
            keys = {self._key: Role.CONTROL}
            settings = ServerSettings(port=0, keys=keys, served_names=(self._label,), drain_s=0.5)
            self._host = Host(self._config, settings, self._log_file)
            await self._host.run(self._up.set)

        try:
            asyncio.run(main())
        except EngineError as error:
            self._error = error
        finally:
            self._up.set()
