"""The proxy passes bytes on unchanged, and its log has prompts and what the server said, but no keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import EngineError
from minitui.prefix import proxy as proxy_module
from minitui.prefix.diagnose import diagnose
from minitui.prefix.log import Answer, Log, LogFile
from minitui.prefix.proxy import Proxy
from minitui.prefix.session import read_log

KEY = "sk-very-secret"
STREAM = (
    b'data: {"choices": [{"delta": {"content": "caf\xc3"}}]}\n\n',
    b'\xa9"}}]}\n\ndata: {"choices": [], "usage": {"prompt_tokens": 400, ',
    b'"prompt_tokens_details": {"cached_tokens": 384}}}',
    b"\n\ndata: [DONE]\n\n",
)
CHUNKED = b"".join(b"%x;odd=1\r\n%s\r\n" % (len(part), part) for part in STREAM) + b"0\r\nX-Trailer: t\r\n\r\n"
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nX-Data-Parallel-Rank: 3\r\n"
    b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nConnection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n\r\n"
)


def whole(body: bytes, status: int = 200, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status} Yes\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Upstream:
    """A server that answers each request with these bytes, piece by piece, and notes what it got. None: it waits."""

    def __init__(self, *pieces: bytes | None, closes: bool = False) -> None:
        self.pieces = pieces or (HEAD + CHUNKED[:100], CHUNKED[100:])
        self.closes = closes
        self.got: list[tuple[bytes, dict[str, str], bytes]] = []
        self.connections = 0
        self.left = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *lines = head.decode("latin-1").strip().split("\r\n")
                headers = {k.lower(): v for k, v in (each.split(": ", 1) for each in lines)}
                if headers.get("expect"):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if "transfer-encoding" in headers:
                    body = await reader.readuntil(b"0\r\n\r\n")
                self.got.append((line.encode(), headers, body))
                for piece in self.pieces:
                    if piece is None:
                        await reader.read()
                        raise ConnectionResetError
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.closes:
                    break
        self.left.set()
        writer.close()


class Through(httpx.AsyncClient):
    """A client of a proxy in front of an upstream."""

    port: int

    async def raw(self, data: bytes) -> bytes:
        """Returns all that comes after these bytes were sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        answer = await reader.read()
        writer.close()
        return answer


