"""`minitui serve`: listen, load, serve, and go in time when told to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from engine.config import EngineConfig
from engine.errors import EngineError, not_installed
from minitui.server.settings import Role, ServerSettings

try:
    import uvicorn

    from minitui.server.application import create_app
    from minitui.server.connection import MAX_HEAD, Connection
    from minitui.server.service import Service
except ImportError as error:
    raise EngineError(not_installed("minitui serve", error, "serve")) from error

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BACKLOG = 512
EXAMPLE = '{"messages": [{"role": "user", "content": "What is a KV cache?"}]}'
VANISHED_S = 20  # nothing that was sent to a caller is acknowledged for so long
LAST_WORDS_S = 1  # for connections to end once the engine is gone


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own: the order of going is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Host:
    """One server from its socket to its end."""

    def __init__(self, config: EngineConfig, settings: ServerSettings, log_file: Path | None = None) -> None:
        """Binds the address. Raises EngineError when that is impossible."""
        self.settings = settings
        self.service = Service(config, settings, log_file)
        self._socket = listen(settings.host, settings.port)
        self.port: int = self._socket.getsockname()[1]
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        return address(self.settings.host, self.port)

    def stop(self) -> None:
        """Begin to go; may be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until stopped. Raises EngineError if the model cannot be loaded."""
        self._loop = asyncio.get_running_loop()
        server = _Uvicorn(
            uvicorn.Config(
                create_app(self.service), lifespan="off", ws="none", log_config=None, access_log=False,
                http=cast(Any, functools.partial(Connection, self.service)), h11_max_incomplete_event_size=MAX_HEAD,
                server_header=False, timeout_keep_alive=30, timeout_graceful_shutdown=LAST_WORDS_S, backlog=BACKLOG,
            )
        )  # fmt: skip
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        loading = asyncio.create_task(self.service.start())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and not stopping.done():
                loading.result()
                on_ready()
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    await self.service.drain()
        finally:
            server.should_exit = True
            stopping.cancel()
            await self.service.close()
            await asyncio.gather(serving, loading, return_exceptions=True)
            self._socket.close()


def address(host: str, port: int) -> str:
    """What others type to reach a server that listens there."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises EngineError with the way out."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise EngineError(f"--host {host!r} is no address of this machine: {error.strerror or error}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_lost_networks(bound)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        way_out = "choose another with --port" if error.errno in (98, 48) else "choose another with --host or --port"
        raise EngineError(f"cannot listen on {host}:{port}: {error.strerror or error}; {way_out}") from error
    return bound


def _notice_lost_networks(listening: socket.socket) -> None:
    """Who vanished without a word, with his network, is gone after VANISHED_S and not after a quarter of an hour; what
    he held (blocks, the gate) is free then. The connections that are accepted inherit this."""
    options = {"SO_KEEPALIVE": (socket.SOL_SOCKET, 1), "TCP_KEEPIDLE": (socket.IPPROTO_TCP, VANISHED_S // 2),
               "TCP_KEEPINTVL": (socket.IPPROTO_TCP, VANISHED_S // 4), "TCP_KEEPCNT": (socket.IPPROTO_TCP, 2),
               "TCP_USER_TIMEOUT": (socket.IPPROTO_TCP, VANISHED_S * 1000)}  # fmt: skip
    for name, (level, value) in options.items():
        if hasattr(socket, name):  # not every system has all of them
            listening.setsockopt(level, getattr(socket, name), value)


def gather_keys(api: list[str], chat: list[str], watch: list[str]) -> dict[str, Role]:
    """Keys from options, else from the environment, where the list of processes does not show them."""
    keys: dict[str, Role] = {}
    given = ((watch, Role.WATCH, "WATCH"), (chat, Role.CHAT, "CHAT"), (api, Role.CONTROL, "API"))
    for options, role, name in given:
        for key in options or os.environ.get(f"MINITUI_{name}_KEY", "").split():
            keys[key] = role
    return keys


def run_serve(config: EngineConfig, settings: ServerSettings, log_file: Path | None, tell: Any = sys.stderr) -> int:
    """`minitui serve`; returns the exit code. Raises EngineError for whatever prevents it from serving."""
    import logging

    sys.setswitchinterval(0.001)  # a thread that encodes a long prompt lets the event loop go on this soon
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # strangers could fill the log with warnings

    async def main() -> int:
        host = Host(config, settings, log_file)
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, host.stop)

        def ready() -> None:
            header, key = (" -H 'Authorization: Bearer KEY'", "MINITUI_KEY=KEY ") if settings.keys else ("", "")
            print(f"{host.service.model} is served at {url}", file=tell, flush=True)
            print(f"  curl {url}/v1/chat/completions{header} -d '{EXAMPLE}'", file=tell, flush=True)
            print(f"  {key}minitui chat --connect {url}", file=tell, flush=True)

        url = address(settings.host, host.port)
        print(f"loading; {url}/ready tells when it is done", file=tell, flush=True)
        await host.run(ready)
        recording = host.service.recording
        if recording is not None and recording.error:
            print(f"minitui: the recording is not complete: {recording.error}", file=tell)
            return 1
        return 0

    return asyncio.run(main())
