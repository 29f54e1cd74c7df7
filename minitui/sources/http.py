"""HTTP for sources that use a server: one client per server, server-sent events, errors as sentences.

Servers are not trusted. The client limits how much it reads:

    head     at most 100 KiB (h11's limit), and complete within the sum of the request's connect and read timeouts
    body     at most MAX_BODY bytes and BODY_S seconds, or the request's own Bounds; never compressed
    stream   unlimited (RECORDS) or at most MAX_ANSWER bytes (ANSWER); reading takes at most half of the event loop's
             time

If a server exceeds a limit, the client raises Excess, a transport error with the numbers in its message.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineDead, EngineError, InvalidRequest, not_installed
from engine.files import json_parts
from minitui.protocol import is_loopback
from minitui.sources.base import Source, Stream

try:
    import httpx
except ImportError as error:
    raise EngineError(not_installed("talking to a server", error, "serve")) from error

MAX_BODY = 8 << 20
BODY_S = 60.0
MAX_ANSWER = 256 << 20  # a token takes about 300 bytes
BRIEF_S = 0.002  # if a piece takes longer to handle, other work of the event loop then gets the same time
CONNECT_S = 5.0
CLOSE_S = 1.0  # the longest time to wait for connections to close
SILENCE_S = 35.0  # the read timeout; a minitui server sends events or comments at shorter intervals
MAX_EVENT = 8 << 20
QUIET_S = 600.0  # how long a queued request may receive only comments
MAX_VALUES = 4_000_000  # quotation marks, lists and objects in a JSON document; a value takes about 60 bytes of memory
MAX_CHARACTERS, MAX_PIECES = 16 << 20, 1 << 18  # the limits of one answer
MAX_MESSAGE = 2_000  # characters of a server's error message
# Errors after the connection was made.
LOST = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadTimeout)


@dataclass(frozen=True)
class Bounds:
    """Limits of a body in bytes and seconds; None: no limit."""

    size: int | None = MAX_BODY
    seconds: float | None = BODY_S


# Bounds as the `extensions` of a request.
LARGE = {"bounds": Bounds(64 << 20, 300.0)}  # a tokenizer, or the state of a large pool
ANSWER = {"bounds": Bounds(MAX_ANSWER, None)}
RECORDS = {"bounds": Bounds(None, None)}  # a record stream does not end


class Excess(httpx.ReadError):
    """A server sent too much, too slowly, or compressed data."""


class BoundedClient(httpx.AsyncClient):
    """httpx.AsyncClient with the limits that the module's docstring lists."""

    async def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send as httpx.AsyncClient.send does. Raises Excess if the server exceeds a limit."""
        request.headers["Accept-Encoding"] = "identity"
        timeouts = request.extensions.get("timeout", {})
        read_s = timeouts.get("read")
        try:
            async with asyncio.timeout(None if read_s is None else read_s + (timeouts.get("connect") or 0.0)):
                response = await super().send(request, stream=True, **options)
        except TimeoutError as error:
            raise Excess(f"{request.url} sent no complete head within {read_s:g} s", request=request) from error
        try:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise Excess(
                    f"{request.url} compressed its answer ({encoding[:40]}), but minitui asked for uncompressed data",
                    request=request,
                )
            failed = response.status_code >= 400
            bounds = Bounds() if failed else request.extensions.get("bounds", Bounds())
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _Bounded(response.stream, request, bounds)
            if not stream:
                await response.aread()
        except BaseException:
            await response.aclose()
            raise
        return response


async def give_turn(began: float) -> None:
    """Let the event loop do other work for as long as the caller has worked since `began`, as time.monotonic()."""
    spent = time.monotonic() - began
    await asyncio.sleep(spent if spent > BRIEF_S else 0.0)  # so a flood of data takes at most half of the time


class _Bounded(httpx.AsyncByteStream):
    """A body whose iteration raises Excess when it exceeds its bounds."""

    def __init__(self, inner: httpx.AsyncByteStream, request: httpx.Request, bounds: Bounds) -> None:
        self._inner, self._request, self._bounds = inner, request, bounds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, seconds = self._bounds.size, self._bounds.seconds
        read, began = 0, time.monotonic()
        async for piece in self._inner:
            read += len(piece)
            if size is not None and read > size:
                raise self._excess(f"more than {size >> 20} MiB")
            if seconds is not None and time.monotonic() - began > seconds:
                raise self._excess(f"only {read:,} bytes in {seconds:g} s")
            handed_out = time.monotonic()
            yield piece
            await give_turn(handed_out)

    def _excess(self, what: str) -> Excess:
        return Excess(f"{self._request.url} sent {what}", request=self._request)

    async def aclose(self) -> None:
        await self._inner.aclose()


class Overloaded(InvalidRequest):
    """The server accepts no more requests for now (429)."""


def normalise(url: str) -> str:
    """Returns a server's base address, from `url` as typed by a user. Raises InvalidRequest if it is not an address."""
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    text = text.rstrip("/")
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname is not None and (parts.port or 1) > 0
        httpx.URL(text)  # also checks the characters of the host name
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise InvalidRequest(f"{url!r} is not a server's address: expected something like http://host:8000", "url")
    return text.removesuffix("/v1")


