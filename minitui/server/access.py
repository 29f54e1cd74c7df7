"""Checks each request before it is parsed: Host and Origin, the API key, and the size of the body. The checks are plain
ASGI middleware, so that endpoints notice a disconnect at once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import time
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minitui.protocol import is_loopback
from minitui.server.bodies import Inflater, check_size
from minitui.server.errors import ApiError, as_api_error
from minitui.server.notices import HEADER, begin, header, notice
from minitui.server.origins import authority, is_allowed, is_same_origin
from minitui.server.service import Service
from minitui.server.settings import Role, ServerSettings
from minitui.server.strict import ignoring

OPEN = ("/", "/health", "/ping", "/ready", "/version")  # need no key
ASK = 'Basic realm="API key as the password, any user name", charset="UTF-8"'  # a browser then asks its user
ROLES = {
    "/v1/chat/completions": Role.CHAT, "/v1/completions": Role.CHAT, "/v1/responses": Role.CHAT,
    "/v1/messages": Role.CHAT, "/v1/messages/count_tokens": Role.CHAT, "/generate": Role.CHAT, "/tokenize": Role.CHAT,
    "/detokenize": Role.CHAT, "/minitui/submit": Role.CHAT, "/minitui/cancel": Role.CHAT,
    "/minitui/control": Role.CONTROL,
}
ANSWERS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")
# Read as JSON: `curl -d` sends the second type for every body, and scripts of web pages often the third.
LINGER_S = 3.0  # how long a refused body is still read
FORMS = ("", "application/x-www-form-urlencoded", "text/plain")


def role_needed(path: str, settings: ServerSettings) -> Role:
    """Returns the role that a path requires; unlisted paths require WATCH."""
    if path in OPEN or (path == "/metrics" and settings.open_metrics):
        return Role.NOBODY
    if path.startswith("/v1/responses/"):
        return Role.CHAT  # stored responses contain the texts of chats
    return ROLES.get(path, Role.WATCH)


class Guard:
    """ASGI middleware. Checks Host, Origin, key and size, in this order, and then calls the application."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self.app = app
        self.service = service
        self._direct: dict[str, ASGIApp] = getattr(app.state, "direct", {})
        self._turns = Turns()

    @property
    def settings(self) -> ServerSettings:
        return self.service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, notices = time.monotonic(), 0, begin()
        ignoring.set(self.settings.ignore_unknown_fields)
        # The first of each name. Starlette's Headers search their list, and encode the name, for each look-up.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        request_id = _request_id(headers)
        head = scope["method"] == "HEAD"
        if head:  # the answer of GET without its body; a copy, because the server's own scope must keep the method
            scope, receive = {**scope, "method": "GET"}, (ended := _Ended())

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode())]
                if notices:
                    added.append((HEADER.lower().encode(), header(notices).encode()))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
                if status >= 400:
                    self.service.metrics.refusal(status)
            if head and message["type"] == "http.response.body":
                if ended.is_set():
                    return
                message = {"type": "http.response.body", "body": b""}
                ended.set()  # an endless stream ends as if its reader had disconnected
            await send(message)

        try:
            self._check_origin(headers, [value for name, value in scope["headers"] if name == b"origin"])
            key, typed = _key(headers)
            is_page = "text/html" in headers.get("accept", "")
            scope.setdefault("state", {})["role"] = self._check_key(scope, key, typed, is_page)
            self._check_held(scope["path"], scope["state"]["role"])
            scope["state"]["owner"] = key if self.settings.keys else ""
            # Ranges are ignored, because Starlette's error for an invalid Range does not have OpenAI's format.
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"range"]
            if scope["method"] in ("POST", "PUT", "PATCH"):
                await self._turns.wait()
                receive = await self._read_body(headers, receive)
                _set_plain_json(scope, headers)
            is_json = (b"content-type", b"application/json") in scope["headers"]
            direct = self._direct.get(scope["path"]) if is_json and scope["method"] == "POST" else None
            await (direct or self.app)(scope, receive, watched_send)
        except Exception as error:
            if status:
                return  # too late for an error response; the error was logged
            answer = as_api_error(error)
            response = answer.response(scope["path"])
            sending: Send = watched_send
            if answer.status in (408, 413):  # the connection still has the rest of the body, so it must be closed
                response.headers["Connection"] = "close"
                sending = _reading_rest(receive, watched_send)
            await response(scope, receive, sending)
        finally:
            self.service.http_metrics.ended(scope, status, began)

    def _check_origin(self, headers: Mapping[str, str], origins: list[bytes]) -> None:
        """Refuse requests that a page of another site makes through a browser on this machine."""
        host = headers.get("host", "")
        if not self.settings.keys and host:
            found = authority(host)
            if found is None:
                raise ApiError(400, "the Host header is not an address such as localhost:8000", code="bad_http")
            if not is_loopback(found[0]) and not is_allowed(found[0], self.settings.allowed_hosts):
                raise ApiError(
                    403, f"the Host header says {found[0]!r}; without API keys, only localhost is accepted: "
                    f"start the server with --allowed-host {found[0]}, or with --api-key",
                )
        if len(origins) > 1:
            raise ApiError(400, "the request has several Origin headers", code="bad_http")
        origin = headers.get("origin", "")
        allowed = self.settings.cors_origins
        if origin and ("*" in allowed or origin in allowed):
            return
        if origin and origin != "null" and not is_same_origin(origin, host):
            raise ApiError(403, f"requests from pages of {origin!r} are refused: --cors-origin {origin} allows them")
        # same-site: the port or the subdomain differs
        if origin == "null" or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise ApiError(403, "requests from pages of other sites are refused")

    def _check_key(self, scope: Scope, key: str, typed: bool, is_page: bool) -> Role:
        role = self.settings.role_of(key)
        needed = role_needed(scope["path"], self.settings)
        if typed and self.settings.keys:
            role = min(role, Role.WATCH)  # a browser sends it with every request, also with those that pages cause
        if role >= needed:
            return role
        if role == Role.NOBODY:
            raise ApiError(
                401, "this server needs an API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'; in a "
                "browser, give the key as the password, with any user name",
                code="invalid_api_key", headers={"WWW-Authenticate": ASK if is_page else "Bearer"},
            )
        allowed, wanted = role.name.lower(), needed.name.lower()
        given = "a key in a browser" if typed else "this key"
        raise ApiError(403, f"{given} has the role {allowed}; {scope['path']} requires {wanted}")

    def _check_held(self, path: str, role: Role) -> None:
        """Refuse a request that would wait for a paused engine, if its caller cannot let the engine run. minitui's own
        chats wait, and say why. In slow motion, the answer has a notice."""
        if path not in ANSWERS or not self.service.held:
            return
        if self.service.gated and role < Role.CONTROL:
            raise ApiError(
                503, f"{self.service.held}: try again in a moment", code="engine_paused", headers={"Retry-After": "5"}
            )
        notice(self.service.held)

    async def _read_body(self, headers: Mapping[str, str], receive: Receive) -> Receive:
        """Read the body, within the limits of time and of its decompressed size. Returns a `receive` that delivers the
        decompressed body."""
        limit = self.settings.max_body
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(int(announced), limit)
        inflater, body = Inflater(headers), bytearray()
        try:
            async with asyncio.timeout(self.settings.body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        break  # the caller has disconnected; the endpoint will notice
                    body += inflater.push(message.get("body", b""), limit + 1 - len(body))
                    if len(body) > limit:
                        raise _too_large(len(body), limit)
                    if not message.get("more_body"):
                        inflater.end()
                        break
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.settings.body_s:g} s") from None
        check_size(body)
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return replay