@contextlib.asynccontextmanager
async def through(upstream: Upstream | None, path: Path, hide: bool = False) -> AsyncIterator[Through]:
    server = await asyncio.start_server(upstream or Upstream(), "127.0.0.1", 0)
    log = LogFile(path, hide)
    passing = Proxy(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base", log)
    if upstream is None:
        server.close()
    front = await asyncio.start_server(passing.serve, "127.0.0.1", 0, limit=proxy_module.CHUNK)
    port = front.sockets[0].getsockname()[1]
    async with Through(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        client.port = port
        yield client
    front.close()
    server.close()
    passing.close()
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
    log.close()


def asked(system: str = "Be brief.") -> dict[str, Any]:
    return {"model": "m", "cache_salt": "tenant secret", "messages": [
        {"role": "system", "content": system}, {"role": "user", "content": "What is a block?"}]}


CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n%s\r\n{}"


async def test_bytes_pass_unchanged_and_keys_are_not_stored(tmp_path):
    upstream = Upstream(*(bytes([byte]) for byte in HEAD + CHUNKED))
    headers = {
        "Authorization": f"Bearer {KEY}", "X-Api-Key": KEY, "Accept-Encoding": "gzip", "Connection": "x-mine",
        "X-Mine": "1", "Proxy-Authorization": KEY,
    }
    async with through(upstream, tmp_path / "log") as client:
        answer = await client.post("/v1/chat/completions?trace=1", json=asked(), headers=headers)
        raw = await client.raw(CHAT % b"Connection: close\r\n")
    assert answer.content == b"".join(STREAM)
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert not {"x-hop", "keep-alive"} & set(answer.headers)
    assert raw.partition(b"\r\n\r\n")[2] == CHUNKED and b"\r\nSet-Cookie: a=1\r\n" in raw
    line, got, body = upstream.got[0]
    assert line == b"POST /base/v1/chat/completions?trace=1 HTTP/1.1" and json.loads(body) == asked()
    assert got["authorization"] == f"Bearer {KEY}" and got["accept-encoding"] == "identity"
    assert not {"x-mine", "proxy-authorization", "connection"} & set(got)
    text = (tmp_path / "log").read_text()
    assert KEY not in text and "tenant secret" not in text and "What is a block?" in text
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    turn = read_log(tmp_path / "log")[0]
    assert (turn.prompt, turn.cached, turn.replica, turn.adapter, turn.salt) == (400, 384, "3", "m", "salt 1")


async def test_hidden_texts_are_not_in_the_log_and_still_compared(tmp_path):
    async with through(Upstream(), tmp_path / "log", hide=True) as client:
        for system in ("word " * 100, "word " * 100, "word " * 50 + "other " * 50):
            await client.post("/v1/chat/completions", json=asked(system))
    text = (tmp_path / "log").read_text()
    assert "word" not in text and "What" not in text
    hashes = json.loads(text.splitlines()[1])["parts"][0]["hashes"]
    assert len(set(hashes)) == len(hashes) == 16  # that words repeat does not show, either
    found = diagnose(read_log(tmp_path / "log"))
    assert [one.cause for one in found] == ["first", "none", "system prompt changed"]


@pytest.mark.parametrize(("path", "body", "usage", "expected"), [
    ("/v1/messages", {"system": "s", "messages": [{"role": "user", "content": "q"}]},
     {"usage": {"input_tokens": 20, "cache_read_input_tokens": 300, "cache_creation_input_tokens": 80}}, (400, 300)),
    ("/v1/responses", {"instructions": "s", "input": "q"},
     {"usage": {"input_tokens": 50, "input_tokens_details": {"cached_tokens": 0}}}, (50, 0)),
    ("/v1/completions", {"prompt": "q"}, {"usage": {"prompt_tokens": 7}}, (7, None)),
    ("/v1/completions", {"prompt": "q"}, {"usage": {"prompt_tokens": "many"}}, (None, None)),
])
async def test_what_servers_tell(path, body, usage, expected, tmp_path):
    async with through(Upstream(whole(json.dumps(usage).encode())), tmp_path / "log") as client:
        await client.post(path, json=body)
        await client.get("/v1/models")
    (turn,) = read_log(tmp_path / "log")
    assert (turn.prompt, turn.cached) == expected
    assert turn.parts


async def test_what_is_refused_and_what_is_not_noted(tmp_path):
    upstream = Upstream()
    async with through(upstream, tmp_path / "log") as client:
        assert (await client.get("/v1/models", headers={"Host": "evil.example"})).status_code == 403
        assert (await client.get("/v1/models", headers={"Origin": "http://localhost:8080"})).status_code == 403
        assert b" 400 " in await client.raw(b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 400 " in await client.raw(b"nonsense\r\n\r\n")
        assert b" 431 " in await client.raw(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 60_000)
        assert not upstream.got
        assert (await client.post("/v1/chat/completions", content=b"[" * 900)).content == b"".join(STREAM)
        upstream.pieces = (whole(b"{}", 500),)
        assert (await client.post("/v1/chat/completions", json=asked())).status_code == 500
    assert read_log(tmp_path / "log") == []


async def test_big_bodies_pass_and_the_largest_are_not_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(proxy_module, "MOST_BODY", 6 << 20)
    upstream = Upstream(whole(b'{"usage": {"prompt_tokens": 9}}' + b" " * (9 << 20)))
    bodies = [json.dumps(asked("word " * n)).encode() for n in (1 << 20, 2 << 20)]
    async with through(upstream, tmp_path / "log") as client:
        for body in bodies:
            answer = await client.post("/v1/chat/completions", content=body)
            assert len(answer.content) == (9 << 20) + 31
        head = CHAT.partition(b"\r\nContent-Length")[0] + b"\r\nTransfer-Encoding: chunked\r\n"
        await client.raw(head + b"Connection: close\r\n\r\n2;a\r\n{}\r\n0\r\n\r\n")
    assert [got[2] for got in upstream.got] == [*bodies, b"2;a\r\n{}\r\n0\r\n\r\n"]
    assert [(turn.number, turn.prompt) for turn in read_log(tmp_path / "log")] == [(1, 9), (3, 9)], "counted from 1"


async def test_connections_to_the_server_are_used_again(tmp_path):
    upstream = Upstream()
    async with through(upstream, tmp_path / "log") as client:
        for _ in range(3):
            assert (await client.raw(CHAT % b"Connection: close\r\n")).endswith(CHUNKED)
        assert upstream.connections == 1
        upstream.closes = True
        for _ in range(2):
            assert (await client.get("/v1/models")).status_code == 200
            await upstream.left.wait()
        assert upstream.connections == 2
        two = await client.raw(CHAT % b"" + CHAT % b"Connection: close\r\n")
        assert two.count(CHUNKED) == 2 and two.endswith(CHUNKED)


async def test_old_and_careful_clients(tmp_path):
    upstream = Upstream(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n", b"until the end", closes=True)
    async with through(upstream, tmp_path / "log") as client:
        answer = await client.raw(b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert answer.endswith(b"Connection: close\r\n\r\nuntil the end")
        assert upstream.got[-1][0].endswith(b"HTTP/1.0")
        assert (await client.get("/v1/models")).text == "until the end"
        upstream.pieces = (whole(b"{}"),)
        answer = await client.raw(CHAT % b"Expect: 100-continue\r\nConnection: close\r\n")
        assert answer.startswith(b"HTTP/1.1 100 ") and answer.endswith(b"\r\n\r\n{}")
        upstream.pieces = (b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n",)
        assert (await client.head("/v1/models")).headers["content-length"] == "7"


async def test_a_client_that_leaves_ends_its_request_at_the_server(tmp_path):
    upstream = Upstream(HEAD + CHUNKED[:100], None)
    async with through(upstream, tmp_path / "log") as client:
        async with client.stream("POST", "/v1/chat/completions", json=asked()) as answer:
            await anext(answer.aiter_raw())
        await asyncio.wait_for(upstream.left.wait(), 30)
    (turn,) = read_log(tmp_path / "log")  # its prompt may be in the cache
    assert turn.prompt is None and turn.first_ms is not None


@pytest.mark.parametrize(("pieces", "status"), [
    ((b"",), 502), ((b"SSH-2.0\r\n\r\n",), 502), ((b"HTTP/1.1 200 OK\r\nContent-",), 502),
    ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",), None), ((HEAD, CHUNKED[:-20]), None),
])
async def test_a_server_that_breaks_off(pieces, status, tmp_path):
    async with through(Upstream(*pieces, closes=True), tmp_path / "log") as client:
        if status:
            assert (await client.post("/v1/chat/completions", json=asked())).status_code == status
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/v1/chat/completions", json=asked())


async def test_a_server_that_is_not_there(tmp_path):
    async with through(None, tmp_path / "log") as client:
        answer = await client.post("/v1/chat/completions", json=asked())
    assert answer.status_code == 502 and "cannot be reached" in answer.text


def test_the_log_has_a_process_of_its_own(tmp_path):
    log = Log(tmp_path / "log", False)
    for number in range(3):
        log.write(number, 0.5, json.dumps(asked()).encode(), Answer(True, "a", 1.0))
    log.close()
    assert [turn.number for turn in read_log(tmp_path / "log")] == [0, 1, 2]
    with pytest.raises(EngineError, match="exists"):
        Log(tmp_path / "log", False)


def test_logs_from_elsewhere_are_checked(tmp_path):
    log = tmp_path / "log"
    for text, why in (
        ("{}", "not the first line"), ("x", "line 1"), ('{"format": "minitui-prefix-1"}\n{"number": 1}', "line 2"),
        ('{"format": "minitui-prefix-1"}\n{"number": 1, "at": 0, "parts": [], "cached": "all"}', "a number is wrong"),
        ('{"format": "minitui-prefix-1"}\n' + "[" * 100_000, "line 2"),
    ):
        log.write_text(text)
        with pytest.raises(EngineError, match=why):
            read_log(log)
