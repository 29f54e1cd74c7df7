"""A server with OpenAI's endpoints in the test's own event loop: it says what it is told to, and dies when told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any, Self

from minitui.tutor import model_dir


class FakeServer:
    """`page`: what /metrics says, None for 404. `status`: of a chat's answer. `dies_after`: pieces, then it is gone."""

    def __init__(self, models: tuple[str, ...] = ("m",), page: str | None = None, port: int = 0) -> None:
        self.models, self.page, self.port = models, page, port
        self.status = 200
        self.refusal: Any = None  # the body of an answer with another status; None: OpenAI's form
        self.models_status = 200
        self.owner = "someone"  # of the models in the list: the kind of server
        self.pieces = ("one ", "two ", "three")
        self.hold: asyncio.Event | None = None  # an answer waits here before its last piece
        self.dies_after: int | None = None
        self.silent = asyncio.Event()  # while set, nothing is answered, and connections are taken all the same
        self.asked: list[dict[str, Any]] = []
        self.visits: Counter[str] = Counter()  # by path
        self.heads: list[dict[str, str]] = []  # the fields of each request, in lower case
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def kill(self) -> None:
        """As if its process had been killed: every connection is gone at once."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split()[1]
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                self.heads.append(fields)
                length = int(fields.get("content-length", 0))
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self._answer(path, body, writer)
        self._open.discard(writer)
        writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.visits[path] += 1
        while self.silent.is_set():
            await asyncio.sleep(0.02)
        if path == "/v1/chat/completions":
            self.asked.append(body)
            if self.status == 200:
                await self._stream(writer)
            else:
                refusal = self.refusal or {"error": {"message": f"status {self.status}"}}
                self._reply(writer, self.status, json.dumps(refusal))
        elif path == "/v1/models":
            listed = [{"id": name, "owned_by": self.owner} for name in self.models]
            self._reply(writer, self.models_status, json.dumps({"data": listed}))
        elif path == "/metrics" and self.page is not None:
            self._reply(writer, 200, self.page)
        else:
            self._reply(writer, 404, "{}")
        await writer.drain()

    def _reply(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        data = text.encode()
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        def send(text: str) -> None:
            data = f"data: {text}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, piece in enumerate((*self.pieces, None)):
            if number == self.dies_after:
                await writer.drain()
                await asyncio.sleep(0.02)
                await self.kill()
                raise ConnectionError
            if self.hold is not None and number == len(self.pieces) - 1:
                await self.hold.wait()
            choice = {"delta": {} if piece is None else {"content": piece}, "finish_reason": None if piece else "stop"}
            send(json.dumps({"choices": [choice]}))
        send("[DONE]")
        writer.write(b"0\r\n\r\n")


class FakeSglang(FakeServer):
    """SGLang's server. `info`: the path under which it tells where it loaded its tokenizer. `told`: what it says about
    its KV events."""

    info = "/model_info"
    told: Any = None

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            self._reply(writer, 200, json.dumps({"data": [{"id": "m", "owned_by": "sglang", "root": "m"}]}))
        elif path == self.info:
            self._reply(writer, 200, json.dumps({"model_path": "x", "tokenizer_path": str(model_dir())}))
        elif path == "/server_info":
            self._reply(writer, 200, json.dumps({"version": "0.5.23", "kv_events": self.told}))
        else:
            await super()._answer(path, body, writer)
