"""HTTP for sources that use a server: one client per server, server-sent events, errors as sentences."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.files import json_parts
from minitui.protocol import is_loopback
from minitui.sources.bounds import BoundedClient, Excess, httpx

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


class AnswerLimit:
    """Counts the pieces and characters of one answer, and enforces their limits."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pieces = self._characters = 0

    def add(self, text: str) -> None:
        """Count one piece. Raises EngineError when the answer is too large."""
        self._pieces += 1
        self._characters += len(text)
        if self._pieces > MAX_PIECES or self._characters > MAX_CHARACTERS:
            raise EngineError(
                f"{self._url} sent {self._characters:,} characters in {self._pieces:,} pieces as one answer; the "
                f"limits are {MAX_CHARACTERS:,} characters and {MAX_PIECES:,} pieces"
            )


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
    """Returns a client for one server, bound to the running event loop.

    `client`: an id by which a minitui server recognises the client that paused the engine.
    """
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

    503: EngineDead; 429: Overloaded; 400, 404, 413 and 422: InvalidRequest; other statuses: EngineError.
    """
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
    """Returns the message, the field and the code of an error in JSON, or None if `value` is not an error.

    The forms: {"error": {"message", "param", "code"}} (OpenAI, vLLM, SGLang), {"object": "error", "message", …} (older
    vLLM, SGLang), {"error": "message"} (llama.cpp, Ollama), {"detail": "message"} or a list of them (FastAPI).
    """
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
