"""Runs `minitui serve`: listens, loads the model, serves, and stops on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from engine.config import EngineConfig
from engine.errors import EngineError, not_installed
from minitui.progress import Phases
from minitui.server.settings import Role, ServerSettings

try:
    import uvicorn
    from starlette.types import ASGIApp

    from minitui.server.access import Turns
    from minitui.server.application import create_app
    from minitui.server.connection import MAX_HEAD, Connection
    from minitui.server.service import Service
except ImportError as error:
    raise EngineError(not_installed("minitui serve", error, "serve")) from error

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BACKLOG = 512  # connections that the system queues until they are accepted
EXAMPLE = '{"messages": [{"role": "user", "content": "What is a KV cache?"}]}'
DEAD_PEER_S = 20  # a peer that acknowledges nothing for this long is dropped
LAST_ANSWERS_S = 1  # time for connections to close after the engine has ended


class Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: its owner stops the engine and the connections in order."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # asyncio has set the number that it accepts in one turn, which it uses for both

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Host:
    """One server: its socket, its service, and its shutdown."""

    def __init__(
        self, config: EngineConfig, settings: ServerSettings, log_file: Path | None = None,
        service: Service | None = None, app: ASGIApp | None = None,
    ) -> None:
        """Listen on the address. Raises EngineError if this fails. `service`: None: a new engine. `app`: None: all
        endpoints."""
        self.settings = settings
        self.service = service or Service(config, settings, log_file)
        self._app = app or create_app(self.service)
        self._socket = listen(settings.host, settings.port)
        self.port: int = self._socket.getsockname()[1]
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        return address(self.settings.host, self.port)

    def stop(self) -> None:
        """Ask the server to stop. Any thread may call this."""
        if self._loop is None:
            self._stop.set()  # `run` ends when it begins
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has already ended
                self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until stopped. Raises EngineError if the model cannot be loaded."""
        self._loop = asyncio.get_running_loop()
        server = Uvicorn(
            uvicorn.Config(
                self._app, lifespan="off", ws="none", log_config=None, access_log=False,
                http=cast(Any, functools.partial(Connection, self.service)), h11_max_incomplete_event_size=MAX_HEAD,
                server_header=False, proxy_headers=False, timeout_keep_alive=30,
                timeout_graceful_shutdown=LAST_ANSWERS_S, backlog=Turns.AT_ONCE,
            )
        )
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
    """Returns the URL of a server that listens on this host and port."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 picks a free port. Raises EngineError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise EngineError(f"--host {host!r} is not an address of this machine: {error.strerror or error}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _detect_dead_peers(bound)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        in_use = error.errno in (98, 48)
        remedy = "choose another port with --port" if in_use else "choose another address with --host or --port"
        raise EngineError(f"cannot listen on {host}:{port}: {error.strerror or error}; {remedy}") from error
    return bound


def _detect_dead_peers(listening: socket.socket) -> None:
    """Drop dead peers after DEAD_PEER_S. This frees their blocks and opens a gate that they had closed. The system's
    default is about 15 minutes. Accepted connections inherit these options."""
    options = {"SO_KEEPALIVE": (socket.SOL_SOCKET, 1), "TCP_KEEPIDLE": (socket.IPPROTO_TCP, DEAD_PEER_S // 2),
               "TCP_KEEPINTVL": (socket.IPPROTO_TCP, DEAD_PEER_S // 4), "TCP_KEEPCNT": (socket.IPPROTO_TCP, 2),
               "TCP_USER_TIMEOUT": (socket.IPPROTO_TCP, DEAD_PEER_S * 1000)}
    for name, (level, value) in options.items():
        if hasattr(socket, name):  # not every system has all of them
            listening.setsockopt(level, getattr(socket, name), value)


def gather_keys(api: list[str], chat: list[str], watch: list[str]) -> dict[str, Role]:
    """Returns API key -> role. The keys of a role come from its option, or else from its environment variable. Process
    lists show options, but not environment variables."""
    keys: dict[str, Role] = {}
    given = ((watch, Role.WATCH, "WATCH"), (chat, Role.CHAT, "CHAT"), (api, Role.CONTROL, "API"))
    for options, role, name in given:
        for key in options or os.environ.get(f"MINITUI_{name}_KEY", "").split():
            keys[key] = role
    return keys


def run_serve(
    config: EngineConfig, settings: ServerSettings, log_file: Path | None, phases: Phases | None = None,
    out: Any = sys.stderr,
) -> int:
    """Run `minitui serve`; returns the exit code. `phases`: those so far; they are printed when the server is ready.
    Raises EngineError if it cannot serve."""
    import logging

    sys.setswitchinterval(0.001)  # a thread that encodes a long prompt yields to the event loop after 1 ms
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # warnings about invalid requests could fill the log

    async def main() -> int:
        host = Host(config, settings, log_file)
        if phases is not None:
            phases.begin("engine process: Python and imports, beside the server's")
            host.service.on_progress = phases
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, host.stop)

        def ready() -> None:
            # Full collections of the objects that stay took 100 ms each. With 256 streams, the 99th percentile of the
            # gaps between chunks was 135 ms with them and 46 without (Qwen3-8B on an H200).
            gc.freeze()
            gc.set_threshold(5_000, 100)  # a collection of 20,000 young objects, twice in a burst of 256, took 5 ms
            header, variable = (" -H 'Authorization: Bearer KEY'", "MINITUI_KEY=KEY ") if settings.keys else ("", "")
            if phases is not None:
                print(*phases.report(), sep="\n", file=out)
            for note in host.service.info.notes:
                print(note, file=out)
            print(f"{host.service.model} is served at {host.url}", file=out, flush=True)
            print(f"  curl {host.url}/v1/chat/completions{header} -d '{EXAMPLE}'", file=out, flush=True)
            print(f"  {variable}minitui chat --connect {host.url}", file=out, flush=True)

        print(f"loading the model; {host.url}/ready answers 200 when it is loaded", file=out, flush=True)
        await host.run(ready)
        recording = host.service.recording
        if recording is not None and recording.error:
            print(f"minitui: the recording is not complete: {recording.error}", file=out)
            return 1
        return 0

    return asyncio.run(main())
