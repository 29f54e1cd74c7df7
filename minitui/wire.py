"""HTTP as the clients of servers need it: one client per server, server-sent events, errors as sentences."""

from __future__ import annotations

import functools
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineDead, EngineError, InvalidRequest, not_installed
from minitui.server.settings import is_loopback

try:
    import httpx
except ImportError as error:
    raise EngineError(not_installed("talking to a server", error, "serve")) from error

CONNECT_S = 5.0
SILENCE_S = 35.0  # servers send at least a comment more often
MAX_EVENT = 64 << 20
LOST = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadTimeout)  # there was a connection


class Overloaded(InvalidRequest):
    """A server takes no more requests for now (429)."""


def normalise(url: str) -> str:
    """A server's base address, as a user may type it. Raises InvalidRequest if it is none."""
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    text = text.rstrip("/")
    parts = urlsplit(text)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname is not None and (parts.port or 1) > 0
    except ValueError:
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
    return httpx.AsyncClient(
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
        error = json.loads(body)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    if response.status_code == 401:
        message += " (minitui takes it from MINITUI_KEY, or --key)"
    if response.status_code == 503:
        raise EngineDead(message)
    if response.status_code == 429:
        raise Overloaded(message)
    if response.status_code in (400, 404, 413, 422):
        raise InvalidRequest(message, str(param or "request"))
    raise EngineError(message)


def reason_of(error: Exception) -> str:
    """A transport error in a few words."""
    said, cause = str(error), error.__cause__ or error.__context__
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


async def server_events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """(name, data) of server-sent events; name "" if it has none. Lines end with \\n or \\r\\n and nothing else."""
    name, data, rest = "", "", b""
    async for piece in response.aiter_bytes():
        rest += piece
        if len(rest) + len(data) > MAX_EVENT:
            raise EngineError(f"{response.request.url} sent an event of more than {MAX_EVENT >> 20} MiB")
        *lines, rest = rest.replace(b"\r\n", b"\n").split(b"\n")
        for raw in lines:
            line = raw.decode("utf-8", "replace")
            if line.startswith("data:"):
                value = line[5:].removeprefix(" ")
                data = f"{data}\n{value}" if data else value
            elif line.startswith("event:"):
                name = line[6:].strip()
            elif not line:
                if data:
                    yield name, data
                name, data = "", ""


def parse(data: str) -> dict[str, Any]:
    """The JSON object of an event. An error in it is raised as check() would."""
    try:
        value = json.loads(data)
        if "\\u" in data:  # half a surrogate pair is no text: it could be neither shown nor kept nor sent
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise EngineError(f"the server sent an event that is no JSON: {data[:80]!r}") from error
    if isinstance(value, dict) and "error" in value and isinstance(value["error"], dict):
        said = str(value["error"].get("message", "an error"))
        raise EngineDead(said) if value["error"].get("code") in ("engine_dead", "stopping") else EngineError(said)
    return value
