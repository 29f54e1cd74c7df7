"""Parses and validates request bodies so that no body delays the requests of others.

Python's JSON parser and pydantic take microseconds for each container of a body, so the number of containers is limited
before the body is parsed. Large bodies are parsed in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from minitui.server.errors import RESPONSES, ApiError
from minitui.server.service import Service

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
    """A router whose endpoints get bodies that were parsed off the event loop."""

    def __init__(self, service: Service, **options: Any) -> None:
        super().__init__(route_class=type("Route", (_Route,), {"service": service}), responses=RESPONSES, **options)


class _Route(APIRoute):
    service: Service

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model = cast(type[BaseModel], self.body_field.field_info.annotation)

        async def handle(request: Request) -> Response:
            try:
                return await handler(_Parsed(request, model, self.service))
            except HTTPException as error:  # FastAPI's, instead of the exception of `json`
                if isinstance(error.__cause__, (ApiError, RequestValidationError)):
                    raise error.__cause__ from None
                raise

        return handle


class _Parsed(Request):
    """A request whose `json` returns the validated body. FastAPI accepts this in place of the value."""

    def __init__(self, request: Request, model: type[BaseModel], service: Service) -> None:
        super().__init__(request.scope, request.receive)
        self._model, self._service = model, service

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= SMALL:
            return _parse(self._model, body)
        return await self._service.in_thread(_parse, self._model, body)


def _parse(model: type[BaseModel], body: bytes) -> BaseModel:
    """Returns the validated body. Raises JSONDecodeError and RequestValidationError, as FastAPI does."""
    value = json.loads(body)
    try:
        return model.model_validate(value, from_attributes=True)  # as FastAPI does
    except ValidationError as error:
        _invalid(error, value)


def _invalid(error: ValidationError, value: Any) -> NoReturn:
    found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
    raise RequestValidationError(found, body=value) from None
