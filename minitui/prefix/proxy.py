"""A proxy in front of an OpenAI- or Anthropic-like server, which notes the prompts of its requests in a log.

Bytes of bodies pass in both directions as they come, framing included, and are read only after they were passed on.
Headers about one connection are the proxy's own; all others pass, keys too, which are never stored. A connection to the
server serves one request after the other, of any client. Of an answer, only the first and last bytes are kept, to read
what the server says about its cache.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import suppress
from urllib.parse import urlsplit

import h11

from minitui.prefix.log import Answer, Log, LogFile
from minitui.protocol import is_loopback

MOST_BODY = 64 << 20  # bytes of a request in the log; a larger one passes and is not noted
MOST_HEAD = 256 << 10  # bytes of all headers
CHUNK = 256 << 10  # bytes read at once
CONNECT_S = 10.0
REUSED_S = 4.0  # an idle connection is used again within this time: servers close theirs after 5 s, or later
MOST_IDLE = 64  # connections
PROMPTS = (b"/chat/completions", b"/completions", b"/responses", b"/messages")  # ends of paths with prompts
# Headers about one connection. Compressed answers could not be read.
HOP = frozenset(b"connection keep-alive proxy-connection te upgrade proxy-authenticate proxy-authorization".split())
OWN = HOP | {b"host", b"accept-encoding"}  # of a request
REPLICA = (b"x-data-parallel-rank", b"x-served-by", b"x-replica")  # headers in which an answer names its replica

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Headers = list[tuple[bytes, bytes]]


class Proxy:
    """`serve` is called for each connection of a client, as by asyncio.start_server."""

    def __init__(self, to: str, log: Log | LogFile) -> None:
        url = urlsplit(to)
        self._to, self._base, self._tls = to, url.path.rstrip("/").encode(), url.scheme == "https"
        self._host, self._port = url.hostname or "", url.port or (443 if self._tls else 80)
        self._netloc = url.netloc.rpartition("@")[2].encode("idna" if not url.netloc.isascii() else "ascii")
        self._log, self._began, self._requests = log, time.monotonic(), 0
        self._context: ssl.SSLContext | None = None
        self._closed = False
        self.open = 0  # requests whose answers have not ended
        self._idle: list[tuple[float, Pipe]] = []  # the one used last at the end

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass the requests of a client on, until one of both sides ends its connection."""
        data: bytes | None = b""
        try:
            while data is not None:
                data = await self._exchange((reader, writer), data)
        except h11.RemoteProtocolError as error:
            writer.write(_plain(error.error_status_hint, f"this is not HTTP: {error}"))
        except (OSError, asyncio.CancelledError):
            pass  # the client is gone, or the proxy ends: asyncio would print the error of this task
        finally:
            with suppress(OSError):
                writer.close()
                await writer.wait_closed()

    def close(self) -> None:
        """Close the idle connections to the server; the others follow after their answers."""
        self._closed = True
        for _, (_, writer) in self._idle:
            writer.close()

    async def _exchange(self, client: Pipe, data: bytes) -> bytes | None:
        """Pass one request and its answer; `data`: bytes of it that were read before. Returns bytes of the next request
        that were read with it; None: the client's connection ends."""
        parser = h11.Connection(h11.SERVER, MOST_HEAD)
        request = await _next_head(parser, client[0], data)
        if not isinstance(request, h11.Request):
            return None
        noted = _Noted(request, self._requests + 1, time.monotonic())
        if refusal := _refusal(request):
            client[1].write(refusal)
            return None
        self._requests += 1
        self.open += 1
        try:
            return await self._pass(client, parser, request, noted)
        finally:
            self.open -= 1

    async def _pass(self, client: Pipe, parser: h11.Connection, request: h11.Request, noted: _Noted) -> bytes | None:
        try:
            server = await self._connect()
        except (OSError, TimeoutError) as error:
            client[1].write(_plain(502, f"{self._to} cannot be reached: {type(error).__name__}"))
            return None
        headers = [(b"Host", self._netloc), *_passed(request, OWN), (b"Accept-Encoding", b"identity")]
        line = b"%s %s%s HTTP/%s\r\n" % (request.method, self._base, request.target, request.http_version)
        body = _Body(parser)
        sending = asyncio.create_task(_send(line + _lines(headers), client[0], server[1], body, noted))
        answering = asyncio.create_task(_answer(server[0], client[1], noted))
        keep = False
        try:
            await asyncio.wait((sending, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                if isinstance(sending.exception(), h11.RemoteProtocolError) or sending.result() is None:
                    return None  # the client is gone, or does not speak HTTP
                await asyncio.wait((answering,))
            broken = answering.exception()
            if broken is not None and noted.status is None:
                client[1].write(_plain(502, f"{self._to} did not answer in HTTP: {broken or type(broken).__name__}"))
            keep = broken is None and body.ended and answering.result()
            if broken is not None or not body.ended or noted.closes:
                return None
            return sending.result() if sending.done() else b""
        finally:
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)
            self._release(server, keep)
            if noted.prompt and noted.answer is not None:
                at = round(noted.began - self._began, 3)
                self._log.write(noted.number, at, bytes(noted.body), noted.answer)

    async def _connect(self) -> Pipe:
        """Returns a connection to the server: one that is idle, or a new one. Raises OSError or TimeoutError."""
        while self._idle:
            since, (reader, writer) = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing() and time.monotonic() - since < REUSED_S:
                return reader, writer
            writer.close()
        if self._tls and self._context is None:
            self._context = ssl.create_default_context()
        opening = asyncio.open_connection(self._host, self._port, ssl=self._context, limit=CHUNK)
        return await asyncio.wait_for(opening, CONNECT_S)

    def _release(self, server: Pipe, keep: bool) -> None:
        if keep and not self._closed and len(self._idle) < MOST_IDLE:
            self._idle.append((time.monotonic(), server))
        else:
            server[1].close()


class _Noted:
    """What is kept of a request and its answer. `prompt`: the request has one. `status`: of the answer; None: it has
    not begun. `closes`: the client's connection ends with the answer."""

    def __init__(self, request: h11.Request, number: int, began: float) -> None:
        self.request, self.number, self.began = request, number, began
        self.prompt = request.method == b"POST" and request.target.partition(b"?")[0].endswith(PROMPTS)
        self.closes = request.http_version != b"1.1" or b"close" in _connection(request)
        self.body = bytearray()
        self.status: int | None = None
        self.answer: Answer | None = None

    def add(self, data: bytes) -> None:
        """Note the next bytes of the request."""
        self.prompt &= len(self.body) + len(data) <= MOST_BODY
        if self.prompt:
            self.body += data


class _Body:
    """The data of a body, which h11 reads beside its bytes. `begin`: bytes that were read with the head. `ended`: its
    end was read; `rest`: what was read after it."""

    def __init__(self, parser: h11.Connection) -> None:
        """`parser`: has just read the head."""
        self._parser, self.begin = parser, parser.trailing_data[0]
        self.ended, self.rest = False, b""

    def add(self, data: bytes) -> list[bytes]:
        """Returns the body's data in the next bytes; none of these: the end. Raises h11.RemoteProtocolError."""
        self._parser.receive_data(data)
        return self.read()

    def read(self) -> list[bytes]:
        """Returns the body's data in the bytes so far. Raises h11.RemoteProtocolError."""
        found = []
        while isinstance(event := self._parser.next_event(), h11.Data):
            found.append(event.data)
        self.ended = isinstance(event, h11.EndOfMessage)
        self.rest = self._parser.trailing_data[0] if self.ended else b""
        return found


async def _next_head(parser: h11.Connection, reader: asyncio.StreamReader, data: bytes = b"") -> object:
    """Returns the next request or response. Raises h11.RemoteProtocolError."""
    if data:
        parser.receive_data(data)
    while (event := parser.next_event()) is h11.NEED_DATA:
        parser.receive_data(await reader.read(CHUNK))
    return event


async def _send(
    head: bytes, reader: asyncio.StreamReader, server: asyncio.StreamWriter, body: _Body, noted: _Noted
) -> bytes | None:
    """Pass a request to the server, and wait for what the client sends after it. Returns that; None: the client is
    gone. Raises h11.RemoteProtocolError."""
    data, parts = body.begin, body.read()
    while True:
        for part in parts:
            noted.add(part)
        with suppress(OSError):  # a server that takes no more of the body says why in its answer
            server.write(head + data[: len(data) - len(body.rest)])
            await server.drain()
        if body.rest:
            return body.rest
        head, ended = b"", body.ended
        try:
            data = await reader.read(CHUNK)
        except OSError:
            return None
        if not data or ended:
            return data or None
        parts = body.add(data)


async def _answer(server: asyncio.StreamReader, client: asyncio.StreamWriter, noted: _Noted) -> bool:
    """Pass an answer to the client. Returns whether the server's connection can be used again. Raises OSError, or
    h11.RemoteProtocolError if the answer is not complete."""
    parser = h11.Connection(h11.CLIENT, MOST_HEAD)
    parser.send(h11.Request(method=noted.request.method, target=b"/", headers=[(b"Host", b"server")]))
    while True:
        head = await _next_head(parser, server)
        if not isinstance(head, h11.Response | h11.InformationalResponse):
            raise h11.RemoteProtocolError("the connection was closed")
        headers = _passed(head, HOP)
        if isinstance(head, h11.Response):
            break
        client.write(_head(head, headers))
    names, bare = dict(head.headers), noted.request.method == b"HEAD" or head.status_code in (204, 304)
    unbounded = not bare and b"content-length" not in names and b"transfer-encoding" not in names
    body = _Body(parser)
    noted.closes |= unbounded
    if noted.closes:
        headers.append((b"Connection", b"close"))
    noted.status = head.status_code
    if head.status_code < 400:
        replica = next((names[name] for name in REPLICA if name in names), b"")
        noted.answer = Answer(b"json" in names.get(b"content-type", b""), replica.decode("latin-1"))
    client.write(_head(head, headers) + body.begin)
    found = body.read()
    while True:
        if noted.answer is not None:
            if found and noted.answer.first_ms is None:
                noted.answer.first_ms = round((time.monotonic() - noted.began) * 1e3, 3)
            noted.answer.add(b"".join(found))
        await client.drain()
        if body.ended:
            noted.closes |= bool(body.rest)  # bytes that belong to no answer
            reusable = head.http_version == b"1.1" and b"close" not in _connection(head)
            return reusable and not unbounded and not body.rest
        data = await server.read(CHUNK)
        client.write(data)
        found = body.add(data)


def _refusal(request: h11.Request) -> bytes:
    """Returns the answer to a request that is not passed on; empty: it is."""
    names = dict(request.headers)
    host = urlsplit(f"//{names.get(b'host', b'').decode('latin-1')}").hostname or ""
    if not is_loopback(host) or b"origin" in names:
        return _plain(403, "this proxy serves programs on this machine, not web pages")
    return b"" if request.target.startswith(b"/") else _plain(400, "the request's target must be a path")


def _connection(message: h11.Request | h11.Response | h11.InformationalResponse) -> set[bytes]:
    values = (value for name, value in message.headers if name == b"connection")
    return {token.strip().lower() for value in values for token in value.split(b",")}


def _passed(message: h11.Request | h11.Response | h11.InformationalResponse, own: frozenset[bytes]) -> Headers:
    """Returns the headers that pass. Those that say where a body ends always do."""
    kept = (own | _connection(message)) - {b"content-length", b"transfer-encoding"}
    return [(name, value) for name, value in message.headers.raw_items() if name.lower() not in kept]


def _head(answer: h11.Response | h11.InformationalResponse, headers: Headers) -> bytes:
    return b"HTTP/1.1 %d %s\r\n" % (answer.status_code, answer.reason) + _lines(headers)


def _lines(headers: Headers) -> bytes:
    return b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n"


def _plain(status: int, text: str) -> bytes:
    """Returns an answer of the proxy's own, the last one on its connection."""
    body = f"{text}\n".encode()
    headers = [(b"Content-Type", b"text/plain"), (b"Content-Length", b"%d" % len(body)), (b"Connection", b"close")]
    return b"HTTP/1.1 %d \r\n" % status + _lines(headers) + body
