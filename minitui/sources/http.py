"""HTTP as the clients of servers need it: one client per server, server-sent events, errors as sentences."""

from __future__ import annotations

import functools
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineDead, EngineError, InvalidRequest
from minitui.protocol import is_loopback
from minitui.sources.bounds import BoundedClient, Excess, httpx

CONNECT_S = 5.0
SILENCE_S = 35.0  # servers send at least a comment more often
MAX_EVENT = 8 << 20
QUIET_S = 600.0  # an answer may wait in a queue for so long, with nothing but comments
MAX_VALUES = 4_000_000  # strings, lists and objects of a JSON document: each takes some 60 bytes of memory
MAX_CHARACTERS, MAX_PIECES = 16 << 20, 1 << 18  # of an answer
MAX_SAID = 2_000  # characters of a server's own message
LOST = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadTimeout)  # there was a connection


class Answer:
    """Counts what comes of an answer. EngineError says when that is more than an answer can be."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pieces = self._characters = 0

    def add(self, text: str) -> None:
        """A piece of it."""
        self._pieces += 1
        self._characters += len(text)
        if self._pieces > MAX_PIECES or self._characters > MAX_CHARACTERS:
            raise EngineError(
                f"{self._url} sent {self._characters:,} characters in {self._pieces:,} pieces as one answer; at most "
                f"{MAX_CHARACTERS:,} in {MAX_PIECES:,} are taken"
            )


class Overloaded(InvalidRequest):
    """A server takes no more requests for now (429)."""


def normalise(url: str) -> str:
    """A server's base address, as a user may type it. Raises InvalidRequest if it is none."""
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    text = text.rstrip("/")
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname is not None and (parts.port or 1) > 0
        httpx.URL(text)  # which also knows what a name may hold
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise InvalidRequest(f"{url!r} is no address of a server: it looks like http://host:8000", "url")
    return text.removesuffix("/v1")


@functools.cache
def _trusted(secure: bool) -> ssl.SSLContext:
    """Whose certificates count, where any are asked for. Loading them takes 80 ms: once is enough."""
    return httpx.create_ssl_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def open_client(url: str, key: str = "", client: str = "") -> httpx.AsyncClient:
    """A client for one server; belongs to the running event loop."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if client:  # by which a minitui server knows whose the gate is
        headers["X-Minitui-Client"] = client
    host = urlsplit(url).hostname or ""
    timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
    limits = httpx.Limits(max_connections=None)
    return BoundedClient(
        base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=not is_loopback(host),
        verify=_trusted(url.startswith("https:")),
    )  # fmt: skip


async def check(response: httpx.Response) -> httpx.Response:
    """The response if it is one of success; else raises its sentence: EngineDead for 503, Overloaded for 429, and
    InvalidRequest for a 400."""
    if response.status_code < 400:
        return response
    body = await response.aread()
    message, param = f"{response.request.url} answered {response.status_code} {response.reason_phrase}", None
    try:
        error = load_json(body)["error"]
        message, param = str(error["message"])[:MAX_SAID], error.get("param")
    except (EngineError, KeyError, TypeError, AttributeError):
        pass
    if response.status_code == 401:
        message += " (minitui takes it from MINITUI_KEY, or --key)"
    if response.status_code == 503:
        raise EngineDead(message)
    if response.status_code == 429:
        raise Overloaded(message)
    if response.status_code in (400, 404, 413, 422):
        raise InvalidRequest(message, str(param or "request")[:MAX_SAID])
    raise EngineError(message)


def reason_of(error: Exception) -> str:
    """A transport error in a few words."""
    said, cause = str(error), error.__cause__ or error.__context__
    if isinstance(error, Excess):
        return said
    while cause is not None:  # "All connection attempts failed" says less than what they failed of
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {CONNECT_S:g} s"
    if isinstance(error, httpx.TimeoutException):
        return f"nothing came for {SILENCE_S:g} s"
    if isinstance(error, LOST) and ("closed" in said or "disconnected" in said or not said):
        return "it hung up"
    return said or type(error).__name__


def unreachable(url: str, error: Exception) -> EngineDead:
    """A transport error as a sentence."""
    if isinstance(error, LOST):
        return EngineDead(f"the connection to {url} was lost: {reason_of(error)}")
    return EngineDead(f"{url} cannot be reached ({reason_of(error)}): is the server running, and is the address right?")


def load_json(text: str | bytes) -> Any:
    """A JSON document that a server sent. Raises EngineError if it is none, or has too many parts or levels."""
    document = text.encode("utf-8", "replace") if isinstance(text, str) else text
    parts = sum(document.count(sign) for sign in (b"[", b"{", b'"'))
    if parts > MAX_VALUES:
        raise EngineError(f"the server sent a JSON document of {parts:,} parts; at most {MAX_VALUES:,} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        start = document[:80].decode("utf-8", "replace")
        raise EngineError(f"the server sent something that is no JSON: {start!r}") from error


async def server_events(response: httpx.Response, quiet_s: float | None = QUIET_S) -> AsyncIterator[tuple[str, str]]:
    """(name, data) of server-sent events; name "" if it has none. Lines end with \\n or \\r\\n and nothing else.
    Raises EngineError for an event of more than MAX_EVENT bytes, or if none comes for `quiet_s`."""
    url, last = response.request.url, time.monotonic()
    name, data, size = "", [], 0  # size: of the event as far as it has come
    rest: list[bytes] = []  # of a line that has no end yet
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
                size = 0  # comments keep the connection alive
        if size > MAX_EVENT:
            raise EngineError(f"{url} sent an event of more than {MAX_EVENT >> 20} MiB")


def parse(data: str) -> dict[str, Any]:
    """The JSON object of an event. An error in it is raised as check() would."""
    value = load_json(data)
    if "\\u" in data:  # half a surrogate pair is no text: it could be neither shown nor kept nor sent
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    if isinstance(value, dict) and "error" in value and isinstance(value["error"], dict):
        said = str(value["error"].get("message", "an error"))[:MAX_SAID]
        raise EngineDead(said) if value["error"].get("code") in ("engine_dead", "stopping") else EngineError(said)
    return value
