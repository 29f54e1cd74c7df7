"""A whole server for tests: uvicorn and an engine process over the bundled model, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.config import EngineConfig
from engine.trace.state import State
from minitui.server.settings import ServerSettings
from minitui.tutor import model_dir
from tests.support.waiting import PATIENCE, wait_until

if TYPE_CHECKING:
    from minitui.server.command import Host


class Running:
    """A server that is up. `get`, `post`: HTTP; `snapshot`: what the engine itself says."""

    def __init__(self, host: Host, thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> None:
        self.host, self.thread, self.loop = host, thread, loop
        self.service = host.service
        self.url = host.url
        import httpx

        self.http = httpx.Client(base_url=self.url, timeout=90)

    def get(self, path: str, **options: Any) -> Any:
        return self.http.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.http.post(path, json=body, **options)

    def answer(self, path: str, body: Any, status: int = 200) -> Any:
        """POST; returns the JSON of an answer that must have this status."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def set(self, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        """Change settings until the end of the test."""
        patch.setattr(self.service, "settings", dataclasses.replace(self.service.settings, **settings))

    def call(self, work: Any) -> Any:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(90)

    def snapshot(self) -> dict[str, Any]:
        return self.call(self.service.client.snapshot())

    @contextlib.contextmanager
    def slowed(self, factor: int = 10) -> Iterator[None]:
        """Steps take longer, so a busy machine, too, sends an answer in several events."""
        self.call(self.service.client.control("pace", factor=factor))
        try:
            yield
        finally:
            self.call(self.service.client.control("pace", factor=1))

    def wait_idle(self) -> None:
        """Until no request holds anything, here and in the engine."""
        wait_until(lambda: self.service.open == 0, "a place in the queue was not given back")
        wait_until(lambda: not self.snapshot()["requests"], "the engine still works for somebody")

    def metric(self, name: str) -> float:
        """The sum of a metric's values, over its labels."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    def state(self) -> State:
        return State.from_snapshot(self.snapshot())


class Open:
    """A request on a socket of its own, which is held open."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def read_until(self, text: bytes) -> bytes:
        got = b""
        while text not in got:
            piece = self.socket.recv(65536)
            assert piece, f"the server ended the connection after {got!r}"
            got += piece
        return got

    def __enter__(self) -> Open:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@contextlib.contextmanager
def serving(directory: Path, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """A server on a free port of the loopback."""
    from minitui.server.command import Host

    options = {"model": str(model_dir()), "device": "cpu", "num_blocks": 512, "max_num_seqs": 8, "cpu_threads": 1}
    config = EngineConfig(**{**options, **(engine or {})})  # type: ignore[arg-type]
    settings = {"port": 0, "served_names": ("tutor",), "drain_s": 0.3, **settings}
    ready = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        box["host"] = host = Host(config, ServerSettings(**settings), directory / "engine.log")
        box["loop"] = asyncio.get_running_loop()
        await host.run(ready.set)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            box["error"] = error
        ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(2 * PATIENCE), "the server did not come up"
    if "error" in box:
        raise box["error"]
    running = Running(box["host"], thread, box["loop"])
    try:
        yield running
    finally:
        running.http.close()
        running.host.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not go"


@contextlib.contextmanager
def through_proxy(running: Running, log: Path) -> Iterator[str]:
    """Runs `minitui proxy` in front of a server, on the server's loop; gives the proxy's address."""
    from minitui.prefix.log import LogFile
    from minitui.prefix.proxy import CHUNK, Proxy

    written = LogFile(log, False)
    passing = Proxy(running.url, written)

    async def start() -> asyncio.Server:
        return await asyncio.start_server(passing.serve, "127.0.0.1", 0, limit=CHUNK)

    async def stop() -> None:
        front.close()
        passing.close()

    front = running.call(start())
    try:
        yield f"http://127.0.0.1:{front.sockets[0].getsockname()[1]}"
        wait_until(lambda: not passing.open, "an answer has not ended")
    finally:
        running.call(stop())
        written.close()
