"""What is decided before a request is read: who asks, from which page, and how large the body may be.

Plain ASGI, so that disconnects reach the endpoints as they come.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minitui.protocol import is_loopback
from minitui.server.errors import ApiError, as_api_error
from minitui.server.origins import authority, is_same_origin
from minitui.server.service import Service
from minitui.server.settings import Role, ServerSettings

OPEN = {"/health": Role.NOBODY, "/ready": Role.NOBODY}
ROLES = {
    "/v1/chat/completions": Role.CHAT, "/v1/completions": Role.CHAT, "/generate": Role.CHAT, "/tokenize": Role.CHAT,
    "/detokenize": Role.CHAT, "/minitui/submit": Role.CHAT, "/minitui/cancel": Role.CHAT,
    "/minitui/control": Role.CONTROL,
}  # fmt: skip
FORMS = ("", "application/x-www-form-urlencoded")  # what `curl -d` says of a body it knows nothing about


def role_needed(path: str) -> Role:
    """What a caller must be allowed to ask for this path; everything that is not listed needs the least."""
    return OPEN.get(path, ROLES.get(path, Role.WATCH))


class Guard:
    """ASGI middleware: address, origin, key, size, in this order; then the application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    @property
    def settings(self) -> ServerSettings:
        return self.service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if message["status"] >= 400:
                    self.service.meters.refusal(message["status"])
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_origin(headers)
            scope.setdefault("state", {})["role"] = self._check_key(scope, headers)
            # Files are sent whole: Starlette would refuse a wrong Range in a shape of its own.
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"range"]
            if scope["method"] in ("POST", "PUT", "PATCH"):
                receive = await self._read_body(headers, receive)
                _call_it_json(scope, headers)
            await self.app(scope, receive, watched_send)
        except Exception as error:
            if started:
                return  # it has been answered and logged
            answer = as_api_error(error)
            response = answer.response()
            if answer.status in (408, 413):  # what was not read stands in the connection
                response.headers["Connection"] = "close"
            await response(scope, receive, watched_send)

    def _check_origin(self, headers: Headers) -> None:
        """A web page elsewhere must not use a browser on this machine to reach the engine."""
        host = headers.get("host", "")
        if not self.settings.keys and host:
            found = authority(host)
            if found is None:
                raise ApiError(400, "the Host header is no address, such as localhost:8000", code="bad_http")
            if not is_loopback(found[0]):
                raise ApiError(403, f"the Host header says {found[0]!r}; without a key only this machine is served")
        origins = headers.getlist("origin")
        if len(origins) > 1:
            raise ApiError(400, "there are several Origin headers", code="bad_http")
        origin = origins[0] if origins else ""
        allowed = self.settings.cors_origins
        if origin and ("*" in allowed or origin in allowed):
            return
        if origin and origin != "null" and not is_same_origin(origin, host):
            raise ApiError(403, f"requests of pages from {origin!r} are not served")
        if origin == "null" or headers.get("sec-fetch-site") in ("cross-site", "same-site"):  # same-site: another port
            raise ApiError(403, "requests of pages from elsewhere are not served")

    def _check_key(self, scope: Scope, headers: Headers) -> Role:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        role = self.settings.role_of(key.strip() if scheme.lower() == "bearer" else None)
        needed = role_needed(scope["path"])
        if role >= needed:
            return role
        if role == Role.NOBODY:
            raise ApiError(
                401, "this server needs an API key: send it as 'Authorization: Bearer KEY'", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        allowed, wanted = role.name.lower(), needed.name.lower()
        raise ApiError(403, f"this key allows to {allowed}; {scope['path']} needs one that allows to {wanted}")

    async def _read_body(self, headers: Headers, receive: Receive) -> Receive:
        """The body, within its limits; later calls of the receiver it returns tell of the disconnect."""
        limit = self.settings.max_body
        told = headers.get("content-length", "")
        if told.isdigit() and int(told) > limit:
            raise _too_large(int(told), limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        break  # the caller has gone; the endpoint will see it
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_large(len(body), limit)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self.settings.body_s:g} s") from None
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return replay


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the body has {size:,} bytes or more; this server takes {limit:,}", code="body_too_large")


def _call_it_json(scope: Scope, headers: Headers) -> None:
    """Every body here is JSON, also one that `curl -d` labelled as a form."""
    said = headers.get("content-type", "").partition(";")[0].strip().lower()
    if said in FORMS:
        kept: list[Any] = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*kept, (b"content-type", b"application/json")]
