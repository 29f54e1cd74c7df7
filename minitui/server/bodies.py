"""Parses and validates request bodies so that no body delays the requests of others. Python's JSON parser and pydantic
take microseconds for each container of a body, so the number of containers is limited before the body is parsed. Large
bodies are parsed in a thread."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from minitui.server.errors import RESPONSES, ApiError
from minitui.server.service import Service

WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's number for the format
SMALL = 16 << 10  # bytes; smaller bodies are parsed on the event loop, without the delay of a thread
MAX_CONTAINERS = 20_000  # lists and objects; 2,000 turns of an agent with tools have about 10,000
MAX_VALUES = 400_000  # in lists and objects; the longest prompts in token ids have about 250,000
MAX_STRINGS = 100_000  # with the keys of objects


def check_size(body: bytes | bytearray) -> None:
    """Raises ApiError 400 if a JSON body has too many values, strings or containers. Takes about 10 ms per MB."""
    quotes = body.count(b'"') - body.count(rb"\"")  # the second are inside strings
    _check("strings", quotes // 2, MAX_STRINGS)
    if _containers(body) > MAX_CONTAINERS or body.count(b",") >= MAX_VALUES:
        # Brackets and commas inside strings do not count. Every second part between quotes is outside of strings.
        outside = b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
        _check("lists and objects", _containers(outside), MAX_CONTAINERS)
        _check("values", outside.count(b",") + 1, MAX_VALUES)


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise ApiError(400, f"the body has {count:,} {what}; the limit is {most:,}", code="body_too_large")


def _containers(text: bytes | bytearray) -> int:
    return text.count(b"[") + text.count(b"{")


class Endpoints(APIRouter):
    """A router whose endpoints get bodies that were parsed off the event loop. `direct`: path -> a POST endpoint,
    without FastAPI's layers, which take 0.3 ms."""

    def __init__(self, service: Service, **options: Any) -> None:
        self.direct: dict[str, ASGIApp] = {}
        kind = type("Route", (_Route,), {"service": service, "direct": self.direct})
        super().__init__(route_class=kind, responses=RESPONSES, **options)


class _Route(APIRoute):
    service: Service
    direct: dict[str, ASGIApp]

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model = cast(type[BaseModel], self.body_field.field_info.annotation)

        async def direct(scope: Scope, receive: Receive, send: Send) -> None:
            scope["route"] = self
            request = _Parsed(scope, receive, model, self.service)
            response = await self.endpoint(await request.json(), request)
            await response(scope, receive, send)

        kinds = inspect.get_annotations(self.endpoint)
        if [*kinds] == ["body", "request", "return"] and kinds["return"] == "Response":
            self.direct[self.path] = direct

        async def handle(request: Request) -> Response:
            try:
                return await handler(_Parsed(request.scope, request.receive, model, self.service))
            except HTTPException as error:  # FastAPI's, instead of the exception of `json`
                if isinstance(error.__cause__, (ApiError, RequestValidationError)):
                    raise error.__cause__ from None
                raise

        return handle


class _Parsed(Request):
    """A request whose `json` returns the validated body. FastAPI accepts this in place of the value."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel], service: Service) -> None:
        super().__init__(scope, receive)
        self._model, self._service = model, service

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= SMALL:
            return _parse(self._model, body)
        return await self._service.in_thread(_parse, self._model, body)


def _parse(model: type[BaseModel], body: bytes) -> BaseModel:
    """Returns the validated body. Raises ApiError and RequestValidationError."""
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}", None, "bad_json") from None
    except (ValueError, RecursionError):
        reasons = "it is not UTF-8, is nested too deeply, or has a number of more than 4,300 digits"
        raise ApiError(400, f"the body cannot be read: {reasons}") from None
    try:
        return model.model_validate(value, from_attributes=True)  # as FastAPI does
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found, body=value) from None


class Inflater:
    """Turns the pieces of a body as sent into its bytes. Without Content-Encoding, they are the same. It works piece by
    piece: a small, dense body holds neither the memory nor the event loop."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in (*WINDOW, "identity", ""):
            raise ApiError(
                415, f"the body's encoding {coding[:64]!r} is not supported: use gzip, deflate or none",
                code="unsupported_encoding",
            )
        self.coding = coding if coding in WINDOW else ""
        self._stream = zlib.decompressobj(WINDOW[coding]) if self.coding else None

    def push(self, piece: bytes, most: int) -> bytes:
        """Returns the next bytes of the body, at most `most` of them."""
        if self._stream is None:
            return piece[:most]
        try:
            found = self._stream.decompress(piece, most)
        except zlib.error as error:
            raise self._damaged(str(error)) from error
        if self._stream.unused_data:
            raise self._damaged("there are bytes after its end")
        return found

    def end(self) -> None:
        """Raises ApiError if the body ended too early."""
        if self._stream is not None and not self._stream.eof:
            raise self._damaged("its end is missing")

    def _damaged(self, reason: str) -> ApiError:
        return ApiError(400, f"the body is not valid {self.coding}: {reason}", code="bad_encoding")