@functools.cache
def _tls_context(https: bool) -> ssl.SSLContext:
    """Returns the TLS settings. Certificates are loaded for https only; this takes 80 ms, so the result is cached."""
    return httpx.create_ssl_context() if https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def open_client(url: str, key: str = "", client: str = "") -> httpx.AsyncClient:
    """Returns a client for one server, bound to the running event loop. `client`: an id by which a minitui server
    recognises the client that paused the engine."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if client:
        headers["X-Minitui-Client"] = client
    host = urlsplit(url).hostname or ""
    timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
    limits = httpx.Limits(max_connections=None)
    return BoundedClient(
        base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=not is_loopback(host),
        verify=_tls_context(url.startswith("https:")),
    )


async def close_client(client: httpx.AsyncClient) -> None:
    """Close the connections of a client; wait at most CLOSE_S for the server."""
    closing = asyncio.create_task(client.aclose())
    await asyncio.wait({closing}, timeout=CLOSE_S)


async def check(response: httpx.Response) -> httpx.Response:
    """Returns the response if it is successful. Else raises an error with the server's own message, if there is one.
    503: EngineDead; 429: Overloaded; 400, 404, 413 and 422: InvalidRequest; other statuses: EngineError."""
    if response.status_code < 400:
        return response
    body = await response.aread()
    message, param = f"{response.request.url} answered {response.status_code} {response.reason_phrase}", None
    with contextlib.suppress(EngineError):
        message, param, _ = error_in(load_json(body)) or (message, param, "")
    if response.status_code == 401:
        message += " (set the key with MINITUI_KEY or --key)"
    if response.status_code == 503:
        raise EngineDead(message)
    if response.status_code == 429:
        raise Overloaded(message)
    if response.status_code in (400, 404, 413, 422):
        raise InvalidRequest(message, str(param or "request")[:MAX_MESSAGE])
    raise EngineError(message)


def error_in(value: Any) -> tuple[str, str | None, str] | None:
    """Returns the message, the field and the code of an error in JSON, or None if `value` is not an error. The forms:
    {"error": {"message", "param", "code"}} (OpenAI, vLLM, SGLang), {"object": "error", "message", …} (older vLLM,
    SGLang), {"error": "message"} (llama.cpp, Ollama), {"detail": "message"} or a list of them (FastAPI)."""
    if not isinstance(value, dict):
        return None
    error: Any = value.get("error") or (value if value.get("object") == "error" else value.get("detail"))
    if isinstance(error, list) and error:  # FastAPI: one entry for each wrong field
        found = error[0] if isinstance(error[0], dict) else {}
        place = found.get("loc")
        fields = [str(part) for part in place if part != "body"] if isinstance(place, list) else []
        error = {"message": ": ".join([*fields[:1], str(found.get("msg"))]), "param": ".".join(fields[:8])}
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        return None
    param = error.get("param")
    message = str(error.get("message") or "an error without a message")[:MAX_MESSAGE]
    return message, str(param)[:MAX_MESSAGE] if param else None, str(error.get("code"))


def reason_of(error: Exception) -> str:
    """Returns a short description of a transport error."""
    message, cause = str(error), error.__cause__ or error.__context__
    if isinstance(error, Excess):
        return message
    while cause is not None:  # httpx reports "All connection attempts failed"; the cause is more specific
        if isinstance(cause, ConnectionRefusedError):
            return "no server listens on this port"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {CONNECT_S:g} s"
    if isinstance(error, httpx.TimeoutException):
        return f"no data for {SILENCE_S:g} s"
    if isinstance(error, LOST) and ("closed" in message or "disconnected" in message or not message):
        return "the server closed the connection"
    return message or type(error).__name__


def unreachable(url: str, error: Exception) -> EngineDead:
    """Returns an EngineDead that describes a transport error in a sentence."""
    if isinstance(error, LOST):
        return EngineDead(f"the connection to {url} was lost: {reason_of(error)}")
    return EngineDead(f"{url} cannot be reached ({reason_of(error)}): is the server running, and is the address right?")


def load_json(text: str | bytes) -> Any:
    """Returns the value of a server's JSON document. Raises EngineError if it is not JSON, too large or too deep."""
    document = text.encode("utf-8", "replace") if isinstance(text, str) else text
    parts = json_parts(document)
    if parts > MAX_VALUES:
        raise EngineError(f"the server sent a JSON document of {parts:,} parts; the limit is {MAX_VALUES:,}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        start = document[:80].decode("utf-8", "replace")
        raise EngineError(f"the server sent something that is not JSON: {start!r}") from error


async def server_events(response: httpx.Response, quiet_s: float | None = QUIET_S) -> AsyncIterator[tuple[str, str]]:
    """Yields (name, data) of server-sent events; the name is "" if the event has none.

    Lines end with \\n or \\r\\n. Raises EngineError for an event of more than MAX_EVENT bytes, or after `quiet_s`
    seconds without an event.
    """
    url, last = response.request.url, time.monotonic()
    name, data, size = "", [], 0  # size: bytes of the unfinished event
    rest: list[bytes] = []  # the parts of an unfinished line
    async for piece in response.aiter_bytes():
        if quiet_s is not None and time.monotonic() - last > quiet_s:
            raise EngineError(f"{url} sent no event for {quiet_s:g} s")
        size += len(piece)
        head, *tail = piece.split(b"\n")
        rest.append(head)
        for following in tail:
            line = b"".join(rest).removesuffix(b"\r").decode("utf-8", "replace")
            rest = [following]
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif line.startswith("event:"):
                name = line[6:].strip()
            elif not line:
                if data:
                    last = time.monotonic()
                    yield name, "\n".join(data)
                name, data, size = "", [], 0
            elif line.startswith(":") and not data:
                size = 0  # a comment, which keeps the connection open
        if size > MAX_EVENT:
            raise EngineError(f"{url} sent an event of more than {MAX_EVENT >> 20} MiB")


def parse(data: str) -> dict[str, Any]:
    """Returns the JSON object of an event. If the object is an error, raises EngineDead or EngineError."""
    value = load_json(data)
    if "\\u" in data:  # JSON can hold lone surrogates, which cannot be shown, stored or sent
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    error = error_in(value)
    if error is not None:
        message, _, code = error
        raise EngineDead(message) if code in ("engine_dead", "stopping") else EngineError(message)
    return value


class ServerStream(Stream):
    """An answer that a server writes as server-sent events. Subclasses take the data of each event in `_event`."""

    unlike = "does not answer like an OpenAI-compatible server ({}): is the address right?"

    def __init__(
        self, source: Source, http: httpx.AsyncClient, url: str, path: str, body: dict[str, Any],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._url = url
        self._pieces = self._characters = 0
        self._ended_here = False  # the reader ended the request by closing the connection
        self._task = source.keep(self._read(http, path, body, headers or {}))

    async def _read(self, http: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            async with http.stream("POST", path, json=body, headers=headers, extensions=ANSWER) as response:
                await check(response)
                self._opened()
                async for _, data in server_events(response):
                    if self._event(data):
                        break
            await self._complete()
        except EngineError as error:
            self.put(error)
        except (httpx.HTTPError, OSError) as error:
            self.put(unreachable(self._url, error))
        except (LookupError, TypeError, AttributeError, ValueError) as error:  # unexpected JSON
            self.put(EngineError(f"{self._url} {self.unlike.format(error)}"))
        except asyncio.CancelledError:
            if not self._ended_here:
                self.put(EngineDead(f"the connection to {self._url} was closed"))
                raise
            self._cancelled()

    def _opened(self) -> None:
        """The server has accepted the request."""

    def _event(self, data: str) -> bool:
        """Take the data of an event; returns True if it is the last one."""
        raise NotImplementedError

    async def _complete(self) -> None:
        """All events have been taken. Raises EngineDead if the answer is not complete."""

    def _cancelled(self) -> None:
        """The answer was cancelled here."""

    def _count(self, text: str) -> None:
        """Count a piece of the answer. Raises EngineError when the answer is too large."""
        self._pieces += 1
        self._characters += len(text)
        if self._pieces > MAX_PIECES or self._characters > MAX_CHARACTERS:
            raise EngineError(
                f"{self._url} sent {self._characters:,} characters in {self._pieces:,} pieces as one answer; the "
                f"limits are {MAX_CHARACTERS:,} characters and {MAX_PIECES:,} pieces"
            )