class Turns:
    """Lets only a few requests begin in each turn of the event loop. Each takes about half a millisecond; between two
    turns, running streams send their tokens."""

    AT_ONCE = 8

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._begun = 0  # in this turn

    async def wait(self) -> None:
        """Wait until a request may begin."""
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next)
        self._begun += 1
        if self._begun > self.AT_ONCE:
            self._waiting.append(loop.create_future())
            await self._waiting[-1]

    def _next(self) -> None:
        """Begin a turn."""
        self._begun = 0
        while self._waiting and self._begun < self.AT_ONCE:
            if not (future := self._waiting.popleft()).done():  # the request was not cancelled
                future.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)


def owner_of(request: Request) -> str:
    """Returns whose request this is: its API key, or "" for all requests to a server without keys."""
    owner: str = request.scope["state"]["owner"]
    return owner


def _key(headers: Mapping[str, str]) -> tuple[str, bool]:
    """Returns the caller's key, and True if a person typed it as a password into a browser."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip(), False
    if (key := headers.get("x-api-key")) is not None:  # Anthropic's
        return key, False
    if scheme.lower() != "basic":
        return "", False
    with contextlib.suppress(ValueError):
        return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2], True
    return "", True


def _request_id(headers: Mapping[str, str]) -> str:
    """Returns the caller's X-Request-Id, or a new one if the caller sent none or one with unusual characters."""
    given = headers.get("x-request-id", "")
    return given if re.fullmatch(r"[!-~]{1,128}", given) else uuid.uuid4().hex


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the body has at least {size:,} bytes; the limit is {limit:,}", code="body_too_large")


def _reading_rest(receive: Receive, send: Send) -> Send:
    """Returns a `send` that ends the response when the client has sent its whole body, or after LINGER_S. If the
    connection closed before, the client's system would throw away the response that it has not read yet."""

    async def sending(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)
        if message["type"] == "http.response.body":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while (await receive()).get("more_body"):
                        pass
            await send({"type": "http.response.body", "body": b""})

    return sending


def _set_plain_json(scope: Scope, headers: Mapping[str, str]) -> None:
    """Describe the body as it is now: decompressed. Set the content type to JSON if it is one of FORMS."""
    dropped = {b"content-encoding", b"content-length"} if "content-encoding" in headers else set()
    added: list[Any] = []
    if headers.get("content-type", "").partition(";")[0].strip().lower() in FORMS:
        dropped.add(b"content-type")
        added.append((b"content-type", b"application/json"))
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in dropped] + added


class _Ended(asyncio.Event):
    """A `receive` that reports a disconnect once it is set."""

    async def __call__(self) -> Message:
        await self.wait()
        return {"type": "http.disconnect"}
